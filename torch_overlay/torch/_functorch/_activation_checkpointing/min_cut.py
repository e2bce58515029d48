"""Min cuts of the partitioner's graphs, on flat lists instead of networkx's dicts.

The algorithm of Dinitz (Soviet Mathematics Doklady 11, 1970), with distances to the sink,
since the last of them are the cut: the vertices that still reach it.  O(vertices^2 *
edges), but close to linear on these graphs.  An edge and its reverse are neighbours in
the lists, and the edges that leave a vertex are a chain: few objects, so that Python's
garbage collector, slow beside a traced model, is not called.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Optional, TYPE_CHECKING


if TYPE_CHECKING:
    import networkx as nx


__all__ = ["minimum_cut"]


def minimum_cut(
    graph: nx.DiGraph[Any], source: Any, sink: Any
) -> tuple[float, tuple[set[Any], set[Any]]]:
    """The value of a least cut of ``graph``, and the vertices on its two sides.

    An edge's "capacity" is at least 0; one that has none is infinite.  Of several least
    cuts it is the one nearest to the sink, as of networkx's function of this name.

    Raises networkx.NetworkXUnbounded where an infinite path leads from source to sink.
    """
    number = {vertex: i for i, vertex in enumerate(graph)}
    network = _Network(number[source], number[sink], [-1] * len(number))
    for tail, head, capacity in graph.edges(data="capacity", default=math.inf):
        network.add_edge(number[tail], number[head], capacity)
    while (distance := network.distances())[network.source] is not None:
        network.block(distance)
    sink_side = {vertex for vertex in graph if distance[number[vertex]] is not None}
    edges = graph.edges(data="capacity")
    cut = (c for tail, head, c in edges if head in sink_side and tail not in sink_side)
    return sum(cut), (set(graph) - sink_side, sink_side)


@dataclass
class _Network:
    """Edge 2i, its reverse 2i + 1, and what is left of their capacities.

    ``last`` has the last edge that leaves each vertex, and ``previous`` the one before
    each edge; -1 is none.
    """

    source: int
    sink: int
    last: list[int]
    previous: list[int] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    residual: list[float] = field(default_factory=list)

    def add_edge(self, tail: int, head: int, capacity: float) -> None:
        edge = len(self.heads)
        self.previous += (self.last[tail], self.last[head])
        self.last[tail], self.last[head] = edge, edge + 1
        self.heads += (head, tail)
        self.residual += (capacity, 0)

    def distances(self) -> list[Optional[int]]:
        """Edges from each vertex to the sink, where there is a way with room; else None.

        Those further away than the source are left out where it has a way.
        """
        previous, heads, residual = self.previous, self.heads, self.residual
        distance: list[Optional[int]] = [None] * len(self.last)
        distance[self.sink] = steps = 0
        layer = [self.sink]
        while layer and distance[self.source] is None:
            steps += 1
            next_layer = []
            for vertex in layer:
                edge = self.last[vertex]
                while edge >= 0:
                    if distance[heads[edge]] is None and residual[edge ^ 1] > 0:
                        distance[heads[edge]] = steps
                        next_layer.append(heads[edge])
                    edge = previous[edge]
            layer = next_layer
        return distance

    def block(self, distance: list[Optional[int]]) -> None:
        """Send flow along shortest paths until each has an edge without room."""
        previous, heads, residual = self.previous, self.heads, self.residual
        untried = self.last.copy()
        path: list[int] = []
        vertex = self.source
        while True:
            if vertex == self.sink:
                room = min(residual[edge] for edge in path)
                if room == math.inf:
                    from networkx import NetworkXUnbounded

                    raise NetworkXUnbounded("an infinite path leads to the sink")
                for edge in path:
                    residual[edge] -= room
                    residual[edge ^ 1] += room
                full = next(i for i, edge in enumerate(path) if residual[edge] == 0)
                vertex = heads[path[full] ^ 1]
                del path[full:]
            elif (edge := untried[vertex]) >= 0:
                step = distance[heads[edge]]
                is_next = step is not None and step + 1 == distance[vertex]
                if is_next and residual[edge] > 0:
                    path.append(edge)
                    vertex = heads[edge]
                else:
                    untried[vertex] = previous[edge]
            elif path:
                edge = path.pop()
                vertex = heads[edge ^ 1]
                untried[vertex] = previous[edge]
            else:
                return
