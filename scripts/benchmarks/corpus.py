"""Knapsack instances: test/corpus, with proven optima.

The corpus was captured from the joint graphs of real architectures (``synth_*``: built
by hand for scale): bytes and flops per item, in the partitioner's own order.
"""

import functools
import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


FOLDER = Path(__file__).resolve().parents[2] / "test" / "corpus"
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Instance:
    name: str
    sizes: list[int]  # bytes
    range: float  # the bytes that a budget of 1 allows
    runtimes: list[int]  # flops

    @functools.cached_property
    def memory(self) -> list[float]:
        """Shares of the range, as upstream's partitioner has them."""
        return [size / self.range for size in self.sizes]

    def capacity(self, budget: float) -> int:
        """The bytes that a budget allows."""
        return math.floor(budget * self.range)

    def __str__(self) -> str:
        return self.name


@functools.cache
def instances() -> list[Instance]:
    found = []
    for path in sorted(FOLDER.glob("*.json.gz")):
        with gzip.open(path, "rt") as file:
            data = json.load(file)
        span = data["denominator_gb"] * 1e9
        found.append(Instance(data["name"], data["bytes"], span, data["runtimes"]))
    return found


@functools.cache
def optima() -> dict[tuple[str, float], int]:
    """The greatest runtime that fits, on true sizes, by (name, budget)."""
    known = json.loads((FOLDER / "optimum.json").read_text())
    by_place = (key.rsplit("@", 1) for key in known)
    return {
        (name, float(budget)): value
        for (name, budget), value in zip(by_place, known.values())
    }


def used(memory: Sequence[float], saved: Sequence[int]) -> float:
    return math.fsum(memory[i] for i in saved)
