"""Picks among selections of items that are worth the same, or about the same."""

from __future__ import annotations

import math
from typing import Any, TYPE_CHECKING

import torch
from torch.utils._mode_utils import no_dispatch

from ..._activation_checkpointing.knapsack_exact import exact_knapsack


if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NOISE", "lightest", "upstreams_table"]

# Plans whose recomputed runtimes differ by a smaller share count as equally fast.
NOISE = 1e-3


def lightest(
    memory: Sequence[float], runtimes: Sequence[float], saved: list[int]
) -> list[int]:
    """The lightest items to save such that, up to noise, no more is recomputed.

    Saving few bytes means recomputing many: a knapsack of runtimes worth their bytes.
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
    """The items that upstream's dynamic program recomputes, the last first.

    In 32-bit floats, many selections are worth the same, and :func:`.dp_knapsack` may
    find another one.  ``memory`` and ``budget`` are shares of the range of plans.
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
