"""Measures what planning costs: the time of the partitioner, beside upstream's.

    scripts/benchmark.sh planning --json results/planning.json

CPU seconds of the whole partition of a graph that inductor compiles, by target "peak" and
by upstream's algorithm, in one process, medians of interleaved runs.
"""

import copy
import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch._functorch.config as config
from torch._functorch import partitioners

from benchmarks import fresh, nets
from benchmarks.meters import cpu_seconds
from benchmarks.pages import at_most, columns, good, Mark, marks_table, measured_on, Row
from benchmarks.tracing import Joint, untouched_partitioners
from benchmarks.ways import budgeted


NETS = ("llama-8", "lstm", "resnet50", "llama-32", "llama3-70b")
BUDGETS = (0.1, 0.5)
REPEATS = 3


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    for net in asked.nets or (NETS[:1] if asked.check else NETS):
        yield {"net": net}


def measure(task: fresh.Task) -> Row:
    joint = Joint(*nets.find(task["net"]).fake())
    # As inductor asks.
    ours: Any = ("peak", "exact", partitioners, {"fused": True})
    theirs: Any = ("saved", "dp", untouched_partitioners(), {})
    steps = []
    for budget in BUDGETS:
        times: dict[str, list[float]] = {}
        for target, solver, module, more in (theirs, ours) * REPEATS:
            split = functools.partial(
                module.min_cut_rematerialization_partition,
                copy.deepcopy(joint.graph),
                joint.inputs,
                **joint.options,
                **more,
            )
            choice = config.patch(activation_memory_budget_solver=solver)
            with budgeted(budget, target), choice:
                times.setdefault(target, []).append(cpu_seconds(split))
        medians = {target: statistics.median(found) for target, found in times.items()}
        steps.append({"budget": budget, **medians})
    return {"nodes": len(joint.graph.graph.nodes), "steps": steps}


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    ratios = [
        (step["peak"] / step["saved"], f"{row['net']} at {step['budget']:g}")
        for row in good(rows)
        for step in row["steps"]
    ]
    yield from at_most("partition by target peak / upstream's", ratios, 1.2)


def page(data: dict[str, Any]) -> str:
    cells: dict[str, Any] = {
        "net": lambda row: row["net"],
        "nodes": lambda row: f"{row['nodes']:,}",
    }
    for at, budget in enumerate(BUDGETS):
        cells[f"budget {budget:g}"] = lambda row, at=at: "{:.2f}".format(
            row["steps"][at]["peak"] / row["steps"][at]["saved"]
        )
    table = columns(good(data["measured"]), cells)
    origin = measured_on(data["environment"], "Run on one thread,")
    return f"{marks_table(data['rows'])}\n{table}\n{origin}"
