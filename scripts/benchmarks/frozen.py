"""Measures what frozen layers save for the backward, and what that costs.

    scripts/benchmark.sh frozen                      all rows
    scripts/benchmark.sh frozen --check              bytes and gradients only, as CI does
    scripts/benchmark.sh frozen --rows seeds peak    some of them

Every row is measured on a running training step, in eager mode, compiled without the
pass (config.drop_unread_arguments off, which is what untouched torch.compile does)
and compiled with it. Saved are the bytes that the forward allocated and left alive
for the backward. Times are medians of interleaved steps on one thread, in CPU time;
they are reported and never enforced. Noise is how far apart two equal steps are. The exit status is 1 only if bytes or gradients
are off.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._functorch.config as config
from rich.console import Console
from torch import nn, Tensor
from torch._functorch._activation_checkpointing import (  # type: ignore[attr-defined]
    frozen_layers,
)

from benchmarks import nets, options
from benchmarks.live_bytes import record_step, Timeline
from benchmarks.marks import failed, Mark, page
from benchmarks.results import environment, show, store
from benchmarks.training import gradients, relative_error, TOLERANCE


OPERATORS = "aot_eager_decomp_partition"  # Operator by operator, so bytes are exact.
LAYERS = 10
# A quarter of ten layers: every fourth.
QUARTER = (3, 7)


class Case(NamedTuple):
    """A module with frozen layers, and a batch whose first tensor gets a gradient."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]


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
    call = torch.compile(loss_of(case), backend=backend, fullgraph=True)
    with config.patch(drop_unread_arguments=on):
        call().backward()
    gradients(trained(case))
    return call


def trained(case: Case) -> list[Tensor]:
    tensors = [*case.module.parameters(), *case.inputs]
    return [tensor for tensor in tensors if tensor.requires_grad]


def record(case: Case, loss: Loss, allocator: bool = False) -> Timeline:
    owned = [*case.module.parameters(), *case.module.buffers()]
    timeline = record_step(loss, owned, case.inputs, allocator=allocator)
    gradients(trained(case))
    return timeline


def step(case: Case, loss: Loss) -> list[Tensor]:
    """The gradients of a step."""
    torch.manual_seed(0)
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


class Kind(NamedTuple):
    """Layers of one type on one shape, and what a chain of them needs for a step.

    ``needed`` maps (elements of an activation, number of trainable layers that are not
    first, rows of an activation) to bytes. The first layer's input is the network's,
    which is alive anyway. Nothing is computed again.
    """

    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]
    needed: Callable[[int, int, int], int]
    why: str


KINDS = {
    "convolution": Kind(
        lambda: nn.Conv2d(16, 16, 3, padding=1),
        (8, 16, 32, 32),
        lambda size, trained, rows: 4 * size * trained,
        "the weight's gradient needs the layer's input, the input's the weight",
    ),
    "linear": Kind(
        lambda: nn.Linear(64, 64),
        (512, 64),
        lambda size, trained, rows: 4 * size * trained,
        "the weight's gradient needs the layer's input, the input's the weight",
    ),
    "batch norm in eval": Kind(
        lambda: nn.BatchNorm2d(16).eval(),
        (8, 16, 32, 32),
        lambda size, trained, rows: 4 * size * trained,
        "the scale's gradient needs the layer's input, the input's fixed statistics",
    ),
    "layer norm": Kind(
        lambda: nn.LayerNorm(64),
        (512, 64),
        lambda size, trained, rows: 4 * size * (LAYERS - 1) + 8 * rows * LAYERS,
        "the input's gradient needs the input, its mean and deviation, frozen or not",
    ),
    "ReLU": Kind(
        nn.ReLU,
        (8, 16, 32, 32),
        lambda size, trained, rows: size * LAYERS,
        "one byte per element: whether it was positive",
    ),
    "dropout": Kind(
        nn.Dropout,
        (8, 16, 32, 32),
        lambda size, trained, rows: size * LAYERS,
        "one byte per element: whether it was kept",
    ),
    "max pooling": Kind(
        lambda: nn.MaxPool2d(3, 1, 1),
        (8, 16, 32, 32),
        lambda size, trained, rows: size * LAYERS,
        "one byte per element: where in the window the maximum was",
    ),
}
TRAINABLE = {"all": range(LAYERS), "a quarter": QUARTER, "none": ()}


