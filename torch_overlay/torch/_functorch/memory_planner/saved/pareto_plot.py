"""Plots what a joint graph recomputes under each activation memory budget.

For ``config.visualize_memory_budget_pareto``.
"""

from __future__ import annotations

import logging
import math
import os
from typing import Any, Callable, TYPE_CHECKING

import torch
import torch.distributed
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name


if TYPE_CHECKING:
    from ..ask import Ask
    from ..decision import Decision


log = logging.getLogger(__name__)

# The steps from budget 0 to 1.  Each may take a min cut: 0.7 s for 5,000 nodes.
_STEPS = 32


def plot_budgets(
    ask: Ask, asked: Decision, plan_at: Callable[[float], Decision]
) -> None:
    """Plot the recomputed runtime against the budget, into an SVG file.

    ``asked`` is the decision made by a knapsack, and ``plan_at`` returns the plan of a
    budget.  The file is written to the plot folder, or to the working directory if none
    is set.  A warning names it, or says that matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        log.warning(
            "No memory budgets are plotted, as matplotlib is missing (%s)", error
        )
        return
    solved: Any = asked.knapsack
    graph = get_aot_graph_name()
    # No pyplot: it would keep the figure, and might open a window.
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.step(*zip(*pareto_points(asked, plan_at)), where="post", marker=".")
    axes.axvline(asked.budget, linestyle="--", label=f"asked: {asked.budget:g}")
    axes.set_title(f"{graph}, {len(solved.memory)} items, {solved.solver}")
    axes.set_xlabel("memory budget (0: inputs only, 1: fastest plan)")
    unit = ask.runtime_unit or "by the estimator"
    axes.set_ylabel(f"recomputed in the backward [{unit}]")
    axes.legend()
    folder = ask.plot_folder or os.getcwd()
    os.makedirs(folder, exist_ok=True)
    rank = ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = f"_rank_{torch.distributed.get_rank()}"
    place = os.path.join(folder, f"memory_budget_pareto{rank}_{graph}.svg")
    figure.savefig(place)
    log.warning("Plotted the memory budgets in %s", place)


def pareto_points(
    asked: Decision, plan_at: Callable[[float], Decision]
) -> list[tuple[float, float]]:
    """Budgets from 0 to 1 and the one asked for, each with its recomputed runtime.

    Runtimes are in the estimator's unit, for the items of the knapsack of ``asked``.
    """
    solved: Any = asked.knapsack
    every = range(len(solved.memory))
    points = []
    for budget in sorted({asked.budget, *(k / _STEPS for k in range(_STEPS + 1))}):
        plan = plan_at(budget)
        # A cut that fits recomputes no item, and budget 0 saves none.
        saved = plan.knapsack.saved if plan.knapsack else every if budget else ()
        runtime = math.fsum(solved.runtimes[i] for i in {*every} - {*saved})
        points.append((budget, runtime))
    return points
