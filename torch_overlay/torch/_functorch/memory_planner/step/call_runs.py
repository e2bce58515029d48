"""Runs a call's forward and backward, and notes them where the step is recorded."""

from __future__ import annotations

import weakref
from typing import Any, Callable, TYPE_CHECKING

from torch.utils._pytree import tree_leaves

from .calls import storages_of, tensors_in
from .recorder import Event, PLANNED
from .single_graph_warnings import CALL, node_of_backward


if TYPE_CHECKING:
    from collections.abc import Iterable

    from .calls import Call
    from .partial_backward import Backward


__all__ = ["await_backward", "run_backward", "run_forward"]


def run_forward(
    call: Call, run: Callable[..., Any], args: list[Any], primals: int, outputs: int
) -> Any:
    """Run a call's forward, and note the storages that it reads and returns.

    The first ``primals`` tensors of ``args`` are the graph's inputs.  The caller gets
    the first ``outputs`` results; the others are saved values.
    """
    recorder = call.step.recorder
    if recorder is None:
        results = run(args)
    else:
        # No local name may keep alive what the call is to free.
        call.inputs = recorder.storage_numbers(tensors_in(args)[:primals], True)
        with recorder.around_graph(Event("F", call=call, flag=call.keeps_saved)):
            results = run(args)
        call.outputs = recorder.storage_numbers(list(results[:outputs]))
    call.returned = storages_of(results[:outputs])
    return results


def await_backward(call: Call, result: Any, may_miss: bool) -> None:
    """Attach a call to its backward's node, and end it when the node dies.

    If the call ``may_miss`` tangents, notice when the caller drops an output.
    """
    step, node = call.step, node_of_backward(result)
    if node is None:
        step.end(call)
        return
    node.metadata.update({CALL: call, PLANNED: True})
    if may_miss:
        node.set_materialize_grads(False)
        _note_dropped_outputs(tree_leaves(result), call)

    def died(_: Any) -> None:
        if step.end(call) and step.recorder is not None:
            step.recorder.log.append(Event("x", call=call))

    call.node = weakref.ref(node, died)


def _note_dropped_outputs(results: Iterable[Any], call: Call) -> None:
    storages = (ref() if ref is not None else None for ref in call.returned)
    places = {id(s): at for at, s in enumerate(storages) if s is not None}
    recorder = call.step.recorder
    for each in tensors_in(results):
        at = places.get(id(each.untyped_storage()))
        if at is None:
            continue

        def dropped(_: Any, at: int = at) -> None:
            storage = call.outputs[at] if recorder is not None else None
            if recorder is not None and storage is not None:
                recorder.log.append(Event("d", storage))

        call.tensors[at] = weakref.ref(each, dropped)


def run_backward(call: Call, run: Backward, args: list[Any], is_retained: bool) -> Any:
    """Run a call's backward; if its graph is retained, it may run again."""
    recorder = call.step.recorder
    if recorder is None:
        return run(args)
    tangents = recorder.storage_numbers([args[i] for i in run.tangents])
    inputs = call.inputs + tangents + call.outputs
    begin = Event("B", call=call, flag=is_retained, inputs=inputs)
    with recorder.around_graph(begin):
        results = run(args)
    recorder.storage_numbers(list(results))
    return results
