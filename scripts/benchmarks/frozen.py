"""Measures what frozen layers save for the backward, and what that costs.

    scripts/benchmark.sh frozen                      all rows
    scripts/benchmark.sh frozen --check              bytes and gradients only, as CI does

Every row is measured on a running training step, in eager mode, compiled without the
pass (config.drop_unread_arguments off, which is what untouched torch.compile does)
and compiled with it. Saved are the bytes that the forward allocated and left alive
for the backward. Times are medians of interleaved steps on one thread, in CPU time;
they are reported and never enforced. Noise is how far apart two equal steps are. The
exit status is 1 only if bytes or gradients are off.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import NamedTuple, Optional

import torch
import torch._functorch.config as config
from rich.console import Console
from torch import nn, Tensor

from benchmarks import nets, options
from benchmarks.live_bytes import record_step, Step
from benchmarks.marks import conclude, Mark
from benchmarks.training import gradients, relative_error, TOLERANCE


OPERATORS = "aot_eager_decomp_partition"  # Operator by operator, so bytes are exact.
LAYERS = 10
REPEATS = 15


class Case(NamedTuple):
    """A module with frozen layers, and a batch; of a chain the bytes that it needs."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    needed: Optional[int] = None


# ----------------------------------------------------------------- measuring


Loss = Callable[[], Tensor]


def loss_of(case: Case) -> Loss:
    module, inputs = case.module, case.inputs

    def loss() -> Tensor:
        result: Tensor = module(*inputs)
        return result

    # Dynamo keeps what it compiled by code object: every case needs its own.
    code = loss.__code__.replace(co_name=loss.__name__)
    return FunctionType(code, globals(), closure=loss.__closure__)


def compiled(case: Case, on: bool, backend: str = OPERATORS) -> Loss:
    """The same loss, compiled by a first step."""
    # Or the shapes of another case would make the sizes of this one symbolic.
    call = torch.compile(loss_of(case), backend=backend, fullgraph=True, dynamic=False)
    with config.patch(drop_unread_arguments=on):
        call().backward()
    gradients(trained(case))
    return call


def trained(case: Case) -> list[Tensor]:
    tensors = [*case.module.parameters(), *case.inputs]
    return [tensor for tensor in tensors if tensor.requires_grad]


def record(case: Case, loss: Loss) -> Step:
    owned = [*case.module.parameters(), *case.module.buffers()]
    recorded = record_step(loss, owned, case.inputs)
    gradients(trained(case))
    return recorded


def step(case: Case, loss: Loss) -> list[Tensor]:
    """The gradients of a step."""
    loss().backward()
    return gradients(trained(case))


def cpu_seconds(case: Case, loss: Loss) -> float:
    start = time.process_time()
    loss().backward()
    seconds = time.process_time() - start
    gradients(trained(case))
    return seconds


def kib(nbytes: float) -> str:
    return f"{nbytes / 1024:,.0f}"


# --------------------------------------------------------------------- cases


