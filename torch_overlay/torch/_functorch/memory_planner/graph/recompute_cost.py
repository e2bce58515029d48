"""What it costs to run a node of the forward again.

With the estimator "flops", an operator that no compiler fuses costs its FLOP, or one
FLOP for each byte that it moves, if that is more.  A custom operator's FLOP can be set
with ``torch.utils.flop_counter.register_flop_formula``.  All other operators, such as
sums, cost 1.  "roofline" also converts the bytes of every operator to the arithmetic
that an accelerator could have done meanwhile.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..._activation_checkpointing.random_ops import is_higher_order, subgraphs


if TYPE_CHECKING:
    import torch.fx as fx


aten = torch.ops.aten

# The estimators that the config can name, and the unit of each.
RUNTIME_UNITS = {
    "flops": "FLOP",
    "roofline": "FLOP",
    "profile": "ms",
    "testing": "operators",
}

# FLOP that a device does while it moves a byte: 10 to 50 on CPUs, and 100 to 300 in
# half precision on accelerators.  One number for all, so that all ranks plan the same.
FLOP_PER_BYTE = 100

# The assumed value of a symbolic size without a hint, as in the partitioner.
_NO_HINT = 4096

# Matrix products without a formula in the flop counter; not in every release.
_GROUPED = [
    getattr(aten, name)
    for name in ("_grouped_mm", "_scaled_grouped_mm")
    if hasattr(aten, name)
]

# The namespaces of operators that a compiler knows.
_BUILTIN = ("aten", "prims", "prim", "rngprims", "inductor_prims", "_c10d_functional")

# Operators whose results are views of an argument, though their schemas do not say so.
_ALIASING = (aten._unsafe_view.default,)


def recompute_cost(node: fx.Node, estimator: Any) -> float:
    """The runtime of a node in the unit of the estimator; at least 1 for FLOP.

    Only "flops" and "roofline" are computed here.  All others are upstream's, whose
    function takes no estimator but uses the one in the config.
    """
    from torch._functorch.partitioners import estimate_runtime

    if estimator == "roofline":
        return roofline(node)
    if estimator != "flops":
        return estimate_runtime(node)
    return max(flops(node), _bytes_moved(node) if is_costly(node) else 1)


def is_view(node: fx.Node) -> bool:
    """Whether a node's value shares the memory of its first argument."""
    return getattr(node.target, "is_view", False) or node.target in _ALIASING


def size_or_hint(size: int | torch.SymInt) -> int:
    """``size``, or the hint of a symbolic one, without adding a guard."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else _NO_HINT


def is_costly(node: fx.Node) -> bool:
    """Whether a node does work that no compiler fuses into what reads it.

    That is an operator with a FLOP formula, one from a library that the compiler does
    not know, or a higher-order operator, such as a call of a user's kernel.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _flop_formula(node) is not None or target.namespace not in _BUILTIN
    return is_higher_order(node)


def flops(node: fx.Node) -> int:
    """The FLOP of a node, 0 if no formula is known for it.

    A higher-order operator without a formula has the FLOP of the graphs that it calls.
    """
    formula = _flop_formula(node)
    if formula is None:
        return sum(flops(inner) for graph in subgraphs(node) for inner in graph.nodes)
    given = node.args, node.kwargs
    args, kwargs = torch.fx.map_arg(given, lambda n: n.meta.get("val"))
    return size_or_hint(formula(*args, **kwargs, out_val=node.meta["val"]))


def roofline(node: fx.Node) -> int:
    """A node's FLOP, or its bytes converted to FLOP if that is more; at least 1."""
    return max(flops(node), FLOP_PER_BYTE * _bytes_moved(node), 1)


def _bytes_moved(node: fx.Node) -> int:
    """The total bytes of a node's arguments and results, 0 for a view."""
    if is_view(node):
        return 0
    values: list[Any] = [argument.meta.get("val") for argument in node.all_input_nodes]
    values.append(node.meta.get("val"))
    return sum(
        size_or_hint(leaf.numel()) * leaf.dtype.itemsize
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor)
    )


def _flop_formula(node: fx.Node) -> Any:
    packet = getattr(node.target, "_overloadpacket", node.target)
    if packet in flop_registry:
        return flop_registry[packet]
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return flop_registry[aten._scaled_dot_product_flash_attention]
    return _grouped_product if packet in _GROUPED else None


def _grouped_product(first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
    """The FLOP of ``_grouped_mm``.

    Its groups divide up one of the three sizes, unless both arguments are batches.
    """
    groups = first.shape[0] if first.dim() == 3 and second.dim() == 2 else 1
    return 2 * first.numel() // groups * second.shape[-1]
