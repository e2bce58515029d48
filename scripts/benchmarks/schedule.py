"""What inductor's plans hold and take, beside upstream's; no kernel runs.

    scripts/benchmark.sh schedule                       all nets (hours)
    scripts/benchmark.sh schedule --check               a small one, as CI does
    scripts/benchmark.sh schedule --device cpu --net vit --kind upstream graph
    scripts/benchmark.sh schedule --net my_module:my_function

Forward and backward of fake tensors are compiled up to their kernels, and the generated
wrappers run with kernels that do nothing: what they allocate and free is what a step
would. Bytes are without parameters and inputs; time is that of the GPU's roofline. Nets
are those at real size, on the CPU small ones in float32, and a second set by which nothing
was tuned. No GPU is needed, but for one a torch that was built with CUDA:
TORCH_VERSION=2.15.0 in front of the command takes a wheel that is.

Kinds of plans: upstream (the untouched wheel's, by budgets from 0 to 1), graph (one graph,
target "peak"), blocks and whole (a StepBudget, each block or the net compiled by itself),
bytes (a limit in bytes), and allocator (on the CPU, beside what its allocator notes). The
exit status is 1 if that differs, or a plan is over what is allowed without a warning.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import torch
import torch._functorch.config as config
from torch._functorch import partitioners
from torch._inductor import config as inductor_config

from benchmarks import fresh, nets, second_set, sweep
from benchmarks.blocks import compiled_loss, on_fakes
from benchmarks.bounds import asked, every, RISES, rising, Steps, told
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
from benchmarks.peak import planned_peak, steps_of
from benchmarks.replay import compiled_for, GPUS, replay
from benchmarks.tracing import cpu_attention_counted
from benchmarks.ways import blocks_of, budgeted, compiled, Training


SETS = {"project": "Nets of the project", "second": "Second set of nets"}
NETS = tuple(net.name for net in (*nets.AT_SIZE, *nets.SMALL, *second_set.NETS))
BUDGETS = (1.0, 0.5, 0.2, 0.1, 0.0)
SHARES = (1.0, 0.5, 0.2, 0.0)
HALF = 0.5
COMPARED = {"graph": BUDGETS, "blocks": SHARES, "whole": SHARES}
OURS = {**COMPARED, "bytes": (HALF,)}
CHECKED = {"graph": (HALF, 0.0), "blocks": (HALF, 0.0)}
CHECK = "a small net, two budgets; as CI does"
ON_CPU = ("mlp-dropout", "vit")
CPU_BUDGET = 0.2
DRAWN, DRAWN_AT = "gpt2-xl-4", (1.0, 0.2, 0.0)
OPTIONS = {
    "device": {
        "choices": ("cpu", *sorted(GPUS)),
        "default": "h100" if torch.version.cuda else "cpu",
    }
}
KIND, KEY = "kind", ("net", "kind", "device")
LIMITS = fresh.Limits(seconds=7200, gigabytes=12)
# Scalars, such as the loss, which the allocator rounds up.
SCALARS = 64


def tasks(
    names: Optional[Sequence[str]], check: bool, device: str
) -> Iterator[fresh.Task]:
    device = "cpu" if check else device
    project = nets.SMALL if device == "cpu" else nets.AT_SIZE
    parts = 32 if device == "cpu" else 16
    swept = {*BUDGETS, *(n / parts for n in range(parts + 1))}
    kinds: Mapping[str, Sequence[float]]
    kinds = {"upstream": sorted(swept, reverse=True), **OURS}
    every_net = [net.name for net in (*project, *second_set.NETS)]
    beside_allocator = [*ON_CPU]
    if check:
        kinds = CHECKED
        every_net = beside_allocator = [ON_CPU[0]]
    for net in () if names or device != "cpu" else beside_allocator:
        yield {"set": "project", "net": net, "kind": "allocator", "device": device}
    for net in names or every_net:
        part = "second" if nets.find(net).held_out else "project"
        for kind, budgets in kinds.items():
            wheel = fresh.UNTOUCHED if kind == "upstream" else "patched"
            task = {"set": part, "net": net, "kind": kind, "device": device}
            yield {**task, "torch": wheel, "budgets": budgets}


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    on_cpu = task["device"] == "cpu"
    net = nets.find(task["net"])
    net = replace(net, dtype=torch.float32) if on_cpu else net
    kind, budgets = task["kind"], task.get("budgets", (CPU_BUDGET,))
    gpu = GPUS.get(task["device"])
    with (
        compiled_for(gpu) as backend,
        cpu_attention_counted() if on_cpu else nullcontext(),
        config.patch(enable_autograd_cache=False),
    ):
        plans = Plans(net, gpu, backend)
        if kind == "upstream":
            steps = plans.upstreams(budgets)
        elif kind == "bytes":
            steps = [plans.within_bytes()]
        elif kind in ("blocks", "whole"):
            steps = [*plans.of_steps(kind, budgets)]
        else:
            drawn = DRAWN_AT if task["net"] == DRAWN else ()
            steps = [plans.by_peak(b, b in drawn) for b in budgets]
    if kind == "allocator":
        return {"replayed": steps[0]["peak"], "allocated": allocated(net)}
    return {"steps": steps}


class Plans:
    """A net's plans by inductor, for a GPU or the CPU: what each holds and takes."""

    def __init__(self, net: nets.Net, gpu: Any, backend: Any) -> None:
        self.net, self.gpu, self.backend = net, gpu, backend

    def graph(self) -> Training:
        """The net as one graph, of fakes."""
        whole = compiled(self.backend, fullgraph=True)
        return Training(self.net, whole=whole, fake=True)

    def measured(self, training: Training, steps: int = 1, draw: bool = False) -> Row:
        """A plan that so many steps compile, and whether it is said to be over."""
        with warnings_noted() as said:
            start = time.process_time()
            training.warmed(steps)
            seconds = time.process_time() - start
        found = replay(training, self.gpu)
        row: Row = {
            "peak": found.peak,
            "phase": found.phase,
            "flops": found.flops,
            "warned": any("allowed" in text for text in said),
            "compile_s": round(seconds, 2),
        }
        if found.seconds is not None:
            row["seconds"] = found.seconds
        return {**row, "curve": found.curve} if draw else row

    def upstreams(self, budgets: Sequence[float]) -> list[Row]:
        graphs: list[sweep.Split] = []

        def by_budget(budget: float) -> Row:
            with budgeted(budget):
                return {"budget": budget, **self.measured(self.graph())}

        with sweep.noted(graphs):
            by_budget(1.0)
        return sweep.measured(graphs, by_budget, budgets)

    def by_peak(self, budget: float, draw: bool = False) -> Row:
        # Each plan that is compiled until one is within the peak is a decision.
        decide = mock.Mock(wraps=vars(partitioners)["decide"])
        with (
            budgeted(budget, "peak"),
            mock.patch.object(partitioners, "decide", decide),
        ):
            row = {"budget": budget, **self.measured(self.graph(), draw=draw)}
        return {**row, **bound(planned_peak()), "compiled": decide.call_count}

    def within_bytes(self) -> Row:
        """A limit in bytes: half way between the peaks of budgets 0 and 1."""
        peaks = [self.by_peak(budget)["peak"] for budget in (0.0, 1.0)]
        limit = sum(peaks) // 2
        with config.patch(activation_memory_peak_bytes=limit):
            row = self.measured(self.graph())
        return {"budget": HALF, **row, **bound(planned_peak()), "allowed": limit}

    def of_steps(self, kind: str, shares: Sequence[float]) -> Iterator[Row]:
        """A StepBudget's plans, of blocks or of the whole net; no blocks, no plans."""
        is_whole = kind == "whole"
        if not is_whole:
            try:
                blocks_of(self.net.fake()[1])
            except ValueError:
                return
        way: dict[str, Any] = {kind: compiled(self.backend, fullgraph=is_whole)}
        with nullcontext() if is_whole else compiled_loss(self.backend):
            for share in shares:
                training = Training(self.net, fake=True, **way)
                training.within = budget = on_fakes(share=share)
                # The first is recorded, and what it leaves behind may have the second.
                row = {"share": share, **self.measured(training, steps=3)}
                row["predicted"] = budget.plan.predicted_peak
                yield {**row, "allowed": budget.plan.allowed}