def seed_case(name: str, which: str) -> tuple[Case, int]:
    """Ten layers of one kind, and the bytes that they need."""
    kind, chosen = KINDS[name], TRAINABLE[which]
    torch.manual_seed(0)
    module = Chain([kind.layer() for _ in range(LAYERS)], kind.shape)
    freeze(module, lambda parameter: int(parameter.partition(".")[0]) in chosen)
    inputs = torch.randn(kind.shape, requires_grad=True)
    not_first = sum(index > 0 for index in chosen)
    needed = kind.needed(inputs.numel(), not_first, inputs.shape[0])
    return Case(f"{name}, {which} trainable", module, (inputs,)), needed


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


class LoRA(nn.Module):
    """A frozen linear layer with a trainable one of low rank beside it."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen
        self.adapter_down = nn.Linear(frozen.in_features, rank, bias=False)
        self.adapter_up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(x) + self.adapter_up(self.adapter_down(x))
        return result


def adapted_transformer() -> nn.Module:
    module = nets.Transformer(nets.Shape())
    for part in module.modules():
        if isinstance(part, nets.Attention):
            for name in ("query", "value"):
                setattr(part, name, LoRA(getattr(part, name)))
    return freeze(module, lambda name: "adapter" in name)


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
    words = nets.tokens(512, 4, 128)
    yield Case("transformer with LoRA", adapted_transformer(), words)


# ---------------------------------------------------------------------- rows


def gradient_row(case: Case, off: Loss, on: Loss) -> Mark:
    eager, without, ours = (step(case, call) for call in (loss_of(case), off, on))
    error, before = relative_error(ours, eager), relative_error(without, eager)
    same = all(map(torch.equal, ours, without))
    return Mark(
        f"{case.name}: gradients as without the pass, and as eager's",
        f"{'bit for bit' if same else 'differ'}; {error:.1e} (without {before:.1e})",
        f"{TOLERANCE:.0e}",
        error <= TOLERANCE,
    )


def seeds() -> Iterator[Mark]:
    for name, kind in KINDS.items():
        has_parameters = any(True for _ in kind.layer().parameters())
        for which in TRAINABLE if has_parameters else ("none",):
            case, needed = seed_case(name, which)
            eager = record(case, loss_of(case)).saved_bytes
            off, on = compiled(case, False), compiled(case, True)
            plain, saved = (record(case, call).saved_bytes for call in (off, on))
            yield Mark(
                f"{case.name}: saved KiB ({kind.why})",
                f"{kib(saved)} (eager {kib(eager)}, torch.compile {kib(plain)})",
                f"at most {kib(needed)}",
                saved <= needed,
            )
            # Dropout draws other random numbers where it is compiled.
            if name != "dropout":
                yield gradient_row(case, off, on)


def peak() -> Iterator[Mark]:
    for which in ("none", "a quarter"):
        case, _ = seed_case("convolution", which)
        eager = record(case, loss_of(case)).peak()
        plain = record(case, compiled(case, False)).peak()
        found = record(case, compiled(case, True)).peak()
        yield Mark(
            f"{case.name}: peak KiB, eager's over ours",
            f"{kib(eager)} / {kib(found)} = {eager / found:.2f} "
            f"(torch.compile {kib(plain)})",
            "1.9",
            eager / found >= 1.9,
        )


def whole_nets() -> Iterator[Mark]:
    for case in frozen_nets():
        off, on = compiled(case, False), compiled(case, True)
        eager, plain, ours = (record(case, c) for c in (loss_of(case), off, on))
        saved = [line.saved_bytes for line in (eager, plain, ours)]
        peaks = [line.peak() for line in (eager, plain, ours)]
        adapters = "LoRA" in case.name
        yield Mark(
            f"{case.name}: saved KiB",
            f"{kib(saved[2])} (eager {kib(saved[0])}, torch.compile {kib(saved[1])})",
            "as torch.compile" if adapters else "less than torch.compile",
            saved[2] == saved[1] if adapters else saved[2] < saved[1],
        )
        yield Mark(
            f"{case.name}: peak KiB",
            f"{kib(peaks[2])} (eager {kib(peaks[0])}, torch.compile {kib(peaks[1])})",
            "at most torch.compile",
            peaks[2] <= peaks[1],
        )
        yield gradient_row(case, off, on)


def ratios(
    case: Case, calls: Sequence[Loss], repeats: int
) -> tuple[list[float], float]:
    """Step times of all calls but the first as multiples of the first one's, and the
    noise: how far apart two steps of the first are. Medians over ``repeats`` rounds."""
    rounds = []
    for _ in range(repeats):
        first, again, *rest = (cpu_seconds(case, c) for c in (calls[0], *calls))
        rounds.append((abs(again / first - 1), *(other / first for other in rest)))
    noise, *others = (statistics.median(column) for column in zip(*rounds))
    return others, noise


def times(repeats: int, backend: str, cases: Sequence[Case]) -> Iterator[Mark]:
    for case in cases:
        calls = [compiled(case, on, backend) for on in (False, True)]
        (ratio,), noise = ratios(case, calls, repeats)
        yield Mark(
            f"{case.name}: step time with / without the pass, {backend}",
            f"{ratio:.3f} (noise {noise:.3f})",
            "at most 1, within noise",
            ratio <= 1 + noise,
            False,
        )


def compile_share() -> Iterator[Mark]:
    spent: list[float] = []
    drop = frozen_layers.drop_unread_arguments

    def timed(*arguments: Any, **options: Any) -> None:
        start = time.process_time()
        drop(*arguments, **options)
        spent.append(time.process_time() - start)

    for case in frozen_nets():
        spent.clear()
        with mock.patch.object(frozen_layers, drop.__name__, timed):
            start = time.process_time()
            compiled(case, True)
            total = time.process_time() - start
        yield Mark(
            f"{case.name}: the pass's share of compile time",
            f"{sum(spent) / total:.2%} of {total:.1f} s",
            "1%",
            sum(spent) <= 0.01 * total,
            False,
        )


# --------------------------------------------------------- kinds of stand-in


def expanded(stand_in: frozen_layers.StandIn) -> Any:
    """The other kind of stand-in: one element, expanded to the argument's sizes."""
    user, argument, base, _ = stand_in
    value, aten = argument.meta["val"], torch.ops.aten
    with user.graph.inserting_before(user), value.fake_mode:
        one = user.graph.call_function(
            aten.new_empty.default, (base, [1] * value.dim()), {"dtype": value.dtype}
        )
        one.meta["val"] = base.meta["val"].new_empty(
            [1] * value.dim(), dtype=value.dtype
        )
        result = user.graph.call_function(aten.expand.default, (one, [*value.shape]))
        result.meta["val"] = one.meta["val"].expand(value.shape)
    return result


