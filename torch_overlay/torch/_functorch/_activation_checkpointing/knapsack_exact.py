"""Exact 0-1 knapsack for the activation memory budget.

The partitioner asks which activations to save: each *item* has a size (memory)
and a runtime that recomputing it would cost, the memory budget is the
*capacity*, and the saved set should keep the most runtime.  This module answers
on the true sizes.  The returned set never weighs more than the budget (measured
by ``math.fsum``) and is optimal, or comes with a proven upper bound on what a
better one could be worth.

Why not a table over quantized sizes?
-------------------------------------
A dynamic program over ``capacity / quantum`` cells needs a quantum.  Sizes inside
one graph span nine orders of magnitude (an 8-byte random seed beside a 4-GB
logits tensor), so any affordable quantum either makes small items free, and the
budget is overspent, or rounds them up, and value is lost.  What real graphs do
have is few *distinct* items: layers repeat, so hundreds of activations are copies
of 5 to 60 (size, runtime) pairs.  The solver works on these classes, and on
integers: Python's own, so that no sum is ever rounded and no array library can
change the answer.

Steps
-----
1. *Reduction* (``_Items``): drop what has no runtime or cannot fit, save what has
   no size, collect equal pairs into classes.
2. *Scaling* (``_exact_integers``, ``_common_step``): floats become integers without
   loss; sizes that are byte counts seen through a rounded division become those
   byte counts again, so that equal byte sums are ties.
3. *Bound* (``_Relaxation``): Dantzig's bound [1].  With the efficiency of the break
   item as the price of memory, every copy that differs from the base solution
   costs a known, non-negative *loss*; losses add up, and bound minus loss bounds
   every solution.  A copy whose loss exceeds the gap between the bounds is
   fixed [2].
4. *Core* (``_solve_relaxation``): classes of least loss first, in the spirit of
   Pisinger's minimal core [3].  A pass enumerates everything below a loss limit;
   limit and core grow until the incumbent is proven.
5. *Search* (``_search``): Pareto states (change of weight, change of value) in the
   manner of Nemhauser and Ullmann [4], largest sizes first, each pruned by the
   least loss that any completion must add; met in the middle by a second list from
   the smallest sizes [5].
6. *Hard instances* (``_cardinality_relaxation``, ``_exchange``): where all
   efficiencies nearly tie, the number of items that can or must be saved gives a
   second multiplier and a tighter bound [6], and exchanges of pairs find solutions
   that meet it.

Effort is bounded by a number of states, never by time; nothing depends on hashing
or randomness, so every rank computes the same plan.

[1] Dantzig, Discrete-variable extremum problems, Operations Research 5 (1957).
[2] Ingargiola and Korsh, Reduction algorithm for zero-one single knapsack
    problems, Management Science 20 (1973).
[3] Pisinger, A minimal algorithm for the 0-1 knapsack problem, Operations
    Research 45 (1997).
[4] Nemhauser and Ullmann, Discrete dynamic programming and capital allocation,
    Management Science 15 (1969).
[5] Horowitz and Sahni, Computing partitions with applications to the knapsack
    problem, Journal of the ACM 21 (1974).
[6] Martello and Toth, Upper bounds and algorithms for hard 0-1 knapsack problems,
    Operations Research 45 (1997).
"""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import compress
from operator import itemgetter
from typing import Any, NamedTuple, Optional

import torch


__all__ = [
    "KnapsackSolution",
    "exact_knapsack",
    "solve_knapsack",
    "solve_knapsack_budgets",
]

# The default bound on the states one call may create: about 5 CPU seconds, which
# only adversarial instances use up (graphs stay below 10,000 states).
DEFAULT_MAX_STATES = 1 << 20

# A pass over the core starts with this many classes, copies per class and states
# per list, and grows them by these factors while it has to cut something off.
_FIRST_CLASSES, _CLASSES_GROWTH = 24, 1.5
_FIRST_COPIES, _COPIES_GROWTH = 2, 8
_FIRST_BEAM, _BEAM_GROWTH, _LAST_BEAM = 1 << 10, 8, 1 << 16

# Copies per class and states per list in the first pass.
_SCOUT_COPIES, _SCOUT_BEAM = 1024, 32

# The first loss limit is this fraction of the gap; complete passes multiply it.
_FIRST_LIMIT_SHIFT, _LIMIT_GROWTH_SHIFT = 6, 3

# States after which a still open instance is treated as a hard one.
_EASY_STATES = 1 << 17

# From this many items on, those far from the break item are fixed by vectorized
# arithmetic before anything is done per item.
_NARROW_FROM = 5_000
_NARROW_TO = 512

# Relative error of a size computed from a byte count: two divisions.  The slack
# on top covers the rounding of the step itself.
_SIZE_TOLERANCE = 2.0**-50
_LARGEST_STEP_COUNT = 2.0**45

# What a plain float sum may be off by, relative, with room to spare.
_ROUGH = 2.0**-20


