"""Measures where the partitioner's time and memory go, before and after the set.

    scripts/benchmark.sh compile                            models of real size
    scripts/benchmark.sh compile --models gpt2-xl my:model   some, also your own
    scripts/benchmark.sh compile --json results/compile.json

Each model is traced with fake tensors, so the sizes are real and no GPU is needed,
and partitioned at one budget: "before" by the untouched wheel with its own solver
(dp), "after" by the patched checkout with its own. Every run is a fresh process with
cold caches; one that fails, or takes more than it may, is a row that says so. Times are
CPU seconds of one thread; knapsack MB is by how much the
process grew at most while the solver ran. With --json a run that was interrupted goes
on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import fresh
import torch
import torch._functorch.config
from capture import trace
from matplotlib.figure import Figure
from nets import find
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch._functorch import partitioners
from torch._functorch._activation_checkpointing import knapsack
from upstream import dispatch


MODELS = (
    "bert-large",
    "gpt2-xl",
    "llama3-8b",
    "llama3-70b",
    "moe-8x7b",
    "resnet152",
    "unet-512",
)
CHECKED = ("dlrm-dcn",)
# Parts of a run, in the order of the plot. They do not overlap.
PARTS = {
    "trace_s": "AOT trace and joint passes",
    "min_cut_s": "min cuts",
    "estimate_s": "estimate_runtime",
    "knapsack_s": "knapsack",
    "partition_rest_s": "rest of the partition",
}
# A normalised size carries two roundings.
ROUNDING = 1e-12


# --------------------------------------------------------- in a fresh process


class Stopwatch:
    """CPU seconds and calls of functions that are replaced by timed ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.seconds[name], self.calls[name] = 0.0, 0

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.process_time() - start
                self.calls[name] += 1

        return call


def measure(task: fresh.Task) -> fresh.Row:
    torch.set_num_threads(1)
    net = find(task["model"])
    watch, peaks = Stopwatch(), []
    row: fresh.Row = {"joint_nodes": 0, "items": 0, "knapsack_bytes": 0}
    row.update(used=None, over=False)
    place, name = dispatch()
    solve = watch.timed("knapsack", getattr(place, name))
    cut = watch.timed("min_cut", partitioners.solve_min_cut)
    estimate = watch.timed("estimate", partitioners.estimate_runtime)
    plan = watch.timed("partition", partitioners.min_cut_rematerialization_partition)

    def watch_knapsack(
        graph: Any, memory: Any, runtimes: Any, budget: Any, *rest: Any
    ) -> Any:
        peaks.append(fresh.high_water_mark())
        before = fresh.reset_high_water_mark()
        answer = solve(graph, memory, runtimes, budget, *rest)
        peaks.append(fresh.high_water_mark())
        used = math.fsum(memory[i] for i in answer[1])
        row.update(
            joint_nodes=len(graph.nodes),
            items=len(memory),
            knapsack_bytes=peaks[-1] - before,
            used=used,
            over=used > budget + ROUNDING,
        )
        return answer

    fake = net.fake()
    start_bytes, start = fresh.high_water_mark(), time.process_time()
    config = torch._functorch.config
    with (
        config.patch(activation_memory_budget=task["budget"]),
        mock.patch.multiple(
            partitioners,
            solve_min_cut=cut,
            estimate_runtime=estimate,
        ),
        mock.patch.object(place, name, watch_knapsack),
    ):
        trace(*fake, plan)
    total = time.process_time() - start
    part = watch.seconds
    inner = part["min_cut"] + part["estimate"] + part["knapsack"]
    return {
        **row,
        "solver": str(config.activation_memory_budget_solver),
        "total_s": total,
        "trace_s": total - part["partition"],
        "min_cut_s": part["min_cut"],
        "min_cuts": watch.calls["min_cut"],
        "estimate_s": part["estimate"],
        "knapsack_s": part["knapsack"],
        "partition_rest_s": part["partition"] - inner,
        "start_bytes": start_bytes,
        "peak_bytes": max(*peaks, fresh.high_water_mark()),
    }


# ------------------------------------------------------------------- report


def medians(rows: list[fresh.Row]) -> list[fresh.Row]:
    """One row for each model and variant, of the runs that were finished."""
    groups: dict[tuple[str, str], list[fresh.Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["variant"]), []).append(row)
    result = []
    for runs in groups.values():
        done = [run for run in runs if "error" not in run] or runs[:1]
        row = {key: value for key, value in done[0].items() if key != "run"}
        row["runs"] = sum("error" not in run for run in runs)
        for key in row:
            if key.endswith(("_s", "_bytes")):
                row[key] = statistics.median(run[key] for run in done)
        result.append(row)
    return result


