"""A joint graph to be split, and what all of its plans have in common.

Lifting bans makes a min cut recompute more.  A knapsack's items are what even the cut
that recomputes all that is cheap does not, each with the bytes that saving it keeps and
the runtime of recomputing it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

from torch.utils._mode_utils import no_dispatch
from torch.utils._ordered_set import OrderedSet

from ..._activation_checkpointing.random_ops import (
    is_higher_order,
    is_kept,
    must_run_once,
    NEVER,
    recomputable_nodes,
)
from ..ask import Ask, BANS
from ..decision import Decision, SavedRange
from ..solver import upstreams_table
from .reading import read_joint
from .recompute_cost import is_costly, recompute_cost, size_or_hint
from .storages import activation_bytes, CannotPlan, device_of


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo
    from .liveness import Program

    _Cut = tuple[list[fx.Node], OrderedSet[fx.Node]]

log = logging.getLogger(__name__)

# The first three bans are on values that are cheap in themselves, though recomputing
# them where they are needed may not be.
CHEAP = BANS[:3]
ALL_CHEAP = BANS[:4]


class Item(NamedTuple):
    """Something to save or to recompute.

    Args:
        node: the node that stands for it in reports and solvers.
        ops: the nodes that need not run again if it is saved, with their runtimes.
        storages, nbytes: what to keep for that, in the graph's model, and its bytes.
    """

    node: fx.Node
    ops: dict[fx.Node, float]
    storages: frozenset[int]
    nbytes: int

    @property
    def runtime(self) -> float:
        return math.fsum(self.ops.values())


@dataclass(frozen=True)
class BudgetedGraph:
    """A joint graph to be split, and what all plans for it have in common.

    ``budget`` is the config's, or that of a region with its own; ``fused`` says that
    inductor will compile the operators into kernels; ``as_int`` evaluates symbolic
    sizes.  Only bytes on ``device`` count, by default the graph's own.
    ``in_chunks`` has the same graph with its head in chunks, by their number, and
    ``why_whole`` says why a large head cannot run that way.
    """

    joint: fx.Graph
    info: NodeInfo
    num_fwd_outputs: int
    budget: float
    fused: bool = False
    as_int: Callable[[Any], int] = size_or_hint
    device: Optional[torch.device] = None
    ask: Ask = field(default_factory=Ask.of_config)
    in_chunks: Mapping[int, BudgetedGraph] = field(default_factory=dict)
    why_whole: str = ""
    _cuts: dict[Any, _Cut] = field(default_factory=dict, init=False, repr=False)
    _upstreams: dict[float, list[fx.Node]] = field(
        default_factory=dict, init=False, repr=False
    )

    @functools.cached_property
    def model(self) -> Program:
        """The program on which plans are evaluated."""
        asked = self.info, self.num_fwd_outputs, self.as_int, self.counted_device
        program = read_joint(self.joint, *asked)
        return _saving_no_outputs(
            _saving_no_constants(program), self.saved_at_budget_1()
        )

    @property
    def variants(self) -> dict[int, BudgetedGraph]:
        """The graph as it is (1) and in chunks, by the number of chunks."""
        return {1: self, **self.in_chunks}

    @functools.cached_property
    def counted_device(self) -> torch.device:
        """The device whose bytes count."""
        return device_of(self.joint) if self.device is None else self.device

    def at_sizes(self, as_int: Callable[[Any], int]) -> BudgetedGraph:
        """The same graph at other sizes; its min cuts do not depend on them."""
        in_chunks = {n: each.at_sizes(as_int) for n, each in self.in_chunks.items()}
        other = replace(self, as_int=as_int, in_chunks=in_chunks)
        other._cuts.update(self._cuts)
        return other

    @functools.cached_property
    def limits(self) -> SavedRange:
        """The bytes that the plans of budgets 0 and 1 keep."""
        # What checkpoints tag may be saved in fewer bytes, which only a min cut tells.
        is_tagged = any(map(is_kept, self.joint.nodes))
        least = self.saved_at_budget_0() if is_tagged else self._saved_by_every_plan()
        return SavedRange(*map(self.kept_bytes, (least, self.saved_at_budget_1())))

    @functools.cached_property
    def _upstreams_candidates(self) -> list[fx.Node]:
        """Upstream's items: they reach the backward, and share no input's storage."""
        from torch._functorch.partitioners import is_non_builtin_to_include
        from torch._inductor.fx_utils import get_node_storage

        # Not None, which stands for sizes and tuples: they have no storage.
        inputs = {get_node_storage(node) for node in self.info.inputs} - {None}
        return [
            node
            for node in self.cut(ALL_CHEAP)[1]
            if node.dist_from_bw < NEVER  # type: ignore[attr-defined]
            and (
                get_node_storage(node) not in inputs or is_non_builtin_to_include(node)
            )
            and not is_kept(node)
        ]

    @functools.cached_property
    def items(self) -> list[Item]:
        """The items that a solver chooses among, largest first."""
        self.model.check_sizes()
        items = []
        for node in self._upstreams_candidates:
            if not must_run_once(node):
                storages = frozenset(self.model.saveable_storages([node]))
                ops = {node: recompute_cost(node, self.ask.estimator)}
                nbytes = self.model.nbytes_of(storages)
                items.append(Item(node, ops, storages, nbytes))
        # A user's own solver gets the nodes, so each one stays an item of its own.
        if isinstance(self.ask.solver, str):
            items = _join_items(items, self.cut(ALL_CHEAP)[0], self.model)
        return sorted(items, key=lambda item: item.nbytes, reverse=True)

    def cut(
        self,
        allowed: tuple[str, ...] = (),
        dont_ban: Optional[Iterable[fx.Node]] = None,
    ) -> _Cut:
        """The values that a min cut saves, and the nodes that it would not recompute.

        ``allowed`` names the config's bans to ignore; with none, the plan runs fastest.
        No ban applies to the nodes in ``dont_ban``.  Cuts are cached.
        """
        from torch._functorch.partitioners import MinCutOptions, solve_min_cut

        asked = allowed, None if dont_ban is None else (*dont_ban,)
        if asked in self._cuts:
            return self._cuts[asked]
        if self.ask.recomputes_all_cheap:
            allowed = ALL_CHEAP
        bans = {
            ban: is_on and ban not in allowed for ban, is_on in self.ask.bans.items()
        }
        again = None if dont_ban is None else OrderedSet(dont_ban)
        options = MinCutOptions(**bans)
        saved, banned = solve_min_cut(self.joint, self.info, options, again)
        if asked != ((), None):
            saved = self._without_outputs(saved)
        self._cuts[asked] = saved, banned
        return saved, banned

    def _without_outputs(self, saved: list[fx.Node]) -> list[fx.Node]:
        """``saved``, with outputs that no plan may save replaced by their inputs."""
        try:
            model = self.model
            instead, pending = set(), model.storages(saved)
            if all(model.saved_as[s] for s in pending & model.outputs):
                return saved
            while pending:
                s = pending.pop()
                if s in model.outputs and model.saved_as[s] is None:
                    pending.update(model.operators[model.producer[s]].reads)
                else:
                    instead.add(s)
            return model.saved_values(model.evaluate(instead).saved)
        except CannotPlan:
            return saved

    def saved_at_budget_1(self) -> list[fx.Node]:
        """What budget 1 saves."""
        return self.cut()[0]

    def saved_at_budget_0(self) -> list[fx.Node]:
        """What budget 0 saves: what every plan does, or other nodes in their place."""
        again, required = recomputable_nodes(self.joint), self._saved_by_every_plan()
        cut = required if again is None else self.cut((), again)[0]
        return min(cut, required, key=self.kept_bytes)

    def _saved_by_every_plan(self) -> list[fx.Node]:
        """What every plan saves: the inputs, and what must not be computed twice."""
        if recomputable_nodes(self.joint) is None:
            return self.info.inputs
        self.model.check_sizes()
        return self.model.saved_values(self.model.evaluate(()).saved)

    @functools.cached_property
    def _runtimes(self) -> dict[fx.Node, float]:
        """The runtime of each of upstream's items, as its partitioner estimates it."""
        from torch._functorch.partitioners import estimate_runtime

        estimator = self.ask.estimator

        def runtime(node: fx.Node) -> float:
            # Upstream cannot estimate "roofline", nor higher-order operators.
            if estimator == "roofline" or is_higher_order(node):
                return recompute_cost(node, estimator)
            return estimate_runtime(node)

        return {node: runtime(node) for node in self._upstreams_candidates}

    def upstreams_choice(self, budget: float) -> list[fx.Node]:
        """What upstream's algorithm saves; its budget bounds the sum of node sizes.

        Takes one more min cut for each new budget.
        """
        if budget not in self._upstreams:
            self._upstreams[budget] = self._choose_as_upstream(budget)
        return self._upstreams[budget]

    def _choose_as_upstream(self, budget: float) -> list[fx.Node]:
        from torch._functorch.partitioners import _size_of

        if budget == 0:
            return self.saved_at_budget_0()

        def size(nodes: Iterable[fx.Node]) -> int:
            return sum(map(_size_of, nodes))

        least = size(self.info.inputs)
        room = size(self.saved_at_budget_1()) - least
        if budget == 1 or room <= 0:
            return self.saved_at_budget_1()
        for bans in (CHEAP, ALL_CHEAP):
            cut, _ = self.cut(bans)
            if size(cut) - least < budget * room:
                return cut
        nodes = sorted(self._upstreams_candidates, key=_size_of, reverse=True)
        memory = [_size_of(node) / room for node in nodes]
        runtimes = [self._runtimes[node] for node in nodes]
        with no_dispatch():
            recomputed = upstreams_table(memory, runtimes, budget)
        again = [nodes[i] for i in recomputed if not must_run_once(nodes[i])]
        return self.cut(ALL_CHEAP, again)[0] if nodes else self.saved_at_budget_0()

    def upstreams_decision(self) -> Decision:
        """The plan that the partitioner would make without this package."""
        from torch._functorch.partitioners import choose_saved_values_set

        budget = self.budget
        try:
            saved = choose_saved_values_set(self.joint, self.info, budget)
        except Exception as error:
            # It fails on higher-order operators, which it has no runtime for.
            log.debug("upstream has no plan for budget %g", budget, exc_info=error)
            saved, budget = self.saved_at_budget_1(), 1.0
        return self.decision_saving(saved, budget, "upstream")

    def decision_saving(
        self, saved: list[fx.Node], budget: float, decided_by: str
    ) -> Decision:
        kept = self.kept_bytes(saved)
        return Decision(saved, budget, decided_by, kept, self.ask.runtime_unit)

    def kept_bytes(self, saved: Iterable[fx.Node]) -> int:
        """The bytes that saving these nodes keeps, without those of inputs."""
        # Copies of overwritten inputs exist for the backward alone, so they count.
        given = (node for node in self.info.inputs if node.op == "placeholder")
        return activation_bytes(given, saved, self.counted_device, self.as_int)


