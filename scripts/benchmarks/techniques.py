"""Measures what saves memory in training, and what it costs, on one model.

    scripts/benchmark.sh techniques                          a small Llama, on the CPU
    scripts/benchmark.sh techniques --model gpt2
    scripts/benchmark.sh techniques --model my_models:make   your own
    scripts/benchmark.sh techniques --json results/techniques.json

Your own model is a function without arguments, found from the working folder, that
returns a model and a tuple or dict of its inputs; the model returns its loss (or an
object with a loss, as the Hugging Face library's models do when given labels).

Every row is a training step with AdamW in a fresh process: what it holds at its peak
and by kind, what the forward saves for the backward, its time beside eager mode's
(interleaved, medians; CPU time of one thread, or wall time on CUDA), and the flops it
computes twice. Memory is exact: on the CPU all storages are counted, on CUDA it is
what torch.cuda.max_memory_allocated tells.
The learning rate is 0, so that all rows train the same weights. With --json a run that
was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from matplotlib.figure import Figure
from torch import nn, Tensor
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from benchmarks import fresh, options
from benchmarks.live_bytes import cuda_peak_bytes, GIVEN, record_step
from benchmarks.nets import find, Inputs, LossOf
from benchmarks.results import (
    environment,
    fail,
    markdown,
    measured_on,
    Row,
    save,
)
from benchmarks.tracing import CountedFlops, cpu_attention_counted
from benchmarks.training import gradients, relative_error, TOLERANCE


MODEL = "llama-8"
BUDGETS = (1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.0)
CHECKED_MODEL = "vit"
CHECKED_BUDGETS = (1.0, 0.3)
# The blocks that most models repeat, by the names they commonly have.
MODULES = r"(.*\.)?(blocks?|layers?|h|stages?|down|merge|cells)\.\d+"
TOLERANCE_FLOAT64 = 1e-6
UPSTREAM = "compile, upstream dp"


class Skipped(Exception):
    """This technique cannot run here, and why."""


# --------------------------------------------------------------- techniques


@dataclass
class Setup:
    """A technique put to work on a model: how to run forward, and with what."""

    forward: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    set_to_none: bool = True


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.0)


def eager(module: nn.Module, task: fresh.Task) -> Setup:
    return Setup(module, adamw(module))


def gradients_kept(module: nn.Module, task: fresh.Task) -> Setup:
    return Setup(module, adamw(module), set_to_none=False)


def autocast(module: nn.Module, task: fresh.Task) -> Setup:
    def forward(*inputs: Tensor) -> Tensor:
        with torch.autocast(task["device"], torch.bfloat16):
            loss: Tensor = module(*inputs)
            return loss

    return Setup(forward, adamw(module))


def chosen_modules(module: nn.Module, pattern: str) -> list[nn.Module]:
    """Submodules whose whole name the pattern matches, none inside another."""
    inner = module.module if isinstance(module, LossOf) else module
    names = [name for name, _ in inner.named_modules() if name]
    chosen: list[str] = []
    for name in names:
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if re.fullmatch(pattern, name) and not inside:
            chosen.append(name)
    if not chosen:
        outermost = [name for name in names if name.count(".") < 2]
        raise Skipped(
            f"no submodule's name is matched by {pattern!r}; there are "
            f"{', '.join(outermost[:12])}, ...; choose with --modules"
        )
    return [inner.get_submodule(name) for name in chosen]


def checkpointed(module: nn.Module, task: fresh.Task, **options: Any) -> Setup:
    for part in chosen_modules(module, task["modules"]):
        part.forward = functools.partial(
            checkpoint, part.forward, use_reentrant=False, **options
        )
    return Setup(module, adamw(module))


def selective(module: nn.Module, task: fresh.Task) -> Setup:
    """Save what has flops to count (products, convolutions, attention)."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(operator, "_overloadpacket", None) in flop_registry:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(module, task, context_fn=contexts)


def compiled(module: nn.Module, task: fresh.Task) -> Setup:
    return Setup(torch.compile(module, backend=task["backend"]), adamw(module))


