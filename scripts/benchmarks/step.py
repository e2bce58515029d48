"""Measures budgets for a training step of models that are compiled block by block.

    scripts/benchmark.sh step                       all nets (an hour)
    scripts/benchmark.sh step --check               a small one, as CI does
    scripts/benchmark.sh step --net my_models:make  your own
    scripts/benchmark.sh step --json results/step.json
    scripts/benchmark.sh step --net bert --json results/step.json   one net's rows anew

Each net's blocks are compiled one by one; what is between them runs in eager mode. The
step runs by a StepBudget at several shares, and beside that with each block's own budget
of saved bytes, with a checkpoint around each block, and compiled as one graph that is
held to the same peak. The blocks' own budgets are upstream's, swept on the untouched
wheel. Peaks are bytes of live storages of a running step, operator by operator, beyond
those that are there when it starts; flops are those of the whole step.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import torch
import torch._functorch.config as config
from torch import Tensor

from benchmarks import fresh, nets, sweep
from benchmarks.bounds import bounds, every, rising, Steps
from benchmarks.meters import relative_error, Step
from benchmarks.pages import (
    at_most,
    columns,
    good,
    Mark,
    marks_table,
    measured_on,
    megabytes,
    panels,
    Row,
    RUN,
)
from benchmarks.tracing import cpu_attention_counted, overlay
from benchmarks.upstream import untouched_partitioners
from benchmarks.ways import (
    budgeted,
    checkpointed,
    compiled,
    Forward,
    OPERATORS,
    swept,
    Training,
    Ways,
)


# No plan was ever tuned on the last one.
NETS = ("llama-8", "gpt2", "bert", "vit", "moe", "hf-t5_small")
SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.0)
# The blocks' own budgets of saved bytes, to compare with at the same peak.
SAVED = tuple(n / 32 for n in range(32, -1, -1))
CHECK = "one net, two shares, as CI does"
KIND, KEY = "backend", ("net",)
LIMITS = fresh.Limits(seconds=6000, gigabytes=14)
# A training of a net whose blocks are put to work in some ways.
Make = Callable[[Ways], Training]


def tasks(names: Optional[Sequence[str]], check: bool) -> Iterator[fresh.Task]:
    names = names or (("vit",) if check else NETS)
    shares, saved = ((1.0, 0.5, 0.0), (0.5,)) if check else (SHARES, SAVED)
    for name in names:
        task: fresh.Task = {"net": name, "backend": OPERATORS, "shares": shares}
        yield {**task, "_saved": saved}


# ------------------------------------------------------------ in a fresh process


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    net, backend = nets.find(task["net"]), task["backend"]

    def make(ways: Ways) -> Training:
        return Training(net, blocks=ways)

    with cpu_attention_counted(), config.patch(enable_autograd_cache=False):
        if task.get("torch") == fresh.UNTOUCHED:
            return measure_upstream(make, backend, task["_saved"])
        return measure_operators(net, make, task)


def upstreams(module: str, task: fresh.Task) -> list[Row]:
    """What the task's module measures of upstream's budgets, on the untouched wheel."""
    if "_saved" not in task:
        return []
    row = fresh.measure_in_child(module, {**task, "torch": fresh.UNTOUCHED}, LIMITS)
    if "error" in row:
        raise RuntimeError(f"upstream's budgets: {row['error']}")
    return sweep.right(row["plans"])


def measure_upstream(make: Make, backend: Any, budgets: Sequence[float]) -> Row:
    """Steps in which all blocks have one budget of saved bytes, a row for each plan."""
    first: list[Tensor] = []

    def found(step: Step) -> Row:
        first.extend(() if first else step.gradients)
        row = figures(step)
        if backend == OPERATORS:
            row["off_budget_1"] = relative_error(step.gradients, first)
        return row

    def by(backend: Any) -> Training:
        return make(compiled(backend))

    return {"plans": swept(by, budgets, found, backend)}


def figures(step: Step) -> Row:
    return {"peak": step.own_peak, "given": step.given, "flops": step.flops}


def by_step(training: Training, budget: Any) -> tuple[Row, Step]:
    """A step within the StepBudget, once it has made and compiled its plan."""
    started = time.perf_counter()
    training.within = budget
    # The first is recorded, and what it leaves behind may have the second, too.
    step = training.warmed(3).measured()
    plan = budget.plan
    row = {
        **figures(step),
        "predicted": plan.predicted_peak,
        "allowed": plan.allowed,
        "floor": plan.floor,
        "seconds": round(time.perf_counter() - started, 1),
    }
    return row, step


def measure_steps(
    make: Make,
    backend: Any,
    task: fresh.Task,
    saved: Sequence[Row],
    checkpoints: Mapping[str, Callable[[Any], Ways]],
    step_budget: Callable[..., Any],
) -> Row:
    """A StepBudget at all shares, and held to the peak of each other way."""
    others = [{"kind": "saved", **plan} for plan in saved]
    for kind, ways in checkpoints.items():
        step = make(ways(backend)).warmed().measured()
        others.append({"kind": kind, **figures(step)})
    wanted = make(compiled(backend)).warmed().measured().gradients
    training = make(compiled(backend))

    def held(**asked: Any) -> Row:
        row, step = by_step(training, step_budget(**asked))
        if backend == OPERATORS:
            same = all(map(torch.equal, step.gradients, wanted))
            row["same_gradients"] = same
        return row

    steps = [{"share": share, **held(share=share)} for share in task["shares"]]
    for other in others:
        other["step"] = held(peak_bytes=other["peak"])
    return {"steps": steps, "others": others}


def checkpointed_compiled(backend: Any) -> Ways:
    return compiled(backend), checkpointed()


def measure_operators(net: nets.Net, make: Make, task: fresh.Task) -> Row:
    StepBudget = overlay("step_budget").StepBudget
    kinds = {"checkpoint": checkpointed_compiled}
    saved = upstreams(__name__, task)
    row = measure_steps(make, OPERATORS, task, saved, kinds, StepBudget)
    training = make(compiled(OPERATORS))
    training.within = StepBudget(share=0.5)
    with planning_watched() as (ours, theirs):
        training.warmed(2)
    row.update(planning_s=sum(ours), partition_s=sum(theirs), whole=[])
    for step in row["steps"][1:]:
        peak = {"activation_memory_peak_bytes": step["peak"]}
        with config.patch(peak):
            whole = Training(net, whole=compiled(OPERATORS)).warmed().measured()
        floor = overlay("saved_report").last_plan().peak.floor
        row["whole"].append({**figures(whole), "floor": floor})
    return row


@contextmanager
def planning_watched() -> Iterator[tuple[list[float], list[float]]]:
    """CPU seconds of planning, and of upstream's partition of the same graphs."""
    module, graphs = overlay("step_budget"), overlay("step_graph").Graph
    theirs = untouched_partitioners().min_cut_rematerialization_partition
    found: tuple[list[float], list[float]] = [], []

    def timed(seconds: list[float], function: Forward) -> Forward:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(time.process_time() - start)

        return call

    def both(graph: Any, planner: Any) -> None:
        dp = config.patch(activation_memory_budget_solver="dp")
        parent = copy.deepcopy(planner.joint.owning_module)
        with budgeted(0.5), dp:
            outputs = planner.num_fwd_outputs
            timed(found[1], theirs)(parent, [], num_fwd_outputs=outputs)
        find(graph, planner)

    find = timed(found[0], graphs._find_plans)
    plan = timed(found[0], module.StepBudget._make_plan)
    with (
        mock.patch.object(graphs, "_find_plans", both),
        mock.patch.object(module.StepBudget, "_make_plan", plan),
    ):
        yield found


