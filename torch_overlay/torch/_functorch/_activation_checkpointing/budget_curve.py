"""Plots what all activation memory budgets of a joint graph lead to.

For ``config.visualize_memory_budget_pareto``.
"""

from __future__ import annotations

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

__all__ = ["CurvePoint", "curve", "plot_budgets"]

# Steps between the budgets of a curve.  Each may take a min cut, 0.7 s on a graph of
# 5,000 nodes.
_STEPS = 32


class CurvePoint(NamedTuple):
    """A plan, and the smallest of the tried budgets that leads to it.

    ``saved_bytes`` are of activations, and ``recomputed_runtime`` is that of items, in
    the estimator's unit.
    """

    budget: float
    saved_bytes: int
    recomputed_runtime: float


def plot_budgets(asked: Decision, plan_at: Callable[[float], Decision]) -> None:
    """Plot the curve that the plan asked for is on, as an SVG in a file.

    ``plan_at`` has the plan of any budget.  The file lies in
    ``config.memory_budget_pareto_dir`` or the working directory; a warning names it, or
    says that matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        log.warning(
            "No memory budgets are plotted, as matplotlib is missing (%s)", error
        )
        return
    points = curve(asked, plan_at)
    budgets = [p.budget for p in points]
    taken = [p for p in points if p.budget <= asked.budget][-1]
    solved: Any = asked.knapsack
    graph = get_aot_graph_name()
    unit = RUNTIME_UNITS.get(str(config.activation_memory_budget_runtime_estimator))
    # No pyplot: it would keep the figure, and might open a window.
    figure = Figure(figsize=(9, 7), layout="constrained")
    figure.suptitle(
        f"Memory budget of {graph}, {len(solved.memory)} items, {solved.solver}"
    )
    above, below = figure.subplots(2, 1, sharex=True)
    above.set_ylabel(f"recomputed in the backward [{unit or 'by the estimator'}]")
    below.set_ylabel("activations kept for the backward [B]")
    below.set_xlabel("memory budget (0: inputs only, 1: fastest plan)")
    for axes, name in ((above, "recomputed_runtime"), (below, "saved_bytes")):
        axes.step(budgets, [getattr(p, name) for p in points], where="post", marker=".")
        label = f"asked: {asked.budget:g}"
        axes.plot(asked.budget, getattr(taken, name), "o", label=label)
        axes.yaxis.set_major_formatter(EngFormatter(places=1))
        axes.grid(alpha=0.3)
        axes.legend()
    folder = config.memory_budget_pareto_dir or os.getcwd()
    os.makedirs(folder, exist_ok=True)
    rank = ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = f"_rank_{torch.distributed.get_rank()}"
    place = os.path.join(folder, f"memory_budget_pareto{rank}_{graph}.svg")
    figure.savefig(place)
    log.warning("Plotted the memory budgets in %s", place)


def curve(asked: Decision, plan_at: Callable[[float], Decision]) -> list[CurvePoint]:
    """The plans of budgets from 0 to 1, and of the one asked, by rising budget."""
    solved: Any = asked.knapsack
    every = range(len(solved.memory))
    points: list[CurvePoint] = []
    for budget in sorted({asked.budget, *(k / _STEPS for k in range(_STEPS + 1))}):
        plan = plan_at(budget)
        # A cut that fits recomputes no item, and budget 0 saves none.
        saved = plan.knapsack.saved if plan.knapsack else every if budget else ()
        runtime = math.fsum(solved.runtimes[i] for i in {*every} - {*saved})
        point = CurvePoint(budget, plan.activation_bytes, runtime)
        if not points or point[1:] != points[-1][1:]:
            points.append(point)
    return points
