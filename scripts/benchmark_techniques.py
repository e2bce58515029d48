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
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fresh
import torch
import torch._functorch.config
from live_bytes import (
    CountedStorages,
    cuda_peak_bytes,
    GIVEN,
    INPUT,
    KINDS,
    PARAMETER,
    record_step,
    Timeline,
)
from matplotlib.figure import Figure
from nets import CountedFlops, cpu_attention_counted, find, Inputs, LossOf
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn, Tensor
from torch._functorch._activation_checkpointing import knapsack
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry


MODEL = "llama-8"
BUDGETS = (1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.0)
CHECKED_MODEL = "vit"
CHECKED_BUDGETS = (1.0, 0.3)
# The blocks that most models repeat, by the names they commonly have.
MODULES = r"(.*\.)?(blocks?|layers?|h|stages?|down|merge|cells)\.\d+"
# What gradients may differ by when a product is computed a second time.
TOLERANCE = 1e-4
TOLERANCE_FLOAT64 = 1e-6
NOTHING = 1e-3


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
    "compile, upstream dp": compiled,
    "compile, exact": compiled,
    "compile, peak": compiled,
}
# Settings of torch._functorch.config; upstream's runs on the untouched wheel.
SETTINGS: dict[str, dict[str, Any]] = {
    "compile, upstream dp": {"activation_memory_budget_solver": "dp"},
    "compile, exact": {"activation_memory_budget_solver": "exact"},
    "compile, peak": {"activation_memory_budget_target": "peak"},
}
# These compute the same gradients as eager mode.
SAME = ("set_to_none=False", "checkpoint", "selective checkpoint", *SETTINGS)


# --------------------------------------------------------- in a fresh process


@dataclass
class Pass:
    """What one forward and backward computed: flops of both, and the gradients."""

    forward_flops: int
    flops: int
    gradients: list[Tensor]


