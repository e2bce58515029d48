"""Recompiles a joint graph whose kernels hold more than was asked for.

The planner only estimates what inductor's kernels hold.  What they really hold is read
from the wrappers that inductor generates (:mod:`torch._inductor.wrapper_memory`).  If
that exceeds the peak asked for, the joint graph is split and compiled again before
anything runs: first by the same plan without the fusions that raise a graph's peak,
then by other plans.  These are chosen by estimates, corrected by what was told.  If
all ``TRIES`` compiles exceed the peak, the lowest plan is also compiled without these
fusions.  If it still exceeds the peak, it is kept, and a warning has both numbers.

A backward is therefore compiled with its forward, not when it first runs.  But the
compilation of kernels waits until a plan is kept
(:mod:`torch._inductor.deferred_kernels`).
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

from torch._dynamo.exc import RestartAnalysis
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._guards import TracingContext

from ...._inductor.deferred_kernels import DeferredKernels

from ..ask import Ask
from ..decide import decide_by_config, request_of_config
from ..decision import Peak
from ..peak.peak_bytes import CALLS, PeakBytes
from ..report.saved_values import log_peak, logged_plan, replace_plan
from .recompile import (
    fresh_copy,
    has_nested_regions,
    partition_by,
    same_nodes_in,
    takes_request,
)
from .search import Search
from .told import can_guard, CompiledPeaks


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.fx as fx
    from ..decision import Decision
    from ..graph.joint import BudgetedGraph
    from ..peak.curve import Choice, Curve
    from ..peak.footprint import Tell
    from ..peak.menu import Menu


log = logging.getLogger(__name__)


# The most times that a graph is compiled; a fourth plan was hardly ever better.
TRIES = 3


class _PlanRejected(Exception):
    """The plan just compiled is not the one to keep."""


def within_peak(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``aot_stage2_autograd`` to compile graphs within the peak asked for.

    If a plan fails to compile, a warning says so, and the graph is compiled without a
    search.
    """

    @functools.wraps(compile_graph)
    def compile_within(*arguments: Any) -> Any:
        _, capture, partition, *_ = arguments
        asked = _peak_asked_for(capture.graph_module, partition)
        if asked is None:
            return compile_graph(*arguments)
        compiles = _Compiles(asked, partition)
        while True:
            try:
                return compiles.compile(compile_graph, *arguments)
            except _PlanRejected:
                continue
            except RestartAnalysis:
                # Not a failure: Dynamo raises this to start over.
                raise
            except Exception as error:
                # If only the backward fails to compile, it may never be needed.
                log.debug("no search for a plan", exc_info=error)
                # Without a menu, planning or compiling below reports what is wrong.
                if compiles.menu is not None:
                    log.warning(
                        "%s gets its plan by estimates, and may hold more than the "
                        "activation memory budget allows, as a plan failed to compile: "
                        "%s: %s",
                        get_aot_graph_name(),
                        type(error).__name__,
                        error,
                    )
                return compile_graph(*arguments)

    return compile_within


def _peak_asked_for(
    module: fx.GraphModule, partition: Callable[..., Any]
) -> Optional[PeakBytes]:
    """The peak asked for, None if no plans of the joint graph are to be searched."""
    # Without a context, inductor is tracing its own patterns.
    if TracingContext.try_get() is None:
        return None
    if not takes_request(partition) or has_nested_regions(module):
        return None
    ask = Ask.of_config()
    asked = request_of_config(ask, ask.budget)
    return asked if isinstance(asked, PeakBytes) else None


class _Try(NamedTuple):
    """The index of a plan to compile, and whether to avoid fusions that raise peaks."""

    plan: int
    is_guarded: bool = False


