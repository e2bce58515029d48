"""Exact 0-1 knapsack for the activation memory budget.

Sizes span nine orders of magnitude, too many for a table, but layers repeat: hundreds
of activations are copies of 5 to 60 (size, runtime) pairs.  So equal items become
classes, and floats integers, without loss of precision.  Every copy by which a set
differs from the one that attains Dantzig's bound costs a known *loss*, and losses add
up.  Pareto states (change of weight, loss) are enumerated in the manner of Nemhauser
and Ullmann, "Discrete Dynamic Programming and Capital Allocation", 1969, and pruned by
the least loss that any completion must add.

Work is bounded by a number of states, never by time: every rank plans alike.
"""

import logging
import math
from bisect import bisect_right
from collections import defaultdict
from fractions import Fraction
from operator import itemgetter, mul
from typing import Any


log = logging.getLogger(__name__)

MAX_STATES = 1 << 20  # About two CPU seconds; real graphs need some thousands.

# At most one state in _SAMPLED is completed greedily, by at most _COMPLETED classes.
_SAMPLED, _COMPLETED = 8, 512


def exact_knapsack(
    memory: list[float], runtimes: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    """The solver that activation_memory_budget_solver = "exact" selects."""
    saved, gap = search(memory, runtimes, max_memory, MAX_STATES)
    value = math.fsum(runtimes[i] for i in saved)
    if gap:
        log.warning("saved runtime is %g, and at most %g below the optimum", value, gap)
    return value, saved, sorted({*range(len(memory))}.difference(saved))


def search(
    memory: list[float], runtimes: list[float], max_memory: float, max_states: int
) -> tuple[list[int], Fraction]:
    """Return the items to save, ascending, and a bound on the loss of runtime.

    The bound is 0 if the set is proven optimal.  Where ``max_states`` do not suffice
    for that, the set is the best one found.  Items without runtime are never saved.
    """
    worthy = [i for i, runtime in enumerate(runtimes) if runtime]
    if math.fsum(memory[i] for i in worthy) <= max_memory:
        return worthy, Fraction(0)
    members = defaultdict(list)
    for i in worthy:
        members[memory[i], runtimes[i]].append(i)
    # Ties are broken by size, so that the order of the items does not matter.
    kinds = sorted(filter(itemgetter(0), members), key=lambda k: (-k[1] / k[0], k[0]))
    weights, size_unit = exact_integers([size for size, _ in kinds])
    values, value_unit = exact_integers([runtime for _, runtime in kinds])
    counts = [len(members[kind]) for kind in kinds]
    capacity = integer_capacity(max(0, max_memory), size_unit)
    found = _Search(weights, values, counts, capacity)
    saved = [i for i in worthy if not memory[i]]
    for kind, copies in zip(kinds, found.run(max_states)):
        saved += members[kind][:copies]
    gap = (found.limit + found.scale) // found.scale if found.work > max_states else 0
    return sorted(saved), gap * value_unit


def exact_integers(numbers: list[float]) -> tuple[list[int], Fraction]:
    """Integers and the largest unit with ``numbers[i] == integers[i] * unit``."""
    ratios = [number.as_integer_ratio() for number in numbers]
    denominator = max((d for _, d in ratios), default=1)
    integers = [n * (denominator // d) for n, d in ratios]
    factor = math.gcd(*integers) or 1
    return [n // factor for n in integers], Fraction(factor, denominator)


def integer_capacity(max_memory: float, unit: Fraction) -> int:
    """How many units fit a finite ``max_memory``, as ``math.fsum`` rounds their sum."""
    if unit.denominator == 1:
        return int(max_memory) // unit.numerator
    half_an_ulp = Fraction(math.ulp(max_memory)) / 2
    capacity: int = math.floor((Fraction(max_memory) + half_an_ulp) / unit)
    # Halfway between two floats, the sum rounds to the even one.
    return capacity if float(capacity * unit) <= max_memory else capacity - 1


class _Search:
    """The search for a set of less loss than the greedy one.

    Class ``c`` has ``counts[c]`` items of one weight and value; classes come by falling
    density.  Dantzig's bound (Martello and Toth, "Knapsack Problems", 1990, section
    2.2) is kept in values times ``scale``, the weight of the first class that does not
    fit, so that it is an integer.  Compared to it, a set loses value with each copy
    more or fewer than in ``base``, and ``price`` with each unit of capacity that it
    leaves free; ``base`` leaves ``room``.

    A better set than the best one found has a loss of at most ``limit``.  ``states``
    maps changes of weight, ascending, to the least loss and the copies changed, as a
    linked list that begins with the last class.  ``undecided`` has the open changes, by
    rising loss per weight: class, signed weight of a copy, loss, and the most copies.
    """

    def __init__(
        self, weights: list[int], values: list[int], counts: list[int], capacity: int
    ) -> None:
        numbers = [min(n, capacity // weight) for n, weight in zip(counts, weights)]
        self.greedy = []
        self.price, self.scale, left = 0, 1, capacity
        for weight, value, number in zip(weights, values, numbers):
            taken = min(number, left // weight)
            self.greedy.append(taken)
            left -= taken * weight
            if taken < number and not self.price:
                self.price, self.scale = value, weight
        gains = [self.scale * v - self.price * w for v, w in zip(values, weights)]
        # At the price itself all numbers of copies are as good.
        self.base = [
            number if gain > 0 else 0 if gain else taken
            for gain, number, taken in zip(gains, numbers, self.greedy)
        ]
        self.room = capacity - sum(map(mul, weights, self.base))
        bound = self.price * capacity + sum(map(mul, gains, self.base))
        self.limit = bound - self.scale * (1 + sum(map(mul, values, self.greedy)))
        self.best: Any = None
        self.states: dict[int, tuple[int, Any]] = {0: (0, None)}
        classes = enumerate(zip(weights, gains, numbers, self.base))
        self.undecided = [
            (c, sign * weight, abs(gain), most)
            for c, (weight, gain, number, base) in classes
            for sign, most in ((1, number - base), (-1, base))
            if most and abs(gain) <= self.limit
        ]
        self.undecided.sort(key=lambda each: (each[2] << 64) // abs(each[1]))
        self.work = len(self.undecided)

    def run(self, max_states: int) -> list[int]:
        """Return the copies of an optimal set, or with too much work of the best found.

        Once the large sizes are decided, the small ones have to meet the remaining
        room.  Where sizes differ by orders of magnitude, few states can.
        """
        for change in sorted(self.undecided, key=lambda each: (-abs(each[1]), each)):
            if change[2] > self.limit:
                continue
            self.undecided.remove(change)
            self.undecided = [each for each in self.undecided if each[2] <= self.limit]
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
        return copies

    def _completion(self) -> tuple[list[int], list[tuple[int, int, int, int]]]:
        """The least loss that undecided changes add to a state, by the room it leaves.

        Copies fill the room, the last one in part, or make up for a negative one.
        Returns ``corners`` and ``pieces`` of that convex function: for a room in
        ``corner, height, run, rise = pieces[bisect_right(corners, room)]`` it is
        ``height + (room - corner) * rise / run``.
        """
        below, above = [], []
        removed = removal = added = addition = 0
        for _, weight, loss, most in self.undecided:
            if weight > 0 and addition <= self.limit:
                above.append((added, addition, weight, loss))
                added += most * weight
                addition += most * loss
            elif weight < 0 and removal <= self.limit:
                removed += most * weight
                removal += most * loss
                below.append((removed, removal, -weight, -loss))
        # Beyond, it is steeper than for any class, so that the function is convex.
        below.append((removed, removal, 1, -self.limit - 1))
        above.append((added, addition, 1, self.price))
        pieces = below[::-1] + above
        self.work += len(pieces)
        return [corner for corner, _, _, _ in pieces[1:]], pieces

    def _extend(self, change: tuple[int, ...], max_states: int) -> int:
        """Decide how many copies to change; return the state of the least bound."""
        c, weight, loss, most = change
        corners, pieces = self._completion()
        extended: dict[int, tuple[int, Any]] = {}
        nearest, least = 0, self.limit + 1
        for state_weight, (state_loss, history) in self.states.items():
            copies = 0
            while copies <= most:
                self.work += 1
                new_loss = state_loss + copies * loss
                new_weight = state_weight + copies * weight
                left = self.room - new_weight
                corner, height, run, rise = pieces[bisect_right(corners, left)]
                bound = new_loss + height + (left - corner) * rise // run
                if bound > self.limit:
                    # A Newton step: the bound is convex in the number of copies.
                    fall = weight * rise - loss * run
                    if fall <= 0:
                        break
                    copies += max(1, -(-(bound - self.limit) * run // fall))
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
        # Of the states, the Pareto front of weight and value remains.
        self.states = {}
        best = -math.inf
        for new_weight, state in sorted(extended.items(), key=itemgetter(0)):
            worth = self.price * new_weight - state[0]
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