def eight_bit(module: nn.Module, task: fresh.Task) -> Setup:
    try:
        import bitsandbytes
    except ImportError as error:
        raise Skipped(f"bitsandbytes cannot be imported: {error}") from error
    optimizer = bitsandbytes.optim.AdamW8bit(module.parameters(), lr=0.0)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except Exception as error:
        raise Skipped(
            f"bitsandbytes has no 8-bit AdamW for {task['device']}: {error}"
        ) from error
    optimizer.zero_grad()
    return Setup(module, optimizer)


def inference(module: nn.Module, task: fresh.Task) -> Setup:
    return Setup(torch.inference_mode()(module), adamw(module))


TECHNIQUES: dict[str, Callable[[nn.Module, fresh.Task], Setup]] = {
    "eager": eager,
    "inference mode": inference,
    "set_to_none=False": gradients_kept,
    "autocast bf16": autocast,
    "AdamW 8-bit": eight_bit,
    "checkpoint": checkpointed,
    "selective checkpoint": selective,
    UPSTREAM: compiled,
    "compile, exact": compiled,
    "compile, peak": compiled,
}
# Settings of torch._functorch.config; upstream's runs on the untouched wheel.
SETTINGS: dict[str, dict[str, Any]] = {
    UPSTREAM: {"activation_memory_budget_solver": "dp"},
    "compile, exact": {"activation_memory_budget_solver": "exact"},
    "compile, peak": {"activation_memory_budget_target": "peak"},
}
# These compute the same gradients as eager mode.
SAME = ("set_to_none=False", "checkpoint", "selective checkpoint", *SETTINGS)


# --------------------------------------------------------- in a fresh process


def forward_backward(
    module: nn.Module, forward: Callable[..., Tensor], inputs: Inputs
) -> tuple[int, int, list[Tensor]]:
    """Flops of the forward, flops of both, and the gradients."""
    module.zero_grad()
    torch.manual_seed(0)
    with CountedFlops() as counter:
        loss = forward(*inputs)
        forward_flops = counter.flops
        loss.backward()
    return forward_flops, counter.flops, gradients(list(module.parameters()))


def error_in_float64(
    task: fresh.Task, make: Callable[[str], tuple[nn.Module, Inputs]]
) -> float:
    """The technique's gradients beside eager mode's, both computed in float64."""

    def wide(set_up: Callable[[nn.Module, fresh.Task], Setup]) -> list[Tensor]:
        module, inputs = make(task["device"])
        module.double()
        doubles = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        return forward_backward(module, set_up(module, task).forward, doubles)[2]

    return relative_error(wide(TECHNIQUES[task["technique"]]), wide(eager))


@contextmanager
def settings(task: fresh.Task) -> Iterator[None]:
    """The technique's settings for everything that is compiled within."""
    config = torch._functorch.config
    with ExitStack() as stack:
        if task["technique"] in SETTINGS:
            stack.enter_context(
                config.patch(
                    activation_memory_budget=task["budget"],
                    enable_autograd_cache=False,
                    **SETTINGS[task["technique"]],
                )
            )
        if task["device"] == "cpu":
            # Or budgets would mean another thing here than on a GPU.
            stack.enter_context(cpu_attention_counted())
        yield


def measure(task: fresh.Task) -> Row:
    if task["device"] == "cpu":
        torch.set_num_threads(1)
    with settings(task):
        try:
            return measured(task)
        except Skipped as reason:
            return {"skipped": str(reason)}


@dataclass
class Step:
    """A training step of a setup, or only its forward."""

    setup: Setup
    inputs: Inputs
    trains: bool
    cuda: bool

    def forward(self) -> Tensor:
        return self.setup.forward(*self.inputs)

    def __call__(self) -> None:
        loss = self.forward()
        if self.trains:
            loss.backward()
            self.setup.optimizer.step()
            self.setup.optimizer.zero_grad(self.setup.set_to_none)

    def seconds(self) -> float:
        # One thread computes on the CPU: what else the machine does is left out.
        clock = time.perf_counter if self.cuda else time.process_time
        if self.cuda:
            torch.cuda.synchronize()
        start = clock()
        self()
        if self.cuda:
            torch.cuda.synchronize()
        return clock() - start


