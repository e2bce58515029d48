"""What plans keep live where inductor makes kernels of the operators.

:mod:`.liveness` counts what runs operator by operator.  Inductor makes kernels of
several operators, and what is used inside of one alone is never stored.
:class:`FusedJointGraph` evaluates plans by the rules that decide what is stored:

-   A pointwise operator is computed in whatever reads it, if all of that can be fused.
    Where several operators read it and it takes many reads or operators itself, it is
    stored, if something that cannot be fused runs between them, or if a kernel before
    it reads the same.
-   Where the backward repeats operators, a kernel takes in what is computed from its
    results and arguments, and reductions of these arguments that something stored is
    computed from, as early as it runs itself: what a layer norm needs later of the
    sums that the norms behind it read too.  Results of many reads that have a large one
    in common are one kernel's, and the random numbers and products that these need are
    there before it.
-   A kernel writes its result over an argument of the same shape that nobody reads
    later, unless it has so many operators that inductor cuts it in two.
-   A scatter writes over what it scatters to, and a product that is only added to
    something, in the shape that it has, waits for that.
-   What is concatenated is computed within the result, which is live as long as any of
    its parts.

Not followed are the order that inductor's scheduler chooses, any other fusion of kernels
that have nothing but inputs in common, and scratch memory.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from heapq import heappop, heappush
from typing import cast, NamedTuple, TYPE_CHECKING

import torch
import torch.fx as fx

from .liveness import JointGraph, Phase
from .rerun_cost import concrete, is_view


if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import Any

    from torch._functorch.partitioners import NodeInfo, OpTypes

__all__ = ["FusedJointGraph"]

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


class _Operator(NamedTuple):
    """What an operator reads and writes, and its part in a kernel.

    Args:
        nbytes: of what it writes.
        is_inlined: whether its result is stored only where it is saved.
        is_fusible: whether it may be part of a kernel.
        is_shared: whether several operators would have to compute its result.
        is_divided: whether something that cannot be fused runs between those.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    nbytes: int
    is_inlined: bool
    is_fusible: bool
    is_shared: bool
    is_divided: bool


