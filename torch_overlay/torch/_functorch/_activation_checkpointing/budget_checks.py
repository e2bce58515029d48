"""Checks around the activation memory budget: what is asked for, and what comes out.

The partitioner calls :func:`check_budget_options` before its first min cut, whatever
the budget, so that a wrong name does not wait for the first graph that needs it.

A budget is a fraction of the *range*: the bytes of the plan that runs fastest less
those of the inputs.  What is saved may weigh more than that fraction for two reasons.
The partitioner credits a plan with the inputs that it does not save, though nobody
frees them; and the min cut after the knapsack minimises weights that grow with the
distance from the backward pass, not bytes.  So :func:`warn_if_over_budget` counts the
activations alone.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TYPE_CHECKING

from torch._functorch import config

from . import knapsack


if TYPE_CHECKING:
    from torch import fx

try:
    from torch._inductor.custom_graph_pass import (
        CustomKnapsackSolver,
        CustomRuntimeEstimator,
    )
except ImportError:  # Before 2.11, a solver could be any callable.
    CustomKnapsackSolver = Callable  # type: ignore[assignment, misc]
    CustomRuntimeEstimator = None  # type: ignore[assignment, misc]

log = logging.getLogger(__name__)

__all__ = ["check_budget_options", "warn_if_over_budget"]

_ESTIMATORS = ("flops", "roofline", "profile", "testing")

# Solvers that the partitioner knows where no table in the knapsack module names them.
_SOLVERS = ("greedy", "ilp", "dp", "dp_knapsack_sliding_hirschberg")

# Over the budget by less than this fraction of it is no news: sizes are estimates,
# and an allocator rounds each of them up.
_TOLERANCE = 0.01


def check_budget_options(memory_budget: float) -> None:
    """Refuse a budget outside [0, 1], and a solver or an estimator that is unknown.

    ``memory_budget`` is the one for the graph at hand; the rest is in the config.
    Raises RuntimeError with the value and with what would be valid.
    """
    try:
        valid = 0 <= memory_budget <= 1
    except TypeError:
        valid = False
    if not valid:
        raise RuntimeError(
            f"The activation memory budget is {memory_budget!r}; it has to be a number "
            "from 0 (save the inputs only) to 1 (save what runs fastest)"
        )
    solvers = [*getattr(knapsack, "KNAPSACK_SOLVERS", _SOLVERS)]
    _check_choice(
        "activation_memory_budget_solver",
        [*solvers, "dynamic_memory_budget_dp"],
        CustomKnapsackSolver,
    )
    _check_choice(
        "activation_memory_budget_runtime_estimator",
        _ESTIMATORS,
        CustomRuntimeEstimator,
    )


def _check_choice(option: str, names: Sequence[str], custom: Any) -> None:
    choice = getattr(config, option)
    if choice in names or (custom is not None and isinstance(choice, custom)):
        return
    known = list(names)
    if custom is not None:
        known.append(f"an instance of {custom.__module__}.{custom.__name__}")
    raise RuntimeError(f"Unknown {option} {choice!r}: known are {', '.join(known)}")


def warn_if_over_budget(
    memory_budget: float,
    range_gb: float,
    inputs: Iterable[fx.Node],
    size_of: Callable[[fx.Node], int],
    saved: list[fx.Node],
) -> list[fx.Node]:
    """Return ``saved``, with a warning where it weighs more than the budget.

    Args:
        memory_budget: the budget, a fraction of the range.
        range_gb: the range, in units of 1e9 bytes.
        inputs: nodes that are there whatever is saved.
        size_of: bytes of a node.
        saved: nodes to save for the backward pass.
    """
    used = _activation_bytes(inputs, size_of, saved)
    whole = range_gb * 1e9
    if used > memory_budget * whole * (1 + _TOLERANCE):
        from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

        log.warning(
            "%s saves %d bytes of activations (a budget of %.4g), more than the %d that "
            "its budget of %.4g allows; a lower one saves less",
            get_aot_graph_name(),
            used,
            used / whole,
            int(memory_budget * whole),
            memory_budget,
        )
    return saved


def _activation_bytes(
    inputs: Iterable[fx.Node], size_of: Callable[[fx.Node], int], saved: list[fx.Node]
) -> int:
    """Bytes that are there because of ``saved``: neither inputs nor views of them.

    Views of one tensor are counted together, and as no more than the tensor.
    """
    from torch._inductor.fx_utils import get_node_storage

    there = {get_node_storage(node) for node in inputs}
    views: dict[int, list[fx.Node]] = defaultdict(list)
    for node in saved:
        storage = get_node_storage(node)
        if storage is not None and storage not in there:
            views[storage].append(node)
    total = 0
    for nodes in views.values():
        sizes = [size_of(node) for node in nodes]
        whole = nodes[0].meta["val"].untyped_storage().nbytes()
        # With symbolic sizes: at least the largest view.
        total += min(sum(sizes), whole) if isinstance(whole, int) else max(sizes)
    return total
