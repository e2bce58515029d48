"""The storages of a graph's values, and what its operators have live while they run.

A higher-order operator runs other graphs, its *bodies*.  What these have live beyond
the operator's results is its *scratch*.  It is counted as if a body ran operator by
operator, in eager mode.  Of several branches, the largest counts; a loop holds the old
and the new values of what it carries, and what it has collected so far.
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
from .recompute_cost import is_view, size_or_hint


if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    import torch.fx as fx


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
# Operators that, unless compiled into a kernel, need an intermediate value as large as
# their result: here the product, before the addition.
_COMPOSED = ("prims.fma.default",)
# The bytes of an integer index; a scan writes its results by these.
_INDEX_BYTES = 8


class CannotPlan(Exception):
    """A joint graph cannot be modeled, or a plan for it cannot be run."""


class Operator(NamedTuple):
    """A node that runs, and the storages that it reads and allocates.

    Args:
        nbytes: the bytes that it allocates for its results.
        is_required: whether the forward runs it in every plan.
        scratch: the bytes that it has live beyond those while it runs, mostly for its
            bodies; None if unknown.
    """

    node: fx.Node
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    nbytes: int
    is_required: bool
    scratch: Optional[int] = 0


def device_of(graph: fx.Graph) -> torch.device:
    """The device whose bytes a plan for the graph counts.

    That is an accelerator if the graph has values on one, else the CPU; of several
    accelerators, the one with the most bytes.
    """
    nbytes: dict[torch.device, int] = {}
    for node in graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                size = size_or_hint(value.numel()) * value.dtype.itemsize
                nbytes[value.device] = nbytes.get(value.device, 0) + size

    def rank(device: torch.device) -> tuple[int, int]:
        return {"meta": 0, "cpu": 1}.get(device.type, 2), nbytes[device]

    return max(nbytes, key=rank, default=torch.device("cpu"))


def is_on_device(device: torch.device, value: torch.Tensor) -> bool:
    """Whether a value is on a device, or any of its type if that has no index."""
    # Not the device of the storage, which for a fake tensor is another one.
    there = value.device
    return there.type == device.type and device.index in (None, there.index)


def activation_bytes(
    inputs: Iterable[fx.Node],
    saved: Iterable[fx.Node],
    device: torch.device,
    as_int: Callable[[Any], int] = size_or_hint,
) -> int:
    """The bytes of the whole storages of ``saved`` on a device, without ``inputs``."""
    from torch._inductor.fx_utils import get_node_storage

    there = {get_node_storage(node) for node in inputs} | {None}
    kept = {get_node_storage(node): node.meta["val"] for node in saved}
    return sum(
        as_int(value.untyped_storage().nbytes())
        for storage, value in kept.items()
        if storage not in there and is_on_device(device, value)
    )


class Storages:
    """The storages of a graph's values, numbered in the order of their allocation.

    nbytes[s]: the bytes of a storage, 0 for inputs and on other devices.
    values[node]: the storages of a node's value.
    read_via[node]: the storages that a reader of the node reads.
    calls: the graph's operators, with what they read and allocate.
    tangent_bytes: the bytes of the tangents that the caller passes.
    copied: the storages of the copies that are made of some of these.
    unsized: the name of the first node whose size depends on data, if any.

    Reading a size that is ``required`` needs no storage: the forward has its value.
    O(nodes + edges), including those of bodies.
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
        self.unsized = ""
        self.values: dict[fx.Node, tuple[int, ...]] = {}
        self.read_via: dict[fx.Node, tuple[int, ...]] = {}
        self.calls: list[Operator] = []
        self._known: dict[fx.Graph, Optional[Body]] = {}
        # What identifies each storage.
        self._keys: list[int] = []
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            reads = tuple(dict.fromkeys(self.storages_read_via(node.all_input_nodes)))
            value = node.meta.get("val")
            is_part = node.target is operator.getitem
            if is_part and isinstance(values[node.args[0]], (dict, list, tuple)):
                # Not its own meta: merging common subexpressions may have left that of
                # another node.
                value = values[node.args[0]][node.args[1]]
            values[node] = value
            is_size = isinstance(value, py_sym_types)
            first = len(self.nbytes)
            found: tuple[int, ...] = ()
            # What a size is computed from must be live until then.
            if not is_size or (reads and node not in required):
                found = self._number_storages(node, value, reads)
            self.values[node] = found
            self.read_via[node] = found or (() if is_size else reads)
            writes = tuple(range(first, len(self.nbytes)))
            if node.op == "call_function":
                reads = found if is_part else reads
                self._add_call(node, reads, writes, node in required)
            else:
                self.nbytes[first:] = [0] * len(writes)
            if node in tangents and isinstance(value, torch.Tensor):
                self._count_tangent(value, writes)

    def storages_read_via(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        """The storages that a reader of these nodes reads."""
        return tuple(s for node in nodes for s in self.read_via[node])

    def nbytes_of(self, storages: Iterable[int]) -> int:
        return sum(self.nbytes[s] for s in storages)

    def _add_call(
        self,
        node: fx.Node,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        is_required: bool,
    ) -> None:
        nbytes = self.nbytes_of(writes)
        scratch: Optional[int] = nbytes if str(node.target) in _COMPOSED else 0
        if bodies := self._read_bodies(node):
            known = [body for body in bodies if body is not None]
            peak = None
            if len(known) == len(bodies):
                peak = _peak_of(node, known, nbytes, self.as_int, self.device)
            scratch = None if peak is None else max(peak - nbytes, 0)
        self.calls.append(Operator(node, reads, writes, nbytes, is_required, scratch))

    def _read_bodies(self, node: fx.Node) -> list[Optional[Body]]:
        """What each body of a higher-order operator allocates; each is read once."""
        graphs = subgraphs(node)
        for graph in graphs:
            if graph not in self._known:
                self._known[graph] = read_body(graph, self.as_int, self.device)
        return [self._known[graph] for graph in graphs]

    def _count_tangent(self, tangent: torch.Tensor, storages: tuple[int, ...]) -> None:
        """Count the bytes of a tangent that is passed, and of the copy made of it.

        Autograd makes gradients without gaps between their elements.  If an output has
        gaps, as a slice may, so does the tangent that the graph was traced with, and
        AOTAutograd copies the one it is given into that layout.
        """
        if not is_on_device(self.device, tangent):
            return
        shape, strides = tangent.shape, tangent.stride()
        length = self.as_int(compute_required_storage_length(shape, strides, 0))
        elements = self.as_int(tangent.numel())
        self.tangent_bytes += elements * tangent.itemsize
        if length > elements:
            self.copied.update(storages)
            for s in storages:
                self.nbytes[s] = length * tangent.itemsize

    def _number_storages(
        self, node: fx.Node, value: Any, reads: tuple[int, ...]
    ) -> tuple[int, ...]:
        """A value's storages: those of what it reads, of another input, or new ones."""
        first = len(self.nbytes)
        found: dict[int, None] = {}
        runs_bodies = bool(subgraphs(node))
        size: Any
        for part in tree_leaves(value):
            if isinstance(part, torch.Tensor):
                try:
                    storage = part.untyped_storage()
                except (NotImplementedError, RuntimeError) as error:
                    raise CannotPlan(f"{node.name} has no storage to count") from error
                key, size = storage._cdata, storage.nbytes()
                size = size if is_on_device(self.device, part) else 0
                if isinstance(size, torch.SymInt) and not size.node.has_hint():
                    self.unsized = self.unsized or node.name
            elif isinstance(part, py_sym_types):
                key, size = id(part), 0
            else:
                continue
            # It may be a view of what it reads or of another of its results; an input
            # may be one of any earlier input.
            known = (*reads, *range(first if reads else 0, len(self.nbytes)))
            if runs_bodies:
                # Its fake results may be shared with another call of the same body, so
                # only other results count.  A result that is an argument is taken for a
                # new one, as the operator has to run again for it.
                known = (*range(first, len(self.nbytes)),)
            s = next((s for s in known if self._keys[s] == key), -1)
            if s < 0 and reads and is_view(node):
                # What it viewed was merged with another node, a common subexpression.
                s = reads[0]
            if s < 0:
                s = len(self.nbytes)
                self.nbytes.append(self.as_int(size))
                self._keys.append(key)
            found[s] = None
        return tuple(found)


# ---------------------------------------------------------------------- bodies


class Body(NamedTuple):
    """The bytes that a graph allocates if it runs by itself, operator by operator.

    Args:
        peak: the most live bytes while it runs.
        results: the bytes of each result, 0 if the graph did not allocate it.
        values: the (fake) values of the results, None for constants.
    """

    peak: int
    results: list[int]
    values: list[Any]


def read_body(
    graph: fx.Graph, as_int: Callable[[Any], int], device: torch.device
) -> Optional[Body]:
    """What a graph that is not split allocates; None if unknown."""
    try:
        storages = Storages(graph, {*graph.nodes}, (), as_int, device)
    except CannotPlan:
        return None
    if storages.unsized:
        return None
    (output,) = graph.find_nodes(op="output")
    returned = {*storages.storages_read_via(output.all_input_nodes)}
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
    results = [nodes_among([each]) for each in tree_leaves(output.args)]
    stored = [*map(storages.storages_read_via, results)]
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

    The results take ``nbytes``.  None if it is not known how it runs its bodies.
    """
    target: Any = node.target
    name = target.name()
    if name in _RUN_ONCE or isinstance(target, BaseHOP):
        return max(body.peak for body in bodies)
    if name == "while_loop":
        _, body = bodies
        # It holds the old values of what it carries while it computes the new ones.
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
        # All results are live before they are stacked.
        each = sum(body.results)
        return max((length - 1) * each + body.peak, length * each + nbytes)
    size = sum(
        as_int(v.numel()) * v.itemsize for v in values if is_on_device(device, v)
    )
    carries: Any = node.args[1]
    return _peak_of_scan(body, len(carries), size // max(length, 1), nbytes)


def _peak_of_scan(body: Body, carries: int, slices: int, nbytes: int) -> int:
    """The same for a scan, whose body passes its first results on to the next step.

    The other results are written into stacks, which exist from the first step on, by
    indices with as many elements as a result.  What the first step returned stays live
    throughout, in some releases with the slices of the inputs that it got.  What each
    later step returned stays live until the end of the next one.

    Args:
        carries: how many of the body's results are passed on.
        slices: the bytes of one step's slices of the inputs.
        nbytes: the bytes of the scan's results.
    """
    carried, each = sum(body.results[:carries]), sum(body.results)
    parts = [v for v in body.values[carries:] if isinstance(v, torch.Tensor)]
    indices = [_INDEX_BYTES * size_or_hint(value.numel()) for value in parts]
    beside = nbytes - carried + sum(indices) + slices
    return beside + 2 * each + max(body.peak, *indices)


def nodes_among(values: Iterable[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, torch.fx.Node)]
