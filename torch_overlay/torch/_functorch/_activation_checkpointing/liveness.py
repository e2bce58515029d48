"""How many bytes a plan keeps live, operator by operator, before anything runs.

A plan is the set of values that the forward saves.  It decides which operators the
backward runs again and when, and so the peak.  :class:`JointGraph` reads a joint graph
once into integers; :meth:`JointGraph.evaluate` then takes a plan through both phases:

    >>> graph = JointGraph(joint_module.graph, node_info, num_fwd_outputs)
    >>> graph.evaluate(graph.storages(saved_values)).peak

Counted is what an interpreter of the two graphs has live while it runs an operator.  A
storage counts once, whole, however many views it has.  Parameters and inputs are live
anyway and do not count, nor does what a kernel allocates for itself.

The backward runs its own operators in their order, and each repeated one right before
the first that needs it.  What was traced in it without need of a tangent stays there.
"""

from __future__ import annotations

import copy
import operator
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
import torch.fx as fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from .random_ops import is_overwritten, is_replayed, must_run_once
from .rerun_cost import concrete, is_view


if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from torch._functorch.partitioners import NodeInfo

    # The results of each late operator, a node of the backward's own, and what that
    # reads and writes.
    _BackwardStep = tuple[
        tuple[tuple[int, ...], ...], fx.Node, tuple[int, ...], tuple[int, ...]
    ]


__all__ = ["CannotPlan", "Evaluation", "JointGraph", "Phase"]

# Plans that are evaluated together, at most: the bits of an integer with a sign.
_TOGETHER = 63


class CannotPlan(Exception):
    """The model does not understand a joint graph, or a plan for it cannot be run."""


class Evaluation(NamedTuple):
    """What a plan costs.

    Steps are those of the backward that read what the forward made, or an input for the
    last time, each with what is repeated for it, and with what runs since the one
    before.  A bit of a mask is a plan.

    Args:
        forward_peak: most live bytes while the forward runs.
        step_peaks: most live bytes in each step.
        bit: the plan's.
        repeats: the operators repeated for each step, in order, with their masks.
        repeated, kept: the masks of all operators and storages.
    """

    forward_peak: int
    step_peaks: list[int]
    bit: int
    repeats: list[list[tuple[int, int]]]
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


class _Step(NamedTuple):
    """A step of the backward, as an :class:`Evaluation` has them, or after ``late``.

    Those are the results of each operator without tangents that was traced here, which
    runs here if the plan repeats it.  ``own_*`` are the live bytes that the backward
    alone made: most of them since the last such step, those before this one, and those
    during it.
    """

    late: tuple[tuple[int, ...], ...]
    reads: tuple[int, ...]
    own_since: int
    own_before: int
    own_during: int


