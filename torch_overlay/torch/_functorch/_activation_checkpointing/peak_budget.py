"""The plans of a joint graph that trade its peak for recomputation best.

Where little is saved, the first step of the backward repeats a long stretch of the
forward, all of which stays live: the peak rises again, above that of no budget at all.
Peaks are those of :mod:`.liveness`, or, where inductor compiles the graphs, those of
:mod:`.fused_peak`: without parameters and inputs, which no plan changes.

The search, on integers alone and without a min cut of its own:

1.  *Checkpoints.*  A plan that saves what crosses some narrow places of the forward,
    between a transformer's layers say, repeats one segment at a time.  A segment's own
    peak hardly depends on the others, so it is measured once, and dynamic programming
    finds the checkpoints with the lowest peak, or those that save least below a peak
    (Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019).
2.  *Items.*  What a segment repeats may be saved as well, which adds to the peaks of
    the segments whose turn comes earlier.  Items join by falling cost per byte where
    these have room.
3.  Every plan, those of upstream's min cuts too, is evaluated on the whole graph.  Those
    that no other beats in both peak and cost are the curve.  It does not depend on the
    budget, so a smaller one never has a higher peak.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, Optional, TYPE_CHECKING

from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

from .fused_peak import by_kernels, has_kernel
from .knapsack_exact import solve_knapsack_budgets
from .liveness import CannotPlan
from .random_ops import must_run_once
from .rerun_cost import is_costly, rerun_cost, roofline
from .ties import lightest


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch.fx as fx
    from .liveness import Evaluation, Program
    from .joint import Item, Planner

log = logging.getLogger(__name__)

__all__ = [
    "PlannedPeak",
    "Plans",
    "compare_with_no_checkpoints",
    "model_of",
    "of_knapsacks",
    "plans_of",
    "rerun_costs",
    "search",
    "undominated",
]

# Places at which checkpoints may stand: of the minima, the narrowest by these shares.
_SHARES = (1, 0.75, 0.5, 0.25)
# A segment spans at most so many candidate places.
_SPAN = 8
# Peaks, between the floor's and that of budget 1, for which items are added.
_TARGET_PEAKS = 24
# Peaks above the lowest, as a factor, for which the fewest checkpoints are sought.
_SLACKS = (1.1, 1.3, 1.7, 2.5)
# How often the dynamic program is told what its own answer measures.
_CORRECTIONS = 8
# Budgets of saved bytes whose knapsacks become plans.
_BUDGETS = [k / 48 for k in range(48)]
# By which share of it the checkpoints of a graph may raise its floor without a word.
_WORSE = 0.01
# How often the lowest plans are changed in one value, how many plans in how many values,
# and the share gained below which that ends.
_ROUNDS, _STARTS, _TRIED, _GAIN = 6, 4, 12, 0.003


class PlannedPeak(NamedTuple):
    """A plan on the curve: bytes, the estimator's unit, and the storages to save."""

    peak: int
    cost: float
    storages: frozenset[int]


def undominated(points: Sequence[tuple[float, ...]]) -> list[int]:
    """The points that no other is at most as large as in every number, of equals one.

    Their indices, by rising points; of equals the first.  O(n log n) for pairs, for more
    numbers O(n * points found).
    """
    found: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i], i)):
        # Of pairs that were found, the last has the least second number.
        rivals = found[-1:] if len(points[i]) == 2 else found
        if not any(all(map(operator.le, points[k], points[i])) for k in rivals):
            found.append(i)
    return found


def model_of(graph: Planner, operators: Optional[Program] = None) -> Program:
    """What a graph holds: inductor's kernels, or its ``operators`` one by one.

    Raises CannotPlan where it runs bodies, and nobody knows what they hold.
    """
    operators = graph.model if operators is None else operators
    for each in operators.with_bodies:
        if each.scratch is None and not (graph.fused and has_kernel(each.node)):
            raise CannotPlan(f"it is not known what is live within {each.node.name}")
    return by_kernels(operators) if graph.fused else operators


