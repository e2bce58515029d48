"""A joint graph as its caller sees it: inputs, outputs, and what calls may lack."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Optional, TYPE_CHECKING

import torch

from .kernels import by_kernels, has_kernel
from .storages import CannotPlan, is_on_device


if TYPE_CHECKING:
    import torch.fx as fx
    from .joint import BudgetedGraph
    from .liveness import Program


def input_tensors(joint: BudgetedGraph) -> list[fx.Node]:
    """The tensors among a joint graph's inputs."""
    placeholders = joint.joint.find_nodes(op="placeholder")
    return [n for n in placeholders if isinstance(n.meta.get("val"), torch.Tensor)]


class Missing(NamedTuple):
    """The indices of tangents that a backward lacks, and of outputs gone by then.

    If the caller drops the logits, for example, only what the forward saves of them is
    still live when the backward runs.
    """

    tangents: frozenset[int]
    outputs: frozenset[int]


class Input(NamedTuple):
    """An input that a backward may get.

    ``storage`` is its number in the graph's model, and ``name`` that of its node.
    """

    storage: int
    nbytes: int
    name: str


def backward_inputs(joint: BudgetedGraph, model: Program) -> dict[int, Input]:
    """The inputs that the backward may get, each by its index.

    The tensors among the joint graph's inputs come first, then the forward's outputs.
    """
    found: dict[int, Input] = {}
    for index, node in enumerate(input_tensors(joint)):
        value = node.meta["val"]
        nbytes = joint.as_int(value.untyped_storage().nbytes())
        for s in model.storages([node]):
            nbytes = nbytes if is_on_device(joint.counted_device, value) else 0
            found[index] = Input(s, nbytes, node.name)
    after = len(input_tensors(joint))
    for s, index in model.storages_returned:
        if s in model.outputs:
            name = model.results[index].name
            found[after + index] = Input(s, model.nbytes[s], name)
    return found


def live_bytes_model(
    graph: BudgetedGraph, missing: Optional[Missing] = None
) -> Program:
    """The model of a graph whose calls lack what is ``missing``, if anything.

    It counts inductor's kernels if the graph is ``fused``, else operators one by one.
    Raises CannotPlan if the graph runs bodies whose live bytes are unknown, or if sizes
    depend on data.
    """
    operators = graph.model
    if missing is not None:
        operators = _model_without(missing, operators, graph)
    for each in operators.operators_with_bodies:
        if each.scratch is None and not (graph.fused and has_kernel(each.node)):
            raise CannotPlan(f"it is not known what is live within {each.node.name}")
    operators.check_sizes()
    return by_kernels(operators) if graph.fused else operators


def _model_without(missing: Missing, model: Program, joint: BudgetedGraph) -> Program:
    """The model for calls that lack these tangents and outputs."""
    tangents = [node for node in input_tensors(joint) if node in model.tangents]
    absent = [tangents[index] for index in missing.tangents]
    values = (node.meta["val"] for node in absent)
    fewer = sum(
        joint.as_int(value.numel()) * value.itemsize
        for value in values
        if is_on_device(joint.counted_device, value)
    )
    nbytes = [*model.nbytes]
    for s in model.storages(absent):
        # A copy that nothing reads was counted among the tangents.
        fewer += nbytes[s] if s not in model.owned else 0
        nbytes[s] = 0
    returned = model.storages_returned
    gone = {s for s, index in returned if index in missing.outputs}
    gone.difference_update(s for s, index in returned if index not in missing.outputs)
    return replace(
        model,
        nbytes=nbytes,
        outputs=model.outputs - gone,
        written_back=model.written_back | gone,
        tangent_bytes=model.tangent_bytes - fewer,
    )
