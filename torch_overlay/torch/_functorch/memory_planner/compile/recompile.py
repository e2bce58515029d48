"""Compiles a joint graph, as AOTAutograd captured it, once more by another plan."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from dataclasses import is_dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._subclasses.fake_tensor import unset_fake_temporarily


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch.fx as fx
    from torch.fx import Node


def takes_request(partition: Callable[..., Any]) -> bool:
    """Whether a partitioner accepts a request and does not have one yet."""
    if "request" in getattr(partition, "keywords", {}):
        return False
    parameters = inspect.signature(partition).parameters
    kinds = (parameter.kind for parameter in parameters.values())
    return "request" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def partition_by(partition: Callable[..., Any], request: Any) -> Callable[..., Any]:
    """A partitioner that splits joint graphs as a request decides."""
    try:
        # A separate patch brings this module.
        from .head_chunks import partition_in_chunks
    except ModuleNotFoundError:
        return functools.partial(partition, request=request)
    return partition_in_chunks(partition, request)


def has_nested_regions(module: fx.GraphModule) -> bool:
    """Whether a joint graph calls nested regions, which are partitioned before it."""
    call = torch.ops.higher_order.invoke_subgraph
    return bool(module.graph.find_nodes(op="call_function", target=call))


def same_nodes_in(nodes: Iterable[Node], graph: fx.Graph) -> list[Node]:
    """The nodes of a graph that are named like ``nodes`` of another trace of it.

    Raises RuntimeError if some are missing.
    """
    wanted = {node.name for node in nodes}
    found = [node for node in graph.nodes if node.name in wanted]
    if len(found) != len(wanted):
        raise RuntimeError(f"{get_aot_graph_name()} was traced into another graph")
    return found


def fresh_copy(state: Any, capture: Any) -> tuple[Any, Any]:
    """A copy of AOTAutograd's state and captured graph, as compiling modifies both."""
    state, capture = _copy_of_containers((state, capture), {})
    capture.graph_module = copy_of(capture.graph_module)
    return state, capture


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    with unset_fake_temporarily(), warnings.catch_warnings():
        # Upstream's copying of graphs uses a deprecated class for tree specs.
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        # Outside of fake mode, as the module's constants are real tensors.
        return copy.deepcopy(module)


def _copy_of_containers(value: Any, made: dict[int, Any]) -> Any:
    """A copy of dataclasses and containers, all the way down; all else is shared."""
    if id(value) in made:
        return made[id(value)]
    kind, found = type(value), value
    if kind in (list, tuple):
        found = kind(_copy_of_containers(each, made) for each in value)
    elif kind is dict:
        found = {key: _copy_of_containers(each, made) for key, each in value.items()}
    elif is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(value)
        made[id(value)] = found
        for name, each in vars(value).items():
            object.__setattr__(found, name, _copy_of_containers(each, made))
    made[id(value)] = found
    return found
