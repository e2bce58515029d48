"""Many activation memory budgets of one joint graph, solved together.

Two features ask what other budgets would come to: the Pareto plot
(``config.visualize_memory_budget_pareto``) and the knee search (the solver named
``"dynamic_memory_budget_dp"``).  Both pose one knapsack at many capacities, so both
hand all capacities to :func:`solve_budgets` in a single call.  What is left
of the plot's time are min cuts, which turn a set of items into saved values; a set is
cut once (:func:`remember_cuts`), and a curve of many sets is thinned out.

Budgets are in the partitioner's unit throughout: 0 saves the inputs only, 1 what the
runtime-optimal min cut saves.
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
from torch.utils._mode_utils import no_dispatch

from .knapsack import exact_knapsack, KNAPSACK_SOLVERS, Solver
from .knapsack_exact import solve_knapsack_budgets


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node


log = logging.getLogger(__name__)

__all__ = [
    "CurvePoint",
    "MinCuts",
    "budget_curve",
    "knee_budget",
    "remember_cuts",
    "solve_budgets",
    "write_budget_curve",
]

# Budgets are tried in steps of one percent.
_STEPS = 100

# At most as many cuts are made for a curve.  One takes 0.7 s on a graph of 5,000
# nodes, and more points than this cannot be told apart in a plot.
_MAX_CUTS = 32

# As many points of a plot carry a label.
_LABELS = 6

# What the estimators that have a name count.
_RUNTIME_UNITS = {"flops": "FLOP", "profile": "ms", "testing": "operators"}


class MinCuts(NamedTuple):
    """The saved values that the partitioner knows before it asks a solver."""

    inputs: list[Node]
    aggressive: list[Node]
    more_aggressive: list[Node]
    runtime_optimized: list[Node]


class CurvePoint(NamedTuple):
    """A plan, and the smallest of the tried budgets that leads to it.

    ``saved_bytes`` is the size of all saved values, inputs included, and ``ratio`` the
    same in the unit of the budget.  ``recomputed_runtime`` is in the estimator's unit
    and counts the items only, as the knapsack does; ``saved_items`` is their number.
    """

    budget: float
    saved_bytes: int
    ratio: float
    recomputed_runtime: float
    saved_items: int


def solve_budgets(
    solver: Solver,
    memory: list[float],
    runtimes: list[float],
    budgets: Sequence[float],
) -> list[tuple[float, list[int], list[int]]]:
    """What ``solver`` answers at each budget, the budgets together where it can.

    For a plot or a search over one instance: the exact solver prepares the
    instance once for all budgets, any other solver is called once for each.

    Args:
        solver: any function with a solver's signature.
        memory: size of each item.
        runtimes: runtime of each item, same length.
        budgets: capacities, in the unit of ``memory``, in any order.

    Returns:
        A solver's answer per budget, in the order of ``budgets``.

    Raises:
        ValueError: on bad input, see the module's docstring.
    """
    if solver is exact_knapsack:
        solutions = solve_knapsack_budgets(memory, runtimes, budgets)
        return [(s.value, s.saved, s.recomputable) for s in solutions]
    return [solver(memory, runtimes, budget) for budget in budgets]


def remember_cuts(min_cut: Callable[..., Any]) -> Callable[..., Any]:
    """``solve_min_cut`` that answers each set of recomputable nodes only once.

    For calls on one graph with the same options.
    """
    answers: dict[frozenset[Node], Any] = {}

    def remembered(graph: Any, info: Any, options: Any, dont_ban: Any) -> Any:
        key = frozenset(dont_ban)
        if key not in answers:
            answers[key] = min_cut(graph, info, options, dont_ban)
        return answers[key]

    return remembered


def budget_curve(
    asked: float,
    memory: list[float],
    runtimes: list[float],
    solver: Solver,
    cut: Callable[[Sequence[int]], list[Node]],
    known: MinCuts,
    gigabytes: Callable[[list[Node]], float],
) -> list[CurvePoint]:
    """The plans that the budgets from 0 to 1, and the one asked, lead to.

    A budget takes the way it takes in the partitioner: a cut that is known and fits
    comes before the knapsack.

    Args:
        asked: the budget asked for; its plan is among the points.
        memory: size of each item, in the unit of a budget.
        runtimes: runtime of each item, same length.
        solver: any function with a knapsack solver's signature.
        cut: saved values for the indices of the items that may be recomputed.
        known: the cuts made without a solver.
        gigabytes: size of some saved values.

    Returns:
        Points by rising budget, each with another set of saved items or another cut.

    Calls the solver once for all budgets (or once for each if it cannot do better), and
    ``cut`` at most 33 times.
    """
    low, high = gigabytes(known.inputs), gigabytes(known.runtime_optimized)

    def point(
        budget: float, saved: list[Node], recomputed: Sequence[int]
    ) -> CurvePoint:
        size = gigabytes(saved)
        return CurvePoint(
            budget,
            round(size * 1e9),
            (size - low) / (high - low),
            math.fsum(runtimes[i] for i in recomputed),
            len(memory) - len(recomputed),
        )

    fitting = [
        point(1.0, known.more_aggressive, []),
        point(1.0, known.aggressive, []),
    ]
    budgets = sorted({asked, *(step / _STEPS for step in range(1, _STEPS))})
    posed = [b for b in budgets if all(b <= fit.ratio for fit in fitting)]
    with no_dispatch():
        solutions = solve_budgets(solver, memory, runtimes, posed)
    recomputed_at = {b: tuple(sorted(s[2])) for b, s in zip(posed, solutions)}
    first: dict[tuple[int, ...], float] = {}
    for budget, recomputed in recomputed_at.items():
        first.setdefault(recomputed, budget)
    chosen = {*_spread(list(first), _MAX_CUTS), recomputed_at[asked]}

    points = [point(0.0, known.inputs, range(len(memory)))]
    for recomputed, budget in first.items():
        if recomputed in chosen:
            points.append(point(budget, cut(recomputed), recomputed))
    for budget in budgets[len(posed) :]:
        fit = next(fit for fit in fitting if fit.ratio < budget)
        points.append(fit._replace(budget=budget))
    points.append(point(1.0, known.runtime_optimized, []))
    return [p for i, p in enumerate(points) if i == 0 or p[1:] != points[i - 1][1:]]


def _spread(sets: list[tuple[int, ...]], most: int) -> list[tuple[int, ...]]:
    """At most ``most`` of ``sets`` at even distances, the first and the last included."""
    if len(sets) <= most:
        return sets
    return [sets[i * (len(sets) - 1) // (most - 1)] for i in range(most)]


def write_budget_curve(
    asked: float,
    memory: list[float],
    runtimes: list[float],
    configured: Solver,
    cut: Callable[[Sequence[int]], list[Node]],
    known: MinCuts,
    gigabytes: Callable[[list[Node]], float],
) -> None:
    """Write :func:`budget_curve` as a plot (SVG) and its points beside it (JSON).

    ``configured`` solves with the solver that the config names, for those that have no
    function of their own; the other arguments are those of :func:`budget_curve`.  The
    knee search is shown by the curve it searches.

    The files are ``memory_budget_pareto[_rank_R]_GRAPH.svg`` and ``.json``, in
    ``config.memory_budget_pareto_dir`` or the working directory; a warning on the log
    names them.  Without matplotlib only the points are written, and the warning says so.
    """
    name = config.activation_memory_budget_solver
    solver = configured
    if isinstance(name, str):
        solver = KNAPSACK_SOLVERS.get(name, configured)
        if name == "dynamic_memory_budget_dp":
            solver = exact_knapsack
    points = budget_curve(asked, memory, runtimes, solver, cut, known, gigabytes)
    estimator = config.activation_memory_budget_runtime_estimator
    unit = _RUNTIME_UNITS.get(str(estimator), "the estimator's unit")
    graph = get_aot_graph_name()
    folder = config.memory_budget_pareto_dir or os.getcwd()
    os.makedirs(folder, exist_ok=True)
    rank = ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = f"_rank_{torch.distributed.get_rank()}"
    stem = os.path.join(folder, f"memory_budget_pareto{rank}_{graph}")
    curve = {
        "graph": graph,
        "budget_asked": asked,
        "solver": str(name),
        "items": len(memory),
        "runtime_unit": unit,
        "points": [p._asdict() for p in points],
    }
    with open(f"{stem}.json", "w") as file:
        json.dump(curve, file, indent=1)
        file.write("\n")
    try:
        _draw(points, asked, f"{graph}, {len(memory)} items, {name}", unit, stem)
    except ImportError as error:
        log.warning(
            "Wrote the points of the memory budget curve to %s.json. There is no plot, "
            "as matplotlib cannot be imported (%s): install it to get one.",
            stem,
            error,
        )
    else:
        log.warning(
            "Wrote the memory budget curve to %s.svg and its points to %s.json",
            stem,
            stem,
        )


def _draw(
    points: list[CurvePoint], asked: float, title: str, unit: str, stem: str
) -> None:
    """Draw the curve into ``stem.svg``; ImportError where there is no matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    budgets = [p.budget for p in points]
    taken = [p for p in points if p.budget <= asked][-1]
    # No pyplot: it would keep the figure, and might open a window.
    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    figure.suptitle(f"Memory budget of {title}")

    runtime = [p.recomputed_runtime for p in points]
    above.step(budgets, runtime, where="post", marker=".")
    above.set_ylabel("recomputed in the backward")
    # A unit of several words would be taken for a part of the number.
    plain = " " in unit
    above.yaxis.set_major_formatter(EngFormatter("" if plain else unit, places=1))
    if plain:
        above.set_ylabel(f"recomputed in the backward\n[{unit}]")

    saved = [p.saved_bytes for p in points]
    below.step(budgets, saved, where="post", marker=".", label="saved by the plan")
    allowed = [points[0].saved_bytes, points[-1].saved_bytes]
    below.plot([0, 1], allowed, linestyle=":", color="gray", label="allowed")
    below.set_ylabel("saved for the backward, inputs included")
    below.yaxis.set_major_formatter(EngFormatter("B", places=1))
    below.set_xlabel("memory budget (0: inputs only, 1: fastest plan)")

    for axes, value in ((above, taken.recomputed_runtime), (below, taken.saved_bytes)):
        axes.axvline(asked, color="tab:red", linewidth=1)
        axes.plot(asked, value, "o", color="tab:red", label=f"asked: {asked:g}")
        axes.grid(alpha=0.3)
        axes.set_xlim(-0.02, 1.02)
        axes.margins(y=0.12)
        axes.legend()
    for p in _labelled(points):
        amount = above.yaxis.get_major_formatter()(p.recomputed_runtime)
        above.annotate(
            f"{p.budget:.2f}: {amount}",
            (p.budget, p.recomputed_runtime),
            xytext=(6, 6),
            textcoords="offset points",
            fontsize="small",
        )
    # The same curve gives the same file, byte for byte.
    with matplotlib.rc_context({"svg.hashsalt": "memory budget"}):
        figure.savefig(f"{stem}.svg", metadata={"Date": None})


