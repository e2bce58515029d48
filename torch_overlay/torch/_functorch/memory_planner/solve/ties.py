"""Breaks ties between selections of items that are worth about the same."""

from __future__ import annotations

import math
from typing import Any, TYPE_CHECKING

import torch
from torch.utils._mode_utils import no_dispatch

from ..._activation_checkpointing.knapsack_exact import exact_knapsack


if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NOISE", "lightest_items", "upstreams_table"]

# Plans count as equally fast if what they recompute differs by at most this share.
NOISE = 1e-3


def lightest_items(
    memory: Sequence[float], runtimes: Sequence[float], saved: list[int]
) -> list[int]:
    """The items that take the fewest bytes to save, with no more runtime recomputed.

    Up to ``NOISE``, that is.  Saving the fewest bytes means recomputing the most: this
    is a knapsack, with runtimes as sizes, bytes as values, and the recomputed runtime
    as the capacity.
    """
    recomputed = {*range(len(memory))} - {*saved}
    capacity = math.fsum(runtimes[i] for i in recomputed) * (1 + NOISE)
    with no_dispatch():
        _, again, rest = exact_knapsack([*runtimes], [*memory], capacity)
    lighter = sum(memory[i] for i in again)
    return sorted(rest) if lighter > sum(memory[i] for i in recomputed) else saved


def upstreams_table(
    memory: Sequence[float], runtimes: Sequence[float], budget: float
) -> list[int]:
    """The indices of the items that upstream's dynamic program recomputes, last first.

    :func:`.dp_knapsack` would not do: in upstream's 32-bit floats, many selections are
    worth the same, and it may find another of these.  ``memory`` and ``budget`` are
    shares of the range between budgets 0 and 1.
    O(items * budget * 10,000) time and bytes.
    """
    quanta = 10_000
    sizes = [round(share * quanta) for share in memory]
    room = round(budget * quanta)
    options: Any = {"dtype": torch.float32, "device": "cpu"}
    best = torch.zeros(room + 1, **options)
    improved = []
    for size, runtime in zip(sizes, torch.tensor(runtimes, **options)):
        before, best = best, best.clone()
        with_it = before[: max(room + 1 - size, 0)] + runtime
        torch.maximum(before[size:], with_it, out=best[size:])
        improved.append(best != before)
    recomputed = []
    for item in reversed(range(len(sizes))):
        if improved[item][room]:
            room -= sizes[item]
        else:
            recomputed.append(item)
    return recomputed
