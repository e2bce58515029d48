"""What compiled graphs hold, read from the wrappers that inductor generates for them.

:mod:`torch._inductor.wrapper_memory` reads a single wrapper; this combines the two of a
joint graph.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Optional, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.utils import _is_tangent
from torch._inductor import config as inductor_config
from torch._inductor.fx_utils import get_node_storage
from torch._inductor.utils import output_node
from torch.fx import Node

from ..graph.storages import activation_bytes
from ..graph.symbols import SizeEvaluator, Values
from ..peak.footprint import Names, Tell, Told


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch.fx as fx

    from ...._inductor.deferred_kernels import DeferredKernels
    from ...._inductor.wrapper_memory import WrapperMemory
    from ..graph.inputs_outputs import Missing


_MOST_OF_PEAK = "fusion_memory_timeline_peak_memory_pct_threshold"
# The option of inductor, with its value, that keeps fusions from raising the peak.  It
# depends on the release.
GUARD: dict[str, Any] = (
    {_MOST_OF_PEAK: 0.0}
    if hasattr(inductor_config, _MOST_OF_PEAK)
    # Kernels that share no more than inputs stay separate, so each runs when needed.
    else {"score_fusion_memory_threshold": sys.maxsize}
)


def can_guard() -> bool:
    """Whether the config does not yet keep fusions from raising the peak."""
    return any(getattr(inductor_config, name) != GUARD[name] for name in GUARD)


class CompiledPeaks:
    """Wraps the two compilers of a joint graph and reads what the compiled graphs hold.

    ``tell`` returns that, or is None if the backward is not compiled yet or a compiler
    does not tell.  If ``guarded``, no fusion may raise the peaks.
    ``kernels``, if given, collects those of both graphs, which are not compiled yet.
    """

    def __init__(
        self,
        *compilers: Callable[..., Any],
        kernels: Optional[DeferredKernels] = None,
    ) -> None:
        self._compilers, self._kernels = compilers, kernels
        self.guarded = False
        self.num_fwd_outputs = 0
        # The device whose bytes count.
        self.device = torch.device("cpu")
        # The tangents and outputs that a step's calls lack: nothing holds them.
        self.missing: Optional[Missing] = None
        self.tell: Optional[Tell] = None
        self._memory: Optional[WrapperMemory] = None

    def forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        # Read first, as the compiler may change the graph.
        results: Any = output_node(module).args[0]
        self._results = _names_of_results(results)
        placeholders = module.graph.find_nodes(op="placeholder")
        self._storages = {get_node_storage(node) for node in placeholders}
        compiled = self._compile(0, module, inputs)
        self._memory = getattr(compiled, "memory", None)
        return compiled

    def backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        absent, gone = self.missing or ((), ())
        saved = module.graph.find_nodes(op="placeholder")
        names = _names_of_results(saved)
        held = [
            node
            for at, node in enumerate(filter(_is_tangent, saved))
            if at not in absent and get_node_storage(node) not in self._storages
        ]
        # With symbolic sizes, this is one.
        tangent_bytes: Any = activation_bytes((), held, self.device, lambda size: size)
        compiled = self._compile(1, module, inputs)
        memory = getattr(compiled, "memory", None)
        if self._memory is not None and memory is not None:
            self.tell = _Compiled(
                self._memory,
                memory,
                self._results,
                names,
                self.num_fwd_outputs,
                tangent_bytes,
                frozenset(gone),
            )
        return compiled

    def _compile(
        self, phase: int, module: fx.GraphModule, inputs: Sequence[Any]
    ) -> Any:
        options = {"live_bytes_of": str(self.device), **(GUARD if self.guarded else {})}
        later = self._kernels.collected() if self._kernels else nullcontext()
        with inductor_config.patch(options), later:
            return self._compilers[phase](module, inputs)


@dataclass(frozen=True, eq=False)
class _Compiled:
    """The two compiled graphs of a joint graph.

    Args:
        forward, backward: what their wrappers have live.
        results, saved, num_fwd_outputs: those of `told_peaks`.
        tangent_bytes: an int or a symbolic one.
        gone: the indices of the forward's outputs that nothing holds.
        known: what was told, by the arguments of the call.
    """

    forward: WrapperMemory
    backward: WrapperMemory
    results: Sequence[Optional[str]]
    saved: Sequence[Optional[str]]
    num_fwd_outputs: int
    tangent_bytes: Any
    gone: frozenset[int]
    known: dict[Any, Told] = field(default_factory=dict)

    def __call__(
        self, values: Values = (), alone: Names = (), is_retained: bool = False
    ) -> Told:
        key = values, alone, is_retained
        if key not in self.known:
            self.known[key] = self._tell(*key)
        return self.known[key]

    def _tell(self, values: Values, alone: Names, is_retained: bool) -> Told:
        forward = self.forward.at(dict(values))
        results = tuple(
            None if at in self.gone else each for at, each in enumerate(forward.results)
        )
        return told_peaks(
            self.results,
            self.saved,
            forward._replace(results=results),
            self.backward.at(dict(values)),
            self.num_fwd_outputs,
            SizeEvaluator(values)(self.tangent_bytes),
            alone,
            is_retained,
        )


def _names_of_results(values: Iterable[Any]) -> list[Optional[str]]:
    return [value.name if isinstance(value, Node) else None for value in values]


def told_peaks(
    results: Sequence[Optional[str]],
    saved: Sequence[Optional[str]],
    forward: WrapperMemory,
    backward: WrapperMemory,
    num_fwd_outputs: int,
    tangent_bytes: int,
    alone: Names = (),
    is_retained: bool = False,
) -> Told:
    """What the two graphs of a joint graph hold; parameters and inputs do not count.

    Args:
        results: the names of the nodes that the forward returns; the first
            ``num_fwd_outputs`` go to its caller.
        saved: the names of the backward's placeholders.
        forward, backward: what the wrappers of the two graphs have live.
        tangent_bytes: the bytes of the tangents.
        alone: the names and bytes of those inputs, tangents and outputs of the forward
            that are freed after their last use in the backward.  Its peak leaves out
            their bytes, which are counted elsewhere, as if they were held to the end.
        is_retained: whether what was kept is held to the end of the backward.
    """
    outputs = dict(zip(results[:num_fwd_outputs], forward.results))
    returned = {*outputs.values()} - {None}
    made = dict(zip(results[num_fwd_outputs:], forward.results[num_fwd_outputs:]))
    # The backward's inputs, by storage if the forward made it, else by name.
    places: dict[Any, list[int]] = defaultdict(list)
    for place, name in enumerate(saved):
        places[made.get(name) or name].append(place)
    owned = [s for s in {*made.values()} - returned if s is not None and s in places]
    kept = sum(nbytes for _, nbytes in owned)
    goes = {outputs.get(name) or name: nbytes for name, nbytes in alone}
    goes = {key: nbytes for key, nbytes in goes.items() if key in places}
    freed = [] if is_retained else owned
    own = [(storage[1], places[storage]) for storage in freed]
    own += [(nbytes, places[key]) for key, nbytes in goes.items()]
    held = sum(nbytes for _, nbytes in filter(None, returned)) + tangent_bytes
    held += kept * is_retained
    peak = backward.peak(own) + held - sum(goes.values())
    return Told(kept, forward.peak(), peak)
