"""What inductor's schedules for a GPU hold, at real size, on a machine that needs none.

    scripts/benchmark.sh schedule                       ten nets (an hour)
    scripts/benchmark.sh schedule --net gpt2-xl-4
    scripts/benchmark.sh schedule --net my_module:my_function

Forward and backward of fake tensors are compiled for a GPU up to its kernels, and the
generated wrappers run with kernels that do nothing: what they allocate and free is
what a step would. Bytes are without parameters and inputs. Upstream's plans are those
of the untouched wheel. For a GPU torch has to be built with CUDA; TORCH_VERSION=2.15.0
in front of the command takes a wheel that is. The exit status is 1 only if a replay for
the CPU differs from what its allocator noted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import torch
from torch import fx, nn
from torch._functorch import partitioners

from benchmarks import fresh, nets, sweep
from benchmarks.bounds import asked, at_no_more_cost, every, rising, told
from benchmarks.pages import (
    at_most,
    columns,
    good,
    Mark,
    marks_table,
    measured_on,
    panels,
    Row,
    share_within,
    SIMULATED,
)
from benchmarks.peak import allocated, steps_of
from benchmarks.replay import compiled_for, GPUS, Live, Replay, replay
from benchmarks.tracing import overlay
from benchmarks.ways import budgeted


NETS = tuple(net.name for net in nets.AT_SIZE)
NEEDS_CUDA = True
BUDGETS = (1.0, 0.5, 0.2, 0.1, 0.0)
# One more for the target "peak", where upstream's plan of .5 repeats a little, ours of .5
# nothing, and ours of .2 more: for a comparison at no more flops.
BETWEEN = {"resnet50-224": 0.4, "unet-256": 0.4}
# Of upstream's: by thirty-seconds, and those that stand in the table.
SWEPT = tuple(sorted({*BUDGETS, *(n / 32 for n in range(33))}, reverse=True))
KINDS = ("upstream", "saved", "peak")
ON_CPU = ("vit", "gpt2", "mlp-dropout", "bert", "llama-8")
CPU_BUDGET = 0.2
PLOTTED = (1.0, 0.2, 0.0)
OPTIONS = {"gpu": {"choices": sorted(GPUS), "default": "h100"}}
KIND, KEY = "kind", ("net", "kind", "gpu")
LIMITS = fresh.Limits(seconds=3600, gigabytes=12)
# What is at the peak: so many of the largest.
SHOWN = 3
# Scalars, such as the loss, which the allocator rounds up.
SCALARS = 64


def tasks(
    names: Optional[Sequence[str]], check: bool, gpu: str
) -> Iterator[fresh.Task]:
    for net in () if names else ON_CPU:
        yield {"net": net, "kind": "allocator", "gpu": None}
    for net in names or NETS:
        for kind in KINDS:
            wheel = fresh.UNTOUCHED if kind == "upstream" else "patched"
            task = {"net": net, "kind": kind, "gpu": gpu, "torch": wheel}
            yield {**task, "budgets": budgets_of(net, kind), "_draw": net == NETS[0]}


def budgets_of(net: str, kind: str) -> Sequence[float]:
    if kind == "upstream":
        return SWEPT
    more = [BETWEEN[net]] if kind == "peak" and net in BETWEEN else []
    return sorted([*BUDGETS, *more], reverse=True)


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    if task["kind"] == "allocator":
        return measure_on_cpu(task)
    if task["kind"] == "upstream":
        return {"steps": swept(task)}
    return {"steps": [measure_plan(task, budget) for budget in task["budgets"]]}


def swept(task: fresh.Task) -> list[Row]:
    """The plans of all budgets; one that was scheduled is not scheduled again."""
    graphs: list[sweep.Split] = []
    most, *_ = task["budgets"]
    with sweep.noted(graphs):
        first = measure_plan(task, most)

    def measure(budget: float) -> Row:
        return first if budget == most else measure_plan(task, budget)

    return sweep.measured(graphs, measure, task["budgets"])


def measure_plan(task: fresh.Task, budget: float) -> Row:
    """The schedule's peak, and what was known of it before it was scheduled."""
    mode, module, inputs = nets.find(task["net"]).fake()
    by_peak = task["kind"] == "peak"
    with (
        budgeted(budget, "peak" if by_peak else "saved"),
        estimated(task["kind"] != "upstream") as estimates,
        compiled_for(GPUS[task["gpu"]]) as backend,
        mode,
    ):
        found = replayed(module, inputs, backend)
    row: Row = {
        "budget": budget,
        "peak": found.peak,
        "phase": "forward" if found.peaks[0] == found.peak else "backward",
        "flops": found.flops,
        "live": [live._asdict() for live in found.live[:SHOWN]],
    }
    if task.get("_draw") and task["kind"] == "peak" and budget in PLOTTED:
        row["curve"] = found.curve
    if estimates:
        # One for each plan that was compiled until one was within the peak.
        row.update(estimated=estimates[-1], compiled=len(estimates))
    if by_peak and budget < 1:
        row["allowed"] = overlay("saved_report").last_plan().peak.allowed
    return row