def forward_backward(
    module: nn.Module, forward: Callable[..., Tensor], inputs: Inputs
) -> Pass:
    module.zero_grad()
    torch.manual_seed(0)
    with CountedFlops() as counter:
        loss = forward(*inputs)
        forward_flops = counter.flops
        loss.backward()
    found = [p.grad for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return Pass(forward_flops, counter.flops, found)


def relative_error(measured: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest relative error of a gradient, in the maximum norm.

    A gradient below `NOTHING` of the model's largest is measured against that: where
    the true one is zero (a bias in front of a batch norm) the rest is rounding.
    """
    if len(measured) != len(wanted):
        raise RuntimeError(
            f"{len(measured)} parameters got a gradient, and {len(wanted)} in eager mode"
        )
    sizes = torch.stack([b.abs().max() for b in wanted])
    floor = max(NOTHING * sizes.max().item(), torch.finfo(sizes.dtype).tiny)
    errors = torch.stack([(a - b).abs().max() for a, b in zip(measured, wanted)])
    return (errors / sizes.clamp(min=floor)).max().item()


def error_in_float64(
    task: fresh.Task, make: Callable[[str], tuple[nn.Module, Inputs]]
) -> float:
    """The technique's gradients beside eager mode's, both computed in float64."""

    def gradients(set_up: Callable[[nn.Module, fresh.Task], Setup]) -> list[Tensor]:
        module, inputs = make(task["device"])
        module.double()
        wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        return forward_backward(module, set_up(module, task).forward, wide).gradients

    return relative_error(gradients(TECHNIQUES[task["technique"]]), gradients(eager))


def record_forward(
    forward: Callable[[], Any], module: nn.Module, inputs: Inputs
) -> Timeline:
    with CountedStorages() as recorder:
        recorder.name(INPUT, inputs)
        recorder.name(PARAMETER, module.parameters())
        recorder.phase("forward")
        forward()
        recorder.phase("end")
    timeline: Timeline = recorder.timeline
    return timeline


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


def measure(task: fresh.Task) -> fresh.Row:
    device, backend = task["device"], task["backend"]
    if device == "cpu":
        torch.set_num_threads(1)
    net = find(task["model"])
    module, inputs = net.make(device)
    with settings(task):
        try:
            return measured(task, net.make, module, inputs, backend == "inductor")
        except Skipped as reason:
            return {"skipped": str(reason)}


def measured(
    task: fresh.Task,
    make: Callable[[str], tuple[nn.Module, Inputs]],
    module: nn.Module,
    inputs: Inputs,
    allocator: bool,
) -> fresh.Row:
    setup = TECHNIQUES[task["technique"]](module, task)
    trains = task["technique"] != "inference mode"
    forward = functools.partial(setup.forward, *inputs)

    def step(forward: Callable[[], Tensor], setup: Setup, trains: bool) -> float:
        if task["device"] == "cuda":
            torch.cuda.synchronize()
        # One thread computes on the CPU: what else the machine does is left out.
        clock = time.perf_counter if task["device"] == "cuda" else time.process_time
        start = clock()
        loss = forward()
        if trains:
            loss.backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad(setup.set_to_none)
        if task["device"] == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    start = time.perf_counter()
    step(forward, setup, trains)
    first_step = time.perf_counter() - start
    if trains:
        timeline = record_step(
            forward,
            module.parameters(),
            inputs,
            setup.optimizer,
            setup.set_to_none,
            allocator=allocator and task["technique"] in SETTINGS,
        )
    else:
        timeline = record_forward(forward, module, inputs)
    row: fresh.Row = {
        "peak_bytes": timeline.peak(),
        "peak_without_given_bytes": timeline.peak(GIVEN),
        **{f"{k}_bytes_at_peak": v for k, v in timeline.at_peak().items()},
        "saved_bytes": timeline.saved_bytes if trains else None,
        "first_step_s": first_step,
    }
    if task["device"] == "cuda":
        row["peak_bytes"] = cuda_peak_bytes(lambda: step(forward, setup, trains))

    reference, inputs = make(task["device"])
    plain = eager(reference, task)
    plain_forward = functools.partial(plain.forward, *inputs)
    if trains:
        ours = forward_backward(module, setup.forward, inputs)
        wanted = forward_backward(reference, reference, inputs)
        row.update(
            forward_flops=wanted.forward_flops,
            recomputed_flops=ours.flops - wanted.flops,
            gradient_error=relative_error(ours.gradients, wanted.gradients),
        )
        if task["technique"] in SAME and not row["gradient_error"] <= TOLERANCE:
            # A fault, or rounding that the model magnifies, as batch norms do.
            row["gradient_error_float64"] = error_in_float64(task, make)
    step(plain_forward, plain, True)
    pairs = [
        (step(forward, setup, trains), step(plain_forward, plain, True))
        for _ in range(task["repeats"])
    ]
    step_s, eager_s = (statistics.median(each) for each in zip(*pairs))
    row.update(step_s=step_s, eager_step_s=eager_s, step_over_eager=step_s / eager_s)
    return row


# ------------------------------------------------------------------- report


def error_text(row: fresh.Row) -> str:
    """The gradients' relative error; with a star where it is that in float64."""
    if "gradient_error_float64" in row:
        return f"{row['gradient_error_float64']:.0e}*"
    return f"{row['gradient_error']:.0e}"


def table(rows: list[fresh.Row], model: str) -> Table:
    result = Table(title=model, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("technique", no_wrap=True)
    result.add_column("budget", justify="right")
    for heading in (
        "peak MB",
        *(f"{kind[:6]}" for kind in KINDS),
        "saved\nMB",
        "step s",
        "/ eager",
        "recom-\nputed",
        "gradient\nerror",
    ):
        result.add_column(heading, justify="right")
    for row in rows:
        budget = "" if row["budget"] is None else f"{row['budget']:g}"
        if "peak_bytes" not in row:
            continue

        def megabytes(key: str, row: fresh.Row = row) -> str:
            return "-" if row.get(key) is None else f"{row[key] / 1e6:,.1f}"

        recomputed, error = "-", "-"
        if "recomputed_flops" in row:
            recomputed = f"{row['recomputed_flops'] / row['forward_flops']:.0%}"
            error = error_text(row)
        result.add_row(
            row["technique"],
            budget,
            megabytes("peak_bytes"),
            *(megabytes(f"{kind}_bytes_at_peak") for kind in KINDS),
            megabytes("saved_bytes"),
            f"{row['step_s']:.3f}",
            f"{row['step_over_eager']:.2f}",
            recomputed,
            error,
        )
    return result


def plot(rows: list[fresh.Row], facts: dict[str, Any], result: Path) -> None:
    """Peak memory against step time; written beside ``result``."""
    figure = Figure(figsize=(9, 6), dpi=120)
    axes = figure.subplots()
    done = [row for row in rows if "peak_bytes" in row]
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
        f"{facts['model']}: what saves memory, and what it costs", loc="left"
    )
    axes.legend(fontsize=8, title="numbers: activation memory budget", title_fontsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    fresh.save(figure, result, facts)


def faults(rows: list[fresh.Row]) -> list[str]:
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


def tasks_for(
    names: Sequence[str], budgets: Sequence[float], common: dict[str, Any]
) -> list[tuple[fresh.Task, dict[str, str]]]:
    """One task for each row; a technique with a budget has one for each."""
    tasks = []
    for name in names:
        for budget in budgets if name in SETTINGS else (None,):
            task = {"technique": name, "budget": budget, **common}
            patched = name != "compile, upstream dp"
            tasks.append((task, fresh.python_path(patched)))
    return tasks


def budget(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    return text


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="benchmark.sh techniques",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        default=MODEL,
        help="one of the project's models (benchmark.sh capture --list), or "
        f"module:function (default: {MODEL})",
    )
    parser.add_argument(
        "--techniques",
        nargs="+",
        choices=TECHNIQUES,
        metavar="NAME",
        help=f"some of: {'; '.join(TECHNIQUES)} (default: all)",
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=budget,
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
    fresh.add_options(parser, repeats=5, seconds=900)
    parser.add_argument(
        "--check",
        action="store_true",
        help="a small model and few rows; exit status 1 if one fails, or if gradients "
        "are not eager mode's",
    )
    arguments = parser.parse_args()
    if not hasattr(knapsack, "KNAPSACK_SOLVERS"):
        raise SystemExit(
            "this torch is not patched; run scripts/benchmark.sh techniques"
        )
    if arguments.device == "cuda" and not cuda:
        parser.error("--device cuda: this torch finds no GPU")
    model, budgets = arguments.model, arguments.budgets
    names = arguments.techniques or list(TECHNIQUES)
    if arguments.check:
        model, budgets = CHECKED_MODEL, CHECKED_BUDGETS
        names = ["checkpoint", "selective checkpoint", *SETTINGS]
    if not hasattr(torch._functorch.config, "activation_memory_budget_target"):
        names = [name for name in names if name != "compile, peak"]
    try:
        find(model)
    except ValueError as error:
        parser.error(f"--model: {error}")
    common = {
        "model": model,
        "device": arguments.device,
        "backend": arguments.backend,
        "modules": arguments.modules,
        "repeats": arguments.repeats,
    }
    console = Console()
    console = Console(width=max(console.width, 140))
    limits = fresh.Limits(arguments.seconds, arguments.gigabytes)
    rows = fresh.run(
        __file__, tasks_for(names, budgets, common), limits, arguments.json, console
    )
    facts = {**fresh.environment(), **common}
    console.print(table(rows, f"{model}, {arguments.device}, {arguments.backend}"))
    console.print(
        "peak MB by kind, parameters and inputs included. saved: what the forward leaves "
        "alive for the backward.\nrecomputed: flops of the step beyond eager mode's, as "
        "a share of the forward's. gradient error: relative to eager mode's; *: both in "
        "float64, as float32 rounds too coarsely here."
    )
    for row in rows:
        reason = row.get("skipped") or row.get("error")
        if reason:
            console.print(f"- {row['technique']}: {reason}", highlight=False)
    if arguments.json:
        fresh.finish(arguments.json, facts, rows)
        if any("peak_bytes" in row for row in rows):
            plot(rows, facts, arguments.json)
    found = faults(rows) if arguments.check else []
    for fault in found:
        console.print(f"[red]FAILED[/] {fault}", highlight=False)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(fresh.answer(measure) if fresh.is_child() else main())
