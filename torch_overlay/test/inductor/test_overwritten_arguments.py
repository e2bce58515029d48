# Owner(s): ["module: inductor"]
"""Orders of kernels are compared with results written over arguments."""

from unittest import mock

import torch
from torch._inductor import memory
from torch.testing._internal.common_utils import run_tests, TestCase


ROWS, SIDE = 4096, 64
# Bytes of one of the narrow results.
UNIT = ROWS * SIDE * 4


def writes_over(x, wide, back):
    """Four units that relu writes over, and one that is returned."""
    return torch.relu(x @ wide) @ back


class OverwrittenArgumentsTest(TestCase):
    def estimated(self, function, *given):
        """The largest peak that is estimated of any order of its kernels."""
        torch._dynamo.reset()
        peaks = []

        def result(order, peak, method):
            peaks.append(peak)
            return inner(order, peak, method)

        inner = memory.PeakMemoryResult
        with torch.no_grad(), mock.patch.object(memory, inner.__name__, result):
            torch.compile(function)(*given)
        return max(peaks)

    def test_a_result_over_an_argument(self):
        shapes = (ROWS, SIDE), (SIDE, 4 * SIDE), (4 * SIDE, SIDE)
        given = [torch.ones(shape) for shape in shapes]
        self.assertLess(self.estimated(writes_over, *given), 5.5 * UNIT)


if __name__ == "__main__":
    run_tests()
