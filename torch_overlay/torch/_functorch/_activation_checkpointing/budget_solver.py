"""Asks the solver of the config what to save within a budget, and checks its answer.

Sizes are bytes here.  The solvers that weigh sizes as they are get those; all others,
and a user's own, get shares of the range of plans, as upstream's partitioner has them.
"""

from __future__ import annotations

import inspect
import logging
import math
import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, TYPE_CHECKING

from torch._functorch import config
from torch.utils._mode_utils import no_dispatch

from .budget_options import KNEE
from .knapsack import KNAPSACK_SOLVERS
from .knapsack_exact import exact_knapsack, solve_knapsack_budgets


if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo

log = logging.getLogger(__name__)

__all__ = [
    "Items",
    "Knapsack",
    "Range",
    "WrongAnswer",
    "ask_solver",
    "knee",
    "lightest",
    "solve_budgets",
]

# The solvers that take bytes.
_TAKE_BYTES = ("exact", "greedy", "ilp")

# Plans whose recomputed runtimes differ by less are as fast, by any estimator.
_NOISE = 1e-3

# A solver that adds sizes one by one may be off by as much and mean no harm.
_SUM_SLACK = 1e-9

# Capacities that the knee search compares, up to the one asked.
_KNEE_STEPS = 100


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

    def capacity(self, budget: float) -> int:
        """The bytes beyond ``low`` that a plan may keep under ``budget``.

        A budget of 0.7 is a little less than seven tenths, which must not cost a byte.
        """
        return math.floor(budget * (self.high - self.low) * (1 + 2.0**-50))

    def allowed(self, budget: float) -> int:
        """The bytes that a plan may keep under ``budget``."""
        return self.low + self.capacity(budget)


class WrongAnswer(ValueError):
    """A custom solver returned what is no answer."""


class Items(NamedTuple):
    """What a solver decides about: a node, bytes and a runtime for each item."""

    joint: fx.Graph
    info: NodeInfo
    limits: Range
    nodes: list[fx.Node]
    memory: list[int]
    runtimes: list[float]


@dataclass(frozen=True)
class Knapsack:
    """What a solver was asked, in bytes, and the items it saved."""

    solver: str
    budget: float
    capacity: int
    memory: list[int]
    runtimes: list[float]
    saved: list[int]

    @property
    def value(self) -> float:
        return math.fsum(self.runtimes[i] for i in self.saved)


def ask_solver(items: Items, capacity: int) -> list[int]:
    """What the solver that the config names saves within so many bytes, ascending.

    One of the user's own is called as ``CustomKnapsackSolver`` documents it, with the
    runtimes as well where it has a parameter of that name.  Its two lists have to name
    every item once.  It may have reasons to save more than the budget, but not without
    a warning.  Raises WrongAnswer for any other answer.
    """
    solver: Any = config.activation_memory_budget_solver
    with no_dispatch():
        if solver == KNEE:
            return knee(items, capacity)
        if solver in _TAKE_BYTES:
            nbytes: Any = items.memory
            return KNAPSACK_SOLVERS[solver](nbytes, items.runtimes, capacity)[1]
        memory = list(map(items.limits.size, items.memory))
        # Shares are rounded: what fits to the byte might not fit into less.
        share = items.limits.size(capacity + 0.5)
        if isinstance(solver, str):
            return KNAPSACK_SOLVERS[solver](memory, items.runtimes, share)[1]
        return _ask_custom(solver, items, memory, share)


def solve_budgets(items: Items, capacities: Sequence[int]) -> list[list[int]]:
    """What is saved at each capacity; the exact solver prepares them together.

    A knee search is one among its solutions.
    """
    if config.activation_memory_budget_solver in ("exact", KNEE):
        with no_dispatch():
            solved = solve_knapsack_budgets(items.memory, items.runtimes, capacities)
        return [solution.saved for solution in solved]
    return [ask_solver(items, capacity) for capacity in capacities]


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


def knee(items: Items, capacity: int) -> list[int]:
    """What is saved at the knee of runtime against memory, up to a capacity.

    Of 100 capacities at even distances, the smallest whose exact solution is nearest to
    the origin, with the bytes saved and the runtime recomputed both scaled to [0, 1];
    the one asked where all solutions have the same of either.
    """
    capacities = [capacity * k // _KNEE_STEPS for k in range(1, _KNEE_STEPS + 1)]
    solved = solve_knapsack_budgets(items.memory, items.runtimes, capacities)
    saved = [solution.weight for solution in solved]
    recomputed = [math.fsum(items.runtimes) - solution.value for solution in solved]
    distances = list(map(math.hypot, _scaled(saved), _scaled(recomputed)))
    at = distances.index(min(distances)) if distances else _KNEE_STEPS - 1
    log.warning(
        "%s took budget %g of the %g asked, %s: it saves %.1f%% of the items' memory "
        "and recomputes %.1f%% of their runtime",
        KNEE,
        items.limits.size(capacities[at]),
        items.limits.size(capacity),
        "the knee" if distances else "as there is no knee",
        100 * saved[at] / sum(items.memory),
        100 * recomputed[at] / math.fsum(items.runtimes),
    )
    return solved[at].saved


def _scaled(values: Sequence[float]) -> list[float]:
    """``values`` on [0, 1], or nothing where they are all the same."""
    low, high = min(values), max(values)
    return [(v - low) / (high - low) for v in values] if low < high else []


def _ask_custom(
    solver: Any, items: Items, memory: list[float], budget: float
) -> list[int]:
    more = {"runtimes": items.runtimes} if _takes_runtimes(solver) else {}
    answer = solver(memory, items.joint, budget, items.info, items.nodes, **more)
    name = getattr(solver, "__qualname__", type(solver).__qualname__)
    saved = _checked(answer, len(memory), name)
    weight = math.fsum(memory[i] for i in saved)
    if weight > budget * (1 + _SUM_SLACK):
        log.warning(
            "%s saves %.6g of the activations, more than the budget of %.6g",
            name,
            weight,
            budget,
        )
    return saved


def _takes_runtimes(solver: Callable[..., Any]) -> bool:
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
