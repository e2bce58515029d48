"""From what is asked of a joint graph to what its forward saves for the backward.

:func:`decide` is all that the partitioner calls.  A :class:`Request` says what is asked
for: :class:`.SavedBytes`, :class:`.PeakBytes`, or a plan of a training step.  Whoever has
the graph partitioned may hand one over; otherwise :func:`requested` reads the config.
"""

from __future__ import annotations

import logging
import math
import re
from numbers import Real
from typing import Any, Optional, Protocol, TYPE_CHECKING

from torch._functorch import config
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._inductor.custom_graph_pass import (
    CustomKnapsackSolver,
    CustomRuntimeEstimator,
)

from .budget_solver import KNEE, WrongAnswer
from .knapsack import KNAPSACK_SOLVERS
from .memory_budget import Planner, SavedBytes
from .rerun_cost import RUNTIME_UNITS


if TYPE_CHECKING:
    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo
    from .decision import Decision

log = logging.getLogger(__name__)

__all__ = [
    "Request",
    "as_bytes",
    "by_config",
    "check_budget_options",
    "decide",
    "is_number",
    "requested",
]


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


def requested(budget: float) -> Request:
    """What the config asks of a graph that has this budget.

    Raises RuntimeError as :func:`check_budget_options` does.
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


def check_budget_options(budget: float) -> None:
    """Check the budget of a graph and the options of the config, whatever they ask for.

    Raises RuntimeError for the first one that is not valid, with its name, its value, and
    what would be valid.
    """
    valid = "a number from 0 (save the least) to 1 (run fastest)"
    _check("budget", budget, is_number(budget, 0, 1), valid)
    custom: Any
    for option, names, custom in (
        ("budget_solver", [*KNAPSACK_SOLVERS, KNEE], CustomKnapsackSolver),
        ("budget_runtime_estimator", [*RUNTIME_UNITS], CustomRuntimeEstimator),
        ("budget_target", ["saved", "peak"], ()),
    ):
        # A patch of its own brings each of the others.
        value = getattr(config, f"activation_memory_{option}", names[0])
        valid = f"one of {', '.join(names)}"
        if custom:
            valid += f", or an instance of {custom.__module__}.{custom.__name__}"
        _check(option, value, isinstance(value, custom) or value in names, valid)
    for option, most in (("peak_bytes", 2**63), ("graph_calls", 1_000_000)):
        value = getattr(config, f"activation_memory_{option}", None)
        is_count = type(value) is int and 1 <= value <= most
        valid = f"a whole number from 1 to {most:,}, or None"
        _check(option, value, value is None or is_count, valid)
    margin = getattr(config, "activation_memory_peak_margin", 0)
    is_share = is_number(margin, 0, 1) and margin < 1
    _check("peak_margin", margin, is_share, "a share of the peak, less than 1")


def _check(option: str, value: Any, is_valid: bool, valid: str) -> None:
    if not is_valid:
        raise RuntimeError(
            f"activation_memory_{option} is {value!r}; it must be {valid}"
        )


def is_number(value: Any, low: float, high: float) -> bool:
    """Whether a value is a number, and no bool, between two others."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and low <= value <= high


_SIZE = re.compile(r"(\d+(?:\.\d*)?) ?([kmgt]?)(i?)b?", re.IGNORECASE)


def as_bytes(value: Any) -> int:
    """A number of bytes above 0: of a number, rounded down, or of text as "24 GiB".

    K, M, G and T are powers of 1,000, and of 1,024 with an i, in either case.  Raises
    ValueError for everything else.
    """
    number: Any = value
    unit = 1
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        number = float(match[1]) if match else 0
        if match and match[2]:
            base = 1024 if match[3] else 1000
            unit = base ** ("kmgt".index(match[2].lower()) + 1)
    elif hasattr(value, "item"):
        # Of numpy or torch.
        number = value.item()
    if not is_number(number, 0, math.inf) or number == math.inf or number * unit < 1:
        raise ValueError(
            "must be a positive number of bytes, which is rounded down to a whole "
            "number, or text such as '24GiB'"
        )
    return int(number * unit)
