"""Finds the plans of a joint graph that best trade its peak against recomputation.

If little is saved, the first step of the backward repeats a long stretch of the
forward.  All of that stays live, and the peak rises above that without any budget.  So
saving fewer bytes is not enough.  Peaks are those of :mod:`.graph.liveness`, or of
:mod:`.graph.kernels` if inductor compiles the graphs.  They leave out parameters and
inputs, which no plan changes.

The search makes no min cuts beyond those of budget 1 and of what is cheap:

1.  *Checkpoints* at narrow places of the forward (:mod:`.peak.chains`).
2.  *Items.*  What a segment repeats may be saved as well, which adds to the peaks of
    the segments that the backward comes to before.  Items are added by falling cost per
    byte, while these peaks leave room.
3.  Every plan, including those of the two min cuts, is evaluated on the whole graph.
    Those that no other beats in both peak and cost are the curve.  It does not depend
    on the budget, so a smaller budget never leads to a higher peak.

What the plans keep and hold becomes the graph's :class:`.Menu`, with its head in one
piece and in chunks.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Optional, TYPE_CHECKING

from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

from ..._activation_checkpointing.knapsack_exact import solve_knapsack_budgets
from ..._activation_checkpointing.random_ops import must_run_once
from ..graph.chunking_cost import chunking_cost, chunks_in
from ..graph.inputs_outputs import (
    backward_inputs,
    input_tensors,
    live_bytes_model,
    Missing,
)
from ..graph.joint import ALL_CHEAP
from ..graph.recompute_cost import flops, is_costly, recompute_cost, roofline
from ..graph.storages import CannotPlan
from ..solver import lightest_items
from .chains import add_plans_of_checkpoints, Chain, checkpoint_places
from .footprint import Footprint, footprint_bytes
from .menu import Menu
from .plans import Plans, undominated
from .sized_plans import SizedPlans, Variant


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch.fx as fx
    from ..graph.joint import BudgetedGraph, Item
    from ..graph.liveness import Program

log = logging.getLogger(__name__)

# The number of target peaks, from the floor to that of budget 1, to add items for.
_TARGET_PEAKS = 24
# For each of these multiples of the lowest peak, the checkpoints that save least within
# it are sought.
_SLACKS = (1.1, 1.3, 1.7, 2.5)
# Budgets of saved bytes whose knapsacks become plans.
_BUDGETS = [k / 48 for k in range(48)]
# The share by which the user's checkpoints may raise a graph's floor without a warning.
_WORSE = 0.01
# The search changes the lowest plans by one value at a time: the most rounds of this,
# the plans to change per round, the values to try per plan, and the share by which a
# round must lower the peak for there to be another round.
_ROUNDS, _STARTS, _TRIED, _GAIN = 6, 4, 12, 0.003


def searched_plans(
    graph: BudgetedGraph, calls: int = 1, missing: Optional[Missing] = None
) -> Plans:
    """What `search_plans` finds for a graph of which ``calls`` wait at once."""
    model = live_bytes_model(graph, missing)
    plans = Plans(model, recompute_costs(model, graph), calls)
    search_plans(plans, graph)
    return plans


def compare_with_no_checkpoints(graph: BudgetedGraph, plans: Plans) -> None:
    """Warn if the checkpoints that a user has set within a graph raise its floor."""
    fixed = {
        node: node.meta.pop("recompute")
        for node in graph.joint.nodes
        if "ac_graph_id" in node.meta and "recompute" in node.meta
    }
    if not fixed:
        return
    try:
        without = searched_plans(replace(graph)).floor
    finally:
        for node, policy in fixed.items():
            node.meta["recompute"] = policy
    floor = plans.floor
    if without < floor * (1 - _WORSE):
        log.warning(
            "checkpoints within %s fix whether %d values are saved or recomputed: no "
            "plan needs less than %d bytes at its peak, and without them one needs %d "
            "(both without parameters and inputs%s)",
            get_aot_graph_name(),
            len(fixed),
            floor,
            without,
            ", by estimates" * graph.fused,
        )


def recompute_costs(model: Program, graph: BudgetedGraph) -> list[float]:
    """The cost of repeating each operator of a graph's model, in the estimator's unit.

    As in the knapsack, only what the cheapest min cut does not recompute has a cost.
    With "roofline", however, all operators do, and with "flops" also all that are not
    fused.
    """
    estimator, (_, expensive) = graph.ask.estimator, graph.cut(ALL_CHEAP)
    if estimator == "roofline":
        return [roofline(node) for node in model.nodes]

    def has_cost(node: fx.Node) -> bool:
        if estimator == "flops" and is_costly(node):
            return True
        return node in expensive and not must_run_once(node)

    return [
        recompute_cost(node, estimator) if has_cost(node) else 0 for node in model.nodes
    ]


def search_plans(plans: Plans, joint: BudgetedGraph) -> None:
    """Evaluate plans for many peaks; that of budget 1 is the first.

    Takes a few hundred evaluations, and O(places * _SPAN) for each answer of the
    dynamic program.
    """
    graph, items = plans.graph, joint.items
    cuts = joint.saved_at_budget_1(), joint.cut(ALL_CHEAP)[0]
    bases = [frozenset(graph.storages(saved)) for saved in cuts]
    plans.evaluate(bases)
    chains = [Chain(plans, places) for places in checkpoint_places(graph)]
    add_plans_of_checkpoints(plans, chains)
    for chain in chains:
        peak, lowest = min(chain.found, key=lambda each: each[0])
        bases += [lowest, chain.everything]
        for slack in _SLACKS:
            chosen = chain.fewest_checkpoints_within(math.floor(peak * slack))
            if chosen is not None:
                bases.append(chain.storages(chosen))
    if not graph.is_fused:
        # Not for kernels: plans that are lowest by estimates often are not as compiled.
        plans.evaluate([*bases, frozenset(), *plans_of_knapsacks(items)])
        bases.append(_lowest_refined(plans))
    evaluated = plans.evaluate(bases)
    top, floor = plans.peaks[bases[0]], plans.floor
    # Targets are closer together near the floor, where a little room gains most.
    targets = [
        floor + math.floor((top - floor) * (k / _TARGET_PEAKS) ** 1.5)
        for k in range(_TARGET_PEAKS)
    ]
    more: list[frozenset[int]] = []
    for base, evaluation in evaluated.items():
        more += plans.with_items(base, evaluation, targets)
    plans.evaluate(more)


def plans_of_knapsacks(items: Sequence[Item]) -> Iterator[frozenset[int]]:
    """The storages to save for each of many budgets of saved bytes, by a knapsack."""
    memory = [float(item.nbytes) for item in items]
    runtimes = [item.runtime for item in items]
    capacities = [math.fsum(memory) * budget for budget in _BUDGETS]
    solutions = solve_knapsack_budgets(memory, runtimes, capacities)
    for saved in dict.fromkeys(tuple(solution.saved) for solution in solutions):
        chosen = lightest_items(memory, runtimes, [*saved])
        yield frozenset(s for i in chosen for s in items[i].storages)


def _lowest_refined(plans: Plans) -> frozenset[int]:
    """What to save for a still lower peak, found by changing one value at a time.

    Checkpoints and knapsacks only yield plans of a certain form, and the lowest plan
    need not be one.  So each round changes the lowest few, until that gains too little.
    """
    changed: set[frozenset[int]] = set()
    best = plans.floor
    for _ in range(_ROUNDS):
        starts = [plan for plan in plans.lowest() if plan not in changed][:_STARTS]
        changed.update(starts)
        plans.evaluate(
            more for start in starts for more in _neighbours_of_plan(plans, start)
        )
        if plans.floor > best * (1 - _GAIN):
            break
        best = plans.floor
    return plans.lowest()[0]


def _neighbours_of_plan(
    plans: Plans, chosen: frozenset[int]
) -> Iterator[frozenset[int]]:
    """The plans that save one value less than ``chosen``, one more, or swap one.

    A value is swapped for what it is made of, or for what is made of it.  Values to add
    are those that are repeated for the step with the peak.
    """
    graph, evaluation = plans.graph, plans.evaluations[chosen]
    saved = frozenset(evaluation.saved - graph.outputs)
    largest = sorted(saved, key=lambda s: (-graph.nbytes[s], s))[:_TRIED]
    for s in largest:
        yield saved - {s}
        made_of = frozenset(graph.operators[graph.producer[s]].reads)
        yield saved - {s} | made_of
        for made in plans.results_of_readers[s]:
            yield saved - {s} | {*made}
    peaks = evaluation.step_peaks
    at = max(range(len(peaks)), key=peaks.__getitem__)
    repeated = [
        s
        for op in evaluation.recomputed_by_step[at]
        for s in graph.operators[op].writes
    ]
    for s in sorted(repeated, key=lambda s: (-graph.nbytes[s], s))[:_TRIED]:
        yield saved | {s}


def menu_with_chunks(
    joint: BudgetedGraph, menu_for: Callable[[BudgetedGraph], Menu]
) -> Menu:
    """The plans of a graph as it is and in chunks, each found by ``menu_for``.

    The first plan of the graph as it is stays first.  The others follow by rising cost;
    of equal ones, those with fewer chunks come first.
    """
    menu = menu_for(joint)
    plans, variants = [*menu.plans], {**menu.variants}
    for chunks, each in joint.in_chunks.items():
        try:
            other = menu_for(each)
        except CannotPlan as error:
            log.debug("no plans for %d chunks", chunks, exc_info=error)
            continue
        head = chunks_in(each)
        more = chunking_cost(joint, head)
        variants[chunks] = other.variants[1]._replace(rows=head.rows, cost=more)
        for plan in other.plans:
            plans.append(plan._replace(cost=plan.cost + more, chunks=chunks))
    best = {0, *undominated([plan[:4] for plan in plans])}
    order = sorted(best, key=lambda i: (i != 0, plans[i].cost, plans[i].chunks))
    plans = [plans[i] for i in order]
    sizes = (SizedPlans(plans, variants, joint.joint),)
    return replace(menu, plans=plans, sizes=sizes, why_whole=joint.why_whole)


def plan_graph(
    joint: BudgetedGraph,
    missing: Optional[Missing] = None,
    fixed: Optional[Sequence[fx.Node]] = None,
    is_whole: bool = True,
) -> Menu:
    """Find the plans of a joint graph for a step.

    The search is the one for the peak of a graph by itself, although what a call keeps
    matters more than its own peak if other calls run before its backward.

    Args:
        missing: what the graph's calls lack.
        fixed: what the only plan to return saves, if not to search for plans.
        is_whole: whether its head is in one piece.

    Raises CannotPlan as :func:`.graph.reading.read_joint` does.
    """
    if fixed is not None:
        model = live_bytes_model(joint, missing)
        plans = Plans(model, recompute_costs(model, joint))
        plans.evaluate([frozenset(model.storages(fixed))])
        return menu_of_plans(joint, plans, missing)
    plans = searched_plans(joint, missing=missing)
    if missing is None and is_whole:
        compare_with_no_checkpoints(joint, plans)
    if plans.graph.is_fused:
        # For kernels, the search leaves these out.  A waiting call keeps least if
        # everything is recomputed, as in a checkpoint.
        plans.evaluate([frozenset(), *plans_of_knapsacks(joint.items)])
    return menu_of_plans(joint, plans, missing)


def menu_of_plans(
    joint: BudgetedGraph,
    plans: Plans,
    missing: Optional[Missing] = None,
    keeps_fastest: bool = False,
) -> Menu:
    """The evaluated plans that no other beats, by rising cost.

    That of budget 1 comes first, even if another beats it, or without
    ``keeps_fastest`` one that costs no more and never holds more, if there is one.
    """
    model = plans.graph
    found = _footprints(plans)
    best = [found[i] for i in undominated([plan[:4] for plan in found])]
    best.sort(key=lambda plan: plan.cost)
    primals = len(input_tensors(joint)) - len(model.tangents)
    variant = Variant(model, backward_inputs(joint, model))
    sized = SizedPlans(best, {1: variant}, joint.joint)
    first = found[0] if keeps_fastest else sized.no_larger_than(found[0], primals)
    rest = (plan for plan in best if plan.storages != first.storages)
    sized = replace(sized, plans=[first, *rest])
    is_known = joint.ask.estimator == "flops"
    work = sum(map(flops, joint.joint.nodes)) if is_known else 0
    return Menu(sized.plans, (sized,), primals, work, missing)


def _footprints(plans: Plans) -> list[Footprint]:
    """The footprints of all evaluated plans, in the order of evaluation."""
    model = plans.graph
    # If outputs share a storage, the first of them.
    returned = dict(reversed(model.storages_returned))
    found = []
    for storages, evaluation in plans.evaluations.items():
        saved = evaluation.saved & returned.keys()
        outputs = frozenset(returned[s] for s in saved)
        kept = *footprint_bytes(model, evaluation), plans.costs[storages]
        found.append(Footprint(*kept, outputs, storages))
    return found