class FusedJointGraph(JointGraph):
    """A joint graph whose plans are evaluated by what inductor's kernels hold.

    Whether a result is stored is decided once, for all plans: in the forward as if
    nothing was saved, and in the backward as if all of it was repeated, but for the
    backward's own operators, for which it is as if nothing was, and for results that
    several operators read, for which each plan decides.
    """

    def __init__(
        self, graph: fx.Graph, node_info: NodeInfo, num_fwd_outputs: int
    ) -> None:
        super().__init__(graph, node_info, num_fwd_outputs)
        self._freeable = [
            nbytes > 0 and s not in self.outputs for s, nbytes in enumerate(self.nbytes)
        ]
        # The number of elements and the type of what was first put into each storage.
        self.shapes: dict[int, tuple[Any, ...]] = {}
        for node, own in self.values.own.items():
            value = node.meta.get("val")
            # Of its arguments, inductor writes over those alone that the forward made.
            if isinstance(value, torch.Tensor) and node not in self.tangents:
                for s in own:
                    # A guess for a symbolic size, as comparing those would guard.
                    shape = concrete(value.numel()), value.dtype
                    self.shapes.setdefault(s, shape)
        self._large = {
            s for s, (n, dtype) in self.shapes.items() if n * dtype.itemsize >= _LARGE
        }
        self._in_backward: dict[fx.Node, _Operator] = {}
        for chosen in ((), range(len(self.nbytes))):
            saved = self.saved_by([chosen])
            _, repeated = self.follow(saved, 1)
            steps = self._repeats_by_step(saved, repeated, 1)
            backward = [
                node
                for own, ops in zip(self.own_nodes, steps)
                for node in (*own[:-1], *(self.nodes[op] for op, _ in ops), *own[-1:])
            ]
            self._in_backward |= self._operators(backward, self.returned)
        # Those of the backward's own operators stay as they are.
        for node in self.nodes:
            each = self._in_backward.get(node)
            if each is not None and each.is_shared:
                self._in_backward[node] = each._replace(is_inlined=True)
        forward = [node for node, *_, is_required in self._early if is_required]
        # What only the backward needs is made in the forward, if that saves it.
        self._in_forward = self._in_backward | self._operators(
            forward, self.outputs | self.written_back
        )
        self._early_by_kernels = self._made_with_what_it_reads()
        self._joined_in_backward = _concatenations(self._in_backward)
        self._joined_in_forward = _concatenations(self._in_forward)

    @property
    def lower_bound(self) -> int:
        """Not offered: that of operators does not hold for kernels."""
        raise AttributeError("no lower bound is known for inductor's kernels")

    def releasing(self, inputs: Mapping[int, int]) -> FusedJointGraph:
        graph = cast(FusedJointGraph, super().releasing(inputs))
        # As for tangents.
        graph.shapes = {s: shape for s, shape in self.shapes.items() if s not in inputs}
        return graph

    def _made_with_what_it_reads(self) -> list[Any]:
        """The forward's nodes, with what only the backward needs as early as can be.

        That is fused with the kernels around what it reads: the mask of a ReLU that was
        traced in the backward, for one.
        """
        made_at: dict[int, int] = {}
        order: list[tuple[int, Any]] = []
        for at, each in enumerate(self._early):
            node, _, writes, _, is_required = each
            known = self._in_forward.get(node)
            if not is_required and known is not None and known.is_fusible:
                at = max((made_at[s] for s in known.reads if s in made_at), default=at)
            made_at.update(dict.fromkeys(writes, at))
            order.append((at, each))
        order.sort(key=operator.itemgetter(0))
        return [each for _, each in order]

    def _operators(
        self, nodes: Iterable[fx.Node], kept: set[int]
    ) -> dict[fx.Node, _Operator]:
        """What becomes of nodes that run in this order; ``kept`` has to be stored."""
        from torch._functorch.partitioners import get_default_op_list

        op_types = get_default_op_list()
        values = self.values
        operators = [
            node
            for node in nodes
            if node.op == "call_function"
            and node.target is not operator.getitem
            and not is_view(node)
        ]
        readers: dict[int, list[fx.Node]] = defaultdict(list)
        for node in operators:
            for s in values.reads[node]:
                readers[s].append(node)
        pointwise = {node for node in operators if _is_pointwise(node, op_types)}
        fusible = pointwise.union(filter(_is_reduction, operators))
        products: set[fx.Node] = set()
        for node in operators:
            if node.target is aten.mm.default:
                (s,) = values.writes[node]
                users = readers[s]
                # Adding to a product becomes addmm, which is no kernel to fuse with.
                if (
                    s not in kept
                    and [u.target for u in users] == [aten.add.Tensor]
                    and node in users[0].all_input_nodes
                ):
                    products.add(node)
                    fusible.difference_update(users)
        # How many operators that cannot be fused come before each one.
        barriers: dict[fx.Node, int] = {}
        count = 0
        for node in operators:
            barriers[node] = count
            count += node not in fusible

        found: dict[fx.Node, _Operator] = {}
        # What each kernel reads and writes.
        kernels: list[set[int]] = []
        # What is read in order to compute a result that is not stored, and by which.
        sources: dict[int, set[int]] = {}
        computed_by: dict[int, set[fx.Node]] = {}
        for node in operators:
            read, writes = values.reads[node], values.writes[node]
            reads = {r for s in read for r in sources.get(s, (s,))}
            parts = {node}.union(*(computed_by.get(s, ()) for s in read))
            weight = len(parts) + len(reads)
            is_inlined = node in products
            is_shared = is_divided = False
            if node in pointwise and node in fusible and len(writes) == 1:
                (s,) = writes
                users = readers[s]
                is_inlined = (
                    s not in kept
                    and bool(users)
                    and all(u in fusible or self._scatters_to(u, s) for u in users)
                )
                is_shared = is_inlined and len(users) > 1
                is_divided = is_shared and barriers[users[0]] != barriers[users[-1]]
                is_large = len(reads) > _MOST_READS or weight > _MOST_OPERATORS
                if is_shared and is_large:
                    is_inlined = not (is_divided or self._is_related(reads, kernels))
            if is_inlined:
                sources.update(dict.fromkeys(writes, reads))
                computed_by.update(dict.fromkeys(writes, parts))
            elif node in fusible:
                kernels.append(reads.union(writes))
            found[node] = _Operator(
                read,
                writes,
                self.size(writes),
                is_inlined,
                node in fusible,
                is_shared,
                is_divided,
            )
        return found

    def _is_related(self, reads: set[int], kernels: list[set[int]]) -> bool:
        """Whether some kernel has all large storages that are read, if there are any."""
        large = {s for s in reads if self.nbytes[s] >= _LARGE}
        return bool(large) and any(map(large.issubset, kernels))

    def _scatters_to(self, node: fx.Node, s: int) -> bool:
        """Whether a node is a scatter to this storage, which it then writes over."""
        target = node.target
        return (
            isinstance(target, torch._ops.OpOverload)
            and target.overloadpacket in _SCATTERS
            and all(
                (s in self.values.held[source]) == (source is node.args[0])
                for source in node.all_input_nodes
            )
        )

    def _backward_peaks(
        self, repeats: list[list[tuple[int, int]]], saved: list[int], count: int
    ) -> tuple[list[list[int]], list[int]]:
        everyone = (1 << count) - 1
        repeated = [0] * len(self.nodes)
        for step in repeats:
            for op, plans in step:
                repeated[op] |= plans
        repeats, stored = self._join(repeats, repeated, saved)
        phase = _FusedPhase(self, [0] * len(self.nbytes), self._in_backward, stored)
        # No operator makes an input, whose producer is -1.
        made_by = [*repeated, 0]
        made = [made_by[op] & ~plans for op, plans in zip(self.producer, saved)]
        phase.place(self._joined_in_backward, made, made)
        for s in self.returned:
            phase.touched[s] = everyone
        held = self.held_by_caller
        for at in reversed(range(len(repeats))):
            *before, last = self.own_nodes[at]
            phase.run(last, everyone, at, held)
            for op, plans in reversed(repeats[at]):
                phase.run(self.nodes[op], plans, at, held)
                for s in self.writes[op]:
                    phase.change(saved[s] & plans, -self.nbytes[s])
            for node in reversed(before):
                phase.run(node, everyone, at, held)
        phase.moment(0, held)
        kept = self._keep(phase, saved)
        return phase.peaks(count), kept

    def _join(
        self,
        repeats: list[list[tuple[int, int]]],
        repeated: Sequence[int],
        saved: Sequence[int],
    ) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Repeat operators as early as a kernel that takes them in, in each plan.

        The arguments are as in an :class:`Evaluation`, and so is the first result.  The
        second has the plans that store each storage; all of ``saved`` are among them.
        """
        stored = list(saved)
        reads, shared, wanted = self._reads_by_plan(repeated, saved, stored)
        kernels = _Kernels(self, repeated, stored, reads, shared, wanted)
        joined: list[list[tuple[int, int]]] = []
        for step in repeats:
            joined.append([])
            for op, plans in step:
                plans &= ~kernels.done[op]
                if plans:
                    joined[-1] += kernels.run(op, plans)
        return joined, stored

    def _reads_by_plan(
        self, repeated: Sequence[int], saved: Sequence[int], stored: list[int]
    ) -> tuple[dict[int, dict[int, int]], dict[int, int], list[int]]:
        """What the kernels of repeated operators read, each with the plans where they do.

        Also the plans in which shared results take many reads, and those in which such
        results read a storage.  Adds to ``stored`` where that is for readers apart.
        """
        reads: dict[int, dict[int, int]] = {}
        shared: dict[int, int] = {}
        wanted = [0] * len(self.nbytes)
        # What is read in order to compute a result, and the plans that have it anyway.
        sources: dict[int, dict[int, int]] = {}
        realized = list(saved)
        for op, plans in enumerate(repeated):
            operator = self._in_backward.get(self.nodes[op])
            if not plans or operator is None or not operator.is_fusible:
                continue
            found = reads[op] = {}
            for s in operator.reads:
                here = realized[s] if s in sources else -1
                if here:
                    found[s] = found.get(s, 0) | here
                for r, reading in sources.get(s, {}).items():
                    if reading & ~here:
                        found[r] = found.get(r, 0) | reading & ~here
            if operator.is_inlined:
                (s,) = operator.writes
                sources[s] = found
            if operator.is_shared:
                many = shared[op] = plans & _more_than(_MOST_READS, found.values())
                realized[s] |= many
                if operator.is_divided:
                    stored[s] |= many
                for r, reading in found.items():
                    wanted[r] |= reading & many
        return reads, shared, wanted

    def _forward_peaks(self, kept: Sequence[int], count: int) -> list[int]:
        everyone = (1 << count) - 1
        phase = _FusedPhase(self, list(kept), self._in_forward, kept)
        phase.touch(self.written_back, everyone)
        required = [everyone if birth >= 0 else 0 for birth in self.births]
        apart = [plans & ~keep for plans, keep in zip(required, kept)]
        phase.place(self._joined_in_forward, apart, required)
        for node, _, writes, _, is_required in reversed(self._early_by_kernels):
            plans = everyone if is_required else 0
            for s in writes:
                plans |= phase.touched[s]
            phase.run(node, plans, 0, 0)
        phase.moment(0, 0)
        return [peak for (peak,) in phase.peaks(count)]


class _Kernels:
    """What else the backward's kernels compute when it repeats operators, by plan.

    ``done`` are the plans in which each operator was repeated, ``stored`` those that
    store each storage, and the others as `FusedJointGraph._reads_by_plan` has them.
    """

    def __init__(
        self,
        graph: FusedJointGraph,
        repeated: Sequence[int],
        stored: list[int],
        reads: dict[int, dict[int, int]],
        shared: dict[int, int],
        wanted: list[int],
    ) -> None:
        self.graph = graph
        self.repeated, self.stored, self.reads = repeated, stored, reads
        self.shared = shared
        self.done = [0] * len(graph.nodes)
        # By large storage, the operators that are not inlined in all plans, and are yet
        # to be repeated in some.
        self.readers: dict[int, set[int]] = defaultdict(set)
        # What each of these reads, with the plans: the large, and by maker the others.
        self.large: dict[int, dict[int, int]] = {}
        self.small: dict[int, list[tuple[int, int]]] = {}
        # The plans in which it belongs to any kernel that has what it reads.
        self.near_anyway: dict[int, int] = {}
        for op, found in reads.items():
            operator = graph._in_backward[graph.nodes[op]]
            if operator.is_shared or not operator.is_inlined:
                large = {s: each for s, each in found.items() if s in graph._large}
                self.large[op] = large
                self.small[op] = [
                    (graph.producer[s], each)
                    for s, each in found.items()
                    if s not in large and graph.producer[s] >= 0
                ]
                self.near_anyway[op] = 0
                if _is_reduction(graph.nodes[op]):
                    for s in graph.writes[op]:
                        self.near_anyway[op] |= wanted[s]
                for s in large:
                    self.readers[s].add(op)

    def run(self, op: int, plans: int) -> list[tuple[int, int]]:
        """Repeat an operator in these plans, and what joins its kernel; in order."""
        self._repeat(op, plans)
        ran = [(op, plans)]
        if op not in self.reads:
            return ran
        operator = self.graph._in_backward[self.graph.nodes[op]]
        if operator.is_inlined:
            plans &= self.stored[operator.writes[0]]
        if not plans:
            return ran
        # The plans in which an operator is part of this kernel.
        kernel = {op: plans}
        readers = (self.readers.get(s, ()) for s in self.reads[op])
        near = sorted(set[int]().union(*readers))
        before: list[tuple[int, int]] = []
        if op in self.shared:
            before = self._join_streams(kernel, near, op, plans & self.shared[op])
        self._join_others(kernel, near, op, plans)
        del kernel[op]
        return [*before, *ran, *kernel.items()]

    def _repeat(self, op: int, plans: int) -> None:
        self.done[op] |= plans
        if not self.repeated[op] & ~self.done[op]:
            for s in self.large.get(op, ()):
                self.readers[s].discard(op)

    def _join_streams(
        self, kernel: dict[int, int], near: Iterable[int], op: int, plans: int
    ) -> list[tuple[int, int]]:
        """Take in other results of many reads, if some large one is in common.

        Such are the sums of the residual streams of an encoder and a decoder that begin
        with the same embedding.  Returns what has to be repeated before.
        """
        before: list[tuple[int, int]] = []
        common = dict(self.reads[op])
        guests = [guest for guest in near if guest in self.shared]
        while guests:
            guest = heappop(guests)
            joining = plans & self.shared[guest]
            joining &= self.repeated[guest] & ~self.done[guest]
            if not joining:
                continue
            reads_alike = 0
            for s, reading in self.large[guest].items():
                reads_alike |= reading & common.get(s, 0)
            needed = self._needed(kernel, guest, joining & reads_alike)
            joining = needed.pop(guest)
            if not joining:
                continue
            for maker in sorted(needed):
                more = needed[maker] & joining
                if more:
                    before.append((maker, more))
                    self._repeat(maker, more)
            (s,) = self.graph.writes[guest]
            self._take_in(kernel, guest, joining)
            common[s] = joining
            for other in self.readers.get(s, ()):
                if other in self.shared and other not in guests:
                    heappush(guests, other)
        return before

    def _needed(self, kernel: dict[int, int], op: int, plans: int) -> dict[int, int]:
        """What has to be repeated in order to repeat an operator, itself included.

        With the plans where it is, without those in which what cannot be fused would have
        to wait for something that is repeated: a kernel does not wait for both.
        """
        found = {op: plans}
        refused = 0
        pending = [(op, plans)]
        while pending:
            reader, needing = pending.pop()
            is_fusible = reader in self.reads
            for s in self.graph.reads[reader]:
                maker = self.graph.producer[s]
                if maker >= 0:
                    new = needing & self.repeated[maker] & ~self.done[maker]
                    if not is_fusible:
                        refused |= new | needing & kernel.get(maker, 0)
                    new &= ~found.get(maker, 0)
                    if new:
                        found[maker] = found.get(maker, 0) | new
                        pending.append((maker, new))
        found[op] &= ~refused
        return found

    def _take_in(self, kernel: dict[int, int], guest: int, plans: int) -> None:
        self._repeat(guest, plans)
        kernel[guest] = plans
        if guest in self.shared:
            self.stored[self.graph.writes[guest][0]] |= plans

    def _join_others(
        self, kernel: dict[int, int], near: Iterable[int], op: int, plans: int
    ) -> None:
        """Take in what is computed from the kernel's results and arguments alone."""
        reads = self.reads[op]
        for guest in near:
            joining = plans & self.repeated[guest] & ~self.done[guest]
            joining &= self.shared.get(guest, -1)
            if not joining:
                continue
            is_near = self.near_anyway[guest]
            for maker, reading in self.small[guest]:
                is_near |= reading & kernel.get(maker, 0)
                joining &= ~(reading & self.repeated[maker]) | self.done[maker]
            joining &= is_near
            if not joining:
                continue
            has_large = 0
            for s, reading in self.large[guest].items():
                has_large |= reading
                joining &= ~reading | reads.get(s, 0)
            joining &= has_large
            if joining:
                self._take_in(kernel, guest, joining)


