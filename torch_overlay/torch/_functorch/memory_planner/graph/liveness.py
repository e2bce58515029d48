"""How many bytes a plan keeps live, operator by operator, before anything runs.

A plan is the set of values that the forward saves.  It determines which operators the
backward repeats and when, and thus the peak.  :func:`.graph.reading.read_joint` reads a
joint graph once into a :class:`Program`, which takes a plan through both phases:

    >>> program = read_joint(joint_module.graph, node_info, num_fwd_outputs)
    >>> program.evaluate(program.storages(saved_values)).peak

It counts what an interpreter of the two graphs has live while it runs an operator; a
subclass of :class:`.LiveBytes` may count otherwise.  A storage counts once, whole,
however many views it has.  Parameters and inputs are live anyway and do not count.
Neither do a kernel's own workspace and values on devices other than the planned one.

The backward runs its own operators in their order, and each repeated one right before
the first that needs it.  An operator that was traced in the backward but needs no
tangent stays in its place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import py_sym_types

from ..._activation_checkpointing.random_ops import is_higher_order, must_run_once
from .live_bytes import LiveBytes
from .storages import CannotPlan, Operator


if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    # For each step of the backward, the operators that are repeated for it, in order,
    # each with the mask of the plans that repeat it.
    Repeats = list[list[tuple[int, int]]]


class Evaluation(NamedTuple):
    """The peaks of a plan, and what it repeats and keeps.

    Plans that were evaluated together share masks, in which each has one bit.

    Args:
        forward_peak: most live bytes while the forward runs.
        step_peaks: most live bytes in each :class:`BackwardStep` of the backward.
        bit: the plan's bit in each mask.
        repeats: the operators repeated for each step, in order, with their masks.
        repeated, kept: for each operator or storage, the plans that repeat or keep it.
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
    def recomputed_by_step(self) -> list[list[int]]:
        bit = self.bit
        return [[op for op, plans in step if plans & bit] for step in self.repeats]

    @property
    def saved(self) -> set[int]:
        """The storages that the plan actually keeps."""
        return {s for s, plans in enumerate(self.kept) if plans & self.bit}


