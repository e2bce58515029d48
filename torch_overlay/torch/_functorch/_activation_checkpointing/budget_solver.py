"""Asks a solver what to save within a budget, and checks its answer.

Sizes are bytes here.  The solvers that weigh sizes as they are get those; all others,
and a user's own, get shares of the range of plans, as upstream's partitioner has them.
"""

from __future__ import annotations

import inspect
import logging
import math
import operator
from collections import Counter
from typing import Any, NamedTuple, TYPE_CHECKING

from torch.utils._mode_utils import no_dispatch

from .knapsack import KNAPSACK_SOLVERS
from .knapsack_exact import exact_knapsack, solve_knapsack_budgets


if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.fx as fx

    from .decision import Range
    from .memory_budget import Planner

log = logging.getLogger(__name__)

__all__ = ["KNEE", "Item", "WrongAnswer", "ask_solver", "knee", "lightest"]

# The name that asks for a lower budget where a lower one is the better trade.
KNEE = "dynamic_memory_budget_dp"

# The solvers that take bytes.
_TAKE_BYTES = ("exact", "greedy", "ilp")

# Plans whose recomputed runtimes differ by less are as fast, by any estimator.
_NOISE = 1e-3

# A solver that adds sizes one by one may be off by as much and mean no harm.
_SUM_SLACK = 1e-9

# Capacities that the knee search compares, up to the one asked.
_KNEE_STEPS = 100


class WrongAnswer(ValueError):
    """A custom solver returned what is no answer."""


class Item(NamedTuple):
    """Something to save or to recompute.

    Args:
        node: what is told about it.
        ops: the nodes that need not run again if it is saved, with their runtimes.
        storages: what to keep for that, by the graph's model, and their bytes.
    """

    node: fx.Node
    ops: dict[fx.Node, float]
    storages: frozenset[int]
    nbytes: int

    @property
    def runtime(self) -> float:
        return math.fsum(self.ops.values())


def ask_solver(solver: Any, graph: Planner, capacity: int) -> list[int]:
    """The items that a solver saves within so many bytes, ascending.

    ``solver`` is a name, or one of the user's own, called as ``CustomKnapsackSolver``
    documents it, with the runtimes as well where it has a parameter of that name.  Its two
    lists have to name every item once.  It may have reasons to save more than the budget,
    but not without a warning.  Raises WrongAnswer for any other answer.
    """
    limits = graph.limits
    memory: Any = [item.nbytes for item in graph.items]
    runtimes = [item.runtime for item in graph.items]
    with no_dispatch():
        if solver == KNEE:
            return knee(memory, runtimes, capacity, limits)
        if solver in _TAKE_BYTES:
            return KNAPSACK_SOLVERS[solver](memory, runtimes, capacity)[1]
        memory = list(map(limits.size, memory))
        # Shares are rounded: what fits to the byte might not fit into less.
        share = limits.size(capacity + 0.5)
        if isinstance(solver, str):
            return KNAPSACK_SOLVERS[solver](memory, runtimes, share)[1]
        more = {"runtimes": runtimes} if _takes_runtimes(solver) else {}
        nodes = [item.node for item in graph.items]
        answer = solver(memory, graph.joint, share, graph.info, nodes, **more)
    name = type(solver).__qualname__
    saved = _checked(answer, len(memory), name)
    weight = math.fsum(memory[i] for i in saved)
    if weight > share * (1 + _SUM_SLACK):
        log.warning(
            "%s saves %.6g of the activations, more than the budget of %.6g",
            name,
            weight,
            share,
        )
    return saved


def _takes_runtimes(solver: Any) -> bool:
    try:
        return "runtimes" in inspect.signature(solver).parameters
    except ValueError:  # Written in C, and silent about its parameters.
        return False


def _checked(answer: Any, items: int, name: str) -> list[int]:
    """The first of two lists that name each item once, ascending."""
    try:
        saved, recomputable = (sorted(map(operator.index, part)) for part in answer)
    except (TypeError, ValueError) as error:
        raise WrongAnswer(
            f"{name} must return two lists of indices, those to save and those to "
            f"recompute, not {answer!r}"
        ) from error
    named = Counter(saved + recomputable)
    for index in sorted({*named, *range(items)}):
        if named[index] != 1 or not 0 <= index < items:
            raise WrongAnswer(
                f"{name} names item {index} {named[index]} times: each of the {items} "
                "items, from 0 on, has to be named once"
            )
    return saved


def lightest(
    memory: Sequence[float], runtimes: Sequence[float], saved: list[int]
) -> list[int]:
    """The items to save that weigh least of all that recompute no more, but for noise.

    To save few bytes is to recompute many: a knapsack of runtimes, worth their bytes.
    """
    recomputed = {*range(len(memory))} - {*saved}
    capacity = math.fsum(runtimes[i] for i in recomputed) * (1 + _NOISE)
    with no_dispatch():
        _, again, rest = exact_knapsack([*runtimes], [*memory], capacity)
    lighter = sum(memory[i] for i in again)
    return sorted(rest) if lighter > sum(memory[i] for i in recomputed) else saved


def knee(
    memory: Sequence[int], runtimes: Sequence[float], capacity: int, limits: Range
) -> list[int]:
    """What is saved at the knee of runtime against memory, up to a capacity.

    Of 100 capacities at even distances, the smallest whose exact solution is nearest to
    the origin, with the bytes saved and the runtime recomputed both scaled to [0, 1];
    the one asked where all solutions have the same of either.
    """
    capacities = [capacity * k // _KNEE_STEPS for k in range(1, _KNEE_STEPS + 1)]
    solved = solve_knapsack_budgets(memory, runtimes, capacities)
    saved = [solution.weight for solution in solved]
    recomputed = [math.fsum(runtimes) - solution.value for solution in solved]
    distances = list(map(math.hypot, _scaled(saved), _scaled(recomputed)))
    at = distances.index(min(distances)) if distances else _KNEE_STEPS - 1
    log.warning(
        "%s took budget %g of the %g asked, %s: it saves %.1f%% of the items' memory "
        "and recomputes %.1f%% of their runtime",
        KNEE,
        limits.size(capacities[at]),
        limits.size(capacity),
        "the knee" if distances else "as there is no knee",
        100 * saved[at] / sum(memory),
        100 * recomputed[at] / math.fsum(runtimes),
    )
    return solved[at].saved


def _scaled(values: Sequence[float]) -> list[float]:
    """``values`` on [0, 1], or nothing where they are all the same."""
    low, high = min(values), max(values)
    return [(v - low) / (high - low) for v in values] if low < high else []
