"""Turns any model into a knapsack instance like those in test/corpus.

    scripts/benchmark.sh capture llama3-8b -o llama.json.gz
    scripts/benchmark.sh capture my_models:make -o mine.json

The model is one of the project's (`--list` names them) or your own, as
module:function, found from the working folder: a function without arguments that
returns a model and a tuple or dict of inputs. It is built and traced with fake
tensors, so no memory is needed and no weights are computed; the graph is the one that
a GPU would get. The model must return its loss (or an object with a loss).
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch._functorch.config
from rich.console import Console
from torch._functorch import partitioners

from benchmarks import tracing
from benchmarks.nets import find, Net, NETS


# A budget that no plan but the knapsack's keeps.
LEAST = 1e-9


class NoKnapsack(Exception):
    """The partitioner plans this model without asking a knapsack solver."""


def capture(net: Net) -> dict[str, Any]:
    """The knapsack that the partitioner poses for ``net``, in the corpus's format.

    ``bytes`` and ``runtimes`` (flops) are in the partitioner's own order, its sizes
    are ``bytes / 1e9 / denominator_gb``, and ``targets`` indexes ``target_table``.
    Raises NoKnapsack where none is posed.
    """
    with (
        torch._functorch.config.patch(
            activation_memory_budget=LEAST,
            activation_memory_budget_runtime_estimator="flops",
            visualize_memory_budget_pareto=False,
        ),
        tracing.observed() as observer,
    ):
        tracing.trace(*net.fake())
    instance = observer.instance
    if instance is None:
        raise NoKnapsack(
            f"{net.name}: no budget makes the partitioner ask a knapsack solver; "
            "nothing that it saves is both expensive to recompute and needed by "
            "the backward"
        )
    size_of = partitioners._size_of
    largest, more_aggressive, aggressive = (
        sum(map(size_of, saved)) for _, (saved, _) in observer.cuts[:3]
    )
    least = sum(map(size_of, instance.info.inputs))
    targets = [str(node.target) for node in instance.nodes]
    table = sorted(set(targets))
    return {
        "name": net.name,
        "n_items": len(instance.nodes),
        "bytes": [size_of(node) for node in instance.nodes],
        "runtimes": instance.runtimes,
        "min_act_bytes": least,
        "max_act_bytes": largest,
        "denominator_gb": largest / 1e9 - least / 1e9,
        "joint_nodes": len(instance.graph.nodes),
        "more_aggressive_saved_bytes": more_aggressive,
        "aggressive_saved_bytes": aggressive,
        "targets": [table.index(target) for target in targets],
        "target_table": table,
        "notes": "",
    }


def write(instance: dict[str, Any], path: Path) -> None:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.write(json.dumps(instance) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a name, or module:function")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="the file to write, compressed where it ends in .gz (default: only tell)",
    )
    parser.add_argument("--list", action="store_true", help="name the project's models")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(NETS))
        return 0
    if arguments.model is None:
        parser.error("a model is needed: a name (--list), or module:function")
    start = time.perf_counter()
    try:
        with Console(stderr=True).status(f"tracing {arguments.model}"):
            instance = capture(find(arguments.model))
        if arguments.output is not None:
            write(instance, arguments.output)
    except Exception as error:
        told = isinstance(error, (ValueError, NoKnapsack))
        kind = "" if told else f"{type(error).__name__}: "
        print(f"capture: {kind}{error}", file=sys.stderr)
        return 1
    sizes, flops = instance["bytes"], instance["runtimes"]
    print(
        f"{instance['name']}: {len(sizes)} items of {len(set(zip(sizes, flops)))} kinds, "
        f"{sum(sizes) / 1e6:,.1f} MB, {sum(flops) / 1e9:,.1f} GFLOP, from "
        f"{instance['joint_nodes']} nodes in {time.perf_counter() - start:.1f} s"
    )
    if arguments.output is not None:
        print(f"written to {arguments.output}")
    return 0
