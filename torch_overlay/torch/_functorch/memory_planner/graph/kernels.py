"""Estimates what plans keep live where inductor fuses operators into kernels.

:mod:`.graph.liveness` assumes that operators run one by one.  Inductor fuses several
into a kernel, and values that are only used inside of a kernel are never stored.
:class:`Kernels` has the rules by which a result is stored:

-   A pointwise operator is computed in whatever reads it (inlined), if all readers can
    be fused.  It is stored, though, if it takes many reads or operators itself and
    something that cannot be fused runs between its readers.
-   All that kernels write between two operators that cannot be fused is live at once,
    as kernels that read the same are fused.  But a kernel writes its result in place,
    over an argument of the same size and type that nothing reads later.
-   A scatter writes over what it scatters to.  A matrix product that is only added to
    something runs together with that addition, unless more would be live in between
    than the product itself takes.

This ignores the order that inductor's scheduler chooses, and kernels' scratch memory.
Bodies of higher-order operators are counted operator by operator, except for nested
regions, which inductor fuses too.  So it serves to rank plans; what a plan really holds
is known once it is compiled (:mod:`.compile.compiled_peak`).
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
import torch.fx as fx

from ..._activation_checkpointing.random_ops import is_higher_order, subgraphs
from .live_bytes import LiveBytes
from .reading import read_forward
from .recompute_cost import is_view, size_or_hint


if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from torch._functorch.partitioners import OpTypes
    from .liveness import Program
    from .storages import Operator


aten = torch.ops.aten

# The names of ATen's scatters have one of these.
_SCATTERS = ("index_add", "index_copy", "index_put", "scatter")
# Higher-order operators that become a kernel, bodies and all.
_BECOME_KERNELS = ("associative_scan", "flex_attention", "flex_attention_backward")
# Inductor's defaults for what it computes again for each reader: the most buffers to
# read (realize_reads_threshold), and the most operators, counting reads, on an
# accelerator (realize_opcount_threshold) or a CPU (realize_cpu_opcount_threshold).
_MOST_READS = 4
_MOST_OPERATORS, _MOST_ON_CPU = 30, 50


def by_kernels(program: Program) -> Program:
    """The same program, with its operators fused into inductor's kernels."""
    timeline = functools.partial(_LiveInKernels, Kernels(program))
    return replace(program, timeline=timeline)


def has_kernel(node: fx.Node) -> bool:
    """Whether a higher-order operator becomes one kernel, bodies and all."""
    target: Any = node.target
    return target.name() in _BECOME_KERNELS


class _Kernel(NamedTuple):
    """An operator's part in a kernel.

    Args:
        is_inlined: whether its readers compute it, so that only saving it stores it.
        is_fusible: whether it may be fused with others.
        parts: the storages that its kernel reads or computes, stored or not.
    """

    operator: Operator
    is_inlined: bool
    is_fusible: bool
    parts: frozenset[int]


class Kernels:
    """The kernels that inductor makes of a program's operators.

    What is inlined is decided once for all plans: in the forward as if nothing were
    saved, and in the backward as if everything were repeated.
    """

    def __init__(self, program: Program) -> None:
        values = (node.meta.get("val") for node in program.nodes)
        on_cpu = (v.device.type == "cpu" for v in values if isinstance(v, torch.Tensor))
        # The most operators and reads of an inlined expression.
        most = self.most_operators = _MOST_ON_CPU if all(on_cpu) else _MOST_OPERATORS
        repeated = _Fusion(program, _backward_repeating_all(program), program.returned)
        required = [each for each in program.forward if each.is_required]
        first = _Fusion(program, required, program.outputs | program.written_back)
        kernels = repeated.kernels(most)
        # The forward also runs what only the backward needs, in plans that save that.
        self.in_forward = kernels | first.kernels(most)
        self.in_backward = kernels
        self.shapes = _shapes_of_storages(program)
        self.scratch = _scratch_of_regions(program)


def _scratch_of_regions(program: Program) -> dict[fx.Node, int]:
    """The bytes that nested regions have live beyond their results, when compiled."""
    scratch: dict[fx.Node, int] = {}
    peaks: dict[fx.Graph, int] = {}
    for each in program.operators_with_bodies:
        if each.node.target is not torch.ops.higher_order.invoke_subgraph:
            continue
        (body,) = subgraphs(each.node)
        if body not in peaks:
            model = by_kernels(read_forward(body))
            (peaks[body],) = model.forward_peaks([0] * len(model.nbytes), 1)
        scratch[each.node] = max(peaks[body] - each.nbytes, 0)
    return scratch


def _shapes_of_storages(program: Program) -> dict[int, Any]:
    """Elements and type of each storage's first value, if its layout is known."""
    shapes: dict[int, Any] = {}
    tangents = program.storages(program.tangents)
    for node, storages in program.values.items():
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and tangents.isdisjoint(storages):
            # The hint of a symbolic size, as comparing those would add guards.
            shape = size_or_hint(value.numel()), value.dtype
            for s in storages:
                shapes.setdefault(s, shape)
    return shapes


