"""Tags that bound the peak of a training step traced as one graph.

Some trainers trace forward, loss and backward together (``make_fx`` or Dynamo over
``torch.autograd.grad``), so that no partitioner decides what is saved.  They tag the
forward's nodes, and :mod:`.remat_using_tags_for_fwd_loss_bwd_graph_pass` copies what is
to be recomputed into the backward.  The tags set here are the plan of :mod:`.peak_budget`:

    >>> peak = tag_for_peak(gm, budget=0.2)
    >>> gm = remat_using_tags_for_fwd_loss_bwd_graph(gm)
"""

from __future__ import annotations

import operator
from itertools import groupby
from typing import Optional, TYPE_CHECKING

import torch
import torch.fx as fx
from torch._functorch import partitioners
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import CheckpointPolicy

from .decision import Peak
from .decisions import mark_decisions
from .liveness import CannotPlan, JointGraph
from .peak_budget import find_plans
from .random_ops import is_replayed, must_run_once
from .rerun_cost import is_costly, is_view


if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["tag_for_peak"]


def tag_for_peak(
    gm: fx.GraphModule,
    *,
    budget: Optional[float] = None,
    peak_bytes: Optional[int] = None,
) -> Peak:
    """Tag what to save (MUST_SAVE) and what to recompute (PREFER_RECOMPUTE).

    A budget b allows a peak of the floor + b * (that of saving everything - floor), as
    the target "peak" of the config does.  Costs are those of the config's estimator:
    "flops" counts what no compiler fuses, "roofline" every operator.

    The peak that is returned holds for the graph that the pass makes, run operator by
    operator: without inputs, parameters and what kernels allocate for themselves.  What
    comes after the backward counts too, and what it reads of the forward counts as live
    to the end.  Where ``predicted`` is above ``allowed``, no plan below it was found.

    Read are the marks that the pass reads since 2.12: ``meta["custom"]["phase"]`` or, if
    no node has that, ``meta["autograd_backward"]``.  The pass repeats nodes for one run
    of marked nodes alone.  That is the longest here; what any other reads is saved (of
    a loss in chunks, say; 2.12 takes no such graph).  Saved is also what may be random:
    before 2.14 the pass repeats no attention, even if that drops nothing.

    Tags that are there are kept to, those of an earlier call too.  The pass makes a
    graph of flat inputs and outputs: trace one.

    Args:
        gm: the graph, with fake values in ``meta["val"]``.
        budget: a number from 0 (the lowest peak that is found) to 1 (all is saved).
        peak_bytes: a peak in bytes, instead of a budget.

    Some hundred evaluations of O(nodes + edges).  Raises ValueError unless one of the
    two is given and makes sense, and CannotPlan for a graph without a backward or one
    that the model does not understand.  No node is tagged then.
    """
    if (budget is None) == (peak_bytes is None):
        raise ValueError("either a budget or peak_bytes has to be given")
    if budget is not None and not 0 <= budget <= 1:
        raise ValueError(f"the budget is {budget!r}; it has to be from 0 to 1")
    if peak_bytes is not None and (type(peak_bytes) is not int or peak_bytes <= 0):
        raise ValueError(f"peak_bytes is {peak_bytes!r}; it has to be a positive int")
    joint = _copy(gm)
    nodes = list(joint.graph.nodes)
    runs = _backward_runs(nodes)
    if not runs:
        raise CannotPlan("no node is marked as one of the backward")
    main = max(runs, key=len)
    start, stop = main[0], main[-1] + 1
    others = [nodes[i] for run in runs if run is not main for i in run]
    mark_decisions(joint.graph, set(nodes[start:]))
    _save_what_runs_once(nodes[:start], others)
    graph = _model(nodes, start, stop)
    costly = OrderedSet(node for node in nodes[:start] if is_costly(node))
    curve = find_plans(graph, list(costly), costly, nodes[:start]).curve()
    allowed = curve.allowed(budget or 0) if peak_bytes is None else peak_bytes
    plan = curve.within(allowed)
    saved = set(graph.saved_values(graph.evaluate(plan.storages).saved))

    needed = {read for node in nodes[start:stop] for read in node.all_input_nodes}
    forward = zip(list(gm.graph.nodes)[:start], nodes)
    for original, node in reversed(list(forward)):
        if node.op != "call_function" or node not in needed:
            continue
        if node in saved:
            original.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        else:
            original.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            needed.update(node.all_input_nodes)
    return Peak(allowed, plan.peak, curve.floor, curve.fastest.peak)


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph again, to be changed at will, with tags as the pass reads them."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        # What is overwritten after this graph is not between forward and backward.
        for key in ("desc", "aot_runtime_epilogue_input_mutation"):
            copies[node].meta.pop(key, None)
    joint = fx.GraphModule(gm, graph)
    return partitioners.cleanup_recompute_tags(joint, is_default_partition=False)


def _backward_runs(nodes: Sequence[fx.Node]) -> list[list[int]]:
    """The positions of the backward's nodes, by runs without another in between."""
    marks = [
        (node.meta.get("custom") or {}).get("phase") == "backward" for node in nodes
    ]
    if not any(marks):
        marks = [bool(node.meta.get("autograd_backward")) for node in nodes]
    runs = groupby(range(len(nodes)), marks.__getitem__)
    return [list(run) for marked, run in runs if marked]


def _save_what_runs_once(forward: Sequence[fx.Node], others: Sequence[fx.Node]) -> None:
    """Tag what a copy of would be another value, and what ``others`` read."""
    pending = [
        node
        for node in forward
        if (_is_refused(node) or _is_mutable(node)) and not is_replayed(node)
    ]
    pending += [read for node in others for read in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node.op == "call_function":
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            # Memory is kept by whoever allocated it.
            if is_view(node) or node.target is operator.getitem or _is_mutable(node):
                pending += node.all_input_nodes


def _is_mutable(node: fx.Node) -> bool:
    return getattr(getattr(node.target, "_schema", None), "is_mutable", False)


def _is_refused(node: fx.Node) -> bool:
    """Whether the pass raises an error if it is to repeat the node."""
    is_random = getattr(partitioners, "is_rng_op", None)
    if is_random is not None:
        return bool(is_random(node))
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _model(nodes: Sequence[fx.Node], start: int, stop: int) -> JointGraph:
    """The model of a graph whose backward is ``nodes[start:stop]``; sorts its outputs.

    What follows counts as backward, and what it reads of the forward as returned.
    """
    forward, output = OrderedSet(nodes[:start]), nodes[-1]
    effects = OrderedSet(
        node
        for node in nodes
        if node.op == "call_function" and not node.users and node.is_impure()
    )
    late = [read for node in nodes[stop:] for read in node.all_input_nodes]
    kept = OrderedSet(late) & forward
    results = (OrderedSet(output.all_input_nodes) | effects) - forward
    output.args = ((*kept, *results),)
    required = kept | effects & forward
    for node in reversed(forward):
        if node in required or node.op == "placeholder" or must_run_once(node):
            required.add(node)
            required.update(node.all_input_nodes)
    backward = OrderedSet(nodes[start:])
    info = partitioners.NodeInfo(
        inputs=[],
        _required_fw_nodes=required,
        required_bw_nodes=backward,
        tangents_closure=backward,
        unclaimed_nodes=OrderedSet(),
        fw_order={node: at for at, node in enumerate(nodes)},
        static_lifetime_input_nodes=OrderedSet(),
    )
    return JointGraph(output.graph, info, len(kept))
