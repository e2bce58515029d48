"""What a backend that fuses keeps live, from the two graphs that it is given.

:mod:`.liveness` counts what runs operator by operator.  Inductor makes kernels of
several operators: what is used inside of one alone is never stored, operators that read
the same become one kernel, whose results are all live at once, and a kernel may write
over what it is the last to read.  :func:`fused_peak` makes kernels by these rules and
takes both graphs through memory:

1.  A pointwise operator is computed in whatever reads it, if all of that can be fused.
2.  Two that read the same, or one the other's result, are one kernel if they go over as
    many elements and nothing between them has to run first.
3.  A result takes the memory of an argument of its size that a single operator of the
    kernel reads, and that nothing reads later.

Inductor weighs more than that, and may move an operator to fuse it or store what it
would have to compute too often, so the number is an estimate.
"""

from __future__ import annotations

import operator
from typing import NamedTuple, TYPE_CHECKING

import torch
import torch.fx as fx
from torch.utils._pytree import tree_leaves

from .liveness import Storages
from .rerun_cost import concrete, is_view


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch._functorch.partitioners import OpTypes


__all__ = ["fused_peak"]

aten = torch.ops.aten

# Inductor looks for what to fuse no further ahead than this.
_AHEAD = 64
# Pointwise for inductor, though their schema has no tag for it.
_POINTWISE = (aten.embedding, aten.expand, aten.gather, aten.index, aten.full)


