"""What plans keep live where inductor makes kernels of the operators.

:mod:`.liveness` counts what runs operator by operator.  Inductor makes kernels of
several operators, and what is used inside of one alone is never stored.
:class:`Kernels` has the rules that decide what is stored:

-   A pointwise operator is computed in whatever reads it, if all of that can be fused.
    Where several operators read it and it takes many reads or operators itself, it is
    stored, if something that cannot be fused runs between them.
-   What kernels write between two operators that cannot be fused is there at once, as
    they are fused where they read the same.  But a kernel writes its result over an
    argument of the same shape that no other one reads meanwhile or later.
-   A scatter writes over what it scatters to, and a product that is only added to
    something waits for that, unless it would hold more meanwhile than it is itself.

It ignores the order that inductor's scheduler chooses and scratch memory.  Plans are
ranked by it; what one holds is known when it is compiled (:mod:`.compiled_peak`).
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from dataclasses import replace
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
_POINTWISE = (
    aten.cat,
    aten.embedding,
    aten.expand,
    aten.full,
    aten.gather,
    aten.index,
)
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


def by_kernels(program: Program) -> Program:
    """The same program where inductor makes kernels of the operators."""
    return replace(program, rule=Kernels(program))


class _Kernel(NamedTuple):
    """An operator's part in a kernel.

    Args:
        is_inlined: whether its result is stored only where it is saved.
        is_fusible: whether it may be part of a kernel.
        own: what no other kernel reads between the same operators that cannot be fused.
    """

    operator: Operator
    is_inlined: bool
    is_fusible: bool
    own: frozenset[int] = frozenset()


class _Phase:
    """The kernels of a phase, by the nodes that are computed in them.

    sources[s]: what is read in order to compute what is not stored.
    """

    def __init__(self, kernels: dict[fx.Node, _Kernel]) -> None:
        self.kernels = kernels
        self.sources: dict[int, tuple[int, ...]] = {}
        for each, is_inlined, *_ in kernels.values():
            if is_inlined:
                self.sources.update(dict.fromkeys(each.writes, each.reads))


class Kernels(Rule):
    """Operators run in the kernels that inductor makes of them.

    Whether a result is stored is decided once, for all plans: in the forward as if
    nothing was saved, and in the backward as if all of it was repeated, but for the
    backward's own operators, for which it is as if nothing was.
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
        kernels: dict[fx.Node, _Kernel] = {}
        for chosen in ((), range(len(program.nbytes))):
            operators = _backward_of(program, chosen)
            found = _Fusion(program, operators, program.returned).kernels()
            for node, kernel in found.items():
                # Where all is repeated, all that is read is seen.
                own = kernels.get(node, kernel).own
                kernels[node] = kernel._replace(own=own)
        forward = [each for each in program.forward if each.is_required]
        kept = program.outputs | program.written_back
        # What only the backward needs is made in the forward, if that saves it.
        in_forward = kernels | _Fusion(program, forward, kept).kernels()
        self.in_backward, self.in_forward = _Phase(kernels), _Phase(in_forward)

    def forward(
        self, program: Program, kept: Sequence[int]
    ) -> tuple[Timeline, Sequence[Operator]]:
        nothing = [0] * len(kept)
        timeline = _KernelTimeline(
            program, [*kept], nothing, self.shapes, self.in_forward, kept
        )
        return timeline, program.forward

    def backward(
        self, program: Program, repeats: Repeats, saved: Sequence[int]
    ) -> tuple[Timeline, Repeats]:
        timeline = _KernelTimeline(
            program,
            [0] * len(saved),
            saved,
            self.shapes,
            self.in_backward,
            saved,
        )
        return timeline, repeats


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
        self.products = {each.node for each in self.operators if self._waits(each)}
        for node in self.products:
            # Adding to a product becomes addmm, which is no kernel to fuse with.
            self.fusible.difference_update(node.users)
        # How many operators that cannot be fused come before each one.
        self.barriers: dict[fx.Node, int] = {}
        count = 0
        for node in nodes:
            self.barriers[node] = count
            count += node not in self.fusible

    def _waits(self, each: Operator) -> bool:
        """Whether an operator is a product that is computed with what it is added to."""
        from torch._inductor.fx_passes import post_grad

        node = each.node
        if node.target is not aten.mm.default or len(node.users) != 1:
            return False
        (s,), (user,) = each.writes, node.users
        if s in self.kept or user.target is not aten.add.Tensor:
            return False
        # A patch of its own brings it.
        would_wait: Any = getattr(post_grad, "_would_wait", lambda *_: False)
        return not any(would_wait(node, other) for other in user.all_input_nodes)

    def kernels(self) -> dict[fx.Node, _Kernel]:
        found: dict[fx.Node, _Kernel] = {}
        # What is read in order to compute a result that is not stored, and by which.
        sources: dict[int, set[int]] = {}
        computed_by: dict[int, set[fx.Node]] = {}
        reads_of: list[tuple[Operator, set[int]]] = []
        for each in self.operators:
            reads = {r for s in each.reads for r in sources.get(s, (s,))}
            parts = {each.node}.union(*(computed_by.get(s, ()) for s in each.reads))
            kernel = found[each.node] = self._kernel(each, reads, len(parts))
            if kernel.is_inlined:
                sources.update(dict.fromkeys(each.writes, reads))
                computed_by.update(dict.fromkeys(each.writes, parts))
            reads_of.append((each, reads))
        readers = Counter(
            (s, self.barriers[each.node])
            for each, reads in reads_of
            if not found[each.node].is_inlined
            for s in reads
        )
        for each, reads in reads_of:
            own = (s for s in reads if readers[s, self.barriers[each.node]] <= 1)
            found[each.node] = found[each.node]._replace(own=frozenset(own))
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
        return _Kernel(each, not (is_large and is_divided), True)

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
        # Results of the kernels since the last operator that cannot be fused.
        self.together: list[tuple[int, int]] = []

    def run(self, each: Operator, plans: int, step: int) -> None:
        """An operator's kernel with its moment, in these plans, if it has one."""
        kernel, writes = self.phase.kernels.get(each.node), each.writes
        if kernel is None:
            return
        if kernel.is_inlined:
            plans &= self.stored[writes[0]]
        if not plans:
            return
        if not kernel.is_fusible:
            self._begin(plans)
        dying = self._read_last(each.reads, plans)
        for s in writes:
            # Nobody reads it.
            unread = plans & ~self.touched[s]
            if unread:
                self.touched[s] |= unread
                self.change(unread, -self.nbytes[s])
        # What is written over ends before, as a result begins.
        ends: list[tuple[int, int]] = []
        begins: list[tuple[int, int]] = []
        for s in writes:
            left = plans if kernel.is_fusible else 0
            for at, (r, last) in enumerate(dying):
                over = left & last
                if over and r in kernel.own and self._is_alike(r, s):
                    ends.append((over, -self.nbytes[r]))
                    dying[at] = r, last & ~over
                    left &= ~over
            self.together.append((left, self.nbytes[s]))
            begins.append((plans & ~left, self.nbytes[s]))
        for r, last in dying:
            self.change(last, -self.nbytes[r])
        self.moment(step)
        for change in (*begins, *ends):
            self.change(*change)
        for s in writes:
            again = plans & self.saved[s]
            if again:
                self.change(again, -self.nbytes[s])

    def _is_alike(self, r: int, s: int) -> bool:
        """Whether a storage can be written over another one."""
        return r not in self.released and self.shapes.get(r) == self.shapes.get(s)

    def _begin(self, plans: int) -> None:
        """What is before all kernels whose results are there together."""
        together, self.together = self.together, []
        for each, nbytes in together:
            self.change(each & plans, nbytes)
            if each & ~plans:
                self.together.append((each & ~plans, nbytes))

    def peaks(self, count: int, base: int = 0) -> list[list[int]]:
        self._begin(-1)
        return super().peaks(count, base)

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
            if s in self.sources:
                computed = last & ~self.stored[s]
                pending += [(r, computed) for r in self.sources[s]]
                last &= self.stored[s]
            if last and self.freeable[s]:
                dying.append((s, last))
        dying.sort()
        return dying


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
