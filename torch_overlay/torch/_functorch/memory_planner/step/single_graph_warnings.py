"""Warns where a plan for one graph's peak cannot keep what was asked.

Calls that wait for their backward at once add up, and a call may be larger than the one
that the graph was planned for.
"""

from __future__ import annotations

import functools
import logging
import operator
import weakref
from typing import Any, Callable, Optional, TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from ..ask import Ask
from ..graph.recompute_cost import size_or_hint
from ..graph.symbols import size_evaluator, values_of_symbols
from ..report.saved_values import format_bytes, logged_plan


if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..graph.symbols import Places
    from ..report.saved_values import Plan


log = logging.getLogger(__name__)


# Under this key, the autograd node of a compiled backward stores its call; None once
# that has ended.
CALL = "activation memory budget: call"
# The same for a graph that is planned by itself.
_ALONE = "activation memory budget: alone"


def is_compiled(node: Any) -> bool:
    """Whether an autograd node is a compiled backward."""
    return hasattr(getattr(node, "_forward_cls", None), "_aot_id")


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
        if is_compiled(node):
            if node.metadata.keys().isdisjoint((CALL, _ALONE)):
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


def with_warnings(
    run: Callable[..., Any],
    metadata: Any,
    places: Optional[Places] = None,
    planned: Sequence[Any] = (),
) -> Any:
    """Make a compiled graph warn when its own plan does not bound the peak.

    That is when other calls wait for their backward, too, or when a call is larger than
    the sizes that it was ``planned`` for, and is expected to exceed the limit.
    ``metadata`` is the graph's ViewAndMutationMeta, which has the plan, and ``places``
    tells where a call has these sizes, None if unknown.
    """
    ask = Ask.of_config()
    plan = logged_plan(metadata)
    if plan is None or (ask.peak_bytes is None and ask.target != "peak"):
        return run
    is_only = ask.graph_calls is None
    warn_if_over = _warns_if_over(plan, metadata, places, planned)

    @functools.wraps(run)
    def call(args: list[Any]) -> Any:
        warn_if_over(args)
        result = run(args)
        node = node_of_backward(result) if is_only else None
        if node is not None:
            _waiting[node] = plan
            node.metadata[_ALONE] = True
            reference = weakref.ref(node)
            node.register_prehook(lambda _: _waiting.pop(reference(), None) and None)
            if len(_waiting) > 1:
                warn_of_several_calls()
        return result

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _warns_if_over(
    plan: Plan, metadata: Any, places: Optional[Places], traced: Sequence[Any]
) -> Callable[[list[Any]], None]:
    """A function that warns if a call with some arguments should exceed the limit.

    It looks at sizes that no earlier ones cover, and warns of the highest peak yet.
    """
    peak, peak_at = plan.peak, getattr(metadata, "activation_memory_peak_at", None)
    if peak is None or peak_at is None or places is None:
        return lambda args: None
    planned = tuple(map(size_or_hint, traced))
    known, most = [planned], peak.allowed

    def warn_if_over(args: list[Any]) -> None:
        nonlocal most
        sizes = values_of_symbols(args, places)
        if any(all(map(operator.le, sizes, each)) for each in known):
            return
        known.append(sizes)
        of = plan.graph, _in_words(planned), format_bytes(peak.predicted)
        try:
            expected = peak_at(size_evaluator(places, sizes))
        except Exception as error:
            # The call can run without a warning.
            log.warning(
                "%s was planned for the sizes %s, with a peak of %s; the peak for %s "
                "is not known: %s: %s",
                *of,
                _in_words(sizes),
                type(error).__name__,
                error,
            )
            return
        if expected > most:
            most = expected
            log.warning(
                "%s was planned for the sizes %s, with a peak of %s; for %s the peak "
                "is about %s, above activation_memory_peak_bytes (%s). Compile with "
                "the largest sizes first, or with dynamic=False for a plan of each",
                *of,
                _in_words(sizes),
                format_bytes(expected),
                format_bytes(peak.allowed),
            )

    return warn_if_over


def _in_words(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