def plans_of(graph: Planner, calls: int = 1) -> Plans:
    """The plans of a graph, as `search` finds them where so many calls wait at once."""
    model = model_of(graph)
    plans = Plans(model, rerun_costs(model, graph), calls)
    search(plans, graph, graph.fastest())
    return plans


def compare_with_no_checkpoints(graph: Planner, plans: Plans) -> None:
    """Warn where checkpoints that a user has set within a graph raise its floor."""
    fixed = {
        node: node.meta.pop("recompute")
        for node in graph.joint.nodes
        if "ac_graph_id" in node.meta and "recompute" in node.meta
    }
    if not fixed:
        return
    try:
        without = plans_of(replace(graph)).lowest()[0].peak
    finally:
        for node, policy in fixed.items():
            node.meta["recompute"] = policy
    floor = plans.lowest()[0].peak
    if without < floor * (1 - _WORSE):
        log.warning(
            "checkpoints within %s fix whether %d values are saved or recomputed: no plan "
            "needs less than %d bytes at its peak, and without them one needs %d (both "
            "without parameters and inputs%s)",
            get_aot_graph_name(),
            len(fixed),
            floor,
            without,
            ", by estimates" * graph.fused,
        )


def rerun_costs(model: Program, graph: Planner) -> list[float]:
    """What it costs to repeat each operator of a graph's model, by its estimator.

    As for the knapsack, only what a min cut does not recompute freely has a cost, which
    is the same.  But "roofline" charges all bytes, and "flops" all that is not fused.
    """
    estimator, (_, expensive) = graph.ask.estimator, graph.cheapest_cut()
    if estimator == "roofline":
        return [roofline(node) for node in model.nodes]

    def has_cost(node: fx.Node) -> bool:
        if estimator == "flops" and is_costly(node):
            return True
        return node in expensive and not must_run_once(node)

    return [
        rerun_cost(node, estimator) if has_cost(node) else 0 for node in model.nodes
    ]


def search(plans: Plans, joint: Planner, fastest: Sequence[fx.Node]) -> None:
    """Evaluate a graph's plans for many peaks; the first is that of budget 1.

    That saves the ``fastest``.  Some hundred evaluations, and O(places * _SPAN) for
    dynamic programming.
    """
    graph, items = plans.graph, joint.items
    cheapest, _ = joint.cheapest_cut()
    bases = [frozenset(graph.storages(saved)) for saved in (fastest, cheapest)]
    plans.evaluate(bases)
    chains = [_Chain(plans, places) for places in _places(graph)]
    _correct(plans, chains)
    for chain in chains:
        peak, lowest = min(chain.found, key=lambda each: each[0])
        bases += [lowest, chain.everything]
        for slack in _SLACKS:
            chosen = chain.leanest(math.floor(peak * slack))
            if chosen is not None:
                bases.append(chain.storages(chosen))
    if not graph.is_fused:
        # What is lowest by estimates alone is often not when it is compiled.
        plans.evaluate([*bases, frozenset(), *of_knapsacks(items)])
        bases.append(_refined(plans))
    evaluated = plans.evaluate(bases)
    top = plans.found[bases[0]]
    floor = min(plan.peak for plan in plans.found.values())
    # Closer to each other at the floor, where a little room buys most.
    targets = [
        floor + math.floor((top.peak - floor) * (k / _TARGET_PEAKS) ** 1.5)
        for k in range(_TARGET_PEAKS)
    ]
    more: list[frozenset[int]] = []
    for base, evaluation in evaluated.items():
        more += plans.with_items(base, evaluation, targets)
    plans.evaluate(more)


