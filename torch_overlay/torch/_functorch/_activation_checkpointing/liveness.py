"""How many bytes a plan keeps live, operator by operator, before anything runs.

A plan is the set of values that the forward saves.  It decides which operators the
backward runs again and when, and so the peak.  :func:`read` reads a joint graph once
into a :class:`Program`, which takes a plan through both phases:

    >>> program = read(joint_module.graph, node_info, num_fwd_outputs)
    >>> program.evaluate(program.storages(saved_values)).peak

It counts what an interpreter of the two graphs has live while it runs an operator, or
what another :class:`Timeline` says.  A storage counts once, whole, however many views it
has.  Parameters and inputs are live anyway and do not count, nor does what a kernel
allocates for itself, nor what is on another device than the plan is for.

The backward runs its own operators in their order, and each repeated one right before
the first that needs it.  What was traced in it without need of a tangent stays there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
import torch.fx as fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from .random_ops import is_replayed, must_run_once
from .rerun_cost import concrete
from .storages import CannotPlan, device_of, has_bodies, Operator, Storages


if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from torch._functorch.partitioners import NodeInfo

    # For each step of the backward, the operators that are repeated for it, in order,
    # with the mask of the plans that do so.
    Repeats = list[list[tuple[int, int]]]


__all__ = [
    "CannotPlan",
    "Evaluation",
    "Operator",
    "Program",
    "Step",
    "Timeline",
    "read",
]

# Most plans in a tensor: the value bits of a signed 64-bit integer.
_TOGETHER = 63
# What a tensor of plans may take of the bytes that they are about: a CPU may have both.
_SHARE = 1 / 64


class Evaluation(NamedTuple):
    """What a plan costs.  A bit of a mask is a plan.

    Args:
        forward_peak: most live bytes while the forward runs.
        step_peaks: most live bytes in each :class:`Step` of the backward.
        bit: the plan's.
        repeats: the operators repeated for each step, in order, with their masks.
        repeated, kept: the masks of all operators and storages.
    """

    forward_peak: int
    step_peaks: list[int]
    bit: int
    repeats: Repeats
    repeated: list[int]
    kept: list[int]

    @property
    def peak(self) -> int:
        return max(self.forward_peak, *self.step_peaks, 0)

    @property
    def repeated_by_step(self) -> list[list[int]]:
        bit = self.bit
        return [[op for op, plans in step if plans & bit] for step in self.repeats]

    @property
    def saved(self) -> set[int]:
        """The storages that are really kept."""
        return {s for s, plans in enumerate(self.kept) if plans & self.bit}


class Step(NamedTuple):
    """An operator of the backward's own, which needs a tangent; the output is the last.

    Args:
        traced: the results of each operator traced before it, behind a tangent that it
            does not need, which runs here if the plan repeats it.
    """

    operator: Operator
    traced: tuple[tuple[int, ...], ...]


class Timeline:
    """The live bytes of many plans, from the last moment of a phase to the first.

    Whoever touches a storage last frees it.  ``kept`` are the plans that have each storage
    for the backward: the forward does not free it, and the backward does not make it.

    Here, each operator runs by itself, and its results are stored.
    """

    def __init__(self, program: Program, kept: Sequence[int], is_forward: bool) -> None:
        self.nbytes, self.freeable = program.nbytes, program.freeable
        none = [0] * len(kept)
        self.touched, self.saved = ([*kept], none) if is_forward else (none, kept)
        # By how many bytes the plans of a mask change, latest first.
        self.masks, self.changes = [0], [0]
        # For each moment its step, and the change that it comes right before.
        self.moments: list[tuple[int, int]] = []

    def change(self, plans: int, nbytes: int) -> None:
        if plans and nbytes:
            self.masks.append(plans)
            self.changes.append(nbytes)

    def touch(self, storages: Iterable[int], plans: int) -> None:
        for s in storages:
            last = plans & ~self.touched[s]
            self.touched[s] |= last
            if self.freeable[s]:
                self.change(last, -self.nbytes[s])

    def moment(self, step: int) -> None:
        self.moments.append((step, len(self.masks) - 1))

    def run(self, each: Operator, plans: int, step: int) -> None:
        """An operator with its moment, in these plans."""
        if not plans:
            return
        self.touch(each.reads, plans)
        for s in each.writes:
            # A second one of what is saved is dropped at once, and what nobody reads.
            again = plans & self.saved[s]
            self.change(again, -self.nbytes[s])
            self.touch((s,), plans & ~again)
        # What it has live meanwhile.
        scratch = each.scratch or 0
        self.change(plans, -scratch)
        self.moment(step)
        self.change(plans, each.nbytes + scratch)

    def peaks(self, count: int, base: int = 0) -> list[list[int]]:
        """For each of ``count`` plans, the most live bytes in each step, over ``base``."""
        found: list[list[int]] = []
        # Whoever traces may have fake tensors for every tensor made.
        with _disable_current_modes(), torch.device("cpu"):
            changes = torch.tensor(self.changes).unsqueeze(1)
            steps, before = torch.tensor(self.moments).unbind(1)
            most = int(_SHARE * sum(self.nbytes)) // changes.nbytes
            together = min(max(most, 1), _TOGETHER)
            for first in range(0, count, together):
                several = min(count - first, together)
                everyone = (1 << several) - 1
                masks = torch.tensor([mask >> first & everyone for mask in self.masks])
                of_plan = masks.unsqueeze(1) >> torch.arange(several) & 1
                later = (of_plan * changes).cumsum(0)
                live = later[-1] - later[before] + base
                peaks = live.new_zeros(int(steps.max()) + 1, several)
                of_step = steps.unsqueeze(1).expand_as(live)
                found += peaks.scatter_reduce_(0, of_step, live, "amax").T.tolist()
        return found


@dataclass(frozen=True, eq=False)
class Program:
    """A joint graph as operators and storages, each numbered in the graph's order.

    Numbered are operators that allocate, except the backward's own, which need a tangent.
    Those that the forward does not need either run where they are read first.

    Args:
        values: the storages of each node's value.
        nbytes: of each storage; 0 for an input, but for the copy that is made of a
            tangent for the backward.
        producer: the operator that allocates it, or -1.
        first_use, last_use: the operators of ``forward`` that allocate it and read it
            last, of those that the forward runs in any plan, or -1.
        saved_as: the node to save in order to keep it, None where none can be.
        always_saved: what is kept in any plan that needs it.
        operators: those that are numbered.
        repeatable: whether the backward may run each of them.
        forward: all nodes that need no tangent, views as well.
        steps: the backward's.
        outputs: the storages that the forward returns, which stay live in any plan.
        written_back: those that the caller copies into its inputs, live until it has.
        tangents, tangent_bytes: the inputs of the backward alone, and what these take.
        owned: the inputs that the backward alone holds, until their last use.
        required: the nodes that the forward runs in any plan.
        gradients: the nodes that the backward returns.
        timeline: how the operators of a phase run.
    """

    values: dict[fx.Node, tuple[int, ...]]
    nbytes: list[int]
    producer: list[int]
    first_use: list[int]
    last_use: list[int]
    saved_as: list[Optional[fx.Node]]
    always_saved: set[int]
    operators: list[Operator]
    repeatable: list[bool]
    forward: list[Operator]
    steps: list[Step]
    outputs: set[int]
    written_back: set[int]
    tangents: set[fx.Node]
    tangent_bytes: int
    owned: frozenset[int]
    required: Container[fx.Node]
    gradients: list[fx.Node]
    timeline: Callable[..., Timeline] = Timeline

    @functools.cached_property
    def nodes(self) -> list[fx.Node]:
        """Those of the operators."""
        return [each.node for each in self.operators]

    @property
    def is_fused(self) -> bool:
        """Whether these are kernels of inductor's."""
        return self.timeline is not Timeline

    @functools.cached_property
    def with_bodies(self) -> list[Operator]:
        """The higher-order operators that have more live than their results, or may."""
        calls = (*self.forward, *(step.operator for step in self.steps))
        return [each for each in calls if each.scratch != 0 and has_bodies(each.node)]

    @property
    def returned(self) -> tuple[int, ...]:
        """The storages that the backward returns, which stay live in it."""
        return self.steps[-1].operator.reads

    @functools.cached_property
    def freeable(self) -> list[bool]:
        """Whether each storage goes when nobody reads it any more."""
        # A checkpoint's result is made again though the caller has it: that one goes.
        held = {s for s in self.outputs if self.saved_as[s] is not None}
        return [nbytes > 0 and s not in held for s, nbytes in enumerate(self.nbytes)]

    @property
    def held_by_caller(self) -> int:
        """Bytes of the tangents and of what the forward returned, in any step's peak."""
        return self.tangent_bytes + self.size(self.outputs)

    def storages(self, nodes: Iterable[fx.Node]) -> set[int]:
        """The storages that saving these nodes keeps."""
        return {s for node in nodes for s in self.values.get(node, ())}

    def saveable(self, nodes: Iterable[fx.Node]) -> list[int]:
        """Of these storages, those that some node can be saved for."""
        found = self.storages(nodes)
        return [s for s in sorted(found) if self.saved_as[s] is not None]

    def size(self, storages: Iterable[int]) -> int:
        """Bytes of these storages."""
        return sum(self.nbytes[s] for s in storages)

    def releasing(self, alone: Mapping[int, int]) -> Program:
        """The same where the backward alone holds some storages, until their last use.

        ``alone`` has these, and their bytes: of inputs, which then count, and of what the
        forward returned.  A tangent that is copied is not read any more then: its copy
        counts anyway.
        """
        returned = self.outputs & alone.keys()
        inputs = alone.keys() - returned
        nbytes = [*self.nbytes]
        for s in inputs - self.owned:
            nbytes[s] = alone[s]
        return replace(
            self,
            nbytes=nbytes,
            owned=self.owned | inputs,
            outputs=self.outputs - returned,
            always_saved=self.always_saved | returned,
        )

    # --------------------------------------------------------------- evaluating

    def evaluate(self, chosen: Iterable[int]) -> Evaluation:
        """Take the plan that saves the ``chosen`` storages through both phases.

        What cannot be repeated is saved even if it is not chosen.  O(operators + edges).
        Raises CannotPlan where something can neither be saved nor repeated.
        """
        return self.evaluate_all([chosen])[0]

    def evaluate_all(self, plans: Sequence[Iterable[int]]) -> list[Evaluation]:
        """Evaluate many plans, in little more time than a few.

        The bits of an integer stand for plans, so that what many of them repeat for the
        same step is followed once, and the columns of a tensor for their live bytes.
        """
        count = len(plans)
        everyone = (1 << count) - 1
        saved = self.saved_by(plans)
        _, repeated = self.follow(saved, everyone)
        repeats = self.repeats_by_step(saved, repeated, everyone)
        step_peaks, kept = self._backward_peaks(repeats, saved, count)
        forward_peaks = self.forward_peaks(kept, count)
        return [
            Evaluation(forward, steps, 1 << plan, repeats, repeated, kept)
            for plan, (forward, steps) in enumerate(zip(forward_peaks, step_peaks))
        ]

    def saved_by(self, plans: Sequence[Iterable[int]]) -> list[int]:
        """The plans that save each storage, as masks; a plan is a set of storages."""
        saved = [0] * len(self.nbytes)
        for plan, chosen in enumerate(plans):
            for s in chosen:
                if self.saved_as[s] is not None:
                    saved[s] |= 1 << plan
        for s in self.outputs | self.always_saved:
            if self.saved_as[s] is not None:
                saved[s] = (1 << len(plans)) - 1
        return saved

    def follow(self, saved: list[int], everyone: int) -> tuple[list[int], list[int]]:
        """The plans that need each storage in the backward, and that repeat each operator.

        ``saved`` has a mask for each storage and ``everyone`` is the mask of all plans,
        of which there may be any number.  Adds to ``saved`` what cannot be repeated; a
        plan keeps what it saves and needs.  O(operators + edges), on integers of a bit
        for each plan.  Raises CannotPlan as :meth:`evaluate` does.
        """
        needed = [0] * len(self.nbytes)
        for step in self.steps:
            for s in step.operator.reads:
                needed[s] = everyone
        repeated = [0] * len(self.operators)
        for op in reversed(range(len(self.operators))):
            node, reads, writes, *_ = self.operators[op]
            plans = 0
            for s in writes:
                plans |= needed[s] & ~saved[s]
            if plans and not self.repeatable[op]:
                for s in writes:
                    if needed[s] & ~saved[s] and self.saved_as[s] is None:
                        raise CannotPlan(
                            f"{node.name} can be neither saved nor repeated"
                        )
                    saved[s] |= needed[s]
            elif plans:
                repeated[op] = plans
                for s in reads:
                    needed[s] |= plans
        return needed, repeated

    def repeats_by_step(
        self, saved: Sequence[int], repeated: Sequence[int], everyone: int
    ) -> Repeats:
        """What is repeated for each step, in order, and by whom.

        An operator that was traced in the backward has its place: what it needs comes
        before it, and what the step itself needs behind.
        """
        # No operator makes an input, whose producer is -1.
        left = [*repeated, 0]
        repeats: Repeats = []
        for step in self.steps:
            repeats.append([])
            for reads in (*step.traced, step.operator.reads):
                found: dict[int, int] = {}
                pending = [(s, everyone) for s in reads]
                while pending:
                    s, plans = pending.pop()
                    op = self.producer[s]
                    plans &= left[op] & ~saved[s]
                    if plans:
                        left[op] ^= plans
                        found[op] = found.get(op, 0) | plans
                        for read in self.operators[op].reads:
                            pending.append((read, plans))
                repeats[-1] += sorted(found.items())
        return repeats

    def _backward_peaks(
        self, repeats: Repeats, saved: Sequence[int], count: int
    ) -> tuple[list[list[int]], list[int]]:
        """The peaks of each plan's steps, and which plans keep each storage."""
        everyone = (1 << count) - 1
        timeline = self.timeline(self, saved, is_forward=False)
        timeline.touch(self.returned, everyone)
        for at in reversed(range(len(repeats))):
            timeline.run(self.steps[at].operator, everyone, at)
            for op, plans in reversed(repeats[at]):
                timeline.run(self.operators[op], plans, at)
        timeline.moment(0)
        # What is live by then.
        for s in self.owned:
            timeline.change(timeline.touched[s], self.nbytes[s])
        kept = [plans & reading for plans, reading in zip(saved, timeline.touched)]
        for s, plans in enumerate(kept):
            if s not in self.outputs:
                timeline.change(plans, self.nbytes[s])
        return timeline.peaks(count, self.held_by_caller), kept

    def forward_peaks(self, kept: Sequence[int], count: int) -> list[int]:
        """The forward's peak in each plan.

        What only the backward needs is made where it was traced, if it is saved or if
        something is made of it that is.
        """
        everyone = (1 << count) - 1
        timeline = self.timeline(self, kept, is_forward=True)
        timeline.touch(self.outputs | self.written_back | self.owned, everyone)
        for each in reversed(self.forward):
            plans = everyone if each.is_required else 0
            for s in each.writes:
                plans |= timeline.touched[s]
            timeline.run(each, plans, 0)
        timeline.moment(0)
        return [peak for (peak,) in timeline.peaks(count)]

    def saved_values(self, saved: set[int]) -> list[fx.Node]:
        """The nodes to save, in the graph's order, so that ``saved`` storages are kept.

        Views are made again from what they view, and sizes are saved themselves.
        Raises CannotPlan where the backward would have to run what it must not.
        """
        chosen = {self.saved_as[s] for s in saved}
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        pending = [*self.gradients]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            required = node in self.required
            value = node.meta.get("val")
            given = node.op == "placeholder" or isinstance(value, py_sym_types)
            if node in chosen or (required and given):
                found.add(node)
            elif required and node.op == "call_function" and must_run_once(node):
                if not isinstance(value, torch.Tensor):
                    raise CannotPlan(f"{node.name} must not run twice")
                found.add(node)
            else:
                pending += node.all_input_nodes
        return [node for node in self.values if node in found]


