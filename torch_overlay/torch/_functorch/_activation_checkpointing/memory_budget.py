"""What the partitioner saves for the backward under an activation memory budget.

With a budget b, the forward leaves at most

    low + b * (high - low)

bytes alive for the backward: storages, whole, without parameters and inputs.  ``high``
is what the plan of budget 1 keeps, which runs fastest, and ``low`` what that of budget 0
keeps: what must not be computed twice, nothing in most graphs.  (Upstream means sums of
sizes, in which views count again, and lets a plan that saves fewer of the inputs save
other values for them.)  In between, :func:`decide` takes the first of these that is
within the budget:

1.  a min cut that recomputes more, and one that recomputes all that is cheap;
2.  a knapsack.  What even the second cut does not recompute are its *items*, each with
    its bytes and the runtime of computing it again.  A solver picks those to save.  One more min cut may recompute the others, and save other
    values in their place: where those are more bytes than allowed, or more has to run
    again, nothing but the solver's items is saved.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from dataclasses import dataclass, replace
from typing import Any, Callable, NamedTuple, Optional, TYPE_CHECKING

from torch._functorch import config
from torch._functorch._activation_checkpointing.ac_logging_utils import (
    create_structured_trace_for_min_cut_info,
)
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch.utils._ordered_set import OrderedSet

from .budget_curve import budget_curve, write_budget_curve
from .budget_options import KNEE
from .budget_solver import ask_solver, Items, Knapsack, lightest, Range
from .decision import Decision
from .liveness import CannotPlan, Program, read
from .random_ops import is_overwritten, must_run_once, NEVER, recomputable_nodes
from .rerun_cost import concrete, rerun_cost


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo

log = logging.getLogger(__name__)

__all__ = ["Planner", "activation_bytes", "decide"]

# How often a solver is asked for less where a plan turns out to keep too much.
_TRIES = 4

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


class _Item(NamedTuple):
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


def decide(graph: Planner, budget: float) -> Decision:
    """What to save under a budget; the module's docstring has what it means.

    Makes at most four min cuts, and 32 more where the budget's curve is plotted.  Warns
    where a plan keeps more than it may: one that a custom solver insists on.

    Raises CannotPlan where the graph has no model, and what a custom solver raises.
    """
    if budget == 0:
        least = graph.least()
        return Decision(least, budget, "budget 0", graph.kept_bytes(least))
    fastest = graph.fastest()
    kept = graph.kept_bytes(fastest)
    plan = Decision(fastest, budget, "min cut", kept)
    if budget == 1:
        return plan
    limits = Range(graph.kept_bytes(graph.least()), kept)
    plan = replace(plan, limits=limits)
    if limits.high <= limits.low:
        return plan
    plan = graph.within(limits, plan)
    allowed = limits.allowed(budget)
    if plan.activation_bytes > allowed:
        log.warning(
            "%s saves %d bytes of activations (budget %.4g), over the %d that budget "
            "%.4g allows",
            get_aot_graph_name(),
            plan.activation_bytes,
            limits.budget(plan.activation_bytes),
            allowed,
            budget,
        )
    return plan


@dataclass(frozen=True)
class Planner:
    """A joint graph that is to be split, and the plans for it.

    ``budget`` is the config's or the region's; ``fused`` tells that inductor is going to
    make kernels of the graph's operators.
    """

    joint: fx.Graph
    info: NodeInfo
    num_fwd_outputs: int
    budget: float
    fused: bool = False

    @functools.cached_property
    def model(self) -> Program:
        """What each plan keeps and repeats."""
        return read(self.joint, self.info, self.num_fwd_outputs)

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

    def fastest(self) -> list[fx.Node]:
        """What budget 1 saves."""
        return self.cut()[0]

    def cheapest_cut(self) -> tuple[list[fx.Node], OrderedSet[fx.Node]]:
        """What a cut saves that recomputes all that is cheap, and what is not cheap."""
        return self.cut(_ALL_CHEAP)

    def upstream(self) -> Decision:
        """The plan that the partitioner would make without the modules here."""
        from torch._functorch.partitioners import choose_saved_values_set

        saved = choose_saved_values_set(self.joint, self.info, self.budget)
        return Decision(saved, self.budget, "upstream", self.kept_bytes(saved))

    def kept_bytes(self, saved: Iterable[fx.Node]) -> int:
        return activation_bytes(self.info.inputs, saved)

    def least(self) -> list[fx.Node]:
        """What budget 0 saves: the inputs, and what must not be computed twice."""
        again = recomputable_nodes(self.joint)
        # The backward can compute nothing from an input that was overwritten by then.
        if again is None and not any(map(is_overwritten, self.info.inputs)):
            return self.info.inputs
        cut, _ = self.cut((), again)
        fewest = self.model.saved_values(self.model.evaluate(()).saved)
        return min(cut, fewest, key=self.kept_bytes)

    def within(self, limits: Range, fastest: Decision) -> Decision:
        """The plan of a budget between 0 and 1; the module's docstring has the steps."""
        cheap = []
        for bans in (_CHEAP, _ALL_CHEAP):
            most, banned = self.cut(bans)
            cheap.append(self.kept_bytes(most))
            plan = replace(fastest, saved_values=most, activation_bytes=cheap[-1])
            if cheap[-1] <= limits.allowed(plan.budget):
                return plan
        items = self.items(most, banned)
        if not items:
            least = self.least()
            kept = self.kept_bytes(least)
            return replace(plan, saved_values=least, activation_bytes=kept)
        solver = _Settled(self, items, limits)
        knapsack, values, kept = solver.solve(plan.budget)
        plan = replace(
            plan,
            saved_values=values,
            decided_by="knapsack",
            activation_bytes=kept,
            knapsack=knapsack,
            items=solver.posed.nodes,
        )
        if config.visualize_memory_budget_pareto:
            points = budget_curve(solver.posed, plan.budget, solver.kept, cheap)
            write_budget_curve(knapsack, points)
        _trace(self.joint, plan, solver.posed, cheap)
        return plan

    def cheapest(
        self,
        cut: list[fx.Node],
        items: Sequence[_Item],
        saved_items: Sequence[int],
        allowed: int,
    ) -> tuple[list[fx.Node], int]:
        """What the cut saves, or the items alone, and how many bytes that keeps.

        The cut's values where they are within what is allowed and no more runs again.
        """
        kept, model = self.kept_bytes(cut), self.model
        alone = (s for i in saved_items for s in items[i].storages)
        plans = [model.storages(cut), {*alone}]
        saved = model.saved_by(plans)
        needed, repeated = model.follow(saved, 3)
        storages = {s for s, by in enumerate(saved) if by & needed[s] & 2}
        values = model.saved_values(storages)
        runs = dict(zip(model.nodes, repeated))
        runtimes = [
            math.fsum(
                runtime
                for item in items
                for node, runtime in item.ops.items()
                if runs.get(node, 0) & plan
            )
            for plan in (1, 2)
        ]
        kept_alone = self.kept_bytes(values)
        if kept <= allowed and (runtimes[0] <= runtimes[1] or kept_alone > allowed):
            return cut, kept
        return min(
            (values, kept_alone), (cut, kept), key=lambda plan: plan[1] > allowed
        )

    def items(self, most: list[fx.Node], banned: Iterable[fx.Node]) -> list[_Item]:
        """What a solver decides about, largest first.

        The nodes reach the backward, share no memory with an input, and may run again.
        """
        from torch._functorch.partitioners import is_non_builtin_to_include
        from torch._inductor.fx_utils import get_node_storage

        # A size has none, as the pair of results of an operator has none.
        inputs = {get_node_storage(node) for node in self.info.inputs} - {None}
        items = []
        for node in banned:
            if (
                node.dist_from_bw < NEVER  # type: ignore[attr-defined]
                and (
                    get_node_storage(node) not in inputs
                    or is_non_builtin_to_include(node)
                )
                and not must_run_once(node)
            ):
                storages = self.model.saveable([node])
                nbytes = self.model.size(storages)
                ops = {node: rerun_cost(node)}
                items.append(_Item(node, ops, frozenset(storages), nbytes))
        # A solver of the user's own knows the nodes.
        if isinstance(config.activation_memory_budget_solver, str):
            items = self.joined(items, most)
        return sorted(items, key=lambda item: item.nbytes, reverse=True)

    def joined(self, items: list[_Item], most: list[fx.Node]) -> list[_Item]:
        """The items, with those in one that something smaller can be kept for.

        That is the sum of several products, say.  ``most`` is what to save so that no
        item runs again, and the items that run if a value of it is left out are those
        that the value is kept for.  O(operators + edges), on a bit for each value.
        """
        model = self.model
        values = sorted(s for s in model.saveable(most) if model.producer[s] >= 0)
        everyone = (1 << len(values)) - 1
        saved = [everyone * by for by in model.saved_by([values])]
        for value, s in enumerate(values):
            saved[s] ^= 1 << value
        try:
            _, repeated = model.follow(saved, everyone)
        except CannotPlan:
            return items
        runs = dict(zip(model.nodes, repeated))
        # Values that an item needs both of belong together.
        groups: list[tuple[int, list[_Item]]] = []
        left = []
        for item in items:
            mask, group = runs.get(item.node, 0), [item]
            if not mask:
                left.append(item)
                continue
            for other in [other for other in groups if other[0] & mask]:
                groups.remove(other)
                mask |= other[0]
                group = other[1] + group
            groups.append((mask, group))
        for mask, group in groups:
            kept = [s for value, s in enumerate(values) if mask >> value & 1]
            nbytes = model.size(kept)
            if nbytes > min(item.nbytes for item in group) or (
                len(group) == 1 and nbytes == group[0].nbytes
            ):
                left += group
                continue
            largest = max(kept, key=model.nbytes.__getitem__)
            node = model.saved_as[largest] or group[0].node
            ops = {op: runtime for item in group for op, runtime in item.ops.items()}
            left.append(_Item(node, ops, frozenset(kept), nbytes))
        return left


