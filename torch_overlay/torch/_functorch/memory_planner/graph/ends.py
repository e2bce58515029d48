"""The ends of a joint graph: what its two graphs are given, and what the forward returns."""

from __future__ import annotations

from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from .storages import is_on


if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.fx as fx
    from .joint import Planner
    from .liveness import Program

__all__ = [
    "Input",
    "backward_inputs",
    "output_bytes",
    "storages_returned",
    "tensors_given",
]


def tensors_given(joint: Planner) -> list[fx.Node]:
    """The tensors among a joint graph's inputs."""
    placeholders = joint.joint.find_nodes(op="placeholder")
    return [n for n in placeholders if isinstance(n.meta.get("val"), torch.Tensor)]


class Input(NamedTuple):
    """What a backward may be given: its storage in the model, bytes, and the node's name."""

    storage: int
    nbytes: int
    name: str


def backward_inputs(joint: Planner, model: Program) -> dict[int, Input]:
    found: dict[int, Input] = {}
    for index, node in enumerate(tensors_given(joint)):
        value = node.meta["val"]
        nbytes = joint.number(value.untyped_storage().nbytes())
        for s in model.storages([node]):
            nbytes = nbytes if is_on(joint.counted, value) else 0
            found[index] = Input(s, nbytes, node.name)
    after, results = len(tensors_given(joint)), _results(joint)
    for s, index in storages_returned(joint, model):
        if s in model.outputs:
            found[after + index] = Input(s, model.nbytes[s], results[index].name)
    return found


def _results(joint: Planner) -> list[Any]:
    """What the forward returns to its caller."""
    (output,) = joint.joint.find_nodes(op="output")
    return tree_leaves(output.args)[: joint.num_fwd_outputs]


def storages_returned(joint: Planner, model: Program) -> Iterator[tuple[int, int]]:
    """The storages that the forward returns, and where."""
    for index, node in enumerate(_results(joint)):
        for s in model.storages([node]) if isinstance(node, torch.fx.Node) else ():
            yield s, index


def output_bytes(joint: Planner, model: Program) -> dict[int, int]:
    found: dict[int, int] = {}
    for s, index in storages_returned(joint, model):
        if s in model.outputs:
            found[index] = found.get(index, 0) + model.nbytes[s]
    return found
