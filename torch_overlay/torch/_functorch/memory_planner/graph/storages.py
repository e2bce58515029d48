"""The storages of a graph's values, and what its operators have live while they run.

A higher-order operator runs other graphs, its *bodies*.  What they allocate is live
meanwhile, beyond its results: the operator's *scratch*.  It is counted as if run by
eager code, one operator of a body after another: of several branches, the largest; of a
loop, what it carries, old and new, and what it has collected so far.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch._higher_order_ops.base_hop import BaseHOP
from torch._prims_common import compute_required_storage_length
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils._pytree import tree_leaves

from ..._activation_checkpointing.random_ops import subgraphs
from .recompute_cost import concrete, is_view


if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    import torch.fx as fx


__all__ = [
    "Body",
    "CannotPlan",
    "Operator",
    "Storages",
    "body_of",
    "device_of",
    "has_bodies",
    "is_on",
    "nodes_in",
]

# Higher-order operators that run one of their bodies, once.
_RUN_ONCE = (
    "cond",
    "hints_wrapper",
    "invoke_subgraph",
    "strict_mode",
    "tag_activation_checkpoint",
    "wrap",
    "wrap_activation_checkpoint",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
)
# Operators that, unless made into a kernel, first make a value as large as their
# result: a product, to add something to.
_COMPOSED = ("prims.fma.default",)
# The bytes of each integer index by which a scan writes its results.
_INDEX_BYTES = 8


class CannotPlan(Exception):
    """The model does not understand a joint graph, or a plan for it cannot be run."""


class Operator(NamedTuple):
    """A node that runs, and the storages that it reads and allocates.

    Args:
        nbytes: the bytes that it allocates.
        is_required: whether the forward runs it in every plan.
        scratch: what it has live beyond these, mostly for its bodies; None if unknown.
    """

    node: fx.Node
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    nbytes: int
    is_required: bool
    scratch: Optional[int] = 0


def device_of(graph: fx.Graph) -> torch.device:
    """The device whose bytes a plan for the graph counts.

    That is an accelerator where the graph has values on one, else the CPU; of several,
    the one that has the most bytes.
    """
    nbytes: dict[torch.device, int] = {}
    for node in graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                size = concrete(value.numel()) * value.dtype.itemsize
                nbytes[value.device] = nbytes.get(value.device, 0) + size

    def rank(device: torch.device) -> tuple[int, int]:
        return {"meta": 0, "cpu": 1}.get(device.type, 2), nbytes[device]

    return max(nbytes, key=rank, default=torch.device("cpu"))


def has_bodies(node: fx.Node) -> bool:
    """Whether a node calls a higher-order operator, which may run other graphs."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def is_on(device: torch.device, value: torch.Tensor) -> bool:
    """Whether a value is on a device, or on any of its type if that has no index."""
    # A fake tensor's storage is on another device.
    there = value.device
    return there.type == device.type and device.index in (None, there.index)


