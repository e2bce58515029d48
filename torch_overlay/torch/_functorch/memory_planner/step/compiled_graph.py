"""The compiled graphs of a training step, and the calls that a step makes of them.

A graph is partitioned and compiled by the lean plan when a step first meets it, and
again, from the traced joint graph, by each other plan that a call is to run by.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, Callable, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._guards import TracingContext
from torch._inductor import config as inductor_config

from ...._inductor.deferred_kernels import DeferredKernels

from ..compile.recompile import (
    fresh_copy,
    has_nested_regions,
    partition_by,
    takes_request,
)
from ..compile.told import can_guard, CompiledPeaks
from ..graph.inputs_outputs import Missing
from ..graph.other_sizes import times_larger
from ..graph.storages import CannotPlan
from ..graph.symbols import places_of_symbols, size_evaluator, values_of_symbols
from ..report.saved_values import logged_plan, replace_plan
from .aot_calls import boxed_call, name_of_module_or_function, with_results_run_by
from .current_step import running_step
from .graphs import Graph
from .partial_backward import Backward
from .plan_file import key_of
from .plan_request import PlanRequest
from .single_graph_warnings import CALL
from .traced_graph import context_of_tracing, TracedGraph


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch.fx import GraphModule

    from ..graph.joint import BudgetedGraph
    from ..peak.footprint import Tell
    from ..peak.menu import Menu
    from ..report.saved_values import Plan
    from .budget import StepBudget
    from .call import Call
    from .calls import Step


class _Code(NamedTuple):
    """The code of a plan, with AOTAutograd's metadata and the outputs that it saves.

    ``kernels`` are to be compiled before it runs, None if they are.
    """

    run: Callable[..., Any]
    metadata: Any
    outputs: frozenset[int]
    kernels: Optional[DeferredKernels]


class CompiledGraph:
    """A joint graph that was compiled in a step, and its compiled code by plan.

    Raises CannotPlan if the backend does not partition by the budget, or if the graph
    calls nested compiled regions or would be replayed as a CUDA graph.
    """

    # Set by the first compile: the graph, and its plans for the traced size.
    graph: Graph
    plans: Menu

    def __init__(self, compile_graph: Callable[..., Any], *arguments: Any) -> None:
        self._compile_graph = compile_graph
        self._state, self._capture, self._partition, *self._compilers = arguments
        if not takes_request(self._partition):
            raise CannotPlan("its backend does not partition by the budget")
        # Those are partitioned before their caller, each by itself.
        if has_nested_regions(self._capture.graph_module):
            raise CannotPlan("it calls nested compiled regions")
        step: Any = running_step()
        if step.budget.device.type == "cuda" and inductor_config.triton.cudagraphs:
            raise CannotPlan(
                "it is replayed as a CUDA graph, which keeps the memory that a plan "
                "would free; compile without mode='reduce-overhead' or 'max-autotune', "
                "or with options={'triton.cudagraphs': False}"
            )
        self._name = name_of_module_or_function() or get_aot_graph_name()
        self._is_retained = self.has_plans = False
        # By plan; where that failed to compile, the code of the first one.
        self._codes: dict[int, _Code] = {}
        # The results of `compiled_as_good`, by plan and what compiles have told.
        self._instead: dict[Any, int] = {}
        # The plan of the first compile, and its code.
        self.first = 0
        self._first_code: _Code
        # The report that `plans()` lists now.
        self._listed: Optional[Plan] = None
        # The plans that were also compiled with fusions guarded.
        self._tried_guarded: set[int] = set()
        self._as_traced = context_of_tracing()
        graph = self._capture.graph_module.graph
        self._symbols = places_of_symbols(self._state.flat_args, graph)
        # By sizes, the bytes that a call computes over those of the graph's first one.
        self.scales: dict[tuple[int, ...], float] = {}
        # The same for the size that was traced.
        self._scale = 1.0
        # Storages of fake tensors are on meta, whatever device they stand for.
        device = step.budget.device
        self.device = None if device.type == "meta" else device

    def compile_first(self) -> Any:
        """Compile by the first call's plan; returns what AOTAutograd's stage 2 does."""
        code = self._codes[self.first] = self._first_code = self._compile_by_plan(None)
        return boxed_call(self._call), code.metadata

    def cover_sizes(self, sizes: tuple[int, ...]) -> bool:
        """Make the graph's plans cover calls of these sizes; return whether they grew.

        They do if a batch has more rows than all before, or fewer but longer ones.
        """
        self.adopt_plans_of_graph()
        if sizes in self.scales:
            return False
        joint = self._joint_at(sizes)
        plans = self.plans.at_sizes_of(joint)
        more = times_larger(plans.model, self.plans.model)
        scale = self.scales[sizes] = self._scale * more
        return self.graph.cover(scale, joint, plans)

    def plans_at(self, sizes: tuple[int, ...]) -> Menu:
        """The graph's plans, for calls of these sizes alone."""
        if not self._symbols:
            return self.plans
        return self.plans.at_sizes_of(self._joint_at(sizes))

    def _joint_at(self, sizes: tuple[int, ...]) -> BudgetedGraph:
        return self.traced.joint.at_sizes(size_evaluator(self._symbols, sizes))

    def _call(self, args: list[Any]) -> Any:
        step, code = running_step(), self._first_code
        # DDP's optimizer calls the parts of a model while it compiles them.
        if step is None or TracingContext.try_get() is not None:
            return code.run(args)
        call, failure = None, f"a call of {self.graph.name} could not be tracked"
        try:
            with step.budget.warn_on_failure(failure):
                call = self._begin(step, args)
                call.saved = code.outputs
                code = self._code_of_plan(call.plan, step.budget)
                call.saved = code.outputs
            step.call = call
            result = code.run(args)
            if call is not None:
                with step.budget.warn_on_failure(failure):
                    call.await_backward(result, self.traced.may_miss)
            return result
        except BaseException:
            # A checkpoint stops by an exception once all is saved that it is to save.
            if call is not None and not call.is_rerun:
                step.end(call)
            raise
        finally:
            step.call = None

    def _begin(self, step: Step, args: Sequence[Any]) -> Call:
        """Start a call, by the plan of its slot."""
        graph, sizes = self.graph, values_of_symbols(args, self._symbols)
        # It may have been compiled in a step of another budget.
        step.budget.graphs[graph.number] = graph
        failure = f"{graph.name} has no plans for larger calls"
        with step.budget.warn_on_failure(failure):
            is_more = self.cover_sizes(sizes)
            if step.is_largest_so_far(graph, self.scales[sizes]):
                graph.current = weakref.ref(self)
            if is_more and graph in step.choices:
                step.budget.make_plan(is_growing=True)
        call = step.begin(self, sizes)
        plan = self.compiled_as_good(step.plan_of(graph, call.slot))
        call.plan = step.plan_of_repeated_call(call, plan)
        return call

    # -------------------------------------------------------------- its compiles

    def adopt_plans_of_graph(self) -> None:
        """Adopt the graph's plans if they are for calls that miss something else."""
        if self.plans.missing != self.graph.plans.missing:
            self.plans = self.graph.plans.at_sizes_of(self.traced.joint)
            self._codes, self._instead = {}, {}
            self._tried_guarded, self.scales = set(), {}

    def compiled_as_good(self, plan: int) -> int:
        """A compiled plan that holds no more in calls of this size than ``plan`` may.

        If there is none, ``plan`` itself.  Where each size has a graph of its own,
        plans are for the largest, and for this size a compiled one may do as well.
        """
        known = plan, *self.plans.told.items()
        if known not in self._instead:
            most = self.graph.plans.corrected().plans[plan]
            # A compile for all sizes is judged by the largest.
            own = (self.graph if self._symbols else self).plans.corrected().plans
            compiled = (each for each in sorted(self._codes) if each <= plan)
            good = (each for each in compiled if own[each].holds_no_more(most))
            self._instead[known] = next(good, plan)
        return self._instead[known]

    def compile(
        self, plans: Iterable[int], budget: StepBudget, is_last_resort: bool
    ) -> None:
        """Compile plans that have not been, and list the first one in `plans()`.

        Those that hold more than estimated are also compiled with fusions guarded; so
        are all as a last resort, and those that held less by that at another size.
        Kernels are left for later, as a plan may be replaced before it runs.
        """
        plans = [*plans]
        self.adopt_plans_of_graph()
        for plan in sorted({*plans}):
            if plan not in self._codes:
                # It stays if the plan does not compile.
                self._codes[plan] = self._first_code
                with self._warn_of_failure(budget), self._as_traced():
                    self._codes[plan] = self._compile_by_plan(plan)
            margin = self.traced.joint.ask.peak_margin
            may_gain = (
                is_last_resort
                or plan in self.graph.guarded
                or self.plans.holds_more(plan, margin)
            )
            if plan in self._tried_guarded or not may_gain:
                continue
            self._tried_guarded.add(plan)
            if plan in self.plans.compiled and can_guard():
                failure = f"{self.graph.name} failed to compile with fusions guarded"
                # On failure, what was compiled stays, and is known to hold more.
                with budget.warn_on_failure(failure, False), self._as_traced():
                    self._compile_guarded(plan)
        self._list_report(self._codes[plans[0]])

    def _code_of_plan(self, plan: int, budget: StepBudget) -> _Code:
        """The code of a plan, with its kernels; the first plan's if that fails."""
        if plan not in self._codes or plan in self.graph.guarded - self._tried_guarded:
            self.compile([plan], budget, False)
        code = self._codes[plan]
        if code.kernels is not None:
            self._codes[plan] = self._first_code
            budget.watch.forget_usual_start()
            with self._warn_of_failure(budget):
                code.kernels.compile()
                self._codes[plan] = code._replace(kernels=None)
        return self._codes[plan]

    def _warn_of_failure(self, budget: StepBudget) -> AbstractContextManager[None]:
        return budget.warn_on_failure(
            f"{self.graph.name} keeps its first plan, as another failed to compile"
        )

    def _list_report(self, code: _Code) -> None:
        """Make its report the graph's only entry in `plans()`."""
        report = logged_plan(code.metadata)
        if report is not None:
            replace_plan(self._listed, report)
            self._listed = report

    def _compile_guarded(self, plan: int) -> None:
        """Compile without fusions that raise the peak; keep it if it holds less."""
        before = self.plans.peak_of(plan)
        code = self._compile_by_plan(plan, is_guarded=True)
        if self.plans.peak_of(plan) < before:
            self._codes[plan] = code
            self.graph.guarded.add(plan)

    def _compile_by_plan(self, plan: Optional[int], is_guarded: bool = False) -> _Code:
        """Partition and compile a copy of the graph by a plan, None for the first."""
        step = running_step()
        if step is not None:
            step.budget.watch.forget_usual_start()
        # Partitioning a graph writes into these.
        state, capture = fresh_copy(self._state, self._capture)
        # Whether another plan's backward compiles has to be known before its forward
        # runs. But where backwards retain their graph, AOTAutograd has to see that when
        # it compiles one.
        is_another = plan is not None and not self._is_retained
        at_once = is_another or state.aot_config.force_non_lazy_backward_lowering
        state.aot_config = replace(
            state.aot_config,
            cache_info=None,
            force_non_lazy_backward_lowering=at_once,
        )
        kernels = DeferredKernels() if is_another else None
        compiled = CompiledPeaks(*self._compilers, kernels=kernels)
        compiled.guarded = is_guarded
        request = PlanRequest(self, plan, compiled)

        def compile_backward(module: GraphModule, inputs: Sequence[Any]) -> Any:
            missing = compiled.missing = self.plans.missing
            absent = missing.tangents if missing is not None else frozenset()
            result = Backward(
                compiled.backward, module, inputs, absent, self._as_traced
            )
            if compiled.tell is not None:
                self._record_told(request.chosen, compiled.tell, is_guarded)
            return result

        run, metadata = self._compile_graph(
            state,
            capture,
            partition_by(self._partition, request),
            with_results_run_by(compiled.forward, self._forward),
            with_results_run_by(compile_backward, self._backward),
        )
        outputs = self.plans.plans[request.chosen].outputs
        code = _Code(run, metadata, outputs, kernels)
        self._list_report(code)
        return code

    def _record_told(self, plan: int, tell: Tell, is_guarded: bool) -> None:
        """Record what a compile told; if that is more than of other traces, plan anew."""
        of_graph, step = self.graph.plans, running_step()
        is_comparable = of_graph.compiled and of_graph.missing == self.plans.missing
        before = of_graph.corrected().plans
        self.plans.record_told(plan, tell, only_if_less=is_guarded)
        own = self.plans.corrected().plans[plan]
        if is_comparable and step is not None and not own.holds_no_more(before[plan]):
            step.budget.has_news = True

    def _forward(self, run: Callable[..., Any], args: list[Any]) -> Any:
        step = running_step()
        call = step.call if step is not None else None
        if call is None:
            return run(args)
        return call.run_forward(
            run, args, self.plans.primals, self.traced.joint.num_fwd_outputs
        )

    def _backward(self, run: Backward, args: list[Any]) -> Any:
        node: Any = torch._C._current_autograd_node()
        call = node.metadata.get(CALL) if node is not None else None
        step = running_step()
        absent: frozenset[int] = frozenset()
        if call is not None:
            absent = run.complete(args, size_evaluator(self._symbols, call.sizes))
        # Another step treats leftover calls as eager code.
        if call is None or step is None or call.step is not step:
            return run(args)
        is_retained = torch._C._autograd._get_current_graph_task_keep_graph()
        self._is_retained |= is_retained
        # Set each time: a retained backward may run again, with other tangents.
        missing = Missing(absent, call.dropped_outputs()) if absent else None
        first_run, call = call, step.saved_by(call)
        call.missing = missing
        # A checkpoint keeps nothing for another backward.
        keeps_saved = is_retained and not call.is_rerun
        step.begin_backward(call, keeps_saved)
        results = call.run_backward(run, args, keeps_saved)
        if not keeps_saved:
            step.end(call, has_run=True)
        if not is_retained:
            step.end(first_run)
            # Keeping the loss must not keep the step alive.
            node.metadata[CALL] = None
        return results

    def find_plans(self, joint: BudgetedGraph) -> None:
        """Make the graph's plans, or adopt those of the same graph of another size."""
        traced = self.traced = TracedGraph(joint, self._state, self._symbols)
        step: Any = running_step()
        known = step.budget.graphs.of_same_structure(traced.structural_key)
        if known is None:
            number, key = self._state.aot_config.aot_id, key_of(joint)
            stored = step.budget.plans_in_file(number, self._name, key)
            if stored is not None:
                plans, lean = stored.plans_of(joint), stored.lean
            else:
                plans, lean = traced.plans_for(None)
            same = traced.structural_key
            self.graph = Graph(self._name, number, key, same, joint, plans)
            self.plans, self.graph.lean = plans, lean
            step.budget.graphs[number] = self.graph
            if stored is not None:
                self.graph.guarded.update(stored.guarded)
                step.budget.choices[self.graph] = stored.choice
            if not self._symbols:
                self.scales[()] = 1.0
        else:
            self.graph, self.plans = known, known.plans.at_sizes_of(joint)
            more = times_larger(self.plans.model, known.plans.model)
            self._scale = known.scale * more
        self.first = step.plan_of(self.graph, step.next_slot(self.graph))
        self._tried_guarded.update({self.first} & self.graph.guarded)
        self.has_plans = True
