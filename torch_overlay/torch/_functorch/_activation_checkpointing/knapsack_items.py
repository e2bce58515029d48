"""What the knapsack solvers of the activation memory budget share.

An *item* has a size (the memory it occupies when saved) and a runtime (what
recomputing it would cost).  This module checks items, adds their sizes exactly,
orders them, fills a capacity greedily, and bounds what any set can save.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from typing import Any, NamedTuple, Optional, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


# Relative error of a size computed from a byte count: two divisions.  The slack
# on top covers the rounding of the step itself.
_SIZE_TOLERANCE = 2.0**-50
_LARGEST_STEP_COUNT = 2.0**45


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
        # Two passes at C speed: a NaN or an infinity does not leave the sum finite.
        if min(values, default=0) >= 0 and sum(values) <= largest:
            continue
        for index, value in enumerate(values):
            if not 0 <= value <= largest:
                raise ValueError(
                    f"{name}[{index}] is {value}: it must be finite and not negative"
                )
        raise ValueError(f"the sum of {name} exceeds the largest float, {largest}")


def exact_integers(numbers: Sequence[float]) -> tuple[list[int], Any]:
    """Integers without common factor and the unit they count, without rounding.

    ``numbers[i] == integers[i] * unit`` holds exactly, with an int or a Fraction:
    every float is an integer over a power of two.
    """
    integers = list(map(int, numbers))
    denominator = 1
    if integers != list(numbers):
        ratios = [number.as_integer_ratio() for number in numbers]
        denominator = max(d for _, d in ratios)
        integers = [n * (denominator // d) for n, d in ratios]
    factor = math.gcd(*integers) or 1
    unit = factor if denominator == 1 else Fraction(factor, denominator)
    return [n // factor for n in integers], unit


def integer_scales(sizes: list[float]) -> list[tuple[list[int], Any]]:
    """Weights and the size of their step: on a common step, if there is one, and exact.

    A common step is a float, of which the sizes are rounded multiples; an exact one
    is an int or a Fraction.
    """
    weights, unit = exact_integers(sizes)
    scales: list[tuple[list[int], Any]] = [(weights, unit)]
    if max(weights) > _LARGEST_STEP_COUNT:
        step = _common_step(sizes)
        if step is not None:
            scales.insert(0, ([round(size / step) for size in sizes], step))
    return scales


def _common_step(sizes: Sequence[float]) -> Optional[float]:
    """Return the step that all sizes are rounded multiples of, or None.

    The partitioner's sizes are ``bytes / 1e9 / range``: multiples of a common step
    up to two rounding errors.  Euclid's algorithm on floats recovers the step if it
    starts from the smallest size, whose absolute error is least.  Every size is then
    within ``_SIZE_TOLERANCE`` of a multiple, or there is no step.
    """
    step = smallest = float(min(sizes))
    largest = float(max(sizes))
    for size in sorted(set(sizes)):
        a, b = step, math.fmod(float(size), step)
        # Remainders amplify errors, so tell a true one from noise with room to spare.
        noise = size * 64 * _SIZE_TOLERANCE
        if noise < b < a - noise:
            while noise < b < a - noise:
                a, b = b, math.fmod(a, b)
            # The remainder carries the error of ``size``; the smallest does not.
            step = smallest / round(smallest / a)
        if step * _LARGEST_STEP_COUNT < largest:
            return None
    step = largest / round(largest / step)
    for size in sizes:
        if abs(size - round(size / step) * step) > size * _SIZE_TOLERANCE:
            return None
    return step


def integer_capacity(max_memory: float, step: Any) -> int:
    """The greatest weight, in steps, whose size fits ``max_memory``.

    With an exact step, that is what ``math.fsum`` will say: the size rounds to at
    most ``max_memory``, so it is below the middle between that and the next float,
    or on it if ``max_memory`` is the even one of the two.  With a rounded step (a
    float), a weight within rounding errors counts as fitting and is to be checked.
    """
    if max_memory == math.inf:
        return sys.maxsize
    if isinstance(step, float):
        return int(max_memory / step * (1 + 8 * _SIZE_TOLERANCE))
    after = math.nextafter(max_memory, math.inf)
    limit = (Fraction(max_memory) + Fraction(after)) / 2 / step
    is_odd = math.ldexp(math.frexp(max_memory)[0], 53) % 2
    capacity: int = math.ceil(limit) - 1 if is_odd else math.floor(limit)
    return capacity


def by_density(memory: Sequence[float], runtimes: Sequence[float]) -> list[int]:
    """Items with runtime by falling runtime per size, ties by index."""
    density = [
        runtime / size if size else math.inf for size, runtime in zip(memory, runtimes)
    ]
    order = [index for index, runtime in enumerate(runtimes) if runtime > 0]
    return sorted(order, key=density.__getitem__, reverse=True)


def fill(order: Iterable[int], memory: Sequence[float], max_memory: float) -> list[int]:
    """Take each item of ``order`` that fits beside those taken before it.

    Invariant: ``math.fsum`` of the sizes taken is at most ``max_memory``.  A
    running float sum would drift from that, so the sum is kept in exact integers.
    """
    sizes, unit = exact_integers(memory)
    room = integer_capacity(max_memory, unit)
    taken = []
    for index in order:
        if sizes[index] <= room:
            room -= sizes[index]
            taken.append(index)
    return taken


def dantzig_bound(
    memory: Sequence[float], runtimes: Sequence[float], max_memory: float
) -> float:
    """What no set within a finite ``max_memory`` can save more than, rounded up.

    Items by falling density, the one that no longer fits in part.  ``O(n log n)``
    time; Dantzig, "Discrete-Variable Extremum Problems", 1957.
    """
    room, price = max_memory, 0.0
    for index in by_density(memory, runtimes):
        room -= memory[index]
        if room < 0:
            price = runtimes[index] / memory[index]
            break
    # Any price of memory gives a bound; the factor covers all rounding.
    gains = (runtime - price * size for size, runtime in zip(memory, runtimes))
    bound = math.fsum(gain for gain in gains if gain > 0)
    return (bound + price * max_memory) * (1 + 2.0**-40)


class Classes(NamedTuple):
    """Identical items per class, in integers and in order of falling density."""

    weights: list[int]  # of one item
    values: list[int]  # of one item
    numbers: list[int]  # of items


class Relaxation(NamedTuple):
    """Dantzig's bound, and what it costs to deviate from the set that attains it.

    Amounts of value are multiplied by ``scale``, the weight of the *break* class,
    the first in order of density that does not fit.  With its density as the price
    of memory, no set within the capacity is worth more than ``bound``, less
    ``losses[c]`` for every copy of class ``c`` that it has more or less than
    ``base``, less ``price`` for every unit of capacity that it leaves.
    """

    classes: Classes
    greedy: list[int]  # copies that the greedy set takes
    base: list[int]
    losses: list[int]
    room: int  # capacity that ``base`` leaves
    price: int
    scale: int
    bound: int
    gap: int  # between ``bound`` and the greedy set


def relax(classes: Classes, capacity: int) -> Relaxation:
    """Relax a knapsack of classes, none with more items than fit by themselves.

    The bound holds in any order; it is Dantzig's in that of falling density.

    ``O(classes)``.  Dantzig, "Discrete-Variable Extremum Problems", 1957; Martello
    and Toth, "Knapsack Problems", 1990, section 2.2.
    """
    greedy = []
    price, scale = 0, 1
    break_class = None
    left = capacity
    for c, (weight, number) in enumerate(zip(classes.weights, classes.numbers)):
        taken = min(number, left // weight)
        greedy.append(taken)
        left -= taken * weight
        if taken < number and break_class is None:
            break_class = c
            price, scale = classes.values[c], weight
    base, losses = [], []
    bound, room = price * capacity, capacity
    gap = price * left
    for weight, value, number, taken in zip(*classes, greedy):
        gain = value * scale - price * weight
        # At the price itself all numbers of copies are as good.
        copies = number if gain > 0 else 0 if gain else taken
        base.append(copies)
        losses.append(abs(gain))
        bound += copies * gain
        room -= copies * weight
        gap += (copies - taken) * gain
    return Relaxation(classes, greedy, base, losses, room, price, scale, bound, gap)