def _labelled(points: list[CurvePoint]) -> list[CurvePoint]:
    """The points to label: where the runtime falls most, with room for the words."""
    falls = sorted(
        range(1, len(points)),
        key=lambda i: points[i].recomputed_runtime - points[i - 1].recomputed_runtime,
    )
    labelled = [points[0]]
    for i in falls:
        apart = all(abs(p.budget - points[i].budget) > 0.17 for p in labelled)
        if apart and points[i].budget < 0.85 and len(labelled) < _LABELS:
            labelled.append(points[i])
    return labelled


def knee_budget(
    solver: Solver,
    memory: list[float],
    runtimes: list[float],
    asked: float,
    smallest: float = 0.001,
    tried: int = 100,
) -> float:
    """The budget, up to ``asked``, at the knee of runtime against memory.

    Of ``tried`` budgets at even distances it is the one whose solution is nearest to the
    origin, with the memory saved and the runtime recomputed both scaled to [0, 1]; the
    smallest of several.  Where all solutions have the same memory or the same runtime
    there is no knee, and the answer is ``asked``.

    Args:
        solver: any function with a knapsack solver's signature.
        memory: size of each item, in the unit of a budget.
        runtimes: runtime of each item, same length.
        asked: the largest budget to try, and never exceeded.
        smallest: the smallest budget to try, unless ``asked`` is smaller still.
        tried: number of budgets.

    Returns:
        A budget of at most ``asked``; the log says which and why.
    """
    start = min(smallest, asked)
    step = (asked - start) / max(tried - 1, 1)
    # Rounding could lead a little above the budget asked.
    budgets = [min(start + i * step, asked) for i in range(tried)]
    solutions = solve_budgets(solver, memory, runtimes, budgets)
    saved = [math.fsum(memory[i] for i in s[1]) for s in solutions]
    recomputed = [math.fsum(runtimes[i] for i in s[2]) for s in solutions]
    x, y = _scaled(saved), _scaled(recomputed)
    if not x or not y:
        log.warning(
            "dynamic_memory_budget_dp took the budget asked, %g: no budget from %g on "
            "changes both the memory saved and the runtime recomputed, so there is no "
            "knee",
            asked,
            budgets[0],
        )
        return asked
    knee = min(range(len(budgets)), key=lambda i: math.hypot(x[i], y[i]))
    log.warning(
        "dynamic_memory_budget_dp took budget %g of the %g asked, the knee of %d budgets "
        "from %g on: it saves %.1f%% of the items' memory and recomputes %.1f%% of their "
        "runtime, where the budget asked would save %.1f%% and recompute %.1f%%",
        budgets[knee],
        asked,
        len(budgets),
        budgets[0],
        100 * saved[knee] / math.fsum(memory),
        100 * recomputed[knee] / math.fsum(runtimes),
        100 * saved[-1] / math.fsum(memory),
        100 * recomputed[-1] / math.fsum(runtimes),
    )
    return budgets[knee]


def _scaled(values: Sequence[float]) -> list[float]:
    """``values`` on [0, 1], or nothing where they are all the same."""
    low, high = min(values), max(values)
    return [(v - low) / (high - low) for v in values] if low < high else []