@dataclass(frozen=True)
class _Settled:
    """What to save in the end, once a solver has chosen among the items."""

    graph: Planner
    items: Sequence[_Item]
    limits: Range

    @functools.cached_property
    def posed(self) -> Items:
        return Items(
            self.graph.joint,
            self.graph.info,
            self.limits,
            [item.node for item in self.items],
            [item.nbytes for item in self.items],
            [item.runtime for item in self.items],
        )

    @functools.cached_property
    def _cut(self) -> Callable[[tuple[fx.Node, ...]], list[fx.Node]]:
        """What the min cut saves that may recompute some nodes; each set is cut once."""
        return functools.cache(
            lambda again: self.graph.cut(_ALL_CHEAP, OrderedSet(again))[0]
        )

    def solve(self, budget: float) -> tuple[Knapsack, list[fx.Node], int]:
        """Ask the solver, for less where the plan turns out to keep too much."""
        # What must not run twice may be kept in more bytes than budget 0 needs for it.
        over = 0
        is_custom = not isinstance(config.activation_memory_budget_solver, str)
        for _ in range(_TRIES):
            capacity = max(self.limits.capacity(budget) - over, 0)
            saved = ask_solver(self.posed, capacity)
            knapsack, values, kept = self.settle(budget, saved)
            excess = kept - self.limits.allowed(budget)
            if excess <= 0 or is_custom:
                return knapsack, values, kept
            over += excess
        least = self.graph.least()
        return knapsack, least, self.graph.kept_bytes(least)

    def settle(
        self, budget: float, saved: list[int]
    ) -> tuple[Knapsack, list[fx.Node], int]:
        """The items that are saved, the values to save for them, and what they keep."""
        memory, runtimes = self.posed.memory, self.posed.runtimes
        name: Any = config.activation_memory_budget_solver
        name = name if isinstance(name, str) else type(name).__name__
        if name in ("exact", KNEE):
            saved = lightest(memory, runtimes, saved)
        again = [i for i in range(len(memory)) if i not in {*saved}]
        values = self._cut(tuple(node for i in again for node in self.items[i].ops))
        allowed = self.limits.allowed(budget)
        values, kept = self.graph.cheapest(values, self.items, saved, allowed)
        capacity = self.limits.capacity(budget)
        knapsack = Knapsack(name, budget, capacity, memory, runtimes, saved)
        return knapsack, values, kept

    def kept(self, budget: float, saved: list[int]) -> tuple[int, list[int]]:
        """The bytes and the items that a solver's answer keeps in the end."""
        knapsack, _, kept = self.settle(budget, saved)
        return kept, knapsack.saved