class Plans:
    """All plans that were evaluated, by the storages to save."""

    def __init__(self, graph: Program, cost: Sequence[float], calls: int = 1) -> None:
        self.graph = graph
        self.cost = cost
        # The other calls of the graph only keep what waits for their backward.
        self.waiting = calls - 1
        self.expensive = [op for op, each in enumerate(cost) if each]
        self.found: dict[frozenset[int], PlannedPeak] = {}
        self.evaluations: dict[frozenset[int], Evaluation] = {}

    def evaluate(
        self, choices: Iterable[frozenset[int]]
    ) -> dict[frozenset[int], Evaluation]:
        """Evaluate plans together, equal ones once."""
        wanted = dict.fromkeys(choices)
        new = [chosen for chosen in wanted if chosen not in self.evaluations]
        for chosen, evaluation in zip(new, self.graph.evaluate_all(new)):
            self.evaluations[chosen] = evaluation
            repeated, bit = evaluation.repeated, evaluation.bit
            cost = math.fsum(
                self.cost[op] for op in self.expensive if repeated[op] & bit
            )
            peak = evaluation.peak
            if self.waiting:
                peak += self.waiting * self.graph.size(
                    evaluation.saved - self.graph.outputs
                )
            self.found[chosen] = PlannedPeak(peak, cost, chosen)
        return {chosen: self.evaluations[chosen] for chosen in wanted}

    @functools.cached_property
    def made_of(self) -> list[list[tuple[int, ...]]]:
        """For each storage, what the operators that read it make."""
        found: list[list[tuple[int, ...]]] = [[] for _ in self.graph.nbytes]
        for each in self.graph.operators:
            for s in each.reads:
                found[s].append(each.writes)
        return found

    def lowest(self) -> list[PlannedPeak]:
        """All plans by rising peak, of equals the cheapest first."""
        return sorted(self.found.values(), key=lambda plan: plan[:2])

    def with_items(
        self, base: frozenset[int], evaluation: Evaluation, targets: Sequence[int]
    ) -> Iterator[frozenset[int]]:
        """For each target peak, save more than ``base`` where there is room for it."""
        graph = self.graph
        # Peaks between two moments at which something expensive is repeated.
        peaks = [evaluation.forward_peak]
        items: list[tuple[float, int, int, int, list[int]]] = []
        for live, repeated in zip(evaluation.step_peaks, evaluation.repeated_by_step):
            expensive = [op for op in repeated if self.cost[op]]
            if expensive:
                peaks.append(live)
            else:
                peaks[-1] = max(peaks[-1], live)
            for op in expensive:
                parts = [
                    s
                    for s in graph.operators[op].writes
                    if graph.saved_as[s] is not None and graph.first_use[s] >= 0
                ]
                size = graph.size(parts)
                if parts:
                    # Of equals the latest first: it is saved for the shortest time.
                    density = self.cost[op] / max(size, 1)
                    items.append((-density, -op, size, len(peaks) - 1, parts))
        items.sort()
        for target in targets:
            room = [target - peak for peak in peaks]
            chosen = set(base)
            # From where on there is no room for a size: nor will there be any more.
            full: dict[int, int] = {}
            for _, _, size, before, parts in items:
                if before >= full.get(size, before + 1):
                    continue
                if min(room[:before]) >= size:
                    room[:before] = [free - size for free in room[:before]]
                    chosen.update(parts)
                else:
                    full[size] = before
            yield frozenset(chosen)
            if not full:
                break


def of_knapsacks(items: Sequence[Item]) -> Iterator[frozenset[int]]:
    """What many budgets of saved bytes save of a graph's items."""
    memory = [float(item.nbytes) for item in items]
    runtimes = [item.runtime for item in items]
    capacities = [math.fsum(memory) * budget for budget in _BUDGETS]
    solutions = solve_knapsack_budgets(memory, runtimes, capacities)
    for saved in dict.fromkeys(tuple(solution.saved) for solution in solutions):
        chosen = lightest(memory, runtimes, [*saved])
        yield frozenset(s for i in chosen for s in items[i].storages)


def _refined(plans: Plans) -> frozenset[int]:
    """What to save for a peak below the lowest found, by changes of one value at a time.

    Places and knapsacks choose among plans of some form, which need not hold the lowest.
    So the lowest few are changed in every round, until that gains nothing.
    """
    changed: set[frozenset[int]] = set()
    best = plans.lowest()[0].peak
    for _ in range(_ROUNDS):
        starts = [
            plan.storages for plan in plans.lowest() if plan.storages not in changed
        ]
        starts = starts[:_STARTS]
        changed.update(starts)
        plans.evaluate(more for start in starts for more in _changed(plans, start))
        lower = plans.lowest()[0].peak
        if lower > best * (1 - _GAIN):
            break
        best = lower
    return plans.lowest()[0].storages


