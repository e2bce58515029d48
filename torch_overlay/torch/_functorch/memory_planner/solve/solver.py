"""Asks a solver what to save within a budget, and checks its answer.

Sizes are bytes here.  Solvers that can take those get them.  All others, and the
user's own, get shares of the range between budgets 0 and 1, as they do from upstream's
partitioner.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any, TYPE_CHECKING

from torch.utils._mode_utils import no_dispatch

from ..._activation_checkpointing.knapsack import KNAPSACK_SOLVERS


if TYPE_CHECKING:
    from ..graph.joint import BudgetedGraph

__all__ = ["WrongAnswer", "ask_solver"]

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
