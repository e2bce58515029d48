"""A backward that a step compiles again where calls do not get all of its tangents."""

from __future__ import annotations

from typing import Any, Callable, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.utils import _is_tangent, make_boxed_func
from torch._guards import TracingContext
from torch._inductor.fx_passes.joint_graph import constant_fold_uniform_value

from .compiled_peak import copy_of


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import GraphModule


__all__ = ["Backward", "boxed"]


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
        absent: frozenset[int],
        as_traced: Callable[[], Any],
    ) -> None:
        """Compile what runs where these tangents are absent."""
        self._compile_graph, self._as_traced = compile_graph, as_traced
        # What is compiled may be changed.
        self._module, self._inputs = copy_of(module), inputs
        placeholders = module.graph.find_nodes(op="placeholder")
        self.tangents = [i for i, node in enumerate(placeholders) if _is_tangent(node)]
        self._runs: dict[frozenset[int], Callable[..., Any]] = {}
        self._context = TracingContext.try_get()
        self._metadata = getattr(self._context, "fw_metadata", None)
        self._compile(module, absent)

    def absent(self, args: Sequence[Any]) -> frozenset[int]:
        """Which of the tangents a call misses."""
        places = enumerate(self.tangents)
        return frozenset(at for at, place in places if args[place] is None)

    def _compile(self, module: GraphModule, absent: frozenset[int]) -> None:
        _drop_tangents(module, [self.tangents[at] for at in absent])
        self._runs[absent] = boxed(self._compile_graph(module, self._inputs))

    def __call__(self, args: list[Any]) -> Any:
        absent = self.absent(args)
        if absent not in self._runs:
            with self._as_traced():
                if self._context is not None:
                    # Another plan may have been compiled since.
                    self._context.fw_metadata = self._metadata
                self._compile(copy_of(self._module), absent)
        return self._runs[absent](args)


def boxed(compiled: Any) -> Any:
    """What a compiler returned, as a function of a list."""
    is_boxed = getattr(compiled, "_boxed_call", False)
    return compiled if is_boxed else make_boxed_func(compiled)


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
