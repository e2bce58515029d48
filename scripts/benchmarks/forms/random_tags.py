"""By how much dropout's gradients are off where a budget has the backward draw again.

Under one seed the forward draws the same numbers at every budget, and so gradients have
to be those of budget 1.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as config
from torch import nn, Tensor

from benchmarks.architectures import ClassicShape, Language, MLP, ViT
from benchmarks.nets import Built, features, images, tokens
from benchmarks.ways import OPERATORS


BUDGET = 0.5
WHAT = f"gradients' relative error at budget {BUDGET}"
SMALL: dict[str, Any] = {
    "width": 32,
    "mlp": 64,
    "layers": 2,
    "vocabulary": 64,
    "batch": 4,
}


class Autoencoder(nn.Module):
    """Variational: it draws the code of each row."""

    def __init__(self, width: int, code: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 4 * code), nn.Tanh())
        self.mean, self.spread = nn.Linear(4 * code, code), nn.Linear(4 * code, code)
        self.decoder = nn.Sequential(
            nn.Linear(code, 4 * code), nn.Tanh(), nn.Linear(4 * code, width)
        )

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        y = self.encoder(x)
        mean, spread = self.mean(y), self.spread(y)
        code = mean + torch.exp(spread / 2) * torch.randn_like(mean)
        divergence = (mean.square() + spread.exp() - spread).mean()
        loss: Tensor = (self.decoder(code) - x).square().mean() + divergence
        return loss


def language(**options: Any) -> Built:
    shape = ClassicShape(**SMALL, tokens=32, dropout=0.1, **options)
    return Language(shape), tokens(64, 4, 32)


MODELS: dict[str, Callable[[], Built]] = {
    "MLP": lambda: (MLP([64] * 4, 64, 0.1), features((128, 64), 64)),
    "GPT-2-like": lambda: language(causal=True, joined=True, gelu="tanh"),
    "BERT-like": lambda: language(norm_first=False, written_out=True),
    "ViT-like": lambda: (
        ViT(ClassicShape(**SMALL, tokens=16, dropout=0.1), 8),
        images(4, 32, 64),
    ),
    "variational autoencoder": lambda: (Autoencoder(64, 16), features((128, 64), 64)),
}


def gradients(build: Callable[[], Built], budget: float) -> Tensor:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs = build()
    with config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
        torch.compile(model, backend=OPERATORS)(*inputs).backward()
    found: list[Any] = [weight.grad for weight in model.parameters()]
    return torch.cat([each.flatten() for each in found])


def error(build: Callable[[], Built]) -> float:
    expected = gradients(build, 1)
    return float((gradients(build, BUDGET) - expected).norm() / expected.norm())


def measured() -> dict[str, float]:
    torch.set_num_threads(1)
    return {name: error(build) for name, build in MODELS.items()}