def measured(task: fresh.Task) -> Row:
    technique, cuda = task["technique"], task["device"] == "cuda"
    make = find(task["model"]).make
    module, inputs = make(task["device"])
    trains = technique != "inference mode"
    step = Step(TECHNIQUES[technique](module, task), inputs, trains, cuda)
    start = time.perf_counter()
    step()
    first_step = time.perf_counter() - start
    timeline = record_step(
        step.forward,
        module.parameters(),
        inputs,
        step.setup.optimizer if trains else None,
        step.setup.set_to_none,
        allocator=task["backend"] == "inductor" and technique in SETTINGS,
        trains=trains,
    )
    row: Row = {
        "peak_bytes": cuda_peak_bytes(step) if cuda else timeline.peak(),
        "peak_without_given_bytes": timeline.peak(GIVEN),
        **{f"{k}_bytes_at_peak": v for k, v in timeline.at_peak().items()},
        "saved_bytes": timeline.saved_bytes if trains else None,
        "first_step_s": first_step,
    }
    reference, inputs = make(task["device"])
    plain = Step(eager(reference, task), inputs, True, cuda)
    if trains:
        _, flops, found = forward_backward(module, step.setup.forward, inputs)
        forward, wanted_flops, wanted = forward_backward(reference, reference, inputs)
        row.update(
            forward_flops=forward,
            recomputed_flops=flops - wanted_flops,
            gradient_error=relative_error(found, wanted),
        )
        if technique in SAME and not row["gradient_error"] <= TOLERANCE:
            # A fault, or rounding that the model magnifies, as batch norms do.
            row["gradient_error_float64"] = error_in_float64(task, make)
    plain()
    pairs = [(step.seconds(), plain.seconds()) for _ in range(task["repeats"])]
    step_s, eager_s = (statistics.median(each) for each in zip(*pairs))
    row.update(step_s=step_s, eager_step_s=eager_s, step_over_eager=step_s / eager_s)
    return row


# ------------------------------------------------------------------- report


def error_text(row: Row) -> str:
    """The gradients' relative error; that in float64 where it was needed."""
    if "gradient_error_float64" in row:
        return f"{row['gradient_error_float64']:.0e} in float64"
    return f"{row['gradient_error']:.0e}"


def page(data: dict[str, Any]) -> str:
    lines = []
    for row in data["rows"]:
        name = row["technique"]
        budget = "" if row["budget"] is None else f"{row['budget']:g}"
        reason = row.get("skipped") or row.get("error")
        if reason:
            lines.append([name, budget, reason, *[""] * 7])
            continue
        kinds = ("optimizer", "activation", "temporary")
        columns = ("peak_bytes", "saved_bytes", *(f"{k}_bytes_at_peak" for k in kinds))
        sizes = [row[key] for key in columns]
        recomputed, error = "-", "-"
        if "recomputed_flops" in row:
            recomputed = f"{row['recomputed_flops'] / row['forward_flops']:.0%}"
            error = error_text(row)
        lines.append(
            [
                name,
                budget,
                *("-" if size is None else f"{size / 1e6:,.1f}" for size in sizes),
                f"{row['step_over_eager']:.2f}",
                recomputed,
                error,
            ]
        )
    heading = ["technique", "budget", "peak MB", "saved MB", "optimizer at peak"]
    heading += ["activations at peak", "temporaries at peak", "step / eager"]
    facts = data["environment"]
    return (
        markdown([*heading, "recomputed", "gradient error"], lines)
        + (
            f"\nModel {facts['model']}, backend {facts['backend']}, medians of {facts['repeats']} interleaved steps. Times on a CPU are CPU times. "
            "saved: what the forward leaves alive for the backward. recomputed: flops beyond eager mode's, as a share of "
            "the forward's. gradient error: relative to eager mode's. "
        )
        + measured_on(facts)
    )


