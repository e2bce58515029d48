"""Ask a knapsack solver of the user's own, and check what it answers.

The solver is a :class:`torch._inductor.custom_graph_pass.CustomKnapsackSolver` (in 2.10,
any callable), and is called as that class documents it.  Its two lists of indices have
to name every item once, in any order.  It may have reasons to save more than the budget.
"""

from __future__ import annotations

import inspect
import logging
import math
import operator
from collections import Counter
from typing import Any, Callable, TYPE_CHECKING


if TYPE_CHECKING:
    from torch import fx

log = logging.getLogger(__name__)

__all__ = ["ask_custom_solver"]

# A solver that adds sizes one by one may be off by as much and mean no harm.
_SUM_SLACK = 1e-9


def ask_custom_solver(
    solver: Callable[..., Any],
    memory: list[float],
    runtimes: list[float],
    max_memory: float,
    joint_graph: fx.Graph,
    node_info: Any,
    nodes: list[fx.Node],
) -> tuple[float, list[int], list[int]]:
    """The runtime that ``solver`` saves, the items to save and those to recompute.

    ``memory`` (in the unit of ``max_memory``), ``runtimes`` and ``nodes`` have an entry
    for each item.  Both lists returned are ascending.  Warns where the sizes saved add
    up to more than ``max_memory``.  Raises TypeError for an answer that is not two lists
    of ints, and ValueError for an index out of range, named twice, or missing.
    """
    rest = {"runtimes": runtimes} if _takes_runtimes(solver) else {}
    answer = solver(memory, joint_graph, max_memory, node_info, nodes, **rest)
    name = getattr(solver, "__qualname__", type(solver).__qualname__)
    saved, recomputable = _checked(answer, len(memory), name)
    weight = math.fsum(memory[i] for i in saved)
    if weight > max_memory * (1 + _SUM_SLACK):
        log.warning(
            "%s saves %.6g of the activations, more than the budget of %.6g",
            name,
            weight,
            max_memory,
        )
    return math.fsum(runtimes[i] for i in saved), saved, recomputable


def _takes_runtimes(solver: Callable[..., Any]) -> bool:
    try:
        return "runtimes" in inspect.signature(solver).parameters
    except ValueError:  # Written in C, and silent about its parameters.
        return False


def _checked(answer: Any, items: int, name: str) -> tuple[list[int], list[int]]:
    """The two lists of ``answer``, each item in one of them, ascending."""
    try:
        saved, recomputable = (sorted(map(operator.index, part)) for part in answer)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must return two lists of indices, those to save and those to "
            f"recompute, not {answer!r}"
        ) from error
    named = Counter(saved + recomputable)
    for index in sorted({*named, *range(items)}):
        if named[index] != 1 or not 0 <= index < items:
            raise ValueError(
                f"{name} names item {index} {named[index]} times: each of the {items} "
                "items, from 0 on, has to be named once"
            )
    return saved, recomputable
