"""Asks a solver what to save within a budget, and checks its answer.

Sizes are bytes here.  The solvers that weigh sizes as they are get those; all others,
and a user's own, get shares of the range of plans, as upstream's partitioner has them.
"""

from __future__ import annotations

import inspect
import math
import operator
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.utils._mode_utils import no_dispatch

from .knapsack import KNAPSACK_SOLVERS
from .knapsack_exact import exact_knapsack


if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.fx as fx

    from .memory_budget import Planner

__all__ = [
    "KNEE",
    "NOISE",
    "Item",
    "WrongAnswer",
    "ask_solver",
    "lightest",
    "upstreams_table",
]

# Upstream's search for a lower budget that is the better trade.  Here all of the budget
# is used: it is another name of "exact".
KNEE = "dynamic_memory_budget_dp"

# The solvers that take bytes.
_TAKE_BYTES = ("exact", "greedy", "ilp")

# Plans whose recomputed runtimes differ by less are as fast, by any estimator.
NOISE = 1e-3


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
    lists have to name every item once.  Raises WrongAnswer for any other answer.
    """
    limits = graph.limits
    memory: Any = [item.nbytes for item in graph.items]
    runtimes = [item.runtime for item in graph.items]
    with no_dispatch():
        if solver in _TAKE_BYTES:
            return KNAPSACK_SOLVERS[solver](memory, runtimes, capacity)[1]
        memory = list(map(limits.size, memory))
        # Shares are rounded: what fits to the byte might not fit into less.
        share = limits.size(capacity + 0.5)
        if isinstance(solver, str):
            return KNAPSACK_SOLVERS[solver](memory, runtimes, share)[1]
        nodes = [item.node for item in graph.items]
        asked = memory, graph.joint, share, graph.info, nodes
        if "runtimes" in inspect.signature(solver).parameters:
            answer = solver(*asked, runtimes=runtimes)
        else:
            answer = solver(*asked)
    try:
        saved, again = (sorted(map(operator.index, part)) for part in answer)
    except (TypeError, ValueError):
        saved = again = []
    if sorted(saved + again) != [*range(len(memory))]:
        raise WrongAnswer(
            f"{type(solver).__qualname__} must return two lists of indices, those to save "
            f"and those to recompute, which name each of {len(memory)} items once, not "
            f"{answer!r}"
        )
    return saved


def lightest(
    memory: Sequence[float], runtimes: Sequence[float], saved: list[int]
) -> list[int]:
    """The items to save that weigh least of all that recompute no more, but for noise.

    To save few bytes is to recompute many: a knapsack of runtimes, worth their bytes.
    """
    recomputed = {*range(len(memory))} - {*saved}
    capacity = math.fsum(runtimes[i] for i in recomputed) * (1 + NOISE)
    with no_dispatch():
        _, again, rest = exact_knapsack([*runtimes], [*memory], capacity)
    lighter = sum(memory[i] for i in again)
    return sorted(rest) if lighter > sum(memory[i] for i in recomputed) else saved


def upstreams_table(
    memory: Sequence[float], runtimes: Sequence[float], budget: float
) -> list[int]:
    """The items that upstream's dynamic program recomputes, the last first.

    Many selections are worth as much in 32-bit floats, of which :func:`.dp_knapsack` may
    find another.  ``memory`` and ``budget`` are shares of the range of plans.  O(items *
    budget * 10,000) time and bytes.
    """
    quanta = 10_000
    sizes = [round(share * quanta) for share in memory]
    room = round(budget * quanta)
    best = torch.zeros(room + 1, device="cpu")
    improved = []
    for size, runtime in zip(sizes, torch.tensor(runtimes, device="cpu")):
        before, best = best, best.clone()
        with_it = before[: max(room + 1 - size, 0)] + runtime
        torch.maximum(before[size:], with_it, out=best[size:])
        improved.append(best != before)
    recomputed = []
    for item in reversed(range(len(sizes))):
        if improved[item][room]:
            room -= sizes[item]
        else:
            recomputed.append(item)
    return recomputed