def plot(data: dict[str, Any], result: Path) -> None:
    """Peak memory against step time; written beside ``result``."""
    figure = Figure(figsize=(9, 6), dpi=120)
    axes = figure.subplots()
    done = [row for row in data["rows"] if "peak_bytes" in row]
    for index, technique in enumerate(TECHNIQUES):
        points = [row for row in done if row["technique"] == technique]
        if not points:
            continue
        x = [row["step_over_eager"] for row in points]
        y = [row["peak_bytes"] / 1e6 for row in points]
        curve = technique in SETTINGS
        axes.plot(
            x, y, marker="o" if curve else "D", ls="-" if curve else "", label=technique
        )
        colour = axes.lines[-1].get_color()
        for row, a, b in zip(points, x, y):
            text = f"{row['budget']:g}" if curve else technique
            axes.annotate(
                text,
                (a, b),
                xytext=(5, 4 if index % 2 else -11),
                textcoords="offset points",
                fontsize=8,
                color=colour,
            )
    axes.set_xlabel("time of a step, eager mode = 1")
    axes.set_ylabel("peak memory of a step, MB (parameters and inputs included)")
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"{data['environment']['model']}: what saves memory, and what it costs",
        loc="left",
    )
    axes.legend(fontsize=8, title="numbers: activation memory budget", title_fontsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, result, data["environment"])


def faults(rows: list[Row]) -> list[str]:
    """What must not be, whatever the model: errors, and other gradients."""
    found = []
    for row in rows:
        name = fresh.describe({k: row[k] for k in ("technique", "budget")})
        if "error" in row:
            found.append(f"{name}: {row['error']}")
        elif row["technique"] in SAME and not (
            row["gradient_error"] <= TOLERANCE
            or row["gradient_error_float64"] <= TOLERANCE_FLOAT64
        ):
            found.append(
                f"{name}: gradients differ from eager mode's by {error_text(row)}"
            )
    return found


def pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    return text


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = options.parser(
        __doc__,
        check="a small model and few rows; exit status 1 if one fails, or if gradients "
        "are not eager mode's",
    )
    parser.add_argument(
        "--model",
        type=options.net,
        default=MODEL,
        help="one of the project's models (benchmark.sh capture --list), or "
        f"module:function (default: {MODEL})",
    )
    parser.add_argument(
        "--techniques",
        nargs="+",
        choices=TECHNIQUES,
        metavar="NAME",
        default=list(TECHNIQUES),
        help=f"some of: {'; '.join(TECHNIQUES)} (default: all)",
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=options.share,
        default=BUDGETS,
        metavar="SHARE",
        help=f"for torch.compile (default: {' '.join(f'{b:g}' for b in BUDGETS)})",
    )
    parser.add_argument(
        "--modules",
        type=pattern,
        default=MODULES,
        metavar="REGEX",
        help="submodules to checkpoint, by their whole name (default: %(default)s)",
    )
    parser.add_argument(
        "--backend",
        choices=("aot_eager_decomp_partition", "inductor"),
        default="inductor" if cuda else "aot_eager_decomp_partition",
        help="of torch.compile (default: %(default)s here; inductor on CUDA, the other "
        "on the CPU, where inductor needs a C++ compiler)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if cuda else "cpu",
        help="default: %(default)s here",
    )
    options.add_limits(parser, repeats=5, seconds=900)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not cuda:
        parser.error("--device cuda: this torch finds no GPU")
    model, budgets, names = arguments.model, arguments.budgets, arguments.techniques
    if arguments.check:
        model, budgets = CHECKED_MODEL, CHECKED_BUDGETS
        names = ["checkpoint", "selective checkpoint", *SETTINGS]
    common = {
        "model": model,
        "device": arguments.device,
        "backend": arguments.backend,
        "modules": arguments.modules,
        "repeats": arguments.repeats,
    }
    tasks = [
        {
            "technique": name,
            "budget": budget,
            **common,
            "torch": fresh.UNTOUCHED if name == UPSTREAM else "patched",
        }
        for name in names
        for budget in (budgets if name in SETTINGS else (None,))
    ]
    limits = fresh.Limits(arguments.seconds, arguments.gigabytes)
    rows = fresh.run(__name__, tasks, limits, arguments.json)
    data = {"environment": {**environment(), **common}, "rows": rows}
    fresh.finish(arguments.json, data, page, plot)
    return fail(faults(rows) if arguments.check else [])
