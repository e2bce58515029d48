"""The compiled graphs of a training step, and the calls that a step makes of them.

A graph is split and compiled by the lean plan when a step first meets it, and anew, from
the joint graph that was traced, by each other plan that a call is to run by.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Callable, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch._functorch import config
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import compile_context, CompileContext, tracing, TracingContext
from torch.fx.traceback import _get_memory_budget_annotation
from torch.utils._python_dispatch import _disable_current_modes

from . import memory_budget
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
from .liveness import CannotPlan
from .step_plan import GraphPlans, plan_graph
from .step_recorder import Event, Recorder, running, running_step


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.fx import GraphModule
    from .memory_budget import Planner

    from .step_budget import StepBudget


__all__ = ["Call", "Graph", "Step", "for_step"]

# Calls of a graph that are taken to be alive at once before a step has shown it.
_CALLS = 4


@dataclass(eq=False)
class Call:
    """A forward that ran and its backward, and the storages that it read and returned."""

    graph: Graph
    step: Step
    # By how much its inputs are larger than those that the graph was traced for.
    scale: float
    slot: int
    keeps_saved: bool
    outputs: list[Optional[int]] = field(default_factory=list)
    inputs: list[Optional[int]] = field(default_factory=list)
    # Kept, so that it tells when the node goes without having run.
    node: Optional[weakref.ref[Any]] = None


class Step:
    """One run of a step, which is to be ``like`` another one, or is recorded."""

    def __init__(self, budget: StepBudget, like: Optional[Step]) -> None:
        self.budget = budget
        self.recorder: Optional[Recorder] = None
        # The plans of a graph's slots, and the largest scale that those are for. Weak: a
        # graph goes with the model that it was compiled for.
        self.choices: weakref.WeakKeyDictionary[Graph, tuple[tuple[int, ...], float]]
        if like is None:
            self.recorder = Recorder(budget.device, budget.allocated())
            self.choices = weakref.WeakKeyDictionary()
        else:
            self.choices = like.choices
        # The calls, in order; of graphs the numbers, as they may go meanwhile.
        self.seen: list[Any] = []
        # That whose forward runs.
        self.call: Optional[Call] = None
        # Those that something is kept for.
        self._waiting: set[Call] = set()
        self._context = ExitStack()

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
        size = bytes_of(args, graph.symbolic)
        scale = size / graph.size if graph.size else 1.0
        # A checkpoint runs a call twice, and both have to save the same.
        call = Call(graph, self, scale, 0, keeps_saved=not self._is_checkpointed())
        if call.keeps_saved:
            taken = {each.slot for each in self._waiting if each.graph is graph}
            call.slot = next(k for k in itertools.count() if k not in taken)
            self._waiting.add(call)
        self.seen.append(("F", graph.number, call.slot, size))
        plans, largest = self.choices.get(graph, ((), 0.0))
        is_planned = call.slot < len(plans) and scale <= largest
        return call, plans[call.slot] if is_planned else graph.lean

    def end(self, call: Call) -> bool:
        """Nothing is kept for the call any more; whether something was."""
        is_waiting = call in self._waiting
        self._waiting.discard(call)
        return is_waiting

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


_numbers = itertools.count()


class Graph:
    """A joint graph that was compiled in a step, and what was made of it by each plan.

    Raises CannotPlan where it is not the planner that splits it.
    """

    # Its plans, from its first compile on, and which of them that is by.
    plans: GraphPlans
    lean: int

    def __init__(self, compile_graph: Callable[..., Any], *arguments: Any) -> None:
        self._compile_graph = compile_graph
        self._state, self._capture, self._partition, *self._compilers = arguments
        if not takes_request(self._partition):
            raise CannotPlan("its backend does not partition by the budget")
        # Partitioned before their caller, each by itself.
        if calls_nested_regions(self._capture.graph_module):
            raise CannotPlan("it calls nested compiled regions")
        self.number = next(_numbers)
        self.name = get_aot_graph_name()
        self._is_retained = False
        self._runs: dict[int, Callable[..., Any]] = {}
        # The plans that were compiled with a guard against fusions, too.
        self._guarded: set[int] = set()
        self._contexts = TracingContext.try_get(), CompileContext.try_get()
        self._config = config.get_config_copy()
        self._num_fwd_outputs = 0
        self.symbolic, self.size = symbolic_sizes(self._state.flat_args)

    def first(self) -> Any:
        """Compile by the lean plan; returns what AOTAutograd wants in return."""
        run, metadata = self._compiled(None)
        self._runs[self.lean] = run
        return _boxed(self._call), metadata

    def _call(self, args: list[Any]) -> Any:
        step, run = running_step(), self._runs[self.lean]
        if step is None:
            return run(args)
        call, failure = None, f"a call of {self.name} could not be tracked"
        with step.budget.warn_on_failure(failure):
            call, plan = step.begin(self, args)
            run = self._runs[plan]
        step.call = call
        try:
            result = run(args)
        except BaseException:
            if call is not None:
                step.end(call)
            raise
        if call is not None:
            with step.budget.warn_on_failure(failure):
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
            if step.end(call) and step.recorder is not None:
                step.recorder.log.append(Event("x", call=call))

        call.node = weakref.ref(node, died)

    # -------------------------------------------------------------- its compiles

    def compile(self, plans: Iterable[int], budget: StepBudget) -> bool:
        """Compile by plans; whether what is known of one of their peaks is new."""
        known = dict(self.plans.told)
        for plan in sorted({*plans}):
            failure = f"{self.name} keeps its first plan, as another failed to compile"
            if plan not in self._runs:
                # Unless it compiles.
                self._runs[plan] = self._runs[self.lean]
                with budget.warn_on_failure(failure), self._as_traced():
                    self._runs[plan], _ = self._compiled(plan)
            if has_guard() and plan not in self._guarded and self._holds_more(plan):
                self._guarded.add(plan)
                failure = f"{self.name} failed to compile with fusions guarded"
                with budget.warn_on_failure(failure), self._as_traced():
                    self._compile_guarded(plan)
        return self.plans.told != known

    def _holds_more(self, plan: int) -> bool:
        """Whether what is compiled by a plan is known to hold more than it may."""
        margin: float = config.activation_memory_peak_margin  # type: ignore[attr-defined]
        estimate = max(self.plans.plans[plan].forward, self.plans.plans[plan].backward)
        return max(self.plans.told.get(plan, (0, 0))) > estimate * (1 + margin)

    def _compile_guarded(self, plan: int) -> None:
        """Compile without the fusions that raise the peak, and keep what holds less."""
        before = self.plans.told[plan]
        run, _ = self._compiled(plan, is_guarded=True)
        if max(self.plans.told[plan]) < max(before):
            self._runs[plan] = run
        else:
            self.plans.told[plan] = before

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

    def _compiled(self, plan: Optional[int], is_guarded: bool = False) -> Any:
        """Split and compile a copy of the joint graph by a plan, None for the lean one."""
        # Splitting a graph writes down in there what it finds.
        state, capture = fresh_copy(self._state, self._capture)
        # Of another plan, what does not compile has to be known before it runs. But the
        # backward of a graph that is retained is compiled when that is seen.
        is_another = plan is not None and not self._is_retained
        state.aot_config = replace(
            state.aot_config,
            cache_info=None,
            force_non_lazy_backward_lowering=is_another,
        )
        compiled = CompiledPeaks(*self._compilers)
        compiled.guarded = is_guarded

        def compile_backward(module: GraphModule, inputs: Sequence[Any]) -> Any:
            result = compiled.backward(module, inputs)
            if compiled.peaks is not None:
                forward, backward = compiled.peaks
                index = self.lean if plan is None else plan
                held = self.plans.model.held_by_caller
                self.plans.told[index] = forward, backward - held
            return result

        return self._compile_graph(
            state,
            capture,
            functools.partial(self._partition, request=_Variant(self, plan, compiled)),
            _marked(compiled.forward, self._forward),
            _marked(compile_backward, self._backward),
        )

    def _forward(self, run: Callable[..., Any], args: list[Any]) -> Any:
        step = running_step()
        call = step.call if step is not None else None
        if call is None or call.step.recorder is None:
            return run(args)
        recorder = call.step.recorder
        call.inputs = recorder.numbers(args, is_existing=True)[: self.plans.primals]
        with recorder.around(Event("F", call=call, flag=call.keeps_saved)):
            results = run(args)
        call.outputs = recorder.numbers(list(results[: self._num_fwd_outputs]))
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
            inputs = call.inputs + recorder.numbers(self._tangents(args))
            begin = Event("B", call=call, flag=is_retained, inputs=inputs)
            with recorder.around(begin):
                results = run(args)
            recorder.numbers(list(results))
        if not is_retained:
            step.end(call)
        return results

    def _tangents(self, args: Sequence[Any]) -> list[torch.Tensor]:
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        return tensors[len(tensors) - self.plans.tangents :]

    # ----------------------------------------------------------------- its plans

    def decide(self, graph: Planner, plan: Optional[int]) -> Decision:
        """What to save by one of the plans, None for the lean one.

        Raises CannotPlan where the graph has no model.
        """
        if plan is None:
            self._find_plans(graph)
        model = self.plans.model
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
        calls: int = config.activation_memory_graph_calls or _CALLS  # type: ignore[attr-defined]

        def peak(index: int) -> tuple[float, float]:
            plan = self.plans.plans[index]
            waiting = (calls - 1) * plan.kept
            return waiting + max(plan.forward, plan.backward), plan.cost

        self.lean = min(range(len(self.plans.plans)), key=peak)


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
            compiled = make_boxed_func(compiled)
        return _boxed(run, compiled)

    return compile_marked


def _boxed(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function that takes its last argument, a list, for what AOTAutograd passes it."""
    call: Any = functools.partial(function, *arguments)
    call._boxed_call = True
    return call


def for_step(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """``aot_stage2_autograd``, so that graphs can be compiled again by a step's plan."""

    def compile_for_step(*arguments: Any) -> Any:
        step = running_step()
        # Without a context, inductor traces its patterns, amid a compilation.
        if step is not None and TracingContext.try_get() is not None:
            failure = f"{get_aot_graph_name()} has no plan for a step"
            with step.budget.warn_on_failure(failure):
                return Graph(compile_graph, *arguments).first()
        run, metadata = compile_graph(*arguments)
        return with_warnings(run, arguments[0].flat_args, metadata), metadata

    return compile_for_step
