# Owner(s): ["module: inductor"]
"""What the backward of a convolution reads is stored in one layout."""

import torch
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import run_tests, TestCase


aten = torch.ops.aten

SHAPE = (4, 16, 32, 32)
# Stride, padding, dilation, transposed, output padding, groups.
CONVOLUTION = [1, 1], [1, 1], [1, 1], False, [0, 0], 1


def repeats_a_convolution(images, weight, gradient):
    """A backward that repeats a convolution, whose argument it needs, too."""
    positive = torch.relu(images)
    result = aten.convolution(positive, weight, None, *CONVOLUTION)
    return aten.convolution_backward(
        gradient * result, positive, weight, None, *CONVOLUTION, [True, True, False]
    )[:2]


class ConvLayoutTest(TestCase):
    def test_one_layout(self):
        generator = torch.Generator().manual_seed(0)
        given = [
            torch.randn(shape, generator=generator, dtype=torch.double)
            for shape in (SHAPE, (16, 16, 3, 3), SHAPE)
        ]
        with torch.no_grad():
            compiled = torch.compile(repeats_a_convolution)
            found, (code,) = run_and_get_code(compiled, *given)
        self.assertEqual(found, repeats_a_convolution(*given))
        self.assertEqual(code.count(f"= empty_strided_cpu({SHAPE},"), 1)


if __name__ == "__main__":
    run_tests()
