"""Measures what planning costs: the time of the partitioner, beside upstream's.

    scripts/benchmark.sh planning --json results/planning.json

CPU seconds of the whole partition of a graph that inductor compiles, by either target and
by upstream's algorithm, in one process, medians of interleaved runs.
"""

import copy
import functools
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch._functorch.config as config
from torch._functorch import partitioners

from benchmarks import catalogue, fresh
from benchmarks.meters import cpu_seconds
from benchmarks.pages import at_most, columns, good, Mark, marks_table, measured_on, Row
from benchmarks.tracing import Joint, untouched_partitioners
from benchmarks.ways import budgeted


NETS = ("llama-8", "lstm", "resnet50", "llama-32", "llama3-70b")
TARGETS = ("saved", "peak")
BUDGETS = (0.1, 0.5)
REPEATS = 3


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    for net in asked.nets or (NETS[:1] if asked.check else NETS):
        yield {"net": net}


def measure(task: fresh.Task) -> Row:
    joint = Joint(*catalogue.find(task["net"]).fake())
    # As inductor asks.
    ours = ("exact", partitioners, {"fused": True})
    ways: dict[str, Any] = {
        "upstream": ("saved", "dp", untouched_partitioners(), {}),
        **{target: (target, *ours) for target in TARGETS},
    }
    steps = []
    for budget in BUDGETS:
        times: dict[str, list[float]] = {}
        for way, (target, solver, module, more) in [*ways.items()] * REPEATS:
            split = functools.partial(
                module.min_cut_rematerialization_partition,
                copy.deepcopy(joint.graph),
                joint.inputs,
                **joint.options,
                **more,
            )
            choice = config.patch(activation_memory_budget_solver=solver)
            with budgeted(budget, target), choice:
                times.setdefault(way, []).append(cpu_seconds(split))
        medians = {way: statistics.median(found) for way, found in times.items()}
        steps.append({"budget": budget, **medians})
    return {"nodes": len(joint.graph.graph.nodes), "steps": steps}


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    for target in TARGETS:
        ratios = [
            (step[target] / step["upstream"], f"{row['net']} at {step['budget']:g}")
            for row in good(rows)
            for step in row["steps"]
        ]
        yield from at_most(f"partition by target {target} / upstream's", ratios, 1.2)


def page(data: dict[str, Any]) -> str:
    cells: dict[str, Any] = {
        "net": lambda row: row["net"],
        "nodes": lambda row: f"{row['nodes']:,}",
    }
    for target, (at, budget) in itertools.product(TARGETS, enumerate(BUDGETS)):
        cells[f"{target} {budget:g}"] = lambda row, target=target, at=at: (
            "{:.2f}".format(row["steps"][at][target] / row["steps"][at]["upstream"])
        )
    table = columns(good(data["measured"]), cells)
    origin = measured_on(data["environment"], "Run on one thread,")
    return f"{marks_table(data['rows'])}\n{table}\n{origin}"