def _backward_repeating_all(program: Program) -> list[Operator]:
    """The operators of a backward that repeats all it can, in the order they run in."""
    saved = program.masks_of_saving_plans([()])
    _, repeated = program.find_recomputed(saved, 1)
    by_step = program.recomputes_by_step(saved, repeated, 1)
    found: list[Operator] = []
    for step, repeats in zip(program.steps, by_step):
        found += [program.operators[op] for op, _ in repeats]
        found.append(step.operator)
    return found


class _Fusion:
    """How operators that run in this order are fused; ``kept`` has to be stored."""

    def __init__(
        self, program: Program, operators: Iterable[Operator], kept: Collection[int]
    ) -> None:
        from torch._functorch.partitioners import get_default_op_list

        self.program, self.kept = program, kept
        self.operators = [each for each in operators if not _runs_no_kernel(each.node)]
        self.readers: dict[int, list[fx.Node]] = defaultdict(list)
        for each in self.operators:
            for s in each.reads:
                self.readers[s].append(each.node)
        op_types = get_default_op_list()
        nodes = [each.node for each in self.operators]
        self.pointwise = {node for node in nodes if _is_pointwise(node, op_types)}
        self.products = {each.node for each in self.operators if self._waits(each)}
        for node in self.products:
            # Inductor turns the addition into addmm, which it cannot fuse.
            self.pointwise.difference_update(node.users)
        self.fusible = self.pointwise.union(filter(_is_reduction, nodes))
        # How many operators that cannot be fused run before each one.
        barriers = accumulate((n not in self.fusible for n in nodes), initial=0)
        self.barriers = dict(zip(nodes, barriers))

    def _waits(self, each: Operator) -> bool:
        """Whether an operator is a product that waits for what it is added to."""
        from torch._inductor.fx_passes import post_grad

        node = each.node
        if node.target is not aten.mm.default or len(node.users) != 1:
            return False
        (s,), (user,) = each.writes, node.users
        if s in self.kept or user.target is not aten.add.Tensor:
            return False
        # A separate patch brings this function.
        would_wait: Any = getattr(post_grad, "_would_wait", lambda *_: False)
        return not any(would_wait(node, other) for other in user.all_input_nodes)

    def kernels(self, most_operators: int) -> dict[fx.Node, _Kernel]:
        found: dict[fx.Node, _Kernel] = {}
        # The parts of each storage that is inlined.
        computed: dict[int, frozenset[int]] = {}
        for each in self.operators:
            parts = frozenset(each.writes).union(
                *(computed.get(s, (s,)) for s in each.reads)
            )
            reads = len(parts.difference(computed, each.writes))
            is_large = reads > _MOST_READS or len(parts) > most_operators
            is_inlined = self._is_inlined(each, is_large)
            is_fusible = each.node in self.fusible
            found[each.node] = _Kernel(each, is_inlined, is_fusible, parts)
            if is_inlined:
                computed.update(dict.fromkeys(each.writes, parts))
        return found

    def _is_inlined(self, each: Operator, is_large: bool) -> bool:
        """Whether readers compute an operator, over a threshold if it ``is_large``."""
        if each.node in self.products:
            return True
        if each.node not in self.pointwise or len(each.writes) != 1:
            return False
        (s,) = each.writes
        users = self.readers[s]
        if s in self.kept or not users:
            return False
        is_divided = self.barriers[users[0]] != self.barriers[users[-1]]
        return not (is_large and is_divided) and all(
            user in self.fusible or self._scatters_to(user, s) for user in users
        )

    def _scatters_to(self, node: fx.Node, s: int) -> bool:
        """Whether a node is a scatter to this storage, which it then writes over."""
        target = node.target
        return (
            isinstance(target, torch._ops.OpOverload)
            and target.namespace == "aten"
            and any(name in target.__name__ for name in _SCATTERS)
            and all(
                (s in self.program.values[source]) == (source is node.args[0])
                for source in node.all_input_nodes
            )
        )


