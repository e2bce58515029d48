"""A request to the partitioner for one of the plans of a step's graph."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Optional, TYPE_CHECKING


if TYPE_CHECKING:
    from ..compile.told import CompiledPeaks
    from ..decision import Decision
    from ..graph.joint import Planner
    from .compiled_graph import CompiledGraph

__all__ = ["PlanRequest"]


class PlanRequest(NamedTuple):
    """A request for a graph's ``plan``, None for the plan of the first call.

    ``compiled`` is told what the partitioned graph returns, and the device that counts.
    """

    graph: CompiledGraph
    plan: Optional[int]
    compiled: CompiledPeaks

    @property
    def has_begun(self) -> bool:
        return self.graph.has_plans

    @property
    def chunks(self) -> int:
        return self.graph.chunks_of(self.plan)

    def begin(self, graph: Planner) -> None:
        device = self.graph.device
        variants = graph.in_chunks.items()
        in_chunks = {n: replace(each, device=device) for n, each in variants}
        self.graph.find_plans(replace(graph, device=device, in_chunks=in_chunks))
        self.compiled.guarded = self.graph.guards_first

    def decide(self, graph: Planner) -> Decision:
        graph = replace(graph, device=self.graph.device)
        self.compiled.num_fwd_outputs = graph.num_fwd_outputs
        self.compiled.device = graph.counted
        return self.graph.decide(graph, self.plan)
