"""What inductor's kernels keep live, from the two graphs that it is given.

:mod:`.liveness` counts what runs operator by operator.  Inductor makes kernels of
several operators, and what is used inside of one alone is never stored.
:func:`fused_peak` follows the rules that decide what is stored:

-   A pointwise operator is computed in whatever reads it, if all of that can be fused.
    Where several operators read it and it takes many reads or operators itself, it is
    stored, if something that cannot be fused runs between them; and also, and early,
    if a kernel before it reads the same.
-   A kernel writes its result over an argument of the same shape that nobody reads
    later, unless it has so many operators that inductor cuts it in two.
-   A scatter writes over what it scatters to, and a product that is only added to
    something waits for that.

Not followed are the order that inductor's scheduler chooses, and the fusion of kernels
that have nothing but inputs in common.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
import torch.fx as fx
from torch.utils._pytree import tree_leaves

from .liveness import Storages
from .rerun_cost import is_view


if TYPE_CHECKING:
    from collections.abc import Container

    from torch._functorch.partitioners import OpTypes

__all__ = ["fused_peak"]

aten = torch.ops.aten

# Pointwise for inductor, though their schema has no tag for it.
_POINTWISE = (aten.embedding, aten.expand, aten.gather, aten.index, aten.full)
_SCATTERS = (
    aten._unsafe_index_put,
    aten._unsafe_masked_index_put_accumulate,
    aten.index_add,
    aten.index_copy,
    aten.index_put,
    aten.scatter,
    aten.scatter_add,
    aten.scatter_reduce,
    aten.select_scatter,
    aten.slice_scatter,
)
# What inductor computes again for each reader, by default, reads at most so many
# buffers and has at most so many operators and reads.
_MOST_READS = 4
_MOST_OPERATORS = 30
# Kernels that read smaller storages in common are not taken for related.
_LARGE = 1 << 20


class _Kernel(NamedTuple):
    """The storages that it reads and allocates; ``operators`` has one more for each
    read, and is 0 where nothing can be fused."""

    reads: set[int]
    writes: list[int]
    operators: int


def fused_peak(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int
) -> int:
    """The most bytes live in either graph if kernels are made of their operators.

    The first ``num_fwd_outputs`` outputs of the forward are no saved values; they stay
    live through the backward.  Parameters, inputs and scratch memory do not count.
    """
    first, second = Storages(forward.graph), Storages(backward.graph)
    given = {
        first.keys[s]
        for node in forward.graph.find_nodes(op="placeholder")
        for s in first.own[node]
    }
    (output,) = forward.graph.find_nodes(op="output")
    returned = {
        first.keys[s]: first.nbytes[s]
        for node in tree_leaves(output.args)[:num_fwd_outputs]
        if isinstance(node, fx.Node)
        for s in first.own[node]
    }
    saved = {
        second.keys[s]
        for node in backward.graph.find_nodes(op="placeholder")
        for s in second.own[node]
    }
    beside = sum(returned[key] for key in returned.keys() - given - saved)
    return max(
        _peak(forward.graph, first, given),
        _peak(backward.graph, second, given) + beside,
    )


def _peak(graph: fx.Graph, storages: Storages, given: Container[int]) -> int:
    """The most that is live in any kernel; ``given`` are keys that do not count."""
    nbytes = storages.nbytes
    kept = set(storages.reads[graph.output_node()])
    kernels = _kernels(graph, storages, kept)
    last = {s: at for at, k in enumerate(kernels) for s in (*k.reads, *k.writes)}
    live = 0
    for node in graph.find_nodes(op="placeholder"):
        for s in storages.writes[node]:
            if storages.keys[s] in given:
                last.pop(s, None)
            else:
                live += nbytes[s]
    shapes = _shapes(graph, storages)
    peak = live
    for at, (reads, writes, operators) in enumerate(kernels):
        dying = [s for s in reads.union(writes) if last.get(s) == at and s not in kept]
        overwritten: set[int] = set()
        if 0 < operators <= _MOST_OPERATORS:
            for s in writes:
                for r in sorted(reads.intersection(dying) - overwritten):
                    if shapes.get(r) == shapes.get(s):
                        overwritten.add(r)
                        break
        live += sum(nbytes[s] for s in writes)
        # What is written over is live before and after, as another.
        reused = sum(nbytes[s] for s in overwritten)
        peak = max(peak, live - reused)
        live -= sum(nbytes[s] for s in dying)
    return peak


def _shapes(graph: fx.Graph, storages: Storages) -> dict[int, tuple[Any, ...]]:
    """The number of elements and the type of what was first put into each storage."""
    found: dict[int, tuple[Any, ...]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            for s in storages.own[node]:
                found.setdefault(s, (value.numel(), value.dtype))
    return found


def _kernels(
    graph: fx.Graph, storages: Storages, kept: Container[int]
) -> list[_Kernel]:
    """In the graph's order, each where the operator is that gives its result."""
    from torch._functorch.partitioners import get_default_op_list

    operators = [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and node.target is not operator.getitem
        and not is_view(node)
    ]
    readers: dict[int, list[fx.Node]] = defaultdict(list)
    for node in operators:
        for s in storages.reads[node]:
            readers[s].append(node)
    op_types = get_default_op_list()
    pointwise = {node for node in operators if _is_pointwise(node, op_types)}
    fusible = pointwise.union(filter(_is_reduction, operators))
    products: set[fx.Node] = set()
    for node in operators:
        if node.target is aten.mm.default:
            (s,) = storages.writes[node]
            users = readers[s]
            # Adding to a product becomes addmm, which is no kernel to fuse with.
            if s not in kept and [user.target for user in users] == [aten.add.Tensor]:
                products.add(node)
                fusible.difference_update(users)
    # How many operators that cannot be fused come before each one.
    barriers: dict[fx.Node, int] = {}
    count = 0
    for node in operators:
        barriers[node] = count
        count += node not in fusible

    kernels: list[_Kernel] = []
    # What is read in order to compute a result that is not stored, and by which.
    sources: dict[int, set[int]] = {}
    computed_by: dict[int, set[fx.Node]] = {}
    for node in operators:
        reads = {r for s in storages.reads[node] for r in sources.get(s, (s,))}
        parts = {node}.union(*(computed_by.get(s, ()) for s in storages.reads[node]))
        weight = len(parts) + len(reads)
        writes = list(storages.writes[node])
        kernel = _Kernel(reads, writes, weight if node in fusible else 0)
        is_stored = node not in products
        if node in pointwise and node in fusible and len(writes) == 1:
            (s,) = writes
            users = readers[s]
            is_stored = (
                s in kept
                or not users
                or not all(u in fusible or _scatters_to(u, s, storages) for u in users)
            )
            is_large = len(reads) > _MOST_READS or weight > _MOST_OPERATORS
            if not is_stored and len(users) > 1 and is_large:
                is_stored = barriers[users[0]] < barriers[users[-1]]
                related = None if is_stored else _related(kernel, kernels, storages)
                if related is not None:
                    # It is computed there, if not all at once with its readers.
                    at, earlier = related
                    kernels[at] = _Kernel(
                        earlier.reads | reads, earlier.writes + writes, weight
                    )
                    continue
        if is_stored:
            kernels.append(kernel)
        else:
            sources.update(dict.fromkeys(writes, reads))
            computed_by.update(dict.fromkeys(writes, parts))
    return kernels


def _related(
    kernel: _Kernel, kernels: list[_Kernel], storages: Storages
) -> Optional[tuple[int, _Kernel]]:
    """The first kernel that has all large storages which this one reads, if any."""
    large = {s for s in kernel.reads if storages.nbytes[s] >= _LARGE}
    for at, other in enumerate(kernels):
        if large and other.operators and large <= other.reads.union(other.writes):
            return at, other
    return None


def _scatters_to(node: fx.Node, s: int, storages: Storages) -> bool:
    """Whether a node is a scatter to this storage, which it then writes over."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.overloadpacket in _SCATTERS
        and all(
            (s in storages.held[source]) == (source is node.args[0])
            for source in node.all_input_nodes
        )
    )


def _is_reduction(node: fx.Node) -> bool:
    return torch.Tag.reduction in getattr(node.target, "tags", ())


def _is_pointwise(node: fx.Node, op_types: OpTypes) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and not _is_reduction(node)
        and (
            torch.Tag.pointwise in target.tags
            or target.overloadpacket in _POINTWISE
            or op_types.is_fusible(node)
        )
    )
