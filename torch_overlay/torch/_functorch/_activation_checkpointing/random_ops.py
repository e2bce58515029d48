"""Nodes that a compiled forward and its backward must not both run.

A node that draws random numbers draws other ones when it runs again, and the gradient
then belongs to another forward; an effectful node would have its effect twice; and one
that decides what is read may decide otherwise (see :mod:`.decisions`). It is enough that
every path from such a node to the backward goes through a saved value: what is kept of a
dropout is its boolean mask, of inductor's random numbers their seed, and of a router the
numbers of the experts.
"""

from __future__ import annotations

import math
import operator
from typing import Any, TYPE_CHECKING

import torch
import torch.fx as fx
from torch._functorch import config
from torch._functorch._aot_autograd.utils import is_with_effects
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import CheckpointPolicy

from .decisions import is_decision, mark_decisions, subgraphs


if TYPE_CHECKING:
    from torch._functorch.partitioners import NodeInfo


__all__ = [
    "NEVER",
    "draw_on_one_side",
    "is_collective",
    "is_overwritten",
    "is_random",
    "is_replayed",
    "mark_decisions",
    "must_run_once",
    "recomputable_nodes",
]

# What the partitioner sets as ``dist_from_bw`` where no path leads to the backward.
NEVER = int(1e9)

# An operator that takes one of these draws nothing where it is given as False or 0.
_SWITCHES = ("dropout", "dropout_p", "train", "training")


def is_random(node: fx.Node) -> bool:
    """Whether running ``node`` twice on the same arguments may give two results.

    That is so for an operator tagged ``nondeterministic_seeded``, unless its arguments
    switch its randomness off (attention with ``dropout_p=0``) or hold the generator's
    state (``philox_rand``), and for a higher-order operator that runs such an operator.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _is_seeded(target) and not _is_switched_off(node, target)
    return isinstance(target, torch._ops.HigherOrderOperator) and _runs_random(node)


def is_replayed(node: fx.Node) -> bool:
    """Whether the backward is to run ``node`` again because its user tagged it so.

    ``functionalize_rng_ops`` lets both runs of a tagged operator draw the same
    numbers. It cannot do so for a random higher-order operator: that one and the
    parts of its result are not replayed, whatever their tag. Nor is a decision, unless
    ``MUST_RECOMPUTE`` insists: plain checkpoints tag all that they run.
    """
    policy = node.meta.get("recompute")
    if policy not in (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    ):
        return False
    origin = node
    while origin.target is operator.getitem:
        origin = origin.all_input_nodes[0]
    if is_decision(origin) and policy == CheckpointPolicy.PREFER_RECOMPUTE:
        return False
    is_higher_order = isinstance(origin.target, torch._ops.HigherOrderOperator)
    return not (is_higher_order and _runs_random(origin))


def must_run_once(node: fx.Node) -> bool:
    """Whether ``node``, if the forward runs it, must not be run by the backward too.

    True for random and effectful nodes, for decisions, for collectives and for those
    tagged ``MUST_SAVE``, False for a node that is replayed.
    """
    if is_replayed(node):
        return False
    return (
        node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
        or is_collective(node)
        or is_with_effects(node)
        or is_decision(node)
        or is_random(node)
    )


def is_overwritten(placeholder: fx.Node) -> bool:
    """Whether an input is overwritten between the forward and the backward."""
    return bool(placeholder.meta.get("aot_runtime_epilogue_input_mutation", False))


def is_collective(node: fx.Node) -> bool:
    """Whether a node communicates: every min cut saves it, so a plan has to as well."""
    return (
        getattr(node.target, "namespace", "") == "_c10d_functional"
        and not config.unsafe_allow_optimization_of_collectives
    )


def recomputable_nodes(joint_graph: fx.Graph) -> OrderedSet[fx.Node] | None:
    """Every node that may run again, or None where saving the inputs is enough.

    The nodes are the ``dont_ban`` of the min cut that saves least. Every node's
    ``dist_from_bw`` must be set.
    """
    computed = [node for node in joint_graph.nodes if node.op != "placeholder"]
    again = OrderedSet(node for node in computed if not must_run_once(node))
    if any(node not in again and 0 < node.dist_from_bw < NEVER for node in computed):
        return again
    return None


def draw_on_one_side(joint_graph: fx.Graph, node_info: NodeInfo, nx_graph: Any) -> None:
    """Let no cut split the users of random numbers that no forward output needs.

    The backward may draw such numbers (a custom backward's, say), but not again once a
    value made of them is saved. So the edges that are added to ``nx_graph``, a
    networkx.DiGraph, keep every node that depends on them out of the forward unless
    they are drawn there. Decisions are treated alike.
    """
    drawn: OrderedSet[fx.Node] = OrderedSet()
    for node in joint_graph.nodes:
        if node.op != "call_function" or node_info.is_required_fw(node):
            continue
        needed = [argument for argument in node.all_input_nodes if argument in drawn]
        for argument in needed:
            nx_graph.add_edge(
                f"{node.name}_in",
                f"{argument.name}_in",
                capacity=math.inf,
                reason="must run where its random numbers are drawn",
            )
        if needed or is_random(node) or is_decision(node):
            drawn.add(node)


def _is_seeded(op: torch._ops.OpOverload) -> bool:
    stateless = op.namespace == "rngprims"
    return torch.Tag.nondeterministic_seeded in op.tags and not stateless


def _is_switched_off(node: fx.Node, op: torch._ops.OpOverload) -> bool:
    for position, parameter in enumerate(op._schema.arguments):
        if parameter.name in _SWITCHES:
            given = node.kwargs.get(parameter.name, parameter.default_value)
            if position < len(node.args):
                given = node.args[position]
            # A traced probability is a node or a symbol: it may be anything.
            if isinstance(given, (bool, int, float)) and not given:
                return True
    return False


def _runs_random(node: fx.Node) -> bool:
    """``is_random`` for the call of a higher-order operator."""
    if node.target is torch.ops.higher_order.run_with_rng_state:
        return False
    if any(isinstance(a, torch._ops.OpOverload) and _is_seeded(a) for a in node.args):
        return True
    return any(is_random(inner) for graph in subgraphs(node) for inner in graph.nodes)
