"""A call of a compiled graph, which a step runs and, where it is recorded, notes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, TYPE_CHECKING

from torch import Tensor
from torch.utils._pytree import tree_leaves

from .single_graph_warnings import CALL, node_of_backward
from .tensors import tensors_in
from .timeline import Event


if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..graph.inputs_outputs import Missing
    from ..peak.menu import Menu
    from .calls import State, Step
    from .compiled_graph import CompiledGraph
    from .graphs import Graph
    from .partial_backward import Backward


@dataclass(eq=False)
class Call:
    """A forward that ran, its backward, and the storages that it read and returned."""

    graph: Graph
    # It may die before a recording that has the call.
    compiled: weakref.ref[CompiledGraph]
    step: Step
    # The values of the compiled graph's symbols.
    sizes: tuple[int, ...]
    # How many times as large it is as the first call of its graph.
    scale: float
    slot: int
    # Whether a checkpoint is set around it, which keeps nothing of what it saves.
    is_checkpointed: bool = False
    # Whether that checkpoint runs it again, for another call's backward.
    is_rerun: bool = False
    plan: int = 0
    # How its forward began.
    state: Optional[State] = None
    # The indices of outputs that it saves, too.
    saved: frozenset[int] = frozenset()
    # Weak references to what its forward returned: storages, and the caller's tensors.
    returned: list[Any] = field(default_factory=list)
    tensors: dict[int, Any] = field(default_factory=dict)
    # The tangents that its backward does not get, and the outputs gone by then.
    missing: Optional[Missing] = None
    outputs: list[Optional[int]] = field(default_factory=list)
    inputs: list[Optional[int]] = field(default_factory=list)
    # Kept for its callback, which tells when the node dies without having run.
    node: Optional[weakref.ref[Any]] = None

    @property
    def keeps_saved(self) -> bool:
        """Whether something is kept for its backward, or for that of another call."""
        return self.is_rerun or not self.is_checkpointed

    def plans(self) -> Menu:
        """Its graph's plans in its own size, or in the largest if the code is gone."""
        compiled = self.compiled()
        return self.graph.plans if compiled is None else compiled.plans_at(self.sizes)

    def dropped_outputs(self) -> frozenset[int]:
        """The indices of outputs that nobody holds any more, except as saved values."""
        found = set()
        for at, storage in enumerate(self.returned):
            is_dropped = at in self.tensors and self.tensors[at]() is None
            if is_dropped and (at in self.saved or storage() is None):
                found.add(at)
        return frozenset(found)

    def run_forward(
        self, run: Callable[..., Any], args: list[Any], primals: int, outputs: int
    ) -> Any:
        """Run the forward, and note the storages that it reads and returns.

        The first ``primals`` tensors of ``args`` are the graph's inputs.  The caller
        gets the first ``outputs`` results; the others are saved values.
        """
        recorder = self.step.recorder
        if recorder is None:
            results = run(args)
        else:
            # No local name may keep alive what the call is to free.
            self.inputs = recorder.storage_numbers(tensors_in(args)[:primals], True)
            with recorder.around_graph(Event("F", call=self, flag=self.keeps_saved)):
                results = run(args)
            self.outputs = recorder.storage_numbers(list(results[:outputs]))
        self.returned = [
            weakref.ref(each.untyped_storage()) if isinstance(each, Tensor) else None
            for each in results[:outputs]
        ]
        return results

    def await_backward(self, result: Any, may_miss: bool) -> None:
        """Attach the call to its backward's node, and end it when the node dies.

        If it ``may_miss`` tangents, notice when the caller drops an output.
        """
        node = node_of_backward(result)
        if self.is_rerun:
            if node is not None:
                node.metadata[CALL] = None
            return
        if node is None:
            self.step.end(self)
            return
        node.metadata[CALL] = self
        if may_miss:
            node.set_materialize_grads(False)
            self._note_dropped_outputs(tree_leaves(result))

        def died(_: Any) -> None:
            if self.step.end(self):
                self.note_end()

        self.node = weakref.ref(node, died)

    def note_end(self) -> None:
        """Note that no backward will run for it."""
        if self.step.recorder is not None:
            self.step.recorder.log.append(Event("x", call=self))

    def _note_dropped_outputs(self, results: Iterable[Any]) -> None:
        storages = (ref() if ref is not None else None for ref in self.returned)
        places = {id(s): at for at, s in enumerate(storages) if s is not None}
        recorder = self.step.recorder
        for each in tensors_in(results):
            at = places.get(id(each.untyped_storage()))
            if at is None:
                continue

            def dropped(_: Any, at: int = at) -> None:
                storage = self.outputs[at] if recorder is not None else None
                if recorder is not None and storage is not None:
                    recorder.log.append(Event("d", storage))

            self.tensors[at] = weakref.ref(each, dropped)

    def run_backward(self, run: Backward, args: list[Any], is_retained: bool) -> Any:
        """Run the backward; if its graph is retained, it may run again."""
        recorder = self.step.recorder
        if recorder is None:
            return run(args)
        tangents = recorder.storage_numbers([args[i] for i in run.tangents])
        inputs = self.inputs + tangents + self.outputs
        begin = Event("B", call=self, flag=is_retained, inputs=inputs)
        with recorder.around_graph(begin):
            results = run(args)
        recorder.storage_numbers(list(results))
        return results
