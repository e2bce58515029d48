# Owner(s): ["module: inductor"]
"""Inputs count by what is stored, whatever kernels read of them."""

from unittest import mock

import torch
import torch.nn.functional as F
from torch._inductor import memory
from torch.testing._internal.common_utils import run_tests, TestCase


ROWS, SIDE = 4096, 64
# Bytes of one of the narrow results.
UNIT = ROWS * SIDE * 4


def saves_parts(x, wide, narrow):
    """Each half of a product has a kernel in the backward; parts of another have one."""
    one, other = (x @ wide).chunk(2, -1)
    halves = torch.sin(one) @ narrow + torch.cos(other) @ narrow
    packed = (x @ wide).view(8, ROWS // 8, 2, 4, SIDE // 4)
    query, key = packed.permute(2, 0, 3, 1, 4).unbind()
    return halves.sum() + F.scaled_dot_product_attention(query, key, key).sum()


class InputSizesTest(TestCase):
    def test_what_a_kernel_reads_of_an_input(self):
        torch._dynamo.reset()
        shapes = (ROWS, SIDE), (SIDE, 2 * SIDE), (SIDE, SIDE)
        given = [torch.ones(shape, requires_grad=True) for shape in shapes]
        sizes = {}

        def find(*args):
            found = inner(*args)
            sizes.update({k: each.mpi_buffer.size_free for k, each in found.items()})
            return found

        inner = memory.get_freeable_input_buf
        with mock.patch.object(memory, inner.__name__, find):
            torch.compile(saves_parts)(*given).backward()
        self.assertEqual(sizes.pop("mm"), 2 * UNIT)
        self.assertEqual(max(sizes.values()), UNIT)


if __name__ == "__main__":
    run_tests()
