"""How often both graphs draw what only the backward needs, and what is kept for it.

The linear layers keep a random projection of their input in place of the input, and
project what comes back by the same matrix, which is cheaper to draw than to keep.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as config
from torch import nn, Tensor

from benchmarks.architectures import (
    ClassicShape,
    Language,
    MLP,
    Shape,
    Transformer,
    ViT,
)
from benchmarks.forms.memory_budget import kept
from benchmarks.nets import Built, features, images, Net, tokens
from benchmarks.tracing import Joint


WHAT = "random ops that both graphs run, and bytes kept, at budget 1"
SIZES: dict[str, Any] = {
    "width": 32,
    "mlp": 64,
    "layers": 2,
    "vocabulary": 64,
    "batch": 4,
}


class Projected(torch.autograd.Function):
    """A product whose weight gets an estimate of its gradient, from fewer rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = len(x) // 4
        projection = torch.randn(rows, len(x), dtype=x.dtype, device=x.device)
        ctx.save_for_backward(weight, projection, projection @ x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        weight, projection, few = ctx.saved_tensors
        return grad @ weight, (projection @ grad).t() @ few / len(few)


class ProjectedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Projected.apply
        y: Tensor = apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def projected(model: nn.Module, batch: Any) -> Built:
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(module, name, ProjectedLinear(child))
    return model, batch


def classic(**options: Any) -> ClassicShape:
    return ClassicShape(**SIZES, **{"tokens": 32, **options})


MODELS: dict[str, Callable[[], Built]] = {
    "MLP": lambda: projected(MLP([64] * 4, 64, 0.0), features((128, 64), 64)),
    "Llama-like": lambda: projected(
        Transformer(Shape(**SIZES, tokens=32, rotary=True)), tokens(64, 4, 32)
    ),
    "GPT-2-like": lambda: projected(
        Language(classic(causal=True, joined=True)), tokens(64, 4, 32)
    ),
    "BERT-like": lambda: projected(
        Language(classic(norm_first=False)), tokens(64, 4, 32)
    ),
    "ViT-like": lambda: projected(ViT(classic(tokens=16), 8), images(4, 32, 64)),
}


def figures(build: Callable[[], Built]) -> dict[str, float]:
    seeded = torch.Tag.nondeterministic_seeded
    joint = Joint(*Net("", build).fake())
    with config.patch(activation_memory_budget=1):
        twice = joint.run_by_both(
            lambda node: seeded in getattr(node.target, "tags", ())
        )
    return {"drawn twice": twice, "kept, kB": kept(joint, 1) / 1e3}


def measured() -> dict[str, float]:
    torch.set_num_threads(1)
    return {
        f"{name}: {figure}": value
        for name, build in MODELS.items()
        for figure, value in figures(build).items()
    }
