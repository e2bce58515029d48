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

1. Layers repeat, so items do.  For each group of identical items, a bound on the
   runtime that is still possible settles how many copies an optimal set takes or
   leaves at least (:func:`_settle_by_bound`).  Undecided copies form the *core*.
2. ``m`` copies become ``O(log m)`` *chunks* of 1, 2, 4, ... copies, so that a
   group needs a few rows, not one per item (:func:`_binary_chunks`).
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
from typing import Callable, NamedTuple, TYPE_CHECKING

import torch

from .knapsack_exact import (
    exact_knapsack,
    KnapsackSolution,
    solve_knapsack,
    solve_knapsack_budgets,
)
from .knapsack_items import check_budget, check_items


if TYPE_CHECKING:
    from collections.abc import Sequence


log = logging.getLogger(__name__)

__all__ = [
    "KNAPSACK_SOLVERS",
    "KnapsackSolution",
    "dp_knapsack",
    "dp_knapsack_sliding_hirschberg",
    "exact_knapsack",
    "greedy_knapsack",
    "ilp_knapsack",
    "solve_budgets",
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

# About as many cells of a row are updated in the time that one dictionary entry
# takes in plain Python.
_CELLS_PER_ENTRY = 64

# Bounds are compared with this relative slack, far above the rounding error of
# their sums: rounding can leave a copy undecided, but never settle it wrongly.
_BOUND_SLACK = 1e-9

# HiGHS stops once its bound is within this fraction of its best answer, or after
# this many nodes.  Unlike a time limit, both stop at the same answer everywhere.
_ILP_RELATIVE_GAP = 1e-9
_ILP_MAX_NODES = 10_000


def greedy_knapsack(
    memory: list[float], runtimes: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """Save items in order of runtime per size, as long as they fit.

    Items of equal density are taken in order of their index.

    Args:
        memory: size of each item.
        runtimes: runtime of each item, same length.
        max_memory: capacity, in the unit of ``memory``.

    Returns:
        The runtime saved, the items to save and the items to recompute.  The
        true sizes saved add up to at most ``max_memory`` (``math.fsum``).

    Raises:
        ValueError: on bad input, see the module's docstring.

    ``O(n log n)`` time, ``O(n)`` memory.  No bound on the loss: Dantzig,
    "Discrete-Variable Extremum Problems", 1957.
    """
    max_memory = _validated_capacity(memory, runtimes, max_memory)
    order = _by_density(memory, runtimes)
    return _solution(runtimes, _fill(order, memory, max_memory))


def ilp_knapsack(
    memory: list[float], runtimes: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """Solve the knapsack as an integer program with ``scipy.optimize.milp``.

    Identical items share one integer variable, sizes and runtimes are scaled to
    at most 1, and the program's floating point answer is only a proposal: it is
    rounded, cut back to the capacity and filled up with whatever still fits.
    Saves at least as much as :func:`greedy_knapsack`.

    Args:
        memory: size of each item.
        runtimes: runtime of each item, same length.
        max_memory: capacity, in the unit of ``memory``.

    Returns:
        The runtime saved, the items to save and the items to recompute.  The
        true sizes saved add up to at most ``max_memory`` (``math.fsum``).

    Raises:
        ValueError: on bad input, see the module's docstring.
        RuntimeError: if scipy is not installed, or finds no answer.

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

    order = _by_density(memory, runtimes)
    greedy = _fill(order, memory, max_memory)
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
    proposed = set(_first_copies(proposed_copies, memory, runtimes))
    # Proposed items first, each part in order of density: an overfull proposal
    # loses its least dense items, and the densest others fill what room there is.
    order.sort(key=lambda index: index not in proposed)
    filled = _fill(order, memory, max_memory)
    return max(
        _solution(runtimes, filled),
        _solution(runtimes, greedy),
        key=lambda solution: solution[0],
    )


def dp_knapsack(
    memory: list[float], runtime: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """Solve the knapsack for sizes rounded to 1/10000, keeping all decisions.

    Args:
        memory: size of each item.
        runtime: runtime of each item, same length.
        max_memory: capacity, in the unit of ``memory``.

    Returns:
        The runtime saved, the items to save and the items to recompute.  The
        *rounded* sizes saved add up to at most the rounded ``max_memory``.

    Raises:
        ValueError: on bad input, see the module's docstring.

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

    Args:
        memory: size of each item.
        runtime: runtime of each item, same length.
        max_memory: capacity, in the unit of ``memory``.

    Returns:
        The runtime saved, the items to save and the items to recompute.  The
        *rounded* sizes saved add up to at most the rounded ``max_memory``.

    Raises:
        ValueError: on bad input, see the module's docstring.

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


def solve_budgets(
    solver: Solver,
    memory: list[float],
    runtimes: list[float],
    budgets: Sequence[float],
) -> list[tuple[float, list[int], list[int]]]:
    """What ``solver`` answers at each budget, the budgets together where it can.

    For a plot or a search over one instance: the exact solver prepares the
    instance once for all budgets, any other solver is called once for each.

    Args:
        solver: any function with a solver's signature.
        memory: size of each item.
        runtimes: runtime of each item, same length.
        budgets: capacities, in the unit of ``memory``, in any order.

    Returns:
        A solver's answer per budget, in the order of ``budgets``.

    Raises:
        ValueError: on bad input, see the module's docstring.
    """
    if solver is exact_knapsack:
        solutions = solve_knapsack_budgets(memory, runtimes, budgets)
        return [(s.value, s.saved, s.recomputable) for s in solutions]
    return [solver(memory, runtimes, budget) for budget in budgets]


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


def _first_copies(
    copies: dict[tuple[float, float], int],
    memory: list[float],
    runtimes: list[float],
) -> list[int]:
    """The first ``copies[size, runtime]`` items of each size and runtime."""
    left = dict(copies)
    first = []
    for index, item in enumerate(zip(memory, runtimes)):
        if left.get(item, 0) > 0:
            left[item] -= 1
            first.append(index)
    return first


def _by_density(memory: list[float], runtimes: list[float]) -> list[int]:
    """Items with runtime by falling runtime per size, ties by index."""
    density = [
        runtime / size if size else math.inf for size, runtime in zip(memory, runtimes)
    ]
    order = [index for index, runtime in enumerate(runtimes) if runtime > 0]
    return sorted(order, key=density.__getitem__, reverse=True)


def _fill(order: list[int], memory: list[float], max_memory: float) -> list[int]:
    """Take each item of ``order`` that fits beside those taken before it.

    Invariant: ``math.fsum`` of the sizes taken is at most ``max_memory``.  A
    running float sum would drift from that, and ``fsum`` over all taken items
    per step be quadratic.  Every float is an integer over a power of two, so the
    sum is kept in integers over the largest such power; Python divides integers
    with correct rounding, which gives ``fsum`` exactly.
    """
    ratios = [float(size).as_integer_ratio() for size in memory]
    denominator = max((ratio[1] for ratio in ratios), default=1)
    taken = []
    used = 0
    for index in order:
        numerator, own_denominator = ratios[index]
        with_item = used + numerator * (denominator // own_denominator)
        if with_item / denominator <= max_memory:
            used = with_item
            taken.append(index)
    return taken


class _Group(NamedTuple):
    """Identical items."""

    size: int  # of one item, in quanta
    runtime: float  # of one item
    copies: int


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
    copies_to_save = {}
    groups = {}
    for item, copies in Counter(zip(memory, runtime)).items():
        size = _quanta(item[0])
        if size and item[1]:
            groups[item] = _Group(size, float(item[1]), copies)
        elif item[1]:
            copies_to_save[item] = copies
    copies_to_save.update(
        zip(groups, _optimal_copies(list(groups.values()), max_memory, leaf_chunks))
    )

    return _solution(runtime, _first_copies(copies_to_save, memory, runtime))


def _optimal_copies(
    groups: list[_Group], max_memory: float, leaf_chunks: int
) -> list[int]:
    """The number of copies that an optimal set holds of each group."""
    total = sum(group.size * group.copies for group in groups)
    if max_memory == math.inf or total <= _quanta(max_memory):
        return [group.copies for group in groups]
    unit = math.gcd(*(group.size for group in groups))
    groups = [group._replace(size=group.size // unit) for group in groups]
    capacity = _quanta(max_memory) // unit

    settled, undecided = _settle_by_bound(groups, capacity)
    capacity -= sum(n * group.size for n, group in zip(settled, groups))
    core = []
    for index, (n, group) in enumerate(zip(undecided, groups)):
        core += _binary_chunks(index, group, min(n, capacity // group.size))
    # Large sizes first leave the fewest cells to compute, see _last_row.
    core.sort(key=lambda chunk: chunk.size, reverse=True)
    optimal = settled
    for chunk in _best_subset(core, capacity, leaf_chunks):
        optimal[chunk.group] += chunk.copies
    return optimal


def _quanta(size: float) -> int:
    """``size`` in quanta, to the nearest, ties to even."""
    scaled = size * _QUANTA_PER_UNIT
    # A float too large to be scaled is a whole number.
    return round(scaled) if scaled < math.inf else int(size) * _QUANTA_PER_UNIT


def _settle_by_bound(
    groups: list[_Group], capacity: int
) -> tuple[list[int], list[int]]:
    """Settle, per group, how many copies every optimal set takes or leaves.

    Returns the copies settled to be taken and those left undecided; the rest is
    settled to be left out.  With ``d`` the density (runtime per size) of the
    break item, the first in order of density that does not fit, and ``gain =
    runtime - d * size``, no set within the capacity saves more than::

        upper = d * capacity + sum(max(0, gain) * copies)

    Every copy of positive gain that a set leaves, and every one of negative gain
    that it takes, lowers its bound by ``abs(gain)``.  A set for which the bound
    falls below what the greedy set saves is not optimal.

    ``O(g log g)`` for ``g`` groups.  Martello and Toth, "Knapsack Problems", 1990,
    section 2.2.
    """
    copies = [min(group.copies, capacity // group.size) for group in groups]
    density = [group.runtime / group.size for group in groups]
    lower = 0.0
    break_density = 0.0
    room = capacity
    for index in sorted(range(len(groups)), key=density.__getitem__, reverse=True):
        taken = min(copies[index], room // groups[index].size)
        room -= taken * groups[index].size
        lower += taken * groups[index].runtime
        if taken < copies[index] and not break_density:
            break_density = density[index]

    gains = [group.runtime - break_density * group.size for group in groups]
    upper = break_density * capacity
    upper += sum(gain * n for gain, n in zip(gains, copies) if gain > 0)
    gap = upper - lower + _BOUND_SLACK * upper
    undecided = [
        int(min(n, gap / abs(gain))) if gain else n for gain, n in zip(gains, copies)
    ]
    settled = [
        n - n_undecided if gain > 0 else 0
        for gain, n, n_undecided in zip(gains, copies, undecided)
    ]
    return settled, undecided


def _binary_chunks(index: int, group: _Group, copies: int) -> list[_Chunk]:
    """Split ``copies`` of a group into chunks of 1, 2, 4, ... and a rest.

    Every number of copies from 0 to all is a sum of chunks.
    """
    chunks = []
    width = 1
    while copies:
        width = min(width, copies)
        chunks.append(_Chunk(width * group.size, width * group.runtime, width, index))
        copies -= width
        width *= 2
    return chunks


def _best_subset(chunks: list[_Chunk], capacity: int, leaf_chunks: int) -> list[_Chunk]:
    """Chunks of the greatest total runtime with sizes of at most ``capacity``.

    All methods evaluate the same recurrence on the same floats.
    """
    if sum(chunk.size for chunk in chunks) <= capacity:
        return chunks
    if _CELLS_PER_ENTRY << len(chunks) <= capacity:
        return _from_reachable_cells(chunks, capacity)
    if len(chunks) <= leaf_chunks:
        return _from_decisions(chunks, capacity)
    middle = len(chunks) // 2
    left, right = chunks[:middle], chunks[middle:]
    split = _best_split(left, right, capacity)
    return _best_subset(left, split, leaf_chunks) + _best_subset(
        right, capacity - split, leaf_chunks
    )


def _from_reachable_cells(chunks: list[_Chunk], capacity: int) -> list[_Chunk]:
    """Best subset by evaluating only the cells that lead to the last one.

    Few chunks reach at most ``2 ** len(chunks)`` cells of the whole table, which
    are kept in dictionaries.
    """
    levels = [{capacity}]
    for chunk in reversed(chunks):
        levels.append(
            levels[-1]
            | {cell - chunk.size for cell in levels[-1] if cell >= chunk.size}
        )
    row = dict.fromkeys(levels.pop(), 0.0)
    rows = []
    for chunk in chunks:
        rows.append(row)
        row = {
            cell: (
                max(row[cell], row[cell - chunk.size] + chunk.runtime)
                if cell >= chunk.size
                else row[cell]
            )
            for cell in levels.pop()
        }

    taken = []
    cell = capacity
    for chunk, row in zip(reversed(chunks), reversed(rows)):
        rest = cell - chunk.size
        if rest >= 0 and row[rest] + chunk.runtime >= row[cell]:
            taken.append(chunk)
            cell = rest
    return taken


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
