"""Makes a graph compute on rows what it computes on batches of rows.

The logits of a language model are the rows of one product, [batch * tokens, words].
Most models view them as [batch, tokens, words] in between, to convert or scale them,
and as rows again for the loss.  The chunker divides rows, and a chunk of rows cannot be
viewed as batches of them.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Optional, TYPE_CHECKING

import torch

# The chunker's rules name operators that this defines.
import torch._inductor.inductor_prims
from torch._inductor.fx_passes.auto_chunker.core import (
    eligible_amplifier_node as products,
    find_amplifier_node,
)
from torch._inductor.fx_passes.auto_chunker.utils import (
    get_fake_tensor_from_node_arg,
    use_tangent,
)
from torch.fx import map_arg
from torch.utils._ordered_set import OrderedSet
from torch.utils.flop_counter import flop_registry
from .limits import is_pointwise


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, Node

aten = torch.ops.aten


def head_of(graph: Graph) -> Optional[tuple[int, int, int]]:
    """The rows, inner size and columns of the product to divide into chunks, as counts.

    Only rows that the loss reads count.  None if there is no such product, or if sizes
    are symbolic, which the chunker does not take.
    """
    # Comparing symbolic sizes would add guards.
    head = None if has_symbolic_sizes(graph) else find_amplifier_node(graph)
    if head is None:
        return None
    inner = head.all_input_nodes[-1].meta["val"].shape[0]
    read = slice_of_rows(head) or head
    *rows, columns = read.meta["val"].shape
    return math.prod(rows), inner, columns


def has_symbolic_sizes(graph: Graph) -> bool:
    """Whether sizes vary, those of inputs or of what a node makes of its data."""
    given = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    shapes = (getattr(node.meta.get("val"), "shape", ()) for node in graph.nodes)
    return any(isinstance(value, torch.SymInt) for value in given) or any(
        type(size) is not int for shape in shapes for size in shape
    )


def is_last_product(node: Node) -> bool:
    """Whether the forward computes no product from what this one makes.  O(nodes)."""
    made = OrderedSet([node])
    for other in node.graph.nodes:
        if use_tangent(other):
            break
        if other.op == "call_function" and not made.isdisjoint(other.all_input_nodes):
            if getattr(other.target, "_overloadpacket", None) in flop_registry:
                return False
            made.add(other)
    return True


def is_returned(graph: Graph) -> bool:
    """Whether a graph returns the product to divide, or a node `amplified` from it."""
    head = find_amplifier_node(graph)
    (output,) = graph.find_nodes(op="output")
    return head is not None and not amplified(head).isdisjoint(output.all_input_nodes)


def amplified(head: Node) -> OrderedSet[Node]:
    """The nodes that are as large as a product because they are made of it.

    Weights, and their gradients, may happen to be as large.  O(nodes).
    """

    def numel(node: Node) -> int:
        value = get_fake_tensor_from_node_arg(node)
        return -1 if value is None else value.numel()

    found, pending, size = OrderedSet([head]), [head], numel(head)
    while pending:
        node = pending.pop()
        # A product makes something else of what it reads.
        arguments = [] if node is head else node.all_input_nodes
        for other in (*arguments, *node.users):
            is_made = other.op == "call_function" and other.target not in products
            if is_made and numel(other) == size and other not in found:
                found.add(other)
                pending.append(other)
    return found


def slice_of_rows(head: Node) -> Optional[Node]:
    """The slice that leaves out some rows of a product, or of what is made as large.

    None if there is none, or if there are several.
    """
    large = amplified(head)
    users = OrderedSet(user for node in large for user in node.users)
    slices = [user for user in users if user.target is aten.slice.Tensor]
    if not slices or any(each.args[1:] != slices[0].args[1:] for each in slices):
        return None
    *rows, words = shape_of(slices[0])
    return slices[0] if math.prod(rows) and words == shape_of(head)[-1] else None


def compute_on_rows(graph: Graph, number: int) -> None:
    """Replace ``op(view(rows))`` by ``view(op(rows))``, for pointwise operators.

    What is [batch, tokens], with one element for each of ``number`` rows, is computed
    as a vector of them, whatever it is computed from.  A view back to what was viewed
    goes away, and so does what nothing reads any more.  O(nodes).
    """
    for node in list(graph.nodes):
        if _is_for_tokens(node, number):
            _compute_a_vector(graph, node, number)
        elif node.target is aten.view.default:
            origin = _source_of_view(node)
            if shape_of(origin) == shape_of(node):
                node.replace_all_uses_with(origin)
        elif is_pointwise(node):
            _without_rows(graph, node, number)
            _compute_on_rows(graph, node)
        elif node.target is aten.sum.default:
            node.update_arg(0, _source_of_view(node.all_input_nodes[0]))
    graph.eliminate_dead_code()


def _compute_on_rows(graph: Graph, node: Node) -> None:
    shape = shape_of(node)
    # By argument, the rows that it is a view of.
    rows: dict[Node, Node] = {}
    for argument in node.all_input_nodes:
        own = shape_of(argument)
        if own == shape and argument.target is aten.view.default:
            base = argument.all_input_nodes[0]
            if not _is_batched(shape_of(base), shape):
                return
            rows[argument] = base
        elif own != ():
            return
    if not rows or len({shape_of(base) for base in rows.values()}) != 1:
        return
    flat = shape_of(next(iter(rows.values())))
    with graph.inserting_before(node):
        new = graph.node_copy(node, lambda argument: rows.get(argument, argument))
        again = graph.call_function(aten.view.default, (new, [*shape]))
    again.meta = node.meta
    new.meta = {**node.meta, "val": node.meta["val"].reshape(flat)}
    node.replace_all_uses_with(again)


def _is_for_tokens(node: Node, number: int) -> bool:
    """Whether a node computes one element for each of ``number`` rows, in batches."""
    shape = shape_of(node)
    if len(shape) < 2 or math.prod(shape) != number or shape[0] == number:
        return False
    if node.target is aten.expand.default:
        return shape_of(node.args[0]) == ()
    return is_pointwise(node) and all(
        shape_of(each) in ((), shape) for each in node.all_input_nodes
    )


def _without_rows(graph: Graph, node: Node, number: int) -> None:
    """View arguments that are the same for all rows without their dimension of 1."""
    if shape_of(node)[:1] != (number,):
        return
    for argument in node.all_input_nodes:
        first, *sizes = shape_of(argument) or (0,)
        is_as_deep = len(shape_of(argument)) == len(shape_of(node))
        if first == 1 and is_as_deep and math.prod(sizes) > 1:
            with graph.inserting_before(node):
                new = call_with_meta_of(argument, aten.view.default, argument, sizes)
            node.replace_input_with(argument, new)


def _source_of_view(node: Node) -> Node:
    while node.target is aten.view.default:
        (node,) = node.all_input_nodes
    return node


def _compute_a_vector(graph: Graph, node: Node, number: int) -> None:
    shape = shape_of(node)
    call = functools.partial(call_with_meta_of, node)

    def vector(value: Node) -> Node:
        if shape_of(value) != shape:
            return value
        origin = _source_of_view(value)
        if shape_of(origin) == (number,):
            return origin
        if not value.meta["val"].is_contiguous():
            contiguous = {"memory_format": torch.contiguous_format}
            value = call(aten.clone.default, value, **contiguous)
        return call(aten.view.default, value, [number])

    with graph.inserting_before(node):
        if node.target is aten.expand.default:
            new = call(node.target, node.args[0], [number])
        else:
            args, kwargs = map_arg((node.args, node.kwargs), vector)
            new = call(node.target, *args, **kwargs)
        again = call(aten.view.default, new, [*shape])
    node.replace_all_uses_with(again)


def call_with_meta_of(like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new call, with the metadata of a node of the same part of the program."""
    new = like.graph.call_function(target, args, kwargs)
    args, kwargs = map_arg((args, kwargs), lambda each: each.meta["val"])
    new.meta = {**like.meta, "val": target(*args, **kwargs)}
    return new


def shape_of(node: Any) -> tuple[int, ...]:
    value = get_fake_tensor_from_node_arg(node)
    return () if value is None else tuple(value.shape)


def _is_batched(rows: Sequence[Any], shape: Sequence[Any]) -> bool:
    """Whether a shape has two dimensions where that of ``rows`` has its first."""
    is_longer = len(shape) > len(rows)
    return is_longer and tuple(shape[1 - len(rows) :]) == tuple(rows[1:])
