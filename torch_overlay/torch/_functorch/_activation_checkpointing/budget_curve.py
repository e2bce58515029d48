"""Plots what all activation memory budgets of a joint graph lead to.

For ``config.visualize_memory_budget_pareto``.
"""

from __future__ import annotations

import json
import logging
import math
import os
from typing import Callable, NamedTuple, TYPE_CHECKING

import torch
import torch.distributed
from torch._functorch import config
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

from .budget_solver import solve_budgets
from .rerun_cost import RUNTIME_UNITS


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .budget_solver import Items, Knapsack


log = logging.getLogger(__name__)

__all__ = ["CurvePoint", "budget_curve", "write_budget_curve"]

# Steps between the budgets of a curve.  Each may take a min cut, 0.7 s on a graph of
# 5,000 nodes.
_CURVE_STEPS = 32


class CurvePoint(NamedTuple):
    """A plan, and the smallest of the tried budgets that leads to it.

    ``saved_bytes`` are of activations, and ``ratio`` is the same in the unit of the
    budget.  ``recomputed_runtime`` is that of items, in the estimator's unit.
    """

    budget: float
    saved_bytes: int
    ratio: float
    recomputed_runtime: float
    saved_items: int


def budget_curve(
    items: Items,
    budget: float,
    settle: Callable[[float, list[int]], tuple[int, list[int]]],
    cheap: Sequence[int],
) -> list[CurvePoint]:
    """The plans that the budgets from 0 to 1, and the one asked, lead to.

    As in the partitioner, a cut that fits comes before the knapsack.  The points are by
    rising budget, each with another set of saved items or another cut.

    ``settle`` tells of a budget and a solver's answer what bytes and what items are
    kept in the end, and ``cheap`` is what the cuts keep that the partitioner tries
    first, in order.
    """
    limits = items.limits

    def point(budget: float, nbytes: int, saved: Sequence[int]) -> CurvePoint:
        again = {*range(len(items.memory))} - {*saved}
        runtime = math.fsum(items.runtimes[i] for i in again)
        return CurvePoint(budget, nbytes, limits.budget(nbytes), runtime, len(saved))

    every = range(len(items.memory))
    steps = (step / _CURVE_STEPS for step in range(1, _CURVE_STEPS))
    budgets = sorted({budget, *steps})
    tried = [b for b in budgets if limits.allowed(b) < min(cheap)]
    points = [point(0.0, limits.low, [])]
    for b, saved in zip(tried, solve_budgets(items, list(map(limits.capacity, tried)))):
        points.append(point(b, *settle(b, saved)))
    for b in budgets[len(tried) :]:
        fits = next(size for size in cheap if size <= limits.allowed(b))
        points.append(point(b, fits, every))
    points.append(point(1.0, limits.high, every))
    return [p for i, p in enumerate(points) if i == 0 or p[1:] != points[i - 1][1:]]


def write_budget_curve(posed: Knapsack, points: list[CurvePoint]) -> None:
    """Write a curve as a plot (SVG), and its points beside it (JSON).

    They lie in ``config.memory_budget_pareto_dir`` or the working directory; a warning
    names them.  Without matplotlib only the points are written, and the warning says so.
    """
    estimator = config.activation_memory_budget_runtime_estimator
    graph = get_aot_graph_name()
    folder = config.memory_budget_pareto_dir or os.getcwd()
    os.makedirs(folder, exist_ok=True)
    rank = ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = f"_rank_{torch.distributed.get_rank()}"
    stem = os.path.join(folder, f"memory_budget_pareto{rank}_{graph}")
    curve = {
        "graph": graph,
        "budget_asked": posed.budget,
        "solver": posed.solver,
        "items": len(posed.memory),
        "runtime_unit": RUNTIME_UNITS.get(str(estimator), "the estimator's unit"),
        "points": [p._asdict() for p in points],
    }
    with open(f"{stem}.json", "w") as file:
        json.dump(curve, file, indent=1)
        file.write("\n")
    try:
        _draw(points, posed.budget, curve, f"{stem}.svg")
        plot = f"{stem}.svg"
    except ImportError as error:
        plot = f"no plot, as matplotlib is missing ({error})"
    log.warning("Wrote the memory budget curve to %s.json; %s", stem, plot)


def _draw(
    points: list[CurvePoint], asked: float, curve: dict[str, object], place: str
) -> None:
    """Draw the curve; ImportError where there is no matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    budgets = [p.budget for p in points]
    taken = [p for p in points if p.budget <= asked][-1]
    # No pyplot: it would keep the figure, and might open a window.
    figure = Figure(figsize=(9, 7), layout="constrained")
    figure.suptitle("Memory budget of {graph}, {items} items, {solver}".format(**curve))
    above, below = figure.subplots(2, 1, sharex=True)
    above.set_ylabel(f"recomputed in the backward [{curve['runtime_unit']}]")
    below.set_ylabel("activations kept for the backward [B]")
    below.set_xlabel("memory budget (0: inputs only, 1: fastest plan)")
    allowed = [points[0].saved_bytes, points[-1].saved_bytes]
    below.plot([0, 1], allowed, ":", label="allowed")
    for axes, name in ((above, "recomputed_runtime"), (below, "saved_bytes")):
        axes.step(budgets, [getattr(p, name) for p in points], where="post", marker=".")
        axes.plot(asked, getattr(taken, name), "o", label=f"asked: {asked:g}")
        axes.yaxis.set_major_formatter(EngFormatter(places=1))
        axes.grid(alpha=0.3)
        axes.legend()
    # The same curve gives the same file, byte for byte.
    with matplotlib.rc_context({"svg.hashsalt": "memory budget"}):
        figure.savefig(place, metadata={"Date": None})
