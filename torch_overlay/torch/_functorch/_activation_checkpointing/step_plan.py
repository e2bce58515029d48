"""Plans for all graphs of a training step, by what they keep while others run.

A step is a sequence of events, F(c) and B(c): the forward and the backward of a call c.
At any moment, live are

    what eager code holds + what each call keeps whose backward is still to come
    + what the running graph has beyond that

so a plan of a graph is three numbers and a cost (:class:`GraphPlan`), and a step is a
list of moments (:class:`Moment`).  :class:`StepCurve` chooses plans so that no moment
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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch._functorch import config
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from .budget_solver import lightest
from .knapsack_exact import solve_knapsack_budgets
from .peak_budget import find_plans, model_of, Plans, rerun_costs, undominated
from .rerun_cost import concrete


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch.fx as fx
    from .liveness import Program
    from .memory_budget import Planner


__all__ = ["GraphPlan", "GraphPlans", "Moment", "StepCurve", "plan_graph"]

# Budgets of saved bytes whose knapsacks become plans.
_BUDGETS = [k / 48 for k in range(48)]
# Plans of one graph that may be combined, and slots at which they change, at most.
_COMBINED, _SPLITS = 16, 32
# Peaks between the floor and the fastest that are planned for.
_LEVELS = 48
# Calls of a graph that are taken to be alive at once before a step has shown it.
_CALLS = 4


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


@dataclass(frozen=True)
class GraphPlans:
    """The plans of a graph that no other beats; ``fastest`` is that of budget 1.

    Its inputs are ``primals`` and, for the backward, then ``tangents``, so many of each;
    ``sizes`` are their bytes, and those of each storage, by the ``model``.  For those
    that were compiled, ``compiled`` has the bytes of ``forward`` and ``backward``.
    """

    plans: list[GraphPlan]
    fastest: int
    primals: int = 0
    tangents: int = 0
    sizes: Sequence[dict[int, int]] = ()
    model: Optional[Program] = None
    compiled: dict[int, tuple[int, int]] = field(default_factory=dict)

    def corrected(self) -> GraphPlans:
        """The plans as compiled; the others as far off as the nearest of those."""
        if not self.compiled:
            return self
        plans = []
        for plan in self.plans:
            # A plan that is known is the nearest to itself.
            near = min(
                self.compiled,
                key=lambda index: (
                    self.plans[index] != plan,
                    abs(self.plans[index].kept - plan.kept),
                    index,
                ),
            )
            forward, backward = (
                math.ceil(nbytes * true / max(estimate, 1))
                for nbytes, true, estimate in zip(
                    plan[1:3], self.compiled[near], self.plans[near][1:3]
                )
            )
            plans.append(plan._replace(forward=forward, backward=backward))
        return replace(self, plans=plans)

    def backward(self, released: frozenset[int]) -> list[int]:
        """``backward`` of each plan, where nobody else holds some inputs any more.

        Those still count in a moment's rest, as if somebody held them to the end.
        """
        own: dict[int, int] = {}
        for index in released:
            own.update(self.sizes[index])
        # What a compile tells has tangents to the end, and does not know of the others.
        if self.model is None or not own or self.compiled:
            return [plan.backward for plan in self.plans]
        model = self.model.releasing(own)
        beside = model.held_by_caller + sum(own.values())
        return [
            max(evaluation.step_peaks) - beside
            for evaluation in model.evaluate_all([p.storages for p in self.plans])
        ]

    def leanest(self, calls: int) -> int:
        """The plan of the lowest peak where so many calls are alive at once."""

        def peak(index: int) -> tuple[float, float]:
            plan = self.plans[index]
            total = (calls - 1) * plan.kept + max(plan.forward, plan.backward)
            return total, plan.cost

        return min(range(len(self.plans)), key=peak)


class Moment(NamedTuple):
    """The most that eager code has live while the calls ``alive`` wait for a backward.

    Args:
        rest: bytes.
        alive: graph and slot of each call.
        running: graph and slot of the call whose forward ("F") or backward ("B") runs, or
            a backward after which all that is saved stays ("R").
        outputs: graph, slot, index and bytes of outputs that nobody holds any more,
            unless their graph saves them.
        released: the inputs of a running backward that nobody else holds, among them its
            tangents.
    """

    rest: int
    alive: frozenset[tuple[int, int]]
    running: tuple[int, int, str] | None = None
    outputs: frozenset[tuple[int, int, int, int]] = frozenset()
    released: frozenset[int] = frozenset()


def plan_graph(
    joint: Planner, saved: Sequence[fx.Node], is_only: bool = False
) -> GraphPlans:
    """The plans of a joint graph, and its model; ``saved`` is what that of budget 1 saves.

    Or the one that saves ``saved``, if that is the only one to have.

    There are those of the search for a peak, those of knapsacks at many budgets, and the
    one that saves nothing: where calls wait for each other, what a call keeps counts for
    more than its own peak.
    Raises as :func:`.liveness.read` does.
    """
    graph = model_of(joint)
    cheapest, expensive = joint.cheapest_cut()
    if is_only:
        plans = Plans(graph, rerun_costs(graph, expensive))
        plans.evaluate([frozenset(graph.storages(saved))])
    else:
        plans = find_plans(graph, cheapest, expensive, saved)
        # A call that waits keeps least where all is computed again, as in a checkpoint.
        knapsacks = _knapsacks(joint.items(cheapest, expensive))
        plans.evaluate([frozenset(), *knapsacks])
    found = _graph_plans(joint, plans)
    best = [found[i] for i in undominated([plan[:4] for plan in found])]
    fastest = next(iter(plans.evaluations))
    top = min(
        range(len(best)), key=lambda i: (best[i].cost, best[i].storages != fastest)
    )
    placeholders = joint.joint.find_nodes(op="placeholder")
    tangents = sum(node in graph.tangents for node in placeholders)
    sizes = [
        {s: concrete(node.meta["val"].untyped_storage().nbytes())}
        if isinstance(node.meta.get("val"), torch.Tensor)
        else {}
        for node in placeholders
        for s in graph.storages([node]) or (0,)
    ]
    primals = len(placeholders) - tangents
    return GraphPlans(best, top, primals, tangents, sizes, graph)


def _graph_plans(joint: Planner, plans: Plans) -> list[GraphPlan]:
    """The plans that were evaluated."""
    graph = plans.graph
    (output,) = joint.joint.find_nodes(op="output")
    returned: dict[int, int] = {}
    for index, node in enumerate(tree_leaves(output.args)[: joint.num_fwd_outputs]):
        if isinstance(node, torch.fx.Node):
            for s in graph.storages([node]):
                returned.setdefault(s, index)
    found: list[GraphPlan] = []
    for storages, evaluation in plans.evaluations.items():
        kept = evaluation.saved
        found.append(
            GraphPlan(
                graph.size(kept - graph.outputs),
                evaluation.forward_peak,
                max(evaluation.step_peaks) - graph.held_by_caller,
                plans.found[storages].cost,
                frozenset(returned[s] for s in kept & graph.outputs if s in returned),
                storages,
            )
        )
    return found


def _knapsacks(items: Sequence[Any]) -> Iterator[frozenset[int]]:
    """What many budgets of saved bytes save of a graph's items."""
    memory = [float(item.nbytes) for item in items]
    runtimes = [item.runtime for item in items]
    capacities = [math.fsum(memory) * budget for budget in _BUDGETS]
    solutions = solve_knapsack_budgets(memory, runtimes, capacities)
    for saved in dict.fromkeys(tuple(solution.saved) for solution in solutions):
        chosen = lightest(memory, runtimes, [*saved])
        yield frozenset(s for i in chosen for s in items[i].storages)


