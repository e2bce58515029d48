"""Measures what frozen layers save for the backward.

    scripts/benchmark.sh frozen --check

Every row is measured on a running training step, in eager mode, compiled without the
pass (config.drop_unread_arguments off, which is what untouched torch.compile does)
and compiled with it. Saved are the bytes that the forward allocated and left alive
for the backward. The exit status is 1 if bytes or gradients are off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Optional

import torch
import torch._functorch.config as config
from torch import nn, Tensor

from benchmarks import fresh
from benchmarks.architectures import ResNet, UNet
from benchmarks.meters import relative_error, TOLERANCE
from benchmarks.nets import Built, images, Net
from benchmarks.pages import Mark, marks_page, Row, stored_marks
from benchmarks.ways import compiled, OPERATORS, Training


LAYERS = 10
CHECK = "the same, as CI calls it"
KIND, KEY = "net", ("net",)
LIMITS = fresh.Limits(seconds=900, gigabytes=8)


# --------------------------------------------------------------------- cases


def freeze(module: nn.Module, trainable: Sequence[str]) -> nn.Module:
    """Freezes all parameters but those whose names begin so; norms that have none of
    those use their fixed statistics."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith(tuple(trainable)))
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
    return module


class Chain(nn.Sequential):
    """Layers, and a loss whose own backward needs fixed weights and nothing else."""

    def __init__(self, layers: Sequence[nn.Module], shape: Sequence[int]) -> None:
        super().__init__(*layers)
        self.weights: Tensor
        self.register_buffer("weights", torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return (output * self.weights).sum()


def chain(*trainable: str) -> Built:
    """Convolutions, of which a trainable one needs its input for the backward.

    The first one's is the network's, which is alive anyway.
    """
    layers = [nn.Conv2d(16, 16, 3, padding=1) for _ in range(LAYERS)]
    module = freeze(Chain(layers, (8, 16, 32, 32)), trainable)
    return module, (torch.randn(8, 16, 32, 32, requires_grad=True),)


def resnet() -> Built:
    # What comes before the stem needs no gradient, what comes after it does.
    net = ResNet((3, 4, 6, 3), 16, 64)
    return freeze(net, ("stem", "head")), images(4, 96, 64)


def unet() -> Built:
    return freeze(UNet(8, 3, 8), ("down.0", "head")), images(4, 96, 8, (96, 96))


# A quarter of ten layers: every fourth.
QUARTER, NONE = "convolution, a quarter trainable", "convolution, none trainable"
# Inputs of trainable layers, which a chain has to save.
NEEDED = {QUARTER: 2, NONE: 0}
CASES: dict[str, Callable[[], Built]] = {
    QUARTER: functools.partial(chain, "3.", "7."),
    NONE: chain,
    "ResNet-50-like, stem and head trainable": resnet,
    "U-Net, first stage and head trainable": unet,
}
NETS = tuple(CASES)


# ----------------------------------------------------------------- measuring


def tasks(
    names: Optional[Sequence[str]], check: bool, rows: Sequence[Row]
) -> Iterator[fresh.Task]:
    for name in names or NETS:
        yield {"net": name}


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    net = Net(task["net"], CASES[task["net"]])
    return {"marks": [mark._asdict() for mark in bytes_and_gradients(net)]}


def made(net: Net, on: bool) -> Training:
    with config.patch(drop_unread_arguments=on):
        return Training(net, whole=compiled(OPERATORS)).warmed()


def kib(nbytes: float) -> str:
    return f"{nbytes / 1024:,.0f}"


def bytes_and_gradients(net: Net) -> Iterator[Mark]:
    eager = Training(net).measured()
    plain, ours = (made(net, on).measured() for on in (False, True))
    if net.name in NEEDED:
        needed = NEEDED[net.name] * net.make()[1][0].nbytes
        least, most = f"at most {kib(needed)}", "at most eager / 1.9"
        kept = ours.saved_bytes <= needed, ours.peak <= eager.peak / 1.9
    else:
        least, most = "less than torch.compile", "at most torch.compile"
        kept = ours.saved_bytes < plain.saved_bytes, ours.peak <= plain.peak
    for name, key, mark, reached in (
        ("saved", "saved_bytes", least, kept[0]),
        ("peak", "peak", most, kept[1]),
    ):
        in_kib = [kib(getattr(each, key)) for each in (ours, eager, plain)]
        text = "{} (eager {}, torch.compile {})".format(*in_kib)
        yield Mark(f"{net.name}: {name} KiB", text, mark, reached)
    error, before = (
        relative_error(each.gradients, eager.gradients) for each in (ours, plain)
    )
    same = all(map(torch.equal, ours.gradients, plain.gradients))
    yield Mark(
        f"{net.name}: gradients as without the pass, and as eager's",
        f"{'bit for bit' if same else 'differ'}; {error:.1e} (without {before:.1e})",
        f"{TOLERANCE:.0e}",
        error <= TOLERANCE,
    )


judged, page = stored_marks, marks_page
