"""Lets the backward read copies of the inputs that the forward overwrites.

A buffer may be read and then written to: a codebook, a queue of keys, a running mean
that is used.  By the time of the backward it has other values, whether the graph writes
to it or AOTAutograd does after the graph.  So neither the input nor a view of it may be
saved, and nothing may be recomputed from it.

:func:`copy_overwritten_inputs` makes whatever the backward depends on read a copy
instead, which only the forward may make.  The copy is a value like any other: a
partitioner saves it, or what is computed from it.  If it saves no part of the copy,
:func:`drop_unsaved_copies` drops that from the forward.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any, TYPE_CHECKING

import torch
import torch.fx as fx
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy


if TYPE_CHECKING:
    from collections.abc import Container, Iterable


aten = torch.ops.aten

# This key of ``node.meta`` tells copies from a model's own clones.
_IS_COPY = "is_copy_of_overwritten_input"


def copy_overwritten_inputs(
    joint_module: fx.GraphModule, num_fwd_outputs: int
) -> list[fx.Node]:
    """Insert the copies that the backward may need into a joint graph; return them.

    The first ``num_fwd_outputs`` outputs are the forward's.  O(nodes + edges).
    """
    from torch._functorch import partitioners

    graph = joint_module.graph
    fwd_outputs, gradients, descs, _ = partitioners._extract_fwd_bwd_outputs(
        joint_module, num_fwd_outputs=num_fwd_outputs
    )
    overwritten = _find_overwritten(graph, fwd_outputs, descs)
    if not overwritten:
        return []
    for_backward = OrderedSet(gradients)
    for node in reversed(graph.nodes):
        if node in for_backward or partitioners._must_be_in_backward(node):
            for_backward.update(node.all_input_nodes)
    copies: dict[fx.Node, fx.Node] = {}
    for source in overwritten:
        readers = [user for user in source.users if user in for_backward]
        if readers or source in gradients:
            copies[source] = _copy(source, readers)
    _update_views(graph, for_backward, copies)
    if not copies.keys().isdisjoint(gradients):
        (output,) = graph.find_nodes(op="output")
        gradients = [copies.get(node, node) for node in gradients]
        output.args = ((*fwd_outputs, *gradients),)
    return [*copies.values()]


def drop_unsaved_copies(forward: fx.Graph, saved_values: Iterable[fx.Node]) -> None:
    """Let a forward read the input itself where nothing of its copy is saved.

    The joint graph keeps it: other plans, which are read from that, may save it.
    """
    saved = {storage for node in saved_values for storage in _storages(node)}
    for node in forward.find_nodes(op="call_function", target=aten.clone.default):
        if _IS_COPY in node.meta and saved.isdisjoint(_storages(node)):
            node.replace_all_uses_with(node.args[0])
            forward.erase_node(node)


def _find_overwritten(
    graph: fx.Graph, fwd_outputs: list[fx.Node], descs: list[Any]
) -> list[fx.Node]:
    """The inputs overwritten by the forward, or by AOTAutograd with its results."""
    written = defaultdict(list)
    for node, desc in zip(fwd_outputs, map(_of_whole, descs)):
        if isinstance(desc, InputMutationAOTOutput):
            written[desc.mutated_input].append(node)

    def is_overwritten(source: fx.Node) -> bool:
        results = written.get(_of_whole(source.meta.get("desc")), ())
        # Where only the metadata is mutated, the result is a view of the input.
        return any(_writes_to(user, source) for user in source.users) or any(
            _storages(source).isdisjoint(_storages(result)) for result in results
        )

    return [node for node in graph.find_nodes(op="placeholder") if is_overwritten(node)]


def _of_whole(desc: Any) -> Any:
    """The descriptor of the tensor subclass that a plain tensor is a part of."""
    while isinstance(desc, (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)):
        desc = desc.base
    return desc


def _writes_to(node: fx.Node, source: fx.Node) -> bool:
    """Whether ``node`` is one of the two operators by which a forward overwrites."""
    return (
        node.target in (aten.copy_.default, aten.set_.source_Tensor)
        and node.args[0] is source
        and node.meta.get("partitioner_tag") == "must_be_in_forward"
    )


def _copy(source: fx.Node, readers: list[fx.Node]) -> fx.Node:
    """Insert a copy that is made before all else, and read by ``readers``."""
    graph = source.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        copy = graph.call_function(aten.clone.default, (source,))
    copy.meta = {
        "val": source.meta["val"].detach().clone(),
        "recompute": CheckpointPolicy.MUST_SAVE,
        "partitioner_tag": "must_be_in_forward",
        _IS_COPY: True,
    }
    for reader in readers:
        reader.replace_input_with(source, copy)
        if "custom" in reader.meta:
            # For example, a region's own memory budget.
            copy.meta["custom"] = reader.meta["custom"]
    return copy


def _update_views(
    graph: fx.Graph, readers: Container[fx.Node], copies: dict[fx.Node, fx.Node]
) -> None:
    """Update ``meta["val"]`` of readers' views of the sources to views of the copies.

    Where the user's own clone of a source was optimized away, its views still have the
    clone's storage, so views are found by what they read as well as by storage.
    """
    stale = {storage for source in copies for storage in _storages(source)}
    views = {*copies.values()}
    for node in graph.nodes:
        target = node.target
        is_view = getattr(target, "is_view", False) or target is operator.getitem
        of_copy = is_view and not views.isdisjoint(node.all_input_nodes)
        is_stale = not stale.isdisjoint(_storages(node))
        can_run = target is operator.getitem or hasattr(target, "_schema")
        if node in readers and can_run and (of_copy or is_stale):
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda argument: argument.meta.get("val")
            )
            node.meta["val"] = target(*args, **kwargs)
            views.add(node)


def _storages(node: fx.Node) -> set[int]:
    return {
        value.untyped_storage()._cdata
        for value in tree_leaves(node.meta.get("val"))
        if isinstance(value, torch.Tensor) and torch._C._has_storage(value)
    }
