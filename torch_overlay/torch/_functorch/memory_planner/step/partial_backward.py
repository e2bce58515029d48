"""A backward that a step recompiles for calls that do not get all of its tangents."""

from __future__ import annotations

import logging
from typing import Any, Callable, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.utils import _is_tangent
from torch._guards import TracingContext
from torch._inductor.fx_passes.joint_graph import constant_fold_uniform_value

from ..compile.recompile import copy_of
from .aot_calls import with_boxed_inputs


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import GraphModule


log = logging.getLogger(__name__)


class Backward:
    """A compiled backward, also for calls that miss some of the tangents.

    A tangent is missing where the caller drops an output.  Autograd would otherwise
    pass zeros as large as the output, only for the backward to add them.
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
        """Compile the variant for calls without the ``absent`` tangents.

        ``compile_graph`` compiles a ``module`` for its fake ``inputs``; ``as_traced``
        returns a context to compile further variants in.  ``absent`` are positions
        among the tangents.
        """
        self._compile_graph, self._as_traced = compile_graph, as_traced
        # Compiling may change the module.
        self._module, self._inputs = copy_of(module), inputs
        placeholders = module.graph.find_nodes(op="placeholder")
        self.tangents = [i for i, node in enumerate(placeholders) if _is_tangent(node)]
        self._runs: dict[frozenset[int], Callable[..., Any]] = {}
        # Sets of absent tangents that have to be replaced by zeros.
        self._needed: set[frozenset[int]] = set()
        self._context = TracingContext.try_get()
        self._metadata = getattr(self._context, "fw_metadata", None)
        self._compile(module, absent)

    def _absent_tangents(self, args: Sequence[Any]) -> frozenset[int]:
        places = enumerate(self.tangents)
        return frozenset(at for at, place in places if args[place] is None)

    def _compile(self, module: GraphModule, absent: frozenset[int]) -> None:
        try:
            _drop_tangents(module, [self.tangents[at] for at in absent])
        except Exception as error:
            # For example, only the tangent itself tells a size.
            log.debug("a backward needs zeros for %s", absent, exc_info=error)
            self._needed.add(absent)
            module, absent = copy_of(self._module), frozenset()
        if absent not in self._runs:
            self._runs[absent] = with_boxed_inputs(
                self._compile_graph(module, self._inputs)
            )

    def _compile_again(self, absent: frozenset[int]) -> None:
        with self._as_traced():
            if self._context is not None:
                # Compiling another plan may have replaced it.
                self._context.fw_metadata = self._metadata
            self._compile(copy_of(self._module), absent)

    def complete(self, args: list[Any], as_int: Callable[[Any], int]) -> frozenset[int]:
        """Fill in zeros for the absent tangents that a call cannot run without.

        ``as_int`` evaluates a symbolic size for the call.  Returns the tangents that
        are still absent.
        """
        absent = self._absent_tangents(args)
        if absent and absent not in self._runs.keys() | self._needed:
            try:
                self._compile_again(absent)
            except Exception as error:
                log.debug("no backward without %s", absent, exc_info=error)
                self._needed.add(absent)
        if absent not in self._needed:
            return absent
        for at in absent:
            value = self._inputs[self.tangents[at]]
            sizes = (tuple(map(as_int, of)) for of in (value.shape, value.stride()))
            options = {"dtype": value.dtype, "device": value.device}
            args[self.tangents[at]] = torch.empty_strided(*sizes, **options).zero_()
        return frozenset()

    def __call__(self, args: list[Any]) -> Any:
        absent = self._absent_tangents(args)
        if absent not in self._runs:
            self._compile_again(absent)
        return self._runs[absent](args)


def _drop_tangents(module: GraphModule, places: Iterable[int]) -> None:
    """Replace these inputs of a backward by zeros, and fold the zeros away.

    Raises AssertionError or RuntimeError where no other input tells how large they are.
    """
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    tangents = [placeholders[place] for place in places]
    if not tangents:
        return
    # Without this entry, no size can be read from a tangent either.
    values = [tangent.meta.pop("val") for tangent in tangents]
    for tangent, value in zip(tangents, values):
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        # After the placeholders, as some of them are sizes.
        with graph.inserting_before(placeholders[-1].next):
            size = graph.materialize_symints(value.shape)
            full = torch.ops.aten.full.default
            zeros = graph.call_function(full, (size, 0), options)
        zeros.meta["val"] = value.new_empty(value.shape)
        tangent.replace_all_uses_with(zeros)
    for tangent, value in zip(tangents, values):
        tangent.meta["val"] = value
    constant_fold_uniform_value(module)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
