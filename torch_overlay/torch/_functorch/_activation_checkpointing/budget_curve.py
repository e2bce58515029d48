"""Plots what all activation memory budgets of a joint graph lead to.

For ``config.visualize_memory_budget_pareto``.
"""

from __future__ import annotations

import json
import logging
import math
import os
from typing import Any, Callable, NamedTuple, TYPE_CHECKING

import torch
import torch.distributed
from torch._functorch import config
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

from .rerun_cost import RUNTIME_UNITS


if TYPE_CHECKING:
    from .decision import Decision


log = logging.getLogger(__name__)

__all__ = ["CurvePoint", "write_budget_curve"]

# Steps between the budgets of a curve.  Each may take a min cut, 0.7 s on a graph of
# 5,000 nodes.
_STEPS = 32


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


def write_budget_curve(asked: Decision, plan_at: Callable[[float], Decision]) -> None:
    """Write the curve that the plan asked for is on: a plot (SVG), and its points (JSON).

    ``plan_at`` has the plan of any budget.  The files lie in
    ``config.memory_budget_pareto_dir`` or the working directory; a warning names them.
    Without matplotlib only the points are written, and the warning says so.
    """
    estimator = config.activation_memory_budget_runtime_estimator
    graph = get_aot_graph_name()
    folder = config.memory_budget_pareto_dir or os.getcwd()
    os.makedirs(folder, exist_ok=True)
    rank = ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = f"_rank_{torch.distributed.get_rank()}"
    stem = os.path.join(folder, f"memory_budget_pareto{rank}_{graph}")
    solved: Any = asked.knapsack
    points = _points(asked, plan_at)
    curve = {
        "graph": graph,
        "budget_asked": asked.budget,
        "solver": solved.solver,
        "items": len(solved.memory),
        "runtime_unit": RUNTIME_UNITS.get(str(estimator), "the estimator's unit"),
        "points": [p._asdict() for p in points],
    }
    with open(f"{stem}.json", "w") as file:
        json.dump(curve, file, indent=1)
        file.write("\n")
    try:
        _draw(points, asked.budget, curve, f"{stem}.svg")
        plot = f"{stem}.svg"
    except ImportError as error:
        plot = f"no plot, as matplotlib is missing ({error})"
    log.warning("Wrote the memory budget curve to %s.json; %s", stem, plot)


def _points(asked: Decision, plan_at: Callable[[float], Decision]) -> list[CurvePoint]:
    """The plans of budgets from 0 to 1, and of the one asked, by rising budget.

    Each has another set of saved items, or another cut.
    """
    limits: Any = asked.limits
    solved: Any = asked.knapsack
    every = range(len(solved.memory))
    points: list[CurvePoint] = []
    for budget in sorted({asked.budget, *(k / _STEPS for k in range(_STEPS + 1))}):
        plan = plan_at(budget)
        # A cut that fits recomputes no item, and budget 0 saves none.
        saved = plan.knapsack.saved if plan.knapsack else every if budget else ()
        again = {*every} - {*saved}
        kept = plan.activation_bytes
        runtime = math.fsum(solved.runtimes[i] for i in again)
        point = CurvePoint(budget, kept, limits.budget(kept), runtime, len(saved))
        if not points or point[1:] != points[-1][1:]:
            points.append(point)
    return points


def _draw(
    points: list[CurvePoint], asked: float, curve: dict[str, Any], place: str
) -> None:
    """Draw the curve; ImportError where there is no matplotlib."""
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
    for axes, name in ((above, "recomputed_runtime"), (below, "saved_bytes")):
        axes.step(budgets, [getattr(p, name) for p in points], where="post", marker=".")
        axes.plot(asked, getattr(taken, name), "o", label=f"asked: {asked:g}")
        axes.yaxis.set_major_formatter(EngFormatter(places=1))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(place)