def bound(peak: Any) -> Row:
    """What a report says of a graph's peak; budget 1 has none."""
    return {e: getattr(peak, e) for e in ("allowed", "predicted") if peak is not None}


@contextmanager
def warnings_noted() -> Iterator[list[str]]:
    """What the planners warn of meanwhile."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch._functorch._activation_checkpointing")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def allocated(net: nets.Net) -> int:
    """The peak of a step by inductor on the CPU, as its allocator notes it."""
    caches = inductor_config.patch(force_disable_caches=True)
    with cpu_attention_counted(), budgeted(CPU_BUDGET, "peak"), caches:
        training = Training(net, whole=compiled("inductor")).warmed()
        return training.measured(allocator=True).own_peak


# -------------------------------------------------------------------- marks


def parts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each set of nets and device, by what they are called."""
    found: dict[str, list[Row]] = {}
    for row in good(rows):
        if row["kind"] != "allocator":
            name = GPUS[row["device"]].name if row["device"] in GPUS else "CPU"
            found.setdefault(f"{SETS[row['set']]}, {name}", []).append(row)
    return dict(sorted(found.items()))


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    cpu = good(rows, kind="allocator")
    yield from at_most(
        "replay of the CPU's wrapper against its allocator, inductor",
        ((abs(row["allocated"] - row["replayed"]), row["net"]) for row in cpu),
        *(SCALARS, f"{SCALARS} bytes, as scalars"),
        f"{{}} bytes apart at most ({{}}), {len(cpu)} nets",
        enforced=True,
    )
    for name, part in parts(rows).items():
        for mark in judged_part(part):
            yield mark._replace(what=f"{name}: {mark.what}")


