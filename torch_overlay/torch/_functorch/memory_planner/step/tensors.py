"""The storages of tensors, however they are laid out, and tensors for numbers."""

from __future__ import annotations

import weakref
from typing import Any, Optional, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


_ROWS = "crow_indices", "col_indices", "values"
_COLUMNS = "ccol_indices", "row_indices", "values"
# By layout, the methods that return the parts of a sparse tensor.
_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


class SeenTensors:
    """What earlier recordings have seen, as long as it lives.

    ``leaves`` are autograd's, by identity, and ``left`` are the storages that were live
    when the last recording ended.
    """

    def __init__(self) -> None:
        self.leaves: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self.left: list[weakref.ref[torch.UntypedStorage]] = []


def plain_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors that have a storage, those in subclasses and sparse ones among them."""
    for value in tensors_in(values):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from plain_tensors([getattr(value, name) for name in names])
        elif value.layout is torch.strided:
            yield value
        else:
            with torch.no_grad():
                parts = [
                    getattr(value, name)() for name in _PARTS.get(value.layout, ())
                ]
            yield from parts


def storages_in(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """The storages of tensors, and of those that subclasses wrap."""
    return (each.untyped_storage() for each in plain_tensors(values))


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    return [each for each in values if isinstance(each, torch.Tensor)]


def numbers_as_tensors(func: Any, args: Sequence[Any]) -> Optional[list[Any]]:
    """An operator's arguments, with tensors for numbers where it wants tensors.

    None if there are none.  Below a dispatch mode, the tracer of ``torch.jit`` passes
    such numbers.
    """
    found = [
        at
        for at, (value, wanted) in enumerate(zip(args, func._schema.arguments))
        if isinstance(value, (int, float)) and isinstance(wanted.type, torch.TensorType)
    ]
    if not found:
        return None
    # Numbers are exact, but do not promote tensors.
    tensors = tensors_in(args)
    floating = [each for each in tensors if each.is_floating_point()]
    dtype: Optional[torch.dtype] = torch.float64
    if tensors and not any(each.dim() for each in floating):
        dtype = floating[0].dtype if floating else None
    return [
        torch.tensor(value, dtype=dtype if isinstance(value, float) else None)
        if at in found
        else value
        for at, value in enumerate(args)
    ]
