"""Knapsack solvers for the activation memory budget.

The partitioner decides which activations to save for the backward pass and
which to recompute there.  Every candidate is an *item*: its size is the memory
it occupies when saved, its runtime is what recomputing it would cost.  A solver
picks the set to save, so that the sizes stay within a *capacity* and the
runtime saved is as large as possible: the 0-1 knapsack problem.

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

Which solver?
-------------
``exact_knapsack`` (:mod:`.knapsack_exact`) weighs the sizes as given, never
exceeds ``max_memory`` and saves the most runtime that is possible.
``greedy_knapsack`` and ``ilp_knapsack`` never exceed it either, but promise no
optimum.  ``dp_knapsack`` and ``dp_knapsack_sliding_hirschberg``
weigh sizes rounded to 1/10000: optimal for the rounded sizes, but the true
ones may add up to more than ``max_memory``, as small items round to nothing.
The two always save the same runtime and differ in memory only.

Dynamic programming
-------------------
Row ``k`` of the textbook table holds, for each capacity ``j``, the most runtime
that the first ``k`` items can save within ``j``::

    row[k][j] = max(row[k - 1][j], row[k - 1][j - size] + runtime)

The full table has (items x capacity) floats, and one row per item means a few
tensor operations per item.  Four steps shrink both, none of which changes the
optimum:

1. Layers repeat, so items do.  For each group of identical items, Dantzig's bound
   settles how many copies an optimal set takes or leaves at least
   (:func:`.knapsack_items.relax`).  Undecided copies form the *core*.
2. ``m`` copies become ``O(log m)`` *chunks* of 1, 2, 4, ... copies, so that a
   group needs a few rows, not one per item (:func:`_optimal_copies`).
3. Only one row is kept.  The set is found again from one bit per cell, which
   tells whether the chunk was taken there (:func:`_from_decisions`).
4. Where even the bits take too much memory, Hirschberg's divide and conquer
   needs rows alone (:func:`_best_split`), for at most twice the time.

Rows are float64: a runtime of 1 next to one of 1e11 still counts.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from typing import Callable, NamedTuple

import torch

from .knapsack_exact import (
    exact_knapsack,
    KnapsackSolution,
    solve_knapsack,
    solve_knapsack_budgets,
)
from .knapsack_items import (
    by_density,
    check_budget,
    check_items,
    Classes,
    exact_integers,
    fill,
    first_copies,
    relax,
)


log = logging.getLogger(__name__)

__all__ = [
    "KNAPSACK_SOLVERS",
    "KnapsackSolution",
    "dp_knapsack",
    "dp_knapsack_sliding_hirschberg",
    "exact_knapsack",
    "greedy_knapsack",
    "ilp_knapsack",
    "solve_knapsack",
    "solve_knapsack_budgets",
]

Solver = Callable[[list[float], list[float], float], tuple[float, list[int], list[int]]]

# The dynamic programs count memory in quanta of 1 / _QUANTA_PER_UNIT.
_QUANTA_PER_UNIT = 10_000

# Cells updated at once.  Longer rows are walked in blocks, so that the
# temporaries of one update stay in the processor's cache.
_BLOCK_CELLS = 1 << 17

# At one bit per chunk, 192 chunks take as much memory per cell as the three
# float64 rows of a split: splitting fewer chunks would save nothing.
_HIRSCHBERG_LEAF_CHUNKS = 192

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
    max_memory = _validated_capacity(memory, runtimes, max_memory)
    order = by_density(memory, runtimes)
    return _solution(runtimes, fill(order, memory, max_memory))


def ilp_knapsack(
    memory: list[float], runtimes: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """Solve the knapsack as an integer program with ``scipy.optimize.milp``.

    Identical items share one integer variable, sizes and runtimes are scaled to
    at most 1, and the program's floating point answer is only a proposal: it is
    rounded, cut back to the capacity and filled up with whatever still fits.
    Saves at least as much as :func:`greedy_knapsack`.

    Raises RuntimeError if scipy is not installed, or finds no answer.

    Exponential time in the worst case, cut off at a number of search nodes; an
    answer that was not proven to be optimal is logged as a warning.
    """
    max_memory = _validated_capacity(memory, runtimes, max_memory)
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise RuntimeError(
            "the activation memory budget solver 'ilp' needs scipy, which cannot be "
            "imported: install scipy or choose another solver"
        ) from error

    order = by_density(memory, runtimes)
    greedy = fill(order, memory, max_memory)
    if len(greedy) == len(order):
        return _solution(runtimes, greedy)
    groups = Counter(
        (memory[i], runtimes[i]) for i in order if 0 < memory[i] <= max_memory
    )
    if not groups:
        return _solution(runtimes, greedy)

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

    proposed_copies = {group: round(copies) for group, copies in zip(groups, result.x)}
    proposed = set(first_copies(proposed_copies, memory, runtimes))
    # Proposed items first, each part in order of density: an overfull proposal
    # loses its least dense items, and the densest others fill what room there is.
    order.sort(key=lambda index: index not in proposed)
    filled = fill(order, memory, max_memory)
    return max(
        _solution(runtimes, filled),
        _solution(runtimes, greedy),
        key=lambda solution: solution[0],
    )


def dp_knapsack(
    memory: list[float], runtime: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """Solve the knapsack for sizes rounded to 1/10000, keeping all decisions.

    With ``c`` chunks in the core and a capacity of ``W`` quanta: ``O(c W)``
    time, ``c W / 8`` bytes for the decisions and at most ``17 W`` for the rest.
    """
    return _solve_rounded(memory, runtime, max_memory, leaf_chunks=sys.maxsize)


def dp_knapsack_sliding_hirschberg(
    memory: list[float], runtime: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """Solve the knapsack for sizes rounded to 1/10000 in memory for a few rows.

    Saves as much runtime as :func:`dp_knapsack`.  Sets may differ where several
    are optimal.

    With ``c`` chunks in the core and a capacity of ``W`` quanta: ``O(c W)``
    time, at most ``41 W`` bytes.  Hirschberg, "A Linear Space Algorithm for
    Computing Maximal Common Subsequences", 1975.
    """
    return _solve_rounded(
        memory, runtime, max_memory, leaf_chunks=_HIRSCHBERG_LEAF_CHUNKS
    )


KNAPSACK_SOLVERS: dict[str, Solver] = {
    "exact": exact_knapsack,
    "greedy": greedy_knapsack,
    "ilp": ilp_knapsack,
    "dp": dp_knapsack,
    "dp_knapsack_sliding_hirschberg": dp_knapsack_sliding_hirschberg,
}
"""The solvers by the name that selects them in ``activation_memory_budget_solver``."""


def _validated_capacity(
    memory: list[float], runtimes: list[float], max_memory: float
) -> float:
    """Check a solver's arguments and return the capacity, negative ones as zero."""
    check_items(memory, runtimes)
    return check_budget(max_memory)


