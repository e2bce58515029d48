"""Min cuts of the partitioner's graphs, on lists instead of networkx's dicts.

Most edges of these graphs are infinite: what must run in the backward, what may not run
again, and who reads what.  All that such edges tie to the source is one vertex with it,
and so with the sink, which leaves a third of the graph or less.  On that runs the
algorithm of Dinitz, with distances to the sink, since the last of them are the cut:
vertices that still reach the sink.  O(vertices^2 * edges), but close to linear here.

E. A. Dinic, "Algorithm for solution of a problem of maximum flow in a network with power
estimation", Soviet Mathematics Doklady 11, 1970.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, TYPE_CHECKING, TypeVar


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import networkx as nx


__all__ = ["minimum_cut"]

Vertex = TypeVar("Vertex")
_SOURCE, _SINK = 0, 1


def minimum_cut(
    graph: nx.DiGraph[Any], source: Any, sink: Any
) -> tuple[float, tuple[set[Any], set[Any]]]:
    """The value of a least cut of ``graph``, and the vertices on its two sides.

    An edge's "capacity" is at least 0; one that has none is infinite.  Of several least
    cuts it is the one nearest to the sink, as of networkx's function of this name.

    Raises networkx.NetworkXUnbounded where an infinite path leads from source to sink.
    """
    edges = [
        edge for edge in graph.edges(data="capacity", default=math.inf) if edge[2] > 0
    ]
    after, before = defaultdict(list), defaultdict(list)
    for tail, head, capacity in edges:
        if capacity == math.inf:
            after[tail].append(head)
            before[head].append(tail)
    with_source, with_sink = _reachable(source, after), _reachable(sink, before)
    if sink in with_source:
        from networkx import NetworkXUnbounded

        raise NetworkXUnbounded("an infinite path leads from the source to the sink")

    # Edge 2i and its reverse 2i + 1, each listed at its tail.
    number = dict.fromkeys(with_source, _SOURCE) | dict.fromkeys(with_sink, _SINK)
    for vertex in graph:
        number.setdefault(vertex, len(number))
    leaving: list[list[int]] = [[] for _ in range(len(number) + 2)]
    heads: list[int] = []
    residual: list[float] = []
    for tail, head, capacity in edges:
        a, b = number[tail], number[head]
        # Nothing that enters the source or leaves the sink is part of a cut.
        if a != b and a != _SINK and b != _SOURCE:
            leaving[a].append(len(heads))
            leaving[b].append(len(heads) + 1)
            heads += (b, a)
            residual += (capacity, 0)

    while (distance := _distances(leaving, heads, residual))[_SOURCE] is not None:
        _block(leaving, heads, residual, distance)
    sink_side = {vertex for vertex in graph if distance[number[vertex]] is not None}
    source_side = set(graph) - sink_side
    value = sum(
        capacity
        for tail, head, capacity in edges
        if tail in source_side and head in sink_side
    )
    return value, (source_side, sink_side)


def _reachable(start: Vertex, after: Mapping[Vertex, Sequence[Vertex]]) -> set[Vertex]:
    found, waiting = {start}, [start]
    while waiting:
        new = {*after[waiting.pop()]} - found
        found |= new
        waiting += new
    return found


def _distances(
    leaving: list[list[int]], heads: list[int], residual: list[float]
) -> list[int | None]:
    """Edges from each vertex to the sink, by what is left of capacities; None: no way.

    Those further away than the source are left out where it has a way.
    """
    distance: list[int | None] = [None] * len(leaving)
    distance[_SINK] = steps = 0
    layer = [_SINK]
    while layer and distance[_SOURCE] is None:
        steps += 1
        next_layer = []
        for vertex in layer:
            for edge in leaving[vertex]:
                if distance[heads[edge]] is None and residual[edge ^ 1] > 0:
                    distance[heads[edge]] = steps
                    next_layer.append(heads[edge])
        layer = next_layer
    return distance


def _block(
    leaving: list[list[int]],
    heads: list[int],
    residual: list[float],
    distance: list[int | None],
) -> None:
    """Sends flow along shortest paths until each of them has an edge without room."""
    tried = [0] * len(leaving)
    path: list[int] = []
    vertex = _SOURCE
    while True:
        if vertex == _SINK:
            room = min(residual[edge] for edge in path)
            for edge in path:
                residual[edge] -= room
                residual[edge ^ 1] += room
            full = next(i for i, edge in enumerate(path) if residual[edge] == 0)
            vertex = heads[path[full] ^ 1]
            del path[full:]
        elif tried[vertex] < len(leaving[vertex]):
            edge = leaving[vertex][tried[vertex]]
            step = distance[heads[edge]]
            if step is not None and step + 1 == distance[vertex] and residual[edge] > 0:
                path.append(edge)
                vertex = heads[edge]
            else:
                tried[vertex] += 1
        elif path:
            vertex = heads[path.pop() ^ 1]
            tried[vertex] += 1
        else:
            return
