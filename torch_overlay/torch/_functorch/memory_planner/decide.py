"""Decides what the forward of a joint graph saves for its backward.

:func:`decide` is all that the partitioner calls.  A :class:`Request` says what is asked
for: :class:`.SavedBytes`, :class:`.PeakBytes`, or a plan of a training step.  Whoever
has the graph partitioned may pass one; otherwise the config, read as an :class:`.Ask`,
determines it.
"""

from __future__ import annotations

import logging
from typing import Optional, Protocol, TYPE_CHECKING

from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

from .ask import Ask, check_budget
from .graph.joint import Planner
from .saved.saved_bytes import SavedBytes
from .solve.solver import WrongAnswer


if TYPE_CHECKING:
    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo
    from .decision import Decision

log = logging.getLogger(__name__)

__all__ = ["Request", "by_config", "decide", "requested"]


class Request(Protocol):
    """What is asked of a graph."""

    def decide(self, graph: Planner) -> Decision: ...


def decide(
    joint_graph: fx.Graph,
    node_info: NodeInfo,
    num_fwd_outputs: int,
    budget: float,
    request: Optional[Request] = None,
    fused: bool = False,
) -> Decision:
    """What the forward saves; its outputs are the graph's first ``num_fwd_outputs``.

    ``budget`` is the config's or the region's, and ``fused`` says that inductor will
    make kernels of the operators.  Every node's ``dist_from_bw`` must be set.

    Without a ``request``, the config says what is asked.  If no plan can be made for
    that, a warning says why, and the graph gets upstream's plan for ``budget``.  Raises
    RuntimeError for an invalid option or ``budget``, WrongAnswer for an invalid answer
    of a custom solver, and what a given request raises.
    """
    check_budget(budget)
    graph = Planner(joint_graph, node_info, num_fwd_outputs, budget, fused)
    return by_config(graph) if request is None else request.decide(graph)


def by_config(graph: Planner) -> Decision:
    """The decision that the config asks for, or the fallback of :func:`decide`."""
    request = requested(graph.ask, graph.budget)
    try:
        return request.decide(graph)
    except WrongAnswer:
        raise
    except Exception as error:
        log.debug("no plan for %s", request, exc_info=error)
        decision = graph.upstream()
        log.warning(
            "%s gets upstream's plan, which bounds upstream's own estimate of saved bytes "
            "at budget %g; %s cannot be planned: %s: %s",
            get_aot_graph_name(),
            decision.budget,
            request,
            type(error).__name__,
            error,
        )
        return decision


def requested(ask: Ask, budget: float) -> Request:
    """What the config asks of a graph that has this budget."""
    if ask.peak_bytes is None and (ask.target == "saved" or budget == 1):
        return SavedBytes(budget)
    # This module comes with a separate patch.
    from .peak.peak_bytes import PeakBytes

    return PeakBytes(budget, ask.peak_bytes, ask.graph_calls or 1, ask.peak_margin)