def calls_assumed() -> int:
    """How many calls of a graph are alive at once, before a step has shown it."""
    calls: Optional[int] = config.activation_memory_graph_calls  # type: ignore[attr-defined]
    return calls or _CALLS


# Two plans, and the slot at which the second begins.
Choice = tuple[int, int, int]


class StepPlan(NamedTuple):
    """The plan of each slot of each graph; bytes, and cost in the estimator's unit."""

    peak: int
    cost: float
    choices: tuple[tuple[int, ...], ...]


class StepCurve:
    """The plans for a step that trade its peak for recomputation best.

    Args:
        graphs: the plans of each graph.
        calls: for each graph and slot, how many calls a step makes.
        moments: the step.
        scales: what the bytes of each graph's plans are to be multiplied by.

    Where a step has one graph, all choices for it are compared.  With more, the
    peak is lowered level by level, each time by the choice that costs least for what
    it takes off, and what room is left is filled again.  The levels do not depend on
    what is asked, so a lower peak asked is never answered by a higher one.

    O(levels * graphs * choices * moments).
    """

    def __init__(
        self,
        graphs: Sequence[GraphPlans],
        calls: Sequence[Sequence[int]],
        moments: Iterable[Moment],
        scales: Sequence[float],
    ) -> None:
        self.slots = [len(each) for each in calls]
        most: dict[tuple[Any, ...], int] = {}
        for rest, *where in moments:
            most[tuple(where)] = max(rest, most.get(tuple(where), rest))
        self.moments = [Moment(rest, *where) for where, rest in most.items()]
        with _disable_current_modes(), torch.device("cpu"), torch.no_grad():
            self.rest = torch.tensor(
                [moment.rest for moment in self.moments], dtype=torch.float64
            )
            self.options = [
                self._options(g, plans, calls[g], scales[g])
                for g, plans in enumerate(graphs)
            ]
            states = self._search(graphs)
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
        self, g: int, graph: GraphPlans, calls: Sequence[int], scale: float
    ) -> tuple[list[Choice], torch.Tensor, list[float]]:
        """The choices for a graph, what each has live at every moment, and its cost."""
        slots = len(calls)
        live = self._live_by_slots(g, graph, slots, scale)
        choices: list[Choice] = [(p, p, slots) for p in range(len(graph.plans))]
        if slots > 1:
            lowest = int((live[:, -1] + self.rest).amax(1).argmin())
            choices += [
                (p, q, at)
                for p, q in itertools.permutations(_hull(graph, slots, lowest), 2)
                for at in _splits(slots)
            ]
        first, second, begin = torch.tensor(choices).unbind(1)
        vectors = live[first, begin] + live[second, -1] - live[second, begin]
        cost = torch.tensor([plan.cost for plan in graph.plans], dtype=torch.float64)
        made = torch.tensor([0, *itertools.accumulate(calls)])
        total = made[begin] * cost[first] + (made[-1] - made[begin]) * cost[second]
        costs = total.tolist()
        if slots > 1:
            # Whatever the other graphs do, these are the ones that may be of use.
            measures = (
                vectors.amax(1),
                (vectors + self.rest).amax(1),
                vectors[:, int((live[:, -1].amax(0) + self.rest).argmax())],
            )
            found = {
                i for m in measures for i in undominated([*zip(m.tolist(), costs)])
            }
            good = sorted(found | {graph.fastest})
            choices = [choices[i] for i in good]
            vectors, costs = vectors[good], [costs[i] for i in good]
        return choices, vectors, costs

    def _live_by_slots(
        self, g: int, graph: GraphPlans, slots: int, scale: float
    ) -> torch.Tensor:
        """What calls in slots below k have live: by plan, k and moment."""
        shape = (slots + 1, len(self.moments), len(graph.plans))
        live = torch.zeros(shape, dtype=torch.float64)
        numbers = torch.tensor([plan[:2] for plan in graph.plans]).double() * scale
        kept, forward = numbers.unbind(1)

        @functools.cache
        def backward(released: frozenset[int]) -> torch.Tensor:
            return torch.tensor(graph.backward(released)).double() * scale

        for at, moment in enumerate(self.moments):
            for other, slot in moment.alive:
                if other == g:
                    live[slot + 1, at] += kept
            for other, slot, index, nbytes in moment.outputs:
                if other == g:
                    saves = [index in plan.outputs for plan in graph.plans]
                    live[slot + 1, at] += nbytes * torch.tensor(saves)
            if moment.running is not None and moment.running[0] == g:
                _, slot, phase = moment.running
                if phase == "F":
                    live[slot + 1, at] += forward
                elif phase == "R":
                    live[slot + 1, at] += backward(frozenset())
                else:
                    live[slot + 1, at] += backward(moment.released) - kept
        return live.cumsum(0).permute(2, 0, 1)

    def _search(self, graphs: Sequence[GraphPlans]) -> list[StepPlan]:
        """States on the way from the fastest plans to the lowest peak; that is first."""
        fastest = [
            [choice[:2] for choice in choices].index((plans.fastest,) * 2)
            for plans, (choices, _, _) in zip(graphs, self.options)
        ]
        costs = [torch.tensor(c, dtype=torch.float64) for _, _, c in self.options]
        state = list(fastest)
        states = [self._state(state)]
        if len(graphs) == 1:
            choices, _, _ = self.options[0]
            return states + [self._state([i]) for i in range(len(choices))]
        floor = self._lowest(state)
        states.append(self._state(floor))
        low, high = states[1].peak, states[0].peak
        for level in range(_LEVELS - 1, -1, -1):
            peak = low + (high - low) * (level / _LEVELS) ** 1.5
            state = self._lowered(state, costs, peak) or list(floor)
            self._refill(state, costs, peak)
            states.append(self._state(state))
        return states

    def _live(self, state: Sequence[int]) -> torch.Tensor:
        live = self.rest.clone()
        for option, (_, vectors, _) in zip(state, self.options):
            live += vectors[option]
        return live

    def _state(self, state: Sequence[int]) -> StepPlan:
        live = self._live(state)
        peak = math.ceil(live.max().item()) if len(live) else 0
        cost = math.fsum(costs[i] for i, (_, _, costs) in zip(state, self.options))
        chosen = (choices[at] for at, (choices, _, _) in zip(state, self.options))
        plans = (
            (p,) * at + (q,) * (slots - at)
            for (p, q, at), slots in zip(chosen, self.slots)
        )
        return StepPlan(peak, cost, tuple(plans))

    def _lowest(self, state: Sequence[int]) -> list[int]:
        """Change one graph's choice at a time for as long as the peak falls."""
        state = list(state)
        best = math.inf
        while True:
            for g, (_, vectors, costs) in enumerate(self.options):
                others = self._live(state) - vectors[state[g]]
                # Where a moment of others is the peak, the excess still has to fall.
                peaks = (vectors + others).amax(1)
                own = vectors.amax(1)
                order = zip(peaks.tolist(), own.tolist(), costs, range(len(costs)))
                state[g] = min(order)[3]
            peak = self._live(state).max().item()
            if peak >= best:
                return state
            best = peak

    def _lowered(
        self, state: Sequence[int], costs: Sequence[torch.Tensor], peak: float
    ) -> list[int] | None:
        """Take off what is above the peak, by what costs least for it."""
        state = list(state)
        while True:
            live = self._live(state)
            excess = (live - peak).clamp(min=0).sum().item()
            if excess <= 0:
                return state
            best: tuple[float, int, int] | None = None
            for g, (_, vectors, _) in enumerate(self.options):
                others = live - vectors[state[g]]
                left = (vectors + others - peak).clamp(min=0).sum(1)
                taken = excess - left
                more = costs[g] - costs[g][state[g]]
                price = torch.where(taken > 0, more / taken, math.inf)
                value, index = price.min(0)
                if math.isfinite(value.item()):
                    candidate = (value.item(), g, int(index))
                    best = min(best or candidate, candidate)
            if best is None:
                return None
            state[best[1]] = best[2]

    def _refill(
        self, state: list[int], costs: Sequence[torch.Tensor], peak: float
    ) -> None:
        """Recompute less wherever that fits."""
        for _ in range(2):
            for g, (_, vectors, _) in enumerate(self.options):
                others = self._live(state) - vectors[state[g]]
                fits = (vectors + others).amax(1) <= peak
                state[g] = int(torch.where(fits, costs[g], math.inf).argmin())


