"""Many activation memory budgets of one joint graph, solved together.

For the Pareto plot (``config.visualize_memory_budget_pareto``) and the knee search (the
solver named ``"dynamic_memory_budget_dp"``).
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
from torch.utils._mode_utils import no_dispatch

from .knapsack_exact import exact_knapsack, solve_knapsack_budgets
from .rerun_cost import RUNTIME_UNITS


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .decision import Knapsack

    Solution = tuple[float, list[int], list[int]]
    Solver = Callable[[list[float], list[float], float], Solution]


log = logging.getLogger(__name__)

__all__ = ["CurvePoint", "Range", "budget_curve", "knee_budget", "write_budget_curve"]

# Steps between the budgets of a curve, and of a knee search.  Each step of a curve may
# take a min cut, 0.7 s on a graph of 5,000 nodes.
_CURVE_STEPS, _KNEE_STEPS = 32, 99

# The smallest budget that the knee search tries.
_SMALLEST_KNEE = 0.001


class Range(NamedTuple):
    """The bytes of activations that the plans of budgets 0 and 1 keep.

    They are whole storages without those of the inputs, so a budget is a fraction of
    what a plan can change.
    """

    low: int
    high: int

    def size(self, nbytes: float) -> float:
        """``nbytes`` in the unit of a budget."""
        return nbytes / (self.high - self.low)

    def budget(self, nbytes: int) -> float:
        """The budget that is used up by keeping ``nbytes``."""
        return self.size(nbytes - self.low)

    def allowed(self, budget: float) -> int:
        """The bytes that a plan may keep under ``budget``.

        A budget of 0.7 is a little less than seven tenths, which must not cost a byte.
        """
        return self.low + math.floor(budget * (self.high - self.low) * (1 + 2.0**-50))

    def capacity(self, budget: float) -> float:
        """What a solver may fill with sizes: what is allowed, and half a byte.

        Sizes are rounded, so what fits to the byte might not fit into less.
        """
        return self.size(self.allowed(budget) - self.low + 0.5)


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


def solve_budgets(
    solver: Solver,
    memory: list[float],
    runtimes: list[float],
    budgets: Sequence[float],
) -> list[Solution]:
    """What ``solver`` answers at each budget; the exact one prepares them together."""
    with no_dispatch():
        if solver is exact_knapsack:
            solutions = solve_knapsack_budgets(memory, runtimes, budgets)
            return [solution[:3] for solution in solutions]
        return [solver(memory, runtimes, budget) for budget in budgets]


def budget_curve(
    posed: Knapsack,
    kept_at: Callable[[float, list[int]], tuple[Knapsack, int]],
    solver: Solver,
    limits: Range,
    cheap: Sequence[int],
) -> list[CurvePoint]:
    """The plans that the budgets from 0 to 1, and the one asked, lead to.

    As in the partitioner, a cut that fits comes before the knapsack.  The points are by
    rising budget, each with another set of saved items or another cut.

    ``solver`` answers ``posed`` at other budgets, ``kept_at`` tells of a budget and an
    answer what is saved in the end and the bytes that this keeps, and ``cheap`` is what
    the cuts keep that the partitioner tries first, in order.
    """

    def point(budget: float, nbytes: int, saved: Sequence[int]) -> CurvePoint:
        again = {*range(len(posed.memory))} - {*saved}
        runtime = math.fsum(posed.runtimes[i] for i in again)
        return CurvePoint(budget, nbytes, limits.budget(nbytes), runtime, len(saved))

    every = range(len(posed.memory))
    steps = (step / _CURVE_STEPS for step in range(1, _CURVE_STEPS))
    budgets = sorted({posed.budget, *steps})
    tried = [b for b in budgets if limits.allowed(b) < min(cheap)]
    capacities = list(map(limits.capacity, tried))
    solutions = solve_budgets(solver, posed.memory, posed.runtimes, capacities)
    points = [point(0.0, limits.low, [])]
    for budget, (_, saved, _) in zip(tried, solutions):
        solved, kept = kept_at(budget, saved)
        points.append(point(budget, kept, solved.saved))
    for budget in budgets[len(tried) :]:
        fits = next(size for size in cheap if size <= limits.allowed(budget))
        points.append(point(budget, fits, every))
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


def knee_budget(memory: list[float], runtimes: list[float], asked: float) -> float:
    """The budget, up to ``asked``, at the knee of runtime against memory.

    Of 100 at even distances it is the smallest whose exact solution is nearest to the
    origin, with the memory saved and the runtime recomputed both scaled to [0, 1]; it is
    ``asked`` where all solutions have the same memory or the same runtime.
    """
    start = min(_SMALLEST_KNEE, asked)
    step = (asked - start) / _KNEE_STEPS
    # Rounding could lead a little above the budget asked.
    budgets = [min(start + i * step, asked) for i in range(_KNEE_STEPS + 1)]
    solutions = solve_budgets(exact_knapsack, memory, runtimes, budgets)
    saved = [math.fsum(memory[i] for i in s[1]) for s in solutions]
    recomputed = [math.fsum(runtimes[i] for i in s[2]) for s in solutions]
    distances = list(map(math.hypot, _scaled(saved), _scaled(recomputed)))
    if not distances:
        log.warning(
            "dynamic_memory_budget_dp took the budget asked, %g: there is no knee, as "
            "no lower one changes both the memory saved and the runtime recomputed",
            asked,
        )
        return asked
    knee = distances.index(min(distances))
    log.warning(
        "dynamic_memory_budget_dp took budget %g of the %g asked, the knee: it saves "
        "%.1f%% of the items' memory and recomputes %.1f%% of their runtime",
        budgets[knee],
        asked,
        100 * saved[knee] / math.fsum(memory),
        100 * recomputed[knee] / math.fsum(runtimes),
    )
    return budgets[knee]


def _scaled(values: Sequence[float]) -> list[float]:
    """``values`` on [0, 1], or nothing where they are all the same."""
    low, high = min(values), max(values)
    return [(v - low) / (high - low) for v in values] if low < high else []