# --------------------------------------------------------------------- reading


def read(
    graph: fx.Graph,
    node_info: NodeInfo,
    num_fwd_outputs: int,
    number: Callable[[Any], int] = concrete,
    device: Optional[torch.device] = None,
) -> Program:
    """The program of a joint graph, whose first outputs, so many, are the forward's.

    ``number`` tells what a symbolic size is; by default, its hint.  Only bytes of the
    ``device`` count, by default those of the graph's own (:func:`.storages.device_of`).
    O(nodes + edges).  Raises CannotPlan for values that have no storage to count.
    """
    (output,) = graph.find_nodes(op="output")
    results = tree_leaves(output.args)
    required, closure = set(node_info.required_fw_nodes), node_info.tangents_closure
    backward = {node for node in graph.nodes if node in closure} - required
    tangents = {node for node in backward if node.op == "placeholder"}
    device = device_of(graph) if device is None else device
    storages = Storages(graph, required, tangents, number, device)
    nbytes = storages.nbytes
    gradients = _nodes(results[num_fwd_outputs:])
    forward = [each for each in storages.calls if each.node not in backward]
    operators = [each for each in forward if each.writes]
    producer = _producers(operators, len(nbytes))
    first_use, last_use = _live_ranges(forward, len(nbytes))
    end = Operator(output, storages.read_by(gradients), (), 0, False)
    calls = [*storages.calls, end]
    owned = storages.copied.intersection(s for each in calls for s in each.reads)
    # A copy that nothing reads stays to the end.
    unread = sum(nbytes[s] for s in storages.copied - owned)
    saved_as, always_saved = _choose_what_to_save(storages, backward, producer)
    copied = _written_back(output)
    places = [*enumerate(results[:num_fwd_outputs])]
    returned = _nodes(node for at, node in places if at not in copied)
    to_inputs = _nodes(node for at, node in places if at in copied)
    outputs = {s for s in storages.read_by(returned) if first_use[s] >= 0}
    written_back = {s for s in storages.read_by(to_inputs) if first_use[s] >= 0}
    program = Program(
        storages.values,
        nbytes,
        producer,
        first_use,
        last_use,
        saved_as,
        always_saved,
        operators,
        [not (each.is_required and _runs_once(each.node)) for each in operators],
        forward,
        _steps(calls, backward),
        outputs,
        written_back - outputs,
        tangents,
        storages.tangent_bytes + unread,
        frozenset(owned),
        required,
        gradients,
    )
    _prefer_small_results(program)
    return program


