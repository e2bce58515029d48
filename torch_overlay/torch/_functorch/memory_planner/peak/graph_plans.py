"""Finds the plans of a joint graph, with its head in one piece or in chunks."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Optional, TYPE_CHECKING

from ..graph.chunking_cost import chunking_cost, chunks_in
from ..graph.inputs_outputs import (
    backward_inputs,
    input_tensors,
    Missing,
    storages_returned,
)
from ..graph.recompute_cost import flops
from ..graph.storages import CannotPlan
from .footprint import Footprint, footprint_bytes
from .menu import Menu, Variant
from .plan_search import (
    compare_with_no_checkpoints,
    live_bytes_model,
    plans_of_knapsacks,
    recompute_costs,
    searched_plans,
)
from .plans import Plans, undominated


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.fx as fx
    from ..graph.joint import BudgetedGraph

log = logging.getLogger(__name__)


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
    return replace(menu, plans=plans, variants=variants, why_whole=joint.why_whole)


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

    With ``keeps_fastest``, that of budget 1 comes first, even if another beats it.
    """
    model = plans.graph
    found = _footprints(joint, plans)
    best = [found[i] for i in undominated([plan[:4] for plan in found])]
    fastest = found[0].storages
    # Of equally cheap plans, that of budget 1 comes first.
    best.sort(key=lambda plan: (plan.cost, plan.storages != fastest))
    if keeps_fastest:
        best = found[:1] + [plan for plan in best if plan.storages != fastest]
    primals = len(input_tensors(joint)) - len(model.tangents)
    variants = {1: Variant(model, backward_inputs(joint, model))}
    is_known = joint.ask.estimator == "flops"
    work = sum(map(flops, joint.joint.nodes)) if is_known else 0
    return Menu(best, variants, primals, work, missing)


def _footprints(joint: BudgetedGraph, plans: Plans) -> list[Footprint]:
    """The footprints of all evaluated plans, in the order of evaluation."""
    model = plans.graph
    # If outputs share a storage, the first of them.
    returned = dict(reversed([*storages_returned(joint, model)]))
    found = []
    for storages, evaluation in plans.evaluations.items():
        saved = evaluation.saved & returned.keys()
        outputs = frozenset(returned[s] for s in saved)
        kept = *footprint_bytes(model, evaluation), plans.costs[storages]
        found.append(Footprint(*kept, outputs, storages))
    return found
