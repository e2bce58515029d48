"""Plans for all graphs of a training step, by what they keep while others run.

A step is a sequence of events, F(c) and B(c): the forward and the backward of a call c.
At any moment, live are

    what eager code holds + what each call keeps whose backward is still to come
    + what the running graph has beyond that

so a plan of a graph is three numbers and a cost (:class:`GraphPlan`), and a step is a
number of moments (:data:`Moments`).  :class:`StepCurve` chooses plans so that no moment
is above a peak and little is computed again.

Calls of one graph may get two plans.  A call's *slot* is the smallest number that no
other call alive has; those up to some slot get one plan, those above it another.  That
fills the room that one plan for all would leave, and lets the calls whose backward comes
first keep what they need at once anyway.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from .peak_budget import (
    compare_with_no_checkpoints,
    model_of,
    of_knapsacks,
    Plans,
    rerun_costs,
    search,
    undominated,
)
from .rerun_cost import flops
from .storages import is_on


if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Container,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    import torch.fx as fx
    from .liveness import Evaluation, Program
    from .memory_budget import Planner


__all__ = [
    "GraphPlan",
    "GraphPlans",
    "Held",
    "Missing",
    "Moments",
    "StepCurve",
    "calls_in",
    "plan_graph",
]

# Plans of one graph that may be combined, and slots at which they change, at most.
_COMBINED, _SPLITS = 16, 32
# Peaks between the floor and the fastest that are planned for.
_LEVELS = 48
# More bytes than there are, of which sums are still exact in doubles.
_NEVER = 2**44
# How often each graph gets its turn, at most, as others choose anew.
_SWEEPS = 8


class Missing(NamedTuple):
    """Of a call, which tangents its backward does not get, and which outputs are gone.

    As of logits that a caller drops: these are no more than what the forward saves of them.
    """

    tangents: frozenset[int]
    outputs: frozenset[int]


class GraphPlan(NamedTuple):
    """A plan of one graph: bytes beyond the graph's inputs and outputs, and a cost.

    Args:
        kept: what the forward leaves alive.
        forward: most that is live while the forward runs, with what it returns.
        backward: most that is live while the backward runs, with what was kept.
        cost: what is computed again, in the estimator's unit.
        outputs: the indices of those outputs of the forward that are saved too.
        storages: what to save, by the graph's model.
    """

    kept: int
    forward: int
    backward: int
    cost: float
    outputs: frozenset[int]
    storages: frozenset[int]

    def holds_no_more(self, other: GraphPlan) -> bool:
        """Whether it keeps and holds at most what another does."""
        is_no_more = all(map(operator.le, self[:3], other[:3]))
        return is_no_more and self.outputs <= other.outputs


@dataclass(frozen=True)
class GraphPlans:
    """The plans of a graph that no other beats, by rising cost, for calls of some size.

    Of the joint graph's inputs, ``primals`` and then ``tangents`` are tensors, so many of
    each; ``inputs`` has them, and behind them what the forward returns, as the backward may
    read that; ``outputs`` has the bytes of the latter alone.  Of the plans that were
    compiled, ``told`` has by how much ``kept``, ``forward`` and ``backward`` are above the
    estimates, in units of the estimate for the backward, as the size of calls may be
    another one.
    """

    plans: list[GraphPlan]
    model: Program
    primals: int
    tangents: int
    inputs: dict[int, Input]
    outputs: dict[int, int]
    # What the graph computes without a budget, by the estimator's unit; 0 if not known.
    work: float
    # What its calls miss, in the model's view.
    missing: Optional[Missing] = None
    told: dict[int, tuple[float, ...]] = field(default_factory=dict)
    # The same of the backward alone, by the inputs that nobody else holds.
    told_alone: dict[int, Callable[[frozenset[int]], float]] = field(
        default_factory=dict
    )
    # Where the plans are corrected, those that were estimated.
    estimated: list[GraphPlan] = field(default_factory=list)
    # By how much its calls may yet turn out larger.
    growth: float = 1.0

    def sized(self, joint: Planner) -> GraphPlans:
        """The same plans for calls of the size that ``joint`` has.

        That may have been traced by itself: what no call of it makes is not saved.
        """
        model = _model(joint, self.missing)
        (_, made), (_, there) = calls_in(self.model), calls_in(model)
        same = {s: there[place] for place, s in made.items() if place in there}
        chosen = [
            frozenset(same[s] for s in plan.storages if s in same)
            for plan in self.plans
        ]
        plans = [
            GraphPlan(*_bytes(model, evaluation), plan.cost, plan.outputs, storages)
            for plan, storages, evaluation in zip(
                self.plans, chosen, model.evaluate_all(chosen)
            )
        ]
        inputs, outputs = _inputs(joint, model), _outputs(joint, model)
        return replace(self, plans=plans, model=model, inputs=inputs, outputs=outputs)

    def hold_no_more(self, other: GraphPlans) -> bool:
        """Whether each plan keeps and holds at most what that of the other does."""
        return all(map(GraphPlan.holds_no_more, self.plans, other.plans))

    def at_least(self, other: GraphPlans) -> GraphPlans:
        """The same, with as many bytes as those of another have."""
        plans = []
        for own, its in zip(self.plans, other.plans):
            kept, forward, backward = map(max, own[:3], its[:3])
            plans.append(own._replace(kept=kept, forward=forward, backward=backward))
        return replace(self, plans=plans)

    def tell(
        self,
        index: int,
        told: tuple[int, int, int],
        backward_where: Callable[[Sequence[tuple[str, int]]], int],
    ) -> None:
        """Let it be known what a plan that was compiled keeps and holds.

        And by the names and bytes of the inputs that it alone holds, its backward.
        """
        plan = self.plans[index]
        size = max(plan.backward, 1)
        errors = map(operator.sub, told, plan[:3])
        self.told[index] = tuple(error / size for error in errors)

        def error(of: frozenset[int]) -> float:
            alone = [self.inputs[i] for i in sorted(of) if i in self.inputs]
            named = [(each.name, each.nbytes) for each in alone]
            (estimate,) = self._backwards([plan], of)
            return (backward_where(named) - estimate) / size

        self.told_alone[index] = functools.cache(error)

    def corrected(self) -> GraphPlans:
        """The plans as compiled; the others as far off as the nearest of those.

        A copy that a kernel wants of a parameter is as large whatever else is kept, so
        errors are added.
        """
        if not self.told:
            return self
        plans = []
        for index, plan in enumerate(self.plans):
            near = _nearest(self.plans, index, self.told)
            size = max(self.plans[near].backward, 1)
            kept, forward, backward = (
                max(nbytes + round(error * size), 0)
                for nbytes, error in zip(plan[:3], self.told[near])
            )
            plan = plan._replace(kept=kept, forward=forward, backward=backward)
            plans.append(plan)
        return replace(self, plans=plans, estimated=self.plans)

    def only(self, wanted: Container[int]) -> GraphPlans:
        """The same, where no other plan is of use."""
        plans = [
            plan if i in wanted else plan._replace(kept=_NEVER, forward=_NEVER)
            for i, plan in enumerate(self.plans)
        ]
        return replace(self, plans=plans)

    def errs(self, margin: float) -> bool:
        """Whether some plan holds more than estimated, by such a share of its peak."""
        return any(error > margin for errors in self.told.values() for error in errors)

    def place_of_peak(self, index: int) -> str:
        """Whose backward holds most by a plan, operator by operator; empty if not known.

        A module below the one that was compiled, or a function that this one calls.
        """
        peaks = self.model.evaluate(self.plans[index].storages).step_peaks
        _, step = max(zip(peaks, self.model.steps), key=operator.itemgetter(0))
        meta = step.operator.node.meta
        modules = [path for path, _ in (meta.get("fwd_nn_module_stack") or {}).values()]
        functions = [name for name, _ in meta.get("fwd_source_fn_stack", ())]
        # That which was compiled is a local variable, as L['self'].layers.0.
        paths = (path.partition("].")[2] for path in modules[-1:])
        return next(filter(None, (*paths, *functions)), "")

    def live(self, what: str, of: Any) -> list[int]:
        """By plan, what a call of the graph holds; see :class:`Held`."""
        return [math.ceil(nbytes * self.growth) for nbytes in self._live(what, of)]

    def _live(self, what: str, of: Any) -> list[int]:
        if what == "output":
            nbytes = self.outputs.get(of, 0)
            return [nbytes * (of in plan.outputs) for plan in self.plans]
        if what == "backward" and of:
            found = self._backwards(self.plans, of)
            for index in range(len(self.estimated)):
                near = _nearest(self.estimated, index, self.told)
                size = max(self.estimated[near].backward, 1)
                error = self.told_alone[near](of)
                found[index] = max(found[index] + round(error * size), 0)
            return found
        return [getattr(plan, what) for plan in self.plans]

    def _backwards(self, plans: Sequence[GraphPlan], of: frozenset[int]) -> list[int]:
        """What the backwards of some plans hold where they alone hold these inputs."""
        alone = [self.inputs[index] for index in of if index in self.inputs]
        own = {each.storage: each.nbytes for each in alone}
        model = self.model.releasing(own)
        # Those still count in eager code's bytes, as if they were held to the end.
        beside = model.held_by_caller + sum(own.values())
        evaluations = model.evaluate_all([plan.storages for plan in plans])
        returned = own.keys() & self.model.outputs
        return [
            max(each.step_peaks) - beside + model.size(returned - each.saved)
            for each in evaluations
        ]


def _nearest(plans: Sequence[GraphPlan], index: int, told: Iterable[int]) -> int:
    """Of the plans that were compiled, the one most like another; itself if it was."""
    kept = plans[index].kept
    _, _, nearest = min((i != index, abs(plans[i].kept - kept), i) for i in told)
    return nearest


def calls_in(model: Program) -> tuple[list[Any], dict[Any, int]]:
    """What the code of a graph's forward calls, and the storages of what these make.

    By both, graphs are alike that were traced for other sizes: those decide which views
    and copies there are, and what the backward computes.
    """
    functions: list[Any] = []
    made: dict[Any, int] = {}
    names: list[str] = []
    # How many storages each operator has made, since the last call began.
    count: Counter[Any] = Counter()
    for each in model.operators:
        target: Any = each.node.target
        stack = each.node.meta.get("source_fn_stack", ())
        computes = each.is_required and target is not torch.ops.aten.clone.default
        if computes and stack:
            before, names = names, [name for name, _ in stack]
            if names != before:
                functions.append(stack[-1][1])
        for s in each.writes:
            place = len(functions), target
            made[(*place, count[place])] = s
            count[place] += 1
    return functions, made


def times_larger(model: Program, than: Program) -> float:
    """How many times the bytes of a graph at another size its forward computes.

    Of what differs: sums of weights, say, are as large for any batch.
    """
    ours, theirs = calls_in(model)[1], calls_in(than)[1]
    own = other = 0
    for place in ours.keys() & theirs.keys():
        nbytes, its = model.nbytes[ours[place]], than.nbytes[theirs[place]]
        if nbytes != its:
            own, other = own + nbytes, other + its
    return own / other if own and other else 1.0


class Held(NamedTuple):
    """What the call in a ``slot`` of a ``graph`` holds at a moment, in the plans' terms.

    ``what`` is "kept", of a call that waits for its backward; "forward" or "backward" of
    the one that runs; or "output", which nobody holds any more unless it is saved.  ``of``
    an output is its index, and of a backward the inputs that it alone holds.  The graph
    is its number.
    """

    graph: int
    slot: int
    what: str
    of: Any = None


# For all that calls hold at some moment, the most bytes that eager code has live then.
Moments = dict[frozenset[Held], int]


def plan_graph(
    joint: Planner,
    saved: Sequence[fx.Node],
    is_only: bool = False,
    missing: Optional[Missing] = None,
) -> GraphPlans:
    """The plans of a joint graph, and its model; ``saved`` is what that of budget 1 saves.

    Or the one that saves ``saved``, if that is the only one to have.  They are for calls
    that miss what is ``missing``.

    They are those of the search for a peak.  Where calls wait for each other, what a call
    keeps counts for more than its own peak.
    Raises as :func:`.liveness.read` does.
    """
    model = _model(joint, missing)
    plans = Plans(model, rerun_costs(model, joint))
    if is_only:
        plans.evaluate([frozenset(model.storages(saved))])
    else:
        search(plans, joint, saved)
        if missing is None:
            compare_with_no_checkpoints(joint, plans)
        if model.is_fused:
            # As the search does for operators.  A call that waits keeps least where all
            # is computed again, as in a checkpoint.
            plans.evaluate([frozenset(), *of_knapsacks(joint.items)])
    found = _graph_plans(joint, plans)
    best = [found[i] for i in undominated([plan[:4] for plan in found])]
    # Of equals, that of budget 1.
    best.sort(key=lambda plan: (plan.cost, plan.storages != found[0].storages))
    tangents = len(model.tangents)
    primals = len(_given(joint)) - tangents
    inputs, outputs = _inputs(joint, model), _outputs(joint, model)
    is_known = joint.ask.estimator == "flops"
    work = sum(map(flops, joint.joint.nodes)) if is_known else 0
    return GraphPlans(best, model, primals, tangents, inputs, outputs, work, missing)


def _model(joint: Planner, missing: Optional[Missing]) -> Program:
    """The model of a graph whose calls miss something."""
    if missing is None:
        return model_of(joint)
    return model_of(joint, _without(missing, joint.model, joint))


def _without(missing: Missing, model: Program, joint: Planner) -> Program:
    tangents = [node for node in _given(joint) if node in model.tangents]
    absent = [tangents[index] for index in missing.tangents]
    values = (node.meta["val"] for node in absent)
    fewer = sum(
        joint.number(value.numel()) * value.itemsize
        for value in values
        if is_on(joint.counted, value)
    )
    nbytes = [*model.nbytes]
    for s in model.storages(absent):
        nbytes[s] = 0
    returned = [*_returned(joint, model)]
    gone = {s for s, index in returned if index in missing.outputs}
    gone.difference_update(s for s, index in returned if index not in missing.outputs)
    return replace(
        model,
        nbytes=nbytes,
        outputs=model.outputs - gone,
        written_back=model.written_back | gone,
        tangent_bytes=model.tangent_bytes - fewer,
    )


def _given(joint: Planner) -> list[fx.Node]:
    """The tensors among a joint graph's inputs."""
    placeholders = joint.joint.find_nodes(op="placeholder")
    return [n for n in placeholders if isinstance(n.meta.get("val"), torch.Tensor)]


