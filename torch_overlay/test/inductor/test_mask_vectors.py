# Owner(s): ["oncall: cpu inductor"]
"""Bools that vectorized C++ kernels store and load."""

import unittest

import torch
from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from torch._inductor.utils import run_and_get_cpp_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


# Whole vectors and a tail, for vectors of up to 64 bytes.
SHAPE = (3, 53)


def values(dtype):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-2, 3, SHAPE, generator=generator).to(dtype)


def store(x):
    mask = x > 0
    return mask, mask.logical_not(), (mask & (x < 2)).t().contiguous()


def load(mask, x):
    other = torch.where(mask.logical_not(), x, -x)
    return torch.where(mask, x, 0), other, mask.to(x.dtype), mask.sum(1)


class TestCPUBoolVectors(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        if not valid_vec_isa_list():
            raise unittest.SkipTest("no vector instructions here")

    def check(self, function, *inputs):
        """Compares with eager mode, byte for byte; returns the C++ code."""
        found, code = run_and_get_cpp_code(torch.compile(function), *inputs)
        for left, right in zip(found, function(*inputs)):
            self.assertEqual(left, right, rtol=0, atol=0)
            if left.dtype is torch.bool:
                self.assertEqual(left.view(torch.uint8), right.view(torch.uint8))
        return code

    @parametrize("dtype", (torch.float, torch.double, torch.bfloat16, torch.int64))
    def test_as_in_eager_mode(self, dtype):
        self.check(store, values(dtype))
        self.check(load, values(torch.float) > 0, values(dtype))

    def test_masks_are_bytes_in_memory(self):
        x = values(torch.float)
        code = self.check(lambda mask, x: (torch.where(mask, x, 0), x > 0), x > 0, x)
        self.assertIn("at::vec::Vectorized<uint8_t>::loadu(in_ptr0", code)
        self.assertIn("at::vec::convert<uint8_t,1,int32_t,1>(", code)


instantiate_parametrized_tests(TestCPUBoolVectors)


if __name__ == "__main__":
    run_tests()