def table(rows: list[fresh.Row], title: str) -> Table:
    result = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("model", no_wrap=True)
    result.add_column("", no_wrap=True)
    for heading in (
        "nodes",
        "items",
        "trace",
        "min\ncuts",
        "esti-\nmate",
        "knap-\nsack",
        "rest",
        "total s",
        "knap-\nsack MB",
        "peak\nMB",
        "used\nof budget",
    ):
        result.add_column(heading, justify="right")
    for row in rows:
        if "error" in row:
            result.add_row(row["model"], row["variant"], f"[yellow]{row['error']}[/]")
            continue
        used = "-"
        if row["used"] is not None:
            used = f"{row['used'] / row['budget']:.4f}"
            used = f"[red]{used}[/]" if row["over"] else used
        result.add_row(
            row["model"],
            row["variant"],
            f"{row['joint_nodes']:,}",
            f"{row['items']:,}",
            *(f"{row[k]:.{3 if k == 'knapsack_s' else 2}f}" for k in PARTS),
            f"{row['total_s']:.1f}",
            f"{row['knapsack_bytes'] / 1e6:.1f}",
            f"{row['peak_bytes'] / 1e6:,.0f}",
            used,
        )
    return result


def plot(rows: list[fresh.Row], facts: dict[str, Any], result: Path) -> None:
    """Stacked bars, two for each model; written beside ``result``."""
    done = [row for row in rows if "error" not in row]
    figure = Figure(figsize=(9, 1.6 + 0.36 * len(done)), dpi=120)
    axes = figure.subplots()
    left = [0.0] * len(done)
    # A gap after each model's bars.
    models = list(dict.fromkeys(row["model"] for row in done))
    places = [
        place + 0.6 * models.index(row["model"]) for place, row in enumerate(done)
    ]
    for key, label in PARTS.items():
        width = [row[key] for row in done]
        axes.barh(places, width, left=left, height=0.8, label=label)
        left = [a + b for a, b in zip(left, width)]
    for place, row, end in zip(places, done, left):
        axes.text(
            end,
            place,
            f"  knapsack {row['knapsack_s'] * 1e3:,.1f} ms"
            f" = {row['knapsack_s'] / row['total_s']:.3%}",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(places, [f"{row['model']}, {row['variant']}" for row in done])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.28 * max(left, default=1))
    axes.set_xlabel("CPU seconds, one thread")
    axes.set_title(
        f"Trace and partition at budget {rows[0]['budget']:g}: where the time goes",
        loc="left",
    )
    axes.legend(fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    fresh.save(figure, result, facts)


def faults(rows: list[fresh.Row]) -> list[str]:
    """What must not be: only counts, no times."""
    found = []
    for row in rows:
        name = f"{row['model']}, {row['variant']}"
        if "error" in row:
            found.append(f"{name}: {row['error']}")
        elif row["variant"] == "after" and row["over"]:
            found.append(f"{name}: used {row['used']} of a budget of {row['budget']}")
    return found


def budget(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(
            f"{text} is not between 0 and 1, where a solver is asked"
        )
    return value


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark.sh compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=MODELS,
        metavar="MODEL",
        help=f"names, or module:function (default: {' '.join(MODELS)})",
    )
    parser.add_argument("--budget", type=budget, default=0.5, help="default: 0.5")
    fresh.add_options(parser, repeats=1, seconds=1200)
    parser.add_argument(
        "--check",
        action="store_true",
        help="one small model; exit status 1 if the set is over the budget",
    )
    arguments = parser.parse_args()
    if not hasattr(knapsack, "KNAPSACK_SOLVERS"):
        raise SystemExit("this torch is not patched; run scripts/benchmark.sh compile")
    models = CHECKED if arguments.check else arguments.models
    tasks = [
        (
            {
                "model": model,
                "variant": variant,
                "budget": arguments.budget,
                "run": run,
            },
            fresh.python_path(variant == "after"),
        )
        for model in models
        for run in range(arguments.repeats)
        for variant in ("before", "after")
    ]
    console = Console()
    console = Console(width=max(console.width, 118))
    limits = fresh.Limits(arguments.seconds, arguments.gigabytes)
    rows = medians(fresh.run(__file__, tasks, limits, arguments.json, console))
    facts = {**fresh.environment(), "repeats": arguments.repeats}
    console.print(table(rows, f"budget {arguments.budget:g}, CPU seconds"))
    console.print(
        "before: the untouched wheel, after: the patched checkout, each with its own "
        "solver. used of budget: true bytes of what the solver saved; above 1 is over."
    )
    if arguments.json:
        fresh.finish(arguments.json, facts, rows)
        if any("error" not in row for row in rows):
            plot(rows, facts, arguments.json)
    found = faults(rows) if arguments.check else []
    for fault in found:
        console.print(f"[red]FAILED[/] {fault}", highlight=False)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(fresh.answer(measure) if fresh.is_child() else main())