def _saving_no_constants(program: Program) -> Program:
    """The program, with no plan saving what can be made without reading any input.

    Filling a mask or counting positions costs next to nothing, as does what is made of
    those alone.  Random numbers are left out, and outputs, which are live anyway.
    """
    constants: set[int] = set()
    for each, recomputable in zip(program.operators, program.recomputable):
        if (
            recomputable
            and constants.issuperset(each.reads)
            and not is_costly(each.node)
            and not must_run_once(each.node)
        ):
            constants.update(each.writes)
    constants -= program.outputs | program.always_saved
    return _saving_none_of(constants, program)


def _saving_no_outputs(program: Program, fastest: list[fx.Node]) -> Program:
    """The program, with no plan saving an output that budget 1 does not save.

    The caller may change an output in place as long as the backward does not read it,
    and a budget must not take that away.
    """
    alone = program.outputs - program.storages(fastest) - program.always_saved
    for step in program.steps:
        alone.difference_update(step.operator.reads)
    # If such an output cannot be repeated, what is made of it is saved instead.
    lost: set[int] = set()
    recomputable = []
    for each, can in zip(program.operators, program.recomputable):
        recomputable.append(can and lost.isdisjoint(each.reads))
        if not recomputable[-1]:
            lost.update(alone.intersection(each.writes))
    return replace(_saving_none_of(alone, program), recomputable=recomputable)