def _splits(slots: int) -> list[int]:
    """Slots at which another plan may begin; the last runs beside all others."""
    spread = {round(k * slots / _SPLITS) for k in range(1, _SPLITS)}
    return sorted({slots - 1, *spread} - {0, slots})


def _hull(graph: GraphPlans, slots: int, lowest: int) -> list[int]:
    """The plans that are best for some price of memory, by several measures of it.

    And the fastest, the one that is leanest by itself, and that of the step's ``lowest``
    peak where all calls have the same.
    """
    plans = graph.plans
    found = {graph.fastest, graph.leanest(1), lowest}
    for share in (0, 1 / slots, 1):
        weight = [p.kept + share * max(p.forward, p.backward - p.kept) for p in plans]
        steps = undominated([(w, plan.cost) for w, plan in zip(weight, plans)])
        hull: list[int] = []
        for i in steps:
            while len(hull) > 1 and _above(hull[-2], hull[-1], i, weight, plans):
                hull.pop()
            hull.append(i)
        found.update(hull)
    if len(found) > _COMBINED:
        ranked = sorted(found, key=lambda i: (plans[i].kept, plans[i].cost))
        step = (len(ranked) - 1) / (_COMBINED - 1)
        found = {ranked[round(k * step)] for k in range(_COMBINED)} | {graph.fastest}
    return sorted(found)


def _above(
    a: int, b: int, c: int, weight: Sequence[float], plans: Sequence[GraphPlan]
) -> bool:
    """Whether b costs more than the line from a to c."""
    left = (plans[a].cost - plans[b].cost) * (weight[c] - weight[a])
    return left <= (plans[a].cost - plans[c].cost) * (weight[b] - weight[a])
