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
   Pisinger's minimal core [3].  A pass enumerates everything below a loss limit, the
   first one below the gap between the bounds; where that takes too many states, limit
   and core grow from a small start until the incumbent is proven.
5. *Search* (``_search``): Pareto states (change of weight, change of value) in the
   manner of Nemhauser and Ullmann [4], largest sizes first, each pruned by the
   least loss that any completion must add; met in the middle by a second list from
   the smallest sizes [5].  Greedy completions on the way tighten the limit.
6. *Hard instances*: where all efficiencies nearly tie, either few sets come close to
   the bound, and they are enumerated in order of loss (``_deepen``), or so many do
   that one of them meets it.  The number of items that can or must be saved gives a
   second multiplier and a tighter bound [6] (``_cardinality_relaxation``), and
   exchanges of a few classes find a set that meets it (``_exchange``).
7. *Many items* (``_solve_narrowed``): vectorized arithmetic fixes all but the items
   near the break item [7], which the enumeration in order of loss then decides.

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
[7] Balas and Zemel, An algorithm for large zero-one knapsack problems, Operations
    Research 28 (1980).
"""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_right
from collections import defaultdict
from fractions import Fraction
from itertools import compress
from operator import itemgetter
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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
_SCOUT_COPIES, _SCOUT_BEAM = 1024, 256

# One head state in this many is completed greedily after every step.
_SAMPLED = 8

# The first loss limit is this fraction of the gap; complete passes multiply it.
_FIRST_LIMIT_SHIFT, _LIMIT_GROWTH_SHIFT = 6, 3

# States after which a still open instance is treated as a hard one.
_EASY_STATES = 1 << 17

# The enumeration by loss starts with this many classes and grows by this factor; on
# hard instances it stops at so many states.
_FIRST_DEPTH, _DEPTH_GROWTH = 24, 1.25
_DEEP_STATES = 1 << 18

# How many classes are exchanged at a time, in turn.
_EXCHANGED = (20, 24, 28, 32)

# From this many items on, those far from the break item are fixed by vectorized
# arithmetic before anything is done per item: all but so many, then more.  If that
# settles nothing, up to ``_MOST_KINDS`` different items are solved for all the same,
# and of more the ``_LAST_CORE`` nearest.
_NARROW_FROM, _SAMPLE = 5_000, 1_000
_NARROW_TO = (128, 1024)
_MOST_KINDS, _LAST_CORE = 1 << 15, 1 << 13

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


def check_items(
    memory: Sequence[float], runtimes: Sequence[float]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Raise ValueError, naming index and value, for items that no solver takes.

    Returns (least, rough sum) of the sizes and of the runtimes, 0 if there are none.
    """
    if len(memory) != len(runtimes):
        raise ValueError(
            f"memory has {len(memory)} items but runtimes has {len(runtimes)}: "
            "every item needs one size and one runtime"
        )
    return _least_and_sum("memory", memory), _least_and_sum("runtimes", runtimes)


