"""A request to the partitioner for one of the plans of a step's graph."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Optional, TYPE_CHECKING

from ..compile.recompile import same_nodes_in


if TYPE_CHECKING:
    from ..compile.told import CompiledPeaks
    from ..decision import Decision
    from ..graph.joint import BudgetedGraph
    from .compiled_graph import CompiledGraph


class PlanRequest(NamedTuple):
    """A request for a graph's ``plan``; None asks for the plan of the first call.

    ``compiled`` is told how many values the forward returns, and which device counts.
    """

    graph: CompiledGraph
    plan: Optional[int]
    compiled: CompiledPeaks

    @property
    def has_begun(self) -> bool:
        return self.graph.has_plans

    @property
    def chosen(self) -> int:
        """The plan, once the graph has plans."""
        return self.graph.first if self.plan is None else self.plan

    @property
    def chunks(self) -> int:
        return self.graph.plans.plans[self.chosen].chunks if self.has_begun else 1

    def begin(self, graph: BudgetedGraph) -> None:
        """Make the graph's plans, when the first one is requested."""
        device = self.graph.device
        variants = graph.in_chunks.items()
        in_chunks = {n: replace(each, device=device) for n, each in variants}
        self.graph.find_plans(replace(graph, device=device, in_chunks=in_chunks))
        self.compiled.guarded = self.graph.first in self.graph.graph.guarded

    def decide(self, graph: BudgetedGraph) -> Decision:
        """What to save by the plan.  Raises CannotPlan if the graph has no model."""
        if not self.has_begun:
            self.begin(graph)
        graph = replace(graph, device=self.graph.device)
        self.compiled.num_fwd_outputs = graph.num_fwd_outputs
        self.compiled.device = graph.counted_device
        plans = self.graph.plans
        saved = same_nodes_in(plans.saved_values(self.chosen), graph.joint)
        decision = graph.decision_saving(saved, graph.budget, "step")
        return replace(decision, head=plans.head(self.chosen))
