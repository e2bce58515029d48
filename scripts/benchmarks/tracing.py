"""How a model gets to the partitioner, and what is seen there.

`trace` makes the joint graph that a GPU would get, of fake tensors. `observed` is the
one place that knows by which names the partitioner calls its solver and its min cuts.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Optional
from unittest import mock

import torch
import torch._dynamo.backends.debugging
import torch._inductor.compile_fx
import torch.nn.functional as F
from torch import nn, Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


# ------------------------------------------------------------------ tracing


def overlay(module: str) -> Any:
    """A module of the patched checkout's; the untouched wheel has none."""
    package = "torch._functorch._activation_checkpointing"
    return importlib.import_module(f"{package}.{module}")


def trace(
    mode: FakeTensorMode,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    partition: Optional[Callable[..., Any]] = None,
) -> None:
    """Trace forward and backward of fake tensors and give the joint graph away.

    ``partition``, upstream's unless given, is called as AOTAutograd calls its
    partitioners, on the graph that inductor would partition: decomposed and
    simplified, with CUDA's fused attention.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # Looked up now, so that an observer is seen.
    split = partition or partitioners.min_cut_rematerialization_partition

    def step(state: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        loss: Tensor = torch.func.functional_call(module, state, inputs)
        return loss

    def partition_as_inductor(
        graph: torch.fx.GraphModule, *rest: Any, **options: Any
    ) -> Any:
        with V.set_fake_mode(mode):
            graph = joint_graph_passes(graph)
        return split(graph, *rest, **options)

    traced = aot_function(
        step,
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partition_as_inductor,
        decompositions=select_decomp_table(),
    )
    with mode, CUDAAttention():
        traced(state, *inputs)


class _Kept(BaseException):
    """A compiler has what it was started for. Nothing between the two catches it."""


class Joint:
    """The joint graph of fake tensors, to be partitioned again and again.

    Of a module that only Dynamo can trace with ``dynamo``.
    """

    graph: torch.fx.GraphModule
    inputs: Any
    options: dict[str, Any]

    def __init__(
        self,
        mode: FakeTensorMode,
        module: nn.Module,
        inputs: tuple[Tensor, ...],
        dynamo: bool = False,
    ) -> None:
        split = partitioners.min_cut_rematerialization_partition

        def keep(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
            self.inputs, self.options = inputs, options
            if dynamo:
                # Dynamo has a mode of its own.
                with V.set_fake_mode(detect_fake_mode(inputs)):
                    self.graph = joint_graph_passes(graph)
                raise _Kept
            self.graph = copy.deepcopy(graph)
            return split(graph, inputs, **options)

        if not dynamo:
            trace(mode, module, inputs, keep)
            return
        backend = aot_autograd(
            fw_compiler=lambda graph, _: graph,
            partition_fn=keep,
            decompositions=select_decomp_table(),
        )
        torch._dynamo.reset()
        with mode, CUDAAttention(), suppress(_Kept):
            torch.compile(module, backend=backend, fullgraph=True)(*inputs)

    def partition(self, split: Callable[..., Any]) -> Any:
        """What a partitioner makes of a copy: forward and backward."""
        return split(copy.deepcopy(self.graph), self.inputs, **self.options)


class CUDAAttention(TorchFunctionMode):
    """Fake tensors get the fused attention operators that CUDA tensors would.

    The partitioner knows those, with their flops, and not the one for the CPU, so a
    graph traced under this mode is planned as the CUDA graph is. It cannot run.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            return _attend_on_cuda(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _attend_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    aten = torch.ops.aten
    half = query.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is None and half:
        flash = aten._scaled_dot_product_flash_attention
        found = flash(query, key, value, dropout_p, is_causal, False, scale=scale)
    else:
        if enable_gqa:
            # Only the flash operator takes fewer key heads than query heads.
            groups = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        efficient = aten._scaled_dot_product_efficient_attention
        found = efficient(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )
    result: Tensor = found[0]
    return result


@contextmanager
def cpu_attention_counted() -> Iterator[None]:
    """Let the partitioner treat the CPU's fused attention as it treats CUDA's.

    Within, it is compute-intensive, and its flops are counted; upstream takes it for
    an operator that costs nothing to run again.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    formula = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
    known = partitioners.get_default_op_list

    def with_attention() -> Any:
        types = known()
        costly = OrderedSet[Any]([*types.compute_intensive_ops, attention])
        return replace(types, compute_intensive_ops=costly)

    with (
        mock.patch.dict(flop_registry, {attention: formula}),
        mock.patch.object(partitioners, "get_default_op_list", with_attention),
    ):
        yield


class CountedFlops(TorchDispatchMode):
    """Adds up the flops of all operators that run, in compiled graphs as well.

    But for those within higher-order operators.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


# -------------------------------------------------------------- observation


@dataclass
class Instance:
    """One knapsack as the partitioner posed it, and what was saved of it."""

    graph: torch.fx.Graph
    memory: list[float]
    runtimes: list[float]
    budget: float
    info: Any
    nodes: list[torch.fx.Node]
    saved: list[int]


# What is watched, and where it is: the first place that this torch has counts.
PARTITION, CHOOSE, SOLVE = "partition", "choose", "solve"
CUT, REPORT = "cut", "report"
_PARTITIONERS = "torch._functorch.partitioners"
_OVERLAY = "torch._functorch._activation_checkpointing"
WATCHED = {
    CHOOSE: (
        (_PARTITIONERS, "decide"),
        (_PARTITIONERS, "choose_saved_values_set"),
    ),
    SOLVE: (
        (f"{_OVERLAY}.memory_budget", "ask_solver"),
        (_PARTITIONERS, "_optimize_runtime_with_given_memory"),
    ),
    CUT: ((_PARTITIONERS, "solve_min_cut"),),
    REPORT: ((f"{_OVERLAY}.saved_report", "attach_plan"),),
    "solve_budgets": ((f"{_OVERLAY}.budget_curve", "solve_budgets"),),
}
# The backends imported the partitioner by name, each into a module of its own.
BACKENDS = (partitioners, torch._dynamo.backends.debugging, torch._inductor.compile_fx)


@dataclass
class Observer:
    """The partitioner's functions while they work: calls and CPU seconds by name."""

    calls: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    # The last one that a solver was asked.
    instance: Optional[Instance] = None
    # Arguments and result of each min cut.
    cuts: list[tuple[tuple[Any, ...], Any]] = field(default_factory=list)

    def watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.calls[name], self.seconds[name] = 0, 0.0

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                result = function(*args, **kwargs)
            finally:
                self.seconds[name] += time.process_time() - start
                self.calls[name] += 1
            if name == CUT:
                self.cuts.append((args, result))
            if name == SOLVE:
                saved = result
                if len(args) == 2:  # As the set asks it; upstream takes graphs apart.
                    items, capacity = args
                    memory = list(map(items.limits.size, items.memory))
                    budget = items.limits.size(capacity)
                    args = items.joint, memory, items.runtimes, budget
                    args = *args, items.info, items.nodes
                else:
                    _, saved, _ = result
                self.instance = Instance(*(*args, list(saved)))
            return result

        return call


@contextmanager
def observed() -> Iterator[Observer]:
    """Put an Observer around the partitioner, and take it away again."""
    observer = Observer()
    with ExitStack() as stack:

        def put(module: Any, name: str, function: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, function))

        for label, places in WATCHED.items():
            for place, name in places:
                module = None
                with suppress(ImportError):  # The untouched wheel has not all of them.
                    module = importlib.import_module(place)
                if hasattr(module, name):
                    put(module, name, observer.watched(label, getattr(module, name)))
                    break
        partition = partitioners.min_cut_rematerialization_partition
        watched = observer.watched(PARTITION, partition)
        for module in BACKENDS:
            if getattr(module, partition.__name__, None) is partition:
                put(module, partition.__name__, watched)
        yield observer
