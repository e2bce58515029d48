"""What it costs to run a node of the forward again.

By the estimator "flops", whatever has no FLOP formula is free, which is nearly true
where a compiler fuses it.  "roofline" also counts the bytes that a node moves, as the
arithmetic that an accelerator would have done meanwhile (Williams, Waterman and
Patterson, "Roofline: an insightful visual performance model", 2009).
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._functorch import config
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


if TYPE_CHECKING:
    import torch.fx as fx


__all__ = ["flops", "is_view", "rerun_cost", "roofline"]

# The estimators that have a name, and what each counts.
RUNTIME_UNITS = {
    "flops": "FLOP",
    "roofline": "FLOP",
    "profile": "ms",
    "testing": "operators",
}

# FLOP that a device does while it moves a byte.  One number for all devices, so that
# ranks agree: CPUs have 10 to 50, accelerators 100 to 300 in half precision.
FLOP_PER_BYTE = 100

# What a symbolic size without any hint counts as, as in the partitioner.
_NO_HINT = 4096

# Results of these share their argument's memory, which their schema does not tell.
_ALIASING = (torch.ops.aten._unsafe_view.default,)


def rerun_cost(node: fx.Node) -> float:
    """The runtime of a node, by the estimator that the config names."""
    from torch._functorch.partitioners import estimate_runtime

    if config.activation_memory_budget_runtime_estimator == "roofline":
        return roofline(node)
    return estimate_runtime(node)


def is_view(node: fx.Node) -> bool:
    """Whether a node's value shares the memory of its first argument."""
    return getattr(node.target, "is_view", False) or node.target in _ALIASING


def concrete(size: int | torch.SymInt) -> int:
    """``size``, or the hint of a symbolic one, without a guard."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else _NO_HINT


def flops(node: fx.Node) -> int:
    """Floating-point operations of a node, 0 where no formula is known for it.

    The formulas are those of ``torch.utils.flop_counter``.
    """
    formula = flop_registry.get(getattr(node.target, "_overloadpacket", node.target))
    if formula is None:
        return 0
    arguments = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    args, kwargs = arguments
    return concrete(formula(*args, **kwargs, out_val=node.meta["val"]))


def roofline(node: fx.Node) -> int:
    """The larger of a node's FLOP and what its bytes are worth; at least 1."""
    values: list[Any] = [argument.meta.get("val") for argument in node.all_input_nodes]
    values.append(node.meta.get("val"))
    moved = sum(
        concrete(leaf.numel()) * leaf.dtype.itemsize
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor)
    )
    return max(flops(node), 0 if is_view(node) else FLOP_PER_BYTE * moved, 1)
