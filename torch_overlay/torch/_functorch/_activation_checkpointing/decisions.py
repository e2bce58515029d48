"""Nodes of a forward that decide which elements are read.

Inductor may add up a reduction in another order when the backward repeats it, or keep
digits there that the forward rounded off.  No value minds its last bits, but a top-k or
a comparison made of them may come out the other way: then the backward reads the tokens
of another expert than the forward did.  So what decides is computed once and saved.

A value is *discrete* if it has integers or booleans, or floats that are integers: those
that were rounded, and sums and the like of such.  What is computed of these alone comes
out the same each time.  A *decision* makes a discrete value of others, and

-   it is a selection that returns positions (a top-k, a sort, an argmax), or
-   the forward reads by what it returns, or by what is computed of that: as the index of
    a gather, a mask that selects rows, a size, or the predicate of a branch.

No decision is what an operator keeps for its own backward alone (the positions of a max
pool, the seed of attention), nor the mask of a ReLU, which selects one of two values for
each element: where that flips, the two are about the same.
"""

from __future__ import annotations

import operator
from typing import Any, TYPE_CHECKING

import torch
import torch.fx as fx
from torch.utils._pytree import tree_leaves


if TYPE_CHECKING:
    from collections.abc import Container


aten = torch.ops.aten

__all__ = ["is_decision", "mark_decisions", "subgraphs"]

_MARK = "decides_what_is_read"


def _packets(names: str) -> set[Any]:
    return {getattr(aten, name) for name in names.split()}


# Their integer results are positions, whoever reads them.
_SELECTIONS = _packets(
    "argmax argmin argsort bucketize cummax cummin kthvalue max median min mode "
    "nanmedian nonzero searchsorted sort topk"
)
_ROUNDING = _packets("ceil floor floor_divide round trunc")
# Integers that a float32 can hold stay such, in any order of the additions.
_EXACT = _packets(
    "_to_copy _unsafe_view abs add amax amin arange cat clamp clamp_max clamp_min clone "
    "copy cumsum expand full gather index index_select masked_fill maximum minimum mul "
    "neg ones permute repeat rsub scatter select slice squeeze sub sum unsqueeze view "
    "where zeros"
) | {torch.ops.prims.convert_element_type}


# A size depends on what these read.
_OF_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def is_decision(node: fx.Node) -> bool:
    """Whether ``mark_decisions`` found that the node decides what is read."""
    return _MARK in node.meta


def mark_decisions(graph: fx.Graph, backward: Container[fx.Node] = ()) -> None:
    """Mark the decisions of a graph; no node of the ``backward`` is one.

    O(nodes + edges), those of the graphs that higher-order operators run included.
    """
    discrete: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_discrete(node, discrete):
            discrete.add(node)
    read_by: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        node.meta.pop(_MARK, None)
        if node.op != "call_function" or node in backward:
            continue
        inputs = node.all_input_nodes
        decides = _decides_inside(node)
        if node in read_by or _selects(node):
            if node.target is operator.getitem:
                read_by.update(inputs)
            else:
                read_by.update(source for source in inputs if source in discrete)
                decides |= any(
                    _has_floats(source) and source not in discrete for source in inputs
                )
        if _reads_by_index(node):
            read_by.update(filter(_is_index, inputs))
        if decides:
            node.meta[_MARK] = True


def subgraphs(node: fx.Node) -> list[fx.Graph]:
    """The graphs that the call of a higher-order operator runs."""
    module = node.graph.owning_module
    attributes = [
        operator.attrgetter(str(argument.target))(module)
        for argument in node.all_input_nodes
        if argument.op == "get_attr" and module is not None
    ]
    return [each.graph for each in attributes if isinstance(each, fx.GraphModule)]


def _decides_inside(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    inner = subgraphs(node)
    for graph in inner:
        mark_decisions(graph)
    return any(is_decision(each) for graph in inner for each in graph.nodes)


def _selects(node: fx.Node) -> bool:
    """Whether an operator returns positions, and somebody reads them."""
    if _packet(node) not in _SELECTIONS:
        return False
    if isinstance(node.meta.get("val"), torch.Tensor):
        return _is_integral(node)
    return any(_is_integral(part) and part.users for part in node.users)


def _reads_by_index(node: fx.Node) -> bool:
    """Whether an operator may read elements, or a branch, by its integers and masks."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if not _OF_DATA.isdisjoint(target.tags):
        return True
    is_pointwise = torch.Tag.pointwise in target.tags
    return not is_pointwise and any(map(_has_floats, node.all_input_nodes))


def _is_index(node: fx.Node) -> bool:
    """Whether a value may be an index or a mask; bytes are quantized values."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    is_wide = _is_integral(node) and value.dtype.itemsize > 1
    return value.dtype == torch.bool or is_wide


def _is_discrete(node: fx.Node, discrete: Container[fx.Node]) -> bool:
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    if not _has_floats(node):
        return True
    packet = _packet(node)
    if packet in _ROUNDING or node.kwargs.get("rounding_mode"):
        return True
    return (
        packet in _EXACT
        and value.dtype.itemsize >= 4
        and all(source in discrete for source in node.all_input_nodes)
        and all(
            given.is_integer()
            for given in tree_leaves((node.args, node.kwargs))
            if isinstance(given, float)
        )
    )


def _has_floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    leaves = (value,) if isinstance(value, torch.Tensor) else tree_leaves(value)
    return any(
        leaf.dtype.is_floating_point or leaf.dtype.is_complex
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
    )


def _is_integral(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return False
    return not _has_floats(node)


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "_overloadpacket", node.target)
