"""What a backend that fuses keeps live, from the two graphs that it is given.

:mod:`.liveness` counts what runs operator by operator.  Inductor makes kernels of
several operators, and what is used inside of one alone is never stored.
:func:`fused_peak` computes a pointwise operator in whatever reads it, if all of that can
be fused, and takes what is left through memory.

Inductor also fuses operators that read the same, and writes results over arguments.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import TYPE_CHECKING

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
    run = _kernels(graph, storages, kept)
    last = {s: at for at, (reads, writes) in enumerate(run) for s in (*reads, *writes)}
    dying: dict[int, int] = defaultdict(int)
    live = 0
    for node in graph.find_nodes(op="placeholder"):
        for s in storages.writes[node]:
            if storages.keys[s] in given:
                last.pop(s, None)
            else:
                live += nbytes[s]
    for s, at in last.items():
        if s not in kept:
            dying[at] += nbytes[s]
    peak = live
    for at, (_, writes) in enumerate(run):
        live += sum(nbytes[s] for s in writes)
        peak = max(peak, live)
        live -= dying[at]
    return peak


def _kernels(
    graph: fx.Graph, storages: Storages, kept: Container[int]
) -> list[tuple[set[int], tuple[int, ...]]]:
    """What is read and written by each operator that has a kernel of its own."""
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
    inlined: set[int] = set()
    for node in operators:
        if node.target is aten.mm.default:
            (s,) = storages.writes[node]
            users = readers[s]
            # Adding to a product becomes addmm, which is no kernel to fuse with.
            if s not in kept and [user.target for user in users] == [aten.add.Tensor]:
                inlined.add(s)
                fusible.difference_update(users)
    for node in pointwise & fusible:
        for s in storages.writes[node]:
            if s not in kept and readers[s] and fusible.issuperset(readers[s]):
                inlined.add(s)
    run: list[tuple[set[int], tuple[int, ...]]] = []
    # What is read in order to compute an inlined result.
    sources: dict[int, set[int]] = {}
    for node in operators:
        reads = {r for s in storages.reads[node] for r in sources.get(s, (s,))}
        writes = storages.writes[node]
        if inlined.isdisjoint(writes):
            run.append((reads, writes))
        else:
            sources.update(dict.fromkeys(writes, reads))
    return run


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
