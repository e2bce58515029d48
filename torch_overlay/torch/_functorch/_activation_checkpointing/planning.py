"""From what is asked of a joint graph to what its forward saves for the backward.

:func:`decide` is all that the partitioner calls.  A :class:`Request` says what is asked
for: :class:`.SavedBytes`, :class:`.PeakBytes`, or a plan of a training step.  Whoever has
the graph partitioned may hand one over; otherwise :func:`requested` reads the config.
"""

from __future__ import annotations

import logging
from numbers import Real
from typing import Any, Callable, Optional, Protocol, TYPE_CHECKING

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
    """Check the budget of a graph and all options of the config.

    So none is ignored, or turns a budget into another, whichever way a plan is found.
    Raises RuntimeError for the first one that is not valid, with its name, its value, and
    what would be valid.
    """
    if not is_number(budget, 0, 1):
        raise RuntimeError(
            f"The activation memory budget is {budget!r}; it must be a number "
            "from 0 (save the least) to 1 (run fastest)"
        )
    for name, (valid, is_valid) in _options().items():
        # A patch of its own brings each of them.
        value = getattr(config, name, None)
        if hasattr(config, name) and not is_valid(value):
            raise RuntimeError(f"{name} is {value!r}; it must be {valid}")


def is_number(value: Any, low: float, high: float) -> bool:
    """Whether a value is a number, and no bool, between two others."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and low <= value <= high


# What an option may be, in words and as a test.
_Option = tuple[str, Callable[[Any], bool]]


def _options() -> dict[str, _Option]:
    """All options but the budget itself; a solver may be registered at any time."""
    return {
        "activation_memory_budget_solver": _one_of(
            [*KNAPSACK_SOLVERS, KNEE], CustomKnapsackSolver
        ),
        "activation_memory_budget_runtime_estimator": _one_of(
            [*RUNTIME_UNITS], CustomRuntimeEstimator
        ),
        "activation_memory_budget_target": _one_of(["saved", "peak"]),
        "activation_memory_peak_bytes": _count_or_none("bytes", 2**63),
        "activation_memory_peak_margin": (
            "a share of the peak, from 0 to less than 1",
            lambda value: is_number(value, 0, 1) and value < 1,
        ),
        "activation_memory_graph_calls": _count_or_none("calls", 1_000_000),
        "drop_unread_arguments": (
            "True or False",
            lambda value: isinstance(value, bool),
        ),
    }


def _one_of(names: list[str], *custom: type) -> _Option:
    valid = f"one of {', '.join(names)}"
    for each in custom:
        valid += f", or an instance of {each.__module__}.{each.__name__}"
    return valid, lambda value: isinstance(value, custom) or value in names


def _count_or_none(unit: str, most: int) -> _Option:
    return (
        f"from 1 to {most:,} {unit}, or None",
        lambda value: value is None or (type(value) is int and 1 <= value <= most),
    )
