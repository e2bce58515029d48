# Owner(s): ["module: functorch"]
"""Gradients of nets that overwrite an input or a buffer that they have read."""

import unittest

import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.inductor_utils import HAS_CPU


BUDGETS = (1, 0.5, 0)
BACKENDS = {
    "aot_eager_decomp_partition": "aot_eager_decomp_partition",
    # Its graphs write to their inputs, as inductor's do.
    "writing": aot_autograd(
        fw_compiler=nop,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    ),
    "default_partition": "aot_eager",
}


def running_mean(x, w, buffer):
    y = (x @ w - buffer).sin()
    buffer.lerp_(y.detach(), 0.1)
    return (y @ w - buffer).exp().mean()


def queue_of_keys(x, w, buffer):
    # Inductor's joint passes remove the clone, and a view of the buffer is saved.
    y = (x @ w) @ buffer.clone().t()
    buffer.copy_(buffer.roll(1, 0))
    return y.logsumexp(-1).mean()


def views(x, w, buffer):
    first, last = buffer.split([3, 5])
    y = (x @ w)[:3] * first.exp() + x[:3] * last[1:4].cos()
    buffer.view(64)[8:32].add_(1)
    return (y @ w).tanh().square().mean()


def overwritten_twice(x, w, buffer):
    y = (x @ w - buffer).sin()
    buffer.add_(1)
    y = (y @ w - buffer).sin()
    buffer.mul_(2)
    return (y - buffer).square().mean()


def requires_grad(x, w, buffer):
    buffer = (buffer * w.mean()).contiguous()
    torch._dynamo.graph_break()
    y = (x @ w - buffer.exp()).sin()
    buffer.add_(1)
    return (y @ w - buffer).square().mean()


class Returns(torch.autograd.Function):
    """Its gradient is what it is given, whatever comes from above."""

    @staticmethod
    def forward(ctx, x, gradient):
        ctx.save_for_backward(gradient.clone())
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


def buffer_is_a_gradient(x, w, buffer):
    y = Returns.apply(x, buffer)
    buffer.add_(1)
    return y.mean() + w.mean()


class Counts(torch.autograd.Function):
    """Its backward writes to what its forward has read."""

    @staticmethod
    def forward(ctx, x, buffer):
        ctx.buffer = buffer
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.buffer.add_(1)
        return grad * 2, None


def written_by_both(x, w, buffer):
    y = Counts.apply((x @ w * buffer.clone()).sin(), buffer)
    buffer.mul_(3)
    return y.square().mean()


FUNCTIONS = (
    running_mean,
    queue_of_keys,
    views,
    overwritten_twice,
    requires_grad,
    buffer_is_a_gradient,
    written_by_both,
)


def run(function):
    """A loss, its gradients, and what is in the buffer then."""
    generator = torch.Generator().manual_seed(0)
    x, w, buffer = torch.randn(3, 8, 8, dtype=torch.double, generator=generator).clone()
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    buffer = buffer.clone()
    loss = function(x, w, buffer)
    loss.backward()
    return loss.detach(), x.grad, w.grad, buffer


class SavedCopiesTest(TestCase):
    def compiled(self, function, backend, budget):
        torch._dynamo.reset()
        with config.patch(activation_memory_budget=budget):
            return run(torch.compile(function, backend=backend))

    @parametrize("function", FUNCTIONS, name_fn=lambda each: each.__name__)
    def test_gradients_are_those_of_eager_mode(self, function):
        for name, backend in BACKENDS.items():
            for budget in BUDGETS:
                found = self.compiled(function, backend, budget)
                self.assertEqual(found, run(function), msg=f"{name}, {budget}")

    @unittest.skipIf(not HAS_CPU, "needs inductor's CPU backend")
    def test_inductor(self):
        def function(x, w, buffer):
            keys, mean = buffer[:4], buffer[4:]
            y = (x @ w) @ keys.clone().t() + mean[:, 0]
            y = y.sin() + (x @ w * mean.mean(0)).cos()[:, :4]
            buffer.mul_(0.5)
            return y.logsumexp(-1).mean()

        for budget in BUDGETS:
            found = self.compiled(function, "inductor", budget)
            self.assertEqual(found, run(function), msg=f"{budget}")

    def test_only_what_the_backward_reads_is_copied(self):
        def statistics(x, w, buffer):
            y = F.batch_norm(x @ w, buffer[0], buffer[1], training=True)
            return (y.sin() @ w).tanh().square().mean()

        def count(function, budget):
            found = []

            def compiler(graph_module, inputs):
                clones = {"op": "call_function", "target": torch.ops.aten.clone.default}
                found.append(len(graph_module.graph.find_nodes(**clones)))
                return nop(graph_module, inputs)

            backend = aot_autograd(
                fw_compiler=compiler,
                decompositions=select_decomp_table,
                partition_fn=min_cut_rematerialization_partition,
                keep_inference_input_mutations=True,
            )
            self.compiled(function, backend, budget)
            return found[0]

        self.assertEqual([count(statistics, budget) for budget in BUDGETS], [0] * 3)
        self.assertEqual(count(running_mean, 0), 1)


instantiate_parametrized_tests(SavedCopiesTest)

if __name__ == "__main__":
    run_tests()
