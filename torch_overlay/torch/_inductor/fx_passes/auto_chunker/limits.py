"""What may run in chunks of the batch, and what may not."""

from __future__ import annotations

from typing import Any, Optional, TYPE_CHECKING

import torch

from torch._inductor.fx_passes.auto_chunker.utils import get_fake_tensor_from_node_arg


if TYPE_CHECKING:
    from torch._inductor.fx_passes.auto_chunker.common import ChunkingMeta
    from torch.fx import Node

aten = torch.ops.aten
prims = torch.ops.prims


_POINTWISE = (prims.convert_element_type.default,)


def is_pointwise(node: Node) -> bool:
    """Whether each element of a node's value depends on one of each argument."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or target in _POINTWISE


def is_made_once(node: Node) -> bool:
    """Whether a value has no arguments, and all chunks have to see the same one.

    Random numbers are such a value.
    """
    return not node.all_input_nodes and node.target is not aten.full.default


def mark_made_before(nodes: list[Node], depends: dict[Node, bool]) -> None:
    """Mark what chunks read that does not depend on the product to divide.

    ``nodes`` are in the graph's order, and ``depends`` tells which depend on it.  What
    is marked is made before the chunks: it may need all rows, for a sum over them.
    """
    for node in reversed(nodes):
        if node.all_input_nodes:
            is_before = node.op == "call_function" and not depends[node]
        else:
            is_before = any(map(is_made_before, node.users))
        node.meta["made_before_chunks"] = is_before


def is_made_before(node: Node) -> bool:
    return bool(node.meta.get("made_before_chunks"))


def is_same_for_all_chunks(meta: Optional[ChunkingMeta]) -> bool:
    """Whether a scalar is the same for all chunks, even if it is to be scaled later."""
    return meta is None or (meta.chunk_dim is None and not meta.need_sum)


def needs_sum(*nodes: Any) -> bool:
    """Whether a value is known only when all chunks have run.

    Until then, nothing but sums may be computed from what each chunk adds to it.
    """
    metas = (node.meta.get("chunking") for node in nodes if hasattr(node, "meta"))
    return any(meta is not None and meta.need_sum for meta in metas)


def has_only_later_dims(node: Node) -> bool:
    """Whether all dimensions in a node's arguments come after that of the chunks."""
    metas = (each.meta.get("chunking") for each in (node, *node.all_input_nodes))
    chunked = [m.chunk_dim for m in metas if m is not None and m.chunk_dim is not None]
    dims = positive_dims(node.args[0], node.args[1])
    return all(dim > chunk_dim for dim in dims for chunk_dim in chunked)


def positive_dims(node: Any, dims: Any) -> list[int]:
    """Dimensions of a node's value as indices from 0; no ``dims`` stands for all."""
    value: Any = get_fake_tensor_from_node_arg(node)
    dims = [dims] if isinstance(dims, int) else dims
    return [dim % value.ndim for dim in dims or range(value.ndim)]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which chunks add up a scalar."""
    is_integer = not dtype.is_floating_point and not dtype.is_complex
    return dtype if is_integer else torch.promote_types(dtype, torch.float32)


def mutates(node: Node) -> bool:
    """Whether a node overwrites an argument, which chunks need as it was before."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
