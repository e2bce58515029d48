"""Symbolic sizes: where to find them in the arguments of a call, and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves

from ..._activation_checkpointing.random_ops import subgraphs
from .recompute_cost import size_or_hint


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch.fx as fx


# Symbols, each with its value.
Values = tuple[tuple[Any, int], ...]


class Place(NamedTuple):
    """Where an argument of a call has a size.

    Args:
        argument: its index.
        names: the attributes that lead from a tensor subclass to a tensor inside of it.
        dim: the dimension; None if the argument is the size itself.
    """

    argument: int
    names: tuple[str, ...]
    dim: Optional[int]

    def size_in(self, args: Sequence[Any]) -> int:
        value = args[self.argument]
        for name in self.names:
            value = getattr(value, name)
        size: int = value if self.dim is None else value.shape[self.dim]
        return size


Places = dict[Any, Place]


def values_of_symbols(args: Sequence[Any], places: Places) -> tuple[int, ...]:
    """The values that symbols have in a call, in the order of ``places``."""
    return tuple(place.size_in(args) for place in places.values())


@dataclass(frozen=True)
class SizeEvaluator:
    """A function that evaluates symbolic sizes, given some symbols and their values.

    A size that also depends on other symbols is evaluated to its hint.
    """

    values: Values

    def __call__(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        found = size.node.expr.xreplace(dict(self.values))
        return int(found) if getattr(found, "is_number", True) else size_or_hint(size)


def size_evaluator(places: Places, sizes: Sequence[int]) -> SizeEvaluator:
    """The function for the values from `values_of_symbols`."""
    return SizeEvaluator((*zip(places, sizes),))


def places_of_symbols(given: Sequence[Any], graph: fx.Graph) -> Places:
    """The first place of each symbol that sizes of a graph's tensors depend on.

    Other integers, such as a step counter, are left out: they may change in each call
    without changing any size.
    """
    found: Places = {}
    for i, each in enumerate(given):
        for place, size in _sizes_of(each, Place(i, (), None)):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                found.setdefault(size.node.expr, place)
    wanted = _symbols_of_sizes(graph) if found else ()
    return {symbol: place for symbol, place in found.items() if symbol in wanted}


def _sizes_of(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    """Places and sizes of an argument, and of the tensors that a subclass wraps."""
    if not isinstance(value, torch.Tensor):
        yield place, value
        return
    for dim, size in enumerate(value.shape):
        yield place._replace(dim=dim), size
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            inner = place._replace(names=(*place.names, name))
            yield from _sizes_of(getattr(value, name), inner)


def has_symbolic_sizes(graph: fx.Graph) -> bool:
    """Whether sizes of a graph's tensors may differ from call to call."""
    given = (node.meta["val"] for node in graph.find_nodes(op="placeholder"))
    symbols = {symbol for value in given for symbol in free_symbols(value)}
    return bool(symbols) and not symbols.isdisjoint(_symbols_of_sizes(graph))


def _is_empty(value: torch.Tensor) -> bool:
    """Whether a tensor has no elements, like those for a jagged one's extreme lengths."""
    return any(type(size) is int and size == 0 for size in value.shape)


def _symbols_of_sizes(graph: fx.Graph) -> set[Any]:
    """The symbols in sizes of a graph's tensors, and of those in its bodies."""
    found: set[Any] = set()
    for node in graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and not _is_empty(value):
                found.update(free_symbols([*value.shape]))
        for body in subgraphs(node):
            found.update(_symbols_of_sizes(body))
    return found
