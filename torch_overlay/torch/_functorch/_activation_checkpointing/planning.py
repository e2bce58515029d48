"""From what is asked of a joint graph to what its forward saves for the backward.

:func:`decide` is all that the partitioner calls.  A :class:`Request` says what is asked
for: :class:`SavedBytes`, :class:`.PeakBytes`, or a plan of a training step.  Whoever has
the graph partitioned may hand one over; otherwise :func:`requested` reads the config.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Optional, Protocol, TYPE_CHECKING

from torch._functorch import config
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

from . import memory_budget
from .budget_options import check_budget_options
from .budget_solver import WrongAnswer
from .memory_budget import Planner


if TYPE_CHECKING:
    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo
    from .decision import Decision

log = logging.getLogger(__name__)

__all__ = ["Request", "SavedBytes", "by_config", "decide", "requested"]


class Request(Protocol):
    """What is asked of a graph."""

    def decide(self, graph: Planner) -> Decision: ...


@dataclass(frozen=True)
class SavedBytes:
    """At most a share of the bytes that may be saved; see :mod:`.memory_budget`."""

    budget: float

    def decide(self, graph: Planner) -> Decision:
        return memory_budget.decide(graph, self.budget)


def requested(budget: float) -> Request:
    """What the config asks of a graph that has this budget.

    Raises RuntimeError as :func:`.check_budget_options` does.
    """
    check_budget_options(budget)
    options: Any = config
    # A patch of its own brings these two, and the module.
    limit = getattr(options, "activation_memory_peak_bytes", None)
    target = getattr(options, "activation_memory_budget_target", "saved")
    if limit is None and (target == "saved" or budget == 1):
        return SavedBytes(budget)
    from .peak_budget import PeakBytes

    calls = options.activation_memory_graph_calls or 1
    return PeakBytes(budget, limit, calls, options.activation_memory_peak_margin)


def decide(
    joint_graph: fx.Graph,
    node_info: NodeInfo,
    num_fwd_outputs: int,
    budget: float,
    request: Optional[Request] = None,
    fused: bool = False,
) -> Decision:
    """What the forward saves; its outputs are the graph's first ``num_fwd_outputs``.

    ``budget`` is the config's or the region's, and ``fused`` tells that inductor is going
    to make kernels of the operators.  Every node's ``dist_from_bw`` must be set.

    Without a ``request``, the config says what is asked.  Where no plan can be made for
    that, a warning says why, and the graph gets the one that upstream makes for
    ``budget``.  Raises RuntimeError as `requested` does, and what a request that was
    given or a custom solver raises.
    """
    graph = Planner(joint_graph, node_info, num_fwd_outputs, budget, fused)
    return by_config(graph) if request is None else request.decide(graph)


def by_config(graph: Planner) -> Decision:
    """What the config asks of a graph, or the fallback that `decide` has for it."""
    request = requested(graph.budget)
    try:
        return request.decide(graph)
    except WrongAnswer:
        raise
    except Exception as error:
        log.debug("no plan for %s", request, exc_info=error)
        log.warning(
            "%s gets upstream's plan, which bounds upstream's own estimate of saved bytes "
            "at budget %g; %s cannot be planned: %s: %s",
            get_aot_graph_name(),
            graph.budget,
            request,
            type(error).__name__,
            error,
        )
        return graph.upstream()
