"""An exact knapsack solver that tells how good its solutions are known to be.

It chooses which *items* to save, each with a size (memory) and the runtime that
recomputing it costs, so that the *capacity* is kept and the most runtime is saved.
Sizes are not rounded: a solution never exceeds the capacity, and it is optimal or comes
with a proven upper bound.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from typing import NamedTuple, TYPE_CHECKING

from .knapsack_search import exact_integers, integer_capacity, MAX_STATES, search


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class KnapsackSolution(NamedTuple):
    """A feasible set of items, and how good it is known to be.

    ``saved`` and ``recomputable`` partition the item indices, both ascending.
    ``value`` is the runtime of the saved items and ``weight`` their size.  No feasible
    set is worth more than ``upper_bound``, which is ``value`` if ``proven``.
    """

    value: float
    saved: list[int]
    recomputable: list[int]
    weight: float
    upper_bound: float
    proven: bool


def exact_knapsack(
    memory: list[float], runtime: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """The solver named ``"exact"`` in the config.

    Returns the value, ``saved`` and ``recomputable`` of :func:`solve_knapsack`.
    """
    return solve_knapsack(memory, runtime, max_memory)[:3]


def solve_knapsack(
    memory: Sequence[float],
    runtime: Sequence[float],
    max_memory: float,
    *,
    max_states: int = MAX_STATES,
) -> KnapsackSolution:
    """Solve one 0-1 knapsack exactly.

    ``memory`` and ``max_memory`` share one unit, ``runtime`` may be in any; ints and
    floats are taken at their exact values, ints faster.  A negative ``max_memory`` acts
    as zero, and an infinite one saves every item that has runtime; items without are
    never saved.

    ``max_states`` bounds the work: when it is used up, the best set found is returned
    with ``proven=False``, never worth less than what greedy finds.  Raises ValueError
    if lengths differ, a size or runtime is negative or not finite, or ``max_memory`` is
    NaN.
    """
    check_items(memory, runtime)
    max_memory = usable_capacity(max_memory)
    found, gap = search([*memory], [*runtime], max_memory, max_states)
    bound = 0.0
    if gap:
        most = gap + sum(Fraction(runtime[i]) for i in found)
        bound = math.nextafter(float(most), math.inf)
        greedy = fill(by_density(memory, runtime), memory, max_memory)
        found = max(found, greedy, key=lambda each: total(runtime, each))
    value, saved, left = solution_of(runtime, found)
    weight, bound = total(memory, saved), max(value, bound)
    return KnapsackSolution(value, saved, left, weight, bound, not gap)


def solve_knapsack_budgets(
    memory: Sequence[float], runtime: Sequence[float], budgets: Iterable[float]
) -> list[KnapsackSolution]:
    """Solve one instance for many capacities; solution ``i`` is for ``budgets[i]``.

    Parameters and errors are otherwise those of `solve_knapsack`.
    """
    budgets = [usable_capacity(budget) for budget in budgets]
    solution = solve_knapsack(memory, runtime, math.inf)
    solutions = {}
    for budget in sorted(set(budgets), reverse=True):
        # An optimum that still fits the next lower capacity is optimal there too.
        if not solution.proven or solution.weight > budget:
            solution = solve_knapsack(memory, runtime, budget)
        solutions[budget] = solution
    return [solutions[budget] for budget in budgets]


def solution_of(
    runtimes: Sequence[float], saved: Iterable[int]
) -> tuple[float, list[int], list[int]]:
    """The runtime saved, and the saved and other items, both in ascending order."""
    saved = sorted(saved)
    taken = frozenset(saved)
    left = [index for index in range(len(runtimes)) if index not in taken]
    return total(runtimes, saved), saved, left


def usable_capacity(max_memory: float) -> float:
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