class Storages:
    """The storages of a graph's values, numbered in the order of their allocation.

    nbytes[s], keys[s]: a storage's size, and what tells it apart in other graphs too.
    own[node]: the storages of a node's value.
    held[node]: those that whoever reads the node reads.
    reads[node], writes[node]: those that a node reads, and those that it allocates.

    No storage need be live for a size that one of ``given_sizes`` is.  O(nodes + edges).
    Raises CannotPlan for values that have no storage to count.
    """

    def __init__(self, graph: fx.Graph, given_sizes: Container[fx.Node] = ()) -> None:
        self.nbytes: list[int] = []
        self.keys: list[int] = []
        self.own: dict[fx.Node, tuple[int, ...]] = {}
        self.held: dict[fx.Node, tuple[int, ...]] = {}
        self.reads: dict[fx.Node, tuple[int, ...]] = {}
        self.writes: dict[fx.Node, tuple[int, ...]] = {}
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            held = (s for source in node.all_input_nodes for s in self.held[source])
            reads = tuple(dict.fromkeys(held))
            value = node.meta.get("val")
            is_part = node.target is operator.getitem
            if is_part and isinstance(values[node.args[0]], (dict, list, tuple)):
                # Its own meta may be that of a twin, which was merged with this one.
                value = values[node.args[0]][node.args[1]]
            values[node] = value
            is_size = isinstance(value, py_sym_types)
            first = len(self.nbytes)
            own: tuple[int, ...] = ()
            # What a size is read from has to be live for that.
            if not is_size or (reads and node not in given_sizes):
                own = self._number(node, value, reads)
            self.own[node] = own
            self.held[node] = own or (() if is_size else reads)
            self.reads[node] = own if is_part else reads
            self.writes[node] = tuple(range(first, len(self.nbytes)))

    def _number(
        self, node: fx.Node, value: Any, reads: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The storages of a value, new ones unless they are read or another input's."""
        first = len(self.nbytes)
        found: dict[int, None] = {}
        for part in tree_leaves(value):
            if isinstance(part, torch.Tensor):
                try:
                    storage = part.untyped_storage()
                except (NotImplementedError, RuntimeError) as error:
                    raise CannotPlan(f"{node.name} has no storage to count") from error
                key, size = storage._cdata, storage.nbytes()
            elif isinstance(part, py_sym_types):
                key, size = id(part), 0
            else:
                continue
            # One result may be a view of another.
            known = (*reads, *range(first if reads else 0, len(self.nbytes)))
            s = next((s for s in known if self.keys[s] == key), -1)
            if s < 0 and reads and is_view(node):
                # Common subexpressions were merged: what is viewed is its twin.
                s = reads[0]
            if s < 0:
                s = len(self.nbytes)
                self.nbytes.append(concrete(size))
                self.keys.append(key)
            found[s] = None
        return tuple(found)


class JointGraph:
    """A joint graph as operators and storages, each numbered in the graph's order.

    Operators are nodes that allocate, except the backward's own, which need a tangent.
    Those that the forward does not need either run where they are read first.  Public:

    values: the storages of the graph's nodes, those of inputs without bytes, but for
        the copies of tangents that the backward works on.
    nodes[o], reads[o], writes[o]: an operator, and the storages it reads and allocates.
    repeatable[o]: whether the backward may run it.
    nbytes[s], producer[s]: a storage's size, and its operator or -1.
    saved_as[s]: the node to save in order to keep storage s, None where none can be.
    births[s], deaths[s]: the forward's steps that allocate it and read it last, or -1.
    outputs: the storages that the forward returns, which stay live in any plan.
    written_back: those that the caller copies into its inputs, live until it has.
    returned: those that the backward returns.
    tangents: the inputs of the backward alone.
    copied: the storages of those that are copied before they are read.
    forward_steps: how many steps the forward has at most.
    steps: the backward's, as in an :class:`Evaluation`; ``steps[k].reads`` are storages.
    own_nodes: for each step, the backward's own nodes from behind the step before to its
        own, which for the last step is the output.

    The first ``num_fwd_outputs`` outputs of the graph are the forward's.

    O(nodes + edges).  Raises CannotPlan for values that have no storage to count.
    """

    def __init__(
        self, graph: fx.Graph, node_info: NodeInfo, num_fwd_outputs: int
    ) -> None:
        (output,) = graph.find_nodes(op="output")
        results = tree_leaves(output.args)
        self._forward = set(node_info.required_fw_nodes)
        self._tangents_closure = node_info.tangents_closure
        self._bwd_outputs = _nodes(results[num_fwd_outputs:])
        self.values = Storages(graph, self._forward)
        self.nbytes = self.values.nbytes
        self._tangent_bytes = 0
        self.copied: set[int] = set()
        self._released: tuple[int, ...] = ()
        self.tangents: set[fx.Node] = set()
        self._calls: list[fx.Node] = []
        for node in graph.nodes:
            if node.op == "call_function":
                self._calls.append(node)
                continue
            for s in self.values.writes[node]:
                self.nbytes[s] = 0
            if self._is_tangent(node):
                self._receive(node)
        backward = self._classify(output)
        self.forward_steps = len(self._early)
        # The forward overwrites these inputs itself, or whoever calls it does.
        descriptions = list(output.meta.get("desc") or results)
        overwritten = {
            at: description.mutated_input
            for at, description in enumerate(descriptions)
            if isinstance(description, InputMutationAOTOutput)
        }
        returned = dict(enumerate(results[:num_fwd_outputs]))
        written_back = [value for at, value in returned.items() if at in overwritten]
        kept = [value for at, value in returned.items() if at not in overwritten]
        self.outputs = self._made_by_forward(kept)
        self.written_back = self._made_by_forward(written_back) - self.outputs
        self._lay_out_backward(backward)
        self._choose_what_to_save()
        self._choose_what_to_repeat(overwritten.values())

    def storages(self, nodes: Iterable[fx.Node]) -> set[int]:
        """The storages that saving these nodes keeps."""
        return {s for node in nodes for s in self.values.own.get(node, ())}

    def saveable(self, nodes: Iterable[fx.Node]) -> list[int]:
        """Of these storages, those that some node can be saved for."""
        found = self.storages(nodes)
        return [s for s in sorted(found) if self.saved_as[s] is not None]

    def size(self, storages: Iterable[int]) -> int:
        """Bytes of these storages."""
        return sum(self.nbytes[s] for s in storages)

    # ------------------------------------------------------------------ reading

    def _classify(self, output: fx.Node) -> list[_BackwardStep]:
        """Number the operators that the backward may run, and tell the phases apart."""
        self.nodes: list[fx.Node] = []
        self.reads: list[tuple[int, ...]] = []
        self.writes: list[tuple[int, ...]] = []
        self.producer = [-1] * len(self.nbytes)
        self.births = [-1] * len(self.nbytes)
        self.deaths = [-1] * len(self.nbytes)
        # Each node that needs no tangent, what it writes, with and without what it
        # reads, how many bytes that is, and whether the forward runs it in any plan.
        self._early: list[
            tuple[fx.Node, tuple[int, ...], tuple[int, ...], int, bool]
        ] = []
        needed = self._backward_nodes()
        backward: list[_BackwardStep] = []
        late: list[tuple[int, ...]] = []
        started = False
        for node in self._calls:
            required = node in self._forward
            if not required and node not in needed:
                continue
            started = started or any(map(self._is_tangent, node.all_input_nodes))
            reads, writes = self.values.reads[node], self.values.writes[node]
            if not self._is_early(node):
                backward.append((tuple(late), node, reads, writes))
                late.clear()
                continue
            if required:
                for s in writes:
                    self.births[s] = len(self._early)
                for s in (*reads, *writes):
                    self.deaths[s] = len(self._early)
            nbytes = self.size(writes)
            self._early.append((node, writes + reads, writes, nbytes, required))
            if started and not required:
                # A view has its place as well: what it is of comes before it.
                wanted = writes or tuple(s for s in reads if self.producer[s] >= 0)
                if wanted:
                    late.append(wanted)
            if writes:
                for s in writes:
                    self.producer[s] = len(self.nodes)
                self.nodes.append(node)
                self.reads.append(reads)
                self.writes.append(writes)
        backward.append((tuple(late), output, self._read_by(self._bwd_outputs), ()))
        return backward

    def _read_by(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        """The storages that whoever reads these nodes reads."""
        return tuple(s for node in nodes for s in self.values.held[node])

    def _made_by_forward(self, values: Iterable[Any]) -> set[int]:
        """Of the storages of these values, those that are no inputs."""
        return {s for s in self._read_by(_nodes(values)) if self.births[s] >= 0}

    def _receive(self, tangent: fx.Node) -> None:
        """Count a tangent: what the caller holds, and the copy that is made of it.

        Autograd makes gradients without gaps.  Where the output has some, as a slice
        has, so has the tangent that the graph was traced with, and AOTAutograd copies
        what it is given into such a one.
        """
        self.tangents.add(tangent)
        value = tangent.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        elements = concrete(value.numel())
        spans = (
            (concrete(size) - 1) * concrete(stride)
            for size, stride in zip(value.shape, value.stride())
        )
        extent = 1 + sum(spans)
        self._tangent_bytes += elements * value.itemsize
        for s in self.values.writes[tangent]:
            if extent > elements > 0:
                self.nbytes[s] = extent * value.itemsize
                self.copied.add(s)

    def _is_tangent(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and node in self._tangents_closure

    def _is_early(self, node: fx.Node) -> bool:
        """Whether a node needs no tangent."""
        return node in self._forward or node not in self._tangents_closure

    def _backward_nodes(self) -> set[fx.Node]:
        """The nodes that the backward runs, whatever is saved."""
        found: set[fx.Node] = set()
        pending = list(self._bwd_outputs)
        while pending:
            node = pending.pop()
            if node not in found and node not in self._forward:
                found.add(node)
                pending += node.all_input_nodes
        return found

    def _lay_out_backward(self, steps: Sequence[_BackwardStep]) -> None:
        """Work out what does not depend on the plan: the backward's own storages."""
        own = {s for *_, writes in steps for s in writes} | self.copied
        inputs = {s for s, op in enumerate(self.producer) if op < 0} - own
        last = {
            s: at
            for at, (*_, reads, writes) in enumerate(steps)
            for s in reads + writes
        }
        self.returned = set(self._read_by(self._bwd_outputs))
        dying: dict[int, int] = {}
        # What is never read stays to the end.
        for s in own.intersection(last) - self.returned:
            dying[last[s]] = dying.get(last[s], 0) + self.nbytes[s]
        self.steps: list[_Step] = []
        # The last step in which the backward's own operators read a storage.
        self._own_reads: dict[int, int] = {}
        self.own_nodes: list[list[fx.Node]] = [[]]
        live = most = self.held_by_caller + self.size(self.copied)
        for at, (late, node, reads, writes) in enumerate(steps):
            self.own_nodes[-1].append(node)
            self._own_reads.update(dict.fromkeys(reads, len(self.steps)))
            before = live
            live += self.size(writes)
            made = tuple(s for s in reads if self.producer[s] >= 0)
            is_last = any(s in inputs and last[s] == at for s in reads)
            if made or late or is_last or at == len(steps) - 1:
                self.steps.append(_Step(late, made, most, before, live))
                self.own_nodes.append([])
                most = 0
            else:
                most = max(most, live)
            live -= dying.get(at, 0)
        self._read_in_backward = {s for step in self.steps for s in step.reads}

    def _choose_what_to_save(self) -> None:
        self.saved_as: list[Optional[fx.Node]] = [None] * len(self.nbytes)
        self._saved_anyway: set[int] = set()
        replayed: set[int] = set()
        for node in self._calls:
            if is_replayed(node):
                # Nor may a view of it be saved.
                replayed.update(self.values.writes[node])
            elif self._is_early(node) and isinstance(
                node.meta.get("val"), torch.Tensor
            ):
                (s,) = self.values.own[node]
                # But for what one checkpoint hands to the next.
                is_kept = node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
                if is_kept:
                    self._saved_anyway.add(s)
                if is_kept or s not in replayed:
                    self.saved_as[s] = self.saved_as[s] or node

    def _choose_what_to_repeat(self, overwritten: Iterable[Any]) -> None:
        mutated = {
            s
            for node, held in self.values.held.items()
            if (node in self._forward and _is_mutable(node))
            or (
                node.op == "placeholder"
                and (is_overwritten(node) or node.meta.get("desc") in overwritten)
            )
            for s in held
        }
        self.repeatable = [
            node not in self._forward
            or not (
                must_run_once(node)
                or _is_mutable(node)
                # An input that the forward overwrites is another one in the backward.
                or not (mutated.isdisjoint(reads) or _only_updates_statistics(node))
            )
            for node, reads in zip(self.nodes, self.reads)
        ]
        self._prefer_small_results()
        self._needs = [
            tuple(s for s in reads if self.producer[s] >= 0) for reads in self.reads
        ]
        self._touches = self._needs
        self._written = [self.size(writes) for writes in self.writes]
        # A checkpoint's result is made again though the caller has it: that one dies.
        held = {s for s in self.outputs if self.saved_as[s] is not None}
        self._freeable = [
            op >= 0 and s not in held and nbytes > 0
            for s, (op, nbytes) in enumerate(zip(self.producer, self.nbytes))
        ]

    def _prefer_small_results(self) -> None:
        """Of an operator that must run once, keep what is made of it if it is smaller.

        That is dropout's mask, where the random numbers have no other use.
        """
        readers: list[set[int]] = [set() for _ in self.nbytes]
        for o, reads in enumerate(self.reads):
            for s in reads:
                readers[s].add(o)
        for o, (node, writes) in enumerate(zip(self.nodes, self.writes)):
            users = {user for s in writes for user in readers[s]}
            if (
                self.repeatable[o]
                or node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
                or not self._read_in_backward.isdisjoint(writes)
                or len(users) != 1
            ):
                continue
            (user,) = users
            made = self.writes[user]
            saveable = all(self.saved_as[s] is not None for s in made)
            if saveable and self.size(made) <= self.size(writes):
                self.repeatable[user] = False

    @property
    def held_by_caller(self) -> int:
        """Bytes of the tangents and of what the forward returned, in any step's peak."""
        return self._tangent_bytes + self.size(self.outputs)

    @property
    def lower_bound(self) -> int:
        """Bytes that no plan's peak is below: what single steps need in any case."""
        during = (
            step.own_during + self.size(set(step.reads) - self.outputs)
            for step in self.steps
        )
        since = (step.own_since for step in self.steps)
        (forward,) = self._forward_peaks([0] * len(self.nbytes), 1)
        return max(forward, *during, *since)

    def releasing(self, inputs: Mapping[int, int]) -> JointGraph:
        """The same where the backward alone holds some inputs, until their last use.

        ``inputs`` has their storages, which then count, and their bytes.
        """
        graph = copy.copy(self)
        graph._released = tuple(inputs)
        graph.nbytes = list(self.nbytes)
        graph._freeable = list(self._freeable)
        reads = [list(step.reads) for step in self.steps]
        for s, nbytes in inputs.items():
            graph.nbytes[s], graph._freeable[s] = nbytes, nbytes > 0
            if s in self._own_reads:
                reads[self._own_reads[s]].append(s)
        graph.steps = [
            step._replace(reads=tuple(own)) for step, own in zip(self.steps, reads)
        ]
        graph._touches = [
            touches + tuple(s for s in read if s in inputs)
            for touches, read in zip(self._touches, self.reads)
        ]
        return graph

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
        if len(plans) > _TOGETHER:
            first, others = plans[:_TOGETHER], plans[_TOGETHER:]
            return self.evaluate_all(first) + self.evaluate_all(others)
        count = len(plans)
        everyone = (1 << count) - 1
        saved = self.saved_by(plans)
        _, repeated = self.follow(saved, everyone)
        repeats = self._repeats_by_step(saved, repeated, everyone)
        step_peaks, kept = self._backward_peaks(repeats, saved, count)
        return [
            Evaluation(forward, backward, 1 << plan, repeats, repeated, kept)
            for plan, (forward, backward) in enumerate(
                zip(self._forward_peaks(kept, count), step_peaks)
            )
        ]

    def saved_by(self, plans: Sequence[Iterable[int]]) -> list[int]:
        """The plans that save each storage, as masks; a plan is a set of storages."""
        saved = [0] * len(self.nbytes)
        for plan, chosen in enumerate(plans):
            for s in chosen:
                if self.saved_as[s] is not None:
                    saved[s] |= 1 << plan
        for s in self.outputs | self._saved_anyway:
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
        # The hot loops of a search: local names, and no tuples to build.
        needs = self._needs
        needed = [0] * len(self.nbytes)
        for s in self._read_in_backward:
            needed[s] = everyone
        repeated = [0] * len(self.nodes)
        for op in reversed(range(len(self.nodes))):
            plans = 0
            for s in self.writes[op]:
                plans |= needed[s] & ~saved[s]
            if plans and not self.repeatable[op]:
                for s in self.writes[op]:
                    if needed[s] & ~saved[s] and self.saved_as[s] is None:
                        raise CannotPlan(
                            f"{self.nodes[op].name} can be neither saved nor repeated"
                        )
                    saved[s] |= needed[s]
            elif plans:
                repeated[op] = plans
                for s in needs[op]:
                    needed[s] |= plans
        return needed, repeated

    def _repeats_by_step(
        self, saved: Sequence[int], repeated: Sequence[int], everyone: int
    ) -> list[list[tuple[int, int]]]:
        """What is repeated for each step, in order, and by whom.

        What is late has its place: what it needs comes before it, and what the step
        itself needs behind.
        """
        producer, needs = self.producer, self._needs
        # No operator makes an input, whose producer is -1.
        left = [*repeated, 0]
        repeats: list[list[tuple[int, int]]] = []
        for step in self.steps:
            repeats.append([])
            for reads in (*step.late, step.reads):
                found: dict[int, int] = {}
                pending = [(s, everyone) for s in reads]
                while pending:
                    s, plans = pending.pop()
                    op = producer[s]
                    plans &= left[op] & ~saved[s]
                    if plans:
                        left[op] ^= plans
                        found[op] = found.get(op, 0) | plans
                        for read in needs[op]:
                            pending.append((read, plans))
                repeats[-1] += sorted(found.items())
        return repeats

    def _backward_peaks(
        self, repeats: list[list[tuple[int, int]]], saved: list[int], count: int
    ) -> tuple[list[list[int]], list[int]]:
        """The peaks of each plan's steps, and which plans keep each storage.

        A step starts, then come what is repeated for it and its own moment.
        """
        everyone = (1 << count) - 1
        phase = Phase(self, [0] * len(self.nbytes))
        for at in reversed(range(len(repeats))):
            step = self.steps[at]
            phase.touch(step.reads, everyone)
            phase.moment(at, step.own_during)
            for op, plans in reversed(repeats[at]):
                phase.touch(self._touches[op], plans)
                for s in self.writes[op]:
                    # A second one of what is saved is dropped at once.
                    again = plans & saved[s]
                    phase.change(again, -self.nbytes[s])
                    phase.touch((s,), plans & ~again)
                phase.moment(at, step.own_before)
                phase.change(plans, self._written[op])
            phase.moment(at, step.own_since)
        kept = self._keep(phase, saved)
        return phase.peaks(count), kept

    def _keep(self, phase: Phase, saved: Sequence[int]) -> list[int]:
        """Begin a backward with what is live by then; which plans keep each storage."""
        for s in (*self._released, *self.copied):
            phase.change(phase.touched[s], self.nbytes[s])
        kept = [plans & touching for plans, touching in zip(saved, phase.touched)]
        for s, plans in enumerate(kept):
            if plans and s not in self.outputs and s not in self._released:
                phase.change(plans, self.nbytes[s])
        return kept

    def _forward_peaks(self, kept: Sequence[int], count: int) -> list[int]:
        """The forward's peak in each plan.

        What only the backward needs is made where it was traced, if it is saved or if
        something is made of it that is.
        """
        everyone = (1 << count) - 1
        phase = Phase(self, list(kept))
        for s in self.outputs:
            phase.touched[s] = everyone
        phase.touch(self.written_back, everyone)
        for _, touches, writes, nbytes, required in reversed(self._early):
            plans = everyone if required else 0
            for s in writes:
                plans |= phase.touched[s]
            if plans:
                phase.touch(touches, plans)
                phase.moment(0, 0)
                if nbytes:
                    phase.change(plans, nbytes)
        phase.moment(0, 0)
        return [peak for (peak,) in phase.peaks(count)]

    def saved_values(self, saved: set[int]) -> list[fx.Node]:
        """The nodes to save, in the graph's order, so that ``saved`` storages are kept.

        Views are made again from what they view, and sizes are saved themselves.
        Raises CannotPlan where the backward would have to run what it must not.
        """
        chosen = {self.saved_as[s] for s in saved}
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        pending = list(self._bwd_outputs)
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            required = node in self._forward
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
        return [node for node in self.values.own if node in found]


class Phase:
    """The live bytes of many plans, from the last moment of a phase to the first.

    Who touches a storage last frees it; what is touched from the outset is not freed.
    """

    def __init__(self, graph: JointGraph, touched: list[int]) -> None:
        self.nbytes, self.freeable = graph.nbytes, graph._freeable
        self.touched = touched
        # By how many bytes the plans of a mask change, latest first.
        self.masks, self.changes = [0], [0]
        # For each moment its step, the change that it comes right before, and its bytes
        # beside what changes.
        self.moments: list[tuple[int, int, int]] = []

    def change(self, plans: int, nbytes: int) -> None:
        if plans:
            self.masks.append(plans)
            self.changes.append(nbytes)

    def touch(self, storages: Iterable[int], plans: int) -> None:
        for s in storages:
            last = plans & ~self.touched[s]
            if last:
                self.touched[s] |= last
                if self.freeable[s]:
                    self.change(last, -self.nbytes[s])

    def moment(self, step: int, own: int) -> None:
        self.moments.append((step, len(self.masks) - 1, own))

    def peaks(self, count: int) -> list[list[int]]:
        """For each of ``count`` plans, the most live bytes in each step."""
        # Whoever traces may have fake tensors for every tensor made.
        with _disable_current_modes(), torch.device("cpu"):
            of_plan = torch.tensor(self.masks).unsqueeze(1) >> torch.arange(count) & 1
            later = (of_plan * torch.tensor(self.changes).unsqueeze(1)).cumsum(0)
            steps, before, own = torch.tensor(self.moments).unbind(1)
            live = later[-1] - later[before] + own.unsqueeze(1)
            peaks = live.new_zeros(int(steps.max()) + 1, count)
            of_step = steps.unsqueeze(1).expand_as(live)
            return peaks.scatter_reduce_(0, of_step, live, "amax").T.tolist()


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _is_mutable(node: fx.Node) -> bool:
    """Whether the partitioner leaves the node to the phase that it was traced in."""
    target = node.target
    return node.meta.get("partitioner_tag") == "must_be_in_forward" or (
        isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    )


def _only_updates_statistics(node: fx.Node) -> bool:
    """Whether a node is a batch norm in training, whose result is that of the batch."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = str(target)
    if "batch_norm_with_update" in name:
        return True
    return "batch_norm" in name and any(
        argument.name in ("training", "train") and value is True
        for argument, value in zip(target._schema.arguments, node.args)
    )
