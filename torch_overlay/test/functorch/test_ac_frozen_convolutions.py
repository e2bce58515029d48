# Owner(s): ["module: functorch"]
"""Frozen convolutions save no inputs, and gradients stay the same bit for bit."""

import unittest

import torch
import torch._functorch.config as config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_utils import DeterministicGuard, run_tests, TestCase
from torch.testing._internal.inductor_utils import HAS_CPU


def frozen(*layers):
    return nn.Sequential(*layers).requires_grad_(False)


class FrozenConvolutionsTest(TestCase):
    def step(self, function, x, backend="aot_eager_decomp_partition", on=True):
        """Output, gradient of the input, and the tensors that were saved."""
        torch._dynamo.reset()
        x, saved = x.detach().requires_grad_(), {}

        def pack(value):
            saved[value.untyped_storage()._cdata] = value
            return value

        # A cache would keep what was compiled without NaN.
        caches = inductor_config.patch(force_disable_caches=True)
        # What is not initialized is NaN, so that nothing can read it unnoticed.
        filled = DeterministicGuard(True, fill_uninitialized_memory=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value)
        with caches, filled, config.patch(drop_unread_arguments=on):
            call = torch.compile(function, backend=backend, dynamic=False)
            with hooks:
                output = call(x)
            output.sin().sum().backward()
        return output.detach(), x.grad, [*saved.values()]

    def check(self, function, shape, count):
        """``count`` activations are saved less."""
        torch.manual_seed(0)
        x = torch.rand(shape)
        *expected, before = self.step(function, x, on=False)
        *found, after = self.step(function, x)
        self.assertEqual(found, expected, rtol=0, atol=0)
        self.assertFalse(found[1].isnan().any())
        self.assertEqual(len(before) - len(after), count)

    def test_inputs_are_not_saved(self):
        for dim in (1, 2, 3):
            for kind in ("Conv", "ConvTranspose"):
                convolution = getattr(nn, f"{kind}{dim}d")
                for options in ({}, {"stride": 2, "groups": 2}):
                    with self.subTest(dim=dim, kind=kind, options=options):
                        # The first one's input is the net's own.
                        net = frozen(*(convolution(4, 4, 3, **options) for _ in "abc"))
                        self.check(net, (2, 4, *dim * [20]), 3)

    def test_channels_last(self):
        net = frozen(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1))
        net = net.to(memory_format=torch.channels_last)
        self.check(
            lambda x: net(x.contiguous(memory_format=torch.channels_last)),
            (2, 4, 9, 9),
            2,
        )

    @unittest.skipIf(not HAS_CPU, "inductor cannot compile for the CPU here")
    def test_inductor(self):
        torch.manual_seed(0)
        x, net = torch.rand(2, 4, 9, 9), frozen(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        *expected, _ = self.step(net, x, "eager")
        # Plain loops compile fastest.
        with inductor_config.patch({"cpp.simdlen": 0}):
            *found, saved = self.step(net, x, "inductor")
        self.assertEqual(found, expected)
        self.assertEqual({value.shape for value in saved}, {net[0].weight.shape})

    def test_what_the_backward_reads_is_saved(self):
        torch.manual_seed(0)
        first, second = (torch.rand(4, 4, 3, 3) for _ in range(2))
        second.requires_grad_()

        def read_by_another(x):
            x = x.sin()
            return F.conv2d(x, first) + F.conv2d(x, second)

        def read_by_its_own_operator(x):
            x = x.sigmoid()
            return F.conv2d(x, first)

        self.check(read_by_another, (2, 4, 9, 9), 0)
        self.check(read_by_its_own_operator, (2, 4, 9, 9), 0)


if __name__ == "__main__":
    run_tests()
