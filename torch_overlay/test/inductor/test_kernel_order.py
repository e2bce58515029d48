# Owner(s): ["module: inductor"]
"""A kernel of early and of late nodes does not take the late ones' work along."""

from unittest import mock

import torch
from torch._inductor import config, memory
from torch.testing._internal.common_utils import run_tests, TestCase


ROWS, SIDE, LAYERS = 512, 64, 6
# Bytes of what a layer makes again.
UNIT = ROWS * 4 * SIDE * 4


def backward_like(x, condition, *weights):
    """Gradients of layers; each makes two units again, which only it needs."""
    early = condition.sin()
    first = early @ condition
    grad = x
    for wide, back in zip(weights[::2], weights[1::2]):
        again = torch.relu(x @ wide)
        grad = ((grad @ wide) * again) @ back
    return first, early * grad[:SIDE]


class KernelOrderTest(TestCase):
    def test_what_is_fused_over_a_long_way(self):
        generator = torch.Generator().manual_seed(0)
        weights = (SIDE, 4 * SIDE), (4 * SIDE, SIDE)
        shapes = (ROWS, SIDE), (SIDE, SIDE), *(weights * LAYERS)
        given = [torch.randn(s, generator=generator) / SIDE for s in shapes]
        estimates = {}

        def result(order, peak, method):
            estimates[method] = peak
            return inner(order, peak, method)

        inner = memory.PeakMemoryResult
        torch._dynamo.reset()
        with (
            torch.no_grad(),
            # A backward's nodes are not moved next to what reads them.
            config.patch(reorder_for_locality=False),
            mock.patch.object(memory, inner.__name__, result),
        ):
            found = torch.compile(backward_like)(*given)
        self.assertEqual(found, backward_like(*given))
        # A layer's two beside what comes in or goes out, not those of all layers.
        ours = estimates.pop("topological_sort_last")
        self.assertLess(ours, 3.5 * UNIT)
        self.assertGreater(min(estimates.values()), LAYERS * UNIT)


if __name__ == "__main__":
    run_tests()
