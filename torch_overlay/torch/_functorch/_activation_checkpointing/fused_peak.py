"""What plans keep live where inductor makes kernels of the operators.

:mod:`.liveness` counts what runs operator by operator.  Inductor makes kernels of
several operators, and what is used inside of one alone is never stored.
:class:`Kernels` has the rules that decide what is stored:

-   A pointwise operator is computed in whatever reads it, if all of that can be fused.
    Where several operators read it and it takes many reads or operators itself, it is
    stored, if something that cannot be fused runs between them.
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

It ignores the order that inductor's scheduler chooses, any other fusion of kernels that
have nothing but inputs in common, and scratch memory.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple, TYPE_CHECKING

import torch
import torch.fx as fx

from .liveness import Operator, Program, Rule, Timeline
from .rerun_cost import concrete, is_view


if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from typing import Any

    from torch._functorch.partitioners import OpTypes
    from .liveness import Repeats

__all__ = ["Kernels", "by_kernels"]

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


def by_kernels(program: Program) -> Program:
    """The same program where inductor makes kernels of the operators."""
    return replace(program, rule=Kernels(program))


class _Kernel(NamedTuple):
    """An operator's part in a kernel.

    Args:
        is_inlined: whether its result is stored only where it is saved.
        is_fusible: whether it may be part of a kernel.
        is_shared: whether several operators would have to compute its result.
        is_divided: whether something that cannot be fused runs between those.
    """

    operator: Operator
    is_inlined: bool
    is_fusible: bool
    is_shared: bool = False
    is_divided: bool = False


class _Phase:
    """The kernels of a phase, by the nodes that are computed in them.

    sources[s]: what is read in order to compute what is not stored.
    concatenations: what is concatenated and stored, each with those of its parts that
        kernels make.
    """

    def __init__(self, kernels: dict[fx.Node, _Kernel]) -> None:
        self.kernels = kernels
        self.sources: dict[int, tuple[int, ...]] = {}
        made: set[int] = set()
        for each, is_inlined, is_fusible, *_ in kernels.values():
            if is_inlined:
                self.sources.update(dict.fromkeys(each.writes, each.reads))
            elif is_fusible and len(each.writes) == 1:
                made.update(each.writes)
        self.concatenations = [
            (result, sorted(made.intersection(each.reads)))
            for each, is_inlined, *_ in kernels.values()
            if each.node.target is aten.cat.default and not is_inlined
            for result in each.writes
        ]


class Kernels(Rule):
    """Operators run in the kernels that inductor makes of them.

    Whether a result is stored is decided once, for all plans: in the forward as if
    nothing was saved, and in the backward as if all of it was repeated, but for the
    backward's own operators, for which it is as if nothing was, and for results that
    several operators read, for which each plan decides.
    """

    def __init__(self, program: Program) -> None:
        # The number of elements and the type of what was first put into each storage.
        self.shapes: dict[int, tuple[Any, ...]] = {}
        for node, storages in program.values.items():
            value = node.meta.get("val")
            # Of its arguments, inductor writes over those alone that the forward made.
            if isinstance(value, torch.Tensor) and node not in program.tangents:
                for s in storages:
                    # A guess for a symbolic size, as comparing those would guard.
                    shape = concrete(value.numel()), value.dtype
                    self.shapes.setdefault(s, shape)
        self.large = {
            s for s, (n, dtype) in self.shapes.items() if n * dtype.itemsize >= _LARGE
        }
        kernels: dict[fx.Node, _Kernel] = {}
        for chosen in ((), range(len(program.nbytes))):
            operators = _backward_of(program, chosen)
            kernels |= _Fusion(program, operators, program.returned).kernels()
        # Those of the backward's own operators stay as they are.
        for node in program.nodes:
            kernel = kernels.get(node)
            if kernel is not None and kernel.is_shared:
                kernels[node] = kernel._replace(is_inlined=True)
        forward = [each for each in program.forward if each.is_required]
        kept = program.outputs | program.written_back
        # What only the backward needs is made in the forward, if that saves it.
        in_forward = kernels | _Fusion(program, forward, kept).kernels()
        self.in_backward, self.in_forward = _Phase(kernels), _Phase(in_forward)
        self.order = self._made_with_what_it_reads(program.forward)

    def _made_with_what_it_reads(self, forward: Iterable[Operator]) -> list[Operator]:
        """The forward's nodes, with what only the backward needs as early as can be.

        That is fused with the kernels around what it reads: the mask of a ReLU that was
        traced in the backward, for one.
        """
        made_at: dict[int, int] = {}
        order: list[tuple[int, Operator]] = []
        for at, each in enumerate(forward):
            known = self.in_forward.kernels.get(each.node)
            if not each.is_required and known is not None and known.is_fusible:
                at = max((made_at[s] for s in each.reads if s in made_at), default=at)
            made_at.update(dict.fromkeys(each.writes, at))
            order.append((at, each))
        order.sort(key=operator.itemgetter(0))
        return [each for _, each in order]

    def forward(
        self, program: Program, kept: Sequence[int]
    ) -> tuple[Timeline, Sequence[Operator]]:
        nothing = [0] * len(kept)
        timeline = _KernelTimeline(
            program, [*kept], nothing, self.shapes, self.in_forward, kept
        )
        # In all plans.
        made = [-1 if first >= 0 else 0 for first in program.first_use]
        timeline.place([each & ~keep for each, keep in zip(made, kept)], made)
        return timeline, self.order

    def backward(
        self, program: Program, repeats: Repeats, saved: Sequence[int]
    ) -> tuple[Timeline, Repeats]:
        repeated = [0] * len(program.operators)
        for step in repeats:
            for op, plans in step:
                repeated[op] |= plans
        joining = _Joining(program, self, repeated, saved)
        timeline = _KernelTimeline(
            program,
            [0] * len(saved),
            saved,
            self.shapes,
            self.in_backward,
            joining.stored,
        )
        # No operator makes an input, whose producer is -1.
        made_by = [*repeated, 0]
        made = [made_by[op] & ~plans for op, plans in zip(program.producer, saved)]
        timeline.place(made, made)
        return timeline, joining.run(repeats)


def _backward_of(program: Program, chosen: Iterable[int]) -> list[Operator]:
    """The operators of a backward in a plan, in the order in which they run."""
    saved = program.saved_by([chosen])
    _, repeated = program.follow(saved, 1)
    found: list[Operator] = []
    for step, repeats in zip(
        program.steps, program.repeats_by_step(saved, repeated, 1)
    ):
        *before, last = step.operators
        found += before
        found += [program.operators[op] for op, _ in repeats]
        found.append(last)
    return found


class _Fusion:
    """What becomes of operators that run in this order; ``kept`` has to be stored."""

    def __init__(
        self, program: Program, operators: Iterable[Operator], kept: Collection[int]
    ) -> None:
        from torch._functorch.partitioners import get_default_op_list

        self.program, self.kept = program, kept
        self.operators = [each for each in operators if not _is_part(each.node)]
        self.readers: dict[int, list[fx.Node]] = defaultdict(list)
        for each in self.operators:
            for s in each.reads:
                self.readers[s].append(each.node)
        op_types = get_default_op_list()
        nodes = [each.node for each in self.operators]
        self.pointwise = {node for node in nodes if _is_pointwise(node, op_types)}
        self.fusible = self.pointwise.union(filter(_is_reduction, nodes))
        self.products: set[fx.Node] = set()
        for each in self.operators:
            if each.node.target is aten.mm.default:
                (s,) = each.writes
                users = self.readers[s]
                # Adding to a product becomes addmm, which is no kernel to fuse with.
                if (
                    s not in kept
                    and [u.target for u in users] == [aten.add.Tensor]
                    and each.node in users[0].all_input_nodes
                ):
                    self.products.add(each.node)
                    self.fusible.difference_update(users)
        # How many operators that cannot be fused come before each one.
        self.barriers: dict[fx.Node, int] = {}
        count = 0
        for node in nodes:
            self.barriers[node] = count
            count += node not in self.fusible

    def kernels(self) -> dict[fx.Node, _Kernel]:
        found: dict[fx.Node, _Kernel] = {}
        # What is read in order to compute a result that is not stored, and by which.
        sources: dict[int, set[int]] = {}
        computed_by: dict[int, set[fx.Node]] = {}
        for each in self.operators:
            reads = {r for s in each.reads for r in sources.get(s, (s,))}
            parts = {each.node}.union(*(computed_by.get(s, ()) for s in each.reads))
            kernel = found[each.node] = self._kernel(each, reads, len(parts))
            if kernel.is_inlined:
                sources.update(dict.fromkeys(each.writes, reads))
                computed_by.update(dict.fromkeys(each.writes, parts))
        return found

    def _kernel(self, each: Operator, reads: set[int], parts: int) -> _Kernel:
        """An operator that takes so many, itself included, where it is computed."""
        node, fusible = each.node, self.fusible
        if node not in fusible or node not in self.pointwise or len(each.writes) != 1:
            return _Kernel(each, node in self.products, node in fusible)
        (s,) = each.writes
        users = self.readers[s]
        if (
            s in self.kept
            or not users
            or not all(u in fusible or self._scatters_to(u, s) for u in users)
        ):
            return _Kernel(each, False, True)
        if len(users) == 1:
            return _Kernel(each, True, True)
        is_divided = self.barriers[users[0]] != self.barriers[users[-1]]
        is_large = len(reads) > _MOST_READS or parts + len(reads) > _MOST_OPERATORS
        return _Kernel(each, not (is_large and is_divided), True, True, is_divided)

    def _scatters_to(self, node: fx.Node, s: int) -> bool:
        """Whether a node is a scatter to this storage, which it then writes over."""
        target = node.target
        return (
            isinstance(target, torch._ops.OpOverload)
            and target.overloadpacket in _SCATTERS
            and all(
                (s in self.program.values[source]) == (source is node.args[0])
                for source in node.all_input_nodes
            )
        )


class _Joining:
    """What else the backward's kernels compute when it repeats operators, by plan.

    ``repeated`` are the plans in which each operator is repeated, ``done`` those in which
    it was, and ``stored`` those that store each storage; all of ``saved`` are among them.
    """

    def __init__(
        self,
        program: Program,
        rule: Kernels,
        repeated: Sequence[int],
        saved: Sequence[int],
    ) -> None:
        self.program, self.large = program, rule.large
        self.kernels = rule.in_backward.kernels
        self.repeated, self.stored = repeated, [*saved]
        self.done = [0] * len(repeated)
        # What the kernels of repeated operators read, each with the plans where they do.
        self.reads: dict[int, dict[int, int]] = {}
        # The plans in which shared results take many reads.
        self.shared: dict[int, int] = {}
        # Those in which such results read a storage.
        wanted = [0] * len(saved)
        self._read_by_plan(saved, wanted)
        # By large storage, the operators that are not inlined in all plans, and are yet
        # to be repeated in some.
        self.readers: dict[int, set[int]] = defaultdict(set)
        # The plans in which it belongs to any kernel that has what it reads.
        self.joins_any: dict[int, int] = {}
        for op, found in self.reads.items():
            node, kernel = program.nodes[op], self.kernels[program.nodes[op]]
            if kernel.is_inlined and not kernel.is_shared:
                continue
            for s in self.large.intersection(found):
                self.readers[s].add(op)
            if _is_reduction(node):
                for s in kernel.operator.writes:
                    self.joins_any[op] = self.joins_any.get(op, 0) | wanted[s]

    def _read_by_plan(self, saved: Sequence[int], wanted: list[int]) -> None:
        """Follow what is read in each plan, in order to compute what is not stored.

        Adds to what is stored where that is for readers apart.
        """
        # What is read in order to compute a result, and the plans that have it anyway.
        sources: dict[int, dict[int, int]] = {}
        realized = [*saved]
        for op, plans in enumerate(self.repeated):
            kernel = self.kernels.get(self.program.nodes[op])
            if not plans or kernel is None or not kernel.is_fusible:
                continue
            found = self.reads[op] = {}
            for s in kernel.operator.reads:
                here = realized[s] if s in sources else -1
                if here:
                    found[s] = found.get(s, 0) | here
                for r, reading in sources.get(s, {}).items():
                    if reading & ~here:
                        found[r] = found.get(r, 0) | reading & ~here
            if kernel.is_inlined:
                (s,) = kernel.operator.writes
                sources[s] = found
            if kernel.is_shared:
                many = self.shared[op] = plans & _more_than(_MOST_READS, found.values())
                realized[s] |= many
                if kernel.is_divided:
                    self.stored[s] |= many
                for r, reading in found.items():
                    wanted[r] |= reading & many

    def run(self, repeats: Repeats) -> Repeats:
        """Repeat operators as early as a kernel that takes them in, in each plan."""
        joined: Repeats = []
        for step in repeats:
            joined.append([])
            for op, plans in step:
                plans &= ~self.done[op]
                if plans:
                    joined[-1] += self._run(op, plans)
        return joined

    def _run(self, op: int, plans: int) -> list[tuple[int, int]]:
        """Repeat an operator in these plans, and what joins its kernel; in order."""
        self._repeat(op, plans)
        ran = [(op, plans)]
        if op not in self.reads:
            return ran
        kernel = self.kernels[self.program.nodes[op]]
        if kernel.is_inlined:
            plans &= self.stored[kernel.operator.writes[0]]
        if not plans:
            return ran
        # The plans in which an operator is part of this kernel.
        parts = {op: plans}
        readers = (self.readers.get(s, ()) for s in self.reads[op])
        near = sorted(set[int]().union(*readers))
        before: list[tuple[int, int]] = []
        if op in self.shared:
            before = self._join_streams(parts, near, op, plans & self.shared[op])
        self._join_others(parts, near, op, plans)
        del parts[op]
        return [*before, *ran, *parts.items()]

    def _repeat(self, op: int, plans: int) -> None:
        self.done[op] |= plans
        if not self.repeated[op] & ~self.done[op]:
            for s in self.large.intersection(self.reads.get(op, ())):
                self.readers[s].discard(op)

    def _join_streams(
        self, parts: dict[int, int], near: Iterable[int], op: int, plans: int
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
            for s, reading in self.reads[guest].items():
                if s in self.large:
                    reads_alike |= reading & common.get(s, 0)
            needed = self._needed(parts, guest, joining & reads_alike)
            joining = needed.pop(guest)
            if not joining:
                continue
            for maker in sorted(needed):
                more = needed[maker] & joining
                if more:
                    before.append((maker, more))
                    self._repeat(maker, more)
            (s,) = self.program.operators[guest].writes
            self._take_in(parts, guest, joining)
            common[s] = joining
            for other in self.readers.get(s, ()):
                if other in self.shared and other not in guests:
                    heappush(guests, other)
        return before

    def _needed(self, parts: dict[int, int], op: int, plans: int) -> dict[int, int]:
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
            for s in self.program.operators[reader].reads:
                maker = self.program.producer[s]
                if maker >= 0:
                    new = needing & self.repeated[maker] & ~self.done[maker]
                    if not is_fusible:
                        refused |= new | needing & parts.get(maker, 0)
                    new &= ~found.get(maker, 0)
                    if new:
                        found[maker] = found.get(maker, 0) | new
                        pending.append((maker, new))
        found[op] &= ~refused
        return found

    def _take_in(self, parts: dict[int, int], guest: int, plans: int) -> None:
        self._repeat(guest, plans)
        parts[guest] = plans
        if guest in self.shared:
            self.stored[self.program.operators[guest].writes[0]] |= plans

    def _join_others(
        self, parts: dict[int, int], near: Iterable[int], op: int, plans: int
    ) -> None:
        """Take in what is computed from the kernel's results and arguments alone."""
        reads = self.reads[op]
        for guest in near:
            joining = plans & self.repeated[guest] & ~self.done[guest]
            joining &= self.shared.get(guest, -1)
            if not joining:
                continue
            is_near, has_large = self.joins_any.get(guest, 0), 0
            for s, reading in self.reads[guest].items():
                maker = self.program.producer[s]
                if s in self.large:
                    has_large |= reading
                    joining &= ~reading | reads.get(s, 0)
                elif maker >= 0:
                    is_near |= reading & parts.get(maker, 0)
                    joining &= ~(reading & self.repeated[maker]) | self.done[maker]
            joining &= is_near & has_large
            if joining:
                self._take_in(parts, guest, joining)


