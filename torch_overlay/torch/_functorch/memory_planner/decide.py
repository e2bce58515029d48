"""Decides what the forward of a joint graph saves for its backward.

:func:`decide` is all that the partitioner calls.  The decision is made by a
:class:`Request`: :class:`.SavedBytes`, :class:`.PeakBytes`, or one for the plan of a
training step.  Whoever calls the partitioner may pass a request; otherwise the config,
read as an :class:`.Ask`, determines it.
"""

from __future__ import annotations

import logging
from typing import Optional, Protocol, TYPE_CHECKING

from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

from .ask import Ask, check_budget
from .graph.joint import BudgetedGraph
from .saved.saved_bytes import SavedBytes
from .solver import WrongAnswer


if TYPE_CHECKING:
    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo
    from .decision import Decision

log = logging.getLogger(__name__)


class Request(Protocol):
    """Something that decides what a graph saves."""

    def decide(self, graph: BudgetedGraph) -> Decision: ...


def decide(
    joint_graph: fx.Graph,
    node_info: NodeInfo,
    num_fwd_outputs: int,
    budget: float,
    request: Optional[Request] = None,
    fused: bool = False,
) -> Decision:
    """Decide what the forward of a joint graph saves for its backward.

    Args:
        joint_graph: the graph to be split; every node's ``dist_from_bw`` must be set.
        node_info: the partitioner's classification of its nodes.
        num_fwd_outputs: how many of its outputs, the first ones, are the forward's.
        budget: the config's, or that of a region of the model with its own.
        request: what makes the decision, by default what the config asks for.
        fused: whether inductor will compile the operators into kernels.

    Without a ``request``, if no plan can be made, a warning says why, and the graph
    gets upstream's plan for ``budget``.  Raises RuntimeError for an invalid option or
    ``budget``, WrongAnswer for an invalid answer of a custom solver, and whatever a
    given request raises.
    """
    check_budget(budget)
    graph = BudgetedGraph(joint_graph, node_info, num_fwd_outputs, budget, fused)
    return decide_by_config(graph) if request is None else request.decide(graph)


def decide_by_config(graph: BudgetedGraph) -> Decision:
    """The decision that the config asks for, or the fallback of :func:`decide`."""
    request = request_of_config(graph.ask, graph.budget)
    try:
        return request.decide(graph)
    except WrongAnswer:
        raise
    except Exception as error:
        log.debug("no plan for %s", request, exc_info=error)
        decision = graph.upstreams_decision()
        log.warning(
            "%s gets upstream's plan, which bounds upstream's own estimate of saved "
            "bytes at budget %g; %s cannot be planned: %s: %s",
            get_aot_graph_name(),
            decision.budget,
            request,
            type(error).__name__,
            error,
        )
        return decision


def request_of_config(ask: Ask, budget: float) -> Request:
    """What the config asks for, of a graph that has this budget."""
    if ask.peak_bytes is None and (ask.target == "saved" or budget == 1):
        return SavedBytes(budget)
    # A separate patch brings this module.
    from .peak.peak_bytes import PeakBytes

    return PeakBytes(budget, ask.peak_bytes, ask.graph_calls or 1, ask.peak_margin)
