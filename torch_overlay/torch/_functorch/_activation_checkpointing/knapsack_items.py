"""What the knapsack solvers of the activation memory budget share.

An *item* has a size, the memory that it takes when it is saved, and a runtime, what it
costs to recompute.  Sizes and the *capacity* share a unit: bytes, as ints, or shares of
some number of bytes, as floats.  No solver rounds an int.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from operator import mul
from typing import Any, NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def check_budget(max_memory: float) -> float:
    """The capacity as every solver takes it, a negative one as zero.

    Raises ValueError if it is NaN.
    """
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
    """The sum of some values: an int if they are ints, else correctly rounded."""
    chosen = [values[index] for index in indices]
    found = sum(chosen)
    return found if isinstance(found, int) else math.fsum(chosen)


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


def integer_capacity(max_memory: float, unit: Any) -> int:
    """How many units fit a finite ``max_memory``.

    A sum of floats fits if ``math.fsum`` says so, which rounds to the nearest float.
    """
    if isinstance(unit, int):
        return int(max_memory) // unit
    half_an_ulp = Fraction(math.ulp(max_memory)) / 2
    capacity: int = math.floor((Fraction(max_memory) + half_an_ulp) / unit)
    # Halfway between two floats, the sum rounds to the even one.
    return capacity if float(capacity * unit) <= max_memory else capacity - 1


def by_density(memory: Sequence[float], runtimes: Sequence[float]) -> list[int]:
    """Items with runtime by falling runtime per size, ties by index."""
    density = [
        runtime / size if size else math.inf for size, runtime in zip(memory, runtimes)
    ]
    order = [index for index, runtime in enumerate(runtimes) if runtime > 0]
    return sorted(order, key=density.__getitem__, reverse=True)


def fill(order: Iterable[int], memory: Sequence[float], max_memory: float) -> list[int]:
    """Take each item of ``order`` that fits beside those taken before it."""
    if max_memory == math.inf:
        return list(order)
    # A sum of floats would drift.
    sizes, unit = exact_integers(memory)
    room = integer_capacity(max_memory, unit)
    taken = []
    for index in order:
        if sizes[index] <= room:
            room -= sizes[index]
            taken.append(index)
    return taken


class Relaxation(NamedTuple):
    """Dantzig's bound, and what it costs to deviate from the set that attains it.

    Amounts of value are multiplied by ``scale``, the weight of the *break* class,
    the first in order of density that does not fit.  With its density as the price
    of memory, no set within the capacity is worth more than ``bound``, less
    ``losses[c]`` for every copy of class ``c`` that it has more or less than
    ``base``, less ``price`` for every unit of capacity that it leaves.
    """

    greedy: list[int]  # copies that the greedy set takes
    base: list[int]
    losses: list[int]
    room: int  # capacity that ``base`` leaves
    price: int
    scale: int
    bound: int
    gap: int  # between ``bound`` and the greedy set


def relax(
    weights: Sequence[int],
    values: Sequence[int],
    numbers: Sequence[int],
    capacity: int,
) -> Relaxation:
    """Relax a knapsack of classes: ``numbers[c]`` items of one weight and value.

    By falling density, and none with more items than fit by themselves.  ``O(classes)``.
    Dantzig, "Discrete-Variable Extremum Problems", 1957; Martello and Toth, "Knapsack
    Problems", 1990, section 2.2.
    """
    greedy = []
    price, scale = 0, 1
    left = capacity
    for weight, value, number in zip(weights, values, numbers):
        greedy.append(min(number, left // weight))
        left -= greedy[-1] * weight
        if greedy[-1] < number and not price:
            price, scale = value, weight
    gains = [value * scale - price * weight for value, weight in zip(values, weights)]
    # At the price itself all numbers of copies are as good.
    base = [
        number if gain > 0 else 0 if gain else taken
        for gain, number, taken in zip(gains, numbers, greedy)
    ]
    bound = price * capacity + sum(map(mul, gains, base))
    return Relaxation(
        greedy=greedy,
        base=base,
        losses=list(map(abs, gains)),
        room=capacity - sum(map(mul, weights, base)),
        price=price,
        scale=scale,
        bound=bound,
        gap=bound - scale * sum(map(mul, values, greedy)),
    )