def judged_part(rows: Sequence[Row]) -> Iterator[Mark]:
    """Of one set of nets on one device."""
    steps = {kind: steps_of(rows, kind) for kind in ("upstream", *OURS)}
    theirs = steps["upstream"]
    found, limits = (
        [
            (s["peak"] / s["allowed"] - 1, f"{at}, {kind}", s.get("warned", False))
            for kind in kinds
            for at, s in every(steps[kind])
            if "allowed" in s
        ]
        for kinds in (COMPARED, ("bytes",))
    )
    silent = [each[:2] for each in found if not each[2]]
    show = "{} of {}; {:+.2%} at most ({})"
    yield from at_most(
        "over what is allowed, without a warning",
        silent,
        *(0.005, "at most +0.5%"),
        f"{{:+.2%}} ({{}}), {len(silent)} of {len(found)} plans",
        enforced=True,
    )
    inside = [each[:2] for each in found]
    yield from share_within("plans within what is allowed", inside, 0.0, 11 / 12, show)
    kept = [(0.0 if warned else apart, at) for apart, at, warned in limits]
    yield from share_within("limits in bytes kept, or a warning", kept, 0.0, 1.0, show)
    yield from share_within(
        "predictions of StepBudgets within 2%",
        (
            (abs(s["predicted"] / s["peak"] - 1), f"{at}, {kind}")
            for kind in ("blocks", "whole")
            for at, s in every(steps[kind])
        ),
        *(0.02, 1.0),
    )
    for kind in COMPARED:
        yield from rising(steps[kind], f"peak / at the next larger budget, {kind}")
    for kind in COMPARED:
        yield from judged_beside(theirs, steps[kind], kind)
    yield from compile_times(theirs, steps["graph"])


def judged_beside(theirs: Steps, ours: Steps, kind: str) -> Iterator[Mark]:
    """Plans of ours beside all of upstream's, of nets that have both."""
    both = [net for net in theirs if ours.get(net)]
    yield from at_most(
        f"lowest peak / upstream's lowest, {kind}",
        (
            (sweep.lowest(ours[n])["peak"] / sweep.lowest(theirs[n])["peak"], n)
            for n in both
        ),
        *(1.0005, "at most 1"),
        f"{{:.3f}} at most ({{}}), {len(both)} nets",
    )
    for what, entry in ("flops", "flops"), ("roofline time", "seconds"):
        ratios = []
        for at, net, step in ((told(n, s), n, s) for n in both for s in theirs[n]):
            peak = step["peak"] * RISES
            low = [s for s in ours[net] if s["peak"] <= peak]
            costs = [s[entry] for s in low if entry in s]
            if entry in step and costs:
                ratios.append((min(costs) / step[entry], at))
        if ratios:
            mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
            plans = sum(len(theirs[net]) for net in both)
            yield Mark(
                f"{what} / upstream's, at no higher peak, {kind}",
                f"{mean:.3f} on average; {{:.2f}} at most ({{}}), ".format(*max(ratios))
                + f"{len(ratios)} of {plans} plans",
                "1 on average",
                mean <= 1,
                False,
            )


