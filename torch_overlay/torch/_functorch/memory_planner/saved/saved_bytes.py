"""What the partitioner saves for the backward under an activation memory budget.

With a budget b, the forward leaves at most

    low + b * (high - low)

bytes alive for the backward.  Storages count whole, without those of parameters and
inputs.  ``high`` is what the plan of budget 1, the fastest, keeps.  ``low`` is what the
plan of budget 0 keeps: what must not be computed twice, which is nothing in most
graphs.  (Upstream adds up the sizes of nodes instead.  There, views count again, and a
plan that saves fewer of the inputs may save other values in their place.)  In between,
:func:`plan_within` takes the first of these that is within the budget:

1.  a min cut that recomputes more, then one that recomputes all that is cheap;
2.  a knapsack.  Its items (:attr:`.BudgetedGraph.items`) are what even the second cut
    does not recompute, each with its bytes and its runtime.  A solver picks those to
    save (:func:`solve_until_kept`).  One more min cut may
    recompute the others, and save other values in their place.  If those take more
    bytes than allowed, or more has to run again, only the solver's items are saved
    (:func:`plan_of_items`).

If that plan has a high peak, another one within the budget may replace it
(:mod:`.peak.lower_peak`).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any, TYPE_CHECKING

from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

from ..ask import KNEE
from ..decision import Decision, Knapsack
from ..graph.joint import ALL_CHEAP, CHEAP
from ..graph.storages import CannotPlan
from ..solver import ask_solver, lightest_items
from .pareto_plot import plot_budgets


if TYPE_CHECKING:
    from ..graph.joint import BudgetedGraph
    from ..graph.liveness import Evaluation

log = logging.getLogger(__name__)

# The most times that a solver is asked, each time for fewer bytes, while its plan keeps
# too many.
_TRIES = 4


@dataclass(frozen=True)
class SavedBytes:
    """A request to save at most a share of the bytes that can be saved, ``budget``."""

    budget: float

    def decide(self, graph: BudgetedGraph) -> Decision:
        return plan_within(graph, self.budget)


def plan_within(graph: BudgetedGraph, budget: float) -> Decision:
    """What to save under a budget, as the module's docstring describes.

    Takes four min cuts or fewer with the default solver, and some 32 more if all
    budgets are plotted.  Warns if a plan keeps more than allowed because a custom
    solver insists on it.

    Raises CannotPlan if the graph cannot be modeled, WrongAnswer for an invalid answer
    of a custom solver, and whatever that solver raises.
    """
    solver = "exact" if graph.ask.solver == KNEE else graph.ask.solver
    plan = _first_plan_within(graph, budget, solver)
    if plan.knapsack is not None and graph.ask.is_plotted:
        plot_budgets(
            graph.ask, plan, lambda budget: _first_plan_within(graph, budget, solver)
        )
    limits = graph.limits if 0 < budget < 1 else None
    allowed = plan.activation_bytes
    if limits is not None:
        allowed = limits.bytes_allowed(budget)
    if isinstance(solver, str) and budget < 1:
        plan = _with_lower_peak(graph, plan, allowed)
    if limits is not None and plan.activation_bytes > allowed:
        log.warning(
            "%s saves %d bytes of activations (budget %.4g), over the %d that budget "
            "%.4g allows",
            get_aot_graph_name(),
            plan.activation_bytes,
            limits.budget_of_bytes(plan.activation_bytes),
            allowed,
            budget,
        )
    return replace(plan, limits=limits)


def _with_lower_peak(graph: BudgetedGraph, plan: Decision, allowed: int) -> Decision:
    try:
        from ..peak.lower_peak import lowered_if_too_high
    except ModuleNotFoundError:
        # A separate patch brings this module.
        return plan
    try:
        return lowered_if_too_high(graph, plan, allowed)
    except CannotPlan:
        # The plan did not need the graph's model, so it does not need to be replaced.
        log.debug("peaks of %s are not known", get_aot_graph_name(), exc_info=True)
        return plan


def _first_plan_within(graph: BudgetedGraph, budget: float, solver: Any) -> Decision:
    """The first plan within a budget, of those that the module's docstring lists."""
    if budget == 0:
        return graph.decision_saving(graph.saved_at_budget_0(), budget, "budget 0")
    plan = graph.decision_saving(graph.saved_at_budget_1(), budget, "min cut")
    if budget == 1:
        return plan
    limits = graph.limits
    if limits.high <= limits.low:
        return plan
    for bans in (CHEAP, ALL_CHEAP):
        plan = graph.decision_saving(graph.cut(bans)[0], budget, "min cut")
        if plan.activation_bytes <= limits.bytes_allowed(budget):
            return plan
    if graph.items:
        return solve_until_kept(graph, budget, solver)
    return graph.decision_saving(graph.saved_at_budget_0(), budget, "min cut")


def solve_until_kept(graph: BudgetedGraph, budget: float, solver: Any) -> Decision:
    """Ask a solver, and again for fewer bytes while the plan keeps too many.

    If that does not help, the plan of budget 0 is used, unless the solver is custom.
    """
    # A plan may exceed the capacity, as keeping what must not run twice can take more
    # bytes than it does at budget 0.
    over = 0
    for _ in range(_TRIES):
        capacity = max(graph.limits.bytes_beyond_low(budget) - over, 0)
        plan = plan_of_items(graph, budget, solver, ask_solver(solver, graph, capacity))
        excess = plan.activation_bytes - graph.limits.bytes_allowed(budget)
        if excess <= 0 or not isinstance(solver, str):
            return plan
        over += excess
    return graph.decision_saving(graph.saved_at_budget_0(), budget, "budget 0")


def plan_of_items(
    graph: BudgetedGraph, budget: float, solver: Any, saved: list[int]
) -> Decision:
    """What to save, given the items that a solver saves: only these, or a cut's values.

    A cut's values are saved if they are within the budget and either no more of the
    items' runtime has to be repeated, or the items alone are not within the budget.
    """
    items, model = graph.items, graph.model
    memory = [item.nbytes for item in items]
    runtimes = [item.runtime for item in items]
    name = solver if isinstance(solver, str) else type(solver).__name__
    if solver == "exact":
        saved = lightest_items(memory, runtimes, saved)
        # This cut is made anyway, to compare its peak.
        cut = graph.upstreams_choice(budget)
    else:
        again = [item for i, item in enumerate(items) if i not in {*saved}]
        cut, _ = graph.cut(ALL_CHEAP, [node for item in again for node in item.ops])
    alone = {s for i in saved for s in items[i].storages}
    by_cut, by_items = model.evaluate_all([model.storages(cut), alone])

    def runtime(plan: Evaluation) -> float:
        repeats = zip(model.nodes, plan.repeated)
        runs = {node for node, repeated in repeats if repeated & plan.bit}
        ops = (each for item in items for each in item.ops.items())
        return math.fsum(cost for node, cost in ops if node in runs)

    values = model.saved_values(by_items.saved)
    allowed = graph.limits.bytes_allowed(budget)
    fit = [graph.kept_bytes(v) <= allowed for v in (cut, values)]
    if fit[0] and (runtime(by_cut) <= runtime(by_items) or not fit[1]):
        values = cut
    return replace(
        graph.decision_saving(values, budget, "knapsack"),
        knapsack=Knapsack(name, memory, runtimes, saved),
        items=[item.node for item in items],
    )