class Input(NamedTuple):
    """What a backward may be given: its storage in the model, bytes, and the node's name."""

    storage: int
    nbytes: int
    name: str


def _inputs(joint: Planner, model: Program) -> dict[int, Input]:
    found: dict[int, Input] = {}
    for index, node in enumerate(_given(joint)):
        value = node.meta["val"]
        nbytes = joint.number(value.untyped_storage().nbytes())
        for s in model.storages([node]):
            nbytes = nbytes if is_on(joint.counted, value) else 0
            found[index] = Input(s, nbytes, node.name)
    after, results = len(_given(joint)), _results(joint)
    for s, index in _returned(joint, model):
        if s in model.outputs:
            found[after + index] = Input(s, model.nbytes[s], results[index].name)
    return found


def _results(joint: Planner) -> list[Any]:
    """What the forward returns to its caller."""
    (output,) = joint.joint.find_nodes(op="output")
    return tree_leaves(output.args)[: joint.num_fwd_outputs]


def _returned(joint: Planner, model: Program) -> Iterator[tuple[int, int]]:
    """The storages that the forward returns, and where."""
    for index, node in enumerate(_results(joint)):
        for s in model.storages([node]) if isinstance(node, torch.fx.Node) else ():
            yield s, index


def _outputs(joint: Planner, model: Program) -> dict[int, int]:
    found: dict[int, int] = {}
    for s, index in _returned(joint, model):
        if s in model.outputs:
            found[index] = found.get(index, 0) + model.nbytes[s]
    return found


