"""Measures what it takes to compile a graph with a peak asked, beside upstream's.

    scripts/benchmark.sh cost
    scripts/benchmark.sh cost --net gpt2 --budgets 0.5

Small nets in float32, compiled for a CPU with their kernels, forward and backward: by the
untouched wheel at a budget, and by the target "peak" at the same one, in turn. Each has a
process and a cache of its own, in which something else was compiled before. CPU seconds,
those of the C++ compiler included, as its processes run beside Python.

Then by blocks, three steps without a budget and with a StepBudget ("step"): how often a
graph is lowered once there is a plan for the step. And the first three steps of nets with few
and many layers ("first steps"), operator by operator, at the lowest peak that can be found.
"""

import os
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering

from benchmarks import catalogue, first_steps, fresh, nets, pages, plans, ways
from benchmarks.catalogue import HELD_OUT, PROJECT
from benchmarks.meters import compile_seconds
from benchmarks.pages import good, Mark, Row
from benchmarks.watched import budget_of
from benchmarks.ways import budgeted


FIRST = "first steps"
NETS = {
    PROJECT: ("vit", "gpt2", "hf-t5_small", FIRST),
    HELD_OUT: ("albert-small", "hiera-small", "seed-oss-small"),
    "check": ("vit",),
}
BUDGETS = (0.2, 0.0)
WAYS = {"saved": fresh.UNTOUCHED, "peak": "patched", "step": "patched"}
# The source of a kernel in the code that inductor generates.
KERNEL = re.compile(r"cpp_pybinding\(.*?'''(.*?)'''", re.DOTALL)


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    budgets = asked.budgets or BUDGETS
    for net in asked.nets:
        if net == FIRST:
            for loop, way in first_steps.STEPS:
                of = {"set": PROJECT, "net": net, "share": 0.0}
                yield {**of, "kind": FIRST, "way": way, "loop": loop}
            continue
        of = {"set": catalogue.set_of(net), "net": net}
        for at, budget in enumerate(budgets[: 1 if asked.check else None]):
            for target, wheel in WAYS.items():
                if target != "step" or at == 0:
                    yield {**of, "share": budget, "kind": target, "torch": wheel}


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    if task["kind"] == FIRST:
        return first_steps.measured(task["loop"], task["way"])
    return of_step(task) if task["kind"] == "step" else of_graph(task)


def of_step(task: fresh.Task) -> Row:
    """By a share of the range, whose ends are compiled too, and by as many bytes."""
    net = replace(catalogue.find(task["net"]), dtype=torch.float32)
    compile_something()
    budget = budget_of(share=task["share"])
    row = {"of_share": plans_after_the_first_step(net, budget)}
    by_bytes = budget_of(peak_bytes=budget.plan.allowed)
    return {**row, "of_bytes": plans_after_the_first_step(net, by_bytes)}


def plans_after_the_first_step(net: nets.Net, budget: Any) -> float:
    """The plans that each graph is lowered for, which the first step does by its own."""
    training = ways.Training(net, blocks=ways.compiled("inductor"))
    training.within = budget
    with mock.patch.object(GraphLowering, "save_output_code") as lowered:
        training.step()
        first = lowered.call_count
        training.warmed(3)
        return lowered.call_count / first - 1


def of_graph(task: fresh.Task) -> Row:
    net = replace(catalogue.find(task["net"]), dtype=torch.float32)
    made = plans.Plans(net, "inductor", "inductor", False, lambda training: training)
    compile_something()
    before, codes = compiled_kernels(), list[str]()
    with (
        budgeted(task["share"], task["kind"]),
        mock.patch.object(GraphLowering, "save_output_code", codes.append),
    ):
        seconds = compile_seconds(lambda: made.graph().warmed(1))
    # Of each plan, a forward and a backward.
    plans_lowered = [*zip(codes[::2], codes[1::2])]
    kernels = (set(KERNEL.findall("".join(pair))) for pair in plans_lowered)
    return {
        "compile_s": seconds,
        "plans": len(plans_lowered),
        "kernels": len(compiled_kernels() - before),
        "of_one_plan": max(map(len, kernels)),
    }


def compile_something() -> None:
    """So that what a first compile does for all is done: imports, headers."""

    def loss(x: Tensor) -> Tensor:
        return (x @ x).sin().sum()

    torch.compile(loss)(torch.randn(32, 32, requires_grad=True)).backward()
    torch.compiler.reset()


def compiled_kernels() -> set[Path]:
    return {*Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.main.so")}


# -------------------------------------------------------------------- marks


def pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """What is compiled with a peak asked, and what upstream compiles."""
    for ours in good(rows, kind="peak"):
        for theirs in good(rows, kind="saved", net=ours["net"], share=ours["share"]):
            yield ours, theirs


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    for of in ("project", "second"):
        found = [*pairs(good(rows, set=of))]
        for which, again, (middle, most) in (
            ("first plan kept", False, (1.1, 1.2)),
            ("a plan replaced", True, (1.6, 2.2)),
        ):
            ratios = [
                (ours["compile_s"] / theirs["compile_s"], named(ours))
                for ours, theirs in found
                if (ours["plans"] > 1) == again
            ]
            if not ratios:
                continue
            what = f"{of}: compile time / upstream's, {which}"
            median = statistics.median(ratio for ratio, _ in ratios)
            shown = f"{median:.2f}, {len(ratios)} graphs"
            yield Mark(f"{what}, median", shown, f"at most {middle}", median <= middle)
            yield from pages.at_most(f"{what}, largest", ratios, most)
        counts = [(ours["plans"], named(ours)) for ours, _ in found]
        if counts:
            mean = statistics.fmean(count for count, _ in counts)
            what = f"{of}: plans lowered for a graph"
            yield Mark(f"{what}, mean", f"{mean:.2f}", "at most 1.3", mean <= 1.3)
            yield from pages.at_most(f"{what}, most", counts, 3, "", "{:.0f} ({})")
        steps = good(rows, set=of, kind="step")
        for entry, asked in ("of_share", "a share"), ("of_bytes", "bytes"):
            found_by_net = [row[entry] for row in steps]
            if found_by_net:
                mean = statistics.fmean(found_by_net)
                what = f"{of}: plans of a step's graph after its first, {asked} asked"
                yield Mark(f"{what}, mean", f"{mean:.2f}", "at most 2", mean <= 2)
        more = [(o["kernels"] / o["of_one_plan"], named(o)) for o, _ in found]
        what = f"{of}: kernels compiled / those of the plan that has most"
        yield from pages.at_most(what, more, 1.0)


def named(row: Row) -> str:
    return f"{row['net']} at {row['share']:g}"


def page(data: Row) -> str:
    cells: dict[str, Any] = {
        "net": lambda ours, theirs: ours["net"],
        "set": lambda ours, theirs: ours["set"],
        "budget": lambda ours, theirs: f"{ours['share']:g}",
        "upstream, s": lambda ours, theirs: f"{theirs['compile_s']:.1f}",
        "peak asked, s": lambda ours, theirs: f"{ours['compile_s']:.1f}",
        "ratio": lambda ours, theirs: f"{ours['compile_s'] / theirs['compile_s']:.2f}",
        "plans lowered": lambda ours, theirs: str(ours["plans"]),
    }
    table = pages.columns([*pairs(data["measured"])], cells)
    how = pages.measured_on(data["environment"], "Compiled for a CPU,")
    return f"{pages.marks_table(data['rows'])}\n{table}\n{how}"
