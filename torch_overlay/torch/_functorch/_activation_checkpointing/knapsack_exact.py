"""Exact 0-1 knapsack for the activation memory budget.

Which *items* to save, each with a size (memory) and the runtime that recomputing it
costs, so that the *capacity* is kept and the most runtime is saved.  The answer is for the
true sizes: never above the capacity, and optimal or with a proven upper bound.

Sizes of one graph span nine orders of magnitude, too many for a table, but layers
repeat: hundreds of activations are copies of 5 to 60 (size, runtime) pairs.

1. Equal items become classes, and floats integers, without loss.
2. Every copy that differs from the set that attains Dantzig's bound costs a known
   *loss*, and losses add up.  A solution better than the best one known has a loss of
   at most a ``limit``.
3. :class:`_Search` enumerates Pareto states (change of weight, loss) in the manner
   of Nemhauser and Ullmann, "Discrete Dynamic Programming and Capital Allocation",
   1969.  Each is pruned by the least loss that any completion must add.

Work is bounded by a number of states, never by time: every rank plans alike.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from fractions import Fraction
from operator import itemgetter, mul
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

from .knapsack_numbers import (
    by_density,
    check_budget,
    check_items,
    exact_integers,
    fill,
    integer_capacity,
    total,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


__all__ = [
    "KnapsackSolution",
    "exact_knapsack",
    "solve_knapsack",
    "solve_knapsack_budgets",
]

# About two CPU seconds; real graphs need some thousands.
MAX_STATES = 1 << 20

# One state in so many is completed greedily, by at most so many classes.
_SAMPLED, _COMPLETED = 8, 512


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
    """The solver named ``"exact"`` in the config: the first part of `solve_knapsack`'s."""
    return solve_knapsack(memory, runtime, max_memory)[:3]


def solve_knapsack(
    memory: Sequence[float],
    runtime: Sequence[float],
    max_memory: float,
    *,
    max_states: int = MAX_STATES,
) -> KnapsackSolution:
    """Solve one 0-1 knapsack exactly.

    Sizes and the budget share one unit, runtimes may have any; ints and floats are
    taken at their exact values, ints faster.  A negative budget acts as zero, and an
    infinite one saves every item that has runtime; items without are never saved.

    ``max_states`` bounds the work: when it is used up, the best set found is returned
    with ``proven=False``, never worth less than what greedy finds.  Raises ValueError
    if lengths differ, a size or runtime is negative or not finite, or the budget NaN.
    """
    return _Items(memory, runtime).solve(check_budget(max_memory), max_states)


def solve_knapsack_budgets(
    memory: Sequence[float], runtime: Sequence[float], budgets: Iterable[float]
) -> list[KnapsackSolution]:
    """Solve one instance at many budgets; solution ``i`` is for ``budgets[i]``.

    Parameters and errors are those of `solve_knapsack`.
    """
    budgets = [check_budget(budget) for budget in budgets]
    items = _Items(memory, runtime)
    solution = items.solve(math.inf)
    solutions = {}
    for budget in sorted(set(budgets), reverse=True):
        # An optimum that still fits the next budget is optimal there too.
        if not solution.proven or solution.weight > budget:
            solution = items.solve(budget)
        solutions[budget] = solution
    return [solutions[budget] for budget in budgets]


