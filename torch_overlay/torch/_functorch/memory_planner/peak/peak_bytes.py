"""A budget that bounds the peak, not what is saved.

With ``config.activation_memory_budget_target = "peak"``, a budget b asks for a peak of
at most

    floor + b * (peak at budget 1 - floor)

where the floor is the lowest peak found.  Of the plans found within that, the one that
recomputes most cheaply is used.  ``config.activation_memory_peak_bytes`` asks for a
number of bytes instead.  If inductor compiles the graphs, peaks are estimates.  Then a
plan has to stay below the allowed peak by ``config.activation_memory_peak_margin``, and
the floor is raised by that margin.

``config.activation_memory_graph_calls`` is how many calls of the graph keep what they
save at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Optional, TYPE_CHECKING

from ..decision import Decision, Peak
from ..graph.symbols import has_symbolic_sizes
from .curve import Choice, Curve, Held, Moments
from .plan_search import (
    compare_with_no_checkpoints,
    menu_of_plans,
    menu_with_chunks,
    searched_plans,
)


if TYPE_CHECKING:
    from collections.abc import Callable

    from ..decision import PeakAt
    from ..graph.joint import BudgetedGraph
    from .menu import Menu


# A graph by itself is a step of one call.
CALLS = {0: (1,)}


@dataclass(frozen=True)
class PeakBytes:
    """A request for a peak.

    Args:
        budget: the share of the range of peaks within reach, from 0 to 1.
        limit: the allowed peak in bytes, which takes the place of ``budget``.
        calls: how many calls of the graph hold their saved values at the same time.
        margin: the share by which estimates for inductor's kernels may be too low.
    """

    budget: float
    limit: Optional[int] = None
    calls: int = 1
    margin: float = 0.0

    def decide(self, graph: BudgetedGraph) -> Decision:
        """Decide for the cheapest plan that is sure to stay within the peak.

        Warns if even the lowest peak found is above the allowed one.  Raises
        CannotPlan as :func:`.graph.reading.read_joint` does.
        """
        menu = self.menu(graph)
        curve = self.curve(graph, menu)
        decision = self.decision(graph, curve, curve.within(self.peak_allowed(curve)))
        if decision.peak is not None:
            decision.peak.warn_if_over(decision.head)
        return decision

    def menu(self, graph: BudgetedGraph) -> Menu:
        """The plans of a graph, for any budget; the first is budget 1's."""

        def menu_for(each: BudgetedGraph) -> Menu:
            plans = searched_plans(each, self.calls)
            if each is graph and (self.limit is not None or self.budget < 1):
                compare_with_no_checkpoints(graph, plans)
            return menu_of_plans(each, plans, keeps_fastest=True)

        return menu_with_chunks(graph, menu_for)

    def curve(self, graph: BudgetedGraph, menu: Menu) -> Curve:
        """The menu's plans that no other beats in both peak and cost."""
        margin = self.margin * graph.fused
        return Curve({0: menu}, CALLS, self.moments(menu), margin)

    def moments(self, menu: Menu) -> Moments:
        """The moments of a one-call step, beside calls that wait for their backward."""
        waiting = [Held(0, 0, "kept", calls=self.calls - 1)] if self.calls > 1 else []
        return {
            frozenset([*waiting, Held(0, 0, "forward")]): 0,
            frozenset([*waiting, Held(0, 0, "backward")]): menu.model.held_by_caller,
        }

    def peak_allowed(self, curve: Curve) -> int:
        """The allowed peak in bytes: the limit, or a share of what plans can reach."""
        return curve.peak_allowed(self.budget) if self.limit is None else self.limit

    def decision(self, graph: BudgetedGraph, curve: Curve, plan: Choice) -> Decision:
        """The decision for the graph to use one of the curve's plans."""
        menu = curve.graphs[0]
        if graph.fused and plan.choices == curve.unbudgeted.choices:
            # Unlike operators, kernels also depend on which nodes keep a storage.
            saved = graph.saved_at_budget_1()
        else:
            saved = menu.saved_values(plan.only)
        peaks = plan.peak, curve.floor, curve.unbudgeted.peak
        peak = Peak(self.peak_allowed(curve), *peaks, graph.fused)
        found = replace(graph.decision_saving(saved, self.budget, "peak"), peak=peak)
        if self.limit is not None and has_symbolic_sizes(graph.joint):
            found = replace(found, peak_at=self._peak_at(graph, menu, plan.only))
        return replace(found, head=menu.head(plan.only))

    def _peak_at(self, graph: BudgetedGraph, menu: Menu, plan: int) -> PeakAt:
        """The peak of a plan at other sizes, corrected by what compiles told of it."""

        def peak_at(as_int: Callable[[Any], int]) -> int:
            sized = menu.at_sizes_of(graph.at_sizes(as_int))
            return self.curve(graph, sized.corrected()).of_plan(plan).peak

        return peak_at