def _solution(
    runtimes: list[float], saved: list[int]
) -> tuple[float, list[int], list[int]]:
    """A solver's return value for the items it saves."""
    is_saved = bytearray(len(runtimes))
    for index in saved:
        is_saved[index] = True
    return (
        math.fsum(runtimes[index] for index in saved),
        [index for index, kept in enumerate(is_saved) if kept],
        [index for index, kept in enumerate(is_saved) if not kept],
    )


class _Chunk(NamedTuple):
    """Some items of one group, to be taken together."""

    size: int  # of all copies
    runtime: float  # of all copies
    copies: int
    group: int


def _solve_rounded(
    memory: list[float], runtime: list[float], max_memory: float, leaf_chunks: int
) -> tuple[float, list[int], list[int]]:
    """Solve for sizes in quanta, with at most ``leaf_chunks`` chunks per table."""
    max_memory = _validated_capacity(memory, runtime, max_memory)
    if max_memory == math.inf:
        return _solution(runtime, [i for i, r in enumerate(runtime) if r])
    copies = Counter(item for item in zip(memory, runtime) if item[1])
    items = [item for item in copies if _quanta(item[0])]
    # By falling density, which is all that the order of the items decides.
    items.sort(key=lambda item: item[1] / _quanta(item[0]), reverse=True)
    sizes = [_quanta(size) for size, _ in items]
    unit = math.gcd(*sizes, 0) or 1
    weights = [size // unit for size in sizes]
    capacity = _quanta(max_memory) // unit
    numbers = [min(copies[i], capacity // w) for i, w in zip(items, weights)]
    optimal = _optimal_copies(
        weights, [r for _, r in items], numbers, capacity, leaf_chunks
    )
    optimal_copies = {**copies, **dict(zip(items, optimal))}
    return _solution(runtime, first_copies(optimal_copies, memory, runtime))


def _optimal_copies(
    weights: list[int],
    runtimes: list[float],
    numbers: list[int],
    capacity: int,
    leaf_chunks: int,
) -> list[int]:
    """The number of copies that an optimal set holds of each group.

    Every set that differs from Dantzig's base by a copy more than the gap between
    the bounds pays for is worse than the greedy one; the rest is undecided.
    """
    classes = Classes(weights, exact_integers(runtimes)[0], numbers)
    relaxation = relax(classes, capacity)
    optimal = []
    core: list[_Chunk] = []
    for group, (base, loss) in enumerate(zip(relaxation.base, relaxation.losses)):
        most = relaxation.gap // loss if loss else numbers[group]
        settled = max(0, base - most)
        undecided = min(numbers[group], base + most) - settled
        optimal.append(settled)
        capacity -= settled * weights[group]
        # Chunks of 1, 2, 4, ... copies and a rest add up to any number of copies.
        width = 1
        while undecided:
            width = min(width, undecided)
            core.append(
                _Chunk(
                    width * weights[group], width * float(runtimes[group]), width, group
                )
            )
            undecided -= width
            width *= 2
    # Large sizes first leave the fewest cells to compute, see _last_row.
    core.sort(key=lambda chunk: chunk.size, reverse=True)
    for chunk in _best_subset(core, capacity, leaf_chunks):
        optimal[chunk.group] += chunk.copies
    return optimal


def _quanta(size: float) -> int:
    """``size`` in quanta, to the nearest, ties to even."""
    scaled = size * _QUANTA_PER_UNIT
    # A float too large to be scaled is a whole number.
    return round(scaled) if scaled < math.inf else int(size) * _QUANTA_PER_UNIT


def _best_subset(chunks: list[_Chunk], capacity: int, leaf_chunks: int) -> list[_Chunk]:
    """Chunks of the greatest total runtime with sizes of at most ``capacity``.

    All methods evaluate the same recurrence on the same floats.
    """
    if sum(chunk.size for chunk in chunks) <= capacity:
        return chunks
    if len(chunks) <= leaf_chunks:
        return _from_decisions(chunks, capacity)
    middle = len(chunks) // 2
    left, right = chunks[:middle], chunks[middle:]
    split = _best_split(left, right, capacity)
    return _best_subset(left, split, leaf_chunks) + _best_subset(
        right, capacity - split, leaf_chunks
    )


def _from_decisions(chunks: list[_Chunk], capacity: int) -> list[_Chunk]:
    """Best subset by one row and a table of decisions.

    Bit ``k % 8`` of ``decisions[k // 8, j]`` tells whether chunk ``k`` is taken
    within a capacity of ``j``: uint8 of shape (chunks / 8, capacity + 1).
    """
    decisions = torch.zeros(
        (len(chunks) + 7) // 8, capacity + 1, dtype=torch.uint8, device="cpu"
    )
    _last_row(chunks, capacity, capacity, decisions)
    taken = []
    cell = capacity
    for k in range(len(chunks) - 1, -1, -1):
        if int(decisions[k // 8, cell]) >> k % 8 & 1:
            taken.append(chunks[k])
            cell -= chunks[k].size
    return taken


def _best_split(left: list[_Chunk], right: list[_Chunk], capacity: int) -> int:
    """The part of ``capacity`` for ``left`` in an optimal division.

    ``right`` gets the rest, ``capacity - split``: the two parts never add up to
    more than there is.  As not everything fits, some optimal division leaves
    neither side more than it can use, so those cells are all that is computed.
    """
    left_size = sum(chunk.size for chunk in left)
    right_size = sum(chunk.size for chunk in right)
    runtime = _last_row(left, capacity, capacity - right_size)
    runtime += _last_row(right, capacity, capacity - left_size).flip(0)
    return int(torch.argmax(runtime))


def _last_row(
    chunks: list[_Chunk],
    capacity: int,
    first_cell: int,
    decisions: torch.Tensor | None = None,
) -> torch.Tensor:
    """The most runtime that ``chunks`` can save within each capacity.

    Returns float64 of shape (capacity + 1,); cells before ``first_cell`` are not
    computed.  Marks in ``decisions``, if given, where each chunk is taken.
    Invariant: after chunk ``k`` the row is right from ``first_cell`` less the
    size of all later chunks on, and no later cell depends on one before that.
    """
    row = torch.zeros(capacity + 1, dtype=torch.float64, device="cpu")
    size_to_come = sum(chunk.size for chunk in chunks)
    for k, chunk in enumerate(chunks):
        size_to_come -= chunk.size
        first = max(chunk.size, first_cell - size_to_come)
        # From the back: a cell reads one at a lower capacity, which must still
        # be that of the row before.
        for end in range(capacity + 1, first, -_BLOCK_CELLS):
            start = max(first, end - _BLOCK_CELLS)
            cells = row[start:end]
            with_chunk = row[start - chunk.size : end - chunk.size] + chunk.runtime
            if decisions is not None:
                decisions[k // 8, start:end].add_(with_chunk >= cells, alpha=1 << k % 8)
            torch.maximum(cells, with_chunk, out=cells)
    return row
