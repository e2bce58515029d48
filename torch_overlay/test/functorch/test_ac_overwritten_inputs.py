# Owner(s): ["module: functorch"]
"""Gradients of nets that overwrite an input or a buffer that they have read."""

import itertools

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config, partitioners
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint


aten = torch.ops.aten

BUDGETS = (0, 0.3, 0.7, 1)
TARGET = "activation_memory_budget_target"
# A patch of its own brings the target "peak".
TARGETS = ("saved", "peak") if hasattr(config, TARGET) else (None,)


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

    y = checkpoint(read, x, use_reentrant=False)
    loss = (y @ w).square().mean()
    return loss


def overwritten_after_a_checkpoint(x, w, buffer):
    given = buffer.clone()
    y = checkpoint(lambda x: (x @ w - given.exp()).sin(), x, use_reentrant=False)
    buffer.add_(1)
    return (y @ w).tanh().square().mean()


def statistics(x, w, buffer):
    y = x @ w
    y = torch.nn.functional.batch_norm(y, buffer[0], buffer[1].exp(), training=True)
    return (y.sin() @ w).tanh().square().mean()


def fixed_statistics(x, w, buffer):
    given = x.detach().tanh()
    y = torch.nn.functional.batch_norm(given, buffer[0], buffer[1].exp(), training=False)
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


FUNCTIONS = (
    codebook,
    running_mean,
    queue_of_keys,
    counter,
    views,
    overwritten_twice,
    overwritten_after_a_checkpoint,
    statistics,
    fixed_statistics,
    read_by_the_backward,
    returned_by_the_backward,
    custom_operator,
    needs_a_gradient,
)
