"""What upstream's budgets reach at best: each of them is measured, each plan told once.

steps = measured(lambda budget: {"peak": peak(budget), "flops": flops(budget)}, BUDGETS)
told(lowest(steps)["budgets"])      # "0.125 to 0.156"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from benchmarks.pages import Row


BUDGETS = tuple(n / 32 for n in range(32, -1, -1))
# Gradients of the same operators differ by less.
SAME = 1e-5
HOW = (
    "Upstream's lowest: over budgets from 0 to 1 in steps of 1/32 or finer, without plans "
    "that give wrong gradients."
)


def measured(measure: Callable[[float], Row], budgets: Sequence[float]) -> list[Row]:
    """What is found by the first of neighbouring ``budgets`` of one peak and flops."""

    def plan(found: tuple[float, Row]) -> tuple[Any, ...]:
        step = found[1]
        return step["peak"], step.get("flops"), len(right([step]))

    steps = []
    for _, group in groupby(((b, measure(b)) for b in budgets), plan):
        same = list(group)
        steps.append({"budgets": [budget for budget, _ in same], **same[0][1]})
    return steps


def right(steps: Sequence[Row]) -> list[Row]:
    """Those without wrong gradients: a dropout's mask drawn again costs nothing."""
    return [step for step in steps if step.get("off_budget_1", 0) <= SAME]


def lowest(steps: Sequence[Row]) -> Row:
    """The right one of the lowest peak."""
    return min(right(steps), key=lambda step: step["peak"])


def told(budgets: Sequence[float]) -> str:
    """The budgets of one plan, as text."""
    least, most = min(budgets), max(budgets)
    return f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