# -------------------------------------------------------------------- marks


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    rows = good(rows)
    exact = all(row["backend"] == OPERATORS for row in rows)
    by = "by operators" if exact else "by inductor"
    steps: Steps = {row["net"]: row["steps"] for row in rows}
    as_others = [
        (f"{row['net']} as {name}", other["step"])
        for row in rows
        for name, other in named(row["others"])
        if other["step"]["allowed"] >= other["step"]["floor"]
    ]
    yield from bounds([*every(steps), *as_others], by, exact)
    yield from rising(steps, f"peak at a share / at the next larger, {by}", exact)
    yield from judged_beside(rows)
    compared = [
        (f"{row['net']} at {step['share']:g}", step["same_gradients"])
        for row in rows
        for step in row["steps"]
        if "same_gradients" in step
    ]
    if compared:
        wrong = [where for where, is_same in compared if not is_same]
        shown = ", ".join(wrong) or "all"
        yield Mark("gradients bit for bit those of budget 1", shown, "all", not wrong)


def judged_beside(rows: Sequence[Row]) -> Iterator[Mark]:
    """A StepBudget beside one graph, and beside what blocks do by themselves."""
    wholes = [
        (row["net"], step, whole)
        for row in rows
        for step, whole in zip(row["steps"][1:], row.get("whole", ()))
    ]
    yield from at_most(
        "floor / the floor of the whole graph",
        ((s["floor"] / w["floor"], net) for net, s, w in wholes),
        1.05,
    )
    yield from at_most(
        "flops / the whole graph's at the same peak",
        (
            (step["flops"] / whole["flops"], f"{net}, {step['share']:g}")
            for net, step, whole in wholes
            if whole["peak"] <= 1.001 * step["peak"]
        ),
        1.03,
    )
    for what, kinds in (
        ("each block's budget of saved bytes", "saved"),
        ("a checkpoint around each block", "checkpoint"),
    ):
        yield from at_most(
            f"flops / those of {what}, at no higher peak",
            (
                (other["step"]["flops"] / other["flops"], f"{row['net']}, {name}")
                for row in rows
                for name, other in named(row["others"])
                if kinds in name and other["step"]["peak"] <= 1.005 * other["peak"]
            ),
            1.0005,
            "at most 1",
        )
    yield from at_most(
        "planning, all graphs / upstream's partition of them",
        (
            (row["planning_s"] / row["partition_s"], row["net"])
            for row in rows
            if "planning_s" in row
        ),
        1.0,
    )


