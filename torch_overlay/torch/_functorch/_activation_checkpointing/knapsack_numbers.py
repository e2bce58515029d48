"""Checks and orders the sizes and runtimes of a knapsack's items."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from .knapsack_search import exact_integers, integer_capacity


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


__all__ = [
    "by_density",
    "check_budget",
    "check_items",
    "fill",
    "total",
]


def check_budget(max_memory: float) -> float:
    """The capacity, a negative one as zero.  Raises ValueError if it is NaN."""
    if math.isnan(max_memory):
        raise ValueError(f"max_memory is {max_memory}: it must be a number")
    return max(0, max_memory)


def check_items(memory: Sequence[float], runtimes: Sequence[float]) -> None:
    """Raise ValueError, naming index and value, for items that no solver takes."""
    if len(memory) != len(runtimes):
        raise ValueError(
            f"memory has {len(memory)} items but runtimes has {len(runtimes)}: "
            "every item needs one size and one runtime"
        )
    largest = sys.float_info.max
    for name, values in (("memory", memory), ("runtimes", runtimes)):
        for index, value in enumerate(values):
            if not 0 <= value <= largest:
                raise ValueError(
                    f"{name}[{index}] is {value}: it must be finite and not negative"
                )


def total(values: Sequence[float], indices: Iterable[int]) -> float:
    """The sum of some values, correctly rounded."""
    return math.fsum(values[index] for index in indices)


def by_density(memory: Sequence[float], runtimes: Sequence[float]) -> list[int]:
    """The items that have runtime, by falling runtime per size, ties by index."""
    density = [
        runtime / size if size else math.inf for size, runtime in zip(memory, runtimes)
    ]
    order = [index for index, runtime in enumerate(runtimes) if runtime > 0]
    return sorted(order, key=density.__getitem__, reverse=True)


def fill(order: Iterable[int], memory: Sequence[float], max_memory: float) -> list[int]:
    """Take each item of ``order`` that fits beside those taken before it."""
    if max_memory == math.inf:
        return list(order)
    # Integers, as sums of floats would drift.
    sizes, unit = exact_integers([*memory])
    room = integer_capacity(max_memory, unit)
    taken = []
    for index in order:
        if sizes[index] <= room:
            room -= sizes[index]
            taken.append(index)
    return taken
