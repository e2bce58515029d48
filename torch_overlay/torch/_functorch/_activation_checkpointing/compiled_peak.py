"""Compile a joint graph again where its kernels hold more than was asked for.

The planner of the activation memory budget estimates what inductor's kernels hold.  What
they do hold is in the wrappers that inductor generates, which are read for it
(:mod:`torch._inductor.wrapper_memory`).  Where that is above the peak asked for, the
joint graph is split and compiled anew, before anything has run: by the same plan without
the fusions that raise a graph's peak, and then by another plan, as the estimates are
corrected by what was told.  Of `.search.TRIES` plans that are all above, the lowest is kept,
and a warning has both numbers.

A backward is therefore compiled with its forward, not when it first runs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._functorch._aot_autograd.utils import _is_tangent
from torch._inductor import config as inductor_config
from torch._inductor.fx_utils import get_node_storage
from torch._inductor.utils import output_node
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from . import planning, saved_report
from .ask import Ask
from .decision import Peak
from .menu import Names, Told
from .joint import activation_bytes
from .peak_target import CALLS, PeakBytes
from .search import Search


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch.fx as fx
    from ..._inductor.wrapper_memory import WrapperMemory
    from .decision import Decision
    from .joint import Planner
    from .curve import Choice
    from .menu import Menu, Missing


log = logging.getLogger(__name__)

__all__ = [
    "GUARD",
    "CompiledPeaks",
    "calls_nested_regions",
    "copy_of",
    "fresh_copy",
    "nodes_named_as",
    "peaks_of",
    "takes_request",
    "within_peak",
]

_MOST_OF_PEAK = "fusion_memory_timeline_peak_memory_pct_threshold"
# Inductor's option by which fusions do not raise a graph's peak, and its value.
GUARD: dict[str, Any] = (
    {_MOST_OF_PEAK: 0.0}
    if hasattr(inductor_config, _MOST_OF_PEAK)
    # Kernels that only read the same stay apart, so each runs when it is needed.
    else {"score_fusion_memory_threshold": sys.maxsize}
)


def has_guard() -> bool:
    """Whether fusions can be guarded, and are not yet."""
    return any(getattr(inductor_config, name) != GUARD[name] for name in GUARD)


class CompiledPeaks:
    """The two compilers of a joint graph, and what the graphs that they compile hold.

    ``told`` is in bytes, as `peaks_of` has them, or None where the backward is not
    compiled yet or its compiler does not tell.  Where ``guarded``, no fusion may raise
    the peaks.
    """

    def __init__(self, *compilers: Callable[..., Any]) -> None:
        self._compilers = compilers
        self.guarded = False
        self.num_fwd_outputs = 0
        # The device whose bytes count.
        self.device = torch.device("cpu")
        # What a step's calls miss, and so nobody holds.
        self.missing: Optional[Missing] = None
        self.told: Optional[Told] = None
        # The same, where the backward alone holds what these names stand for.
        self.told_alone: Callable[[Names], Told]
        self._memory: Optional[WrapperMemory] = None

    def forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        # A compiler may change the graph.
        results: Any = output_node(module).args[0]
        self._results = _names(results)
        placeholders = module.graph.find_nodes(op="placeholder")
        self._storages = {get_node_storage(node) for node in placeholders}
        compiled = self._compile(0, module, inputs)
        self._memory = getattr(compiled, "memory", None)
        return compiled

    def backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        absent, gone = self.missing or ((), ())
        saved = module.graph.find_nodes(op="placeholder")
        names = _names(saved)
        tangents = [
            node
            for node in saved
            if _is_tangent(node) and get_node_storage(node) not in self._storages
        ]
        held = [node for at, node in enumerate(tangents) if at not in absent]
        tangent_bytes = activation_bytes((), held, self.device)
        compiled = self._compile(1, module, inputs)
        memory = getattr(compiled, "memory", None)
        if self._memory is not None and memory is not None:
            n = self.num_fwd_outputs
            of = enumerate(self._memory.results)
            results = tuple(None if at in gone else result for at, result in of)
            forward = self._memory._replace(results=results)
            asked = self._results, names, forward, memory, n, tangent_bytes
            self.told = peaks_of(*asked)
            self.told_alone = functools.partial(peaks_of, *asked)
        return compiled

    def _compile(
        self, phase: int, module: fx.GraphModule, inputs: Sequence[Any]
    ) -> Any:
        options = {"live_bytes_of": str(self.device), **(GUARD if self.guarded else {})}
        with inductor_config.patch(options):
            return self._compilers[phase](module, inputs)


def _names(values: Iterable[Any]) -> list[Optional[str]]:
    return [value.name if isinstance(value, Node) else None for value in values]


def peaks_of(
    results: Sequence[Optional[str]],
    saved: Sequence[Optional[str]],
    forward: WrapperMemory,
    backward: WrapperMemory,
    num_fwd_outputs: int,
    tangent_bytes: int,
    alone: Names = (),
) -> Told:
    """What the two graphs of a joint graph hold; parameters and inputs do not count.

    Args:
        results: the names of the nodes that the forward returns, those to its caller
            first, which are ``num_fwd_outputs``.
        saved: those of the placeholders of the backward.
        forward: the memory of its wrapper; ``backward`` likewise.
        tangent_bytes: of the tangents.
        alone: of inputs, tangents and what the forward returned, the names and bytes of
            those that go with their last use in the backward.  It then has their bytes
            less, as if somebody held them to the end and counted them.
    """
    outputs = dict(zip(results[:num_fwd_outputs], forward.results))
    returned = {*outputs.values()} - {None}
    made = dict(zip(results[num_fwd_outputs:], forward.results[num_fwd_outputs:]))
    # Of what the forward made, by its storage, and of what it was given, by its name.
    places: dict[Any, list[int]] = defaultdict(list)
    for place, name in enumerate(saved):
        places[made.get(name) or name].append(place)
    owned = [s for s in {*made.values()} - returned if s is not None and s in places]
    kept = sum(nbytes for _, nbytes in owned)
    goes = {outputs.get(name) or name: nbytes for name, nbytes in alone}
    goes = {key: nbytes for key, nbytes in goes.items() if key in places}
    own = [(storage[1], places[storage]) for storage in owned]
    own += [(nbytes, places[key]) for key, nbytes in goes.items()]
    held = sum(nbytes for _, nbytes in filter(None, returned)) + tangent_bytes
    peak = backward.peak(own) + held - sum(goes.values())
    return Told(kept, forward.peak(), peak)


# -------------------------------------------------------------------- compile again


class _Over(Exception):
    """The plan that was compiled is not the one to keep."""


def within_peak(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """``aot_stage2_autograd``, so that what it compiles is within the peak asked for."""

    @functools.wraps(compile_graph)
    def compile_within(*arguments: Any) -> Any:
        asked = _asked(*arguments)
        if asked is None:
            return compile_graph(*arguments)
        compiles = _Compiles(asked)
        while True:
            try:
                return compiles.compile(compile_graph, *arguments)
            except _Over:
                continue
            except RestartAnalysis:
                # Dynamo's way to begin anew.
                raise
            except Exception as error:
                # Where it is only the backward, it may never be needed.
                log.debug("no search for a plan", exc_info=error)
                log.warning(
                    "%s gets its plan by estimates, and may hold more than the activation "
                    "memory budget allows, as a plan failed to compile: %s: %s",
                    get_aot_graph_name(),
                    type(error).__name__,
                    error,
                )
                return compile_graph(*arguments)

    return compile_within


def _asked(
    state: Any, capture: Any, partition: Callable[..., Any], *compilers: Any
) -> Optional[PeakBytes]:
    """The peak that is asked of a graph whose compilers tell what they hold, or None."""
    if (
        not isinstance(compilers[0], SerializableAOTDispatchCompiler)
        or not takes_request(partition)
        or calls_nested_regions(capture.graph_module)
    ):
        return None
    ask = Ask.of_config()
    asked = planning.requested(ask, ask.budget)
    return asked if isinstance(asked, PeakBytes) else None


class _Try(NamedTuple):
    """A plan to compile, with or without a guard against fusions that raise the peak."""

    plan: int
    is_guarded: bool = False


class _Compiles:
    """The compiles of a joint graph, by one plan after the other."""

    def __init__(self, asked: PeakBytes) -> None:
        self.asked = asked
        self.trying, self.is_last = _Try(0), False
        # None where the graph gets a plan that was not asked for.
        self.menu: Optional[Menu] = None
        # Whether each plan that was compiled holds less where fusions are guarded.
        self._guards: dict[int, bool] = {}

    def compile(self, compile_graph: Callable[..., Any], *arguments: Any) -> Any:
        """Try one plan; raises `_Over` where another one is to be tried."""
        state, capture, partition, *compilers = arguments
        state, capture = fresh_copy(state, capture)
        state.aot_config = replace(
            state.aot_config, force_non_lazy_backward_lowering=True
        )
        self.peaks = CompiledPeaks(*compilers)
        self.peaks.guarded = self.trying.is_guarded

        def compile_backward(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            compiled = self.peaks.backward(module, inputs)
            # Before it is cached.
            if self.menu is not None and self.peaks.told is not None:
                self._check(self.menu, self.peaks.told, state.fw_metadata)
            return compiled

        return compile_graph(
            state,
            capture,
            functools.partial(partition, request=self),
            _like(compilers[0], self.peaks.forward),
            _like(compilers[1], compile_backward),
        )

    def decide(self, graph: Planner) -> Decision:
        """By the plan that is to be tried now."""
        if graph.budget != graph.ask.budget:
            # A region has its own.
            return planning.by_config(graph)
        if self.menu is None:
            self._begin(graph)
        self.peaks.num_fwd_outputs = graph.num_fwd_outputs
        self.peaks.device = graph.counted
        plan = self.curve.of_plan(self.trying.plan)
        decision = self.asked.decision(graph, self.curve, plan)
        saved = nodes_named_as(decision.saved_values, graph.joint)
        return replace(decision, saved_values=saved)

    def _begin(self, graph: Planner) -> None:
        menu = self.menu = self.asked.menu(graph)
        self.curve = self.asked.curve(graph, menu)
        allowed = self.allowed = self.asked.allowed(self.curve)
        moments = self.asked.moments(menu)
        self.search = Search(lambda: {0: menu}, CALLS, moments, self.asked.margin)
        self._plans = self.search.within(allowed, lambda curve: curve.within(allowed))
        self.trying = _Try(next(self._plans).only)

    def _check(self, menu: Menu, told: Told, metadata: Any) -> None:
        """Keep what was compiled, or raise `_Over`."""
        # Another thread may have compiled the last one of all.
        report: Any = saved_report.kept_plan(metadata)
        if not self.is_last:
            plan, is_guarded = self.trying
            if menu.tell(plan, told, self.peaks.told_alone):
                self._guards[plan] = is_guarded
            self.trying = self._next(menu)
            if self.trying != (plan, is_guarded):
                saved_report.replace_plan(report, None)
                log.info(
                    "%s: a plan of an estimated %d bytes holds %d, where %d are allowed; "
                    "it is compiled again",
                    get_aot_graph_name(),
                    report.peak.predicted,
                    max(told.forward, told.backward),
                    report.peak.allowed,
                )
                raise _Over
        allowed, floor, kept = self._kept()
        fastest = report.peak.fastest
        peak = Peak(allowed, kept.peak, floor, fastest, report.peak.fused, True)
        peak.warn_if_over()
        saved_report.keep_peak(peak, metadata)

    def _next(self, menu: Menu) -> _Try:
        """What to compile now, or what was compiled already and is to stay."""
        plan, is_guarded = self.trying
        is_within = self.search.known().within(self.allowed).peak <= self.allowed
        may_guard = not is_guarded and not is_within and has_guard()
        if may_guard and menu.holds_more(plan, self.asked.margin):
            return _Try(plan, True)
        following = next(self._plans, None)
        if following is not None:
            # As that which was compiled last.
            return _Try(following.only, self._guards[plan])
        self.is_last = True
        *_, kept = self._kept()
        return _Try(kept.only, self._guards.get(kept.only, False))

    def _kept(self) -> tuple[int, int, Choice]:
        """What is allowed, the floor, and which of the plans that were compiled stays."""
        known, allowed = self.search.known(), self.allowed
        kept = known.within(allowed)
        if kept.peak <= allowed:
            return allowed, min(self.curve.floor, known.floor), kept
        if self.asked.limit is None:
            # The floor of a share is what was reached.
            allowed = max(allowed, known.allowed(self.asked.budget))
        return allowed, known.floor, known.within(allowed)


def _like(compiler: Any, compile_graph: Callable[..., Any]) -> Any:
    """A compiler that AOTAutograd takes for the same kind as another."""
    if isinstance(compiler, SerializableAOTDispatchCompiler):
        return SerializableAOTDispatchCompiler(compiler.output_code_ty, compile_graph)
    return compile_graph


def takes_request(partition: Callable[..., Any]) -> bool:
    """Whether a partitioner splits by what is asked of it, and nothing is yet."""
    if "request" in getattr(partition, "keywords", {}):
        return False
    parameters = inspect.signature(partition).parameters
    kinds = (parameter.kind for parameter in parameters.values())
    return "request" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def calls_nested_regions(module: fx.GraphModule) -> bool:
    """Whether a joint graph has regions that are partitioned before it, by themselves."""
    call = torch.ops.higher_order.invoke_subgraph
    return bool(module.graph.find_nodes(op="call_function", target=call))


def nodes_named_as(nodes: Iterable[Node], graph: fx.Graph) -> list[Node]:
    """The nodes of a graph with the names of those of another trace of the same.

    Raises RuntimeError where some are missing.
    """
    wanted = {node.name for node in nodes}
    found = [node for node in graph.nodes if node.name in wanted]
    if len(found) != len(wanted):
        raise RuntimeError(f"{get_aot_graph_name()} was traced into another graph")
    return found


def fresh_copy(state: Any, capture: Any) -> tuple[Any, Any]:
    """AOTAutograd's state and captured graph, to be compiled: which writes into both."""
    state, capture = _own_copy((state, capture), {})
    capture.graph_module = copy_of(capture.graph_module)
    return state, capture


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    with unset_fake_temporarily(), warnings.catch_warnings():
        # Upstream's copy of a graph makes leaves of tree specs by their deprecated class.
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        # Its constants are real tensors.
        return copy.deepcopy(module)


def _own_copy(value: Any, made: dict[int, Any]) -> Any:
    """A copy of AOTAutograd's records and of all that is in them, but for tensors."""
    if id(value) in made:
        return made[id(value)]
    kind, found = type(value), value
    if kind in (list, tuple):
        found = kind(_own_copy(each, made) for each in value)
    elif kind is dict:
        found = {key: _own_copy(each, made) for key, each in value.items()}
    elif is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(value)
        made[id(value)] = found
        for name, each in vars(value).items():
            object.__setattr__(found, name, _own_copy(each, made))
    made[id(value)] = found
    return found