def _producers(operators: list[Operator], count: int) -> list[int]:
    """The operator that allocates each storage, or -1."""
    producer = [-1] * count
    for op, each in enumerate(operators):
        for s in each.writes:
            producer[s] = op
    return producer


def _written_back(output: fx.Node) -> set[int]:
    """The places of the results that the caller copies into its inputs."""
    return {
        at
        for at, description in enumerate(output.meta.get("desc") or ())
        if isinstance(description, InputMutationAOTOutput)
    }


def _live_ranges(forward: list[Operator], count: int) -> tuple[list[int], list[int]]:
    """Where the forward allocates each storage and reads it last, in any plan; or -1."""
    first, last = [-1] * count, [-1] * count
    for at, each in enumerate(forward):
        if each.is_required:
            for s in each.writes:
                first[s] = at
            for s in (*each.reads, *each.writes):
                last[s] = at
    return first, last


def _steps(calls: list[Operator], backward: set[fx.Node]) -> list[Step]:
    """The steps of a backward; the last of ``calls`` is the output."""
    steps: list[Step] = []
    traced: list[tuple[int, ...]] = []
    started = False
    for each in calls:
        node = each.node
        started = started or any(
            read.op == "placeholder" and read in backward
            for read in node.all_input_nodes
        )
        if node in backward or node.op == "output":
            steps.append(Step(each, tuple(traced)))
            traced.clear()
        elif started and not each.is_required:
            # A view has its place as well: what it is of comes before it.
            traced.append(each.writes or each.reads)
    return steps