class _KernelTimeline(Timeline):
    """A phase in which operators run in the kernels of those that read them.

    ``stored`` are the plans that store each storage; the others are as for `Timeline`.
    """

    def __init__(
        self,
        program: Program,
        touched: list[int],
        saved: Sequence[int],
        shapes: dict[int, tuple[Any, ...]],
        phase: _Phase,
        stored: Sequence[int],
    ) -> None:
        super().__init__(program, touched, saved)
        self.shapes, self.released = shapes, program.released
        self.phase, self.sources, self.stored = phase, phase.sources, stored
        # What each part of a concatenation is computed within, with the plans where it
        # is, and those where it is the first part.
        self.within: dict[int, tuple[int, int, int]] = {}
        # The plans where a storage has such parts.
        self.has_parts: dict[int, int] = {}

    def place(self, parts: Sequence[int], results: Sequence[int]) -> None:
        """Compute parts of concatenations within them, where both are made here.

        That is in these plans, for each storage as a part and as a result.
        """
        for result, found in self.phase.concatenations:
            placed = 0
            for s in found:
                plans = parts[s] & results[result]
                if plans and s not in self.within:
                    self.within[s] = result, plans, plans & ~placed
                    placed |= plans
            self.has_parts[result] = placed

    def run(self, each: Operator, plans: int, step: int) -> None:
        """An operator's kernel with its moment, in these plans, if it has one."""
        kernel, writes = self.phase.kernels.get(each.node), each.writes
        if kernel is None:
            return
        if kernel.is_inlined:
            plans &= self.stored[writes[0]]
        if not plans:
            return
        dying = self._read_last(each.reads, plans)
        for s in writes:
            # Nobody reads it.
            unread = plans & ~self.touched[s]
            if unread:
                self.touched[s] |= unread
                self.change(unread, -self.nbytes[s])
        reused: list[tuple[int, int]] = []
        light = self._light(each, plans) if dying and kernel.is_fusible else 0
        for s in writes:
            left = light & ~self._placed(s)
            for at, (r, last) in enumerate(dying):
                if (
                    left & last
                    and r not in self.released
                    and self.shapes.get(r) == self.shapes.get(s)
                ):
                    reused.append((left & last, r))
                    dying[at] = r, last & ~left
                    left &= ~last
        for r, last in dying:
            self.change(last, -self.nbytes[r])
        self.moment(step)
        apart = plans
        for s in writes:
            if s in self.within:
                result, _, first = self.within[s]
                self.change(plans & first, self.nbytes[result])
            apart &= ~self._placed(s)
        self.change(apart, each.nbytes)
        # What is written over ends before, as another begins.
        for last, r in reused:
            self.change(last, -self.nbytes[r])
        for s in writes:
            again = plans & self.saved[s]
            if again:
                self.change(again, -self.nbytes[s])

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

    def _light(self, each: Operator, plans: int) -> int:
        """The plans in which a kernel is not too large to write over its arguments."""
        found: dict[int, int] = {}
        pending = [(s, plans) for s in each.reads]
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


def _is_part(node: fx.Node) -> bool:
    """Whether a node is a part of another's value, or no call at all."""
    return (
        node.op != "call_function" or node.target is operator.getitem or is_view(node)
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
