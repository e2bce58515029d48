"""Measures what it takes to compile a graph with a peak asked, beside upstream's.

    scripts/benchmark.sh cost
    scripts/benchmark.sh cost --net gpt2

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

from benchmarks import catalogue, first_steps, fresh, pages, plans, ways
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
    for net in asked.nets:
        if net == FIRST:
            for loop, way in first_steps.STEPS:
                of = {"set": PROJECT, "net": net, "share": 0.0}
                yield {**of, "kind": FIRST, "way": way, "loop": loop}
            continue
        of = {"set": catalogue.set_of(net), "net": net}
        for at, budget in enumerate(BUDGETS[: 1 if asked.check else None]):
            for target, wheel in WAYS.items():
                if target != "step" or at == 0:
                    kind = {"kind": target, "torch": wheel, "device": "inductor"}
                    yield {**of, "share": budget, **kind}


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    if task["kind"] == FIRST:
        return first_steps.measured(task["loop"], task["way"])
    return of_step(task) if task["kind"] == "step" else of_graph(task)


def of_step(task: fresh.Task) -> Row:
    """The plans that a graph is lowered for after the first step, which has one.

    Nothing for a net without blocks.
    """
    net = replace(catalogue.find(task["net"]), dtype=torch.float32)
    if not plans.has_blocks(net):
        return {}
    compile_something()
    training = ways.Training(net, blocks=ways.compiled("inductor"))
    training.within = budget_of(share=task["share"])
    with mock.patch.object(GraphLowering, "save_output_code") as lowered:
        training.step()
        first = lowered.call_count
        training.warmed(3)
    return {"plans_after": lowered.call_count / first - 1}


def stepped(rows: Sequence[Row]) -> list[Row]:
    """Those of nets that have blocks."""
    return [row for row in good(rows, kind="step") if "plans_after" in row]


def of_graph(task: fresh.Task) -> Row:
    net = replace(catalogue.find(task["net"]), dtype=torch.float32)
    made = plans.Plans(net, "inductor", "inductor", False)
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
    for of, part in pages.by_set(rows).items():
        both = [*pairs(part)]
        cases = "the first plan is kept", "a plan is replaced"
        for is_replaced, where in enumerate(cases):
            yield from pages.at_most(
                f"{of}: compile time / stock's where {where}",
                [
                    (ours["compile_s"] / theirs["compile_s"], named(ours))
                    for ours, theirs in both
                    if (ours["plans"] > 1) == is_replaced
                ],
                1.2,
                limit=f"Where {where}, a compile takes up to {{0:.2f}} times as long "
                "as stock's ({1}).",
            )
        yield from pages.at_most(
            f"{of}: plans lowered for a graph",
            [(ours["plans"], named(ours)) for ours, _ in both],
            3,
            limit="A graph can be lowered for {0} plans ({1}).",
        )
        yield from pages.at_most(
            f"{of}: plans for a StepBudget's graph after its first step",
            [(row["plans_after"], named(row)) for row in stepped(part)],
            2,
            limit="A StepBudget compiles a graph up to {0:.2g} times after its first "
            "step ({1}).",
        )
        yield from pages.at_most(
            f"{of}: kernels compiled / the most of one plan",
            [(ours["kernels"] / ours["of_one_plan"], named(ours)) for ours, _ in both],
            1,
            limit="{2:.0%} more kernels are compiled than the plan that is kept can "
            "have ({1}).",
        )


def named(row: Row) -> str:
    return f"{row['net']} at {row['share']:g}"


LEGEND = """Compile time is in CPU seconds, those of the C++ compiler included. Each compile has a process
and a cache of its own, in which something else was compiled before: small nets in float32,
for a CPU, with their kernels. Stock is the untouched wheel at the same budget. "Plans
lowered": how many plans inductor generated code for; kernels are compiled for the last alone.
A StepBudget compiles every graph again after the first step, for each of its plans. "First
step" has the peak of the first step under a StepBudget at its lowest peak, beside the lowest
that can be held, run operator by operator.
"""


def page(data: Row) -> str:
    rows, tables = data["measured"], dict[str, str]()
    of_compiles = [row for row in rows if row["kind"] != FIRST]
    for name, part in pages.by_set(of_compiles).items():
        both = {
            "net": lambda ours, theirs: ours["net"],
            "budget": lambda ours, theirs: f"{ours['share']:g}",
            "stock, s": lambda ours, theirs: f"{theirs['compile_s']:.1f}",
            "peak asked, s": lambda ours, theirs: f"{ours['compile_s']:.1f}",
            "ratio": lambda o, theirs: f"{o['compile_s'] / theirs['compile_s']:.2f}",
            "plans lowered": lambda ours, theirs: str(ours["plans"]),
        }
        steps: dict[str, Any] = {
            "net, in blocks": lambda row: row["net"],
            "share": lambda row: f"{row['share']:g}",
            "plans after the first": lambda row: f"{row['plans_after']:.2f}",
        }
        of_steps = pages.columns(stepped(part), steps)
        tables[name] = f"{pages.columns(pairs(part), both)}\n{of_steps}"
    firsts = {
        "first step": lambda row: row["loop"],
        "compiled": lambda row: row["way"],
        "peak / lowest": lambda row: f"{row['worst']['first'][0]:.3f}",
    }
    if found := good(rows, kind=FIRST):
        tables["First steps"] = pages.columns(found, firsts)
    marks = [*judged(rows)]
    origin = pages.measured_on(
        data["environment"], "Compiled for a CPU, float32,", rows
    )
    return pages.page(
        LEGEND, origin, pages.found(marks), pages.limits(marks, rows), tables
    )


def compiling(data: Row) -> str:
    """The README's sentences: what a compile takes with a peak asked."""
    rows = data["measured"]
    both = [*pairs(rows)]
    ratios = [ours["compile_s"] / theirs["compile_s"] for ours, theirs in both]
    after = statistics.fmean(row["plans_after"] for row in stepped(rows))
    return (
        "A whole compile with a peak asked, kernels included, takes "
        f"{statistics.median(ratios):.2f} times stock's in the median of "
        f"{len(ratios)}, {pages.held_out(ours for ours, _ in both)}, and "
        f"{max(ratios):.2f} at worst, where a plan that held too much was replaced. "
        "A StepBudget compiles again when the second step starts, in the mean "
        f"{after:.1f} plans of each graph. CPU seconds of small nets by inductor on a "
        f"CPU, torch {data['environment']['torch']}; on a GPU nobody has measured it.\n"
    )
