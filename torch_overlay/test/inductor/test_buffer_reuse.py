# Owner(s): ["module: inductor"]
"""A buffer that is kept for a later one does not raise the peak."""

import functools
from unittest import mock

import torch
from torch._inductor import config, memory
from torch._inductor.utils import run_and_get_code
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.common_utils import run_tests, TestCase


ROWS, SIDE = 4096, 64
# Bytes of one of the narrow results.
UNIT = ROWS * SIDE * 4


def overwrites(x, wide, back, wider, narrow):
    """Four units that relu writes over; later six, with a free one before them."""
    hidden = torch.relu(x @ wide) @ back
    total = (hidden @ narrow).sum()
    sums = (x @ (wider + total)) @ wider[:1].t()
    return (x * sums) @ narrow


def live_at_most(call):
    """The most bytes that are allocated at once while ``call`` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        call()
    events = run.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def stays_in_registers(*factors):
    """Sums of a product that is stored for its readers, if these are other kernels."""
    product = functools.reduce(torch.mul, factors)
    return product.sin().sum(), product.cos().sum()


class BufferReusePeakTest(TestCase):
    def measured(self, reuse):
        torch._dynamo.reset()
        shapes = (ROWS, SIDE), (SIDE, 4 * SIDE), (4 * SIDE, SIDE), (SIDE, 6 * SIDE)
        generator = torch.Generator().manual_seed(0)
        given = [
            torch.randn(shape, generator=generator) / SIDE
            for shape in (*shapes, (SIDE, SIDE))
        ]
        with torch.no_grad(), config.patch(allow_buffer_reuse=reuse):
            compiled = torch.compile(overwrites)
            found, (code,) = run_and_get_code(compiled, *given)
            self.assertEqual(found, overwrites(*given))
            return live_at_most(lambda: compiled(*given)), code

    def test_a_kernel_that_overwrites(self):
        peak, code = self.measured(True)
        without, _ = self.measured(False)
        self.assertIn("# reuse", code)
        self.assertLess(without, 6.5 * UNIT)
        self.assertLessEqual(peak, without)

    def estimated(self, function, *given):
        """The largest peak that is estimated of any order of its kernels."""
        torch._dynamo.reset()
        estimates = []

        def estimate(*args):
            estimates.append(inner(*args))
            return estimates[-1]

        inner = memory.estimate_peak_memory
        with torch.no_grad(), mock.patch.object(memory, inner.__name__, estimate):
            torch.compile(function)(*given)
        # Nothing else orders them, before any is generated.
        self.assertTrue(estimates)
        return max(peak for peak, _ in estimates)

    def test_what_orders_kernels(self):
        factors = [torch.ones(ROWS, SIDE) for _ in range(6)]
        self.assertLess(self.estimated(stays_in_registers, *factors), UNIT / 2)


if __name__ == "__main__":
    run_tests()
