"""Measures where the partitioner's time goes, before and after the set.

    scripts/benchmark.sh compile                            models of real size
    scripts/benchmark.sh compile --models gpt2-xl my:model   some, also your own
    scripts/benchmark.sh compile --json results/compile.json

Each model is traced with fake tensors, so the sizes are real and no GPU is needed,
and partitioned at one budget: "before" by the untouched wheel with its own solver
(dp), "after" by the patched checkout with its own. Every run is a fresh process with
cold caches; one that fails, or takes more than it may, is a row that says so. Times are
CPU seconds of one thread.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch._functorch.config

from benchmarks import corpus, fresh, options
from benchmarks.nets import find
from benchmarks.results import environment, markdown, measured_on, PLANNED, Row
from benchmarks.tracing import CUT, observed, PARTITION, SOLVE, trace


MODELS = (
    "bert-large",
    "gpt2-xl",
    "llama3-8b",
    "llama3-70b",
    "moe-8x7b",
    "resnet152",
    "unet-512",
)
BUDGET = 0.5
LIMITS = fresh.Limits(seconds=1200, gigabytes=12)


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    fake = find(task["model"]).fake()
    start = time.process_time()
    with (
        torch._functorch.config.patch(activation_memory_budget=task["budget"]),
        observed() as observer,
    ):
        trace(*fake)
    total = time.process_time() - start
    asked, part = observer.instance, observer.seconds
    return {
        "joint_nodes": len(asked.graph.nodes) if asked else 0,
        "items": len(asked.memory) if asked else 0,
        "used": corpus.used(asked.memory, asked.saved) if asked else None,
        "over": asked is not None
        and corpus.over(asked.memory, asked.budget, asked.saved),
        "total_s": total,
        "trace_s": total - part[PARTITION],
        "min_cut_s": part[CUT],
        "knapsack_s": part[SOLVE],
        "partition_rest_s": part[PARTITION] - part[CUT] - part[SOLVE],
    }


# ------------------------------------------------------------------- report


def page(data: dict[str, Any]) -> str:
    lines = []
    before: dict[str, float] = {}
    for row in data["rows"]:
        if "error" in row:
            lines.append([row["model"], row["variant"], row["error"], *[""] * 9])
            continue
        parts = ("min_cut_s", "knapsack_s", "partition_rest_s")
        partition = sum(row[part] for part in parts)
        ratio = partition / before.setdefault(row["model"], partition)
        used = row["used"] / row["budget"] if row["used"] is not None else None
        text = "-" if used is None else f"{used:.4f}"
        lines.append(
            [
                row["model"],
                row["variant"],
                f"{row['joint_nodes']:,}",
                f"{row['items']:,}",
                *(f"{row[key]:.2f}" for key in ("trace_s", "min_cut_s")),
                f"{row['knapsack_s'] * 1e3:.1f}",
                f"{row['partition_rest_s']:.2f}",
                f"{partition:.2f}" + f" ({ratio:.2f}x)" * (row["variant"] == "after"),
                f"{row['total_s']:.1f}",
                f"{row['knapsack_s'] / row['total_s']:.3%}",
                f"**{text}**" if row["over"] else text,
            ]
        )
    heading = ["model", "", "joint nodes", "items", "trace s", "min cuts s"]
    heading += ["knapsack ms", "rest s", "all of the partition s", "total s"]
    return (
        markdown([*heading, "knapsack / total", "used / budget"], lines)
        + (
            f"\nBudget {data['rows'][0]['budget']:g}, at real size, cold caches, CPU seconds. "
            "before: the untouched wheel and its solver (dp); after: with the set. "
            "used / budget: true bytes of what the knapsack saves; above 1 is over. "
        )
        + measured_on(data["environment"], PLANNED)
    )


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        type=options.net,
        default=MODELS,
        metavar="MODEL",
        help=f"names, or module:function (default: {' '.join(MODELS)})",
    )
    arguments = parser.parse_args()
    tasks = [
        {"model": model, "variant": variant, "budget": BUDGET, "torch": torch}
        for model in arguments.models
        for variant, torch in (("before", fresh.UNTOUCHED), ("after", "patched"))
    ]
    rows = fresh.run(__name__, tasks, LIMITS)
    fresh.finish(arguments.json, {"environment": environment(), "rows": rows}, page)
    return 0
