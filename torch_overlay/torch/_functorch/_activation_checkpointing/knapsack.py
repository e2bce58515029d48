"""Knapsack solvers for the activation memory budget.

The partitioner decides which activations to save for the backward pass and which to
recompute there.  An *item* has a size, the memory it occupies when saved, and a runtime,
what recomputing it would cost.  A solver picks the set to save, so that the sizes stay
within a *capacity* and the runtime saved is as large as possible.

All solvers share one signature::

    solver(memory, runtimes, max_memory) -> (runtime_saved, saved, recomputable)

``memory`` and ``max_memory`` share a unit (the partitioner uses fractions of
the range between its smallest and its largest plan), ``runtimes`` may be in any
unit, and both returned index lists are ascending.  Whatever the solver:

* an item without runtime is never saved, for that would gain nothing;
* an item without size but with runtime always is;
* a negative ``max_memory`` means zero, an infinite one saves every item that
  has runtime;
* lengths that differ, sizes or runtimes that are negative or not finite, and a
  ``max_memory`` that is NaN raise ``ValueError``;
* the answer depends on the arguments alone, so that all ranks of a distributed
  job get the same plan.

``exact_knapsack`` (:mod:`.knapsack_exact`) never exceeds ``max_memory`` and saves the
most runtime that is possible; ``greedy_knapsack`` and ``ilp_knapsack`` promise no
optimum.  ``dp_knapsack`` is optimal for sizes rounded to 1/10000, but the true ones may
add up to more than ``max_memory``.

Row ``k`` of dynamic programming's table holds the most runtime that the first ``k``
items can save within each capacity.  Three steps shrink it and keep the optimum:

1. Layers repeat, so items do.  Dantzig's bound settles how many of some identical
   items an optimal set takes or leaves at least (:func:`.knapsack_exact.relax`).
   What is undecided is the *core*.
2. ``m`` copies become ``O(log m)`` *chunks* of 1, 2, 4, ... copies.
3. Only one row is kept, in float64: a runtime of 1 next to one of 1e11 still counts.
   The set is found again from one bit per cell, where a table has a float: at an
   eighth of a byte per chunk, Hirschberg's divide and conquer would not pay.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Callable, NamedTuple

import torch

from .knapsack_exact import (
    by_density,
    check_budget,
    check_items,
    exact_integers,
    exact_knapsack,
    fill,
    relax,
    solution_of,
)


log = logging.getLogger(__name__)

__all__ = [
    "KNAPSACK_SOLVERS",
    "dp_knapsack",
    "dp_knapsack_sliding_hirschberg",
    "exact_knapsack",
    "greedy_knapsack",
    "ilp_knapsack",
]

Solver = Callable[[list[float], list[float], float], tuple[float, list[int], list[int]]]

# The dynamic programs count memory in quanta of 1 / _QUANTA_PER_UNIT.
_QUANTA_PER_UNIT = 10_000

# HiGHS stops once its bound is within this fraction of its best answer, or after
# this many nodes.  Unlike a time limit, both stop at the same answer everywhere.
_ILP_RELATIVE_GAP = 1e-9
_ILP_MAX_NODES = 10_000


def greedy_knapsack(
    memory: list[float], runtimes: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """Save items in order of runtime per size, as long as they fit.

    Items of equal density are taken in order of their index.

    ``O(n log n)`` time, ``O(n)`` memory.  No bound on the loss: Dantzig,
    "Discrete-Variable Extremum Problems", 1957.
    """
    check_items(memory, runtimes)
    max_memory = check_budget(max_memory)
    order = by_density(memory, runtimes)
    return solution_of(runtimes, fill(order, memory, max_memory))


def ilp_knapsack(
    memory: list[float], runtimes: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """Solve the knapsack as an integer program with ``scipy.optimize.milp``.

    Identical items share one integer variable.  The program's floating point answer
    is only a proposal: it is rounded, cut back to the capacity and filled up with
    whatever still fits.  Saves at least as much as :func:`greedy_knapsack`.

    Raises RuntimeError if scipy is not installed, or finds no answer.

    Exponential time in the worst case, cut off at a number of search nodes; an
    answer that was not proven to be optimal is logged as a warning.
    """
    check_items(memory, runtimes)
    max_memory = check_budget(max_memory)
    try:
        import scipy.optimize  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            "the activation memory budget solver 'ilp' needs scipy, which cannot be "
            "imported: install scipy or choose another solver"
        ) from error

    order = by_density(memory, runtimes)
    greedy = fill(order, memory, max_memory)
    groups = Counter(
        (memory[i], runtimes[i]) for i in order if 0 < memory[i] <= max_memory
    )
    if not groups or len(greedy) == len(order):
        return solution_of(runtimes, greedy)

    proposed = set(_first_copies(_propose(groups, max_memory), memory, runtimes))
    # Proposed items first, each part in order of density: an overfull proposal
    # loses its least dense items, and the densest others fill what room there is.
    order.sort(key=lambda index: index not in proposed)
    filled = fill(order, memory, max_memory)
    return max(
        solution_of(runtimes, filled),
        solution_of(runtimes, greedy),
        key=lambda solution: solution[0],
    )


def _propose(
    groups: dict[tuple[float, float], int], max_memory: float
) -> dict[tuple[float, float], int]:
    """About the best number of copies of each group, by scipy's integer program."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    largest_runtime = max(runtime for _, runtime in groups)
    result = milp(
        c=[-runtime / largest_runtime for _, runtime in groups],
        constraints=LinearConstraint([[size / max_memory for size, _ in groups]], ub=1),
        integrality=[1] * len(groups),
        bounds=Bounds(0, list(groups.values())),
        options={"mip_rel_gap": _ILP_RELATIVE_GAP, "node_limit": _ILP_MAX_NODES},
    )
    if result.x is None:
        raise RuntimeError(f"scipy.optimize.milp found no answer: {result.message}")
    if not result.success:
        log.warning(
            "ilp_knapsack stopped after %d search nodes: its answer may save %.2g of "
            "the runtime less than the optimum",
            result.mip_node_count,
            result.mip_gap,
        )
    return {group: round(copies) for group, copies in zip(groups, result.x)}


