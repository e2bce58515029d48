"""The bytes that a compiled graph has live while it runs, read from its wrapper.

A wrapper is the Python code that inductor generates around its kernels.  It allocates
every buffer, and drops it after its last use::

    buf0 = empty_strided_cuda((64, 64), (64, 1), torch.float32)  # a new storage
    buf1 = reinterpret_tensor(buf0, (32, 128), (128, 1), 0)  # the same one
    buf2 = torch.ops.aten.sort.default(buf1)  # two more
    del buf0, buf1

So what is live at any moment follows from that code, without running it.  It is read as
text, as inductor's own lists of lines have branches, loops and partitions as text, too.
Both sides of a branch are followed, and the body of a loop twice.  The workspaces of
kernels and operators are not counted.  Symbolic sizes are kept as expressions, so that
the same code tells what it has live for other sizes.
"""

from __future__ import annotations

import ast
import logging
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import sympy

import torch
from torch._inductor import config, ir
from torch._prims_common import compute_required_storage_length


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch._inductor.graph import GraphLowering


log = logging.getLogger(__name__)


# Functions that return an alias of their first argument, and methods, of their object.
_ALIASING = ("as_strided", "copy_if_misaligned", "reinterpret_tensor", "view")


class WrapperMemory(NamedTuple):
    """What a wrapper has live, in bytes: numbers, or expressions of symbolic sizes.

    Args:
        live: after each allocation, the live bytes of all that the wrapper allocated.
        dropped: for each input, how many allocations come before it is dropped.
        results: for each result, the storage's number and bytes if the wrapper
            allocated it; None for an input and for what is no tensor.
        hints: the symbols, each with the value that it had in the trace.
    """

    live: tuple[Any, ...]
    dropped: tuple[int, ...]
    results: tuple[Optional[tuple[int, Any]], ...]
    hints: dict[sympy.Symbol, int]

    def at(self, values: Mapping[sympy.Symbol, int]) -> WrapperMemory:
        """The same in numbers, for these values of the symbols, by default the hints."""
        if not self.hints:
            return self
        known = {**self.hints, **values}

        def nbytes(size: Any) -> int:
            return size if isinstance(size, int) else int(size.xreplace(known))

        results = (each and (each[0], nbytes(each[1])) for each in self.results)
        live = tuple(map(nbytes, self.live))
        return WrapperMemory(live, self.dropped, tuple(results), {})

    def peak(self, owned: Iterable[tuple[int, Sequence[int]]] = ()) -> int:
        """The most bytes live, not counting inputs that somebody else holds.

        ``owned`` are the storages that nobody else holds: the bytes of each, and the
        indices of the inputs that are views of it.  O(allocations + inputs).
        """
        live = self.at({}).live
        change = [0] * (len(live) + 2)
        inputs = 0
        for nbytes, views in owned:
            inputs += nbytes
            change[max(self.dropped[index] for index in views)] -= nbytes
        most = inputs
        for nbytes, freed in zip(live, change):
            inputs += freed
            most = max(most, inputs + nbytes)
        return most


def wrapper_memory(graph: GraphLowering, source: str) -> Optional[WrapperMemory]:
    """What the wrapper of a graph has live on the device ``config.live_bytes_of``.

    None if no device is set, or if the ``source`` does not tell, for example because it
    calls an operator whose results have no known size.  O(length of the source).
    """
    device = config.live_bytes_of  # type: ignore[attr-defined]
    if device is None:
        return None
    try:
        walk = _Walk(graph, source, torch.device(device))
        results = walk.follow()
        symbols = set().union(*(getattr(n, "free_symbols", ()) for n in walk.live))
        hints = {
            symbol: int(graph.sizevars.optimization_hint(symbol, fallback=0))
            for symbol in symbols
        }
        return WrapperMemory(tuple(walk.live), tuple(walk.dropped), results, hints)
    except Exception as error:
        # A compile must not fail because of this.
        log.debug("what a wrapper has live is not told", exc_info=error)
        return None


class _Storage:
    """A storage, which is live for as long as some variable refers to it.

    ``made`` is its number and its bytes; None for an input, which has an ``index``
    among the graph's inputs instead.
    """

    def __init__(
        self, walk: _Walk, made: Optional[tuple[int, Any]] = None, index: int = -1
    ) -> None:
        self._walk, self.made, self.index = walk, made, index

    def __del__(self) -> None:
        self._walk.free(self)


