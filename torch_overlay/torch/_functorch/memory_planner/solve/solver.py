"""Asks a solver what to save within a budget, and checks its answer.

Sizes are bytes here.  The solvers that weigh sizes as they are get those; all others,
and a user's own, get shares of the range of plans, as upstream's partitioner has them.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any, TYPE_CHECKING

from torch.utils._mode_utils import no_dispatch

from ..._activation_checkpointing.knapsack import KNAPSACK_SOLVERS


if TYPE_CHECKING:
    from ..graph.joint import Planner

__all__ = ["WrongAnswer", "ask_solver"]

# The solvers that take bytes.
_TAKE_BYTES = ("exact", "greedy", "ilp")


class WrongAnswer(ValueError):
    """A custom solver returned what is no answer."""


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
        memory = list(map(limits.share_of, memory))
        # Shares are rounded: what fits to the byte might not fit into less.
        share = limits.share_of(capacity + 0.5)
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