def _bytes(model: Program, evaluation: Evaluation) -> tuple[int, int, int]:
    """What a plan keeps, and the most that is live in its forward and its backward."""
    kept = model.size(evaluation.saved - model.outputs)
    backward = max(evaluation.step_peaks) - model.held_by_caller
    return kept, evaluation.forward_peak, backward


def _graph_plans(joint: Planner, plans: Plans) -> list[GraphPlan]:
    """The plans that were evaluated."""
    model = plans.graph
    # Where several are in one storage, the first.
    returned = dict(reversed([*_returned(joint, model)]))
    found = []
    for storages, evaluation in plans.evaluations.items():
        saved = evaluation.saved & returned.keys()
        outputs = frozenset(returned[s] for s in saved)
        cost = plans.found[storages].cost
        found.append(GraphPlan(*_bytes(model, evaluation), cost, outputs, storages))
    return found


class StepPlan(NamedTuple):
    """The plan of each slot of each graph; bytes, and cost in the estimator's unit."""

    peak: int
    cost: float
    choices: dict[int, tuple[int, ...]]


class StepCurve:
    """The plans for a step that trade its peak for recomputation best.

    Args:
        graphs: the plans of each graph, by its number.
        calls: likewise, for each slot how many calls a step makes.
        moments: the step.

    Where a step has one graph, all choices for it are compared.  With more, the
    peak is lowered level by level, each time by the choices that cost least for what
    they take off, and what room is left is filled again.  The levels do not depend on
    what is asked, so a lower peak asked is never answered by a higher one.

    O(levels * choices * moments).
    """

    def __init__(
        self,
        graphs: Mapping[int, GraphPlans],
        calls: Mapping[int, Sequence[int]],
        moments: Moments,
    ) -> None:
        self.graphs = graphs
        # The choices of all graphs, what each has live at every moment, and its cost.
        self._choices: list[tuple[int, ...]] = []
        # Of each graph, which are its own; the first of them is the fastest plan for all.
        self._own: list[slice] = []
        with _disable_current_modes(), torch.device("cpu"), torch.no_grad():
            self._rest = torch.tensor([*moments.values()], dtype=torch.float64)
            found = []
            for graph in graphs:
                choices, *numbers = self._options(graph, calls[graph], moments)
                own = slice(len(self._choices), len(self._choices) + len(choices))
                self._own.append(own)
                self._choices += choices
                found.append(numbers)
            self._vectors, self._costs = map(torch.cat, zip(*found))
            states = self._search()
        self.unbudgeted = states[0]
        self.plans = [states[i] for i in undominated([state[:2] for state in states])]

    @property
    def floor(self) -> int:
        return self.plans[0].peak

    def within(self, peak: int) -> StepPlan:
        """The cheapest plan below a peak; that of the floor if there is none."""
        fitting = [plan for plan in self.plans if plan.peak <= peak]
        return fitting[-1] if fitting else self.plans[0]

    def _options(
        self, graph: int, calls: Sequence[int], moments: Moments
    ) -> tuple[list[tuple[int, ...]], torch.Tensor, torch.Tensor]:
        """The choices for a graph, what each has live at every moment, and its cost."""
        plans, slots = self.graphs[graph].plans, len(calls)
        live = self._live_by_slots(graph, slots, moments)
        # Two plans, and the slot at which the second begins.
        choices = [(p, p, slots) for p in range(len(plans))]
        if slots > 1:
            lowest = int((live[:, -1] + self._rest).amax(1).argmin())
            choices += [
                (p, q, at)
                for p, q in itertools.permutations(_combined(plans, slots, lowest), 2)
                for at in _splits(slots)
            ]
        first, second, begin = torch.tensor(choices).unbind(1)
        vectors = live[first, begin] + live[second, -1] - live[second, begin]
        cost = torch.tensor([plan.cost for plan in plans], dtype=torch.float64)
        made = torch.tensor([0, *itertools.accumulate(calls)])
        costs = made[begin] * cost[first] + (made[-1] - made[begin]) * cost[second]
        # Whatever the other graphs do, these are the ones that may be of use.
        measures = (
            vectors.amax(1),
            (vectors + self._rest).amax(1),
            vectors[:, int((live[:, -1].amax(0) + self._rest).argmax())],
        )
        pairs = [[*zip(m.tolist(), costs.tolist())] for m in measures]
        found = {0}.union(*map(undominated, pairs))
        # Of one call alone there are few, and others may need any.
        good = sorted(found) if slots > 1 else list(range(len(choices)))
        chosen = (choices[i] for i in good)
        of_slots = [(p,) * at + (q,) * (slots - at) for p, q, at in chosen]
        return of_slots, vectors[good], costs[good]

    def _live_by_slots(self, graph: int, slots: int, moments: Moments) -> torch.Tensor:
        """What calls in slots below k have live: by plan, k and moment."""
        plans = self.graphs[graph]
        shape = (slots + 1, len(moments), len(plans.plans))
        live = torch.zeros(shape, dtype=torch.float64)

        @functools.cache
        def nbytes(what: str, of: Any) -> torch.Tensor:
            return torch.tensor(plans.live(what, of), dtype=torch.float64)

        for at, moment in enumerate(moments):
            for held in moment:
                if held.graph == graph:
                    live[held.slot + 1, at] += nbytes(held.what, held.of)
        return live.cumsum(0).permute(2, 0, 1)

    def _search(self) -> list[StepPlan]:
        """States on the way from the fastest plans to the lowest peak; that is first."""
        state = torch.tensor([own.start for own in self._own])
        states = [self._plan(state)]
        if len(state) == 1:
            one = torch.arange(len(self._choices)).unsqueeze(1)
            return states + [self._plan(state) for state in one]
        floor = self._settled(state, 0.0)
        states.append(self._plan(floor))
        low, high = states[1].peak, states[0].peak
        for level in range(_LEVELS - 1, -1, -1):
            peak = low + math.floor((high - low) * (level / _LEVELS) ** 1.5)
            lower = self._lowered(state, peak)
            state = self._settled(floor if lower is None else lower, peak)
            states.append(self._plan(state))
        return states

    def _plan(self, state: torch.Tensor) -> StepPlan:
        peak = math.ceil(self._live(state).max().item())
        cost = math.fsum(self._costs[state].tolist())
        choices = (self._choices[i] for i in state.tolist())
        return StepPlan(peak, cost, dict(zip(self.graphs, choices)))

    def _live(self, state: torch.Tensor) -> torch.Tensor:
        return self._rest + self._vectors[state].sum(0)

    def _lowered(self, state: torch.Tensor, peak: float) -> torch.Tensor | None:
        """Take off what is above the peak, by what costs least for it."""
        state = state.clone()
        sizes = torch.tensor([own.stop - own.start for own in self._own])
        owner = torch.arange(len(state)).repeat_interleave(sizes)
        while True:
            live = self._live(state)
            excess = (live - peak).clamp(min=0).sum()
            if not excess:
                return state
            # In the place of which choice of the same graph each would come.
            place = state[owner]
            left = live + self._vectors - self._vectors[place] - peak
            taken = excess - left.clamp(min=0).sum(1)
            more = self._costs - self._costs[place]
            # Bytes are whole, and a rounded sum is no gain: it may come back for ever.
            price, index = torch.where(taken >= 1, more / taken, math.inf).min(0)
            if price.isinf():
                return None
            state[owner[index]] = index

    def _settled(self, state: torch.Tensor, peak: float) -> torch.Tensor:
        """Choose for one graph after the other what costs least within the peak.

        Or, where nothing is, what is lowest.
        """
        state = state.clone()
        for _ in range(_SWEEPS):
            before = state.clone()
            for g, own in enumerate(self._own):
                vectors = self._vectors[own]
                peaks = (self._live(state) - self._vectors[state[g]] + vectors).amax(1)
                # Where a moment of others is the peak, its own still has to fall.
                over = vectors.amax(1) * (peaks > peak)
                numbers = peaks.clamp(min=peak), over, self._costs[own]
                keys = zip(*(each.tolist() for each in numbers), itertools.count())
                state[g] = own.start + min(keys)[-1]
            if state.equal(before):
                break
        return state


def _splits(slots: int) -> list[int]:
    """Slots at which another plan may begin; the last runs beside all others."""
    spread = {round(k * slots / _SPLITS) for k in range(1, _SPLITS)}
    return sorted({slots - 1, *spread} - {0, slots})


def _combined(plans: Sequence[GraphPlan], slots: int, lowest: int) -> list[int]:
    """The plans that may be combined: those that no other beats, by some measure.

    Among them are the fastest, and that of the step's ``lowest`` peak where all calls
    have the same.
    """
    found = {0, lowest}
    for share in (0, 1 / slots, 1):
        weight = [p.kept + share * max(p.forward, p.backward - p.kept) for p in plans]
        found.update(undominated([(w, plan.cost) for w, plan in zip(weight, plans)]))
    ranked = sorted(found, key=lambda i: (plans[i].kept, plans[i].cost))
    step = max((len(ranked) - 1) / (_COMBINED - 1), 1)
    spread = {round(k * step) for k in range(_COMBINED)}
    return sorted({0, *(i for at, i in enumerate(ranked) if at in spread)})