def dp_knapsack(
    memory: list[float], runtime: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """Solve the knapsack for sizes rounded to 1/10000 by dynamic programming.

    With ``c`` chunks in the core and a capacity of ``W`` quanta: ``O(c W)`` time and
    about ``(c / 8 + 24) W`` bytes.
    """
    check_items(memory, runtime)
    max_memory = check_budget(max_memory)
    if max_memory == math.inf:
        return solution_of(runtime, [i for i, r in enumerate(runtime) if r])
    copies = Counter(item for item in zip(memory, runtime) if item[1])
    groups = [item for item in copies if _quanta(item[0])]
    # By falling density, which is all that the order of the items decides.
    groups.sort(key=lambda item: item[1] / _quanta(item[0]), reverse=True)
    sizes = [_quanta(size) for size, _ in groups]
    capacity = _quanta(max_memory)
    values, _ = exact_integers([r for _, r in groups])
    relaxation = relax(sizes, values, [copies[g] for g in groups], capacity)

    # A set that differs from Dantzig's base by a copy more than the gap between the
    # bounds pays for is worse than the greedy one; the rest is undecided.
    core: list[_Chunk] = []
    for group, size, number, base, loss in zip(
        groups, sizes, relaxation.numbers, relaxation.base, relaxation.losses
    ):
        most = relaxation.gap // loss if loss else number
        settled = max(0, base - most)
        undecided = min(number, base + most) - settled
        copies[group] = settled
        capacity -= settled * size
        # Chunks of 1, 2, 4, ... copies and a rest add up to any number of copies.
        width = 1
        while undecided:
            width = min(width, undecided)
            core.append(_Chunk(width * size, width * float(group[1]), width, group))
            undecided -= width
            width *= 2
    # Large sizes first leave the fewest cells to compute.
    core.sort(key=lambda chunk: chunk.size, reverse=True)
    for chunk in _best_subset(core, capacity):
        copies[chunk.group] += chunk.copies
    return solution_of(runtime, _first_copies(copies, memory, runtime))


def dp_knapsack_sliding_hirschberg(
    memory: list[float], runtime: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """The same as :func:`dp_knapsack`, which takes no more memory."""
    return dp_knapsack(memory, runtime, max_memory)


KNAPSACK_SOLVERS: dict[str, Solver] = {
    "exact": exact_knapsack,
    "greedy": greedy_knapsack,
    "ilp": ilp_knapsack,
    "dp": dp_knapsack,
    "dp_knapsack_sliding_hirschberg": dp_knapsack_sliding_hirschberg,
}
"""The solvers by the name that selects them in ``activation_memory_budget_solver``."""


def _first_copies(
    copies: dict[tuple[float, float], int],
    memory: list[float],
    runtimes: list[float],
) -> list[int]:
    """The first ``copies[size, runtime]`` items of each size and runtime."""
    left = dict(copies)
    first = []
    for index, item in enumerate(zip(memory, runtimes)):
        if left.get(item):
            left[item] -= 1
            first.append(index)
    return first


class _Chunk(NamedTuple):
    """Some items of one group, to be taken together."""

    size: int  # of all copies
    runtime: float  # of all copies
    copies: int
    group: tuple[float, float]


def _quanta(size: float) -> int:
    """``size`` in quanta, to the nearest, ties to even."""
    scaled = size * _QUANTA_PER_UNIT
    # A float too large to be scaled is a whole number.
    return round(scaled) if scaled < math.inf else int(size) * _QUANTA_PER_UNIT


def _best_subset(chunks: list[_Chunk], capacity: int) -> list[_Chunk]:
    """Chunks of the greatest total runtime with sizes of at most ``capacity``.

    Bit ``k % 8`` of ``decisions[k // 8, j]`` tells whether chunk ``k`` is taken
    within a capacity of ``j``: uint8 of shape (chunks / 8, capacity + 1).
    Invariant: after chunk ``k`` the row is right from ``capacity`` less the size of
    all later chunks on, and no later cell depends on one before that.
    """
    size_to_come = sum(chunk.size for chunk in chunks)
    if size_to_come <= capacity:
        return chunks
    row = torch.zeros(capacity + 1, dtype=torch.float64, device="cpu")
    decisions = torch.zeros(
        (len(chunks) + 7) // 8, capacity + 1, dtype=torch.uint8, device="cpu"
    )
    for k, chunk in enumerate(chunks):
        size_to_come -= chunk.size
        first = max(chunk.size, capacity - size_to_come)
        cells = row[first:]  # None, if the chunk is too large.
        with_chunk = row[first - chunk.size : -chunk.size] + chunk.runtime
        decisions[k // 8, first:].add_(with_chunk >= cells, alpha=1 << k % 8)
        torch.maximum(cells, with_chunk, out=cells)
    taken = []
    cell = capacity
    for k in range(len(chunks) - 1, -1, -1):
        if int(decisions[k // 8, cell]) >> k % 8 & 1:
            taken.append(chunks[k])
            cell -= chunks[k].size
    return taken