def _trace(joint: fx.Graph, plan: Decision, posed: Items, cheap: Sequence[int]) -> None:
    """Emit the artifact for tlparse, where config.debug_partitioner asks for it."""
    from torch._functorch.partitioners import AOT_PARTITIONER_DEBUG

    if not AOT_PARTITIONER_DEBUG or plan.knapsack is None:
        return
    limits, solved = posed.limits, plan.knapsack
    told: dict[str, Any] = {
        "joint_graph": joint,
        "all_recomputable_banned_nodes": posed.nodes,
        "saved_node_idxs": solved.saved,
        "recomputable_node_idxs": sorted({*range(len(posed.nodes))} - {*solved.saved}),
        "expected_runtime": solved.value,
        "memories_banned_nodes": posed.memory,
        "normalized_memories_banned_nodes": list(map(limits.size, posed.memory)),
        "runtimes_banned_nodes": posed.runtimes,
        "min_cut_saved_values": plan.saved_values,
        "memory_budget": plan.budget,
        "min_act_size": limits.low / 1e9,
        "max_act_size": limits.high / 1e9,
        "saved_values_act_size": plan.activation_bytes / 1e9,
        "more_aggressive_saved_values_mem_ratio": limits.budget(cheap[0]),
        "aggressive_recomputation_saved_values_mem_ratio": limits.budget(cheap[1]),
    }
    # Before 2.13 it takes the first nine of these.
    taken = inspect.signature(create_structured_trace_for_min_cut_info).parameters
    create_structured_trace_for_min_cut_info(**{name: told[name] for name in taken})


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