def fused_peak(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int
) -> int:
    """The most bytes live in either graph if kernels are made of their operators.

    Args:
        forward, backward: as the partitioner makes them, with a ``val`` in every node's
            meta.
        num_fwd_outputs: how many outputs of the forward are not saved values; these
            stay live through the backward.

    Parameters and inputs do not count, nor what a kernel allocates for itself.
    O(nodes * _AHEAD).
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
    kernels = _Kernels(backward.graph, second, given)
    beside = returned.keys() - given - {second.keys[s] for s in kernels.inputs}
    return max(
        _Kernels(forward.graph, first, given).peak(),
        kernels.peak() + sum(returned[key] for key in beside),
    )


class _Operator(NamedTuple):
    """An operator that allocates: the storages it reads and writes."""

    node: fx.Node
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    pointwise: bool
    reduction: bool
    # That its loops go over.
    elements: int


class _Kernels:
    """A graph's operators, in kernels.

    ``reads`` is what an operator reads with all that is computed in its kernel,
    ``inlined`` what is therefore never stored.
    """

    def __init__(self, graph: fx.Graph, storages: Storages, given: set[int]) -> None:
        from torch._functorch.partitioners import get_default_op_list

        self.nbytes = storages.nbytes
        self.operators: list[_Operator] = []
        self.producer: dict[int, _Operator] = {}
        self.inputs: set[int] = set()
        op_types = get_default_op_list()
        for node in graph.nodes:
            writes = storages.writes[node]
            if node.op == "output":
                self.kept = set(storages.reads[node])
            elif node.op != "call_function":
                self.inputs.update(writes)
                for s in writes:
                    if node.op != "placeholder" or storages.keys[s] in given:
                        self.nbytes[s] = 0
            elif node.target is not operator.getitem and not is_view(node):
                found = _operator(node, storages, op_types)
                self.operators.append(found)
                self.producer.update(dict.fromkeys(writes, found))
        self.readers: dict[int, list[_Operator]] = {}
        for op in self.operators:
            for s in op.reads:
                if s not in op.writes:
                    self.readers.setdefault(s, []).append(op)
        # Adding to a product becomes addmm, which is no kernel to fuse with.
        self.inlined = {s for s, op in self.producer.items() if self._is_added(s, op)}
        self.fusible = {
            op.node for op in self.operators if op.pointwise or op.reduction
        }
        self.fusible -= {self.readers[s][0].node for s in self.inlined}
        self.inlined |= {s for s, op in self.producer.items() if self._is_part(s, op)}
        self.reads: dict[fx.Node, tuple[int, ...]] = {}
        for op in self.operators:
            self.reads[op.node] = tuple(
                dict.fromkeys(
                    read
                    for s in op.reads
                    for read in (
                        self.reads[self.producer[s].node] if s in self.inlined else (s,)
                    )
                )
            )

    def _is_added(self, s: int, op: _Operator) -> bool:
        readers = self.readers.get(s, ())
        return (
            op.node.target is aten.mm.default
            and s not in self.kept
            and len(readers) == 1
            and readers[0].node.target is aten.add.Tensor
        )

    def _is_part(self, s: int, op: _Operator) -> bool:
        """Whether a result is computed in the kernels that read it."""
        readers = self.readers.get(s, ())
        return (
            op.pointwise
            and op.node in self.fusible
            and s not in self.kept
            and bool(readers)
            and all(reader.node in self.fusible for reader in readers)
        )

    def _fused(self) -> list[list[_Operator]]:
        """Kernels in the order in which their first operators were traced."""
        run = [op for op in self.operators if self.inlined.isdisjoint(op.writes)]
        kernels: list[list[_Operator]] = []
        available = set(self.inputs)
        done: set[fx.Node] = set()
        for at, first in enumerate(run):
            if first.node in done:
                continue
            kernel = [first]
            done.add(first.node)
            available.update(first.writes)
            if first.node in self.fusible:
                near = {*first.writes, *self.reads[first.node]}
                ahead = [
                    op
                    for op in run[at + 1 : at + 1 + _AHEAD]
                    if op.node in self.fusible
                    and op.node not in done
                    and (op.reduction or op.elements == first.elements)
                ]
                size = 0
                while size < len(kernel):
                    size = len(kernel)
                    for op in ahead:
                        reads = self.reads[op.node]
                        if op.node in done or near.isdisjoint(reads):
                            continue
                        if available.issuperset(reads):
                            kernel.append(op)
                            done.add(op.node)
                            available.update(op.writes)
                            near.update(reads, op.writes)
            kernels.append(kernel)
        return kernels

    def peak(self) -> int:
        """The most that is live in any kernel."""
        kernels = self._fused()
        last: dict[int, int] = {}
        for at, kernel in enumerate(kernels):
            for op in kernel:
                last.update(dict.fromkeys((*self.reads[op.node], *op.writes), at))
        dying: dict[int, list[int]] = {}
        for s, at in last.items():
            if s not in self.kept:
                dying.setdefault(at, []).append(s)
        stored = set(self.inputs)
        live = peak = sum(self.nbytes[s] for s in stored)
        for at, kernel in enumerate(kernels):
            dead = dying.get(at, [])
            new = {s for op in kernel for s in op.writes if self.producer.get(s) is op}
            if kernel[0].node in self.fusible:
                # Nobody else reads these.
                new.difference_update(dead)
            live += sum(self.nbytes[s] for s in new)
            peak = max(peak, live - self._overwritten(kernel, new, dead))
            stored |= new
            live -= sum(self.nbytes[s] for s in stored.intersection(dead))
            stored.difference_update(dead)
        return peak

    def _overwritten(
        self, kernel: Sequence[_Operator], new: set[int], dead: Iterable[int]
    ) -> int:
        """Bytes of arguments that results take the place of."""
        total = 0
        reading: dict[int, list[_Operator]] = {}
        for op in kernel:
            for s in self.reads[op.node]:
                reading.setdefault(s, []).append(op)
        taken: set[fx.Node] = set()
        for s in dead:
            if s in self.inputs or len(reading.get(s, ())) != 1:
                continue
            (op,) = reading[s]
            if not op.pointwise or op.node in taken or op.node not in self.fusible:
                continue
            if any(w in new and self.nbytes[w] == self.nbytes[s] for w in op.writes):
                taken.add(op.node)
                total += self.nbytes[s]
        return total


def _operator(node: fx.Node, storages: Storages, op_types: OpTypes) -> _Operator:
    target = node.target
    pointwise = reduction = False
    elements = _numel(node)
    if isinstance(target, torch._ops.OpOverload):
        reduction = torch.Tag.reduction in target.tags
        pointwise = not reduction and (
            torch.Tag.pointwise in target.tags
            or target.overloadpacket in _POINTWISE
            or op_types.is_fusible(node)
        )
    if reduction:
        elements = max(elements, *map(_numel, node.all_input_nodes))
    return _Operator(
        node, storages.reads[node], storages.own[node], pointwise, reduction, elements
    )


def _numel(node: fx.Node) -> int:
    values = tree_leaves(node.meta.get("val"))
    return max(
        (concrete(v.numel()) for v in values if isinstance(v, torch.Tensor)), default=0
    )
