"""Nodes that a compiled forward and its backward must not both run.

A node that draws random numbers draws different ones when it runs again, and the
gradient then belongs to another forward; an effectful node would have its effect twice;
and one that decides what is read may decide otherwise. It is enough that every path
from such a node to the backward goes through a saved value: a dropout's boolean mask,
the seed of inductor's random numbers, or the numbers of a router's experts.

*Decisions.* Inductor may add up a reduction in another order when the backward repeats
it, or keep digits there that the forward rounded off. The last bits of a value do not
matter, but a top-k or a comparison of such values may come out the other way: then the
backward reads the tokens of another expert than the forward did.

A value is *discrete* if it has integers or booleans, or floats that are integers: those
that were rounded, and sums and the like of such. What is computed from these alone
comes out the same each time. A *decision* makes a discrete value from others; either it
is a selection that returns positions (a top-k, a sort, an argmax), or the forward reads
by its result, or by what is computed from that: as the index of a gather, a mask that
selects rows, a size, or the predicate of a branch.

What an operator keeps for its own backward alone is no decision (the positions of a max
pool, the seed of attention), nor is the mask of a ReLU, which selects one of two values
for each element: where that flips, the two are about the same.
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
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy


if TYPE_CHECKING:
    from collections.abc import Container

    from torch._functorch.partitioners import NodeInfo


aten = torch.ops.aten

__all__ = [
    "NEVER",
    "draw_on_one_side",
    "is_decision",
    "is_random",
    "is_replayed",
    "mark_decisions",
    "must_run_once",
    "recomputable_nodes",
    "subgraphs",
]

# What the partitioner sets as ``dist_from_bw`` where no path leads to the backward.
NEVER = int(1e9)

# An operator with one of these parameters draws nothing if it is False or 0.
_SWITCHES = ("dropout", "dropout_p", "train", "training")

# The key of ``node.meta`` that marks a decision.
_MARK = "decides_what_is_read"


def _packets(names: str) -> set[Any]:
    return {getattr(aten, name) for name in names.split()}


# Their integer results are positions, whatever reads them.
_SELECTIONS = _packets(
    "argmax argmin argsort bucketize cummax cummin kthvalue max median min mode "
    "nanmedian nonzero searchsorted sort topk"
)
_ROUNDING = _packets("ceil floor floor_divide round trunc")
# Integers that a float32 can hold stay integers, in any order of additions.
_EXACT = _packets(
    "_to_copy _unsafe_view abs add amax amin arange cat clamp clamp_max clamp_min clone "
    "copy cumsum expand full gather index index_select masked_fill maximum minimum mul "
    "neg ones permute repeat rsub scatter select slice squeeze sub sum unsqueeze view "
    "where zeros"
) | {torch.ops.prims.convert_element_type}


# The tags of operators whose data determines a size.
_OF_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


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
    # Every min cut saves these, so a plan has to as well.
    communicates = getattr(node.target, "namespace", "") == "_c10d_functional"
    return (
        node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
        or (communicates and not config.unsafe_allow_optimization_of_collectives)
        or is_with_effects(node)
        or is_decision(node)
        or is_random(node)
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


# ------------------------------------------------------------------ decisions


def is_decision(node: fx.Node) -> bool:
    """Whether ``mark_decisions`` found that the node decides what is read."""
    return _MARK in node.meta


def mark_decisions(graph: fx.Graph, backward: Container[fx.Node] = ()) -> None:
    """Mark the decisions of a graph; no node of the ``backward`` is one.

    O(nodes + edges), those of the graphs that higher-order operators run included.
    """
    discrete: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_discrete(node, discrete):
            discrete.add(node)
    read_by: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        node.meta.pop(_MARK, None)
        if node.op != "call_function" or node in backward:
            continue
        inputs = node.all_input_nodes
        decides = _decides_inside(node)
        if node in read_by or _selects(node):
            if node.target is operator.getitem:
                read_by.update(inputs)
            else:
                read_by.update(source for source in inputs if source in discrete)
                decides |= any(
                    _has_floats(source) and source not in discrete for source in inputs
                )
        if _reads_by_index(node):
            read_by.update(filter(_is_index, inputs))
        if decides:
            node.meta[_MARK] = True


def subgraphs(node: fx.Node) -> list[fx.Graph]:
    """The graphs that the call of a higher-order operator runs."""
    module = node.graph.owning_module
    attributes = [
        operator.attrgetter(str(argument.target))(module)
        for argument in node.all_input_nodes
        if argument.op == "get_attr" and module is not None
    ]
    return [each.graph for each in attributes if isinstance(each, fx.GraphModule)]


def _decides_inside(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    inner = subgraphs(node)
    for graph in inner:
        mark_decisions(graph)
    return any(is_decision(each) for graph in inner for each in graph.nodes)


def _selects(node: fx.Node) -> bool:
    """Whether an operator returns positions, and somebody reads them."""
    if _packet(node) not in _SELECTIONS:
        return False
    if isinstance(node.meta.get("val"), torch.Tensor):
        return _is_integral(node)
    return any(_is_integral(part) and part.users for part in node.users)


def _reads_by_index(node: fx.Node) -> bool:
    """Whether an operator's integers and masks may pick what it reads, or a branch."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if not _OF_DATA.isdisjoint(target.tags):
        return True
    is_pointwise = torch.Tag.pointwise in target.tags
    return not is_pointwise and any(map(_has_floats, node.all_input_nodes))


def _is_index(node: fx.Node) -> bool:
    """Whether a value may be an index or a mask; 8-bit integers are quantized data."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    is_wide = _is_integral(node) and value.dtype.itemsize > 1
    return value.dtype == torch.bool or is_wide


def _is_discrete(node: fx.Node, discrete: Container[fx.Node]) -> bool:
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    if not _has_floats(node):
        return True
    packet = _packet(node)
    if packet in _ROUNDING or node.kwargs.get("rounding_mode"):
        return True
    return (
        packet in _EXACT
        and value.dtype.itemsize >= 4
        and all(source in discrete for source in node.all_input_nodes)
        and all(
            given.is_integer()
            for given in tree_leaves((node.args, node.kwargs))
            if isinstance(given, float)
        )
    )


def _has_floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    leaves = (value,) if isinstance(value, torch.Tensor) else tree_leaves(value)
    return any(
        leaf.dtype.is_floating_point or leaf.dtype.is_complex
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
    )


def _is_integral(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return False
    return not _has_floats(node)


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "_overloadpacket", node.target)
