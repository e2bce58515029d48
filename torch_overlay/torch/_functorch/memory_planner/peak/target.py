"""A budget that bounds the peak, not what is saved.

With ``config.activation_memory_budget_target = "peak"`` a budget b asks for at most

    floor + b * (peak at budget 1 - floor)

where the floor is the lowest peak that was found, and what is then recomputed costs as
little as was found.  ``config.activation_memory_peak_bytes`` asks for a number of bytes.
Where inductor compiles the graphs, peaks are estimates, so a plan has to be below what is
allowed by ``config.activation_memory_peak_margin``, and the floor is as much above that
found.

``config.activation_memory_graph_calls`` calls of the graph keep what they save at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional, TYPE_CHECKING

from ..decision import Decision, Peak

from .curve import Choice, Curve, Held, Moments
from .menu import Menu, menu_of
from .plan_search import compare_with_no_checkpoints, plans_of


if TYPE_CHECKING:
    from ..graph.joint import Planner

__all__ = ["CALLS", "PeakBytes"]

# A graph by itself is a step of one call.
CALLS = {0: (1,)}


@dataclass(frozen=True)
class PeakBytes:
    """A request for a peak: a share of those that can be reached, or ``limit`` bytes.

    ``calls`` of the graph keep what they save at once, and by the share ``margin``, an
    estimate for inductor's kernels may be too low.
    """

    budget: float
    limit: Optional[int] = None
    calls: int = 1
    margin: float = 0.0

    def decide(self, graph: Planner) -> Decision:
        """The cheapest plan that is sure to be below the peak.

        Warns where the lowest found is above the limit.  Raises as :func:`.graph.liveness.read`
        does.
        """
        menu = self.menu(graph)
        curve = self.curve(graph, menu)
        decision = self.decision(graph, curve, curve.within(self.allowed(curve)))
        if decision.peak is not None:
            decision.peak.warn_if_over()
        return decision

    def menu(self, graph: Planner) -> Menu:
        """The plans of a graph, for any number of budgets; the first is budget 1's."""
        plans = plans_of(graph, self.calls)
        if self.limit is not None or self.budget < 1:
            compare_with_no_checkpoints(graph, plans)
        return menu_of(graph, plans, keeps_fastest=True)

    def curve(self, graph: Planner, menu: Menu) -> Curve:
        """Those of the menu that no other beats in both peak and cost."""
        margin = self.margin * graph.fused
        return Curve({0: menu}, CALLS, self.moments(menu), margin)

    def moments(self, menu: Menu) -> Moments:
        """Those of a step of one call, beside others that wait for their backward."""
        waiting = [Held(0, 0, "kept", self.calls - 1)] if self.calls > 1 else []
        return {
            frozenset([*waiting, Held(0, 0, "forward")]): 0,
            frozenset([*waiting, Held(0, 0, "backward")]): menu.model.held_by_caller,
        }

    def allowed(self, curve: Curve) -> int:
        """The bytes that are allowed of what these plans can reach."""
        return curve.allowed(self.budget) if self.limit is None else self.limit

    def decision(self, graph: Planner, curve: Curve, plan: Choice) -> Decision:
        """What one of the plans means for the graph."""
        menu = curve.graphs[0]
        if graph.fused and plan.choices == curve.unbudgeted.choices:
            # Kernels also depend on the nodes that keep a storage, operators do not.
            saved = graph.fastest()
        else:
            saved = menu.saved_values(plan.only)
        peaks = plan.peak, curve.floor, curve.unbudgeted.peak
        peak = Peak(self.allowed(curve), *peaks, graph.fused)
        return replace(graph.saving(saved, self.budget, "peak"), peak=peak)