@contextmanager
def estimated(is_ours: bool) -> Iterator[list[int]]:
    """What the model of kernels, if there is one, says of plans chosen meanwhile."""
    if not is_ours:
        yield []
        return
    read, by_kernels = overlay("liveness").read, overlay("fused_peak").by_kernels
    # Not by name, since type checkers see the torch without patches.
    decide: Any = vars(partitioners)["decide"]
    found: list[int] = []

    @functools.wraps(decide)
    def decide_and_tell(graph: fx.Graph, info: Any, outputs: int, *rest: Any) -> Any:
        decision = decide(graph, info, outputs, *rest)
        joint = by_kernels(read(graph, info, outputs))
        found.append(joint.evaluate(joint.storages(decision.saved_values)).peak)
        return decision

    with mock.patch.object(partitioners, "decide", decide_and_tell):
        yield found


def replayed(module: nn.Module, inputs: Sequence[Any], backend: Any) -> Replay:
    step = torch.compile(module, backend=backend, fullgraph=True)
    there = [*module.parameters(), *module.buffers(), *inputs]
    return replay(lambda: step(*inputs), there)


def measure_on_cpu(task: fresh.Task) -> Row:
    """The replay for the CPU beside what its allocator notes of the step itself."""
    net = nets.find(task["net"])
    mode, module, inputs = net.fake()
    with budgeted(CPU_BUDGET, "peak"), compiled_for(None) as backend, mode:
        peak = replayed(module, inputs, backend).peak
    return {"replayed": peak, "allocated": allocated(net, CPU_BUDGET)}


# -------------------------------------------------------------------- marks


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    cpu = good(rows, kind="allocator")
    yield from at_most(
        "replay of the CPU's wrapper against its allocator, inductor",
        ((abs(row["allocated"] - row["replayed"]), row["net"]) for row in cpu),
        *(SCALARS, f"{SCALARS} bytes, as scalars"),
        f"{{}} bytes apart at most ({{}}), {len(cpu)} nets",
        enforced=True,
    )
    estimates = [
        (abs(step["estimated"] / step["peak"] - 1), f"{at}, {kind}")
        for kind in KINDS
        for at, step in every(steps_of(rows, kind))
        if "estimated" in step
    ]
    for most, share in ((0.05, 0.9), (0.1, 1.0)):
        what = f"estimates within {most:.0%} of the schedule's peak"
        yield from share_within(what, estimates, most, share)
    steps = steps_of(rows, "peak")
    over = [
        (step["peak"] / step["allowed"] - 1, at)
        for at, step in every(steps)
        if "allowed" in step
    ]
    yield from share_within(
        "peak of the schedule / what the budget allows",
        over,
        *(0.005, 1.0),
        "within +0.5% in {} of {} plans; {:+.1%} at most ({})",
    )
    yield from rising(steps, "peak of the schedule / that at the next larger budget")
    yield from judged_beside(steps_of(rows, "upstream"), steps)


def judged_beside(
    upstream: dict[str, list[Row]], ours: dict[str, list[Row]]
) -> Iterator[Mark]:
    """Our plans for the peak beside upstream's, of nets that have both."""
    both = [net for net in upstream if net in ours]
    plans = {net: [(s["peak"], s["flops"]) for s in ours[net]] for net in both}
    yield from share_within(
        "lowest peak of ours / upstream's, at no more flops than upstream's plan",
        (
            (at_no_more_cost(plans[net], step["flops"]) / step["peak"], told(net, step))
            for net in both
            for step in upstream[net]
            if min(cost for _, cost in plans[net]) <= step["flops"] * (1 + 1e-5)
        ),
        *(1.0005, 1.0),
        "never higher in {} of {} plans; worst {:.2f} ({})",
    )
    swept = [net for net in both if is_swept(upstream[net])]
    yield from at_most(
        "lowest peak of ours / of upstream's budgets",
        (
            (sweep.lowest(ours[n])["peak"] / sweep.lowest(upstream[n])["peak"], n)
            for n in swept
        ),
        *(1.0005, "at most 1"),
        f"{{:.2f}} at most ({{}}), {len(swept)} nets",
    )


