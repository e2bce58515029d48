"""What the partitioner saves for the backward under an activation memory budget.

A budget is a fraction of the *range*: the bytes of the plan that runs fastest (budget
1) less those of the inputs.  Budget 0 also saves what must not be computed twice.  In
between, :func:`choose_plan` takes the first of these that is within the budget:

1.  a min cut that recomputes more, and one that recomputes all that is cheap;
2.  a knapsack.  What even the second cut does not recompute are its *items*, each with
    a size in the unit of the budget and the runtime of computing it again.  A solver
    picks those to save, and one more min cut may recompute the others.

A plan may weigh more than its budget: a cut is credited with inputs that it does not
save, though nobody frees them, and the last min cut minimises weights that grow with the
distance from the backward, not bytes.  The warning compares the activations alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import operator
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Callable, Optional, TYPE_CHECKING

from torch._functorch import config
from torch._functorch._activation_checkpointing.ac_logging_utils import (
    create_structured_trace_for_min_cut_info,
)
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch.utils._mode_utils import no_dispatch
from torch.utils._ordered_set import OrderedSet

from .budget_curve import budget_curve, knee_budget, Range, write_budget_curve
from .knapsack import KNAPSACK_SOLVERS
from .knapsack_exact import exact_knapsack, solve_knapsack
from .random_ops import must_run_once, NEVER, recomputable_nodes
from .rerun_cost import concrete, rerun_cost, RUNTIME_UNITS


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo

try:
    from torch._inductor.custom_graph_pass import (
        CustomKnapsackSolver,
        CustomRuntimeEstimator,
    )
except ImportError:  # Before 2.11, a solver could be any callable.
    CustomKnapsackSolver = Callable  # type: ignore[assignment, misc]
    CustomRuntimeEstimator = None  # type: ignore[assignment, misc]

log = logging.getLogger(__name__)

__all__ = ["ChosenPlan", "Knapsack", "choose_plan"]

# The name that asks for a lower budget where a lower one is the better trade.
_KNEE = "dynamic_memory_budget_dp"

# Over the budget by less than this is no news: an allocator rounds sizes up.
_TOLERANCE = 0.01

# A solver that adds sizes one by one may be off by as much and mean no harm.
_SUM_SLACK = 1e-9

# What a min cut does not recompute, and the option of the config that says so.
_BANS = {
    "ban_if_used_far_apart": "ban_recompute_used_far_apart",
    "ban_if_long_fusible_chains": "ban_recompute_long_fusible_chains",
    "ban_if_materialized_backward": "ban_recompute_materialized_backward",
    "ban_if_not_in_allowlist": "ban_recompute_not_in_allowlist",
    "ban_if_reduction": "ban_recompute_reductions",
}
# The first three are for what is cheap alone, if perhaps not where it is needed.
_CHEAP = tuple(_BANS)[:3]
_ALL_CHEAP = tuple(_BANS)[:4]


@dataclass(frozen=True)
class Knapsack:
    """What a solver was asked, in the unit of the budget, and the items it saved."""

    solver: str
    budget: float
    memory: list[float]
    runtimes: list[float]
    saved: list[int]

    @property
    def weight(self) -> float:
        return math.fsum(self.memory[i] for i in self.saved)

    @property
    def value(self) -> float:
        return math.fsum(self.runtimes[i] for i in self.saved)

    @functools.cached_property
    def upper_bound(self) -> float:
        """No set within the budget is worth more: proven by the exact solver."""
        return solve_knapsack(self.memory, self.runtimes, self.budget).upper_bound


@dataclass(frozen=True)
class ChosenPlan:
    """What to save for the backward, and how that was decided.

    Args:
        saved_values: the nodes to save, inputs among them.
        budget: the budget asked for.
        decided_by: "budget 0", "min cut" or "knapsack".
        activation_bytes: what the saved values weigh beyond inputs and views of them.
        limits: the bytes that budgets 0 and 1 stand for, inputs included; None where
            the plan was found without them.
        knapsack: what was solved, None where no solver was asked.
        items: the node of each item of the knapsack.
    """

    saved_values: list[fx.Node]
    budget: float
    decided_by: str
    activation_bytes: int
    limits: Optional[tuple[int, int]] = None
    knapsack: Optional[Knapsack] = None
    items: Sequence[fx.Node] = ()


def choose_plan(
    joint_graph: fx.Graph, node_info: NodeInfo, memory_budget: float
) -> ChosenPlan:
    """What to save under ``memory_budget``, with a warning where it weighs more.

    Every node's ``dist_from_bw`` must be set.  Makes at most four min cuts, and 32 more
    where the budget's curve is plotted.

    Raises RuntimeError for a budget outside [0, 1], and for a solver or an estimator in
    the config that is unknown, whether this graph needs them or not.
    """
    check_budget_options(memory_budget)
    graph = _Graph(joint_graph, node_info)
    weigh = functools.partial(activation_bytes, node_info.inputs)
    if memory_budget == 0 and (least := graph.least()) is not None:
        return ChosenPlan(least, memory_budget, "budget 0", weigh(least))
    fastest, _ = graph.cut()
    plan = ChosenPlan(fastest, memory_budget, "min cut", weigh(fastest))
    if memory_budget == 1:
        return plan
    limits = Range(_nbytes(node_info.inputs), _nbytes(fastest))
    plan = replace(plan, limits=limits)
    whole = limits.high - limits.low
    if whole <= 0:
        return plan
    plan = graph.within(limits, plan)
    plan = replace(plan, activation_bytes=weigh(plan.saved_values))
    if plan.activation_bytes > memory_budget * whole * (1 + _TOLERANCE):
        log.warning(
            "%s saves %d bytes of activations (a budget of %.4g), more than the %d that "
            "its budget of %.4g allows; a lower one saves less",
            get_aot_graph_name(),
            plan.activation_bytes,
            plan.activation_bytes / whole,
            int(memory_budget * whole),
            memory_budget,
        )
    return plan


def cheapest_cut(
    joint_graph: fx.Graph, node_info: NodeInfo
) -> tuple[list[fx.Node], OrderedSet[fx.Node]]:
    """What a min cut saves that recomputes all that is cheap, and what is not cheap."""
    return _Graph(joint_graph, node_info).cut(_ALL_CHEAP)


def _nbytes(nodes: Iterable[fx.Node]) -> int:
    from torch._functorch.partitioners import _size_of

    return sum(map(_size_of, nodes))


@dataclass(frozen=True)
class _Graph:
    """A joint graph, and the cuts of it."""

    joint: fx.Graph
    info: NodeInfo

    def cut(
        self,
        allowed: Sequence[str] = (),
        dont_ban: Optional[OrderedSet[fx.Node]] = None,
    ) -> tuple[list[fx.Node], OrderedSet[fx.Node]]:
        """The values that a min cut saves, and the nodes that it would not recompute.

        Without ``allowed``, bans of the config that do not hold, it runs fastest.
        """
        from torch._functorch.partitioners import MinCutOptions, solve_min_cut

        if config.aggressive_recomputation:
            allowed = _ALL_CHEAP
        bans = {
            ban: getattr(config, option) and ban not in allowed
            for ban, option in _BANS.items()
        }
        return solve_min_cut(self.joint, self.info, MinCutOptions(**bans), dont_ban)

    def least(self) -> Optional[list[fx.Node]]:
        """What budget 0 saves; None where it is to be planned like any other budget."""
        again = recomputable_nodes(self.joint)
        if again is not None:
            return self.cut((), again)[0]
        # The backward can compute nothing from an input that was overwritten by then.
        overwritten = "aot_runtime_epilogue_input_mutation"
        if any(node.meta.get(overwritten, False) for node in self.info.inputs):
            return None
        return self.info.inputs

    def within(self, limits: Range, fastest: ChosenPlan) -> ChosenPlan:
        """The plan of a budget between 0 and 1; the module's docstring has the steps."""
        more, _ = self.cut(_CHEAP)
        if limits.budget(_nbytes(more)) < fastest.budget:
            return replace(fastest, saved_values=more)
        most, banned = self.cut(_ALL_CHEAP)
        items = self.items(banned)
        if limits.budget(_nbytes(most)) < fastest.budget or not items:
            return replace(fastest, saved_values=most)

        @functools.cache
        def cut(recomputed: tuple[int, ...]) -> list[fx.Node]:
            return self.cut(_ALL_CHEAP, OrderedSet(items[i] for i in recomputed))[0]

        ask = functools.partial(ask_solver, self, items)
        memory = [limits.size(_nbytes([node])) for node in items]
        runtimes = [rerun_cost(node) for node in items]
        with no_dispatch():
            _, saved, recomputed = ask(memory, runtimes, fastest.budget)
        name: Any = config.activation_memory_budget_solver
        name = name if isinstance(name, str) else type(name).__name__
        solved = Knapsack(name, fastest.budget, memory, runtimes, list(saved))
        cheap = (_nbytes(more), _nbytes(most))
        plan = replace(
            fastest,
            saved_values=cut(tuple(sorted(recomputed))),
            decided_by="knapsack",
            knapsack=solved,
            items=items,
        )
        if config.visualize_memory_budget_pareto:
            # The knee search is shown by the curve that it searches.
            solver = {**KNAPSACK_SOLVERS, _KNEE: exact_knapsack}.get(name, ask)
            points = budget_curve(
                solved, solver, lambda items: _nbytes(cut(items)), limits, cheap
            )
            write_budget_curve(solved, points)
        self.trace(plan, solved, limits, cheap, recomputed)
        return plan

    def items(self, banned: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes that a solver decides about, largest first.

        They reach the backward, share no memory with an input, and may run again.
        """
        from torch._functorch.partitioners import _size_of, is_non_builtin_to_include
        from torch._inductor.fx_utils import get_node_storage

        inputs = {get_node_storage(node) for node in self.info.inputs}
        items = [
            node
            for node in banned
            if node.dist_from_bw < NEVER  # type: ignore[attr-defined]
            and (
                get_node_storage(node) not in inputs or is_non_builtin_to_include(node)
            )
            and not must_run_once(node)
        ]
        return sorted(items, key=_size_of, reverse=True)

    def trace(
        self,
        plan: ChosenPlan,
        solved: Knapsack,
        limits: Range,
        cheap: tuple[int, int],
        recomputed: Sequence[int],
    ) -> None:
        """Emit the artifact for tlparse, where config.debug_partitioner asks for it."""
        from torch._functorch.partitioners import AOT_PARTITIONER_DEBUG

        if not AOT_PARTITIONER_DEBUG:
            return
        told: dict[str, Any] = {
            "joint_graph": self.joint,
            "all_recomputable_banned_nodes": plan.items,
            "saved_node_idxs": solved.saved,
            "recomputable_node_idxs": recomputed,
            "expected_runtime": solved.value,
            "memories_banned_nodes": [_nbytes([node]) for node in plan.items],
            "normalized_memories_banned_nodes": solved.memory,
            "runtimes_banned_nodes": solved.runtimes,
            "min_cut_saved_values": plan.saved_values,
            "memory_budget": plan.budget,
            "min_act_size": limits.low / 1e9,
            "max_act_size": limits.high / 1e9,
            "saved_values_act_size": _nbytes(plan.saved_values) / 1e9,
            "more_aggressive_saved_values_mem_ratio": limits.budget(cheap[0]),
            "aggressive_recomputation_saved_values_mem_ratio": limits.budget(cheap[1]),
        }
        # Before 2.13 it takes the first nine of these.
        taken = inspect.signature(create_structured_trace_for_min_cut_info).parameters
        create_structured_trace_for_min_cut_info(**{name: told[name] for name in taken})


def ask_solver(
    graph: _Graph,
    items: list[fx.Node],
    memory: list[float],
    runtimes: list[float],
    budget: float,
) -> tuple[float, list[int], list[int]]:
    """The answer of the solver that the config names; see :mod:`.knapsack`.

    One of the user's own is called as ``CustomKnapsackSolver`` documents it, with the
    runtimes as well where it has a parameter of that name.  Its two lists have to name
    every item once.  It may have reasons to save more than the budget, but not without
    a warning.  Raises TypeError or ValueError for any other answer.
    """
    solver: Any = config.activation_memory_budget_solver
    if isinstance(solver, str):
        if solver == _KNEE:
            solver, budget = "exact", knee_budget(memory, runtimes, budget)
        return KNAPSACK_SOLVERS[solver](memory, runtimes, budget)
    more = {"runtimes": runtimes} if _takes_runtimes(solver) else {}
    answer = solver(memory, graph.joint, budget, graph.info, items, **more)
    name = getattr(solver, "__qualname__", type(solver).__qualname__)
    saved, recomputable = _checked(answer, len(items), name)
    weight = math.fsum(memory[i] for i in saved)
    if weight > budget * (1 + _SUM_SLACK):
        log.warning(
            "%s saves %.6g of the activations, more than the budget of %.6g",
            name,
            weight,
            budget,
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


def check_budget_options(memory_budget: float) -> None:
    """Refuse a budget outside [0, 1], and a solver or an estimator that is unknown.

    Raises RuntimeError with the value and with what would be valid.
    """
    try:
        valid = 0 <= memory_budget <= 1
    except TypeError:
        valid = False
    if not valid:
        raise RuntimeError(
            f"The activation memory budget is {memory_budget!r}; it has to be a number "
            "from 0 (save the inputs only) to 1 (save what runs fastest)"
        )
    for option, known, custom in (
        ("solver", (*KNAPSACK_SOLVERS, _KNEE), CustomKnapsackSolver),
        ("runtime_estimator", (*RUNTIME_UNITS,), CustomRuntimeEstimator),
    ):
        option = f"activation_memory_budget_{option}"
        choice = getattr(config, option)
        if choice in known or (custom is not None and isinstance(choice, custom)):
            continue
        names = ", ".join(known)
        if custom is not None:
            names += f", an instance of {custom.__module__}.{custom.__name__}"
        raise RuntimeError(f"Unknown {option} {choice!r}: known are {names}")


def activation_bytes(inputs: Iterable[fx.Node], saved: Iterable[fx.Node]) -> int:
    """Bytes that are live because of ``saved``: storages, whole, without the inputs'."""
    from torch._inductor.fx_utils import get_node_storage

    there = {get_node_storage(node) for node in inputs} | {None}
    kept = {get_node_storage(node): node.meta["val"] for node in saved}
    return sum(
        concrete(value.untyped_storage().nbytes())
        for storage, value in kept.items()
        if storage not in there
    )