class _FusedPhase(Phase):
    """A phase in which operators run in the kernels of those that read them.

    ``stored`` are the plans that save each storage: it is stored in those in any case.
    """

    def __init__(
        self,
        graph: FusedJointGraph,
        touched: list[int],
        operators: dict[fx.Node, _Operator],
        stored: Sequence[int],
    ) -> None:
        super().__init__(graph, touched)
        self.shapes = graph.shapes
        self.operators = operators
        self.stored = stored
        # What is read in order to compute what is not stored.
        self.sources = {
            s: each.reads
            for each in operators.values()
            if each.is_inlined
            for s in each.writes
        }
        # What each part of a concatenation is computed within, with the plans where it
        # is, and those where it is the first part.
        self.within: dict[int, tuple[int, int, int]] = {}
        # The plans where a storage has such parts.
        self.has_parts: dict[int, int] = {}

    def place(
        self,
        concatenations: Sequence[tuple[int, Sequence[int]]],
        parts: Sequence[int],
        results: Sequence[int],
    ) -> None:
        """Compute parts of concatenations within them, where both are made here.

        That is in these plans, for each storage as a part and as a result.
        """
        for result, found in concatenations:
            placed = 0
            for s in found:
                plans = parts[s] & results[result]
                if plans and s not in self.within:
                    self.within[s] = result, plans, plans & ~placed
                    placed |= plans
            self.has_parts[result] = placed

    def run(self, node: fx.Node, plans: int, step: int, own: int) -> None:
        """A kernel with its moment, in these plans; ``own`` as for :meth:`moment`."""
        operator = self.operators.get(node)
        if operator is None:
            return
        writes = operator.writes
        if operator.is_inlined:
            plans &= self.stored[writes[0]]
        if not plans:
            return
        dying = self._read_last(operator.reads, plans)
        for s in writes:
            # Nobody reads it.
            unread = plans & ~self.touched[s]
            if unread:
                self.touched[s] |= unread
                self.change(unread, -self.nbytes[s])
        reused: list[tuple[int, int]] = []
        light = self._light(operator, plans) if dying and operator.is_fusible else 0
        for s in writes:
            left = light & ~self._placed(s)
            for at, (r, last) in enumerate(dying):
                if left & last and self.shapes.get(r) == self.shapes.get(s):
                    reused.append((left & last, r))
                    dying[at] = r, last & ~left
                    left &= ~last
        for r, last in dying:
            self.change(last, -self.nbytes[r])
        self.moment(step, own)
        apart = plans
        for s in writes:
            if s in self.within:
                result, _, first = self.within[s]
                self.change(plans & first, self.nbytes[result])
            apart &= ~self._placed(s)
        self.change(apart, operator.nbytes)
        # What is written over ends before, as another begins.
        for last, r in reused:
            self.change(last, -self.nbytes[r])

    def _read_last(self, storages: Iterable[int], plans: int) -> list[tuple[int, int]]:
        """What a kernel is the last to read, by number, with the plans where it is."""
        dying: list[tuple[int, int]] = []
        pending = [(s, plans) for s in storages]
        while pending:
            s, plans = pending.pop()
            last = plans & ~self.touched[s]
            if not last:
                continue
            self.touched[s] |= last
            if s in self.within:
                result, placed, _ = self.within[s]
                pending.append((result, last & placed))
                last &= ~placed
            if s in self.sources:
                computed = last & ~self.stored[s]
                pending += [(r, computed) for r in self.sources[s]]
                last &= self.stored[s]
            if last and self.freeable[s]:
                dying.append((s, last))
        dying.sort()
        return dying

    def _placed(self, s: int) -> int:
        """The plans where a storage is a part of a concatenation, or made of parts."""
        placed = self.has_parts.get(s, 0)
        return placed | self.within[s][1] if s in self.within else placed

    def _light(self, operator: _Operator, plans: int) -> int:
        """The plans in which a kernel is not too large to write over its arguments."""
        found: dict[int, int] = {}
        pending = [(s, plans) for s in operator.reads]
        while pending:
            s, reading = pending.pop()
            seen = found.get(s, 0)
            new = reading & ~seen
            if new:
                found[s] = seen | new
                computed = new & ~self.stored[s]
                pending += [(r, computed) for r in self.sources.get(s, ())]
        # The operator itself is one more.
        return plans & ~_more_than(_MOST_OPERATORS - 1, found.values())


def _concatenations(
    operators: Mapping[fx.Node, _Operator],
) -> list[tuple[int, list[int]]]:
    """What is concatenated and stored, each with those of its parts that kernels make."""
    kernels = {
        s
        for each in operators.values()
        if each.is_fusible and not each.is_inlined and len(each.writes) == 1
        for s in each.writes
    }
    return [
        (result, sorted(kernels.intersection(each.reads)))
        for node, each in operators.items()
        if node.target is aten.cat.default and not each.is_inlined
        for result in each.writes
    ]


def _more_than(most: int, masks: Collection[int]) -> int:
    """The bits that are in more than so many masks."""
    if len(masks) <= most:
        return 0
    # Those in at least one, two, ... of the masks so far.
    counted = [0] * (most + 1)
    for before, mask in enumerate(masks):
        for at in range(min(before, most), 0, -1):
            counted[at] |= counted[at - 1] & mask
        counted[0] |= mask
    return counted[most]


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
