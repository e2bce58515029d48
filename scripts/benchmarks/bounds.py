"""What has to hold of plans that are bound by a budget: the marks they have in common.

A step is a row with a ``peak``, what was ``allowed`` and ``predicted`` where there is a
bound, a ``cost`` in flops, and what it was asked for: a ``budget`` or a ``share``, or,
of upstream's plans, several ``budgets``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks import sweep
from benchmarks.pages import at_most, Mark, Row, share_within


Steps = Mapping[str, Sequence[Row]]  # by net
RISES = 1.0005


def asked(step: Row) -> list[float]:
    found: list[float] = step.get("budgets") or [step.get("budget", step.get("share"))]
    return found


def told(net: str, step: Row) -> str:
    return f"{net} at {sweep.told(asked(step))}"


def every(steps: Steps) -> list[tuple[str, Row]]:
    """All of them, each with its name."""
    return [(told(net, step), step) for net, found in steps.items() for step in found]


def bounds(plans: Sequence[tuple[str, Row]], by: str, exact: bool) -> Iterator[Mark]:
    """Peaks against what was allowed and predicted; ``exact`` ones are within 1 %."""
    yield from at_most(
        f"peak / allowed, {by}, {len(plans)} plans",
        ((step["peak"] / step["allowed"], at) for at, step in plans),
        1.005,
        enforced=exact,
    )
    near = "predicted / measured peak"
    apart = ((abs(s["predicted"] / s["peak"] - 1), at) for at, s in plans)
    if exact:
        show = "off by {:.3%} at most ({})"
        yield from at_most(f"{near}, {by}", apart, 0.01, "1 %", show)
    else:
        show = "within 5 % in {} of {}; worst: {:.1%} ({})"
        yield from share_within(f"{near}, {by}", apart, 0.05, 0.9, show)


def rising(steps: Steps, what: str, enforced: bool = False) -> Iterator[Mark]:
    """Each peak against that of the next larger budget."""
    pairs = [
        (low["peak"] / high["peak"], told(net, low))
        for net, found in steps.items()
        for high, low in neighbours(found)
    ]
    yield from at_most(what, pairs, RISES, "at most 1", enforced=enforced)


def neighbours(steps: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    ordered = sorted(steps, key=lambda step: -max(asked(step)))
    yield from zip(ordered, ordered[1:])


def at_no_more_cost(plans: Iterable[tuple[float, float]], cost: float) -> float:
    """The lowest peak of (peak, cost) that cost no more; infinite where there is none."""
    # Reductions count one flop each in a plan's cost.
    return min((p for p, c in plans if c <= cost * (1 + 1e-5) + 1e-5), default=1e300)
