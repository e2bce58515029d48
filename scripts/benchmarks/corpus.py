"""Knapsack instances (test/corpus, with proven optima; random ones), and what is promised.

The corpus was captured from the joint graphs of real architectures (``synth_*``: built
by hand for scale): bytes and flops per item, in the partitioner's own order.
"""

import functools
import gzip
import json
import math
import random
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


def unnormalised(n: int, seed: int) -> tuple[list[float], list[float], float]:
    """An instance as pytorch#160914 measured: (sizes, runtimes, budget), far above 1."""
    r = random.Random(f"{n}-{seed}")
    sizes = [r.uniform(0.1, 10) for _ in range(n)]
    runtimes = [r.uniform(0.1, 10) for _ in range(n)]
    return sizes, runtimes, r.uniform(0.2, 0.8) * sum(sizes)


# Pisinger, "Where are the hard knapsack problems?", 2005.
HARD_CLASSES = [
    *("uncorrelated", "weak", "strong", "inverse", "subset", "ceiling", "circle"),
    "spanner",
]


def pisinger(
    kind: str, n: int, largest: int, r: random.Random
) -> tuple[list[float], list[int]]:
    """An instance of one of the hard classes, as (sizes, values)."""
    d = max(1, largest // 10)
    sizes = [r.randint(1, largest) for _ in range(n)]
    if kind == "uncorrelated":
        values = [r.randint(1, largest) for _ in sizes]
    elif kind == "weak":
        values = [max(1, r.randint(size - d, size + d)) for size in sizes]
    elif kind == "strong":
        values = [size + d for size in sizes]
    elif kind == "inverse":
        values = sizes
        sizes = [value + d for value in values]
    elif kind == "subset":
        values = sizes
    elif kind == "ceiling":
        values = [3 * -(-size // 3) for size in sizes]
    elif kind == "circle":
        values = [1 + int(math.sqrt(s * (4 * largest - s)) * 2 / 3) for s in sizes]
    else:
        # Spanner: multiples up to 10 of two items of the strong class.
        kit = [(-(-size // 5), -(-(size + d) // 5)) for size in sizes[:2]]
        drawn = [(r.randint(1, 10), r.choice(kit)) for _ in range(n)]
        sizes = [a * size for a, (size, _) in drawn]
        values = [a * value for a, (_, value) in drawn]
    return [float(size) for size in sizes], values


def chain(n: int) -> tuple[list[float], list[int]]:
    """A chain of layers without two alike: sizes in shares of all, flops."""
    r = random.Random(n)
    sizes = [512 * r.randint(1, 1 << 16) for _ in range(n)]
    values = [1 + int(size * r.uniform(0.2, 3)) for size in sizes]
    gigabytes = sum(sizes) / 1e9
    return [size / 1e9 / gigabytes for size in sizes], values


# These promise the budget in whole 1/10000 of the range, with every size rounded
# to the nearest; all others promise the true bytes.
QUANTISED = ("dp", "dp_knapsack_sliding_hirschberg")
QUANTA = 10_000
# A normalised size carries two roundings, so equal sums may differ by a few units
# in the last place. One byte of the largest activations is a thousand times more.
ROUNDING = 1e-12


def used(memory: Sequence[float], saved: Sequence[int]) -> float:
    return math.fsum(memory[i] for i in saved)


def over(memory: Sequence[float], budget: float, saved: Sequence[int]) -> bool:
    return used(memory, saved) > budget + ROUNDING


def keeps_promise(
    solver: str, memory: Sequence[float], budget: float, saved: Sequence[int]
) -> bool:
    """Whether the items are within the budget, in the unit that the solver promises."""
    if solver in QUANTISED:
        quanta = sum(round(memory[i] * QUANTA) for i in saved)
        return quanta <= round(budget * QUANTA)
    return not over(memory, budget, saved)
