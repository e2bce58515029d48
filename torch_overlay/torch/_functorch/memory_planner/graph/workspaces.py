"""Measures the workspaces of operators, which no plan counts.

On a CPU, convolutions, and matrix products in half precision, reorder their arguments
into memory of their own, which may be as large as the arguments.  How much one takes
depends on the library, the processor and the sizes, so it cannot be computed.
"""

from __future__ import annotations

import itertools
from typing import Any, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from .recompute_cost import flops


if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch.fx as fx


aten = torch.ops.aten

_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_HALF = (torch.bfloat16, torch.float16)


def largest_workspace(nodes: Iterable[fx.Node]) -> int:
    """The bytes of the largest workspace of a convolution or a product on a CPU.

    Of each operator that may have one, the call with the most FLOP is run once, on
    zeros.  Those with symbolic sizes are left out.  0 if that leaves none, or while
    another profiler runs.
    """
    largest: dict[Any, fx.Node] = {}
    for node in filter(_has_workspace, nodes):
        before = largest.get(node.target)
        if before is None or flops(node) > flops(before):
            largest[node.target] = node
    if torch._C._autograd._profiler_enabled():
        return 0
    return max(map(_measured_workspace, largest.values()), default=0)


def _has_workspace(node: fx.Node) -> bool:
    is_half = node.target in _PRODUCTS and node.meta["val"].dtype in _HALF
    return is_half or node.target in _CONVOLUTIONS


def _measured_workspace(node: fx.Node) -> int:
    values = tree_leaves([each.meta.get("val") for each in node.all_input_nodes])
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not all(
        each.device.type == "cpu" and all(isinstance(n, int) for n in each.shape)
        for each in tensors
    ):
        return 0
    with _disable_current_modes(), torch.no_grad():
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _zeros_for)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            results = node.target(*args, **kwargs)  # type: ignore[operator]
    events = [
        event
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    events.sort(key=lambda event: event.start_ns())
    sizes: Iterable[int] = (event.nbytes() for event in events)
    live = itertools.accumulate(sizes, initial=0)
    made = sum(
        each.untyped_storage().nbytes()
        for each in tree_leaves(results)
        if isinstance(each, torch.Tensor)
    )
    return max(max(live) - made, 0)


def _zeros_for(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value
    strided = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return strided.zero_()