class _Compiles:
    """Compiles a joint graph by one plan after the other."""

    def __init__(self, asked: PeakBytes, partition: Callable[..., Any]) -> None:
        self.asked = asked
        self._partition = partition_by(partition, self)
        self.trying, self.is_last = _Try(0), False
        # None until the graph's plans have been found.
        self.menu: Optional[Menu] = None
        # For each compiled plan, whether its lowest peak is that with guarded fusions.
        self._guards: dict[int, bool] = {}
        # By try and graph, what was compiled and the output strides that it reported.
        self._codes: dict[tuple[_Try, str], tuple[Any, list[Any]]] = {}
        self._kernels: dict[_Try, DeferredKernels] = {}

    def compile(self, compile_graph: Callable[..., Any], *arguments: Any) -> Any:
        """Compile by one plan.  Raises `_PlanRejected` if another one is to be tried."""
        state, capture, _, *compilers = arguments
        state, capture = fresh_copy(state, capture)
        state.aot_config = replace(
            state.aot_config, force_non_lazy_backward_lowering=True
        )
        kernels = self._kernels.setdefault(self.trying, DeferredKernels())
        self.peaks = CompiledPeaks(*map(self._compile_once, compilers), kernels=kernels)
        self.peaks.guarded = self.trying.is_guarded

        def compile_backward(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            compiled = self.peaks.backward(module, inputs)
            # Checked here, before the graphs are cached.
            if self.menu is not None and self.peaks.tell is not None:
                self._check_told(self.menu, self.peaks.tell, state.fw_metadata)
            return compiled

        try:
            compiled = compile_graph(
                state,
                capture,
                self._partition,
                _compiler_like(compilers[0], self.peaks.forward),
                _compiler_like(compilers[1], compile_backward),
            )
            kernels.compile()
            # AOTAutograd keeps the backward's compiler, and so this.
            self._codes.clear()
            self._kernels.clear()
            del self._partition
        except BaseException:
            # The graph is compiled again, or not at all.
            replace_plan(logged_plan(state.fw_metadata), None)
            raise
        return compiled

    def _compile_once(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        """A compiler that compiles nothing twice: the plan to keep is tried again."""

        def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            strides = getattr(TracingContext.try_get(), "output_strides", None)
            strides = [] if strides is None else strides
            key = self.trying, str(module.graph)
            if key in self._codes:
                code, reported = self._codes[key]
                strides.extend(reported)
                return code
            before = len(strides)
            code = compiler(module, inputs)
            self._codes[key] = code, strides[before:]
            return code

        return compile_graph

    def decide(self, graph: BudgetedGraph) -> Decision:
        """The decision by the plan that is to be tried now."""
        if not _can_compare_compiled(graph):
            return decide_by_config(graph)
        if self.menu is None:
            self.begin(graph)
        self.peaks.num_fwd_outputs = graph.num_fwd_outputs
        self.peaks.device = graph.counted_device
        plan = self.curve.of_plan(self.trying.plan)
        decision = self.asked.decision(graph, self.curve, plan)
        saved = same_nodes_in(decision.saved_values, graph.joint)
        return replace(decision, saved_values=saved)

    @property
    def has_begun(self) -> bool:
        return self.menu is not None

    @property
    def chunks(self) -> int:
        return 1 if self.menu is None else self.menu.plans[self.trying.plan].chunks

    def begin(self, graph: BudgetedGraph) -> None:
        """Find the graph's plans, and choose the first to compile."""
        if not _can_compare_compiled(graph):
            return
        menu = self.menu = self.asked.menu(graph)
        self.curve = self.asked.curve(graph, menu)
        allowed = self.allowed = self.asked.peak_allowed(self.curve)
        moments = self.asked.moments(menu)
        margin = self.asked.margin
        self.search = Search(lambda: {0: menu}, CALLS, moments, margin, TRIES)
        self._plans = self.search.plans_to_compile(lambda: allowed)
        self.trying = _Try(next(self._plans).only)

    def _check_told(self, menu: Menu, tell: Tell, metadata: Any) -> None:
        """Keep what was compiled, or raise `_PlanRejected`."""
        # Not `last_plan`, which may be that of another thread.
        report: Any = logged_plan(metadata)
        if not self.is_last:
            plan, is_guarded = self.trying
            if menu.record_told(plan, tell, only_if_less=is_guarded):
                self._guards[plan] = is_guarded
            self.trying = self._next_try(menu)
            if self.trying != (plan, is_guarded):
                log.info(
                    "%s: a plan of an estimated %d bytes holds %d, where %d are "
                    "allowed; it is compiled again",
                    get_aot_graph_name(),
                    report.peak.predicted,
                    max(tell()[1:]),
                    report.peak.allowed,
                )
                raise _PlanRejected
        allowed, kept, curve = self._plan_to_keep()
        reached = curve.floor, curve.unbudgeted.peak
        peak = Peak(allowed, kept.peak, *reached, report.peak.fused, True)
        peak.warn_if_over(report.head)
        log_peak(peak, metadata)

    def _next_try(self, menu: Menu) -> _Try:
        """What to compile next, or, at the end, which of the compiled plans to keep."""
        plan, is_guarded = self.trying
        is_within = (
            self.search.compiled_plans().within(self.allowed).peak <= self.allowed
        )
        is_first = len(self._guards) == 1 and not is_guarded
        over = not is_within and menu.holds_more(plan, self.asked.margin)
        if is_first and over and can_guard():
            self.search.count_try()
            return _Try(plan, True)
        following = next(self._plans, None)
        if following is not None:
            # Guarded if the plan compiled last holds less that way.
            return _Try(following.only, self._guards[plan])
        allowed, kept, _ = self._plan_to_keep()
        guarded = _Try(kept.only, True)
        if kept.peak > allowed and guarded not in self._kernels and can_guard():
            return guarded
        self.is_last = True
        return _Try(kept.only, self._guards.get(kept.only, False))

    def _plan_to_keep(self) -> tuple[int, Choice, Curve]:
        share = self.asked.budget if self.asked.limit is None else None
        return self.search.plan_to_keep(self.allowed, share)


def _can_compare_compiled(graph: BudgetedGraph) -> bool:
    """Whether plans of a graph can be compared as compiled, for the config's budget."""
    # A region may have its own budget, and only inductor's graphs tell what they hold.
    return graph.budget == graph.ask.budget and graph.fused


def _compiler_like(compiler: Any, compile_graph: Callable[..., Any]) -> Any:
    """``compile_graph``, as a compiler that AOTAutograd treats like ``compiler``."""
    if isinstance(compiler, SerializableAOTDispatchCompiler):
        return SerializableAOTDispatchCompiler(compiler.output_code_ty, compile_graph)
    return compile_graph