def kinds_of_stand_in(repeats: int) -> Iterator[Mark]:
    case = pointwise()
    for backend in (OPERATORS, "inductor"):
        off, empty = compiled(case, False, backend), compiled(case, True, backend)
        with mock.patch.object(frozen_layers, "_make_stand_in", expanded):
            one = compiled(case, True, backend)
        without, ours, other = (
            record(case, call, allocator=True).peak() for call in (off, empty, one)
        )
        (time_ours, time_other), noise = ratios(case, (off, empty, one), repeats)
        yield Mark(
            f"{case.name}, {backend}: peak KiB and step time, empty stand-in",
            f"{kib(ours)}, {time_ours:.2f} (expanded {kib(other)}, {time_other:.2f}; "
            f"none {kib(without)}, 1; noise {noise:.2f})",
            "at most expanded",
            ours <= other and time_ours <= time_other * (1 + noise),
            False,
        )


def main() -> int:
    names = ("seeds", "peak", "nets", "time", "inductor", "compile", "kinds")
    parser = options.parser(__doc__, check="bytes and gradients only")
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--repeats", type=options.positive, default=15, help="steps per time"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repeats = arguments.repeats
    chains = [seed_case("convolution", "none")[0], pointwise()]
    parts: dict[str, Callable[[], Iterator[Mark]]] = {
        "seeds": seeds,
        "peak": peak,
        "nets": whole_nets,
        "time": lambda: times(repeats, OPERATORS, [*chains, *frozen_nets()]),
        "inductor": lambda: times(
            repeats, "inductor", [*chains, *list(frozen_nets())[:2]]
        ),
        "compile": compile_share,
        "kinds": lambda: kinds_of_stand_in(repeats),
    }
    rows: list[Mark] = []
    for name in ("seeds", "peak", "nets") if arguments.check else arguments.rows:
        with Console(stderr=True).status(name):
            rows += parts[name]()
        torch._dynamo.reset()
    data = {
        "environment": {**environment(), "repeats": repeats},
        "rows": [row._asdict() for row in rows],
    }
    show(page(data))
    if arguments.json:
        store(arguments.json, data)
    return int(failed(rows))