def _least_and_sum(name: str, values: Sequence[float]) -> tuple[float, float]:
    largest = sys.float_info.max
    # Two passes at C speed: a NaN or an infinity does not leave the sum finite.
    least, total = min(values, default=0), sum(values)
    if least >= 0 and total <= largest:
        return least, total
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
    where the sizes are rounded multiples of it, an int or a Fraction where they are
    exact ones.  One unit of value is ``value_unit``, an int or a Fraction.
    """

    classes: list[_Class]
    members: list[list[int]]
    sizes: list[float]
    step: Any
    value_unit: Any


class _Items:
    """Checked items in classes of equal (size, runtime), shared by all budgets.

    ``worthy`` are the items with runtime, ``free`` those among them without size.
    """

    def __init__(self, memory: Sequence[float], runtime: Sequence[float]) -> None:
        (least_size, total), (least_runtime, _) = check_items(memory, runtime)
        self.memory, self.runtime = memory, runtime
        self.worthy: Sequence[int] = range(len(memory))
        if not least_runtime:
            self.worthy = list(compress(self.worthy, runtime))
            total = sum(compress(memory, runtime))
        self.free: list[int] = []
        if not least_size:
            self.free = [i for i in self.worthy if not memory[i]]
        self._rough_total = total
        self._scaled: dict[bool, Optional[_Scaled]] = {}

    def solve(self, budget: float, max_states: int) -> KnapsackSolution:
        """Return the solution for one checked budget."""
        # Adding up exactly takes longer; below 2**32 items a rough sum is this close.
        if self._rough_total * (1 - _ROUGH) <= budget:
            total = self.weight(self.worthy)
            if total <= budget:
                return self._solution(list(self.worthy), total, 0, True)
        if len(self.memory) >= _NARROW_FROM and self._varied():
            narrowed = _solve_narrowed(self, budget, max_states)
            if narrowed is not None:
                saved, gap = narrowed
                weight = self.weight(saved)
                if weight <= budget:
                    return self._no_worse_than_greedy(saved, weight, gap, budget)
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
        gap = (optimum.bound - optimum.value) * scaled.value_unit
        return self._no_worse_than_greedy(saved, weight, gap, budget)

    def _varied(self) -> bool:
        """Return whether most items of a sample differ: classes would not help."""
        stride = len(self.memory) // _SAMPLE
        sample = list(zip(self.memory[::stride], self.runtime[::stride]))
        return 2 * len(set(sample)) > len(sample)

    def _no_worse_than_greedy(
        self, saved: list[int], weight: float, gap: Fraction, budget: float
    ) -> KnapsackSolution:
        """Return the given set, or the greedy one if that is worth more."""
        if gap:
            greedy = self._greedy(budget)
            lead = self._worth(greedy) - self._worth(saved)
            if lead > 0:
                saved, gap = greedy, gap - lead
                weight = self.weight(saved)
        return self._solution(saved, weight, gap, gap <= 0)

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
            zip(weights, values, pairs),
            key=lambda c: (-((c[1] << 64) // c[0]), c[0], c[2]),
        )
        return _Scaled(
            [_Class(weight, value, len(members[p])) for weight, value, p in order],
            [members[pair] for _, _, pair in order],
            [size for _, _, (size, _) in order],
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

    def _worth(self, saved: list[int]) -> Any:
        integers, unit = _exact_integers([self.runtime[i] for i in saved])
        return sum(integers) * unit

    def _solution(
        self, saved: list[int], weight: float, gap: Any, proven: bool
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


def _exact_integers(numbers: Sequence[float]) -> tuple[list[int], Any]:
    """Return integers without common factor and the exact unit they count.

    ``numbers[i] == integers[i] * unit`` holds exactly: every float is an integer
    times a power of two.  The unit is an int or a Fraction.
    """
    ratios = [
        (x, 1) if isinstance(x, int) else float(x).as_integer_ratio() for x in numbers
    ]
    denominator = max([d for _, d in ratios], default=1)
    integers = [n * (denominator // d) for n, d in ratios]
    factor = math.gcd(*integers) or 1
    unit = factor if denominator == 1 else Fraction(factor, denominator)
    return [n // factor for n in integers], unit


def _common_step(sizes: Sequence[float]) -> Optional[float]:
    """Return the step that all sizes are rounded multiples of, or None.

    The partitioner's sizes are ``bytes / 1e9 / range``: multiples of a common step
    up to two rounding errors.  Euclid's algorithm on floats recovers the step if it
    starts from the smallest size, whose absolute error is least.  Every size is then
    within ``_SIZE_TOLERANCE`` of a multiple, or there is no step.  None as well if
    all are exact multiples: then nothing is gained.
    """
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
    return step if any(math.fmod(size, step) for size in sizes) else None


def _capacity(budget: float, step: Any) -> int:
    """Return the greatest weight, in steps, whose size fits the budget.

    With an exact step, a weight fits if its size rounds to at most ``budget``, which
    is what ``math.fsum`` will say.  With a rounded one, a weight within rounding
    errors of the budget counts as fitting and is to be checked.
    """
    if isinstance(step, float):
        return int(budget / step * (1 + 8 * _SIZE_TOLERANCE))
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
    classes: list[_Class],
    capacity: int,
    break_class: int,
    multiplier: int = 0,
    items: int = 0,
    ties: Optional[list[int]] = None,
) -> _Relaxation:
    """Price memory by the efficiency of the break class [1].

    Every item costs ``multiplier`` more than its memory, and ``multiplier * items``
    is added back: a bound if no solution of interest holds more than ``items`` items
    (``multiplier > 0``), or less (``multiplier < 0``).  The base takes every class
    that is worth more than its price and none that is worth less.  Of a class ``c``
    at its price it takes ``ties[c]`` copies, by default none: that does not change the
    bound.  O(classes).
    """
    scale = classes[break_class].weight
    price = classes[break_class].value - multiplier
    base, losses = [], []
    room, value = capacity, 0
    bound = price * capacity + multiplier * items * scale
    for c, (weight, worth, taken) in enumerate(classes):
        gain = (worth - multiplier) * scale - price * weight
        losses.append(abs(gain))
        if gain > 0:
            bound += gain * taken
        else:
            taken = ties[c] if ties and not gain else 0
        base.append(taken)
        room -= taken * weight
        value += taken * worth
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


# A state is (weight, -value, loss, history) relative to the base; a history is None
# or (earlier history, move, times).
_State = tuple[Any, ...]
_WEIGHT_THEN_VALUE = itemgetter(0, 1)


class _Completion:
    """What the undecided moves can still do for a state, by the room it has left.

    ``adds`` and ``undos`` are the undecided moves that can be made and undone, in
    order of loss per weight.  The least loss of a completion is a convex, piecewise
    linear function of the room with value 0 at 0: room is filled by ``adds``,
    fractionally, and what no move fills costs ``slack_loss`` per unit; a negative room
    is made up by ``undos``, and where none are left costs ``forbidden`` per unit, which
    is more than the loss of any move.  ``corners`` are the rooms where its slope
    changes, ascending; with ``corner, height, run, rise = pieces[bisect_right(corners,
    room)]`` it is ``height + (room - corner) * rise / run``.
    """

    def __init__(
        self, adds: list[_Move], undos: list[_Move], slack_loss: int, forbidden: int
    ) -> None:
        self.adds, self.undos = adds, undos
        corners, pieces = [], []
        corner = height = 0
        for weight, _, loss, low, _, _ in undos:
            corner += low * weight
            height -= low * loss
            corners.append(corner)
            pieces.append((corner, height, weight, -loss))
        pieces.append((corner, height, 1, -forbidden))
        corners.reverse()
        pieces.reverse()
        corner = height = 0
        corners.append(0)
        for weight, _, loss, _, high, _ in adds:
            pieces.append((corner, height, weight, loss))
            corner += high * weight
            height += high * loss
            corners.append(corner)
        pieces.append((corner, height, 1, slack_loss))
        self.corners, self.pieces = corners, pieces

    def loss(self, room: int) -> int:
        """Return the least loss of completing a state, rounded down."""
        corner, height, run, rise = self.pieces[bisect_right(self.corners, room)]
        return height + (room - corner) * rise // run

    def greedy(self, state: _State, room: int) -> Optional[tuple[int, Any]]:
        """Complete a state by whole moves, in order; return value and history.

        None if all undos do not make it fit.  O(moves).
        """
        weight, value, _, history = state
        left = room - weight
        for move in self.undos:
            if left >= 0:
                break
            times = max(move.low, left // move.weight)
            left -= times * move.weight
            value -= times * move.value
            history = history, move, times
        if left < 0:
            return None
        for move in self.adds:
            if move.weight <= left:
                times = min(move.high, left // move.weight)
                left -= times * move.weight
                value -= times * move.value
                history = history, move, times
        return -value, history


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
    relaxation: _Relaxation,
    limit: int,
    beam: int,
    allowance: int,
    scout: bool = False,
) -> _Found:
    """Find the best combination of moves with a loss of at most ``limit``.

    No single move may cost more than ``limit``.  Moves are decided from the largest
    weight down into the list ``head``, and from the smallest up into the list
    ``tail``, whichever stays shorter.  Invariant: every combination of decided moves
    that extends to a solution within the limit is, or is dominated by, a head state
    plus a tail state, up to what exceeded ``beam`` and lowered ``complete``.  After
    every step some head states are completed greedily; a solution better than any
    before lowers the limit to what it takes to beat it, which rules out moves and
    states.  Once ``allowance`` states were created, the lists shrink and the search
    runs out; as a ``scout`` it gives up where ``head`` exceeds ``beam``.  Sizes in
    decreasing order matter: once the large moves are decided, the small ones have to
    meet the remaining room, which prunes sizes that differ by orders of magnitude to
    a handful of states.
    """
    room = relaxation.room
    moves = sorted(moves, key=lambda m: (m.weight, -m.value, m.changes))
    by_loss = sorted(moves, key=lambda m: (m.loss << 64) // m.weight)
    adds = [m for m in by_loss if m.high]
    undos = [m for m in by_loss if m.low]
    head: list[_State] = [(0, 0, 0, None)]
    tail: list[_State] = [(0, 0, 0, None)]
    value, states = 0, 0
    histories: tuple[Any, ...] = ()
    # Above the loss of every move, also after the limit was lowered: else the loss of
    # completions would not be convex.
    cut = forbidden = limit + 1
    while moves and head:
        if states > allowance:
            beam = min(beam, _SCOUT_BEAM)
        move = moves[0]
        if len(tail) * (move.high - move.low + 1) <= len(head):
            del moves[0]
            tail = _extend_tail(tail, move, limit)
            states += len(tail)
            if len(tail) > beam:
                tail, bound = _cut([(state[2], state) for state in tail], beam)
                cut = min(cut, bound)
            continue
        move = moves.pop()
        adds = [m for m in adds if m is not move]
        undos = [m for m in undos if m is not move]
        completion = _Completion(adds, undos, relaxation.slack_loss, forbidden)
        head, promising = _extend_head(head, move, room, limit, completion)
        states += len(head)
        for state in promising:
            greedy = completion.greedy(state, room)
            if greedy and (not histories or greedy[0] > value):
                value, histories = greedy[0], (greedy[1],)
                needed = relaxation.value + value + 1
                limit = min(limit, relaxation.bound - needed * relaxation.scale)
                moves, adds, undos = (
                    [m for m in undecided if m.loss <= limit]
                    for undecided in (moves, adds, undos)
                )
        if len(head) > beam:
            if scout:
                return _Found(value, histories, 0, states)
            loss = completion.loss
            ranked = [(state[2] + loss(room - state[0]), state) for state in head]
            head, bound = _cut(ranked, beam)
            cut = min(cut, bound)
    joined = _join(head, tail, room)
    if joined[1] and (not histories or joined[0] > value):
        value, histories = joined
    return _Found(value, histories, min(cut, limit + 1), states)


def _extend_head(
    head: list[_State], move: _Move, room: int, limit: int, completion: _Completion
) -> tuple[list[_State], list[_State]]:
    """Apply a move to head states as often as the limit allows.

    The admissible numbers of times form an interval, because the completion loss is
    convex.  Going outwards from zero, a state stops where it meets one of the same
    weight that is worth no less and needed no more copies: that one goes on in its
    place.  Also returns states worth completing: one of least bound, and a sample over
    all weights in case the bounds all but agree.
    """
    weight, value, loss, low, high, _ = move
    corners, pieces = completion.corners, completion.pieces
    nearest: list[_State] = []
    least = 1
    # The best so far by weight, and how often it made the move.  What cannot do
    # without the move is taken out in the end.
    best = {state[0]: state for state in head}
    made: dict[int, int] = {}
    inadmissible = []
    for state in head:
        state_weight, state_value, state_loss, history = state
        left = room - state_weight
        most, fewest = high, low
        corner, height, run, rise = pieces[bisect_right(corners, left)]
        excess = state_loss + height + (left - corner) * rise // run - limit
        if excess > 0:
            inadmissible.append(state)
            if left > 0:
                fewest = 0
            else:
                most = 0
        elif excess < least:
            nearest, least = [state], excess
        for sign, stop in ((1, most), (-1, -fewest)):
            times = 1
            while times <= stop:
                shift = sign * times
                new_weight = state_weight + shift * weight
                new_value = state_value - shift * value
                other = best.get(new_weight)
                if other is not None and other[1] <= new_value:
                    if made.get(new_weight, 0) <= times:
                        break
                    times += 1
                    continue
                new_loss = state_loss + times * loss
                left = room - new_weight
                corner, height, run, rise = pieces[bisect_right(corners, left)]
                excess = new_loss + height + (left - corner) * rise // run - limit
                if excess > 0:
                    # A Newton step: by convexity it passes over nothing admissible.
                    fall = sign * weight * rise - loss * run
                    if fall <= 0:
                        break
                    times += -(-excess * run // fall)
                    continue
                new = new_weight, new_value, new_loss, (history, move, shift)
                best[new_weight], made[new_weight] = new, times
                if excess < least:
                    nearest, least = [new], excess
                times += 1
    for state in inadmissible:
        if best[state[0]] is state:
            del best[state[0]]
    kept = _pareto(list(best.values()))
    return kept, nearest + kept[_SAMPLED // 2 :: _SAMPLED]


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


def _meet(moves: list[_Move], room: int, limit: int, allowance: int) -> _Found:
    """Find the best combination of moves with a loss of at most ``limit`` [5].

    Every other move goes into either of two lists of Pareto states, the costly ones
    first: few combinations hold many of them.  ``complete`` is 0 if that might take
    more than ``allowance`` states, and then none is found.
    """
    moves = sorted(moves, key=lambda m: -m.loss)
    lists = []
    states = 0
    # Moves without loss double a list each.
    if sum(not m.loss for m in moves) > 2 * allowance.bit_length():
        return _Found(0, (), 0, 0)
    for half in (moves[::2], moves[1::2]):
        reached: list[_State] = [(0, 0, 0, None)]
        for move in half:
            most = limit // move.loss if move.loss else move.high - move.low
            times = min(move.high, most) + min(-move.low, most)
            if states + len(reached) * times > allowance:
                return _Found(0, (), 0, states)
            states += len(reached) * times
            reached = _extend_tail(reached, move, limit)
        lists.append(reached)
    head, tail = lists
    return _Found(*_join(head, tail, room), limit + 1, states)


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
    relaxation = _relax(classes, capacity, break_class, ties=copies)
    # The greedy solution: fill what the break item leaves.
    for c in range(break_class, len(classes)):
        weight, _, number = classes[c]
        taken = min(number - copies[c], room // weight)
        copies[c] += taken
        room -= taken * weight
    value = sum(k * c.value for k, c in zip(copies, classes))
    optimum = _Optimum(copies, value, max(value, relaxation.bound // relaxation.scale))
    if outside_loss is not None:
        outside = math.floor(outside_loss * relaxation.scale)
        return _deepen(classes, relaxation, optimum, max_states, outside)[0]
    easy = min(max_states, _EASY_STATES)
    optimum, states = _solve_relaxation(classes, relaxation, optimum, easy)
    if optimum.value == optimum.bound or states >= max_states:
        return optimum
    deep = min(max_states - states, _DEEP_STATES)
    optimum, more = _deepen(classes, relaxation, optimum, deep)
    states += more
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
    if len(ties) < 2:
        return sorted(range(len(classes)), key=losses.__getitem__)
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
) -> tuple[_Optimum, int]:
    """Improve and prove the incumbent by passes over a growing core.

    The first pass scouts: it covers the whole gap, lowered by every solution found on
    the way, and gives up where its lists get long; most instances end with it.  Later
    passes consider every solution whose loss is below ``limit``; the one of least loss
    is optimal, so low limits find and prove it at little cost.  Invariant: no solution
    of loss below ``complete`` is better than the incumbent.  A pass that was complete
    raises the limit, one that had to cut something off (classes, copies, states)
    enlarges the core.  Returns the optimum and the states created.
    """
    base, scale = relaxation.base, relaxation.scale
    order = _core_order(classes, relaxation)
    copies, value, bound = optimum
    limit: Optional[int] = None
    complete = states = growth = 0
    while True:
        gap = relaxation.bound - (value + 1) * scale
        if gap < complete or states >= max_states:
            break
        pass_limit = gap if limit is None else min(gap, limit)
        pass_complete = pass_limit + 1
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
            weight, worth, number = classes[c]
            low, high = base[c], number - base[c]
            if loss:
                most = pass_limit // loss
                low, high = min(low, most), min(high, most)
            if max(low, high) > most_copies:
                low, high = min(low, most_copies), min(high, most_copies)
                pass_complete = min(pass_complete, loss * (most_copies + 1))
            moves.append(_Move(weight, worth, loss, -low, high, ((c, 1),)))
        found = _search(
            moves,
            relaxation,
            pass_limit,
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
            size >= len(order)
            and most_copies >= max(c.number for c in classes)
            and beam == _LAST_BEAM
        ):
            break
        else:
            growth += 1
    gap = relaxation.bound - (value + 1) * scale
    if gap < complete:
        bound = value
    else:
        bound = max(value, min(bound, (relaxation.bound - complete) // scale))
    return _Optimum(copies, value, bound), states


def _deepen(
    classes: list[_Class],
    relaxation: _Relaxation,
    optimum: _Optimum,
    max_states: int,
    outside: Optional[int] = None,
) -> tuple[_Optimum, int]:
    """Improve and prove the incumbent by enumerating deviations from the base.

    Each pass considers every solution whose loss is at most a limit: that of the
    24th, 30th, 37th, ... class in order of loss.  The one of least loss is optimal, so
    no good incumbent is needed.  Sets of deviations within the limit are as few as
    partitions of an integer into distinct parts: met in the middle, a limit that 36
    classes reach takes lists of some hundred states.  Invariant: no solution of loss
    below ``complete`` is better than the incumbent.  No loss of ``outside`` or more is
    considered; ``max_states`` ends the last pass.  Returns the optimum and the states
    created.
    """
    base, losses, scale = relaxation.base, relaxation.losses, relaxation.scale
    order = sorted(range(len(classes)), key=lambda c: (losses[c], c))
    copies, value, bound = optimum
    farthest = relaxation.bound if outside is None else outside - 1
    complete = states = 0
    size = _FIRST_DEPTH
    while True:
        gap = relaxation.bound - (value + 1) * scale
        limit = min(gap, farthest)
        if limit < complete:
            break
        if size < len(order):
            limit = min(limit, max(complete, losses[order[size]]))
        moves = []
        for c in order:
            if losses[c] > limit:
                break
            weight, worth, number = classes[c]
            low, high = -base[c], number - base[c]
            moves.append(_Move(weight, worth, losses[c], low, high, ((c, 1),)))
        found = _meet(moves, relaxation.room, limit, max_states - states)
        states += found.states
        if found.histories and relaxation.value + found.value > value:
            value = relaxation.value + found.value
            copies = _apply(base, found.histories)
        if not found.complete:
            break
        complete = found.complete
        size = int(size * _DEPTH_GROWTH)
    if relaxation.bound - (value + 1) * scale < complete:
        bound = value
    else:
        bound = max(value, min(bound, (relaxation.bound - complete) // scale))
    return _Optimum(copies, value, bound), states


def _exchange(
    classes: list[_Class], relaxation: _Relaxation, optimum: _Optimum, max_states: int
) -> tuple[_Optimum, int]:
    """Look for a solution that meets the bound among exchanges of a few classes.

    Where all efficiencies nearly tie, the optimum usually fills the capacity to the
    last unit, and astronomically many sets of items do: among all exchanges of 32
    classes, met in the middle, there is one.  The classes are taken from either side of
    the weight at which the base begins or ends, and for a room that the nearest of
    them do not span every second, fourth, ... of them.
    """
    base, losses = relaxation.base, relaxation.losses
    copies, value, bound = optimum
    gap = relaxation.bound - (value + 1) * relaxation.scale
    sign = 1 if relaxation.room > 0 else -1
    order = sorted(
        (c for c, loss in enumerate(losses) if loss <= gap >> 4),
        key=lambda c: (sign * classes[c].weight, c),
    )
    inside = [c for c in reversed(order) if base[c]]
    outside = [c for c in order if base[c] < classes[c].number]
    states = 0
    for size in _EXCHANGED:
        stride = 1
        while stride * size < 2 * len(order):
            gap = relaxation.bound - (value + 1) * relaxation.scale
            if value >= bound or gap < 0 or states >= max_states:
                return _Optimum(copies, value, max(value, bound)), states
            given, taken = inside[::stride], outside[::stride]
            given, taken = (
                given[: max(size // 2, size - len(taken))],
                taken[: max(size // 2, size - len(given))],
            )
            moves = [
                _Move(
                    weight=classes[c].weight,
                    value=classes[c].value,
                    loss=0,
                    low=-(c in given),
                    high=int(c in taken),
                    changes=((c, 1),),
                )
                for c in sorted({*given, *taken}, key=lambda c: (classes[c].weight, c))
            ]
            found = _meet(moves, relaxation.room, 0, max_states - states)
            states += found.states
            if found.histories and relaxation.value + found.value > value:
                value = relaxation.value + found.value
                copies = _apply(base, found.histories)
            stride *= 2
    return _Optimum(copies, value, max(value, bound)), states


# Many items


class _Vectors(NamedTuple):
    """Many items in tensors: those that can be taken, by index in ``usable``.

    ``base`` tells which precede the break item in order of efficiency, ``losses`` what
    deviating from it costs, off by less than ``margin``, and -1 for the break item
    itself.  ``weights`` are integers held exactly.
    """

    usable: torch.Tensor
    weights: torch.Tensor
    base: torch.Tensor
    losses: torch.Tensor
    capacity: int
    margin: float


def _solve_narrowed(
    items: _Items, budget: float, max_states: int
) -> Optional[tuple[list[int], Fraction]]:
    """Fix all but the items near the break item; return the set and its gap.

    For instances of many different items.  Vectorized arithmetic finds the break
    efficiency and the items whose loss is least [7]; only those are solved for.  None
    if the weights do not fit 53 bits in common steps, or if fixing that much left a
    gap and the items are of few enough kinds to solve for all.  With rounded steps the
    caller checks the weight.
    """
    vectors = _vectorize(items, budget)
    if vectors is None:
        return None
    for size in _NARROW_TO:
        solved = _solve_core(items, vectors, size, min(max_states, _EASY_STATES))
        if solved is not None and not solved[1]:
            return solved
    if len(set(zip(items.memory, items.runtime))) <= _MOST_KINDS:
        return None
    return _solve_core(items, vectors, _LAST_CORE, max_states, thorough=True)


def _vectorize(items: _Items, budget: float) -> Optional[_Vectors]:
    """Return the items as tensors, or None if there are few or it would round."""
    # Several times faster than torch.tensor on a list.
    sizes = torch.frombuffer(array("d", items.memory), dtype=torch.float64)
    values = torch.frombuffer(array("d", items.runtime), dtype=torch.float64)
    usable = ((sizes > 0) & (values > 0) & (sizes <= budget)).nonzero().squeeze(1)
    if len(usable) < _NARROW_FROM:
        return None
    if len(usable) < len(sizes):
        sizes, values = sizes[usable], values[usable]
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
    efficiencies = values / weights
    price = _break_efficiency(efficiencies, weights, capacity)
    losses = (values - price * weights).abs()
    base = efficiencies > price
    ties = (efficiencies == price).nonzero().squeeze(1)
    filled = weights[ties].cumsum(0) + (weights * base).sum()
    fitting = int(torch.searchsorted(filled, float(capacity), right=True))
    base[ties[:fitting]] = True
    losses[ties[fitting : fitting + 1]] = -1.0
    margin = values.max().item() * 2.0**-40
    return _Vectors(usable, weights, base, losses, capacity, margin)


def _solve_core(
    items: _Items,
    vectors: _Vectors,
    size: int,
    max_states: int,
    thorough: bool = False,
) -> Optional[tuple[list[int], Fraction]]:
    """Fix all but the ``size`` items of least loss; return the set and its gap.

    No solution that changes a fixed item is better than Dantzig's bound minus the
    least loss among those.  Where that proves the set optimal, floats have only
    selected.  A ``thorough`` call leaves the best set of the core otherwise, and a gap
    that allows for rounding in all losses.  None if the core tells nothing.
    """
    usable, weights, base, losses, capacity, margin = vectors
    nearest = losses.topk(size + 1, largest=False)
    outside_loss = max(0.0, nearest.values[-1].item() - margin)
    if not outside_loss and not thorough:
        return None
    near = nearest.indices[:-1].sort().values
    fixed = base.clone()
    fixed[near] = False
    room = capacity - int((weights * fixed).sum().item())
    members: dict[tuple[int, float], list[int]] = defaultdict(list)
    for weight, i in zip(weights[near].tolist(), usable[near].tolist()):
        members[int(weight), items.runtime[i]].append(i)
    values, unit = _exact_integers([runtime for _, runtime in members])
    # In order of efficiency, as everywhere: see ``_build_scaled``.
    kinds = sorted(
        (-((value << 64) // weight), weight, value, found)
        for ((weight, _), found), value in zip(members.items(), values)
    )
    classes = [_Class(weight, value, len(found)) for _, weight, value, found in kinds]
    if room < max(c.weight for c in classes):
        return None
    optimum = _solve_classes(classes, room, max_states, Fraction(outside_loss) / unit)
    if thorough and optimum.value < optimum.bound:
        bound = optimum.bound + math.ceil(Fraction(margin) * len(usable) / unit)
        optimum = _solve_classes(classes, room, max_states)._replace(bound=bound)
    saved = items.free + usable[fixed.nonzero().squeeze(1)].tolist()
    for copies, (_, _, _, found) in zip(optimum.copies, kinds):
        saved += found[:copies]
    return saved, (optimum.bound - optimum.value) * unit


def _break_efficiency(
    efficiencies: torch.Tensor, weights: torch.Tensor, capacity: int
) -> float:
    """Return the efficiency of the break item of more items than fit; O(items).

    A sorted sample tells about where it is, and only what is near is sorted.
    """
    room = float(capacity)
    stride = len(weights) // 1024 + 1
    sample, order = efficiencies[::stride].sort(descending=True)
    filled = weights[::stride][order].cumsum(0) * stride
    rank = int(torch.searchsorted(filled, room))
    high = sample[max(0, rank - 64)]
    low = sample[min(len(sample) - 1, rank + 64)]
    above = efficiencies > high
    near = (efficiencies >= low) & ~above
    left = room - (weights * above).sum().item()
    if 0 <= left < (weights * near).sum().item():
        near = near.nonzero().squeeze(1)
        efficiencies, weights, room = efficiencies[near], weights[near], left
    efficiencies, order = efficiencies.sort(descending=True)
    rank = int(torch.searchsorted(weights[order].cumsum(0), room, right=True))
    # The last one where everything fits.
    return efficiencies[min(rank, len(efficiencies) - 1)].item()
