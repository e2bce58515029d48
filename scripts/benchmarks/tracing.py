"""How a model gets to the partitioner, and what is seen there.

`Joint` is the joint graph that a GPU would get, of fake tensors.
"""

import copy
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import ModuleType
from typing import Any, Optional
from unittest import mock

import torch
import torch.nn.functional as F
from patchset.patch import KNAPSACK, PARTITIONERS
from torch import nn, Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._ordered_set import OrderedSet
from torch.utils.flop_counter import flop_registry
from upkeep.checkout import installed_wheel, is_altered


# ------------------------------------------------------------------ tracing


def overlay(module: str) -> Any:
    """A module of the patched checkout's; the untouched wheel has none."""
    return importlib.import_module(f"torch._functorch.{module}")


def untouched(path: str, name: str) -> ModuleType:
    """The module at ``path`` as its wheel brought it, loaded as ``name``.

    RuntimeError where it is another one. What it imports is the running torch's.
    """
    wheel = installed_wheel()
    if is_altered(wheel, path):
        raise RuntimeError(f"the installed torch's {path} is not its wheel's")
    spec = importlib.util.spec_from_file_location(name, wheel.root / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their own module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def untouched_knapsack() -> ModuleType:
    return untouched(KNAPSACK, "untouched_knapsack")


def untouched_partitioners() -> ModuleType:
    """The wheel's partitioner, with the wheel's default solver."""
    # Its relative imports need the package that it belongs to.
    module = untouched(PARTITIONERS, "torch._functorch.untouched_partitioners")
    # But what they find there is the running torch's.
    vars(module)["dp_knapsack"] = untouched_knapsack().dp_knapsack
    return module


class _Kept(BaseException):
    """A compiler has what it was started for. Nothing between the two catches it."""


class Joint:
    """The joint graph of fake tensors, to be partitioned again and again.

    It is the graph that inductor would partition for a GPU: decomposed and simplified,
    with CUDA's fused attention. ``options`` are what AOTAutograd gives partitioners.
    """

    graph: torch.fx.GraphModule
    inputs: Any
    options: dict[str, Any]

    def __init__(
        self, mode: FakeTensorMode, module: nn.Module, inputs: tuple[Tensor, ...]
    ) -> None:
        def keep(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
            self.inputs, self.options = inputs, options
            # Dynamo has a mode of its own.
            with V.set_fake_mode(detect_fake_mode(inputs)):
                self.graph = joint_graph_passes(graph)
            raise _Kept

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

    def run_by_both(self, chosen: Callable[[torch.fx.Node], bool]) -> int:
        """How many of the chosen nodes both forward and backward run."""
        forward, backward = (
            {node.name for node in half.graph.nodes if chosen(node)}
            for half in self.partition(partitioners.min_cut_rematerialization_partition)
        )
        return len(forward & backward)


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
