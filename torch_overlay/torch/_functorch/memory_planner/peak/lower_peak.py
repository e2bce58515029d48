"""Prefers plans with lower peaks among those that a budget of saved bytes allows.

Plans that save and recompute about as much can differ widely in their peaks.  If much
is recomputed at once, the peak may even exceed that without a budget.  So a plan for
the target "saved" must not have a higher peak than budget 1's or than upstream's plan
for the same budget, if another plan within the budget avoids that.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

from ..graph.inputs_outputs import live_bytes_model
from ..solver import NOISE
from .plan_search import recompute_costs, search_plans
from .plans import Plans


if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..decision import Decision
    from ..graph.joint import BudgetedGraph

log = logging.getLogger(__name__)

# The share by which the peak may exceed that of budget 1 without a warning.
_TOLERANCE = 0.01
# How many of the values that upstream's plan saves may be left out: the largest.
_TRIED = 64


def lowered_if_too_high(graph: BudgetedGraph, plan: Decision, allowed: int) -> Decision:
    """``plan``, or one with a lower peak that keeps at most ``allowed`` bytes.

    Warns if the result's peak is still above that of budget 1.  Raises CannotPlan as
    :func:`.graph.reading.read_joint` does.
    """
    model = live_bytes_model(graph)
    calls = graph.ask.graph_calls or 1
    fastest, upstreams = graph.saved_at_budget_1(), graph.upstreams_choice(plan.budget)
    own, *others = (
        frozenset(model.storages(saved))
        for saved in (plan.saved_values, fastest, upstreams)
    )
    # Budget 0 allows no other plan.
    costs = recompute_costs(model, graph) if plan.budget else ()
    plans = Plans(model, costs, calls)
    plans.evaluate((own, *others))
    chosen, peaks = own, [plans.peaks[each] for each in others]
    if plan.budget and plans.peaks[own] > min(peaks):
        search_plans(plans, graph)
        plans.evaluate(_with_less(graph, plans, others[-1], allowed))
        for better in _better_plans(plans, own, min(peaks)):
            storages = plans.evaluations[better].saved
            if model.nbytes_of(storages) > allowed:
                continue
            is_upstreams = better == others[-1]
            saved = upstreams if is_upstreams else model.saved_values(storages)
            found = graph.decision_saving(saved, plan.budget, "lower peak")
            if found.activation_bytes <= allowed:
                chosen, plan = better, found
                break
    if plans.peaks[chosen] > peaks[0] * (1 + _TOLERANCE):
        log.warning(
            "%s needs %d bytes at its peak under activation memory budget %g, more "
            "than the %d without one (both without parameters and inputs)%s, as it "
            "recomputes much at once; the target 'peak' bounds the peak",
            get_aot_graph_name(),
            plans.peaks[chosen],
            plan.budget,
            peaks[0],
            ", by estimates" * graph.fused,
        )
    return plan


def _with_less(
    graph: BudgetedGraph, plans: Plans, chosen: frozenset[int], allowed: int
) -> list[frozenset[int]]:
    """What to save if a plan keeps too many bytes: all but one value, or all but a few.

    The one is the cheapest to repeat of those that are large enough by themselves.  The
    few are the cheapest per byte.
    """
    model = plans.graph
    base = frozenset(plans.evaluate([chosen])[chosen].saved)
    over = graph.kept_bytes(model.saved_values({*base})) - allowed
    if over <= 0:
        return []
    largest = sorted(base, key=lambda s: (-model.nbytes[s], s))[:_TRIED]
    without = plans.evaluate([base - {s} for s in largest])
    # What must run only once is saved in any case.
    may_go = [s for s in largest if s not in without[base - {s}].saved]
    least = plans.costs[chosen]
    cost = {s: plans.costs[base - {s}] - least for s in may_go}
    enough = [s for s in may_go if model.nbytes[s] >= over]
    found = [base - {min(enough, key=cost.__getitem__)}] if enough else []
    kept = set(base)
    for s in sorted(may_go, key=lambda s: (cost[s] / max(model.nbytes[s], 1), s)):
        if over > 0:
            kept.discard(s)
            over -= model.nbytes[s]
    return [*found, frozenset(kept)]


def _better_plans(
    plans: Plans, plan: frozenset[int], ceiling: int
) -> Iterator[frozenset[int]]:
    """The plans preferable to ``plan``, best first; ``ceiling`` is a peak in bytes.

    First come those that recompute no more, up to noise, ordered by peak; then those
    that recompute more, by cost; last those whose peak is above ``ceiling``, by peak.
    """
    as_fast = plans.costs[plan] * (1 + NOISE)

    def rank(each: frozenset[int]) -> tuple[float, ...]:
        peak, cost = plans.peaks[each], plans.costs[each]
        if peak > ceiling:
            return 2, peak, cost
        return (0, peak, cost) if cost <= as_fast else (1, cost, peak)

    for each in sorted(plans.peaks, key=rank):
        if rank(each) >= rank(plan):
            break
        yield each