def freeze(module: nn.Module, trainable: Callable[[str], bool]) -> nn.Module:
    """Freezes all parameters but those whose name is ``trainable``; norms that have
    none of those use their fixed statistics."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trainable(name))
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


def chain(which: str, trainable: Sequence[str]) -> Case:
    """Convolutions, of which a trainable one needs its input for the backward.

    The first one's is the network's, which is alive anyway.
    """
    torch.manual_seed(0)
    layers = [nn.Conv2d(16, 16, 3, padding=1) for _ in range(LAYERS)]
    module = Chain(layers, (8, 16, 32, 32))
    freeze(module, lambda name: name.startswith(tuple(trainable)))
    x = torch.randn(8, 16, 32, 32, requires_grad=True)
    needed = x.nbytes * len(trainable)
    return Case(f"convolution, {which} trainable", module, (x,), needed)


def pointwise() -> Case:
    """Frozen 1x1 convolutions, which take their layout from their input alone; the
    ReLUs between them save where they were positive."""
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 8, 3, padding=1)
    wide = [nn.Conv2d(8, 128, 1), nn.ReLU(), nn.Conv2d(128, 8, 1), nn.ReLU()]
    module = Chain([stem, *wide, *copy.deepcopy(wide)], (4, 8, 64, 64))
    freeze(module, lambda name: name.startswith("0."))
    return Case(
        "frozen 1x1 convolutions with ReLU", module, (torch.randn(4, 3, 64, 64),)
    )


def frozen_nets() -> Iterator[Case]:
    torch.manual_seed(0)
    resnet = nets.ResNet((3, 4, 6, 3), 16, 64)
    # What comes before the stem needs no gradient, what comes after it does.
    freeze(resnet, lambda name: name.startswith(("stem", "head")))
    yield Case(
        "ResNet-50-like, stem and head trainable", resnet, nets.images(4, 96, 64)
    )
    unet = nets.UNet(8, 3, 8)
    freeze(unet, lambda name: name.startswith(("down.0", "head")))
    pixels = nets.images(4, 96, 8, (96, 96))
    yield Case("U-Net, first stage and head trainable", unet, pixels)


# ---------------------------------------------------------------------- rows


def bytes_and_gradients() -> Iterator[Mark]:
    # A quarter of ten layers: every fourth.
    chains = chain("a quarter", ("3.", "7.")), chain("none", ())
    for case in (*chains, *frozen_nets()):
        calls = loss_of(case), compiled(case, False), compiled(case, True)
        eager, plain, ours = (record(case, call) for call in calls)
        least, most = f"at most {kib(case.needed or 0)}", "at most eager / 1.9"
        kept = ours.saved_bytes <= (case.needed or 0), ours.peak <= eager.peak / 1.9
        if case.needed is None:
            least, most = "less than torch.compile", "at most torch.compile"
            kept = ours.saved_bytes < plain.saved_bytes, ours.peak <= plain.peak
        for name, key, mark, reached in (
            ("saved", "saved_bytes", least, kept[0]),
            ("peak", "peak", most, kept[1]),
        ):
            in_kib = [kib(getattr(each, key)) for each in (ours, eager, plain)]
            text = "{} (eager {}, torch.compile {})".format(*in_kib)
            yield Mark(f"{case.name}: {name} KiB", text, mark, reached)
        wanted, without, found = (step(case, call) for call in calls)
        error, before = relative_error(found, wanted), relative_error(without, wanted)
        same = all(map(torch.equal, found, without))
        yield Mark(
            f"{case.name}: gradients as without the pass, and as eager's",
            f"{'bit for bit' if same else 'differ'}; {error:.1e} (without {before:.1e})",
            f"{TOLERANCE:.0e}",
            error <= TOLERANCE,
        )


def times(backend: str) -> Iterator[Mark]:
    for case in (pointwise(), *frozen_nets()):
        off, on = (compiled(case, each, backend) for each in (False, True))
        rounds = []
        for _ in range(REPEATS):
            first, again, ours = (cpu_seconds(case, call) for call in (off, off, on))
            rounds.append((abs(again / first - 1), ours / first))
        noise, ratio = (statistics.median(column) for column in zip(*rounds))
        yield Mark(
            f"{case.name}: step time with / without the pass, {backend}",
            f"{ratio:.3f} (noise {noise:.3f})",
            "at most 1, within noise",
            ratio <= 1 + noise,
            False,
        )


def main() -> int:
    parser = options.parser(__doc__, check="bytes and gradients only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = {"bytes and gradients": bytes_and_gradients()}
    if not arguments.check:
        parts |= {backend: times(backend) for backend in (OPERATORS, "inductor")}
    rows: list[Mark] = []
    for name, part in parts.items():
        with Console(stderr=True).status(name):
            rows += part
        torch._dynamo.reset()
    return conclude(rows, REPEATS, arguments.json)