def is_swept(steps: Sequence[Row]) -> bool:
    """Whether the lowest of these plans may be called that of all budgets."""
    return sum(len(asked(step)) for step in steps) >= len(SWEPT)


# ------------------------------------------------------------------- report


def peaks(rows: Sequence[Row]) -> str:
    """Megabytes by budget, and how far the estimate was off."""

    def cell(row: Row, budget: float) -> str:
        step = next(step for step in row["steps"] if budget in asked(step))
        text = f"{step['peak'] / 1e6:,.0f}"
        if "estimated" in step:
            text += f" ({step['estimated'] / step['peak'] - 1:+.1%})"
        return text

    def lowest(row: Row) -> str:
        if row["kind"] == "upstream" and not is_swept(row["steps"]):
            return "not swept"
        least = sweep.lowest(row["steps"])
        count = sum(len(asked(step)) for step in row["steps"])
        at = f"at {sweep.told(asked(least))} (of {count})"
        return f"{least['peak'] / 1e6:,.0f} {at}"

    order = list(dict.fromkeys(row["net"] for row in rows))
    shown = [row for row in good(rows) if row["kind"] in KINDS]
    shown.sort(key=lambda row: (order.index(row["net"]), KINDS.index(row["kind"])))
    cells = {f"{b:g}": functools.partial(cell, budget=b) for b in BUDGETS}
    names = {"net": lambda row: row["net"], "plans": lambda row: row["kind"]}
    return columns(shown, {**names, **cells, "lowest": lowest})


def places(rows: Sequence[Row]) -> str:
    """What is live at the peaks of all budgets."""

    def largest(step: Row) -> str:
        live = [Live(**each) for each in step["live"]]
        return ", ".join(f"{x.nbytes / 1e6:,.0f} MB {x.line or x.name}" for x in live)

    return columns(
        ((row, step) for row in good(rows, kind="peak") for step in row["steps"]),
        {
            "net": lambda row, step: row["net"],
            "budget": lambda row, step: f"{step['budget']:g}",
            "peak in the": lambda row, step: step["phase"],
            "largest values there": lambda row, step: largest(step),
        },
    )


def page(data: dict[str, Any]) -> str:
    rows = data["measured"]
    cards = sorted({GPUS[row["gpu"]].name for row in rows if row.get("gpu")})
    text = marks_table(mark._asdict() for mark in judged(rows)) + (
        f"\nPeaks of inductor's schedule for {' and '.join(cards)}, forward "
        "and backward of one graph, MB by budget; in brackets how far the estimate "
        "is off. Plans are those of the untouched wheel (upstream), and of this set for "
        "saved bytes and for the peak; at budget 1 they differ by what the set changes in "
        "inductor. lowest: at which budget, "
        f"out of how many; {len(SWEPT)} are the multiples of 1/32 from 0 to 1 and "
        "those above. Ours were scheduled at the budgets of the table alone.\n\n"
        + peaks(rows)
    )
    again = [
        f"{row['net']} at {step['budget']:g} ({step['compiled']} plans)"
        for row in good(rows, kind="peak")
        for step in row["steps"]
        if step.get("compiled", 1) > 1
    ]
    if again:
        text += f"\nCompiled again to be within the peak: {', '.join(again)}.\n"
    if len({row["net"] for row in rows}) == 1:
        text += "\nWhere the peak is:\n\n" + places(rows)
    return text + "\n" + measured_on(data["environment"], SIMULATED)


def plot(data: dict[str, Any], result: Path) -> None:
    """Live bytes over the step, under three budgets; written beside ``result``."""
    for row in good(data["measured"], kind="peak"):
        drawn = []
        for step in row["steps"]:
            curve = [nbytes / 1e6 for nbytes in step.get("curve", ())]
            points = [(at / len(curve), size) for at, size in enumerate(curve)]
            if points:
                drawn.append((f"budget {step['budget']:g}", "-", points))
        if drawn:
            net = f"{row['net']}, inductor's schedule"
            x = "allocations of forward and backward, from first to last"
            y = "live MB, without parameters and inputs"
            panels(result, data["environment"], {net: drawn}, x, y, SIMULATED)
            return