class KnapsackSolution(NamedTuple):
    """A feasible set of items, and how good it is known to be.

    ``saved`` and ``recomputable`` partition the item indices, both ascending.
    ``value`` is the runtime of the saved items (an int if all runtimes are ints,
    otherwise correctly rounded), ``weight`` their size by ``math.fsum``.  No
    feasible set is worth more than ``upper_bound``; ``proven`` says that it equals
    ``value``.
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

    ``memory`` and ``runtime`` hold one size and one runtime per item, and
    ``max_memory`` is a budget in the unit of ``memory``.  Returns the saved runtime
    and the indices of the saved and of the recomputable items, both ascending.
    Raises ValueError as :func:`solve_knapsack` does.
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

    ``max_states`` bounds the work (and, with the list cap of the core, the memory):
    when it is used up, the best set found is returned with ``proven=False``; it is
    never worth less than what the greedy solver finds.  Raises ValueError if the
    lengths differ, a size or runtime is negative, NaN or infinite, or the budget is
    NaN.
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
    checked = [check_budget(budget) for budget in budgets]
    items = _Items(memory, runtime)
    solutions: dict[float, KnapsackSolution] = {}
    previous: Optional[KnapsackSolution] = None
    for budget in sorted(set(checked), reverse=True):
        if previous is None or not previous.proven or previous.weight > budget:
            previous = items.solve(budget, max_states)
        solutions[budget] = previous
    return [solutions[budget] for budget in checked]


def check_budget(max_memory: float) -> float:
    """The budget as every solver takes it, a negative one as zero.

    Raises ValueError if it is NaN.
    """
    if math.isnan(max_memory):
        raise ValueError(f"max_memory is {max_memory}: it must be a number")
    return max(0.0, float(max_memory))


def check_items(memory: Sequence[float], runtimes: Sequence[float]) -> None:
    """Raise ValueError, naming index and value, for items that no solver takes."""
    if len(memory) != len(runtimes):
        raise ValueError(
            f"memory has {len(memory)} items but runtimes has {len(runtimes)}: "
            "every item needs one size and one runtime"
        )
    largest = sys.float_info.max
    for name, values in (("memory", memory), ("runtimes", runtimes)):
        # One pass at C speed: a NaN or an infinity does not leave the sum finite.
        if min(values, default=0) >= 0 and sum(values) <= largest:
            continue
        for index, value in enumerate(values):
            if not 0 <= value <= largest:
                raise ValueError(
                    f"{name}[{index}] is {value}: it must be finite and not negative"
                )
        raise ValueError(f"the sum of {name} exceeds the largest float, {largest}")


def _total(numbers: Iterable[float]) -> float:
    """Return the correctly rounded sum, which is infinite if it overflows."""
    try:
        return math.fsum(numbers)
    except OverflowError:
        return math.inf


class _Class(NamedTuple):
    """``number`` items that share one integer weight and one integer value."""

    weight: int
    value: int
    number: int


class _Optimum(NamedTuple):
    """Copies taken of every class, their value, and a proven bound on any value."""

    copies: list[int]
    value: int
    bound: int


class _Scaled(NamedTuple):
    """An instance in integers: classes in order of decreasing efficiency.

    The order depends on weights, values and sizes only, never on the order of the
    items.  ``members[c]`` are the item indices of class ``c``, ascending, and
    ``sizes[c]`` is their size.  ``step`` is the size of one unit of weight: a float
    where the sizes are rounded multiples of it, a Fraction where they are exact
    ones.  One unit of value is ``value_unit``.
    """

    classes: list[_Class]
    members: list[list[int]]
    sizes: list[float]
    step: Any
    value_unit: Fraction


class _Items:
    """Checked items in classes of equal (size, runtime), shared by all budgets.

    ``worthy`` are the items with runtime, ``free`` those among them without size.
    """

    def __init__(self, memory: Sequence[float], runtime: Sequence[float]) -> None:
        check_items(memory, runtime)
        self.memory, self.runtime = memory, runtime
        self.worthy: Sequence[int] = range(len(memory))
        if 0 in runtime:
            self.worthy = [i for i, r in enumerate(runtime) if r > 0]
        self.free: list[int] = []
        if 0 in memory:
            self.free = [i for i in self.worthy if memory[i] == 0]
        self._rough_total = sum(map(memory.__getitem__, self.worthy))
        self._scaled: dict[bool, Optional[_Scaled]] = {}

    def solve(self, budget: float, max_states: int) -> KnapsackSolution:
        """Return the solution for one checked budget."""
        # Adding up exactly takes longer; below 2**32 items a rough sum is this close.
        if self._rough_total * (1 - _ROUGH) <= budget:
            total = self.weight(self.worthy)
            if total <= budget:
                return self._solution(list(self.worthy), total, Fraction(0), True)
        if len(self.memory) >= _NARROW_FROM:
            narrowed = _solve_narrowed(self, budget, max_states)
            if narrowed is not None:
                weight = self.weight(narrowed)
                if weight <= budget:
                    return self._solution(narrowed, weight, Fraction(0), True)
        # Rounded sizes leave one doubt: whether a set that weighs exactly the budget
        # fits.  If the optimum is such a set and does not, exact sizes decide.
        for scaled in filter(None, map(self._scale, (True, False))):
            fitting = [c for c, size in enumerate(scaled.sizes) if size <= budget]
            optimum = _solve_classes(
                [scaled.classes[c] for c in fitting],
                _capacity(budget, scaled.step),
                max_states,
            )
            saved = list(self.free)
            for c, copies in zip(fitting, optimum.copies):
                saved += scaled.members[c][:copies]
            weight = self.weight(saved)
            if weight <= budget:
                break
        proven = optimum.value == optimum.bound
        gap = (optimum.bound - optimum.value) * scaled.value_unit
        if not proven:
            greedy = self._greedy(budget)
            lead = self._worth(greedy) - self._worth(saved)
            if lead > 0:
                saved, gap = greedy, gap - lead
                weight, proven = self.weight(saved), gap <= 0
        return self._solution(saved, weight, gap, proven)

    def weight(self, saved: Iterable[int]) -> float:
        """Return the correctly rounded size of a set of items."""
        return _total(map(self.memory.__getitem__, saved))

    def _scale(self, rounded: bool) -> Optional[_Scaled]:
        """Return the instance on a rounded common step, or on exact integers.

        Each is built once, when first asked for.  There is no rounded step where
        the exact integers are small already or no common step exists.
        """
        if rounded not in self._scaled:
            self._scaled[rounded] = self._build_scaled(rounded)
        return self._scaled[rounded]

    def _build_scaled(self, rounded: bool) -> Optional[_Scaled]:
        members: dict[tuple[float, float], list[int]] = defaultdict(list)
        for i, pair in enumerate(zip(self.memory, self.runtime)):
            members[pair].append(i)
        pairs = [(m, r) for m, r in members if m > 0 and r > 0]
        sizes = [m for m, _ in pairs]
        step: Any
        if rounded:
            step = _common_step(sizes)
            if step is None:
                return None
            weights = [round(m / step) for m in sizes]
        else:
            weights, step = _exact_integers(sizes)
        values, value_unit = _exact_integers([r for _, r in pairs])
        # Flooring at 2**-64 keeps the key an int; the bounds do not rely on the
        # order of near ties.
        order = sorted(
            range(len(pairs)),
            key=lambda k: (-((values[k] << 64) // weights[k]), weights[k], pairs[k]),
        )
        return _Scaled(
            [_Class(weights[k], values[k], len(members[pairs[k]])) for k in order],
            [members[pairs[k]] for k in order],
            [sizes[k] for k in order],
            step,
            value_unit,
        )

    def _greedy(self, budget: float) -> list[int]:
        """Return what the greedy solver saves: efficient items first, if they fit."""
        saved, weight = list(self.free), 0.0
        memory, runtime = self.memory, self.runtime
        candidates = [i for i in self.worthy if memory[i] > 0]
        for i in sorted(candidates, key=lambda i: runtime[i] / memory[i], reverse=True):
            if weight + memory[i] <= budget:
                weight += memory[i]
                saved.append(i)
        return saved if self.weight(saved) <= budget else list(self.free)

    def _worth(self, saved: list[int]) -> Fraction:
        return sum((Fraction(self.runtime[i]) for i in saved), Fraction(0))

    def _solution(
        self, saved: list[int], weight: float, gap: Fraction, proven: bool
    ) -> KnapsackSolution:
        saved = sorted(saved)
        left = bytearray(b"\1") * len(self.memory)
        for i in saved:
            left[i] = 0
        runtimes = list(map(self.runtime.__getitem__, saved))
        value: float = sum(runtimes)
        if not isinstance(value, int):
            value = _total(runtimes)
        bound = value
        if not proven:
            exact = self._worth(saved) + gap
            bound = int(exact) if isinstance(value, int) else float(exact)
            if bound < exact:
                bound = math.nextafter(bound, math.inf)
        return KnapsackSolution(
            value=value,
            saved=saved,
            recomputable=list(compress(range(len(left)), left)),
            weight=weight,
            upper_bound=bound,
            proven=proven,
        )


# Scaling


def _exact_integers(numbers: Sequence[float]) -> tuple[list[int], Fraction]:
    """Return integers without common factor and the exact unit they count.

    ``numbers[i] == integers[i] * unit`` holds exactly: every float is an integer
    times a power of two.
    """
    ratios = [
        (x, 1) if isinstance(x, int) else float(x).as_integer_ratio() for x in numbers
    ]
    denominator = max((d for _, d in ratios), default=1)
    integers = [n * (denominator // d) for n, d in ratios]
    factor = math.gcd(*integers) or 1
    return [n // factor for n in integers], Fraction(factor, denominator)


def _common_step(sizes: Sequence[float]) -> Optional[float]:
    """Return the step that all sizes are rounded multiples of, or None.

    The partitioner's sizes are ``bytes / 1e9 / range``: multiples of a common step
    up to two rounding errors.  Euclid's algorithm on floats recovers the step if it
    starts from the smallest size, whose absolute error is least.  Every size is then
    within ``_SIZE_TOLERANCE`` of a multiple, or there is no step.  None as well if
    the sizes are exact multiples of something large: then nothing is gained.
    """
    integers, _ = _exact_integers(sizes)
    if not integers or sum(integers) < 1 << 53:
        return None
    step = smallest = float(min(sizes))
    largest = float(max(sizes))
    for size in sorted(set(sizes)):
        a, b = step, math.fmod(float(size), step)
        # Remainders amplify errors, so tell a true one from noise with room to spare.
        noise = size * 64 * _SIZE_TOLERANCE
        while noise < b < a - noise:
            a, b = b, math.fmod(a, b)
        # The remainder carries the error of ``size``; the smallest size does not.
        step = smallest / round(smallest / a)
        if step * _LARGEST_STEP_COUNT < largest:
            return None
    step = largest / round(largest / step)
    for size in sizes:
        if abs(size - round(size / step) * step) > size * _SIZE_TOLERANCE:
            return None
    return step


def _capacity(budget: float, step: Any) -> int:
    """Return the greatest weight, in steps, whose size fits the budget.

    With an exact step, a weight fits if its size rounds to at most ``budget``, which
    is what ``math.fsum`` will say.  With a rounded one, a weight within rounding
    errors of the budget counts as fitting and is to be checked.
    """
    if isinstance(step, float):
        steps = budget / step
        if steps > 2 * _LARGEST_STEP_COUNT:
            return int(steps)
        nearest = round(steps)
        close = abs(steps - nearest) <= 8 * nearest * _SIZE_TOLERANCE
        return nearest if close else int(steps)
    limit = (Fraction(budget) + Fraction(math.nextafter(budget, math.inf))) / 2 / step
    capacity: int = math.floor(limit)
    odd = math.ldexp(math.frexp(budget)[0], 53) % 2
    return capacity - 1 if odd and capacity == limit else capacity


# Bounds


class _Relaxation(NamedTuple):
    """A base solution with a price per deviation, and the bound it proves.

    All amounts of value are multiplied by ``scale``, the weight of the break item,
    which makes them integers.  ``bound`` exceeds the scaled value of a solution by at
    least the sum of ``losses[c]`` over the copies in which it differs from ``base``,
    plus ``slack_loss`` per unit of capacity it leaves unused.  ``room`` is the
    capacity that ``base`` leaves (negative if it overspends: only deviations need to
    be feasible) and ``value`` its unscaled value.
    """

    base: list[int]
    value: int
    room: int
    scale: int
    slack_loss: int
    losses: list[int]
    bound: int


def _fill(
    classes: list[_Class], order: Iterable[int], capacity: int
) -> tuple[list[int], int, Optional[int]]:
    """Take classes in order until one does not fit entirely: the break class.

    Returns the copies per class, the capacity left and the break class, which is
    None if everything fits.
    """
    copies = [0] * len(classes)
    for c in order:
        weight, _, count = classes[c]
        copies[c] = min(count, capacity // weight)
        capacity -= copies[c] * weight
        if copies[c] < count:
            return copies, capacity, c
    return copies, capacity, None


def _relax(
    classes: list[_Class], capacity: int, break_class: int, multiplier: int, items: int
) -> _Relaxation:
    """Price memory by the efficiency of the break class [1].

    Every item costs ``multiplier`` more than its memory, and ``multiplier * items``
    is added back: a bound if no solution of interest holds more than ``items`` items
    (``multiplier > 0``), or less (``multiplier < 0``).  The base takes every class
    that is worth more than its price and none that is worth less.  Classes at their
    price are left out; the caller may add them, which keeps the bound.  O(classes).
    """
    scale = classes[break_class].weight
    price = classes[break_class].value - multiplier
    base, losses = [], []
    room, value = capacity, 0
    bound = price * capacity + multiplier * items * scale
    for weight, worth, count in classes:
        gain = (worth - multiplier) * scale - price * weight
        losses.append(abs(gain))
        base.append(count if gain > 0 else 0)
        if gain > 0:
            bound += gain * count
            room -= count * weight
            value += count * worth
    return _Relaxation(base, value, room, scale, price, losses, bound)


def _add_ties(
    relaxation: _Relaxation, classes: list[_Class], extra: Iterable[tuple[int, int]]
) -> _Relaxation:
    """Add ``(class, copies)`` of classes without loss to the base."""
    base, value, room = list(relaxation.base), relaxation.value, relaxation.room
    for c, copies in extra:
        base[c] += copies
        value += copies * classes[c].value
        room -= copies * classes[c].weight
    return relaxation._replace(base=base, value=value, room=room)


def _cardinality_relaxation(
    classes: list[_Class], capacity: int, incumbent: int, relaxation: _Relaxation
) -> _Relaxation:
    """Return a tighter relaxation with a second multiplier, or the given one.

    No solution holds more items than the lightest ones that fit together, and none
    better than the incumbent holds fewer than the most valuable ones it takes to
    exceed it [6].  Either count, as a constraint, gets the multiplier that minimizes
    the bound, found by bisection: the relaxed solution's number of items falls as
    the multiplier rises.  O(classes * log(classes) * log(largest value)).
    """
    indices = range(len(classes))
    by_weight = sorted(indices, key=lambda c: (classes[c].weight, c))
    most, _, _ = _fill(classes, by_weight, capacity)
    least, value = 0, 0
    for _, worth, count in sorted(classes, key=lambda c: -c.value):
        copies = min(count, (incumbent - value) // worth + 1)
        least += copies
        value += copies * worth
        if value > incumbent:
            break
    tightest = relaxation
    for sign, items in ((1, sum(most)), (-1, least)):

        def fill(
            multiplier: int, sign: int = sign
        ) -> tuple[list[int], int, Optional[int]]:
            worthy = [c for c in indices if classes[c].value > multiplier]
            # Among ties the class that moves the item count the right way first.
            worthy.sort(
                key=lambda c: (
                    ((multiplier - classes[c].value) << 64) // classes[c].weight,
                    -sign * classes[c].weight,
                )
            )
            return _fill(classes, worthy, capacity)

        low, high = 0, max(worth for _, worth, _ in classes)
        while low < high:
            middle = (low + high) // 2
            taken, room, break_class = fill(sign * middle)
            # The relaxed solution also takes a fraction of the break item.
            excess = sum(taken) - items
            if break_class is not None:
                excess = excess * classes[break_class].weight + room
            if sign * excess <= 0:
                high = middle
            else:
                low = middle + 1
        multiplier = sign * low
        _, _, break_class = fill(multiplier)
        if break_class is None:
            continue
        candidate = _relax(classes, capacity, break_class, multiplier, items)
        if candidate.bound * tightest.scale >= tightest.bound * candidate.scale:
            continue
        # Complete the base to the required number of items, from the extreme end:
        # solutions that fill the capacity then differ by exchanges one way.
        missing = max(0, items - sum(candidate.base))
        extra = []
        for c in by_weight if sign > 0 else reversed(by_weight):
            if not candidate.losses[c] and missing:
                copies_added = min(classes[c].number, missing)
                missing -= copies_added
                extra.append((c, copies_added))
        tightest = _add_ties(candidate, classes, extra)
    return tightest


# Search


class _Move(NamedTuple):
    """A change of the base that can be made ``low..high`` times (``low <= 0 <= high``).

    One application adds ``weight > 0`` and ``value`` and costs ``loss``; a negative
    number of applications undoes copies that the base holds.  ``changes`` lists the
    ``(class, copies)`` of one application.
    """

    weight: int
    value: int
    loss: int
    low: int
    high: int
    changes: tuple[tuple[int, int], ...]


class _Completion:
    """The least loss that completing a state must add, by the room it has left.

    A convex, piecewise linear function of the room with value 0 at 0: room is filled
    with the undecided moves of least loss per weight, fractionally, and what no move
    fills costs ``slack_loss``; a negative room is made up by undoing moves, and
    cannot be where none are left.  ``adds`` and ``undos`` are the undecided moves in
    that order.  Losses are rounded down, rooms outwards.
    """

    def __init__(self, adds: list[_Move], undos: list[_Move], slack_loss: int) -> None:
        self.add_room, self.add_loss = self._corners((m, m.high) for m in adds)
        self.add_slope = [(m.weight, m.loss) for m in adds] + [(1, slack_loss)]
        self.undo_room, self.undo_loss = self._corners((m, -m.low) for m in undos)
        self.undo_slope = [(m.weight, m.loss) for m in undos]

    @staticmethod
    def _corners(moves: Iterable[tuple[_Move, int]]) -> tuple[list[int], list[int]]:
        rooms, losses = [0], [0]
        for move, times in moves:
            rooms.append(rooms[-1] + times * move.weight)
            losses.append(losses[-1] + times * move.loss)
        return rooms, losses

    def greatest(self, loss: int) -> int:
        """Return the greatest room that ``loss`` can complete."""
        k = bisect_right(self.add_loss, loss) - 1
        weight, slope = self.add_slope[k]
        return self.add_room[k] + (loss - self.add_loss[k]) * weight // slope

    def least(self, loss: int) -> int:
        """Return the least room, at most 0, that ``loss`` can complete."""
        k = bisect_right(self.undo_loss, loss) - 1
        if k == len(self.undo_slope):
            return -self.undo_room[k]
        weight, slope = self.undo_slope[k]
        return -self.undo_room[k] - (loss - self.undo_loss[k]) * weight // slope

    def loss(self, room: int) -> int:
        """Return the loss of completing a state within the window."""
        if room >= 0:
            k = bisect_right(self.add_room, room) - 1
            weight, slope = self.add_slope[k]
            return self.add_loss[k] + (room - self.add_room[k]) * slope // weight
        k = bisect_left(self.undo_room, -room) - 1
        weight, slope = self.undo_slope[k]
        return self.undo_loss[k] + (-room - self.undo_room[k]) * slope // weight


# A state is (weight, -value, loss, history) relative to the base; a history is None
# or (earlier history, move, times).
_State = tuple[Any, ...]
_WEIGHT_THEN_VALUE = itemgetter(0, 1)


def _pareto(states: list[_State]) -> list[_State]:
    """Sort by weight and drop what a state of no more weight is worth as much as.

    Both the weights and the values of the result increase strictly.
    """
    states.sort(key=_WEIGHT_THEN_VALUE)
    kept: list[_State] = []
    best = math.inf
    for state in states:
        if state[1] < best:
            best = state[1]
            kept.append(state)
    return kept


def _cut(ranked: list[tuple[int, _State]], beam: int) -> tuple[list[_State], int]:
    """Keep ``beam`` states of least bound; also return the least bound cut off.

    Ties are kept spread over the weights, by multiplicative hashing: neighbours
    would all complete alike.
    """
    ranked.sort(key=lambda r: (r[0], r[1][0] * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF))
    kept = [state for _, state in ranked[:beam]]
    kept.sort(key=_WEIGHT_THEN_VALUE)
    return kept, ranked[beam][0]


class _Found(NamedTuple):
    """The best completed state, if any, as the change of value and histories.

    Every solution made of the given moves whose loss is below ``complete`` was
    considered.  ``states`` counts the states created.
    """

    value: int
    histories: tuple[Any, ...]
    complete: int
    states: int


def _search(
    moves: list[_Move],
    room: int,
    limit: int,
    slack_loss: int,
    beam: int,
    allowance: int,
    scout: bool = False,
) -> _Found:
    """Find the best combination of moves with a loss of at most ``limit``.

    ``room`` is the capacity the base leaves.  Moves are decided from the largest
    weight down into the list ``head``, and from the smallest up into the list
    ``tail``, whichever stays shorter.  Invariant: every combination of decided moves
    that extends to a solution within the limit is, or is dominated by, a head state
    plus a tail state, up to what exceeded ``beam`` and lowered ``complete``.  Once
    ``allowance`` states were created, the lists shrink and the search runs out.  Sizes in
    decreasing order matter: once the large moves are decided, the small ones have to
    meet the remaining room, which prunes sizes that differ by orders of magnitude to
    a handful of states.
    """
    moves = sorted(moves, key=lambda m: (-m.weight, m.value, m.changes))
    by_loss = sorted(
        range(len(moves)), key=lambda k: ((moves[k].loss << 64) // moves[k].weight, k)
    )
    adds = [k for k in by_loss if moves[k].high]
    undos = [k for k in by_loss if moves[k].low]
    head: list[_State] = [(0, 0, 0, None)]
    tail: list[_State] = [(0, 0, 0, None)]
    first, last = 0, len(moves)
    complete, states = limit + 1, 0
    while first < last and head:
        if states > allowance:
            beam = min(beam, _SCOUT_BEAM)
        move = moves[last - 1]
        if len(tail) * (move.high - move.low + 1) <= len(head):
            last -= 1
            tail = _extend_tail(tail, move, limit)
            states += len(tail)
            if len(tail) > beam:
                tail, bound = _cut([(state[2], state) for state in tail], beam)
                complete = min(complete, bound)
            continue
        completion = _Completion(
            [moves[k] for k in adds if k > first],
            [moves[k] for k in undos if k > first],
            slack_loss,
        )
        head = _extend_head(head, moves[first], room, limit, completion)
        first += 1
        states += len(head)
        if len(head) > beam:
            if scout:
                return _Found(0, (), 0, states)
            loss = completion.loss
            ranked = [(state[2] + loss(room - state[0]), state) for state in head]
            head, bound = _cut(ranked, beam)
            complete = min(complete, bound)
    return _Found(*_join(head, tail, room), complete, states)


def _extend_head(
    head: list[_State], move: _Move, room: int, limit: int, completion: _Completion
) -> list[_State]:
    """Apply a move to head states as often as the limit allows.

    The admissible numbers of times form an interval, because the completion loss is
    convex.  Going outwards from zero, a state stops where it meets one of the same
    weight that is worth no less and needed no more copies: that one goes on in its
    place.
    """
    weight, value, loss, low, high, _ = move
    least, greatest = completion.least, completion.greatest
    # Weight -> (-value, times, state) of the best so far; no state until admitted.
    best: dict[int, tuple[int, int, Optional[_State]]]
    best = {state[0]: (state[1], 0, None) for state in head}
    for state in head:
        state_weight, state_value, state_loss, history = state
        left = room - state_weight
        spare = limit - state_loss
        fewest = -((greatest(spare) - left) // weight)
        most = (left - least(spare)) // weight
        if fewest <= 0 <= most and best[state_weight][0] >= state_value:
            best[state_weight] = state_value, 0, state
        if fewest < low:
            fewest = low
        if most > high:
            most = high
        for sign, start, stop in ((1, fewest, most), (-1, -most, -fewest)):
            for times in range(start if start > 1 else 1, stop + 1):
                shift = sign * times
                new_weight = state_weight + shift * weight
                new_value = state_value - shift * value
                other = best.get(new_weight)
                if other is not None and other[0] <= new_value:
                    if other[1] <= times:
                        break
                    continue
                new_loss = state_loss + times * loss
                if loss:
                    if new_loss > limit:
                        break
                    new_left, new_spare = room - new_weight, limit - new_loss
                    if new_left > 0:
                        if new_left > greatest(new_spare):
                            continue
                    elif new_left < least(new_spare):
                        continue
                best[new_weight] = (
                    new_value,
                    times,
                    (new_weight, new_value, new_loss, (history, move, shift)),
                )
    kept: list[_State] = []
    bound = math.inf
    for new_weight in sorted(best):
        new_value, _, admitted = best[new_weight]
        if admitted is not None and new_value < bound:
            bound = new_value
            kept.append(admitted)
    return kept


def _extend_tail(tail: list[_State], move: _Move, limit: int) -> list[_State]:
    """Apply a move to tail states as often as the limit allows."""
    weight, value, loss, low, high, _ = move
    extended = []
    for state in tail:
        state_weight, state_value, state_loss, history = state
        most = (limit - state_loss) // loss if loss else high - low
        for times in range(max(low, -most), min(high, most) + 1):
            extended.append(
                (
                    state_weight + times * weight,
                    state_value - times * value,
                    state_loss + abs(times) * loss,
                    (history, move, times),
                )
                if times
                else state
            )
    return _pareto(extended)


def _join(
    head: list[_State], tail: list[_State], room: int
) -> tuple[int, tuple[Any, ...]]:
    """Pair every head state with the best tail state that fits; O(head + tail)."""
    best: tuple[int, tuple[Any, ...]] = (0, ())
    last = len(tail) - 1
    for weight, value, _, history in head:
        while last >= 0 and tail[last][0] > room - weight:
            last -= 1
        if last < 0:
            break
        total = -value - tail[last][1]
        if not best[1] or total > best[0]:
            best = total, (history, tail[last][3])
    return best


def _apply(base: list[int], histories: tuple[Any, ...]) -> list[int]:
    """Return the copies per class after the moves of the histories."""
    copies = list(base)
    for history in histories:
        while history is not None:
            history, move, times = history
            for c, change in move.changes:
                copies[c] += times * change
    return copies


# Core


def _solve_classes(
    classes: list[_Class],
    capacity: int,
    max_states: int,
    outside_loss: Optional[Fraction] = None,
) -> _Optimum:
    """Solve a bounded knapsack over classes in order of decreasing efficiency.

    Every class fits alone.  ``outside_loss`` tells, for a narrowed instance, the
    least loss (in units of value) of changing anything outside it: the bound then
    covers the whole instance.
    """
    copies, room, break_class = _fill(classes, range(len(classes)), capacity)
    if break_class is None:
        value = sum(k * c.value for k, c in zip(copies, classes))
        return _Optimum(copies, value, value)
    relaxation = _relax(classes, capacity, break_class, 0, 0)
    relaxation = _add_ties(
        relaxation,
        classes,
        [(c, k) for c, k in enumerate(copies) if k and not relaxation.losses[c]],
    )
    # The greedy solution: fill what the break item leaves.
    for c in range(break_class, len(classes)):
        taken = min(classes[c].number - copies[c], room // classes[c].weight)
        copies[c] += taken
        room -= taken * classes[c].weight
    value = sum(k * c.value for k, c in zip(copies, classes))
    optimum = _Optimum(copies, value, max(value, relaxation.bound // relaxation.scale))
    if outside_loss is not None:
        outside = math.floor(outside_loss * relaxation.scale)
        return _solve_relaxation(classes, relaxation, optimum, max_states, outside)[0]
    easy = min(max_states, _EASY_STATES)
    optimum, states = _solve_relaxation(classes, relaxation, optimum, easy)
    if optimum.value == optimum.bound or states >= max_states:
        return optimum
    relaxation = _cardinality_relaxation(classes, capacity, optimum.value, relaxation)
    bound = max(optimum.value, relaxation.bound // relaxation.scale)
    optimum = optimum._replace(bound=min(optimum.bound, bound))
    optimum, more = _exchange(classes, relaxation, optimum, max_states - states)
    states += more
    if optimum.value == optimum.bound or states >= max_states:
        return optimum
    return _solve_relaxation(classes, relaxation, optimum, max_states - states)[0]


def _core_order(classes: list[_Class], relaxation: _Relaxation) -> list[int]:
    """Order classes by loss, and those without loss so as to cover all scales.

    Among ties only the weights matter, and what is needed is differences of all
    magnitudes between what the base holds and what it does not: ranked by distance
    (in order of weight) from where the base begins or ends, ties are taken from
    1, 2, 4, 8, ..., then 3, 5, 9, ..., and so on.
    """
    losses, base = relaxation.losses, relaxation.base
    ties = [c for c, loss in enumerate(losses) if not loss]
    ties.sort(key=lambda c: (classes[c].weight, c))
    distance = [len(ties)] * len(ties)
    for ahead, indices in (
        (-1, range(1, len(ties))),
        (1, range(len(ties) - 2, -1, -1)),
    ):
        for t in indices:
            edge = (base[ties[t]] > 0) != (base[ties[t + ahead]] > 0)
            distance[t] = 0 if edge else min(distance[t], distance[t + ahead] + 1)
    priority = [0] * len(classes)
    for t, c in enumerate(ties):
        rank = distance[t] + 1
        priority[c] = rank - (1 << (rank.bit_length() - 1))
    return sorted(range(len(classes)), key=lambda c: (losses[c], priority[c], c))


def _solve_relaxation(
    classes: list[_Class],
    relaxation: _Relaxation,
    optimum: _Optimum,
    max_states: int,
    outside: Optional[int] = None,
) -> tuple[_Optimum, int]:
    """Improve and prove the incumbent by passes over a growing core.

    The first pass scouts: it covers the whole gap but keeps few states, which proves
    most incumbents and improves the others.  Later passes consider every solution
    whose loss is below ``limit``; the one of least loss is optimal, so low limits
    find and prove it at little cost.  Invariant:
    no solution of loss below ``complete`` is better than the incumbent.  A pass that
    was complete raises the limit, one that had to cut something off (classes, copies,
    states) enlarges the core.  Returns the optimum and the states created.
    """
    base, scale = relaxation.base, relaxation.scale
    order = _core_order(classes, relaxation)
    largest_count = max(c.number for c in classes)
    copies, value, bound = optimum
    limit: Optional[int] = None
    complete = states = growth = 0
    while True:
        gap = relaxation.bound - (value + 1) * scale
        if gap < complete or states >= max_states:
            break
        pass_limit = gap if limit is None else min(gap, limit)
        pass_complete = pass_limit + 1
        if outside is not None:
            pass_complete = min(pass_complete, outside)
        size = int(_FIRST_CLASSES * _CLASSES_GROWTH**growth)
        most_copies = _FIRST_COPIES * _COPIES_GROWTH**growth
        beam = min(_FIRST_BEAM * _BEAM_GROWTH**growth, _LAST_BEAM)
        if limit is None:
            most_copies, beam = _SCOUT_COPIES, _SCOUT_BEAM
        if size < len(order) and relaxation.losses[order[size]] <= pass_limit:
            pass_limit = pass_complete = relaxation.losses[order[size]]
        moves = []
        for c in order[:size]:
            loss = relaxation.losses[c]
            if loss > pass_limit:
                break
            low, high = base[c], classes[c].number - base[c]
            if loss:
                low, high = min(low, pass_limit // loss), min(high, pass_limit // loss)
            if max(low, high) > most_copies:
                low, high = min(low, most_copies), min(high, most_copies)
                pass_complete = min(pass_complete, loss * (most_copies + 1))
            moves.append(
                _Move(classes[c].weight, classes[c].value, loss, -low, high, ((c, 1),))
            )
        found = _search(
            moves,
            relaxation.room,
            pass_limit,
            relaxation.slack_loss,
            beam,
            max_states - states,
            limit is None,
        )
        states += found.states + 1
        complete = max(complete, min(pass_complete, found.complete))
        if found.histories and relaxation.value + found.value > value:
            value = relaxation.value + found.value
            copies = _apply(base, found.histories)
        if limit is None:
            gap = relaxation.bound - (value + 1) * scale
            limit = max(1, gap >> _FIRST_LIMIT_SHIFT, complete)
        elif min(pass_complete, found.complete) > pass_limit:
            limit <<= _LIMIT_GROWTH_SHIFT
        elif (
            size >= len(order) and most_copies >= largest_count and beam == _LAST_BEAM
        ) or (outside is not None and complete >= outside):
            break
        else:
            growth += 1
    gap = relaxation.bound - (value + 1) * scale
    if gap < complete:
        bound = value
    else:
        bound = max(value, min(bound, (relaxation.bound - complete) // scale))
    return _Optimum(copies, value, bound), states


def _exchange(
    classes: list[_Class], relaxation: _Relaxation, optimum: _Optimum, max_states: int
) -> tuple[_Optimum, int]:
    """Look for a solution that meets the bound among exchanges of pairs.

    Where all efficiencies nearly tie, the optimum usually fills the capacity to the
    last unit with the number of items of the base.  Exchanging one item of the base
    for another keeps that number; disjoint exchanges, of differences on all scales up
    to the room, are moves like any other.
    """
    states = 0
    copies, value, bound = optimum
    for size in (20, 28, 36, 44):
        gap = relaxation.bound - (value + 1) * relaxation.scale
        if value >= bound or gap < 0 or states >= max_states:
            break
        moves = _exchanges(classes, relaxation, gap, size)
        found = _search(
            moves,
            relaxation.room,
            gap,
            relaxation.slack_loss,
            _LAST_BEAM,
            max_states - states,
        )
        states += found.states
        if found.histories and relaxation.value + found.value > value:
            value = relaxation.value + found.value
            copies = _apply(relaxation.base, found.histories)
    return _Optimum(copies, value, max(value, bound)), states


def _exchanges(
    classes: list[_Class], relaxation: _Relaxation, gap: int, size: int
) -> list[_Move]:
    """Return up to ``size`` disjoint exchanges that change the weight towards room.

    Their differences of weight are as close as possible to a geometric sequence that
    starts at half the room and is repeated, and each costs at most a quarter of
    ``gap``.
    """
    losses, base, room = relaxation.losses, relaxation.base, relaxation.room
    cheap = [c for c, loss in enumerate(losses) if loss <= gap >> 3]
    inside = sorted((classes[c].weight, c) for c in cheap if base[c])
    outside = sorted(
        (classes[c].weight, c) for c in cheap if base[c] < classes[c].number
    )
    # Enough to choose from; more would only take longer.
    inside = inside[:: len(inside) // 256 + 1]
    moves: list[_Move] = []
    target = widest = abs(room) // 2 or 1
    sign = 1 if room > 0 else -1
    while len(moves) < size:
        candidates = []
        for a, (weight, _) in enumerate(inside):
            wanted = weight + sign * target
            b = bisect_left(outside, (wanted, 0))
            for near in (b - 1, b):
                if 0 <= near < len(outside) and outside[near][0] != weight:
                    candidates.append((abs(outside[near][0] - wanted), a, near))
        if not candidates:
            break
        _, a, b = min(candidates)
        (given, c), (taken, d) = inside.pop(a), outside.pop(b)
        up = 1 if taken > given else -1
        moves.append(
            _Move(
                weight=up * (taken - given),
                value=up * (classes[d].value - classes[c].value),
                loss=losses[c] + losses[d],
                low=-(up < 0),
                high=int(up > 0),
                changes=((c, -up), (d, up)),
            )
        )
        target = target * 2 // 3 if target * 16 > widest else widest
    return moves


# Many items


def _solve_narrowed(
    items: _Items, budget: float, max_states: int
) -> Optional[list[int]]:
    """Return an optimal set that fixes all but the items near the break item, or None.

    For instances of many different items.  Vectorized arithmetic finds the break
    efficiency (by partitioning [7], without sorting) and the items whose loss is
    least; all others are fixed, and the instance of those left is solved with the
    least loss of the fixed ones as a limit.  Floats only select: weights stay exact
    and losses are compared with a margin above rounding errors.  None if the weights
    do not fit 53 bits in common steps, or if fixing that much left a gap.  With rounded
    steps the caller checks the weight.

    [7] Balas and Zemel, An algorithm for large zero-one knapsack problems,
    Operations Research 28 (1980).
    """
    # Several times faster than torch.tensor on a list.
    sizes = torch.frombuffer(array("d", items.memory), dtype=torch.float64)
    values = torch.frombuffer(array("d", items.runtime), dtype=torch.float64)
    usable = ((sizes > 0) & (values > 0) & (sizes <= budget)).nonzero().squeeze(1)
    sizes, values = sizes[usable], values[usable]
    if len(usable) < _NARROW_FROM:
        return None
    sample = sizes[:: len(usable) // 64].tolist() + [sizes.min().item()]
    step: Any = _common_step(sample)
    if step is None:
        step = _exact_integers(sample)[1]
    weights = torch.round(sizes / float(step))
    off = (sizes - weights * float(step)).abs() > sizes * _SIZE_TOLERANCE
    if off.any() or weights.sum().item() >= 2**53:
        return None
    if not isinstance(step, float) and (weights * float(step) != sizes).any():
        return None
    capacity = _capacity(budget, step)
    price = _break_efficiency(values / weights, weights, capacity)
    losses = values - price * weights
    nearest = losses.abs().topk(_NARROW_TO + 1, largest=False)
    margin = values.max().item() * 2.0**-40
    outside_loss = nearest.values[-1].item() - margin
    if outside_loss <= 0:
        return None
    fixed = losses > 0
    near = nearest.indices[:-1].sort().values
    fixed[near] = False
    capacity -= int(weights[fixed].sum().item())
    pairs: dict[tuple[int, float], list[int]] = {}
    for weight, i in zip(weights[near].tolist(), usable[near].tolist()):
        pairs.setdefault((int(weight), items.runtime[i]), []).append(i)
    keys = list(pairs)
    ints, unit = _exact_integers([r for _, r in keys])
    order = sorted(
        range(len(keys)),
        key=lambda k: (-((ints[k] << 64) // keys[k][0]), keys[k][0]),
    )
    classes = [_Class(keys[k][0], ints[k], len(pairs[keys[k]])) for k in order]
    if capacity < max(c.weight for c in classes):
        return None
    # What this little does not settle, a narrow core will not settle at all.
    easy = min(max_states, _EASY_STATES)
    optimum = _solve_classes(classes, capacity, easy, Fraction(outside_loss) / unit)
    if optimum.value < optimum.bound:
        return None
    saved = items.free + usable[fixed].tolist()
    for k, copies in zip(order, optimum.copies):
        saved += pairs[keys[k]][:copies]
    return saved


def _break_efficiency(
    efficiencies: torch.Tensor, weights: torch.Tensor, capacity: int
) -> float:
    """Return the efficiency of the break item; O(items) by repeated partitioning."""
    room = float(capacity)
    while True:
        pivot = efficiencies.median()
        above = efficiencies > pivot
        weight = weights[above].sum().item()
        if weight > room:
            keep = above
        else:
            room -= weight
            below = efficiencies < pivot
            room -= weights[~above & ~below].sum().item()
            if room < 0 or not below.any():
                return pivot.item()
            keep = below
        efficiencies, weights = efficiencies[keep], weights[keep]
