"""Warns where a plan for one graph's peak cannot keep what was asked.

Calls that wait for their backward at once add up, and a call may be larger than the one
that the graph was planned for.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any, Callable, TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from ..ask import Ask
from ..graph.recompute_cost import size_or_hint
from ..report.saved_values import format_bytes, logged_plan


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..report.saved_values import Plan


log = logging.getLogger(__name__)

__all__ = ["CALL", "node_of_backward", "with_warnings"]

# Under this key, the autograd node of a compiled backward stores its call.
CALL = "activation memory budget: call"


def _symbolic_sizes(arguments: Sequence[Any]) -> tuple[list[int], int]:
    """The indices of arguments with symbolic sizes, and their bytes by the hints."""
    found = [
        i
        for i, each in enumerate(arguments)
        if isinstance(each, torch.Tensor) and not isinstance(each.numel(), int)
    ]
    return found, _bytes_of_arguments(arguments, found)


def _bytes_of_arguments(arguments: Sequence[Any], indices: Iterable[int]) -> int:
    sizes = (arguments[i].untyped_storage().nbytes() for i in indices)
    return sum(map(size_or_hint, sizes))


def node_of_backward(result: Any) -> Any:
    """The autograd node of the compiled backward behind these outputs, or None.

    Up to three nodes, of views for example, may come between.  Nodes that have a call
    already belong to earlier calls.
    """
    node: Any
    pending = [
        (value.grad_fn, 3)
        for value in tree_leaves(result)
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    ]
    while pending:
        node, depth = pending.pop(0)
        if hasattr(node, "_forward_cls") and hasattr(node._forward_cls, "_aot_id"):
            if CALL not in node.metadata:
                return node
        elif depth:
            pending += [(n, depth - 1) for n, _ in node.next_functions if n is not None]
    return None


# The plans of the calls whose backward is still to come.
_waiting: weakref.WeakKeyDictionary[Any, Plan] = weakref.WeakKeyDictionary()


@functools.cache
def warn_of_several_calls() -> None:
    """Warn that one graph's budget says nothing about a step with several calls."""
    log.warning(
        "%d calls of %d graphs wait for their backward at once and keep %s together, "
        "but each graph was planned alone. Use a StepBudget for the whole step, or set "
        "activation_memory_graph_calls to the calls per graph",
        len(_waiting),
        len({plan.graph for plan in _waiting.values()}),
        format_bytes(sum(plan.activation_bytes for plan in _waiting.values())),
    )


def with_warnings(run: Callable[..., Any], given: Sequence[Any], metadata: Any) -> Any:
    """Make a compiled graph warn when its own plan does not bound the peak.

    That is when other calls wait for their backward, too, or when a call is larger than
    the ``given`` one that it was planned for, and is expected to exceed the limit.
    ``metadata`` is the graph's ViewAndMutationMeta, which has the plan.
    """
    ask = Ask.of_config()
    limit = ask.peak_bytes
    if limit is None and ask.target != "peak":
        return run
    plan = logged_plan(metadata)
    if plan is None:
        return run
    is_only = ask.graph_calls is None
    symbolic, planned = _symbolic_sizes(given)
    largest = planned

    @functools.wraps(run)
    def call(args: list[Any]) -> Any:
        nonlocal largest
        size = _bytes_of_arguments(args, symbolic)
        if size > largest and limit is not None and plan.peak is not None:
            largest, peak = size, plan.peak.predicted
            expected = peak * size // planned
            if expected > limit:
                log.warning(
                    "%s was planned for %s of dynamic inputs, with a peak of %s; for "
                    "%s the peak is about %s, above activation_memory_peak_bytes (%s). "
                    "Compile with the largest batch first, or with dynamic=False for a "
                    "plan of each size",
                    plan.graph,
                    *map(format_bytes, (planned, peak, size, expected, limit)),
                )
        result = run(args)
        node = node_of_backward(result) if is_only else None
        if node is not None:
            _waiting[node] = plan
            node.metadata[CALL] = None
            reference = weakref.ref(node)
            node.register_prehook(lambda _: _waiting.pop(reference(), None) and None)
            if len(_waiting) > 1:
                warn_of_several_calls()
        return result

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
