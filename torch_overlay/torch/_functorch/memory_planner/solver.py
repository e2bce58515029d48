"""Asks a knapsack solver what to save within a budget, and checks its answer.

Sizes are bytes here.  Solvers that can take those get them.  All others, and the
user's own, get shares of the range between budgets 0 and 1, as they do from upstream's
partitioner.
"""

from __future__ import annotations

import inspect
import math
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch.utils._mode_utils import no_dispatch

from .._activation_checkpointing.knapsack import KNAPSACK_SOLVERS
from .._activation_checkpointing.knapsack_exact import exact_knapsack


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .graph.joint import BudgetedGraph


# Plans count as equally fast if what they recompute differs by at most this share.
NOISE = 1e-3
_TAKE_BYTES = ("exact", "greedy", "ilp")


class WrongAnswer(ValueError):
    """A custom solver returned an invalid answer."""


def ask_solver(solver: Any, graph: BudgetedGraph, capacity: int) -> list[int]:
    """The indices of the graph's items that a solver saves, in ascending order.

    ``solver`` is a name or the user's own, which is called as ``CustomKnapsackSolver``
    documents, and with ``runtimes`` as well if it has a parameter of that name.
    ``capacity`` is in bytes.  Raises WrongAnswer if the two lists that the user's own
    solver returns do not together contain the index of each item exactly once, and
    whatever that solver raises.
    """
    limits = graph.limits
    memory: Any = [item.nbytes for item in graph.items]
    runtimes = [item.runtime for item in graph.items]
    with no_dispatch():
        if solver in _TAKE_BYTES:
            return KNAPSACK_SOLVERS[solver](memory, runtimes, capacity)[1]
        memory = list(map(limits.as_fraction, memory))
        # Half a byte more, as rounding the shares might exclude what just fits.
        share = limits.as_fraction(capacity + 0.5)
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
            f"{type(solver).__qualname__} must return two lists of indices, those to "
            f"save and those to recompute, which name each of {len(memory)} items "
            f"once, not {answer!r}"
        )
    return saved


def lightest_items(
    memory: Sequence[float], runtimes: Sequence[float], saved: list[int]
) -> list[int]:
    """The items that take the fewest bytes to save, with no more runtime recomputed.

    Up to ``NOISE``, that is.  Saving the fewest bytes means recomputing the most: this
    is a knapsack, with runtimes as sizes, bytes as values, and the recomputed runtime
    as the capacity.
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
    """The indices of the items that upstream's dynamic program recomputes, last first.

    :func:`.dp_knapsack` would not do: in upstream's 32-bit floats, many selections are
    worth the same, and it may find another of these.  ``memory`` and ``budget`` are
    shares of the range between budgets 0 and 1.
    O(items * budget * 10,000) time and bytes.
    """
    quanta = 10_000
    sizes = [round(share * quanta) for share in memory]
    room = round(budget * quanta)
    options: Any = {"dtype": torch.float32, "device": "cpu"}
    best = torch.zeros(room + 1, **options)
    improved = []
    for size, runtime in zip(sizes, torch.tensor(runtimes, **options)):
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