def _changed(plans: Plans, chosen: frozenset[int]) -> Iterator[frozenset[int]]:
    """The plans that save one value less than ``chosen``, one more, or another one.

    Another one is what it is made of, or what is made of it; one more what is repeated
    for the step with the peak.
    """
    graph, evaluation = plans.graph, plans.evaluations[chosen]
    saved = frozenset(evaluation.saved - graph.outputs)
    largest = sorted(saved, key=lambda s: (-graph.nbytes[s], s))[:_TRIED]
    for s in largest:
        yield saved - {s}
        made_of = frozenset(graph.operators[graph.producer[s]].reads)
        yield saved - {s} | made_of
        for made in plans.made_of[s]:
            yield saved - {s} | {*made}
    peaks = evaluation.step_peaks
    at = max(range(len(peaks)), key=peaks.__getitem__)
    repeated = [
        s for op in evaluation.repeated_by_step[at] for s in graph.operators[op].writes
    ]
    for s in sorted(repeated, key=lambda s: (-graph.nbytes[s], s))[:_TRIED]:
        yield saved | {s}


def _places(graph: Program) -> list[list[int]]:
    """Steps of the forward after which few bytes cross to later ones.

    Local minima, a list for each share of ``_SHARES``.  O(steps + storages).
    """
    steps = len(graph.forward)
    change = [0] * (steps + 1)
    for s, birth in enumerate(graph.first_use):
        if birth >= 0 and s not in graph.outputs:
            change[birth] += graph.nbytes[s]
            change[graph.last_use[s]] -= graph.nbytes[s]
    crossing = list(accumulate(change))
    # The last of equal ones.
    ends = [at for at in range(steps - 1) if crossing[at] != crossing[at + 1]]
    before = [math.inf, *(crossing[at] for at in ends)]
    minima = [
        (crossing[at], at)
        for more, at in zip(before, ends)
        if more > crossing[at] < crossing[at + 1]
    ]
    widths = sorted(width for width, _ in minima)
    choices: dict[tuple[int, ...], None] = {}
    for share in _SHARES:
        if widths:
            widest = widths[math.ceil(len(widths) * share) - 1]
            choices[tuple(at for width, at in minima if width <= widest)] = None
    return [list(choice) for choice in choices]


def _correct(plans: Plans, chains: Sequence[_Chain]) -> None:
    """Find the checkpoints of each chain that have the lowest peak.

    Where a segment's peak depends on its neighbours after all, the answer measures
    higher than it should.  What was learned then makes the next answer another one.
    Chains are measured together, which takes little longer than one of them.
    """
    open_chains = [*chains]
    for _ in range(_CORRECTIONS + 1):
        plans.evaluate(
            saved for chain in open_chains for saved in chain.choices.values()
        )
        for chain in open_chains:
            chain.measure()
        open_chains = [
            chain
            for chain in open_chains
            if chain.expected is None or chain.found[-1][0] > chain.expected
        ]
        for chain in open_chains:
            chain.choose()