class Storages:
    """The storages of a graph's values, numbered in the order of their allocation.

    nbytes[s]: a storage's size, 0 for inputs and what is on another device.
    values[node]: the storages of a node's value.
    read_via[node]: the storages that a reader of the node reads.
    calls: the graph's operators, with what they read and allocate.
    tangent_bytes, copied: tangents' bytes at the caller, and their copies' storages.

    If a ``required`` node is a size, no storage need be live for it.
    O(nodes + edges), those of bodies included.
    Raises CannotPlan for values that have no storage to count.
    """

    def __init__(
        self,
        graph: fx.Graph,
        required: Container[fx.Node],
        tangents: Container[fx.Node],
        as_int: Callable[[Any], int],
        device: torch.device,
    ) -> None:
        self.as_int, self.device = as_int, device
        self.nbytes: list[int] = []
        self.tangent_bytes = 0
        self.copied: set[int] = set()
        self.values: dict[fx.Node, tuple[int, ...]] = {}
        self.read_via: dict[fx.Node, tuple[int, ...]] = {}
        self.calls: list[Operator] = []
        self._known: dict[fx.Graph, Optional[Body]] = {}
        # The identity of each storage.
        self._keys: list[int] = []
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            reads = tuple(dict.fromkeys(self.read_by(node.all_input_nodes)))
            value = node.meta.get("val")
            is_part = node.target is operator.getitem
            if is_part and isinstance(values[node.args[0]], (dict, list, tuple)):
                # Its own meta may be that of a twin that was merged with it.
                value = values[node.args[0]][node.args[1]]
            values[node] = value
            is_size = isinstance(value, py_sym_types)
            first = len(self.nbytes)
            found: tuple[int, ...] = ()
            # What a size is read from must be live when it is read.
            if not is_size or (reads and node not in required):
                found = self._number(node, value, reads)
            self.values[node] = found
            self.read_via[node] = found or (() if is_size else reads)
            writes = tuple(range(first, len(self.nbytes)))
            if node.op == "call_function":
                reads = found if is_part else reads
                self._call(node, reads, writes, node in required)
            else:
                self.nbytes[first:] = [0] * len(writes)
            if node in tangents and isinstance(value, torch.Tensor):
                self._receive(value, writes)

    def read_by(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        """The storages that a reader of these nodes reads."""
        return tuple(s for node in nodes for s in self.read_via[node])

    def nbytes_of(self, storages: Iterable[int]) -> int:
        return sum(self.nbytes[s] for s in storages)

    def _call(
        self,
        node: fx.Node,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        is_required: bool,
    ) -> None:
        nbytes = self.nbytes_of(writes)
        scratch: Optional[int] = nbytes if str(node.target) in _COMPOSED else 0
        if bodies := self._bodies(node):
            known = [body for body in bodies if body is not None]
            peak = None
            if len(known) == len(bodies):
                peak = _peak_of(node, known, nbytes, self.as_int, self.device)
            scratch = None if peak is None else max(peak - nbytes, 0)
        self.calls.append(Operator(node, reads, writes, nbytes, is_required, scratch))

    def _bodies(self, node: fx.Node) -> list[Optional[Body]]:
        """What each body of a higher-order operator allocates; each is read once."""
        if not has_bodies(node):
            return []
        graphs = subgraphs(node)
        for graph in graphs:
            if graph not in self._known:
                self._known[graph] = body_of(graph, self.as_int, self.device)
        return [self._known[graph] for graph in graphs]

    def _receive(self, tangent: torch.Tensor, storages: tuple[int, ...]) -> None:
        """Count the caller's bytes of a tangent, and the copy that is made of it.

        Autograd makes gradients without gaps.  Where the output has gaps, as a slice
        does, so does the tangent that the graph was traced with, and AOTAutograd copies
        the one that it is given into that layout.
        """
        if not is_on(self.device, tangent):
            return
        shape, strides = tangent.shape, tangent.stride()
        length = self.as_int(compute_required_storage_length(shape, strides, 0))
        elements = self.as_int(tangent.numel())
        self.tangent_bytes += elements * tangent.itemsize
        if length > elements:
            self.copied.update(storages)
            for s in storages:
                self.nbytes[s] = length * tangent.itemsize

    def _number(
        self, node: fx.Node, value: Any, reads: tuple[int, ...]
    ) -> tuple[int, ...]:
        """A value's storages: shared with what is read or another input, or new."""
        first = len(self.nbytes)
        found: dict[int, None] = {}
        runs_bodies = bool(self._bodies(node))
        for part in tree_leaves(value):
            if isinstance(part, torch.Tensor):
                try:
                    storage = part.untyped_storage()
                except (NotImplementedError, RuntimeError) as error:
                    raise CannotPlan(f"{node.name} has no storage to count") from error
                key, size = storage._cdata, storage.nbytes()
                size = size if is_on(self.device, part) else 0
            elif isinstance(part, py_sym_types):
                key, size = id(part), 0
            else:
                continue
            # One result may be a view of another.
            known = (*reads, *range(first if reads else 0, len(self.nbytes)))
            if runs_bodies:
                # Its fake results may be those of another call.  If a nested region
                # returns what it is given, it has to run again for that.
                known = (*range(first, len(self.nbytes)),)
            s = next((s for s in known if self._keys[s] == key), -1)
            if s < 0 and reads and is_view(node):
                # Common subexpressions were merged: what it views is now a twin.
                s = reads[0]
            if s < 0:
                s = len(self.nbytes)
                self.nbytes.append(self.as_int(size))
                self._keys.append(key)
            found[s] = None
        return tuple(found)


# ---------------------------------------------------------------------- bodies


class Body(NamedTuple):
    """The bytes that a graph allocates, run by itself, operator by operator.

    Args:
        peak: the most that is live while it runs.
        results: the bytes of each result, 0 if the graph did not allocate it.
        values: its results, None for constants.
    """

    peak: int
    results: list[int]
    values: list[Any]


def body_of(
    graph: fx.Graph, as_int: Callable[[Any], int], device: torch.device
) -> Optional[Body]:
    """What a graph without a backward allocates, None if unknown."""
    try:
        storages = Storages(graph, {*graph.nodes}, (), as_int, device)
    except CannotPlan:
        return None
    (output,) = graph.find_nodes(op="output")
    returned = {*storages.read_by(output.all_input_nodes)}
    last: dict[int, int] = {}
    for at, each in enumerate(storages.calls):
        last.update(dict.fromkeys((*each.reads, *each.writes), at))
    live = peak = 0
    for at, each in enumerate(storages.calls):
        if each.scratch is None or "val" not in each.node.meta:
            return None
        live += each.nbytes
        peak = max(peak, live + each.scratch)
        touched = {*each.reads, *each.writes} - returned
        live -= storages.nbytes_of(s for s in touched if last[s] == at)
    results = [nodes_in([each]) for each in tree_leaves(output.args)]
    stored = [*map(storages.read_by, results)]
    return Body(
        peak,
        [*map(storages.nbytes_of, stored)],
        [each[0].meta.get("val") if each else None for each in results],
    )


def _peak_of(
    node: fx.Node,
    bodies: Sequence[Body],
    nbytes: int,
    as_int: Callable[[Any], int],
    device: torch.device,
) -> Optional[int]:
    """The most bytes live while an operator runs its bodies, with its results.

    The results take ``nbytes``.  None if how it runs its bodies is unknown.
    """
    target: Any = node.target
    name = target.name()
    if name in _RUN_ONCE or isinstance(target, BaseHOP):
        return max(body.peak for body in bodies)
    if name == "while_loop":
        _, body = bodies
        # The old values of what it carries, while it computes the new ones.
        return sum(body.results) + max(each.peak for each in bodies)
    if name not in ("map_impl", "scan"):
        return None
    (body,) = bodies
    given: Any = node.args[1 if name == "map_impl" else 2]
    if not given:
        return None
    values = [each.meta["val"] for each in given]
    length = as_int(values[0].shape[0])
    if name == "map_impl":
        # All results are there before they are stacked.
        each = sum(body.results)
        return max((length - 1) * each + body.peak, length * each + nbytes)
    size = sum(as_int(v.numel()) * v.itemsize for v in values if is_on(device, v))
    carries: Any = node.args[1]
    return _peak_of_scan(body, len(carries), size // max(length, 1), nbytes)


def _peak_of_scan(body: Body, carries: int, slices: int, nbytes: int) -> int:
    """The same for a scan, whose body carries its first results to the next step.

    The others are written, by indices as large as a result, into stacks that exist from
    the first step on.  What the first step returned stays, in some releases with the
    slices that it got; what another step returned stays until the end of the next.
    """
    carried, each = sum(body.results[:carries]), sum(body.results)
    parts = [v for v in body.values[carries:] if isinstance(v, torch.Tensor)]
    indices = [_INDEX_BYTES * concrete(value.numel()) for value in parts]
    beside = nbytes - carried + sum(indices) + slices
    return beside + 2 * each + max(body.peak, *indices)


def nodes_in(values: Iterable[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, torch.fx.Node)]