class _Items:
    """Checked items, in classes by falling density that all budgets share."""

    def __init__(self, memory: Sequence[float], runtime: Sequence[float]) -> None:
        check_items(memory, runtime)
        self.memory, self.runtime = memory, runtime
        self.worthy = [i for i, each in enumerate(runtime) if each]
        self.free = [i for i in self.worthy if not memory[i]]
        self.weight = total(memory, self.worthy)
        members = defaultdict(list)
        for i in self.worthy:
            if memory[i]:
                members[memory[i], runtime[i]].append(i)
        # Ties by size, whatever the order of the items.
        kinds = sorted(members, key=lambda kind: (-kind[1] / kind[0], kind[0]))
        self.classes = [members[kind] for kind in kinds]
        self.weights, self.size_unit = exact_integers([size for size, _ in kinds])
        self.values, self.value_unit = exact_integers([each for _, each in kinds])

    def solve(self, budget: float, max_states: int = MAX_STATES) -> KnapsackSolution:
        """Return the solution for one checked budget."""
        if self.weight <= budget:
            return self._solution(self.worthy)
        capacity = integer_capacity(budget, self.size_unit)
        counts = list(map(len, self.classes))
        search = _Search(self.weights, self.values, counts, capacity)
        copies, proven = search.run(max_states)
        chosen = (i for members, n in zip(self.classes, copies) for i in members[:n])
        saved = sorted([*self.free, *chosen])
        if proven:
            return self._solution(saved)
        greedy = fill(by_density(self.memory, self.runtime), self.memory, budget)
        saved = max(saved, greedy, key=lambda each: total(self.runtime, each))
        bound = search.bound // search.scale * self.value_unit
        bound += sum(Fraction(self.runtime[i]) for i in self.free)
        return self._solution(saved, math.nextafter(float(bound), math.inf))

    def _solution(
        self, saved: list[int], bound: Optional[float] = None
    ) -> KnapsackSolution:
        """Describe a set that is optimal, or else not worth more than the bound."""
        value, saved, left = solution_of(self.runtime, saved)
        weight, upper_bound = total(self.memory, saved), max(value, bound or 0)
        return KnapsackSolution(value, saved, left, weight, upper_bound, bound is None)


class _Change(NamedTuple):
    """Copies of a class to add to the base, or to take from it: at most so many."""

    class_: int
    weight: int  # of one copy, negative if it is taken away
    loss: int  # of one copy
    most: int


