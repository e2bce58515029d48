"""Exact 0-1 knapsack for the activation memory budget.

The partitioner asks which activations to save: each *item* has a size (memory)
and a runtime that recomputing it would cost, the memory budget is the
*capacity*, and the saved set should keep the most runtime.  This module answers
on the true sizes: the set never weighs more than the budget (by ``math.fsum``)
and is optimal, or comes with a proven upper bound.

Sizes inside one graph span nine orders of magnitude, too many for a table, but layers
repeat: hundreds of activations are copies of 5 to 60 (size, runtime) pairs.

1. Equal items become classes, and floats integers, without loss; byte counts seen
   through a rounded division become byte counts again, so that equal sums are ties.
2. :func:`.knapsack_items.relax` gives Dantzig's bound.  Every copy that differs
   from the set that attains it costs a known *loss*, and losses add up.  A solution
   better than the best one known has a loss of at most a ``limit``.
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
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, TYPE_CHECKING

from .knapsack_items import (
    by_density,
    check_budget,
    check_items,
    Classes,
    dantzig_bound,
    exact_integers,
    fill,
    integer_capacity,
    integer_scales,
    relax,
    Relaxation,
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
DEFAULT_MAX_STATES = 1 << 20

# With more kinds of items there is no search.  No graph has as many.
_MOST_KINDS = 1 << 17
# One state in so many is completed greedily, by at most so many classes.
_SAMPLED, _COMPLETED = 8, 512


class KnapsackSolution(NamedTuple):
    """A feasible set of items, and how good it is known to be.

    ``saved`` and ``recomputable`` partition the item indices, both ascending.
    ``value`` is the runtime of the saved items (an int if those are ints, otherwise
    correctly rounded), ``weight`` their size by ``math.fsum``.  No
    feasible set is worth more than ``upper_bound``, which is ``value`` if ``proven``.
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
    """Choose the items to save; the solver named ``"exact"`` in the config.

    Returns the saved runtime and the indices of the saved and of the recomputable
    items, both ascending.  Parameters and errors are those of :func:`solve_knapsack`.
    """
    return solve_knapsack(memory, runtime, max_memory)[:3]


def solve_knapsack(
    memory: Sequence[float],
    runtime: Sequence[float],
    max_memory: float,
    *,
    max_states: int = DEFAULT_MAX_STATES,
) -> KnapsackSolution:
    """Solve one 0-1 knapsack exactly.

    Sizes and the budget share one unit, runtimes may have any; ints and floats are
    taken at their exact values.  A negative budget acts as zero, an infinite one
    saves every item that has runtime.  Items without runtime are never saved, items
    without size but with runtime always are.

    ``max_states`` bounds the work: when it is used up, the best set found is returned
    with ``proven=False``, never worth less than what greedy finds.  Raises ValueError
    if lengths differ, a size or runtime is negative or not finite, or the budget NaN.
    """
    return _Items(memory, runtime).solve(check_budget(max_memory), max_states)


def solve_knapsack_budgets(
    memory: Sequence[float],
    runtime: Sequence[float],
    budgets: Iterable[float],
    *,
    max_states: int = DEFAULT_MAX_STATES,
) -> list[KnapsackSolution]:
    """Solve one instance at many budgets; solution ``i`` is for ``budgets[i]``.

    Checks, classes and scaling are shared.  Budgets are visited from the largest to
    the smallest: an optimum that still fits the next budget is optimal there too.
    Parameters and errors are those of :func:`solve_knapsack`; ``max_states`` holds
    per budget.
    """
    budgets = [check_budget(budget) for budget in budgets]
    items = _Items(memory, runtime)
    solution = items.solve(math.inf, max_states)
    solutions = {}
    for budget in sorted(set(budgets), reverse=True):
        if not solution.proven or solution.weight > budget:
            solution = items.solve(budget, max_states)
        solutions[budget] = solution
    return [solutions[budget] for budget in budgets]


