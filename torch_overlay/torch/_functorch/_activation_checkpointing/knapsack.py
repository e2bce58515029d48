"""Knapsack solvers for the activation memory budget.

The partitioner decides which activations to save for the backward pass and which to
recompute there.  An *item* has a size, the memory it occupies when saved, and a
runtime, what recomputing it would cost.  A solver picks the set to save, so that the
sizes stay within a *capacity* and the runtime saved is as large as possible.

All solvers share one signature::

    solver(memory, runtimes, max_memory) -> (runtime_saved, saved, recomputable)

``memory`` and ``max_memory`` share a unit (the partitioner uses fractions of
the range between its smallest and its largest plan), ``runtimes`` may be in any
unit, and both returned index lists are ascending.  For every solver:

* an item without runtime is never saved, for that would gain nothing;
* an item without size but with runtime is always saved;
* a negative ``max_memory`` means zero, an infinite one saves every item that
  has runtime;
* ``ValueError`` is raised for lengths that differ, for sizes or runtimes that are
  negative or not finite, and for a ``max_memory`` that is NaN;
* the answer depends on the arguments alone, so that all ranks of a distributed
  job get the same plan.

``exact_knapsack`` (:mod:`.knapsack_exact`) never exceeds ``max_memory`` and saves the
most runtime that is possible, as an integer program would; ``greedy_knapsack`` promises
no optimum.  ``dp_knapsack`` is exact for sizes rounded to 1/10000, as the table of a
dynamic program would have them, so the true ones may exceed ``max_memory`` together.
"""

from __future__ import annotations

import sys
from typing import Callable

from .knapsack_exact import (
    by_density,
    check_items,
    exact_knapsack,
    fill,
    solution_of,
    solve_knapsack,
    usable_capacity,
)


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


def greedy_knapsack(
    memory: list[float], runtimes: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """Save items by falling runtime per size, leaving out those that do not fit.

    Items of equal density are taken in order of their index.

    ``O(n log n)`` time, ``O(n)`` memory.  The greedy rule of Dantzig,
    "Discrete-Variable Extremum Problems", 1957; its loss has no bound.
    """
    check_items(memory, runtimes)
    max_memory = usable_capacity(max_memory)
    order = by_density(memory, runtimes)
    return solution_of(runtimes, fill(order, memory, max_memory))


def dp_knapsack(
    memory: list[float], runtime: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """Solve the knapsack exactly for sizes rounded to 1/10000, ties to even.

    The rounded capacity bounds the number of Pareto states, so there is no other limit.
    """
    check_items(memory, runtime)
    sizes: list[float] = [_quanta(size) for size in memory]
    capacity = _quanta(usable_capacity(max_memory))
    found = solve_knapsack(sizes, runtime, capacity, max_states=sys.maxsize)
    return found[:3]


def ilp_knapsack(
    memory: list[float], runtimes: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """The same as :func:`exact_knapsack`, which solves the integer program."""
    return exact_knapsack(memory, runtimes, max_memory)


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