# ------------------------------------------------------------------- report


SWEPT = (
    "Saved: upstream's budgets of saved bytes, the same for all blocks, from 0 to 1 at "
    f"every 1/{len(SAVED) - 1}; of these the lowest peak, and where a StepBudget gains "
    "least."
)


def named(others: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    for other in others:
        told = f" {sweep.told(other['budgets'])}" if "budgets" in other else ""
        yield other["kind"] + told, other


def quoted(row: Row) -> Iterator[tuple[Row, str, Row]]:
    """What a table shows of the other ways."""
    saved = [other for other in row["others"] if "budgets" in other]
    if saved:
        least = max(saved, key=lambda other: other["step"]["flops"] / other["flops"])
        for what, other in ("lowest", sweep.lowest(saved)), ("least gain", least):
            yield row, f"saved {sweep.told(other['budgets'])}, {what}", other
    for name, other in named(row["others"]):
        if "budgets" not in other:
            yield row, name, other


def more(step: Row, row: Row) -> str:
    """Flops beyond those at the largest share."""
    return f"{step['flops'] / row['steps'][0]['flops'] - 1:.1%}"


def steps_table(rows: Sequence[Row]) -> str:
    def as_one_graph(row: Row, whole: Optional[Row]) -> str:
        if whole is None:
            return "-"
        return f"{more(whole, row)} ({megabytes(whole['peak'])} MB)"

    return columns(
        (
            (row, step, whole)
            for row in rows
            for step, whole in zip_longest(row["steps"], [None, *row.get("whole", ())])
        ),
        {
            "net": lambda row, step, whole: row["net"],
            "share": lambda row, step, whole: f"{step['share']:g}",
            "allowed MB": lambda row, step, whole: megabytes(step["allowed"]),
            "predicted MB": lambda row, step, whole: megabytes(step["predicted"]),
            "peak MB": lambda row, step, whole: megabytes(step["peak"]),
            "more flops": lambda row, step, whole: more(step, row),
            "as one graph": lambda row, step, whole: as_one_graph(row, whole),
        },
    )


def others_table(rows: Sequence[Row]) -> str:
    return columns(
        (each for row in rows for each in quoted(row)),
        {
            "net": lambda row, name, other: row["net"],
            "each block by itself": lambda row, name, other: name,
            "peak MB": lambda row, name, other: megabytes(other["peak"]),
            "more flops": lambda row, name, other: more(other, row),
            "StepBudget of that peak: peak MB": lambda row, name, other: megabytes(
                other["step"]["peak"]
            ),
            "its more flops": lambda row, name, other: more(other["step"], row),
        },
    )


def summary(data: dict[str, Any]) -> str:
    return marks_table(data["rows"]) + f"\n{measured_on(data['environment'])}"


CAPTION = "Blocks compiled one by one, fp32, operator by operator. "


def page(data: dict[str, Any], caption: str = CAPTION, how: str = RUN) -> str:
    rows = good(data["measured"])
    return (
        marks_table(mark._asdict() for mark in judged(rows))
        + "\nBy share. Peaks are beyond what is live when a step starts, flops beyond "
        "those at the largest share:\n\n"
        + steps_table(rows)
        + f"\nCompared with a budget or a checkpoint for each block. {SWEPT}\n\n"
        + others_table(rows)
        + f"\n{caption}{measured_on(data['environment'], how)}"
    )


def plot(data: dict[str, Any], result: Path, how: str = RUN) -> None:
    """Peak against recomputation, a panel for each net."""
    lines = {}
    for row in good(data["measured"]):
        kinds: dict[str, list[Row]] = {}
        for other in row["others"]:
            kinds.setdefault(other["kind"], []).append(other)
        drawn = [
            ("StepBudget", "o-", row["steps"]),
            ("as one graph", "x", row.get("whole", [])),
            *zip((f"{kind}, each block" for kind in kinds), "s^v", kinds.values()),
        ]
        base = row["steps"][0]["flops"]
        lines[row["net"]] = [
            (label, style, [(s["peak"] / 1e6, s["flops"] / base) for s in steps])
            for label, style, steps in drawn
            if steps
        ]
    x = "peak of the step beyond what is live at its start, MB"
    panels(result, data["environment"], lines, x, "flops / those at share 1", how)