def _choose_what_to_save(
    storages: Storages, backward: set[fx.Node], producer: list[int]
) -> tuple[list[Optional[fx.Node]], set[int]]:
    """The node to save for each storage, and the storages that checkpoints keep."""
    saved_as: list[Optional[fx.Node]] = [None] * len(producer)
    always_saved: set[int] = set()
    replayed: set[int] = set()
    for each in storages.calls:
        node = each.node
        if is_replayed(node):
            # Nor may a view of it be saved.
            replayed.update(each.writes)
        elif node not in backward and isinstance(node.meta.get("val"), torch.Tensor):
            (s,) = storages.values[node]
            # But for what one checkpoint hands to the next.
            is_kept = node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
            if is_kept:
                always_saved.add(s)
            # An input is there anyway.
            if producer[s] >= 0 and (is_kept or s not in replayed):
                saved_as[s] = saved_as[s] or node
    return saved_as, always_saved


def _prefer_small_results(program: Program) -> None:
    """Of an operator that must run once, keep what is made of it if it is smaller.

    That is dropout's mask, where the random numbers have no other use.
    """
    needed = {s for step in program.steps for s in step.operator.reads}
    readers: list[set[int]] = [set() for _ in program.nbytes]
    for op, each in enumerate(program.operators):
        for s in each.reads:
            readers[s].add(op)
    for op, each in enumerate(program.operators):
        users = {user for s in each.writes for user in readers[s]}
        if (
            program.repeatable[op]
            or each.node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
            or not needed.isdisjoint(each.writes)
            or len(users) != 1
        ):
            continue
        (user,) = users
        made = program.operators[user]
        saveable = all(program.saved_as[s] is not None for s in made.writes)
        if saveable and made.nbytes <= each.nbytes:
            program.repeatable[user] = False


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _runs_once(node: fx.Node) -> bool:
    """Whether the backward must not run a node that the forward runs."""
    target = node.target
    return (
        must_run_once(node)
        # The partitioner leaves these to the phase that they were traced in.
        or node.meta.get("partitioner_tag") == "must_be_in_forward"
        or (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable)
    )
