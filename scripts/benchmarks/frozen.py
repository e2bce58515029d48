"""Measures what frozen layers save for the backward.

    scripts/benchmark.sh frozen --check

Every row is measured on a running training step, in eager mode, compiled without the
pass (config.drop_unread_arguments off, which is what untouched torch.compile does)
and compiled with it. Saved are the bytes that the forward allocated and left alive
for the backward. The exit status is 1 if bytes or gradients are off.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as config
from torch import nn

from benchmarks import fresh
from benchmarks.architectures import ResNet, UNet
from benchmarks.meters import relative_error, TOLERANCE
from benchmarks.nets import Built, images, Net
from benchmarks.pages import Mark, marks_page, Row, stored_marks
from benchmarks.ways import compiled, OPERATORS, Training


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


CASES: dict[str, Callable[[], Built]] = {
    # What comes before the stem needs no gradient, what comes after it does.
    "ResNet-50-like, stem and head trainable": lambda: (
        freeze(ResNet((3, 4, 6, 3), 16, 64), ("stem", "head")),
        images(4, 96, 64),
    ),
    "U-Net, first stage and head trainable": lambda: (
        freeze(UNet(8, 3, 8), ("down.0", "head")),
        images(4, 96, 8, (96, 96)),
    ),
}
NETS = tuple(CASES)


# ----------------------------------------------------------------- measuring


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    for name in asked.nets or NETS:
        yield {"net": name}


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    net = Net(task["net"], CASES[task["net"]])
    return {"marks": [mark._asdict() for mark in bytes_and_gradients(net)]}


def made(net: Net, on: bool) -> Training:
    with config.patch(drop_unread_arguments=on):
        return Training(net, whole=compiled(OPERATORS)).warmed()


def bytes_and_gradients(net: Net) -> Iterator[Mark]:
    eager = Training(net).measured()
    plain, ours = (made(net, on).measured() for on in (False, True))
    for name, key, mark, reached in (
        ("saved", "saved_bytes", "less than", ours.saved_bytes < plain.saved_bytes),
        ("peak", "peak", "at most", ours.peak <= plain.peak),
    ):
        in_kib = [f"{getattr(s, key) / 1024:,.0f}" for s in (ours, eager, plain)]
        text = "{} (eager {}, torch.compile {})".format(*in_kib)
        yield Mark(f"{net.name}: {name} KiB", text, f"{mark} torch.compile", reached)
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
