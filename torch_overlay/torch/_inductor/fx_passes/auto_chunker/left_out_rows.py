"""Makes the product behind the logits compute no rows that the loss leaves out.

A language model predicts the next token, so most losses leave out the logits of the
last one, with a slice of [batch, tokens, words], which no chunk of rows can take.
As rows are independent, they are left out of what the product reads instead.  In the
backward, the gradient of the slice is padded with zeros, which add nothing to the
gradient of the weights.  So the two products there read the gradient before it is
padded, and the gradient of the product's input, much smaller, is padded instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import map_arg, Node
from torch.utils._ordered_set import OrderedSet
from .flat_rows import call_with_meta_of, shape_of, slice_of_rows
from .limits import is_pointwise, positive_dims


aten = torch.ops.aten
prims = torch.ops.prims


# Operators that make zeros of zeros, whatever the other factor or the divisor is.
_LINEAR = (aten.clone.default, aten.neg.default, prims.convert_element_type.default)
_TIMES = (aten.mul.Tensor, aten.mul.Scalar)
_OVER = (aten.div.Tensor, aten.div.Scalar)


def leave_out_rows(head: Node) -> Node:
    """A product without the rows that are left out; ``head`` itself if there are none.

    Where anything else reads them, the graph is left as it is.  O(nodes).
    """
    cut = slice_of_rows(head)
    if cut is None:
        return head
    found = _Rows(head, cut)
    is_done = all(map(found.shorten, list(head.graph.nodes)))
    if is_done:
        for old, new in found.results.items():
            old.replace_all_uses_with(new)
    head.graph.eliminate_dead_code()
    return found.short[head] if is_done else head


class _Rows:
    """Copies a head for the rows that are read."""

    def __init__(self, head: Node, cut: Node) -> None:
        self.head, self.graph = head, head.graph
        self.slice = cut.args[1:]
        self.all, self.left = shape_of(cut.args[0])[:-1], shape_of(cut)[:-1]
        words = shape_of(head)[-1]
        # The shape of a node's copy, by the shape of the node.
        self.shapes = {
            (*self.all, words): (*self.left, words),
            (math.prod(self.all), words): (math.prod(self.left), words),
        }
        # By node, a copy that has only the rows that are read.
        self.short: dict[Node, Node] = {}
        # Those that are zero in all other rows, and copies of their transposes.
        self.padded: OrderedSet[Node] = OrderedSet()
        self.transposed: dict[Node, Node] = {}
        # Rows of what products read; one node each, for the chunker to recognize.
        self.factors: dict[tuple[Node, int], Node] = {}
        # By node, what replaces it where the values are no longer rows of logits.
        self.results: dict[Node, Node] = {}

    def shorten(self, node: Node) -> bool:
        """Copy a node if it is a part of the head; False if that cannot be copied."""
        with self.graph.inserting_before(node):
            if node is self.head:
                return self.shorten_head()
            if self.is_pad(node):
                self.short[node] = node.args[1]  # type: ignore[assignment]
                self.padded.add(node)
                return True
            read = [arg for arg in node.all_input_nodes if arg in self.short]
            if any(arg in self.transposed for arg in node.all_input_nodes):
                return self.shorten_product(node)
            if not read:
                return True
            if node.target is aten.view.default:
                return self.shorten_view(node)
            if node.target is aten.slice.Tensor:
                self.results[node] = self.short[read[0]]
                is_same = shape_of(read[0])[:-1] == self.all
                return is_same and node.args[1:] == self.slice
            if is_pointwise(node):
                return self.shorten_pointwise(node, read)
            # All else reads the other rows, too, so these have to be zero.
            if not all(arg in self.padded for arg in read):
                return False
            if node.target is aten.permute.default and node.args[1] == [1, 0]:
                self.transposed[node] = self.copy(node)
                return True
            if node.target is aten.sum.dim_IntList:
                self.results[node] = self.copy(node)
                dims = positive_dims(read[0], node.args[1])
                return sorted(dims) == [*range(len(shape_of(read[0])) - 1)]
            return self.shorten_product(node)

    def shorten_head(self) -> bool:
        *bias, rows, weight = self.head.args
        if self.head.kwargs or not all(_is_one_row(shape_of(each)) for each in bias):
            return False
        args = (*bias, self.rows_of(rows, 0, self.head), weight)
        self.short[self.head] = call_with_meta_of(self.head, self.head.target, *args)
        return True

    def is_pad(self, node: Node) -> bool:
        """Whether a node is the gradient of the slice, with zeros around it."""
        if node.target is not aten.slice_scatter.default:
            return False
        zeros: Any = node.args[0]
        if zeros.target is not aten.full.default or zeros.args[1] != 0:
            return False
        is_same = (node.args[2:], shape_of(node)[:-1]) == (self.slice, self.all)
        return is_same and shape_of(node.args[1]) == self.shapes.get(shape_of(node))

    def shorten_view(self, node: Node) -> bool:
        shape = self.shapes.get(shape_of(node))
        if shape is None:
            return False
        (rows,) = node.all_input_nodes
        self.short[node] = call_with_meta_of(
            node, node.target, self.short[rows], [*shape]
        )
        if rows in self.padded:
            self.padded.add(node)
        return True

    def shorten_pointwise(self, node: Node, read: list[Node]) -> bool:
        for each in node.all_input_nodes:
            shape = shape_of(each)
            # An argument from outside the head has to be the same for all rows.
            is_same = shape == shape_of(node) if each in read else _is_one_row(shape)
            if not is_same:
                return False
        padded = [isinstance(a, Node) and a in self.padded for a in node.args]
        if any(padded):
            target = node.target
            is_zero = target in _LINEAR or target in _TIMES
            is_zero |= target in _OVER and padded == [True, False]
            is_zero |= target in (aten.add.Tensor, aten.sub.Tensor) and all(padded)
            if not is_zero:
                return False
            self.padded.add(node)
        self.short[node] = self.copy(node)
        return True

    def shorten_product(self, node: Node) -> bool:
        if node.target is not aten.mm.default:
            return False
        left: Any
        right: Any
        left, right = node.args
        ours = {**self.short, **self.transposed}
        if left in ours and right in ours:
            return False
        if left in self.short:
            factors = self.short[left], right
        elif left in self.transposed:
            factors = self.transposed[left], self.rows_of(right, 0, node)
        elif right in self.short:
            factors = self.rows_of(left, 1, node), self.short[right]
        else:
            return False
        product = call_with_meta_of(node, node.target, *factors)
        is_rows = left in self.short
        self.results[node] = self.pad(product, node) if is_rows else product
        return True

    def rows_of(self, value: Any, dim: int, like: Node) -> Node:
        """The rows of a value, along ``dim``, that are read; always the same node."""
        if (value, dim) not in self.factors:
            self.factors[value, dim] = self.cut_rows(value, dim, like)
        return self.factors[value, dim]

    def cut_rows(self, value: Any, dim: int, like: Node) -> Node:
        before, after = shape_of(value)[:dim], shape_of(value)[dim + 1 :]
        which, *ends = self.slice
        which = which % (len(self.all) + 1) + dim  # type: ignore[operator]
        view, slice_, clone = aten.view.default, aten.slice.Tensor, aten.clone.default
        batches = call_with_meta_of(like, view, value, [*before, *self.all, *after])
        left = call_with_meta_of(like, slice_, batches, which, *ends)
        left = call_with_meta_of(
            like, clone, left, memory_format=torch.contiguous_format
        )
        return call_with_meta_of(
            like, view, left, [*before, math.prod(self.left), *after]
        )

    def pad(self, rows: Node, node: Node) -> Node:
        """The value of a node, from those of its rows that are not padding."""
        value, view = node.meta["val"], aten.view.default
        sizes = [*self.all, value.shape[-1]]
        kind = {"dtype": value.dtype, "device": value.device}
        zeros = call_with_meta_of(node, aten.full.default, sizes, 0, **kind)
        left = call_with_meta_of(node, view, rows, [*self.left, value.shape[-1]])
        all_ = call_with_meta_of(
            node, aten.slice_scatter.default, zeros, left, *self.slice
        )
        return call_with_meta_of(node, view, all_, [*value.shape])

    def copy(self, node: Node) -> Node:
        args, kwargs = map_arg(
            (node.args, node.kwargs), lambda each: self.short.get(each, each)
        )
        return call_with_meta_of(node, node.target, *args, **kwargs)


def _is_one_row(shape: tuple[int, ...]) -> bool:
    return math.prod(shape[:-1]) == 1
