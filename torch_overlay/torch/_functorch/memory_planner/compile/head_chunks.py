"""Runs the head of a joint graph in as many chunks as a plan wants.

Inductor's ``auto_chunker`` rewrites a joint graph before it is partitioned.  Everything
from the matrix product that makes the logits to the loss, and back to the gradients of
the product's arguments, then runs chunk by chunk.  For each number of chunks, there is
a *variant* of the joint graph.  To choose one, each is prepared for the partitioner.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Optional, Protocol, TYPE_CHECKING

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._functorch._aot_autograd.utils import _is_tangent
from torch._inductor import config

from ...._inductor.fx_passes.auto_chunker.flat_rows import (
    has_symbolic_sizes,
    head_of,
    is_last_product,
    is_returned,
)

from ..._activation_checkpointing.random_ops import subgraphs
from ..graph.chunking_cost import CHUNK
from ..graph.storages import CannotPlan
from .recompile import copy_of


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch.fx as fx
    from ..graph.joint import BudgetedGraph

log = logging.getLogger(__name__)


# The key of a graph module's meta under which the chunker says why it did nothing.
NOT_CHUNKED = "not_chunked"

# The numbers of chunks to consider.
_NUMBERS = (2, 4, 8, 16, 32, 64)
# Chunks of fewer rows cost more than they gain.
_FEWEST_ROWS = 32
# If the weights of the head are this many times as large as the logits of a chunk, more
# chunks gain little, as the gradients of these weights remain.
_LARGE = 8


# What the chunker's own reasons mean to a user, by a part of their text.
_REASONS = {
    "inference only": "the loss does not depend on the logits in a way that it follows",
    "Multiple scale_by": "there is more than one loss; return their sum",
    "rule for aten.view": (
        "it looks at the logits in another way than as [tokens, words] between the "
        "product and the loss"
    ),
}
_RETURNED = (
    "what is compiled returns the logits, or something as large; return the loss alone"
)
_DYNAMIC = "its sizes vary; compile with dynamic=False, or pad batches to a few lengths"
_NOT_A_LOSS = (
    "what is compiled returns more than a scalar loss that gets a gradient; return "
    "that alone, or compile the head with its loss by itself"
)
_HALF = (
    "its gradients would be computed before the loss is scaled, and float16 cannot "
    "hold them; use bfloat16"
)


class ChunkedRequest(Protocol):
    """A request that chooses among the variants of a joint graph.

    ``begin`` gets the graph, with its variants, before the first plan is made.
    ``chunks`` is the number of chunks in the plan that ``decide`` will decide by.
    """

    @property
    def has_begun(self) -> bool: ...

    @property
    def chunks(self) -> int: ...

    def begin(self, graph: BudgetedGraph) -> None: ...

    def decide(self, graph: BudgetedGraph) -> Any: ...


def partition_in_chunks(
    partition: Callable[..., Any], request: ChunkedRequest
) -> Callable[..., Any]:
    """A partitioner that splits the variant of a joint graph that a request wants.

    It has to be called with copies of one joint graph.
    """
    variants: dict[int, BudgetedGraph] = {}

    def split(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        if not request.has_begun:
            graph = _with_variants(partition, module, inputs, **kwargs)
            if graph is not None:
                request.begin(graph)
                variants.update(graph.variants)
        options = {}
        if request.chunks in variants:
            # Inductor's passes have run on it.
            prepared: Any = variants[request.chunks].joint.owning_module
            module = copy_of(prepared)
            options = {"use_joint_graph_passes": False}
        with _in_chunks(request.chunks), config.patch(options):
            return partition(module, inputs, **kwargs, request=request)

    return split


@contextmanager
def _in_chunks(number: int) -> Iterator[None]:
    """Have inductor run heads in a number of chunks."""
    options = {"auto_chunker.enable": True, "auto_chunker.num_chunk": number}
    with config.patch(options if number > 1 else {}):
        yield


class _GraphWasRead(Exception):
    """Stops the partitioner, and carries the graph that it was to split."""

    def __init__(self, graph: BudgetedGraph) -> None:
        self.graph = graph


class _Reader:
    """A request that reads the graph instead of deciding about it."""

    def decide(self, graph: BudgetedGraph) -> Any:
        raise _GraphWasRead(graph)


def _with_variants(
    partition: Callable[..., Any], module: fx.GraphModule, inputs: Any, **kwargs: Any
) -> Optional[BudgetedGraph]:
    """The graph that the partitioner gets, with its variants.

    None if it has no large head or no backward, if the user has turned the chunker on,
    or with the C++ wrapper.
    """
    if config.auto_chunker.enable or config.cpp_wrapper:
        return None

    def read(number: int) -> BudgetedGraph:
        own = copy_of(module)
        try:
            with _in_chunks(number):
                partition(own, inputs, **kwargs, request=_Reader())
        except _GraphWasRead as found:
            if number > 1:
                _check_chunks(found.graph.joint, own.meta.get(NOT_CHUNKED, ""))
            return found.graph
        raise CannotPlan("it has no backward")

    numbers = _numbers_of(module)
    if not numbers and not _is_dynamic(module.graph):
        return None
    try:
        whole = read(1)
    except CannotPlan:
        return None
    if not whole.fused:
        # Only inductor can run a head in chunks.
        return whole
    why = _why_not_in_chunks(module.graph) if numbers else _DYNAMIC
    try:
        if not why:
            in_chunks = {number: read(number) for number in numbers}
            return replace(whole, in_chunks=in_chunks)
    except RestartAnalysis:
        raise
    except Exception as error:
        # The graph can still be planned as it is.
        log.debug("no chunks", exc_info=error)
        why = _reason_in_words((str(error) or type(error).__name__).splitlines()[0])
    log.info("the head of %s runs in one piece, as %s", get_aot_graph_name(), why)
    return replace(whole, why_whole=why)


def _is_dynamic(graph: fx.Graph) -> bool:
    """Whether a graph with a wide last product, probably a head, has symbolic sizes."""

    def is_wide(node: fx.Node) -> bool:
        sizes = node.args[1].meta["val"].shape  # type: ignore[union-attr]
        # A weight's own sizes are not symbolic.
        return all(type(size) is int for size in sizes) and sizes[1] > _LARGE * sizes[0]

    products = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    return has_symbolic_sizes(graph) and any(
        is_last_product(node) and is_wide(node) for node in products
    )


def _why_not_in_chunks(graph: fx.Graph) -> str:
    """Why the chunker cannot take a graph, as far as its inputs and outputs tell."""
    if is_returned(graph):
        return _RETURNED
    tangents = filter(_is_tangent, graph.find_nodes(op="placeholder"))
    sizes = (getattr(node.meta["val"], "shape", ()) for node in tangents)
    return _NOT_A_LOSS if any(map(len, sizes)) else ""


def _check_chunks(graph: fx.Graph, why: str) -> None:
    """Raise CannotPlan if a graph does not run in chunks, or would lose precision."""
    calls = graph.find_nodes(op="call_function", target=CHUNK)
    if not calls:
        raise CannotPlan(why or "there is nothing to chunk")
    dtypes = {
        getattr(node.meta.get("val"), "dtype", None)
        for body in subgraphs(calls[0])
        for node in body.nodes
    }
    if torch.float16 in dtypes:
        raise CannotPlan(_HALF)


def _reason_in_words(why: str) -> str:
    """Why a head cannot run in chunks, as the end of a sentence after the word "as"."""
    for part, words in _REASONS.items():
        if part in why:
            return words
    operator = re.search(r"for (?:target )?((?:aten|prims)[.\w]+)", why)
    if operator is not None:
        return f"the chunker has no rule for {operator[1]} there"
    return f"the chunker says: {why}"


def _numbers_of(module: fx.GraphModule) -> list[int]:
    """The numbers of chunks to consider for a graph, none without a large head."""
    head = head_of(module.graph)
    if head is None:
        return []
    rows, inner, _ = head
    numbers = []
    for number in _NUMBERS:
        of_chunk = -(-rows // number)
        if of_chunk < _FEWEST_ROWS:
            break
        # As their rows are rounded up, fewer chunks may be enough.
        if -(-rows // of_chunk) == number:
            numbers.append(number)
        if of_chunk * _LARGE <= inner:
            break
    return numbers