def compile_times(theirs: Steps, ours: Steps) -> Iterator[Mark]:
    """At budgets below 1, where the process has compiled before."""
    found = [
        (step["compile_s"] / same["compile_s"], told(net, step), step["compiled"] > 1)
        for net, steps in ours.items()
        for step in steps
        for same in theirs.get(net, ())
        if step["budget"] in asked(same) and step["budget"] < 1
        if "compile_s" in step and "compile_s" in same
    ]
    for which, again in (("first plan kept", False), ("replaced", True)):
        ratios = [each[:2] for each in found if each[2] == again]
        if ratios:
            median = statistics.median(ratio for ratio, _ in ratios)
            shown = "{:.2f} at most ({})".format(*max(ratios))
            yield Mark(
                f"compile time / upstream's at the same budget, {which}",
                f"{median:.2f} in the median, {shown}, {len(ratios)} plans",
                *("", True, False),
            )


# ------------------------------------------------------------------- report


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By net, and then by kind."""
    order = list(dict.fromkeys(row["net"] for row in rows))
    kinds = ["upstream", *OURS]
    return sorted(
        rows, key=lambda row: (order.index(row["net"]), kinds.index(row["kind"]))
    )


def table(rows: Sequence[Row], cell: Callable[[Row, Row], str], **more: Any) -> str:
    """A line for each net and kind of plans; ``cell`` is of a row and one of its steps."""

    def at(row: Row, budget: float) -> str:
        texts = [cell(row, step) for step in row["steps"] if budget in asked(step)]
        return "".join(texts[:1]) or "-"

    shown = [row for row in in_order(rows) if row["steps"]]
    cells = {f"{b:g}": functools.partial(at, budget=b) for b in BUDGETS}
    names = {"net": lambda row: row["net"], "plans": lambda row: row["kind"]}
    return columns(shown, {**names, **cells, **more})


def peaks(rows: Sequence[Row]) -> str:
    def cell(row: Row, step: Row) -> str:
        text = f"{step['peak'] / 1e6:,.{0 if step['peak'] >= 1e8 else 1}f}"
        if step["peak"] > step.get("allowed", step["peak"]):
            text += f" (**{step['peak'] / step['allowed'] - 1:+.1%}**)"
        return f"{text} w" if step.get("warned") else text

    def lowest(row: Row) -> str:
        least = sweep.lowest(row["steps"])
        count = sum(len(asked(step)) for step in row["steps"])
        return f"{cell(row, least)} at {sweep.told(asked(least))} (of {count})"

    return table(rows, cell, lowest=lowest)


def costs(rows: Sequence[Row]) -> str:
    least: dict[str, Row] = {}
    for row in reversed(in_order(rows)):
        least.update((row["net"], s) for s in row["steps"] if 1.0 in asked(s))

    def cell(row: Row, step: Row) -> str:
        base = least.get(row["net"], {})
        both = [e for e in ("flops", "seconds") if e in step and e in base]
        return " / ".join(f"{step[e] / base[e] - 1:.1%}" for e in both) or "-"

    return table(rows, cell)


HOW = """By budget or share. Plans: upstream, those of the untouched wheel; graph, one
graph's by target "peak", at budget 1 upstream's but for what the set changes in inductor;
blocks and whole, a StepBudget's for blocks that are compiled by themselves, and for one
graph; bytes, a limit half way between the peaks of budgets 0 and 1. Peaks are in MB; in
bold how far one is over what is allowed, and w where a warning says so. lowest: at which
budget, out of how many.
"""
COSTS = """What they take: flops beyond those of upstream's budget 1 / time likewise, if it
was measured: each kernel takes the GPU's time for its flops or for its bytes, the longer."""


def page(data: dict[str, Any]) -> str:
    rows = data["measured"]
    own = [mark._asdict() for mark in judged(good(rows, kind="allocator"))]
    text = HOW + ("\n" + marks_table(own) if own else "")
    for name, part in parts(rows).items():
        text += f"\n### {name}\n\n"
        text += marks_table(mark._asdict() for mark in judged_part(part))
        text += f"\n{peaks(part)}\n{COSTS}\n\n{costs(part)}"
        none = [row["net"] for row in part if not row["steps"]]
        if none:
            text += f"\nWithout blocks that repeat: {', '.join(none)}.\n"
    return text + "\n" + measured_on(data["environment"], SIMULATED)


def plot(data: dict[str, Any], result: Path) -> None:
    """Live bytes over the step, under three budgets; written beside ``result``."""
    for row in good(data["measured"], kind="graph"):
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
