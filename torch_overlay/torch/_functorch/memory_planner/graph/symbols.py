"""Symbolic sizes: where to find them in the arguments of a call, and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import free_symbols

from .recompute_cost import size_or_hint


if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.fx as fx


# Symbols, each with its value.
Values = tuple[tuple[Any, int], ...]
# For each symbol, the index of an argument, and its dimension that has the symbol's
# value; None if the argument is that value itself.
Places = dict[Any, tuple[int, Optional[int]]]


def values_of_symbols(args: Sequence[Any], symbols: Places) -> tuple[int, ...]:
    """The values that the symbols have in a call, in the order of ``symbols``."""
    places = symbols.values()
    return tuple(args[i] if at is None else args[i].shape[at] for i, at in places)


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


def places_of_symbols(given: Sequence[Any]) -> Places:
    """Where to find symbolic sizes in the arguments of a call, the first place each."""
    found: Places = {}
    for i, each in enumerate(given):
        is_tensor = isinstance(each, torch.Tensor)
        sizes = enumerate(each.shape) if is_tensor else [(None, each)]
        for at, size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                found.setdefault(size.node.expr, (i, at))
    return found


def has_symbolic_sizes(graph: fx.Graph) -> bool:
    """Whether an input of a graph has a size that may differ from call to call."""
    given = graph.find_nodes(op="placeholder")
    return any(free_symbols(node.meta["val"]) for node in given)
