"""Choose a plan for peak memory by the peaks of inductor's own schedules.

The planner of the activation memory budget estimates what inductor's kernels hold.  What
they do hold is known once both graphs are scheduled and their kernels generated, before
one of them is compiled.  ``torch._functorch.config.activation_memory_peak_judge = n``
does that with n plans, from the lowest peak to the fastest, and keeps the cheapest whose
true peak is within what was asked.

Which plans are tried does not depend on the budget, so a smaller one never has a higher
peak.  A limit between two of them gets the lower, so more plans come nearer to it; each
costs about what inductor takes to compile the graph, without compiling kernels.

A :class:`.StepBudget` asks for the peaks of the plans that it is about to choose.
"""

from __future__ import annotations

import copy
import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch._dynamo.utils import preserve_rng_state
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import _is_tangent
from torch._inductor import config
from torch._inductor.debug import DebugContext
from torch._inductor.fx_utils import get_node_storage
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import IRNode
from torch._inductor.utils import output_node, shape_env_from_inputs
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import Node
from torch.fx.traceback import _get_memory_budget_annotation
from torch.utils._python_dispatch import _disable_current_modes

from .._functorch._activation_checkpointing import saved_report
from .._functorch._activation_checkpointing.compiled_peak import owned_by_backward
from .._functorch._activation_checkpointing.decision import Peak
from .._functorch._activation_checkpointing.memory_budget import activation_bytes
from .._functorch._activation_checkpointing.peak_budget import allowed_peak, PeakBytes
from .._functorch._activation_checkpointing.planning import requested
from .wrapper_memory import wrapper_memory, WrapperMemory


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule

    Split = tuple[GraphModule, GraphModule]


log = logging.getLogger(__name__)

__all__ = ["partition", "schedule_peak", "schedule_peaks"]


class _Candidate(NamedTuple):
    """A plan that was scheduled: its peak in bytes, its graphs, and its report."""

    peak: int
    split: Split
    plan: saved_report.Plan


def partition(
    partitioner: Callable[..., Split],
    joint_module: GraphModule,
    joint_inputs: Sequence[object],
    **kwargs: Any,
) -> Split:
    """Split a joint graph by ``partitioner``, at the budget that the judge chooses.

    Where nothing asks for a judge, or it fails, that is the budget of the config.
    Raises RuntimeError as :func:`.check_budget_options` does.
    """
    count = functorch_config.activation_memory_peak_judge  # type: ignore[attr-defined]
    asked = requested(functorch_config.activation_memory_budget)
    if count and kwargs.get("request") is None and isinstance(asked, PeakBytes):
        try:
            started = time.perf_counter()
            candidates = _schedule_plans(
                count, asked.calls, partitioner, joint_module, joint_inputs, kwargs
            )
            if candidates:
                log.info(
                    "%d of %d plans differ; scheduled in %.1f s, peaks of %s bytes",
                    len(candidates),
                    count,
                    time.perf_counter() - started,
                    ", ".join(f"{candidate.peak:,}" for candidate in candidates),
                )
                return _choose(candidates, asked)
        except Exception as error:
            log.debug("no judge of peaks", exc_info=error)
            log.warning(
                "this graph could not be scheduled, so its peaks are estimates: %s: %s",
                type(error).__name__,
                error,
            )
    return partitioner(joint_module, joint_inputs, **kwargs)


def _schedule_plans(
    count: int,
    calls: int,
    partitioner: Callable[..., Split],
    joint_module: GraphModule,
    joint_inputs: Sequence[object],
    kwargs: dict[str, Any],
) -> list[_Candidate]:
    """Plans by falling cost; those of them that are equal, once.

    None where the graph's budget is that of a region, or it cannot be split.
    """
    candidates: dict[tuple[str, ...], _Candidate] = {}
    num_fwd_outputs = kwargs["num_fwd_outputs"]
    if any(map(_has_own_budget, joint_module.graph.nodes)):
        return []
    for level in range(count):
        # Closer to each other at the floor, where a little room buys most; without a
        # margin, as the peaks are about to be known.
        request = PeakBytes((level / (count - 1)) ** 1.5, calls=calls)
        split = partitioner(
            _copied(joint_module), joint_inputs, request=request, **kwargs
        )
        plan = saved_report.plan_of(split[0])
        if plan is None:
            return []
        saved = tuple(node.name for node in split[1].graph.find_nodes(op="placeholder"))
        if saved not in candidates:
            peak = schedule_peak(*split, num_fwd_outputs)
            peak += (calls - 1) * plan.activation_bytes
            candidates[saved] = _Candidate(peak, split, plan)
    return list(candidates.values())


def _has_own_budget(node: Node) -> bool:
    return (
        "memory_budget" in node.meta or _get_memory_budget_annotation(node) is not None
    )


