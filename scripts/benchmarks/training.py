"""A few training steps, and how far two ways to take them are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn, Tensor


# What float32 may differ by when a product is computed a second time.
TOLERANCE = 1e-4
# A gradient below this share of the model's largest counts as rounding.
NOTHING = 1e-3


def relative_error(measured: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest relative error of a tensor, in the maximum norm; NaN where one is.

    A tensor below `NOTHING` of the largest is measured against that: where a true
    gradient is zero (a bias in front of a batch norm) the rest is rounding.
    """
    if len(measured) != len(wanted):
        raise RuntimeError(f"{len(measured)} gradients where {len(wanted)} are wanted")
    sizes = torch.stack([b.abs().max() for b in wanted])
    floor = max(NOTHING * sizes.max().item(), torch.finfo(sizes.dtype).tiny)
    errors = torch.stack([(a - b).abs().max() for a, b in zip(measured, wanted)])
    return (errors / sizes.clamp(min=floor)).max().item()


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those that are there, taken away from the parameters."""
    found = [each.grad for each in parameters if each.grad is not None]
    for each in parameters:
        each.grad = None
    return found


@dataclass
class Training:
    """What a few steps gave: each step's loss, and all gradients, step by step."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def errors(self, reference: Training) -> tuple[float, float]:
        """Largest relative error of a loss, and of a gradient."""
        losses = relative_error(self.losses, reference.losses)
        return losses, relative_error(self.gradients, reference.gradients)


def train(
    step: Callable[..., Tensor], model: nn.Module, batches: Sequence[Tensor]
) -> Training:
    """Train ``model`` with plain SGD, its forward run through ``step``."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    result = Training()
    for batch in batches:
        loss = step(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        result.losses.append(loss.detach())
        result.gradients += gradients(parameters)
    return result