class _Search:
    """The search for a set of less loss than the greedy one.

    Class ``c`` has ``counts[c]`` items of one weight and value; classes come by falling
    density.  Dantzig's bound (Martello and Toth, "Knapsack Problems", 1990, section 2.2)
    multiplies values by ``scale``, the weight of the first class that does not fit.  No
    set is worth more than ``bound``, less the loss of every copy that it has more or less
    than ``base``, less ``price`` for every unit of capacity that it leaves; ``base``
    leaves ``room`` of them.

    ``states`` maps changes of weight, in their order, to the least loss and its history:
    None, or an earlier history, a class and copies.  Of the solutions with a loss of at
    most ``limit``, a best one extends a state by changes in ``undecided``, which are in
    order of loss per weight.  ``best`` is the history of the best solution found, None
    for greedy; ``work`` counts steps.
    """

    def __init__(
        self,
        weights: Sequence[int],
        values: Sequence[int],
        counts: Sequence[int],
        capacity: int,
    ) -> None:
        numbers = [min(n, capacity // weight) for n, weight in zip(counts, weights)]
        self.greedy = []
        price, scale = 0, 1
        left = capacity
        for weight, value, number in zip(weights, values, numbers):
            taken = min(number, left // weight)
            self.greedy.append(taken)
            left -= taken * weight
            if taken < number and not price:
                price, scale = value, weight
        gains = [
            value * scale - price * weight for value, weight in zip(values, weights)
        ]
        # At the price itself all numbers of copies are as good.
        self.base = [
            number if gain > 0 else 0 if gain else taken
            for gain, number, taken in zip(gains, numbers, self.greedy)
        ]
        self.price, self.scale = price, scale
        self.room = capacity - sum(map(mul, weights, self.base))
        self.bound = price * capacity + sum(map(mul, gains, self.base))
        worth = scale * sum(map(mul, values, self.greedy))
        self.limit = self.bound - worth - scale
        self.best: Any = None
        self.states: dict[int, tuple[int, Any]] = {0: (0, None)}
        self.undecided = [
            _Change(c, sign * weight, abs(gain), most)
            for c, (weight, gain, number, base) in enumerate(
                zip(weights, gains, numbers, self.base)
            )
            if abs(gain) <= self.limit
            for sign, most in ((1, number - base), (-1, base))
            if most
        ]
        self.undecided.sort(key=lambda each: (each.loss << 64) // abs(each.weight))
        self.work = len(self.undecided)

    def run(self, max_states: int) -> tuple[list[int], bool]:
        """Return the copies of an optimal set, or of the best one found and False.

        Once the large sizes are decided, the small ones have to meet the remaining room,
        which prunes sizes that differ by orders of magnitude to a handful of states.
        """
        order = sorted(self.undecided, key=lambda change: (-abs(change.weight), change))
        for change in order:
            if change.loss > self.limit:
                continue
            self.undecided = [
                other
                for other in self.undecided
                if other is not change and other.loss <= self.limit
            ]
            nearest = self._extend(change, max_states)
            self.work += len(self.undecided) // 16
            if self.work > max_states or not self.states:
                break
            stride = max(_SAMPLED, min(len(self.undecided), _COMPLETED) // 16)
            sample = list(self.states)[_SAMPLED // 2 :: stride]
            for weight in sample + [nearest] * (nearest in self.states):
                self._complete(weight)
        if self.work <= max_states:
            for weight in self.states:
                self._complete(weight)
        history = self.best
        copies = list(self.base if history else self.greedy)
        while history:
            history, c, change = history
            copies[c] += change
        return copies, self.work <= max_states

    def _completion(self) -> tuple[list[int], list[tuple[int, int, int, int]]]:
        """The least loss that undecided changes add to a state, by the room it leaves.

        Room is filled by copies that can be added, the last one in part; what nothing
        fills costs the price.  A negative room is made up by copies that can be taken
        away.  That is a convex function: with ``corner, height, run, rise =
        pieces[bisect_right(corners, room)]`` it is ``height + (room - corner) * rise /
        run``.  Where it exceeds the limit, it is only known to.
        """
        limit = self.limit
        below, above = [], []
        removed = removal = added = addition = 0
        for _, weight, loss, most in self.undecided:
            if weight > 0 and addition <= limit:
                above.append((added, addition, weight, loss))
                added += most * weight
                addition += most * loss
            elif weight < 0 and removal <= limit:
                removed += most * weight
                removal += most * loss
                below.append((removed, removal, -weight, -loss))
        # Beyond, it is steeper than for any class, so that the function is convex.
        below.append((removed, removal, 1, -limit - 1))
        above.append((added, addition, 1, self.price))
        pieces = below[::-1] + above
        self.work += len(pieces)
        return [corner for corner, _, _, _ in pieces[1:]], pieces

    def _extend(self, change: _Change, max_states: int) -> int:
        """Decide how many copies to change; return the weight of a state of least bound.

        As the completion is convex, the admissible numbers of copies are an interval.
        """
        limit, room, price = self.limit, self.room, self.price
        c, weight, loss, most = change
        corners, pieces = self._completion()
        extended: dict[int, tuple[int, Any]] = {}
        nearest, least = 0, limit + 1
        for state_weight, (state_loss, history) in self.states.items():
            copies = 0
            while copies <= most:
                self.work += 1
                new_loss = state_loss + copies * loss
                new_weight = state_weight + copies * weight
                left = room - new_weight
                corner, height, run, rise = pieces[bisect_right(corners, left)]
                bound = new_loss + height + (left - corner) * rise // run
                if bound > limit:
                    # A Newton step.
                    fall = weight * rise - loss * run
                    if fall <= 0:
                        break
                    copies += max(1, -(-(bound - limit) * run // fall))
                    continue
                other = extended.get(new_weight)
                if other is None or new_loss < other[0]:
                    made = (history, c, copies if weight > 0 else -copies)
                    extended[new_weight] = new_loss, made if copies else history
                    if bound < least:
                        nearest, least = new_weight, bound
                copies += 1
            if self.work > max_states:
                break
        # The Pareto front of weight and value, inline: it is half of the work.
        self.states = {}
        best = -math.inf
        for new_weight, state in sorted(extended.items(), key=itemgetter(0)):
            worth = price * new_weight - state[0]
            if worth > best:
                best, self.states[new_weight] = worth, state
        return nearest

    def _complete(self, weight: int) -> None:
        """Complete a state greedily; a better solution lowers the limit."""
        loss, history = self.states[weight]
        room = self.room - weight
        for is_removal in (True, False):
            for c, each, more, most in self.undecided[:_COMPLETED]:
                if room < 0 > each if is_removal else 0 < each <= room:
                    copies = min(most, -(-room // each) if is_removal else room // each)
                    room -= copies * each
                    loss += copies * more
                    history = history, c, copies if each > 0 else -copies
        loss += self.price * room
        if room >= 0 and loss <= self.limit:
            self.limit, self.best = loss - self.scale, history


def solution_of(
    runtimes: Sequence[float], saved: Iterable[int]
) -> tuple[float, list[int], list[int]]:
    """What a solver returns that saves these items."""
    saved = sorted(saved)
    taken = frozenset(saved)
    left = [index for index in range(len(runtimes)) if index not in taken]
    return total(runtimes, saved), saved, left