class _Chain:
    """Plans that save what crosses some of a list of places in the forward.

    Place 0 is the start of the forward, where nothing crosses, and place ``end`` its
    end.  ``peak[i, j]`` is the most that is live while the backward works between the
    places i and j, without what the checkpoints up to i keep.
    """

    def __init__(self, plans: Plans, places: Sequence[int]) -> None:
        self.plans = plans
        graph = self.graph = plans.graph
        self.end = len(places) + 1
        self.at = [-1, *places, len(graph.forward)]
        self.crossing = self._crossing(places)
        self.everything = self.storages(range(self.end))
        self.width = {
            (i, j): graph.size(self.crossing[j] - self.crossing[i])
            for i in range(self.end)
            for j in range(i + 1, min(i + _SPAN, self.end) + 1)
        }
        self.where = self._where()
        self.peak: dict[tuple[int, int], int] = {}
        # What to measure next, with what that saves, and the peak that is expected of it.
        self.choices = self._saving(
            [i for i in range(1, self.end) if i % span == offset]
            for span in range(1, _SPAN + 1)
            for offset in range(span)
        )
        self.expected: Optional[int] = None
        # The peaks of what was expected to be lowest, and what it saves.
        self.found: list[tuple[int, frozenset[int]]] = []

    def storages(self, chosen: Iterable[int]) -> frozenset[int]:
        """What crosses these places."""
        return frozenset().union(*(self.crossing[i] for i in chosen))

    def _crossing(self, places: Sequence[int]) -> list[set[int]]:
        graph = self.graph
        found: list[set[int]] = [set() for _ in range(len(places) + 2)]
        for s, (birth, death) in enumerate(zip(graph.first_use, graph.last_use)):
            if birth >= 0 and graph.saved_as[s] is not None:
                crossed = range(bisect_left(places, birth), bisect_left(places, death))
                for i in crossed:
                    found[i + 1].add(s)
        return found

    def _where(self) -> list[int]:
        """The forward's step that each step of the backward has come down to, last first.

        That is where the last of the large storages was made that it or a later step
        reads.  Small ones (a mask, a constant) may be read anywhere.
        """
        graph = self.graph
        large = max(graph.nbytes, default=0) // 128
        where: list[int] = []
        latest = -1
        for step in reversed(graph.steps):
            reads = (s for s in step.operator.reads if graph.nbytes[s] >= large)
            latest = max(latest, *(graph.first_use[s] for s in reads), -1)
            where.append(latest)
        return where

    def _saving(
        self, choices: Iterable[Sequence[int]]
    ) -> dict[tuple[int, ...], frozenset[int]]:
        return {tuple(chosen): self.storages(chosen) for chosen in choices}

    def measure(self) -> None:
        """Learn the segments' peaks of the choices, which have been evaluated."""
        for chosen, storages in self.choices.items():
            live = self.plans.evaluations[storages].step_peaks[::-1]
            done = kept = 0
            for segment in zip((0, *chosen), (*chosen, self.end)):
                steps = bisect_right(self.where, self.at[segment[1]], lo=done)
                own = max(live[done:steps], default=0) - kept
                done = steps
                self.peak[segment] = max(self.peak.get(segment, 0), own)
                kept += self.width[segment]
            if self.expected is not None:
                self.found.append((self.plans.found[storages].peak, storages))
        self.segments = sorted(
            (stop, start, own, self.width[start, stop])
            for (start, stop), own in self.peak.items()
        )

    def choose(self) -> None:
        """Let the checkpoints be measured next that should have the lowest peak."""
        # Enough for a checkpoint at every place.
        low, high = 0, max(self.peak.values()) + self.graph.size(self.everything)
        chosen: Sequence[int] = range(1, self.end)
        while high - low > high // 1000 + 1:
            middle = (low + high) // 2
            fewest = self.leanest(middle)
            if fewest is None:
                low = middle
            else:
                high, chosen = middle, fewest
        self.choices, self.expected = self._saving([chosen]), high

    def leanest(self, peak: int) -> Optional[list[int]]:
        """The places to save at, so that no segment is live beyond ``peak``.

        What the checkpoints before a place keep is all that the segments after it
        need to know of them, and less is better.  None where there are no such places.
        O(places * span).
        """
        kept = [math.inf] * (self.end + 1)
        previous = [0] * (self.end + 1)
        kept[0] = 0
        for stop, start, own, width in self.segments:
            total = kept[start] + width
            if total < kept[stop] and kept[start] + own <= peak:
                kept[stop], previous[stop] = total, start
        if math.isinf(kept[self.end]):
            return None
        chosen: list[int] = []
        place = previous[self.end]
        while place:
            chosen.append(place)
            place = previous[place]
        return chosen[::-1]
