"""The compiled graphs of a training step, and the calls that a step makes of them.

A graph is split and compiled by the lean plan when a step first meets it, and anew, from
the joint graph that was traced, by each other plan that a call is to run by.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from contextlib import contextmanager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Callable, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch._functorch import config
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._guards import compile_context, CompileContext, tracing, TracingContext
from torch.fx.traceback import _get_memory_budget_annotation
from torch.utils._python_dispatch import _disable_current_modes

from . import memory_budget, planning
from .compiled_peak import (
    calls_nested_regions,
    CompiledPeaks,
    fresh_copy,
    has_guard,
    nodes_named_as,
    takes_request,
)
from .decision import Decision
from .graph_calls import backward_of, bytes_of, CALL, symbolic_sizes, with_warnings
from .step_plan import calls_assumed, GraphPlan, GraphPlans, plan_graph
from .step_recorder import Event, of_this_thread, Recorder


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.fx import GraphModule
    from .memory_budget import Planner

    from .step_budget import StepBudget


log = logging.getLogger(__name__)

__all__ = ["Call", "Graph", "Slots", "Step", "for_step", "running"]

# The step that this thread runs.
running: ContextVar[Optional[Step]] = ContextVar("running step", default=None)


def running_step() -> Optional[Step]:
    """The step that this thread runs, or that the backward which it serves is part of."""
    step: Optional[Step] = of_this_thread(running)
    return step


class Step:
    """One run of a step, and the calls that are made in it."""

    def __init__(self, budget: StepBudget) -> None:
        self.budget = budget
        self.recorder: Optional[Recorder] = None
        # The calls, in order; of graphs the numbers, as they may go meanwhile.
        self.seen: list[Any] = []
        # That whose forward runs.
        self.call: Optional[Call] = None
        self._taken: dict[int, set[int]] = {}
        self._context = ExitStack()

    def record(self) -> None:
        """Let `open` also record what the step does."""
        self.recorder = Recorder(self.budget.device)

    def open(self) -> None:
        running.set(self)
        # The plans of a step are not those that a cache has for its graphs.
        self._context.enter_context(config.patch(enable_autograd_cache=False))
        if self.recorder is not None:
            self._context.enter_context(self.recorder)

    def close(self) -> None:
        running.set(None)
        self.call = None
        self._context.close()

    def begin(self, graph: Graph, args: Sequence[Any]) -> tuple[Call, int]:
        """A call of a graph starts: which one, and by which plan."""
        slots = self.budget.graphs.setdefault(graph, Slots())
        size = bytes_of(args, graph.symbolic)
        keeps_saved = not self._is_checkpointed()
        # A checkpoint runs a call twice, and both have to save the same.
        slot, taken = 0, self._taken.setdefault(graph.number, set())
        while keeps_saved and slot in taken:
            slot += 1
        if keeps_saved:
            taken.add(slot)
        call = Call(graph, self, slot, keeps_saved)
        self.seen.append(("F", graph.number, slot, size))
        if self.recorder is not None:
            slots.calls += [0] * (slot + 1 - len(slots.calls))
            slots.calls[slot] += 1
            slots.scale = max(slots.scale, size / graph.size if graph.size else 1.0)
            slots.size = max(slots.size, size)
        choice = slots.choice
        if choice is None or slot >= len(slots.calls) or size > slots.size:
            return call, graph.lean
        return call, choice[slot]

    def end(self, call: Call) -> None:
        """Nothing is kept for the call any more."""
        if not call.ended:
            call.ended = True
            if call.keeps_saved:
                self._taken[call.graph.number].discard(call.slot)

    def _is_checkpointed(self) -> bool:
        """Whether a checkpoint around the call keeps nothing and runs it again."""
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            return False
        pack, _ = hooks
        if getattr(pack, "__module__", None) == torch.utils.checkpoint.__name__:
            return True
        self.budget.warn(
            "saved-tensor hooks are set around compiled graphs; whatever they keep "
            "instead of a saved value is counted as if the value were kept"
        )
        return False


@dataclass
class Slots:
    """The calls of a graph in a step; ``choice`` has the plan of each, if there is one."""

    calls: list[int] = field(default_factory=list)
    choice: Optional[tuple[int, ...]] = None
    # Of a graph for several shapes: what its plans' bytes are to be multiplied by.
    scale: float = 0.0
    size: int = 0


@dataclass(eq=False)
class Call:
    """A forward that ran and its backward, and the storages that it read and returned."""

    graph: Graph
    step: Step
    slot: int
    keeps_saved: bool
    ended: bool = False
    outputs: list[Optional[int]] = field(default_factory=list)
    inputs: list[Optional[int]] = field(default_factory=list)
    # Kept, so that it tells when the node goes without having run.
    node: Optional[weakref.ref[Any]] = None


_numbers = itertools.count()


class Graph:
    """A joint graph that was compiled in a step, and what was made of it by each plan."""

    def __init__(self, compile_graph: Callable[..., Any], *arguments: Any) -> None:
        self._compile_graph = compile_graph
        self._state, self._capture, self._partition, *self._compilers = arguments
        self.number = next(_numbers)
        self.name = get_aot_graph_name()
        self.plans = GraphPlans([GraphPlan(0, 0, 0, 0.0, frozenset(), frozenset())], 0)
        self.lean = 0
        self.fault = "its backend does not partition by the budget"
        # Partitioned before their caller, each by itself.
        self._is_nested = calls_nested_regions(self._capture.graph_module)
        if self._is_nested:
            self.fault = "it calls nested compiled regions, which have their own plans"
        self._is_retained = False
        self._variants: dict[int, Callable[..., Any]] = {}
        # The plans that were compiled with a guard against fusions, too.
        self._guarded: set[int] = set()
        self._contexts = TracingContext.try_get(), CompileContext.try_get()
        self._config = config.get_config_copy()
        self._num_fwd_outputs = 0
        self.symbolic, self.size = symbolic_sizes(self._state.flat_args)

    @functools.cached_property
    def may_save(self) -> frozenset[int]:
        """The outputs of the forward that some plan saves."""
        return frozenset().union(*(plan.outputs for plan in self.plans.plans))

    def first(self) -> Any:
        """Compile by the lean plan; returns what AOTAutograd wants in return."""
        run, metadata = self._compiled(None)
        self._variants[self.lean] = run

        def call(args: list[Any]) -> Any:
            return self._call(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call, metadata

    def _call(self, args: list[Any]) -> Any:
        step = running_step()
        run = self._variants[self.lean]
        if step is None:
            return run(args)
        call = None
        with step.budget.warn_on_failure(f"a call of {self.name} could not be tracked"):
            call, plan = step.begin(self, args)
            run = self._variant(plan, step.budget)
        step.call = call
        try:
            result = run(args)
        except BaseException:
            if call is not None:
                step.end(call)
            raise
        if call is not None:
            with step.budget.warn_on_failure(
                f"a call of {self.name} could not be tracked"
            ):
                self._await_backward(result, call)
        return result

    def _await_backward(self, result: Any, call: Call) -> None:
        """Let the backward of what was returned find its call, which ends with it."""
        step, node = call.step, backward_of(result)
        if node is None:
            step.end(call)
            return
        node.metadata[CALL] = call

        def died(_: Any) -> None:
            if not call.ended:
                step.end(call)
                if step.recorder is not None:
                    step.recorder.log.append(Event("x", call=call))

        call.node = weakref.ref(node, died)

    def _variant(self, plan: int, budget: StepBudget) -> Callable[..., Any]:
        if plan not in self._variants:
            # Unless it compiles.
            self._variants[plan] = self._variants[self.lean]
            failure = f"{self.name} keeps its first plan, as another failed to compile"
            with budget.warn_on_failure(failure), self._as_traced():
                self._variants[plan], _ = self._compiled(plan)
        return self._variants[plan]

    @contextmanager
    def _as_traced(self) -> Iterator[None]:
        from torch._inductor.virtualized import V

        traced, compiled = self._contexts
        with (
            # As Dynamo does; a caller's would see what is compiled.
            _disable_current_modes(),
            tracing(traced),
            compile_context(compiled),
            V.set_fake_mode(traced and traced.fake_mode),
            config.patch(self._config),
            torch.enable_grad(),
        ):
            yield

    def compile(self, plans: Iterable[int], budget: StepBudget) -> bool:
        """Compile by plans; whether what is known of one of their peaks is new."""
        known = dict(self.plans.compiled)
        for plan in sorted({*plans}):
            self._variant(plan, budget)
            if has_guard() and plan not in self._guarded and self._holds_more(plan):
                self._guarded.add(plan)
                failure = f"{self.name} failed to compile with fusions guarded"
                with budget.warn_on_failure(failure), self._as_traced():
                    self._compile_guarded(plan)
        return self.plans.compiled != known

    def _holds_more(self, plan: int) -> bool:
        """Whether what is compiled by a plan is known to hold more than it may."""
        margin: float = config.activation_memory_peak_margin  # type: ignore[attr-defined]
        estimate = max(self.plans.plans[plan][1:3])
        return max(self.plans.compiled.get(plan, (0, 0))) > estimate * (1 + margin)

    def _compile_guarded(self, plan: int) -> None:
        """Compile without the fusions that raise the peak, and keep what holds less."""
        before = self.plans.compiled[plan]
        run, _ = self._compiled(plan, guarded=True)
        if max(self.plans.compiled[plan]) < max(before):
            self._variants[plan] = run
        else:
            self.plans.compiled[plan] = before

    def _compiled(self, plan: Optional[int], guarded: bool = False) -> Any:
        """Split and compile a copy of the joint graph by a plan, None for the lean one."""
        # Splitting a graph writes down in there what it finds.
        state, capture = fresh_copy(self._state, self._capture)
        # Of another plan, what does not compile has to be known before it runs. But the
        # backward of a graph that is retained is compiled when that is seen.
        is_another = bool(self._variants) and not self._is_retained
        state.aot_config = replace(
            state.aot_config,
            cache_info=None,
            force_non_lazy_backward_lowering=is_another,
        )
        compiled = CompiledPeaks(*self._compilers)
        compiled.guarded = guarded

        def compile_backward(module: GraphModule, inputs: Sequence[Any]) -> Any:
            result = compiled.backward(module, inputs)
            model = self.plans.model
            if compiled.peaks is not None and model is not None:
                index = self.lean if plan is None else plan
                forward, backward = compiled.peaks
                self.plans.compiled[index] = forward, backward - model.held_by_caller
            return result

        partition = self._partition
        if not self._is_nested and takes_request(partition):
            request = _Variant(self, plan, compiled)
            partition = functools.partial(partition, request=request)
        return self._compile_graph(
            state,
            capture,
            partition,
            _marked(compiled.forward, self._forward),
            _marked(compile_backward, self._backward),
        )

    def _forward(self, run: Callable[..., Any], args: list[Any]) -> Any:
        step = running_step()
        call = step.call if step is not None else None
        recorder = call.step.recorder if call is not None else None
        if call is None or recorder is None:
            return run(args)
        with recorder.guarded():
            recorder.add_existing(args)
            call.inputs = recorder.add_created(args[: self.plans.primals])
        with recorder.around(Event("F", call=call)):
            results = run(args)
        with recorder.guarded():
            call.outputs = recorder.add_created(list(results[: self._num_fwd_outputs]))
        return results

    def _backward(self, run: Callable[..., Any], args: list[Any]) -> Any:
        node: Any = torch._C._current_autograd_node()
        call = node.metadata.get(CALL) if node is not None else None
        step = running_step()
        # To another step, what is left of one is as eager code.
        if call is None or step is None or call.step is not step:
            return run(args)
        is_retained = torch._C._autograd._get_current_graph_task_keep_graph()
        self._is_retained |= is_retained
        step.seen.append(("B", self.number, call.slot, is_retained))
        recorder = step.recorder
        if recorder is None:
            results = run(args)
        else:
            inputs: list[Optional[int]] = []
            with recorder.guarded():
                tangents = [each for each in args if isinstance(each, torch.Tensor)]
                del tangents[: len(tangents) - self.plans.tangents]
                inputs = call.inputs + recorder.add_created(tangents)
                del tangents
            begin = Event("B", call=call, flag=is_retained, inputs=inputs)
            with recorder.around(begin):
                results = run(args)
            with recorder.guarded():
                recorder.add_created(list(results))
        if not is_retained:
            step.end(call)
        return results

    # ----------------------------------------------------------------- its plans

    def decide(self, graph: Planner, plan: Optional[int]) -> Decision:
        """What to save by one of the plans, None for the lean one."""
        if self.plans.model is None:
            try:
                self._find_plans(graph)
            except Exception as error:
                log.debug("no plans for %s", self.name, exc_info=error)
                self.fault = f"{type(error).__name__}: {error}"
                return planning.by_config(graph)
        model: Any = self.plans.model
        index = self.lean if plan is None else plan
        evaluation = model.evaluate(self.plans.plans[index].storages)
        saved = nodes_named_as(model.saved_values(evaluation.saved), graph.joint)
        return Decision(saved, graph.budget, "step", graph.kept_bytes(saved))

    def _find_plans(self, graph: Planner) -> None:
        self._num_fwd_outputs = graph.num_fwd_outputs
        # A budget that the user gave to a region of the model stays.
        is_only = graph.budget != config.activation_memory_budget or any(
            _get_memory_budget_annotation(node) is not None
            for node in graph.joint.nodes
        )
        chosen = memory_budget.decide(graph, graph.budget if is_only else 1)
        self.plans = plan_graph(graph, chosen.saved_values, is_only)
        self.fault = ""
        self.lean = self.plans.leanest(calls_assumed())


class _Variant(NamedTuple):
    """The request for one of a graph's plans."""

    graph: Graph
    plan: Optional[int]
    compiled: CompiledPeaks

    def decide(self, graph: Planner) -> Decision:
        self.compiled.num_fwd_outputs = graph.num_fwd_outputs
        return self.graph.decide(graph, self.plan)


def _marked(compile_graph: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """A compiler whose results are called by ``run``."""

    def compile_marked(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        compiled = compile_graph(graph, inputs)
        if not getattr(compiled, "_boxed_call", False):
            unboxed = compiled
            compiled = lambda args: unboxed(*args)  # noqa: E731

        def call(args: list[Any]) -> Any:
            return run(compiled, args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return compile_marked


def for_step(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """``aot_stage2_autograd``, so that graphs can be compiled again by a step's plan."""

    def compile_for_step(*arguments: Any) -> Any:
        step = running_step()
        # Without a context, inductor traces its patterns, amid a compilation.
        if step is not None and TracingContext.try_get() is not None:
            failure = "a graph failed to compile with a lean plan and is not counted"
            with step.budget.warn_on_failure(failure):
                return Graph(compile_graph, *arguments).first()
        run, metadata = compile_graph(*arguments)
        return with_warnings(run, arguments[0].flat_args, metadata), metadata

    return compile_for_step
