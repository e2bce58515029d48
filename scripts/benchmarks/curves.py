"""Measures what a curve of budgets costs, and what the report of a plan adds.

    scripts/benchmark.sh curves               all rows, some minutes
    scripts/benchmark.sh curves --check       the small net's counts only, as CI does

Every row is a process of its own that partitions one joint graph with the Pareto plot
switched on: on the patched checkout, or on the untouched torch beside it. Times are
CPU seconds of one thread, reported and never enforced. The exit status is 1 only if a
count (min cuts, calls of the solver, sets cut twice) is off.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config

from benchmarks import fresh, options
from benchmarks.nets import find
from benchmarks.results import environment, fail, markdown, measured_on, PLANNED, Row
from benchmarks.tracing import CHOOSE, CUT, observed, PARTITION, REPORT, SOLVE, trace


BUDGET = 0.3
SMALL, LARGE = "mlp-uneven", "bert-large"
# CPU seconds that the plot may take, and what a curve may count.
MARKS = {SMALL: 3.0, LARGE: 60.0}
MOST_CUTS = 36
MOST_SOLVES = 2
LIMITS = fresh.Limits(seconds=1200, gigabytes=12)


def measure(task: fresh.Task) -> Row:
    """Partition a net with the plot, in this process and by this torch."""
    torch.set_num_threads(1)
    fake = find(task["net"]).fake()
    with (
        observed() as observer,
        tempfile.TemporaryDirectory() as folder,
        torch._functorch.config.patch(
            activation_memory_budget=BUDGET,
            visualize_memory_budget_pareto=True,
            memory_budget_pareto_dir=folder,
        ),
    ):
        trace(*fake)
        files = sorted(place.suffix for place in Path(folder).iterdir())
    calls, seconds, asked = observer.calls, observer.seconds, observer.instance
    # What each min cut was told to leave unsaved; two are made before the knapsack.
    told = [args[3] for args, _ in observer.cuts if len(args) > 3 and args[3]]
    sets = [frozenset(node.name for node in nodes) for nodes in told]
    return {
        "items": len(asked.memory) if asked else 0,
        "nodes": len(asked.graph.nodes) if asked else 0,
        "min_cuts": calls[CUT],
        "sets_cut_twice": len(sets) - len(set(sets)),
        "solver_calls": calls[SOLVE] + calls.get("solve_budgets", 0),
        "plan_and_plot_seconds": seconds[CHOOSE],
        "partition_seconds": seconds[PARTITION],
        "report_seconds": seconds.get(REPORT, 0.0),
        "files": files,
    }


def faults(row: Row) -> list[str]:
    """What is off in the counts of a patched row."""
    if "error" in row:
        return [f"{row['net']}, {row['torch']}: {row['error']}"]
    if row["torch"] == fresh.UNTOUCHED:
        return []
    net, cuts = row["net"], row["min_cuts"]
    found = []
    if cuts > MOST_CUTS:
        found.append(f"{net}: {cuts} min cuts, {MOST_CUTS} are allowed")
    if row["sets_cut_twice"]:
        found.append(f"{net}: {row['sets_cut_twice']} sets were cut twice")
    if row["solver_calls"] > MOST_SOLVES:
        found.append(f"{net}: {row['solver_calls']} calls of the solver")
    if row["files"] != [".json", ".svg"]:
        found.append(f"{net}: wrote {row['files']}")
    return found


def page(data: dict[str, Any]) -> str:
    facts = data["environment"]
    lines = []
    for row in data["rows"]:
        ours = row["torch"] != fresh.UNTOUCHED
        line = [row["net"], row["torch"]]
        if "error" in row:
            lines.append([*line, row["error"], *[""] * 6])
            continue
        counts = ("nodes", "items", "min_cuts", "solver_calls")
        line += [f"{row[count]:,}" for count in counts]
        line += [f"{row['plan_and_plot_seconds']:.1f}", "", ""]
        if ours:
            share = row["report_seconds"] / row["partition_seconds"]
            line[-2:] = f"{facts['marks'][row['net']]:g}", f"{share:.2%}"
        lines.append(line)
    heading = ("net", "torch", "nodes", "items", "min cuts", "solver calls")
    return markdown([*heading, "CPU s", "mark", "recording"], lines) + (
        f"\nBudget {facts['budget']}, solver of the release's default. "
        f"{measured_on(facts, PLANNED)}"
    )


def main() -> int:
    parser = options.parser(__doc__, check="the small net only")
    arguments = parser.parse_args()
    wanted = [(SMALL, "patched")]
    if not arguments.check:
        wanted += [(SMALL, fresh.UNTOUCHED), (LARGE, "patched")]
    tasks = [{"net": net, "torch": torch} for net, torch in wanted]
    rows = fresh.run(__name__, tasks, LIMITS)
    facts = {**environment(), "budget": BUDGET, "marks": MARKS}
    data = {"environment": facts, "rows": rows}
    fresh.finish(arguments.json, data, page)
    return fail([fault for row in rows for fault in faults(row)])
