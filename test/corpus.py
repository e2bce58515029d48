"""The knapsack instances in test/corpus and their proven optima.

Captured from the joint graphs of real architectures (``synth_*``: built by hand for
scale): bytes and flops per item, in the partitioner's own order.
"""

import functools
import gzip
import json
from dataclasses import dataclass
from pathlib import Path


FOLDER = Path(__file__).with_name("corpus")
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Instance:
    name: str
    memory: list  # fractions of the range of plans, as the partitioner has them
    runtimes: list  # flops

    def __str__(self):
        return self.name


@functools.cache
def instances():
    found = []
    for path in sorted(FOLDER.glob("*.json.gz")):
        with gzip.open(path, "rt") as file:
            data = json.load(file)
        memory = [size / 1e9 / data["denominator_gb"] for size in data["bytes"]]
        found.append(Instance(data["name"], memory, data["runtimes"]))
    return found


@functools.cache
def optima():
    """The greatest runtime that fits, on true sizes, by (name, budget)."""
    known = json.loads((FOLDER / "optimum.json").read_text())
    by_place = (key.rsplit("@", 1) for key in known)
    return {
        (name, float(budget)): value
        for (name, budget), value in zip(by_place, known.values())
    }
