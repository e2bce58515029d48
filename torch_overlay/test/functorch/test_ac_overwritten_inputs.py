# Owner(s): ["module: functorch"]
"""Gradients of nets that overwrite an input or a buffer that they have read."""

import unittest

import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config, partitioners
from torch._functorch.compilers import nop
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

# On 2.11, a codebook's products are rounded otherwise than in eager mode.
ROUNDING = 1e-12 if torch.__version__ < (2, 12) else 0


aten = torch.ops.aten

AOT = "aot_eager_decomp_partition"
TARGET = "activation_memory_budget_target"
# A patch of its own brings the target "peak".
PLANS = [{"activation_memory_budget": budget} for budget in (0, 0.3, 0.7, 1)]
if hasattr(config, TARGET):
    PLANS += [{**plan, TARGET: "peak"} for plan in PLANS[2::-1]]


def leaving_writes(**options):
    """A backend whose graphs write to their inputs, as inductor's do."""
    return aot_autograd(**options, keep_inference_input_mutations=True)


KEEPING = leaving_writes(
    fw_compiler=nop, partition_fn=partitioners.min_cut_rematerialization_partition
)
DEFAULT = leaving_writes(fw_compiler=nop)


def codebook(x, w, buffer):
    codes = buffer.clone()
    found = codes[torch.cdist(x @ w, codes).argmin(-1)]
    with torch.no_grad():
        buffer.mul_(0.9).add_((x @ w)[:8], alpha=0.1)
    return ((x @ w).tanh() - found).square().mean()


def running_mean(x, w, buffer):
    y = (x @ w - buffer).sin()
    buffer.lerp_(y.detach(), 0.1)
    return (y @ w - buffer).exp().mean()


def queue_of_keys(x, w, buffer):
    # Inductor's joint passes remove the clone.
    y = (x @ w) @ buffer.clone().t()
    buffer.copy_(buffer.roll(1, 0))
    return y.logsumexp(-1).mean()


def counter(x, w, buffer):
    loss = ((x @ w).exp() / (1 + buffer[0, 0].detach().clone())).mean()
    buffer[0, 0].add_(1)
    return loss


def views(x, w, buffer):
    y = (x @ w - buffer.t()[1]).sin() + (x - buffer[2:3].expand(8, 8)).cos()
    buffer.view(64)[8:32].add_(1)
    return (y @ w).tanh().square().mean()


def overwritten_twice(x, w, buffer):
    y = (x @ w - buffer).sin()
    buffer.add_(1)
    y = (y @ w - buffer).sin()
    buffer.mul_(2)
    return (y - buffer).square().mean()


def read_in_a_checkpoint(x, w, buffer):
    def read(x):
        return ((x @ w - buffer.exp()).sin() @ w).tanh()

    # Eager mode reads again, what has been written.
    compiled = torch.compiler.is_compiling()
    y = checkpoint(read, x, use_reentrant=False) if compiled else read(x)
    buffer.add_(1)
    return (y @ w).square().mean()


def overwritten_after_a_checkpoint(x, w, buffer):
    given = buffer.clone()
    y = checkpoint(lambda x: (x @ w - given.exp()).sin(), x, use_reentrant=False)
    buffer.add_(1)
    return (y @ w).tanh().square().mean()


def statistics(x, w, buffer):
    y = F.batch_norm(x @ w, buffer[0], buffer[1], training=True)
    return (y.sin() @ w).tanh().square().mean()


def fixed_statistics(x, w, buffer):
    given = x.detach().tanh()
    y = F.batch_norm(given, buffer[0], buffer[1].exp(), training=False)
    buffer.add_(1)
    return ((y * w[0]).sin() @ w * x).tanh().square().mean()


class ReadByTheBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer):
        ctx.buffer = buffer.clone()
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.buffer, None


class ReturnedByTheBackward(ReadByTheBackward):
    @staticmethod
    def backward(ctx, grad):
        return ctx.buffer, None


def read_by_the_backward(x, w, buffer):
    y = ReadByTheBackward.apply(x @ w, buffer)
    buffer.add_(1)
    return y.square().mean()


def returned_by_the_backward(x, w, buffer):
    y = ReturnedByTheBackward.apply(w, buffer)
    buffer.add_(1)
    return (x * x.detach() @ y.detach()).mean() + y.mean()


