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
optimum.  ``dp_knapsack`` is the exact solver for sizes rounded to 1/10000, as dynamic
programming's table would have them, so the true ones may add up to more than
``max_memory``.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from operator import itemgetter
from typing import Callable

from .knapsack_exact import (
    by_density,
    check_budget,
    check_items,
    exact_knapsack,
    fill,
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

# ``dp_knapsack`` counts memory in quanta of 1 / _QUANTA_PER_UNIT.
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
    groups = defaultdict(list)
    for i in order:
        if 0 < memory[i] <= max_memory:
            groups[memory[i], runtimes[i]].append(i)
    if not groups or len(greedy) == len(order):
        return solution_of(runtimes, greedy)

    proposed = _propose(groups, max_memory)
    # Proposed items first, each part in order of density: an overfull proposal
    # loses its least dense items, and the densest others fill what room there is.
    order.sort(key=lambda index: index not in proposed)
    filled = fill(order, memory, max_memory)
    answers = solution_of(runtimes, filled), solution_of(runtimes, greedy)
    return max(answers, key=itemgetter(0))


def _propose(
    groups: dict[tuple[float, float], list[int]], max_memory: float
) -> set[int]:
    """About the best items of each group, by scipy's integer program."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    largest_runtime = max(runtime for _, runtime in groups)
    result = milp(
        c=[-runtime / largest_runtime for _, runtime in groups],
        constraints=LinearConstraint([[size / max_memory for size, _ in groups]], ub=1),
        integrality=[1] * len(groups),
        bounds=Bounds(0, [*map(len, groups.values())]),
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
    chosen = zip(groups.values(), result.x)
    return {i for members, copies in chosen for i in members[: round(copies)]}


def dp_knapsack(
    memory: list[float], runtime: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """Solve the knapsack exactly for sizes rounded to 1/10000, ties to even."""
    check_items(memory, runtime)
    sizes: list[float] = [_quanta(size) for size in memory]
    return exact_knapsack(sizes, runtime, _quanta(check_budget(max_memory)))


def dp_knapsack_sliding_hirschberg(
    memory: list[float], runtime: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """The same as :func:`dp_knapsack`, which has no table to split."""
    return dp_knapsack(memory, runtime, max_memory)


KNAPSACK_SOLVERS: dict[str, Solver] = {
    "exact": exact_knapsack,
    "greedy": greedy_knapsack,
    "ilp": ilp_knapsack,
    "dp": dp_knapsack,
    "dp_knapsack_sliding_hirschberg": dp_knapsack_sliding_hirschberg,
}
"""The solvers by the name that selects them in ``activation_memory_budget_solver``."""


def _quanta(size: float) -> float:
    return round(min(size * _QUANTA_PER_UNIT, sys.float_info.max))
