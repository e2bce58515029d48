"""A backward that a step compiles again where calls do not get all of its tangents."""

from __future__ import annotations

import copy
from typing import Any, Callable, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.utils import _is_tangent, make_boxed_func
from torch._guards import TracingContext
from torch._inductor.fx_passes.joint_graph import constant_fold_uniform_value
from torch._subclasses.fake_tensor import unset_fake_temporarily


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import GraphModule


__all__ = ["Backward"]


class Backward:
    """A compiled backward, also for calls that miss some of the tangents.

    As of an output that the caller drops.  Autograd would make zeros for the backward to
    add, as large as the output.
    """

    _boxed_call = True

    def __init__(
        self,
        compile_graph: Callable[..., Any],
        module: GraphModule,
        inputs: Sequence[Any],
        as_traced: Callable[[], Any],
    ) -> None:
        self._compile_graph, self._as_traced = compile_graph, as_traced
        # What is compiled may be changed.
        self._module, self._inputs = _copy_of(module), inputs
        placeholders = module.graph.find_nodes(op="placeholder")
        self.tangents = [i for i, node in enumerate(placeholders) if _is_tangent(node)]
        self._runs: dict[frozenset[int], Callable[..., Any]] = {}
        self._context = TracingContext.try_get()
        self._metadata = getattr(self._context, "fw_metadata", None)

    def absent(self, args: Sequence[Any]) -> frozenset[int]:
        """Which of the tangents a call misses."""
        places = enumerate(self.tangents)
        return frozenset(at for at, place in places if args[place] is None)

    def compile(self, absent: frozenset[int]) -> None:
        """Compile what runs where these are absent."""
        module = _copy_of(self._module)
        _drop_tangents(module, [self.tangents[at] for at in absent])
        compiled = self._compile_graph(module, self._inputs)
        if not getattr(compiled, "_boxed_call", False):
            compiled = make_boxed_func(compiled)
        self._runs[absent] = compiled

    def __call__(self, args: list[Any]) -> Any:
        absent = self.absent(args)
        if absent not in self._runs:
            with self._as_traced():
                if self._context is not None:
                    # Another plan may have been compiled since.
                    self._context.fw_metadata = self._metadata
                self.compile(absent)
        return self._runs[absent](args)


def _copy_of(module: GraphModule) -> GraphModule:
    with unset_fake_temporarily():
        # Its constants are real tensors.
        return copy.deepcopy(module)


def _drop_tangents(module: GraphModule, places: Iterable[int]) -> None:
    """Let a backward have zeros for these of its inputs, and add none of those."""
    graph, found = module.graph, []
    placeholders = graph.find_nodes(op="placeholder")
    for place in places:
        tangent = placeholders[place]
        value = tangent.meta["val"]
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        with graph.inserting_after(placeholders[-1]):
            size = graph.materialize_symints(value.shape)
            full = torch.ops.aten.full.default
            zeros = graph.call_function(full, (size, 0), options)
        zeros.meta["val"] = value.new_empty(value.shape)
        tangent.replace_all_uses_with(zeros)
        found.append(zeros)
    if found:
        constant_fold_uniform_value(module)
        graph.eliminate_dead_code()
        module.recompile()