class _LiveInKernels(LiveBytes):
    """The live bytes of a phase that runs inductor's kernels.

    ``stored`` masks the plans that store each storage even if it is inlined.
    """

    def __init__(
        self,
        rule: Kernels,
        program: Program,
        kept: Sequence[int],
        is_forward: bool,
    ) -> None:
        super().__init__(program, kept, is_forward)
        self.rule, self.owned, self.stored = rule, program.owned, kept
        self.kernels = rule.in_forward if is_forward else rule.in_backward
        # The storages that are inlined, with what computes them.
        self.inlined = {
            s: kernel
            for kernel in self.kernels.values()
            if kernel.is_inlined
            for s in kernel.operator.writes
        }
        # Results of the kernels between two operators that cannot be fused.
        self.together: list[tuple[int, int]] = []

    def run(self, each: Operator, plans: int, step: int) -> None:
        """Run an operator's kernel, if it has one, in these plans as one moment."""
        kernel, writes = self.kernels.get(each.node), each.writes
        if kernel is None:
            return
        if kernel.is_inlined:
            plans &= self.stored[writes[0]]
        if not plans:
            return
        if not kernel.is_fusible:
            self._begin(plans)
        dying = self._read(each.reads, plans)
        # Results that nothing reads are freed at once.
        self.touch(writes, plans)
        begin = [(plans, each.nbytes)]
        if kernel.is_fusible:
            begin = self._write_over(dying, each, plans)
        for r, last in dying.items():
            self.add_change(last, -self.nbytes[r])
        scratch = (each.scratch or 0) * is_higher_order(each.node)
        scratch = self.rule.scratch.get(each.node, scratch)
        self.add_change(plans, -scratch)
        self.note_moment(step)
        self.add_change(plans, scratch)
        for change in begin:
            self.add_change(*change)
        for s in writes:
            self.add_change(plans & self.saved[s], -self.nbytes[s])

    def _read(self, storages: Iterable[int], plans: int) -> dict[int, int]:
        """The storages that a kernel is the last to read, with masks of plans."""
        dying: dict[int, int] = {}
        pending = [(s, plans) for s in storages]
        while pending:
            s, plans = pending.pop()
            # If a later kernel computes it as well, that one also reads its sources.
            last = plans & ~self.touched[s]
            if not last:
                continue
            self.touched[s] |= last
            if s in self.inlined:
                stored = last & self.stored[s]
                sources = self.inlined[s].operator.reads
                pending += [(r, last ^ stored) for r in sources]
                last = stored
            if last and self.is_freed[s]:
                dying[s] = dying.get(s, 0) | last
        return dict(sorted(dying.items()))

    def _write_over(
        self, dying: dict[int, int], each: Operator, plans: int
    ) -> list[tuple[int, int]]:
        """The changes in bytes where results are written, some over dying arguments."""
        changes: list[tuple[int, int]] = []
        parts = self.kernels[each.node].parts.difference(each.writes)
        able = self._are_one(parts, plans) if dying else 0
        shapes, free = self.rule.shapes, [r for r in dying if r not in self.owned]
        for s in each.writes:
            left = plans
            for r in free:
                is_alike = shapes.get(r) == shapes.get(s)
                over = left & able & dying[r] if is_alike else 0
                changes.append((over, self.nbytes[s] - self.nbytes[r]))
                dying[r] &= ~over
                left &= ~over
            self.together.append((left, self.nbytes[s]))
        return changes

    def _are_one(self, parts: frozenset[int], plans: int) -> int:
        """The plans in which inductor can compute all these parts in one kernel."""
        if len(parts) <= self.rule.most_operators:
            return plans
        found = {parts: plans}
        for s in sorted(parts & self.inlined.keys()):
            for some, of in [*found.items()]:
                # What is stored is read itself, in place of its parts.
                stored = of & self.stored[s] if s in some else 0
                if stored:
                    fewer = some - self.inlined[s].parts | {s}
                    found[some] &= ~stored
                    found[fewer] = found.get(fewer, 0) | stored
        few = (of for some, of in found.items() if self._is_one(some))
        return functools.reduce(operator.or_, few, 0)

    def _is_one(self, parts: frozenset[int]) -> bool:
        if len(parts) <= self.rule.most_operators:
            return True
        inlined, shapes = self.inlined, self.rule.shapes
        wide = (
            s
            for s in parts
            if shapes.get(s, (1,))[0] > 1
            and (s not in inlined or not inlined[s].parts <= parts)
        )
        # At most one can be read.
        return next(wide, None) is None or next(wide, None) is None

    def _begin(self, plans: int) -> None:
        """Allocate the results that are live together, before the first of them."""
        together, self.together = self.together, []
        for each, nbytes in together:
            self.add_change(each & plans, nbytes)
            if each & ~plans:
                self.together.append((each & ~plans, nbytes))

    def peaks(self, count: int, base: int = 0) -> list[list[int]]:
        self._begin(-1)
        return super().peaks(count, base)


def _runs_no_kernel(node: fx.Node) -> bool:
    """Whether a node is no call, or only a part or a view of another's value."""
    is_call = node.op == "call_function"
    return not is_call or node.target is operator.getitem or is_view(node)


def _is_reduction(node: fx.Node) -> bool:
    return torch.Tag.reduction in getattr(node.target, "tags", ())


def _is_pointwise(node: fx.Node, op_types: OpTypes) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and not _is_reduction(node)
        and (
            torch.Tag.pointwise in target.tags
            # Pointwise to inductor, though neither tagged nor so to the partitioner.
            or target.overloadpacket in (aten.cat, aten.embedding)
            or op_types.is_fusible(node)
        )
    )
