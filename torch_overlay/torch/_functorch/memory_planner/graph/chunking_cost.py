"""What it costs to run the head of a graph in chunks of its batch."""

from __future__ import annotations

import math
from typing import NamedTuple, TYPE_CHECKING

import torch

from ..._activation_checkpointing.random_ops import subgraphs
from .recompute_cost import FLOP_PER_BYTE, is_costly, roofline


if TYPE_CHECKING:
    from .joint import BudgetedGraph


# The bytes assumed for an element of any type: a smaller type takes less traffic, but
# devices also compute faster with it.
_ITEMSIZE = 4
# The higher-order operator that runs a chunk.
CHUNK = torch.ops.higher_order.invoke_subgraph


class Chunks(NamedTuple):
    """The chunks of a head, whose logits are [rows, inner] x [inner, columns].

    ``number`` is how many there are, and ``rows`` those of the first one.
    """

    number: int
    rows: int
    inner: int
    columns: int


def chunks_in(graph: BudgetedGraph) -> Chunks:
    """The chunks that a graph's head runs in."""
    calls = graph.joint.find_nodes(op="call_function", target=CHUNK)
    (body,) = subgraphs(calls[0])
    logits = next(node for node in body.nodes if is_costly(node))
    rows, columns = logits.meta["val"].shape
    inner = logits.all_input_nodes[-1].meta["val"].shape[0]
    return Chunks(len(calls), int(rows), int(inner), int(columns))


def chunking_cost(whole: BudgetedGraph, chunks: Chunks) -> float:
    """What a graph costs in chunks, beyond what it costs as it is.

    The result is in the unit of the graph's estimator, and may be negative.  Each chunk
    reads the weights of the head again, and adds to their gradients.  But the loss and
    its gradient then share one read of the logits, so a few chunks may cost less than
    one piece.  If the estimator's unit is not FLOP, the difference is converted by the
    ratio of runtime to FLOP over the graph's items.
    """
    number, rows, inner, columns = chunks
    weights = inner * columns
    per_element = FLOP_PER_BYTE * _ITEMSIZE

    def of_products(rows: int, adds: bool) -> int:
        """The cost of logits and gradients; with ``adds``, the weights' accumulate."""
        arguments, logits = rows * inner, rows * columns
        read = (weights, weights, weights * (1 + adds))
        return sum(
            max(
                2 * rows * weights,
                per_element * (each + arguments + logits),
            )
            for each in read
        )

    before = of_products(number * rows, False)
    before += per_element * number * rows * columns
    # Adding their number breaks ties in favor of fewer chunks.
    more = number * of_products(rows, True) - before + number
    return more * _runtime_per_flop(whole)


def _runtime_per_flop(graph: BudgetedGraph) -> float:
    if graph.ask.runtime_unit == "FLOP":
        return 1.0
    flop = sum(roofline(node) for item in graph.items for node in item.ops)
    return math.fsum(item.runtime for item in graph.items) / max(flop, 1)
