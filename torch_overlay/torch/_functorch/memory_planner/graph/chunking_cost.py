"""What it costs to run the head of a graph in chunks of its batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..._activation_checkpointing.random_ops import subgraphs
from .recompute_cost import FLOP_PER_BYTE, is_costly, nbytes_of, roofline


if TYPE_CHECKING:
    import torch.fx as fx
    from .joint import Planner

aten = torch.ops.aten

__all__ = ["CHUNK", "chunking_cost", "rows_of_chunk"]

# The operator that runs a chunk.
CHUNK = torch.ops.higher_order.invoke_subgraph


def chunking_cost(whole: Planner, chunked: Planner) -> float:
    """What a graph costs in chunks, beyond what it costs as it is, by its estimator.

    Each chunk reads the weights of the head again, and adds to their gradients.  Where
    the estimator has another unit than FLOP, they cost in the proportion of the graph's
    items.  At least 1 for each chunk.  O(nodes).
    """
    more = _work(chunked.joint) - _work(whole.joint)
    chunks = len(chunked.joint.find_nodes(op="call_function", target=CHUNK))
    return max(more * _runtime_per_flop(whole), chunks)


def rows_of_chunk(chunked: Planner) -> int:
    """The rows of the first chunk of a graph; 0 if its head is in one piece."""
    calls = chunked.joint.find_nodes(op="call_function", target=CHUNK)
    if not calls:
        return 0
    (body,) = subgraphs(calls[0])
    product = next(node for node in body.nodes if is_costly(node))
    return int(product.meta["val"].shape[0])


def _runtime_per_flop(graph: Planner) -> float:
    if graph.ask.runtime_unit == "FLOP":
        return 1.0
    flop = sum(roofline(node) for item in graph.items for node in item.ops)
    return math.fsum(item.runtime for item in graph.items) / max(flop, 1)


def _work(graph: fx.Graph) -> int:
    """The FLOP that a graph's products are worth, those of its chunks included."""
    total = 0
    for node in graph.nodes:
        if node.target is CHUNK:
            total += sum(map(_work, subgraphs(node)))
        elif is_costly(node):
            total += roofline(node)
        elif _adds_to_sum(node):
            total += FLOP_PER_BYTE * nbytes_of(node.meta["val"])
    return total


def _adds_to_sum(node: fx.Node) -> bool:
    """Whether a node adds a chunk's product to the sum of those before."""
    terms = node.all_input_nodes
    is_sum = node.target is aten.add.Tensor and len(terms) == 2
    given = [term for term in terms if term.op == "placeholder"]
    return is_sum and len(given) == 1 and any(map(is_costly, terms))