@torch.library.custom_op("test_ac_overwritten_inputs::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.add_(1)


def custom_operator(x, w, buffer):
    y = (x @ w - buffer).sin()
    bump(buffer)
    return (y @ w - buffer).exp().mean()


def needs_a_gradient(x, w, buffer):
    buffer = (buffer * w.mean()).contiguous()
    torch._dynamo.graph_break()
    y = (x @ w - buffer.exp()).sin()
    buffer.add_(1)
    return (y @ w - buffer).square().mean()


def inputs_that_overlap(x, w, buffer):
    first, last = buffer[:5], buffer[3:]
    torch._dynamo.graph_break()
    y = ((x @ w)[:5] - first.exp()).sin()
    last.add_(1)
    return (y @ w - last).square().mean()


FUNCTIONS = (
    codebook,
    running_mean,
    queue_of_keys,
    counter,
    views,
    overwritten_twice,
    read_in_a_checkpoint,
    overwritten_after_a_checkpoint,
    statistics,
    fixed_statistics,
    read_by_the_backward,
    returned_by_the_backward,
    custom_operator,
    needs_a_gradient,
    inputs_that_overlap,
)
INDUCTOR = (queue_of_keys, views)


def run(function):
    """A loss, its gradients, and what is in the buffer then."""
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(3, 8, 8, dtype=torch.double, generator=generator)
    x, w, buffer = (each.clone() for each in given)
    x.requires_grad_()
    w.requires_grad_()
    loss = function(x, w, buffer)
    loss.backward()
    return loss.detach(), x.grad, w.grad, buffer


class OverwrittenInputsTest(TestCase):
    def compiled(self, function, backend, **options):
        torch._dynamo.reset()
        with config.patch(**options):
            return run(torch.compile(function, backend=backend))

    @parametrize("function", FUNCTIONS, name_fn=lambda each: each.__name__)
    def test_gradients_are_those_of_eager_mode(self, function):
        expected = run(function)
        for plan in PLANS:
            found = self.compiled(function, KEEPING, **plan)
            self.assertEqual(found, expected, atol=ROUNDING, rtol=0, msg=f"{plan}")
        # Without these, AOTAutograd writes behind the graph.
        for plan in (PLANS[0], PLANS[3], PLANS[-1]):
            self.assertEqual(self.compiled(function, AOT, **plan), expected)
        found = self.compiled(function, DEFAULT)
        self.assertEqual(found, expected, atol=ROUNDING, rtol=0)

    @unittest.skipIf(not HAS_CPU, "needs inductor's CPU backend")
    @parametrize("function", INDUCTOR, name_fn=lambda each: each.__name__)
    def test_inductor(self, function):
        expected = run(function)
        for budget in (0.3, 1):
            options = {"activation_memory_budget": budget}
            self.assertEqual(self.compiled(function, "inductor", **options), expected)

    def test_subclasses(self):
        def make(seed):
            generator = torch.Generator().manual_seed(seed)
            parts = torch.randn(2, 8, 8, dtype=torch.double, generator=generator)
            return TwoTensor(*(part.clone() for part in parts))

        def run(function):
            x, w, buffer = make(0).requires_grad_(), make(1).requires_grad_(), make(2)
            function(x, w, buffer).sum().backward()
            return [
                part for each in (x.grad, w.grad, buffer) for part in (each.a, each.b)
            ]

        for backend in (AOT, KEEPING):
            torch._dynamo.reset()
            with config.patch(activation_memory_budget=0):
                found = run(torch.compile(running_mean, backend=backend))
            self.assertEqual(found, run(running_mean))

    def test_only_what_is_saved_is_copied(self):
        def count(function, budget):
            found = []

            def compiler(graph_module, inputs):
                clones = {"op": "call_function", "target": aten.clone.default}
                found.append(len(graph_module.graph.find_nodes(**clones)))
                return nop(graph_module, inputs)

            partition = partitioners.min_cut_rematerialization_partition
            options = {"fw_compiler": compiler, "partition_fn": partition}
            self.compiled(
                function, leaving_writes(**options), activation_memory_budget=budget
            )
            return found[0]

        self.assertEqual(count(running_mean, 0), 1)
        # What is made of it is saved.
        self.assertEqual(count(running_mean, 1), 0)
        self.assertEqual(count(statistics, 1), 0)

    def test_a_joint_graph_keeps_its_copies(self):
        # Another plan, which is read from it, may save them.
        users = []

        def partition(joint, *args, **options):
            parts = partitioners.min_cut_rematerialization_partition(
                joint, *args, **options
            )
            clones = {"op": "call_function", "target": aten.clone.default}
            users.extend(len(c.users) for c in joint.graph.find_nodes(**clones))
            return parts

        self.compiled(
            running_mean, leaving_writes(fw_compiler=nop, partition_fn=partition)
        )
        self.assertTrue(users and all(users))


instantiate_parametrized_tests(OverwrittenInputsTest)

if __name__ == "__main__":
    run_tests()
