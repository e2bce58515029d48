"""Measures where the partitioner's time and memory go, before and after the set.

    scripts/benchmark.sh compile                            models of real size
    scripts/benchmark.sh compile --models gpt2-xl my:model   some, also your own
    scripts/benchmark.sh compile --json results/compile.json

Each model is traced with fake tensors, so the sizes are real and no GPU is needed,
and partitioned at one budget: "before" by the untouched wheel with its own solver
(dp), "after" by the patched checkout with its own. Every run is a fresh process with
cold caches; one that fails, or takes more than it may, is a row that says so. Times are
CPU seconds of one thread, medians of ``--repeats`` runs; knapsack MB is by how much the
process grew at most while the solver ran. With --json a run that was interrupted goes
on where it stopped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from matplotlib.figure import Figure

from benchmarks import corpus, fresh, options
from benchmarks.nets import find
from benchmarks.results import (
    environment,
    fail,
    markdown,
    measured_on,
    Row,
    save,
)
from benchmarks.tracing import (
    CUT,
    ESTIMATE,
    Instance,
    observed,
    PARTITION,
    SOLVE,
    trace,
)


MODELS = (
    "bert-large",
    "gpt2-xl",
    "llama3-8b",
    "llama3-70b",
    "moe-8x7b",
    "resnet152",
    "unet-512",
)
CHECKED = ("vit",)
# Parts of a run, in the order of the plot. They do not overlap.
PARTS = {
    "trace_s": "AOT trace and joint passes",
    "min_cut_s": "min cuts",
    "estimate_s": "estimate_runtime",
    "knapsack_s": "knapsack",
    "partition_rest_s": "rest of the partition",
}


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    grown, peaks = [0], [0]

    def watch_memory(instance: Instance, solve: Callable[[], Any]) -> Any:
        peaks.append(fresh.high_water_mark())
        before = fresh.reset_high_water_mark()
        answer = solve()
        grown.append(fresh.high_water_mark() - before)
        return answer

    fake = find(task["model"]).fake()
    start_bytes, start = fresh.high_water_mark(), time.process_time()
    config = torch._functorch.config
    with (
        config.patch(activation_memory_budget=task["budget"]),
        observed(watch_memory) as observer,
    ):
        trace(*fake)
    total = time.process_time() - start
    asked, part = observer.instance, observer.seconds
    inner = part[CUT] + part[ESTIMATE] + part[SOLVE]
    return {
        "joint_nodes": len(asked.graph.nodes) if asked else 0,
        "items": len(asked.memory) if asked else 0,
        "knapsack_bytes": max(grown),
        "used": corpus.used(asked.memory, asked.saved) if asked else None,
        "over": asked is not None
        and corpus.over(asked.memory, asked.budget, asked.saved),
        "solver": str(config.activation_memory_budget_solver),
        "total_s": total,
        "trace_s": total - part[PARTITION],
        "min_cut_s": part[CUT],
        "min_cuts": observer.calls[CUT],
        "estimate_s": part[ESTIMATE],
        "knapsack_s": part[SOLVE],
        "partition_rest_s": part[PARTITION] - inner,
        "start_bytes": start_bytes,
        "peak_bytes": max(*peaks, fresh.high_water_mark()),
    }


# ------------------------------------------------------------------- report


def medians(rows: list[Row]) -> list[Row]:
    """One row for each model and variant, of the runs that were finished."""
    groups: dict[tuple[str, str], list[Row]] = {}
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


def page(data: dict[str, Any]) -> str:
    lines = []
    for row in data["rows"]:
        if "error" in row:
            lines.append([row["model"], row["variant"], row["error"], *[""] * 9])
            continue
        used = row["used"] / row["budget"] if row["used"] is not None else None
        text = "-" if used is None else f"{used:.4f}"
        lines.append(
            [
                row["model"],
                row["variant"],
                f"{row['joint_nodes']:,}",
                f"{row['items']:,}",
                *(f"{row[key]:.2f}" for key in ("trace_s", "min_cut_s", "estimate_s")),
                f"{row['knapsack_s'] * 1e3:.1f}",
                f"{row['partition_rest_s']:.2f}",
                f"{row['total_s']:.1f}",
                f"{row['knapsack_s'] / row['total_s']:.3%}",
                f"**{text}**" if row["over"] else text,
            ]
        )
    heading = ["model", "", "joint nodes", "items", "trace s", "min cuts s"]
    heading += ["estimate s", "knapsack ms", "rest s", "total s"]
    return (
        markdown([*heading, "knapsack / total", "used / budget"], lines)
        + (
            f"\nBudget {data['rows'][0]['budget']:g}, fake tensors at real size, cold caches, CPU seconds. "
            "before: the untouched wheel and its solver (dp); after: with the set. "
            "used / budget: true bytes of what the knapsack saves; above 1 is over. "
        )
        + measured_on(data["environment"])
    )


def plot(data: dict[str, Any], result: Path) -> None:
    """Stacked bars, two for each model; written beside ``result``."""
    done = [row for row in data["rows"] if "error" not in row]
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
    budget = data["rows"][0]["budget"]
    axes.set_title(
        f"Trace and partition at budget {budget:g}: where the time goes", loc="left"
    )
    axes.legend(fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, result, data["environment"])


def faults(rows: list[Row]) -> list[str]:
    """What must not be: only counts, no times."""
    found = []
    for row in rows:
        name = f"{row['model']}, {row['variant']}"
        if "error" in row:
            found.append(f"{name}: {row['error']}")
        elif row["variant"] == "after" and row["over"]:
            found.append(f"{name}: used {row['used']} of a budget of {row['budget']}")
    return found


def main() -> int:
    parser = options.parser(
        __doc__, check="one small model; exit status 1 if the set is over the budget"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        type=options.net,
        default=MODELS,
        metavar="MODEL",
        help=f"names, or module:function (default: {' '.join(MODELS)})",
    )
    parser.add_argument("--budget", type=options.share, default=0.5, help="default: .5")
    options.add_limits(parser, repeats=1, seconds=1200)
    arguments = parser.parse_args()
    tasks = [
        {
            "model": model,
            "variant": variant,
            "budget": arguments.budget,
            "run": run,
            "torch": torch,
        }
        for model in (CHECKED if arguments.check else arguments.models)
        for run in range(arguments.repeats)
        for variant, torch in (("before", fresh.UNTOUCHED), ("after", "patched"))
    ]
    limits = fresh.Limits(arguments.seconds, arguments.gigabytes)
    rows = medians(fresh.run(__name__, tasks, limits, arguments.json))
    data = {
        "environment": {**environment(), "repeats": arguments.repeats},
        "rows": rows,
    }
    fresh.finish(arguments.json, data, page, plot)
    return fail(faults(rows) if arguments.check else [])