class _Items:
    """Checked items, in classes that all budgets share."""

    def __init__(self, memory: Sequence[float], runtime: Sequence[float]) -> None:
        check_items(memory, runtime)
        self.memory, self.runtime = memory, runtime
        self.worthy = [i for i, r in enumerate(runtime) if r]

    def solve(self, budget: float, max_states: int) -> KnapsackSolution:
        """Return the solution for one checked budget."""
        if self._weight(self.worthy) <= budget:
            return self._solution(self.worthy)
        saved, bound = self._search(budget, max_states)
        if bound is not None:
            order = by_density(self.memory, self.runtime)
            greedy = sorted(fill(order, self.memory, budget))
            saved = max(saved, greedy, key=self._value)
        return self._solution(saved, bound)

    def _search(self, budget: float, max_states: int) -> tuple[list[int], Any]:
        """Return a set, and a bound on the value of any, None if this is optimal."""
        if len(self._kinds) > _MOST_KINDS:
            return [], dantzig_bound(self.memory, self.runtime, budget)
        numbers, values, unit, scales = self._integers
        # Rounded sizes leave one doubt: whether a set that weighs exactly the budget
        # fits.  If the optimum is such a set and does not, exact sizes decide.
        for weights, step in scales:
            capacity = integer_capacity(budget, step)
            fitting = [min(n, capacity // w) for n, w in zip(numbers, weights)]
            relaxation = relax(Classes(weights, values, fitting), capacity)
            copies, is_proven = _Search(relaxation).run(max_states)
            saved = [i for i in self.worthy if not self.memory[i]]
            bound = relaxation.bound // relaxation.scale * unit
            bound += sum(Fraction(self.runtime[i]) for i in saved)
            for number, (_, members) in zip(copies, self._classes):
                saved += members[:number]
            saved.sort()
            if self._weight(saved) <= budget:
                break
        return saved, None if is_proven else bound

    @cached_property
    def _kinds(self) -> dict[tuple[float, float], list[int]]:
        members = defaultdict(list)
        for i, item in enumerate(zip(self.memory, self.runtime)):
            members[item].append(i)
        return members

    @cached_property
    def _classes(self) -> list[tuple[tuple[float, float], list[int]]]:
        """Kinds of items worth saving at a cost, in order of falling density."""
        classes = [c for c in self._kinds.items() if c[0][0] and c[0][1]]
        # Ties by size, whatever the order of the items.
        classes.sort(key=lambda c: c[0][0])
        classes.sort(key=lambda c: c[0][1] / c[0][0], reverse=True)
        return classes

    @cached_property
    def _integers(self) -> tuple[list[int], list[int], Any, list[Any]]:
        """Of the classes: numbers, values and their unit, weights and their step."""
        values, unit = exact_integers([runtime for (_, runtime), _ in self._classes])
        scales = integer_scales([size for (size, _), _ in self._classes])
        return [len(members) for _, members in self._classes], values, unit, scales

    def _weight(self, saved: list[int]) -> float:
        return math.fsum(map(self.memory.__getitem__, saved))

    def _value(self, saved: list[int]) -> float:
        runtimes = list(map(self.runtime.__getitem__, saved))
        value = sum(runtimes)
        return value if isinstance(value, int) else math.fsum(runtimes)

    def _solution(self, saved: list[int], bound: Any = None) -> KnapsackSolution:
        """Describe a set that is optimal, or else not worth more than the bound."""
        value = upper_bound = self._value(saved)
        if bound is not None:
            upper_bound = max(value, math.nextafter(float(bound), math.inf))
        kept = set(saved)
        return KnapsackSolution(
            value=value,
            saved=saved,
            recomputable=[i for i in range(len(self.memory)) if i not in kept],
            weight=self._weight(saved),
            upper_bound=upper_bound,
            proven=bound is None,
        )


# Corners, the pieces that they part, and the classes that those depend on.
_Completion = tuple[list[int], list[tuple[int, int, int, int]], set[int]]


def _completion(order: list[int], relaxation: Relaxation, limit: int) -> _Completion:
    """The least loss that undecided classes add to a state, by the room it leaves.

    Room is filled by copies that can be added, in the given order of loss per weight,
    the last one in part; what nothing fills costs the price.  A negative room is made
    up by copies of the base that can be undone.  That is a convex function: with
    ``corner, height, run, rise = pieces[bisect_right(corners, room)]`` it is ``height +
    (room - corner) * rise / run``.  Where it exceeds the limit, it is only known to.
    """
    weights, _, numbers = relaxation.classes
    below, above = [], []
    used = set()
    undone = undo_loss = added = add_loss = 0
    for c in order:
        if undo_loss > limit and add_loss > limit:
            break
        used.add(c)
        weight, loss, held = weights[c], relaxation.losses[c], relaxation.base[c]
        free = numbers[c] - held
        if held and undo_loss <= limit:
            undone -= held * weight
            undo_loss += held * loss
            below.append((undone, undo_loss, weight, -loss))
        if free and add_loss <= limit:
            above.append((added, add_loss, weight, loss))
            added += free * weight
            add_loss += free * loss
    # Beyond, it is steeper than for any class, so that the function is convex.
    below.append((undone, undo_loss, 1, -limit - 1))
    above.append((added, add_loss, 1, relaxation.price))
    pieces = below[::-1] + above
    return [corner for corner, _, _, _ in pieces[1:]], pieces, used


# Loss and history of a state; a history is None or (earlier history, class, copies).
_State = tuple[int, Any]


class _Search:
    """The search for a set of less loss than the greedy one.

    ``states`` maps changes of weight to states of least loss, in order of weight.
    Invariant: of the solutions with a loss of at most ``limit``, a best one extends a
    state by undecided classes.  They are in ``order``, of loss per weight; any other
    there is so far behind that getting to it costs more than the limit.  ``best`` is
    the history of the best solution found, None for greedy; ``work`` counts steps.
    """

    def __init__(self, relaxation: Relaxation) -> None:
        self.relaxation = relaxation
        weights, losses = relaxation.classes.weights, relaxation.losses
        self.limit = relaxation.gap - relaxation.scale
        self.best: Any = None
        self.order = [c for c, loss in enumerate(losses) if loss <= self.limit]
        self.order.sort(key=lambda c: (losses[c] << 64) // weights[c])
        self.states: dict[int, _State] = {0: (0, None)}
        self.work = len(self.order)

    def run(self, max_states: int) -> tuple[list[int], bool]:
        """Return the copies of an optimal set, or of the best one found and False.

        Classes are decided from the largest weight down: once the large sizes are
        decided, the small ones have to meet the remaining room, which prunes sizes
        that differ by orders of magnitude to a handful of states.
        """
        relaxation = self.relaxation
        weights, losses = relaxation.classes.weights, relaxation.losses
        undecided = set(self.order)
        completion = _completion(self.order, relaxation, self.limit)
        for c in sorted(self.order, key=lambda c: (-weights[c], c)):
            if losses[c] > self.limit:
                continue
            undecided.discard(c)
            if c in completion[2]:
                undecided = {c for c in undecided if losses[c] <= self.limit}
                self.order = [c for c in self.order if c in undecided]
                completion = _completion(self.order, relaxation, self.limit)
                self.work += len(self.order) // 16 + len(completion[2])
            nearest = self._extend(c, completion, max_states)
            if self.work > max_states or not self.states:
                break
            stride = max(_SAMPLED, min(len(self.order), _COMPLETED) // 16)
            sample = list(self.states)[_SAMPLED // 2 :: stride]
            for weight in sample + [nearest] * (nearest in self.states):
                self._complete(weight)
        if self.work <= max_states:
            for weight in self.states:
                self._complete(weight)
        history = self.best
        copies = list(relaxation.base if history else relaxation.greedy)
        while history:
            history, c, change = history
            copies[c] += change
        return copies, self.work <= max_states

    def _extend(self, c: int, completion: _Completion, max_states: int) -> int:
        """Decide class ``c``; return the weight of a state of least bound.

        The admissible numbers of copies form an interval, as the completion is convex.
        """
        relaxation, limit = self.relaxation, self.limit
        weight, _, number = (column[c] for column in relaxation.classes)
        loss, held = relaxation.losses[c], relaxation.base[c]
        corners, pieces, _ = completion
        extended: dict[int, _State] = {}
        nearest, least = 0, limit + 1
        for state_weight, (state_loss, history) in self.states.items():
            for sign, copies, most in ((1, 0, number - held), (-1, 1, held)):
                while copies <= most:
                    self.work += 1
                    new_loss = state_loss + copies * loss
                    new_weight = state_weight + sign * copies * weight
                    left = relaxation.room - new_weight
                    corner, height, run, rise = pieces[bisect_right(corners, left)]
                    bound = new_loss + height + (left - corner) * rise // run
                    if bound > limit:
                        # A Newton step.
                        fall = sign * weight * rise - loss * run
                        if fall <= 0:
                            break
                        copies += max(1, -(-(bound - limit) * run // fall))
                        continue
                    other = extended.get(new_weight)
                    if other is None or new_loss < other[0]:
                        change = (history, c, sign * copies) if copies else history
                        extended[new_weight] = new_loss, change
                        if bound < least:
                            nearest, least = new_weight, bound
                    copies += 1
            if self.work > max_states:
                break
        # Keep what is worth more than all that weighs less.
        self.states = {}
        best = -math.inf
        for new_weight, state in sorted(extended.items(), key=itemgetter(0)):
            worth = relaxation.price * new_weight - state[0]
            if worth > best:
                best, self.states[new_weight] = worth, state
        return nearest

    def _complete(self, weight: int) -> None:
        """Complete a state greedily; a better solution lowers the limit."""
        weights, _, numbers = self.relaxation.classes
        base = self.relaxation.base
        loss, history = self.states[weight]
        room = self.relaxation.room - weight
        order = self.order[:_COMPLETED]
        changes = []
        for c in order:
            if room >= 0:
                break
            undone = min(base[c], -(room // weights[c]))
            room += undone * weights[c]
            changes.append((c, -undone))
        for c in order:
            if 0 <= room >= weights[c]:
                added = min(numbers[c] - base[c], room // weights[c])
                room -= added * weights[c]
                changes.append((c, added))
        for c, change in changes:
            loss += abs(change) * self.relaxation.losses[c]
            history = history, c, change
        loss += self.relaxation.price * room
        if room >= 0 and loss <= self.limit:
            self.limit, self.best = loss - self.relaxation.scale, history
