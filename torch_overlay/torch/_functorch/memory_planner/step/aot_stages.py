"""Wrappers around AOTAutograd's compilers, for the graphs of a step."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace
from typing import Any, Callable, Optional

from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch.fx import GraphModule

from ..ask import Ask
from ..graph.storages import read_body
from ..graph.symbols import (
    has_symbolic_sizes,
    Places,
    places_of_symbols,
    size_evaluator,
    values_of_symbols,
)
from .aot_calls import boxed_call, name_of_module_or_function
from .compiled_graph import CompiledGraph
from .current_step import running_step
from .single_graph_warnings import with_warnings
from .tensors import storages_in


def track_training_graphs(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``aot_stage2_autograd``, so that steps can compile graphs by other plans."""

    def compile_tracked(*arguments: Any) -> Any:
        step = running_step()
        # Without a context, inductor is tracing its patterns during a compile.
        if step is not None and TracingContext.try_get() is not None:
            failure = f"{get_aot_graph_name()} has no plan for a step"
            with step.budget.warn_on_failure(failure):
                return CompiledGraph(compile_graph, *arguments).compile_first()
        state, capture, *_ = arguments
        is_bounded = Ask.of_config().peak_bytes is not None
        if is_bounded and has_symbolic_sizes(capture.graph_module.graph):
            # Only the joint graph tells the peak of larger calls, so its compiled code
            # must not be loaded without it.
            state.aot_config = replace(state.aot_config, cache_info=None)
        places: Optional[Places] = None
        planned: tuple[int, ...] = ()
        if is_bounded:
            # Compiling changes the graph.
            places = places_of_symbols(state.flat_args, capture.graph_module.graph)
            planned = values_of_symbols(state.flat_args, places)
        run, metadata = compile_graph(*arguments)
        return with_warnings(run, metadata, places, planned), metadata

    return compile_tracked


def track_inference_graphs(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``aot_stage2_inference``, so that steps know of calls without a plan."""

    def compile_tracked(state: Any, capture: Any, *arguments: Any) -> Any:
        step = running_step()
        if step is None or TracingContext.try_get() is None:
            return compile_graph(state, capture, *arguments)
        name = name_of_module_or_function() or get_aot_graph_name()
        failure, device = f"a call of {name} could not be tracked", step.budget.device
        module = capture.graph_module
        number, largest = state.aot_config.aot_id, 0
        places = places_of_symbols(state.flat_args, module.graph)
        # Compiling changes the graph. The copy shares its tensors.
        graph = GraphModule(module, copy.deepcopy(module.graph)).graph
        # A recorded step counts what the graph's kernels hold.
        with inductor_config.patch({"live_bytes_of": str(device)}):
            run, metadata = compile_graph(state, capture, *arguments)

        @functools.cache
        def peak(sizes: tuple[int, ...]) -> Optional[int]:
            body = read_body(graph, size_evaluator(places, sizes), device)
            return None if body is None else body.peak

        @functools.wraps(run)
        def call(args: list[Any]) -> Any:
            nonlocal largest
            step = running_step()
            if step is None or TracingContext.try_get() is not None:
                return run(args)
            given, state = set(), None
            with step.budget.warn_on_failure(failure):
                given = {storage._cdata for storage in storages_in(args)}
                sizes = values_of_symbols(args, places)
                size = max(largest, math.prod(sizes))
                state = step.begin_without_backward(number, name, size, peak(sizes))
                if state not in step.passed_over:
                    largest = size
            results = run(args)
            if state is not None:
                with step.budget.warn_on_failure(failure):
                    step.end_without_backward(state, given, results)
            return results

        return boxed_call(call), metadata

    return compile_tracked