class _Walk:
    """Follows a wrapper's functions.

    Each of its variables refers to a `_Storage`, a list of values, a dict of values by
    indices (what an operator returned), or None (all that has no memory).  Storages on
    another device count as 0 bytes.
    """

    def __init__(self, graph: GraphLowering, source: str, device: torch.device) -> None:
        self.device = device
        # Each with the graph that it belongs to.
        self.buffers = {
            name: (buffer, owner)
            for owner in _with_subgraphs(graph)
            for name, buffer in owner.name_to_buffer.items()
        }
        self.functions = {
            node.name: node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef)
        }
        self.live: list[Any] = []
        self.dropped = [0] * len(graph.graph_inputs)
        self._now: Any = 0
        self._parts: dict[str, dict[tuple[Any, ...], str]] = {}
        for name, (buffer, _) in self.buffers.items():
            if isinstance(buffer, ir.MultiOutput):
                indices = tuple(index for _, index in buffer.indices)
                whole: Any = buffer.inputs[0]
                self._parts.setdefault(whole.get_name(), {})[indices] = name

    def follow(self) -> tuple[Optional[tuple[int, Any]], ...]:
        """Follow the wrapper from call to return, and return each result's ``made``."""
        inputs = [_Storage(self, index=i) for i in range(len(self.dropped))]
        results = self._run("call", inputs) or []
        return tuple(getattr(each, "made", None) for each in results)

    def _made(self, nbytes: Any) -> _Storage:
        self._now += nbytes
        self.live.append(self._now)
        return _Storage(self, (len(self.live), nbytes))

    def free(self, storage: _Storage) -> None:
        if storage.made is None:
            self.dropped[storage.index] = len(self.live)
        else:
            self._now -= storage.made[1]

    def _run(self, function: str, arguments: list[Any]) -> Any:
        """What a function of the wrapper returns for a list of arguments."""
        definition = self.functions[function]
        names = {definition.args.args[-1].arg: arguments}
        # Only the function's own variables may keep the list's storages live.
        del arguments
        return self._block(definition.body, names)

    def _block(self, body: Sequence[ast.stmt], names: dict[str, Any]) -> Any:
        for statement in body:
            if isinstance(statement, ast.Assign):
                first = statement.targets[0]
                value = self._value(statement.value, names, first)
                for target in statement.targets:
                    _assign_in_scope(target, value, names)
                # Only the wrapper's variables may keep its storages live.
                del value
            elif isinstance(statement, ast.Delete):
                for target in statement.targets:
                    names.pop(ast.unparse(target), None)
            elif isinstance(statement, ast.With):
                self._block(statement.body, names)
            elif isinstance(statement, ast.Return):
                return self._value(statement.value, names)
            elif isinstance(statement, ast.Expr):
                self._method(statement.value, names)
            elif isinstance(statement, ast.If):
                # On a copy: what only this side drops is still there after the other.
                self._block(statement.body, _copy_of_scope(names))
                self._block(statement.orelse, names)
            elif isinstance(statement, ast.While):
                # In the second round, the carried values are the loop's own.
                self._block(statement.body * 2, names)
            elif any(isinstance(part, ast.Assign) for part in ast.walk(statement)):
                raise ValueError(ast.unparse(statement))
        return None

    def _method(self, value: ast.expr, names: dict[str, Any]) -> None:
        """Follow a call whose result is not used."""
        called = getattr(value, "func", None)
        if not isinstance(called, ast.Attribute):
            return
        if called.attr in ("append", "extend"):
            # As in a loop that stacks what each round returns.
            raise ValueError(ast.unparse(value))
        held = names.get(ast.unparse(called.value))
        if called.attr == "clear" and isinstance(held, list):
            held.clear()

    def _value(
        self, value: Any, names: dict[str, Any], target: Optional[ast.expr] = None
    ) -> Any:
        """What an expression refers to, which may be assigned to a target."""
        if isinstance(value, ast.Name):
            return names.get(value.id)
        if isinstance(value, (ast.Tuple, ast.List)):
            return [self._value(each, names) for each in value.elts]
        if isinstance(value, ast.Subscript):
            return self._part(value, names)
        if isinstance(value, ast.BinOp) and isinstance(value.left, ast.List):
            return [None] * ast.literal_eval(value.right)
        if not isinstance(value, ast.Call):
            return None
        called: Any = value.func
        name = ast.unparse(called)
        if name.rpartition(".")[2] in _ALIASING:
            is_method = isinstance(called, ast.Attribute)
            return self._value(called.value if is_method else value.args[0], names)
        if name.startswith("self.partitions["):
            name = f"partition_{ast.literal_eval(called.slice)}"
        if name in self.functions:
            return self._run(name, names.pop(ast.unparse(value.args[-1])))
        return self._result(target, value, names)

    def _part(self, value: ast.Subscript, names: dict[str, Any]) -> Any:
        """The part of an operator's results that a subscript takes out."""
        index, whole = ast.literal_eval(value.slice), self._value(value.value, names)
        if isinstance(whole, dict):
            parts = {at[1:]: each for at, each in whole.items() if at[0] == index}
            return parts.get((), parts)
        return whole[index] if isinstance(whole, list) else None

    def _result(
        self, target: Optional[ast.expr], call: ast.Call, names: dict[str, Any]
    ) -> Any:
        """What a call to anything but a function of the wrapper makes."""
        if not isinstance(target, ast.Name):
            return None
        name = target.id
        if name in self._parts:
            parts = {
                indices: self._buffer(part, names)
                for indices, part in self._parts[name].items()
            }
            # Without indices, it is the only result.
            return parts.get((), parts)
        if name in self.buffers:
            return self._buffer(name, names)
        called = ast.unparse(call.func)
        if called.startswith("empty_strided"):
            kind = called.removeprefix("empty_strided_").partition("_")[0]
            return self._made(_literal_bytes(call) * (kind == self.device.type))
        if name.rpartition("_")[2].startswith("buf"):
            raise ValueError(ast.unparse(call))
        return None

    def _buffer(self, name: str, names: dict[str, Any]) -> Any:
        buffer, graph = self.buffers[name]
        aliases = buffer.get_inputs_that_alias_output()
        if aliases:
            # A result names its operator, which names what it views.
            is_own = aliases[0] in self._parts
            return self._buffer(aliases[0], names) if is_own else names.get(aliases[0])
        if isinstance(buffer.layout, (ir.NoneLayout, ir.MutationLayoutSHOULDREMOVE)):
            return None
        there = buffer.get_device_or_error()
        is_other = self.device.index not in (None, there.index)
        if there.type != self.device.type or is_other:
            return self._made(0)
        length = sympy.sympify(graph.get_allocation_storage_size(buffer))
        length = int(length) if length.is_number else length
        return self._made(length * buffer.get_dtype().itemsize)