def _saving_none_of(storages: set[int], program: Program) -> Program:
    saved_as = enumerate(program.saved_as)
    return replace(
        program, saved_as=[None if s in storages else node for s, node in saved_as]
    )


def _join_items(items: list[Item], most: list[fx.Node], model: Program) -> list[Item]:
    """The items, with those joined for which something smaller can be kept together.

    For example, the sum of several products is kept in place of these.  With all of
    ``most`` saved, no item runs again.  Those that do without one of the values are the
    items that it is kept for.
    O(operators + edges), on integers of one bit per value.
    """
    values = sorted(s for s in model.saveable_storages(most) if model.producer[s] >= 0)
    everyone = (1 << len(values)) - 1
    saved = [everyone * by for by in model.masks_of_saving_plans([values])]
    for value, s in enumerate(values):
        saved[s] ^= 1 << value
    try:
        _, repeated = model.find_recomputed(saved, everyone)
    except CannotPlan:
        return items
    runs = dict(zip(model.nodes, repeated))
    # Items that the same values are kept for belong together.
    groups = defaultdict(list)
    for item in items:
        groups[runs.get(item.node, 0)].append(item)
    joined = groups.pop(0, [])
    for mask, group in groups.items():
        kept = [s for value, s in enumerate(values) if mask >> value & 1]
        nbytes = model.nbytes_of(kept)
        least = min(item.nbytes for item in group)
        if nbytes > least or (len(group) == 1 and nbytes == least):
            joined += group
            continue
        largest = max(kept, key=model.nbytes.__getitem__)
        node = model.saved_as[largest] or group[0].node
        ops = {op: runtime for item in group for op, runtime in item.ops.items()}
        joined.append(Item(node, ops, frozenset(kept), nbytes))
    return joined
