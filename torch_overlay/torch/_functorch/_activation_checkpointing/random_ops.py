"""Nodes that a compiled forward and its backward must not both run.

The partitioner marks random operators, and decisions (by which the forward picks what
it reads), MUST_SAVE before a cut.  It is enough that every path from such a node to the
backward goes through a saved value: a dropout's boolean mask, the seed of inductor's
random numbers, or the numbers of a router's experts.

This module adds what those rules leave out: operators within the graphs that a
higher-order operator runs, and positions that are computed in floats, or by rounding.
For these, the rounded value is the decision, not an integer made from it: weights may
be computed from the rounded value as well.
"""

from __future__ import annotations

import operator
from typing import Any, TYPE_CHECKING

import torch
import torch.fx as fx
from torch._functorch import config
from torch._functorch._aot_autograd.utils import is_with_effects
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy


if TYPE_CHECKING:
    from collections.abc import Container


aten = torch.ops.aten

# What the partitioner sets as ``dist_from_bw`` where no path leads to the backward.
NEVER = int(1e9)

# The key of ``node.meta`` by which `mark_what_runs_once` marks a decision.
_MARK = "decides_what_is_read"


def _packets(names: str) -> set[Any]:
    return {getattr(aten, name) for name in names.split()}


_ROUNDING = _packets("ceil floor floor_divide round trunc")
# Operators that keep integers exact in a float32, whatever the order of additions.
_INTEGERS_STAY = _packets(
    "_to_copy _unsafe_view abs add amax amin arange cat clamp clamp_max clamp_min "
    "clone copy cumsum expand full gather index index_select masked_fill maximum "
    "minimum mul neg ones permute repeat rsub scatter select slice squeeze sub sum "
    "unsqueeze view where zeros"
) | {torch.ops.prims.convert_element_type}


def is_random(node: fx.Node) -> bool:
    """Whether running ``node`` twice on the same arguments may give two results."""
    if not is_higher_order(node):
        draws: bool = _partitioners().draws_anew(node)
        return draws
    if node.target is torch.ops.higher_order.run_with_rng_state:
        return False
    seeded = torch.Tag.nondeterministic_seeded
    if any(
        isinstance(a, torch._ops.OpOverload) and seeded in a.tags for a in node.args
    ):
        return True
    return any(is_random(inner) for graph in subgraphs(node) for inner in graph.nodes)


def may_differ(node: fx.Node) -> bool:
    """Whether running ``node`` again in the backward may give another result."""
    return _MARK in node.meta or is_random(node)


def is_kept(node: fx.Node) -> bool:
    """Whether a node's own value is always saved, not just what is made of it."""
    is_tagged = node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
    return is_tagged and not may_differ(node)


def must_run_once(node: fx.Node) -> bool:
    """Whether ``node``, if the forward runs it, must not be run by the backward too.

    True for random and effectful nodes, for decisions, for collectives and for those
    tagged ``MUST_SAVE``, False for a node that is replayed: functionalize_rng_ops lets
    both runs draw the same numbers, but not those of a higher-order operator.
    """
    from torch._functorch.partitioners import must_recompute

    if must_recompute(node):
        return is_higher_order(node) and is_random(node)
    # Every min cut saves these, so a plan has to as well.
    communicates = getattr(node.target, "namespace", "") == "_c10d_functional"
    return (
        node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
        or (communicates and not config.unsafe_allow_optimization_of_collectives)
        or is_with_effects(node)
        or may_differ(node)
    )


def recomputable_nodes(joint_graph: fx.Graph) -> OrderedSet[fx.Node] | None:
    """Every node that may run again, or None where saving the inputs is enough."""
    nodes: OrderedSet[fx.Node] | None
    nodes = _partitioners().get_recomputable_nodes(joint_graph)
    return nodes


def mark_what_runs_once(graph: fx.Graph, backward: OrderedSet[fx.Node]) -> None:
    """Mark what the partitioner's own rules leave out, and correct what they marked.

    No node of the ``backward`` is a decision.  O(nodes + edges), including those of the
    graphs that higher-order operators run.
    """
    theirs = _partitioners()
    decisions = _decisions(graph, backward)
    regions: OrderedSet[fx.Node] = OrderedSet()
    for node in graph.nodes:
        node.meta.pop(_MARK, None)
        if node in decisions:
            node.meta[_MARK] = True
        elif is_higher_order(node) and is_random(node):
            # Nothing can replay it, whatever its tag.
            node.meta.pop("recompute", None)
            regions.add(node)
    theirs.force_save(decisions | regions)
    for node in theirs.find_decisions(graph, _exact(graph), backward) - decisions:
        # It only converts a rounded value, which is the decision, to an integer.
        node.meta.pop("recompute", None)


def _decisions(graph: fx.Graph, backward: OrderedSet[fx.Node]) -> OrderedSet[fx.Node]:
    """The decisions of a graph, and the nodes that run a graph with decisions."""
    exact = _exact(graph)
    for node in graph.nodes:
        if _is_rounded(node, exact):
            exact.add(node)
    decisions: OrderedSet[fx.Node]
    decisions = _partitioners().find_decisions(graph, exact, backward)
    for node in graph.nodes:
        inner = (_decisions(body, OrderedSet()) for body in subgraphs(node))
        if node not in backward and any(inner):
            decisions.add(node)
    return decisions


def _exact(graph: fx.Graph) -> OrderedSet[fx.Node]:
    return OrderedSet(filter(_partitioners().is_exact, graph.nodes))


def _partitioners() -> Any:
    """The partitioner's module, imported late because it imports this one."""
    from torch._functorch import partitioners

    return partitioners


def _is_rounded(node: fx.Node, exact: Container[fx.Node]) -> bool:
    """Whether a float tensor holds integers, which come out the same each time."""
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return False
    packet = getattr(node.target, "_overloadpacket", node.target)
    if packet in _ROUNDING or node.kwargs.get("rounding_mode"):
        return True
    return (
        packet in _INTEGERS_STAY
        and value.dtype.itemsize >= 4
        and all(source in exact for source in node.all_input_nodes)
        and all(
            given.is_integer()
            for given in tree_leaves((node.args, node.kwargs))
            if isinstance(given, float)
        )
    )


def is_higher_order(node: fx.Node) -> bool:
    """Whether a node calls a higher-order operator, which may run other graphs."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def subgraphs(node: fx.Node) -> list[fx.Graph]:
    """The graphs that a node runs if it calls a higher-order operator, else none."""
    if not is_higher_order(node):
        return []
    module = node.graph.owning_module
    attributes = [
        operator.attrgetter(str(argument.target))(module)
        for argument in node.all_input_nodes
        if argument.op == "get_attr" and module is not None
    ]
    return [each.graph for each in attributes if isinstance(each, fx.GraphModule)]