def _with_subgraphs(graph: GraphLowering) -> Iterator[GraphLowering]:
    """A graph and the subgraphs that its branches, loops and nested regions run."""
    yield graph
    for buffer in graph.name_to_buffer.values():
        for part in vars(buffer).values():
            if isinstance(part, ir.Subgraph) and part.graph is not None:
                yield from _with_subgraphs(part.graph)


def _copy_of_scope(names: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [*value] if isinstance(value, list) else value
        for name, value in names.items()
    }


def _assign_in_scope(target: ast.expr, value: Any, names: dict[str, Any]) -> None:
    if isinstance(target, ast.Tuple):
        values = value if isinstance(value, list) else [None] * len(target.elts)
        for each, part in zip(target.elts, values):
            _assign_in_scope(each, part, names)
    elif isinstance(target, ast.Name):
        names[target.id] = value
    elif isinstance(target, ast.Subscript):
        held = names.get(ast.unparse(target.value))
        if isinstance(held, list):
            held[ast.literal_eval(target.slice)] = value


def _literal_bytes(call: ast.Call) -> int:
    """The bytes of ``empty_strided_...(size, stride, dtype)``."""
    size, stride = map(ast.literal_eval, call.args[:2])
    dtype: torch.dtype = getattr(
        torch, ast.unparse(call.args[2]).removeprefix("torch.")
    )
    return compute_required_storage_length(size, stride, 0) * dtype.itemsize
