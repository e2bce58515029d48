"""Symbolic sizes: where the calls of a graph have them, and how large they are there."""

from __future__ import annotations

from typing import Any, Callable, Optional, TYPE_CHECKING

import torch

from .recompute_cost import concrete


if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Places", "size_evaluator", "sizes_in", "symbols_in"]

# Of symbols, an argument, or one of its dimensions.
Places = dict[Any, tuple[int, Optional[int]]]


def sizes_in(args: Sequence[Any], symbols: Places) -> tuple[int, ...]:
    """What the symbols are in a call."""
    places = symbols.values()
    return tuple(args[i] if at is None else args[i].shape[at] for i, at in places)


def size_evaluator(places: Places, sizes: Sequence[int]) -> Callable[[Any], int]:
    """What tells how large a size is where symbols are of these sizes."""
    symbols = dict(zip(places, sizes))

    def as_int(size: Any) -> int:
        if isinstance(size, int):
            return size
        found = size.node.expr.xreplace(symbols)
        return int(found) if getattr(found, "is_number", True) else concrete(size)

    return as_int


def symbols_in(given: Sequence[Any]) -> Places:
    """Where calls have the symbols of sizes."""
    found: Places = {}
    for i, each in enumerate(given):
        is_tensor = isinstance(each, torch.Tensor)
        sizes = enumerate(each.shape) if is_tensor else [(None, each)]
        for at, size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                found.setdefault(size.node.expr, (i, at))
    return found