def _choose(candidates: list[_Candidate], asked: PeakBytes) -> Split:
    """The last, so the cheapest, that is within what was asked; else the lowest."""
    floor = min(candidate.peak for candidate in candidates)
    fastest = candidates[-1].peak
    allowed = asked.limit
    if allowed is None:
        allowed = allowed_peak(asked.budget, floor, fastest)
    within = [each for each in candidates if each.peak <= max(allowed, floor)]
    lowest, split, plan = within[-1]
    peak = Peak(allowed, lowest, floor, fastest, fused=True)
    peak.warn_if_over()
    saved_report.set_plan(split[0], replace(plan, budget=asked.budget, peak=peak))
    return split


def schedule_peak(
    forward: GraphModule, backward: GraphModule, num_fwd_outputs: int
) -> int:
    """Bytes that inductor's kernels hold at most, over the two graphs of a joint graph.

    As `schedule_peaks` counts them.
    """
    return max(schedule_peaks(forward, backward, num_fwd_outputs))


def schedule_peaks(
    forward: GraphModule, backward: GraphModule, num_fwd_outputs: int
) -> tuple[int, int]:
    """Bytes that inductor's kernels hold at most, in each of a joint graph's two graphs.

    Parameters and inputs are not counted, tangents and what the forward returned are.
    Both graphs are left as they are.
    """
    results: Any = output_node(forward).args[0]
    primals = forward.graph.find_nodes(op="placeholder")
    saved = backward.graph.find_nodes(op="placeholder")
    lowered, memory = _schedule(forward, [node.meta["val"] for node in primals])
    # The forward chose the strides of what it saves, for which it may copy an input.
    strides = {
        node.name: result
        for node, result in zip(results, lowered.graph_outputs)
        if isinstance(node, Node) and not _is_input(node, result)
    }
    inputs = [_restrided(node.meta["val"], strides.get(node.name)) for node in saved]
    names = [getattr(node, "name", None) for node in results]
    owned = owned_by_backward(
        names, [node.name for node in saved], memory, num_fwd_outputs
    )
    gradients: Any = output_node(backward).args[0]
    returned = {get_node_storage(node) for node in gradients if isinstance(node, Node)}
    # Not where another input is a view of the same.
    donated = [
        place
        for _, views in owned
        for place in views
        if functorch_config.donated_buffer and len(views) == 1
        if get_node_storage(saved[place]) not in returned
    ]
    _, then = _schedule(backward, inputs, donated)
    stays = filter(None, {*memory.results[:num_fwd_outputs]})
    tangents = activation_bytes(primals, filter(_is_tangent, saved))
    return memory.peak(), then.peak(owned) + sum(n for _, n in stays) + tangents


def _copied(module: GraphModule) -> GraphModule:
    # Its constants are real tensors.
    with unset_fake_temporarily():
        return copy.deepcopy(module)


def _is_input(node: Node, result: Any) -> bool:
    """Whether the forward returns one of its inputs as it came."""
    if node.op != "placeholder":
        return False
    is_tensor = isinstance(node.meta["val"], FakeTensor)
    return not is_tensor or result.get_name() == node.name


def _restrided(value: Any, result: Any) -> Any:
    """A fake of the backward's input, with the strides of the forward's result."""
    if isinstance(value, FakeTensor) and isinstance(result, IRNode):
        try:
            strides = [int(stride) for stride in result.get_stride()]
        except TypeError:  # symbols, which are those of the trace
            return value
        with value.fake_mode:
            return value.as_strided(value.size(), strides)
    return value


def _schedule(
    module: GraphModule, inputs: Sequence[Any], donated: Optional[list[int]] = None
) -> tuple[GraphLowering, WrapperMemory]:
    """A graph as inductor lowers it, and what its wrapper has live.

    ``donated`` are the places of the inputs that kernels may write over; only a backward
    has such, and None stands for a forward.  Raises RuntimeError where the wrapper's
    memory is not known.
    """
    from torch._inductor import compile_fx  # which imports this module
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    module = _copied(module)
    output_node(module).meta.setdefault("user_visible_output_idxs", ())
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_disable_current_modes())
        enter(preserve_rng_state())
        enter(torch.no_grad())
        enter(DebugContext())
        # A pool would begin to compile kernels.
        enter(config.patch(compile_threads=1, cpp_wrapper=False))
        enter(compile_fx.maybe_disable_comprehensive_padding(inputs))
        enter(compile_fx.get_cuda_device_context(module))
        view_to_reshape(module)
        fake_mode = compile_fx.fake_tensor_prop(module, inputs)
        compile_fx._recursive_record_original_output_strides(module)
        enter(V.set_fake_mode(fake_mode))
        compile_fx._recursive_post_grad_passes(module, is_inference=False)
        graph = GraphLowering(
            module,
            example_inputs=inputs,
            shape_env=shape_env_from_inputs(inputs),
            is_backward=donated is not None,
        )
        graph.bw_donated_idxs = donated
        graph.freeze_runtime_asserts()
        enter(V.set_graph_handler(graph))
        enter(V.set_extern_kernel_nodes([]))
        graph.run(*inputs)
        wrapper, _ = graph.codegen()
        memory = wrapper_memory(graph, wrapper.value)
        if memory is None:
            raise RuntimeError("what its wrapper has live is not known")
        return graph, memory