class BackwardStep(NamedTuple):
    """One of the backward's own operators, which need a tangent; the output is last.

    Args:
        operator: the backward's own.
        traced: the results of each operator without need of a tangent that was traced
            right before it, once the backward had begun.  Such an operator runs here if
            the plan repeats it.
    """

    operator: Operator
    traced: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Program:
    """A joint graph as operators and storages, each numbered in the graph's order.

    Only operators that allocate and need no tangent are numbered: plans decide where
    these run.  One that the forward does not need either runs where it is first read.

    Args:
        values: the storages of each node's value.
        nbytes: the bytes of each storage; 0 for an input, except for the copy that is
            made of a tangent for the backward.
        producer: for each storage, the operator that allocates it, or -1.
        first_use, last_use: for each storage, where in ``forward`` it is allocated and
            last used by operators that run there in every plan; or -1.
        saved_as: for each storage, the node to save in order to keep it, or None if it
            cannot be saved.
        always_saved: the storages that every plan keeps if it needs them.
        operators: the numbered ones.
        recomputable: whether the backward may run each of them.
        forward: all operators that need no tangent, views included.
        steps: the steps of the backward.
        outputs: the storages that the forward returns, which stay live in every plan.
        written_back: those that the caller copies into its inputs, live until then.
        tangents, tangent_bytes: the inputs of the backward alone, and their bytes.
        owned: the inputs that the backward alone holds, until their last use.
        is_retained: whether autograd holds what was saved beyond the backward.
        required: the nodes that the forward runs in every plan.
        results: what the forward returns: nodes, and constants.
        gradients: the nodes that the backward returns.
        timeline: the class that counts the live bytes of a phase.
        unsized: the name of the first node whose size depends on data, if any.
    """

    values: dict[fx.Node, tuple[int, ...]]
    nbytes: list[int]
    producer: list[int]
    first_use: list[int]
    last_use: list[int]
    saved_as: list[Optional[fx.Node]]
    always_saved: set[int]
    operators: list[Operator]
    recomputable: list[bool]
    forward: list[Operator]
    steps: list[BackwardStep]
    outputs: set[int]
    written_back: set[int]
    tangents: set[fx.Node]
    tangent_bytes: int
    owned: frozenset[int]
    required: Container[fx.Node]
    results: list[Any]
    gradients: list[fx.Node]
    timeline: Callable[..., LiveBytes] = LiveBytes
    unsized: str = ""
    is_retained: bool = False

    @functools.cached_property
    def nodes(self) -> list[fx.Node]:
        """The nodes of the numbered operators."""
        return [each.node for each in self.operators]

    @property
    def is_fused(self) -> bool:
        """Whether live bytes are counted for inductor's kernels."""
        return self.timeline is not LiveBytes

    @functools.cached_property
    def operators_with_bodies(self) -> list[Operator]:
        """The higher-order operators that have, or may have, scratch bytes."""
        calls = (*self.forward, *(step.operator for step in self.steps))
        scratch = (each for each in calls if each.scratch != 0)
        return [each for each in scratch if is_higher_order(each.node)]

    def check_sizes(self) -> None:
        """Raise CannotPlan if the size of some storage depends on data."""
        if self.unsized:
            raise CannotPlan(f"the size of {self.unsized} depends on data")

    @property
    def returned(self) -> tuple[int, ...]:
        """The storages that the backward returns, which stay live in it."""
        return self.steps[-1].operator.reads

    @property
    def storages_returned(self) -> list[tuple[int, int]]:
        """The storages that the forward returns, each with the index of its result."""
        results = enumerate(self.results)
        return [(s, index) for index, node in results for s in self.storages([node])]

    @functools.cached_property
    def is_freed(self) -> list[bool]:
        """Whether each storage is freed after its last use."""
        # An output that no plan saves (as within a checkpoint) is made again for the
        # backward, and that copy is freed.
        held = {s for s in self.outputs if self.saved_as[s] is not None}
        return [nbytes > 0 and s not in held for s, nbytes in enumerate(self.nbytes)]

    @property
    def held_by_caller(self) -> int:
        """Bytes of tangents and of the forward's outputs, part of every step's peak."""
        return self.tangent_bytes + self.nbytes_of(self.outputs)

    def storages(self, nodes: Iterable[fx.Node]) -> set[int]:
        """The storages that saving these nodes keeps."""
        return {s for node in nodes for s in self.values.get(node, ())}

    def saveable_storages(self, nodes: Iterable[fx.Node]) -> list[int]:
        """The storages of these nodes that can be saved, in order."""
        found = self.storages(nodes)
        return [s for s in sorted(found) if self.saved_as[s] is not None]

    def nbytes_of(self, storages: Iterable[int]) -> int:
        """The total bytes of these storages."""
        return sum(self.nbytes[s] for s in storages)

    def releasing(self, alone: Mapping[int, int], is_retained: bool) -> Program:
        """The same, where the backward alone holds some storages until their last use.

        ``alone`` maps these to their bytes.  They may be inputs, which then count, and
        outputs of the forward.  A tangent that is copied is only read for that, and the
        copy counts in any case.
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
            is_retained=is_retained,
        )

    # --------------------------------------------------------------- evaluating

    def evaluate(self, chosen: Iterable[int]) -> Evaluation:
        """Take the plan that saves the ``chosen`` storages through both phases.

        What the backward needs but cannot repeat is saved even if not chosen.
        O(operators + edges).
        Raises CannotPlan if something can neither be saved nor repeated.
        """
        return self.evaluate_all([chosen])[0]

    def evaluate_all(self, plans: Sequence[Iterable[int]]) -> list[Evaluation]:
        """Evaluate many plans, in little more time than a few.

        Each bit of an integer stands for one plan, so what many plans repeat for the
        same step is followed only once.  Their live bytes are the columns of a tensor.
        """
        count = len(plans)
        everyone = (1 << count) - 1
        saved = self.masks_of_saving_plans(plans)
        needed, repeated = self.find_recomputed(saved, everyone)
        kept = [plans & needing for plans, needing in zip(saved, needed)]
        repeats = self.recomputes_by_step(saved, repeated, everyone)
        step_peaks = self._backward_peaks(repeats, saved, kept, count)
        forward_peaks = self.forward_peaks(kept, count)
        return [
            Evaluation(forward, steps, 1 << plan, repeats, repeated, kept)
            for plan, (forward, steps) in enumerate(zip(forward_peaks, step_peaks))
        ]

    def masks_of_saving_plans(self, plans: Sequence[Iterable[int]]) -> list[int]:
        """For each storage, the mask of the plans (sets of storages) that save it."""
        saved = [0] * len(self.nbytes)
        for plan, chosen in enumerate(plans):
            for s in chosen:
                if self.saved_as[s] is not None:
                    saved[s] |= 1 << plan
        for s in self.outputs | self.always_saved:
            if self.saved_as[s] is not None:
                saved[s] = (1 << len(plans)) - 1
        return saved

    def find_recomputed(
        self, saved: list[int], everyone: int
    ) -> tuple[list[int], list[int]]:
        """Find what the backward needs and repeats, given what plans save.

        ``saved`` has the mask of the plans that save each storage; what cannot be
        repeated is added to it.  ``everyone`` is the mask of all plans.  Returns the
        masks of the plans that need each storage in the backward, and of those that
        repeat each operator.  A plan keeps what it both saves and needs.
        O(operators + edges), on integers of one bit per plan.
        Raises CannotPlan as :meth:`evaluate` does.
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
            if plans and not self.recomputable[op]:
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

    def recomputes_by_step(
        self, saved: Sequence[int], repeated: Sequence[int], everyone: int
    ) -> Repeats:
        """What is repeated for each step, in order, with the masks of the plans.

        Operators that were traced in the backward come first, each after what it needs;
        then what the step itself needs.
        """
        # Inputs have the producer -1: the last entry, as they are never repeated.
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
        self, repeats: Repeats, saved: Sequence[int], kept: Sequence[int], count: int
    ) -> list[list[int]]:
        """The peaks of each plan's steps, where plans keep each storage as ``kept``."""
        everyone = (1 << count) - 1
        timeline = self.timeline(self, saved, is_forward=False)
        timeline.touch(self.returned, everyone)
        for s, plans in enumerate(kept if self.is_retained else ()):
            timeline.touch((s,), plans)
        for at in reversed(range(len(repeats))):
            timeline.run(self.steps[at].operator, everyone, at)
            for op, plans in reversed(repeats[at]):
                timeline.run(self.operators[op], plans, at)
        timeline.note_moment(0)
        # What is live when the backward starts.
        for s in self.owned:
            timeline.add_change(timeline.touched[s], self.nbytes[s])
        for s, plans in enumerate(kept):
            if s not in self.outputs:
                timeline.add_change(plans, self.nbytes[s])
        return timeline.peaks(count, self.held_by_caller)

    def forward_peaks(self, kept: Sequence[int], count: int) -> list[int]:
        """The forward's peak in bytes, for each of ``count`` plans.

        ``kept`` has the mask of the plans that keep each storage.  What only the
        backward needs is made where it was traced, if it is kept or something that is
        made of it is.
        """
        everyone = (1 << count) - 1
        timeline = self.timeline(self, kept, is_forward=True)
        timeline.touch(self.outputs | self.written_back | self.owned, everyone)
        for each in reversed(self.forward):
            plans = everyone if each.is_required else 0
            for s in each.writes:
                plans |= timeline.touched[s]
            timeline.run(each, plans, 0)
        timeline.note_moment(0)
        return [peak for (peak,) in timeline.peaks(count)]

    def saved_values(self, saved: set[int]) -> list[fx.Node]:
        """The nodes to save, in the graph's order, to keep the ``saved`` storages.

        The backward makes views again from what they view; symbolic sizes are saved.
        Raises CannotPlan if the backward would have to run what must run only once.
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
