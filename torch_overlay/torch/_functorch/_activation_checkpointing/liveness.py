"""How many bytes a plan keeps live, operator by operator, before anything runs.

A plan is the set of values that the forward saves.  It decides which operators the
backward runs again and when, and so the peak.  :class:`JointGraph` reads a joint graph
once into integers; :meth:`JointGraph.evaluate` then takes a plan through both phases:

    >>> graph = JointGraph(joint_module.graph, node_info, num_fwd_outputs)
    >>> graph.evaluate(graph.storages(saved_values)).peak

Counted is what an interpreter of the two graphs has live while it runs an operator: the
operator's arguments and results, whatever is read later, the saved values, the gradients
that are done, the tangents and the forward's outputs.  A storage counts once, whole,
however many views it has.  Parameters and inputs are live anyway and do not count, nor
does what a kernel allocates for itself.

The backward runs its own operators in their order, and each repeated one right before
the first that needs it, as ``reordering_to_mimic_autograd_engine`` emits them.  What was
traced in the backward without need of a tangent runs where it was traced.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
import torch.fx as fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from .random_ops import is_replayed, must_run_once
from .rerun_cost import concrete, is_view


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch._functorch.partitioners import NodeInfo


__all__ = ["CannotPlan", "Evaluation", "JointGraph"]

# Plans that are evaluated together, at most: the bits of an integer with a sign.
_TOGETHER = 63


class CannotPlan(Exception):
    """The model does not understand a joint graph, or a plan for it cannot be run."""


class _Together(NamedTuple):
    """What plans that were evaluated together do; bit p of a mask stands for plan p.

    Args:
        rows: the operators that are repeated for each row, in order, and by which plans.
        repeated: by which plans each operator is repeated.
        saved: which plans keep each storage.
    """

    rows: list[list[tuple[int, int]]]
    repeated: list[int]
    saved: list[int]


class Evaluation(NamedTuple):
    """What a plan costs.

    The backward's steps that read what the forward made are rows: a row is such a step,
    what is repeated for it, and what runs since the row before.

    Args:
        forward_peak: most live bytes while the forward runs.
        row_peaks: most live bytes in each row.
        together, plan: where and as which bit the plan is in what was evaluated with it.
    """

    forward_peak: int
    row_peaks: list[int]
    together: _Together
    plan: int

    @property
    def peak(self) -> int:
        return max(self.forward_peak, *self.row_peaks, 0)

    def repeated(self, ops: Iterable[int]) -> Iterator[int]:
        """Those of these operators that are repeated."""
        bit, repeated = 1 << self.plan, self.together.repeated
        return (op for op in ops if repeated[op] & bit)

    @property
    def rows(self) -> list[list[int]]:
        """The operators that are repeated for each row, in order."""
        bit = 1 << self.plan
        return [[op for op, plans in row if plans & bit] for row in self.together.rows]

    @property
    def saved(self) -> set[int]:
        """The storages that are really kept, those included that every plan keeps."""
        bit = 1 << self.plan
        return {s for s, mask in enumerate(self.together.saved) if mask & bit}


class _Step(NamedTuple):
    """A step of the backward that reads what the forward made, or follows on ``late``.

    Those are operators without tangents that were traced here, and run here if the plan
    repeats them.  ``own_*`` are the live bytes that the backward alone made: most of
    them since the last such step, those before this one, and those during it.
    """

    late: tuple[int, ...]
    reads: tuple[int, ...]
    own_since: int
    own_before: int
    own_during: int


class JointGraph:
    """A joint graph as operators and storages, each numbered in the graph's order.

    Operators are nodes that allocate, except the backward's own, which need a tangent.
    Those that the forward does not need either run where they are read first.  Public:

    nodes[o], reads[o], writes[o]: an operator, and the storages it reads and allocates.
    repeatable[o]: whether the backward may run it.
    nbytes[s], producer[s]: a storage's size, and its operator or -1.
    root[s]: the node that is saved to keep storage s, None where nothing can be.
    births[s], deaths[s]: the forward's steps that allocate it and read it last, or -1.
    outputs: the storages that the forward returns, which stay live in any plan.
    forward_live: live bytes at each step of a forward that saves nothing.
    backward_reads: what each step reads that an evaluation has a row for.

    Args:
        graph: the joint graph, with a ``val`` in every node's meta.
        node_info: the partitioner's classification of its nodes.
        num_fwd_outputs: how many of its outputs are the forward's.

    O(nodes + edges).  Raises CannotPlan for values that have no storage to count.
    """

    def __init__(
        self, graph: fx.Graph, node_info: NodeInfo, num_fwd_outputs: int
    ) -> None:
        self.nodes: list[fx.Node] = []
        self.reads: list[tuple[int, ...]] = []
        self.writes: list[tuple[int, ...]] = []
        self.nbytes: list[int] = []
        self.producer: list[int] = []
        self.root: list[fx.Node | None] = []
        self._keys: list[int] = []
        # How many steps of the forward were traced before a storage was made.
        self._made: dict[int, int] = {}
        # The storages of each node's value, in containers like those of the value.
        self._value: dict[fx.Node, Any] = {}
        # The storages that whoever reads a node reads.
        self._held: dict[fx.Node, tuple[int, ...]] = {}
        self._forward = set(node_info.required_fw_nodes)
        (output,) = graph.find_nodes(op="output")
        results = tree_leaves(output.args)
        self._descriptions = output.meta.get("desc") or ()
        self._fwd_outputs = _nodes(results[:num_fwd_outputs])
        self._bwd_outputs = _nodes(results[num_fwd_outputs:])
        self._read(graph, node_info)

    def storages(self, nodes: Iterable[fx.Node]) -> set[int]:
        """The storages that saving these nodes keeps."""
        return {s for node in nodes for s in tree_leaves(self._value.get(node, ()))} - {
            None
        }

    # ------------------------------------------------------------------ reading

    def _read(self, graph: fx.Graph, info: NodeInfo) -> None:
        backward = self._backward_nodes()
        tangents = {
            node
            for node in graph.find_nodes(op="placeholder")
            if node in info.tangents_closure
        }
        forward: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        late: list[int] = []
        steps: list[tuple[tuple[int, ...], ...]] = []
        # The forward overwrites these inputs itself, or whoever calls it does.
        overwritten = self._overwritten_inputs()
        mutated: set[int] = set()
        repeated: set[int] = set()
        constant = 0
        started = False
        for node in graph.nodes:
            if node.op == "output":
                break
            given = node.op != "call_function"
            reads = self._arguments(node)
            first = len(self.nbytes)
            value = self._value[node] = self._allocate(node)
            writes = tuple(range(first, len(self.nbytes)))
            own = tuple(s for s in tree_leaves(value) if s is not None)
            self._held[node] = own or (
                () if isinstance(node.meta.get("val"), py_sym_types) else reads
            )
            if node.target is operator.getitem:
                reads = own
            is_forward = node in self._forward
            if given:
                if node in tangents:
                    constant += sum(self.nbytes[s] for s in writes)
                if node.meta.get("desc") in overwritten:
                    mutated.update(writes)
                for s in writes:
                    self.nbytes[s] = 0
                continue
            early = is_forward or node not in info.tangents_closure
            saveable = isinstance(node.meta.get("val"), torch.Tensor) and early
            if is_replayed(node):
                # Nor may a view of it be saved.
                repeated.update(writes)
            elif saveable and self.root[value] is None and value not in repeated:
                self.root[value] = node
            if is_forward:
                forward.append((reads, writes))
                if _is_mutable(node):
                    mutated.update(self._held[node])
            elif node not in backward:
                continue
            started |= not tangents.isdisjoint(node.all_input_nodes)
            if early:
                if writes:
                    if started and not is_forward:
                        late.append(len(self.nodes))
                    for s in writes:
                        self.producer[s] = len(self.nodes)
                        self._made[s] = len(forward)
                    self.nodes.append(node)
                    self.reads.append(reads)
                    self.writes.append(writes)
            else:
                steps.append((tuple(late), reads, writes))
                late.clear()
        returned = tuple(s for n in self._bwd_outputs for s in self._held[n])
        steps.append((tuple(late), returned, ()))
        self._lay_out_forward(forward)
        self._lay_out_backward(steps, constant)
        self._needs = [
            tuple(s for s in reads if self.producer[s] >= 0) for reads in self.reads
        ]
        self._late = [op for step in self._steps for op in step.late][::-1]
        self._touches = [n + w for n, w in zip(self._needs, self.writes)]
        self._written = [sum(self.nbytes[s] for s in ws) for ws in self.writes]
        self._freeable = [
            op >= 0 and s not in self.outputs and nbytes > 0
            for s, (op, nbytes) in enumerate(zip(self.producer, self.nbytes))
        ]
        self.repeatable = [self._may_repeat(o, mutated) for o in range(len(self.nodes))]
        self._prefer_small_results()

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

    def _overwritten_inputs(self) -> set[Any]:
        return {
            description.mutated_input
            for description in self._descriptions
            if isinstance(description, InputMutationAOTOutput)
        }

    def _arguments(self, node: fx.Node) -> tuple[int, ...]:
        held = (s for argument in node.all_input_nodes for s in self._held[argument])
        return tuple(dict.fromkeys(held))

    def _allocate(self, node: fx.Node) -> Any:
        """Number the storages of a node's value, new ones where it allocates."""
        if node.target is operator.getitem:
            (source,) = node.all_input_nodes
            parts, index = self._value[source], node.args[1]
            if isinstance(parts, (dict, list)):
                return parts[index]  # type: ignore[index]
        reads = self._arguments(node)
        aliases = is_view(node)

        def number(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: number(part) for key, part in value.items()}
            if isinstance(value, (list, tuple)):
                return [number(part) for part in value]
            if isinstance(value, py_sym_types) and node not in self._forward:
                # What it is read from has to be live for that.
                return new(0, 0) if reads else None
            if not isinstance(value, torch.Tensor):
                return None
            try:
                storage = value.untyped_storage()
            except (NotImplementedError, RuntimeError) as error:
                raise CannotPlan(f"{node.name} has no storage to count") from error
            key = storage._cdata
            for s in reads:
                if self._keys[s] == key:
                    return s
            # Common subexpressions were merged: what is viewed is its twin.
            if aliases and reads:
                return reads[0]
            # One result may be a view of another.
            for s in range(first, len(self.nbytes)):
                if self._keys[s] == key:
                    return s
            return new(concrete(storage.nbytes()), key)

        def new(nbytes: int, key: int) -> int:
            self.nbytes.append(nbytes)
            self._keys.append(key)
            self.producer.append(-1)
            self.root.append(None)
            return len(self.nbytes) - 1

        first = len(self.nbytes)
        return number(node.meta.get("val"))

    def _may_repeat(self, op: int, mutated: set[int]) -> bool:
        node = self.nodes[op]
        if node not in self._forward:
            return True
        if must_run_once(node) or _is_mutable(node):
            return False
        # An input that the forward overwrites is another one in the backward.
        return mutated.isdisjoint(self.reads[op]) or _only_updates_statistics(node)

    def _prefer_small_results(self) -> None:
        """Of an operator that must run once, keep what is made of it if it is smaller.

        That is dropout's mask, where the random numbers have no other use.
        """
        readers: dict[int, set[int]] = {}
        for o, reads in enumerate(self.reads):
            for s in reads:
                readers.setdefault(s, set()).add(o)
        for o in range(len(self.nodes)):
            tag = self.nodes[o].meta.get("recompute")
            if self.repeatable[o] or tag == CheckpointPolicy.MUST_SAVE:
                continue
            if not self._read_in_backward.isdisjoint(self.writes[o]):
                continue
            using = {u for s in self.writes[o] for u in readers.get(s, ())}
            if len(using) != 1:
                continue
            (user,) = using
            if any(self.root[s] is None for s in self.writes[user]):
                continue
            size = sum(self.nbytes[s] for s in self.writes[o])
            if sum(self.nbytes[s] for s in self.writes[user]) <= size:
                self.repeatable[user] = False

    def _lay_out_forward(
        self, steps: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> None:
        count = len(self.nbytes)
        self.births, self.deaths = [-1] * count, [-1] * count
        for at, (reads, writes) in enumerate(steps):
            for s in writes:
                self.births[s] = self.deaths[s] = at
            for s in reads:
                self.deaths[s] = at
        change = [0] * (len(steps) + 2)
        # The forward's outputs are kept by whoever called it.
        self.outputs = {
            s
            for node in self._fwd_outputs
            for s in self._held[node]
            if self.births[s] >= 0
        }
        for s in range(count):
            if self.births[s] >= 0:
                change[self.births[s]] += self.nbytes[s]
                if s not in self.outputs:
                    change[self.deaths[s] + 1] -= self.nbytes[s]
        self.forward_live: list[int] = []
        live = 0
        for at in range(len(steps) + 1):
            live += change[at]
            self.forward_live.append(live)

    def _lay_out_backward(
        self, steps: Sequence[tuple[tuple[int, ...], ...]], constant: int
    ) -> None:
        """Work out what does not depend on the plan: the backward's own storages."""
        own = {s for _, _, writes in steps for s in writes}
        last = {
            s: at for at, (_, reads, writes) in enumerate(steps) for s in reads + writes
        }
        kept = {s for node in self._bwd_outputs for s in self._held[node]}
        dying: dict[int, int] = {}
        for s in own - kept:
            dying[last[s]] = dying.get(last[s], 0) + self.nbytes[s]
        self._steps: list[_Step] = []
        live = most = constant + sum(self.nbytes[s] for s in self.outputs)
        for at, (late, reads, writes) in enumerate(steps):
            before = live
            live += sum(self.nbytes[s] for s in writes)
            made = tuple(s for s in reads if self.producer[s] >= 0)
            if made or late or at == len(steps) - 1:
                self._steps.append(_Step(late, made, most, before, live))
                most = 0
            else:
                most = max(most, live)
            live -= dying.get(at, 0)
        self._read_in_backward = {s for step in self._steps for s in step.reads}

    @property
    def backward_reads(self) -> list[tuple[int, ...]]:
        return [step.reads for step in self._steps]

    @property
    def lower_bound(self) -> int:
        """Bytes that no plan's peak is below: what single steps need in any case."""
        during = (
            step.own_during
            + sum(self.nbytes[s] for s in set(step.reads) - self.outputs)
            for step in self._steps
        )
        since = (step.own_since for step in self._steps)
        return max(*self.forward_live, *during, *since)

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
        same row is followed once, and the columns of a tensor for their live bytes.
        """
        found: list[Evaluation] = []
        # Whoever traces may have fake tensors for every tensor made.
        with _disable_current_modes():
            for first in range(0, len(plans), _TOGETHER):
                found += self._evaluate(plans[first : first + _TOGETHER])
        return found

    def _evaluate(self, plans: Sequence[Iterable[int]]) -> list[Evaluation]:
        everyone = (1 << len(plans)) - 1
        # Which plans have a storage saved.
        here = [0] * len(self.nbytes)
        for plan, chosen in enumerate(plans):
            for s in chosen:
                here[s] |= 1 << plan
        for s in self.outputs:
            here[s] = everyone
        for s, root in enumerate(self.root):
            if root is None:
                here[s] = 0
        rows, repeated = self._repeat(here, everyone)
        row_peaks, saved = self._sweep(rows, here, everyone, len(plans))
        together = _Together(rows, repeated, saved)
        forward_peaks = self._forward_peaks(saved, len(plans))
        return [
            Evaluation(peak, row_peaks[plan], together, plan)
            for plan, peak in enumerate(forward_peaks)
        ]

    def _repeat(
        self, here: list[int], everyone: int
    ) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """What is repeated for each step, and by whom; adds to ``here`` what cannot be."""
        # The hot loop of a search: local names, and no tuples to build.
        producer, needs, repeatable = self.producer, self._needs, self.repeatable
        repeated = [0] * len(self.nodes)
        repeated_late = self._repeated_late(here, everyone)
        rows: list[list[tuple[int, int]]] = []
        for late, reads, *_ in self._steps:
            found: dict[int, int] = {}
            pending = [(s, everyone) for s in reads]
            for op in late:
                pending += [(s, repeated_late[op]) for s in self.writes[op]]
            while pending:
                s, plans = pending.pop()
                op = producer[s]
                plans &= ~(here[s] | repeated[op])
                if not plans:
                    continue
                if not repeatable[op]:
                    if self.root[s] is None:
                        raise CannotPlan(
                            f"{self.nodes[op].name} can be neither saved nor repeated"
                        )
                    here[s] |= plans
                    continue
                repeated[op] |= plans
                found[op] = found.get(op, 0) | plans
                for read in needs[op]:
                    pending.append((read, plans))
            rows.append(sorted(found.items()))
        return rows, repeated

    def _repeated_late(self, here: list[int], everyone: int) -> dict[int, int]:
        """The late operators whose results some step needs, if ``here`` is saved."""
        found: dict[int, int] = {}
        needed: dict[int, int] = {}
        for op in self._late:
            plans = 0
            for s in self.writes[op]:
                reading = everyone if s in self._read_in_backward else needed.get(s, 0)
                plans |= reading & ~here[s]
            found[op] = plans
            for s in self._needs[op]:
                needed[s] = needed.get(s, 0) | plans
        return found

    def _sweep(
        self,
        rows: list[list[tuple[int, int]]],
        here: list[int],
        everyone: int,
        count: int,
    ) -> tuple[list[list[int]], list[int]]:
        """The peaks of each plan's rows, and which plans keep each storage.

        Goes back through the moments of the backward: of a row its step, what is
        repeated for it, and its start.  Who touches a storage last frees it.
        """
        nbytes, touches, freeable = self.nbytes, self._touches, self._freeable
        touched = [0] * len(nbytes)
        # By how many bytes the plans of a mask change, latest first.
        masks: list[int] = []
        changes: list[int] = []
        # For each moment how many changes come after it, and the backward's own bytes.
        after: list[int] = []
        own: list[int] = []
        for step, row in zip(reversed(self._steps), reversed(rows)):
            for s in step.reads:
                plans = everyone & ~touched[s]
                if plans:
                    touched[s] = everyone
                    if freeable[s]:
                        masks.append(plans)
                        changes.append(-nbytes[s])
            after.append(len(masks))
            own.append(step.own_during)
            for op, repeating in reversed(row):
                for s in touches[op]:
                    plans = repeating & ~touched[s]
                    if plans:
                        touched[s] |= plans
                        if freeable[s]:
                            masks.append(plans)
                            changes.append(-nbytes[s])
                after.append(len(masks))
                own.append(step.own_before)
                masks.append(repeating)
                changes.append(self._written[op])
                for s in self.writes[op]:
                    if here[s] & repeating:
                        masks.append(here[s] & repeating)
                        changes.append(-nbytes[s])
            after.append(len(masks))
            own.append(step.own_since)
        saved = [plans & touching for plans, touching in zip(here, touched)]
        for s, plans in enumerate(saved):
            if plans and s not in self.outputs:
                masks.append(plans)
                changes.append(nbytes[s])
        # Where nothing changes there is a first moment all the same.
        masks.append(0)
        changes.append(0)
        live = _by_plan(masks, changes, count).flip(0).cumsum(0)
        at = torch.tensor([len(masks) - 1 - later for later in after], device="cpu")
        live = live[at] + torch.tensor(own, device="cpu").unsqueeze(1)
        moments = torch.tensor([len(row) + 2 for row in reversed(rows)], device="cpu")
        of_row = torch.repeat_interleave(moments).unsqueeze(1).expand_as(live)
        peaks = torch.zeros(len(rows), count, dtype=torch.int64, device="cpu")
        peaks.scatter_reduce_(0, of_row, live, "amax")
        return peaks.flip(0).T.tolist(), saved

    def _forward_peaks(self, saved: Sequence[int], count: int) -> list[int]:
        """Add to the live bytes what stays after its last use."""
        end = len(self.forward_live) - 1
        # What only the backward needs is made where it was traced if it is saved, and
        # that is after the forward if no pass has moved it: by plan.
        afterwards: dict[int, list[int]] = {}
        steps: list[int] = []
        masks: list[int] = []
        sizes: list[int] = []
        for s, plans in enumerate(saved):
            if not plans or s in self.outputs:
                continue
            if self.births[s] >= 0 or self._made[s] < end:
                late = self.births[s] < 0
                steps.append(self._made[s] if late else self.deaths[s] + 1)
                masks.append(plans)
                sizes.append(self.nbytes[s])
                continue
            for plan in range(count):
                if plans >> plan & 1:
                    afterwards.setdefault(plan, []).append(s)
        last_readers: dict[int, dict[int, int]] = {}
        for plan, made_late in afterwards.items():
            kept = {s for s, plans in enumerate(saved) if plans >> plan & 1}
            last_readers[plan] = self._last_readers(made_late, kept)
            for s in last_readers[plan]:
                steps.append(self.deaths[s] + 1)
                masks.append(1 << plan)
                sizes.append(self.nbytes[s])
        extra = torch.zeros(end + 1, count, dtype=torch.int64, device="cpu")
        at = torch.tensor(steps, dtype=torch.int64, device="cpu")
        extra.index_add_(0, at, _by_plan(masks, sizes, count))
        live = extra.cumsum(0)
        live += torch.tensor(self.forward_live, device="cpu").unsqueeze(1)
        peaks = live.amax(0).tolist()
        for plan, last_reader in last_readers.items():
            freed = dict.fromkeys(afterwards[plan], 0)
            for s, made in last_reader.items():
                freed[made] += self.nbytes[s]
            still = int(live[end, plan])
            for s, done in freed.items():
                still += self.nbytes[s]
                peaks[plan] = max(peaks[plan], still)
                still -= done
        return peaks

    def _last_readers(self, made: Iterable[int], saved: set[int]) -> dict[int, int]:
        """Which of the storages ``made`` is the last one to be made of another.

        Those that stay anyway are left out.
        """
        found: dict[int, int] = {}
        for s in made:
            pending = list(self._needs[self.producer[s]])
            while pending:
                read = pending.pop()
                if read in saved or read in self.outputs:
                    continue
                if self.births[read] >= 0:
                    found[read] = s
                else:
                    pending += self._needs[self.producer[read]]
        return found

    def saved_values(self, saved: set[int]) -> list[fx.Node]:
        """The nodes to save, in the graph's order, so that ``saved`` storages are kept.

        Views are made again from what they view, and sizes are saved themselves.
        Raises CannotPlan where the backward would have to run what it must not.
        """
        roots = {self.root[s] for s in saved}
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        pending = list(self._bwd_outputs)
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            required = node in self._forward
            if node in roots or (
                required
                and (
                    node.op == "placeholder"
                    or isinstance(node.meta.get("val"), py_sym_types)
                )
            ):
                found.add(node)
            elif required and node.op == "call_function" and must_run_once(node):
                if not isinstance(node.meta.get("val"), torch.Tensor):
                    raise CannotPlan(f"{node.name} must not run twice")
                found.add(node)
            else:
                pending += node.all_input_nodes
        order = {node: at for at, node in enumerate(self._value)}
        return sorted(found, key=order.__getitem__)


def _by_plan(masks: Sequence[int], values: Sequence[int], count: int) -> torch.Tensor:
    """A row for each value, with a column for each of ``count`` plans: it, or 0."""
    plans = torch.arange(count, device="cpu")
    of_plan = torch.tensor(masks, dtype=torch.int64, device="cpu").unsqueeze(1) >> plans
    sizes = torch.tensor(values, dtype=torch.int64, device="cpu").unsqueeze(1)
    return (of_plan & 1) * sizes


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
