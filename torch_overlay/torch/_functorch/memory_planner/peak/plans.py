"""The plans of a graph that were evaluated, and those that no other beats."""

from __future__ import annotations

import functools
import math
import operator
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ..graph.liveness import Evaluation, Program


def undominated(points: Sequence[tuple[float, ...]]) -> list[int]:
    """The indices of the points that no other one equals or beats in every number.

    They are the Pareto front, where less is better, in ascending order of the points;
    of equal points, the first counts.
    O(n log n) for pairs, O(n * points found) for longer points.
    """
    found: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i], i)):
        # Of the pairs found so far, the last has the smallest second number.
        rivals = found[-1:] if len(points[i]) == 2 else found
        if not any(all(map(operator.le, points[k], points[i])) for k in rivals):
            found.append(i)
    return found


class Plans:
    """All plans of a graph that were evaluated, keyed by the storages to save.

    ``peaks`` are in bytes, and ``costs`` in the estimator's unit.  ``cost`` is that of
    repeating each operator, and ``calls`` of the graph hold their saved values at once.
    """

    def __init__(self, graph: Program, cost: Sequence[float], calls: int = 1) -> None:
        self.graph = graph
        self.cost = cost
        # The other calls of the graph, which hold only what they saved.
        self.waiting = calls - 1
        self.expensive = [op for op, each in enumerate(cost) if each]
        self.peaks: dict[frozenset[int], int] = {}
        self.costs: dict[frozenset[int], float] = {}
        self.evaluations: dict[frozenset[int], Evaluation] = {}

    def evaluate(
        self, choices: Iterable[frozenset[int]]
    ) -> dict[frozenset[int], Evaluation]:
        """Evaluate plans together, each one only once."""
        wanted = dict.fromkeys(choices)
        new = [chosen for chosen in wanted if chosen not in self.evaluations]
        for chosen, evaluation in zip(new, self.graph.evaluate_all(new)):
            self.evaluations[chosen] = evaluation
            repeated, bit = evaluation.repeated, evaluation.bit
            self.costs[chosen] = math.fsum(
                self.cost[op] for op in self.expensive if repeated[op] & bit
            )
            peak = evaluation.peak
            if self.waiting:
                peak += self.waiting * self.graph.nbytes_of(
                    evaluation.saved - self.graph.outputs
                )
            self.peaks[chosen] = peak
        return {chosen: self.evaluations[chosen] for chosen in wanted}

    @functools.cached_property
    def results_of_readers(self) -> list[list[tuple[int, ...]]]:
        """For each storage, the results of each operator that reads it."""
        found: list[list[tuple[int, ...]]] = [[] for _ in self.graph.nbytes]
        for each in self.graph.operators:
            for s in each.reads:
                found[s].append(each.writes)
        return found

    def lowest(self) -> list[frozenset[int]]:
        """All plans by rising peak; of equal ones, the cheapest first."""
        return sorted(self.peaks, key=lambda plan: (self.peaks[plan], self.costs[plan]))

    @property
    def floor(self) -> int:
        """The lowest peak, in bytes."""
        return min(self.peaks.values())

    def with_items(
        self, base: frozenset[int], evaluation: Evaluation, targets: Sequence[int]
    ) -> Iterator[frozenset[int]]:
        """For each target peak in bytes, ``base`` and the items that there is room for.

        ``evaluation`` is that of ``base``.  Ends early once all items have room.
        """
        graph = self.graph
        # The peaks so far; a step that repeats something expensive begins a new one.
        peaks = [evaluation.forward_peak]
        items: list[tuple[float, int, int, int, list[int]]] = []
        for live, repeated in zip(evaluation.step_peaks, evaluation.recomputed_by_step):
            expensive = [op for op in repeated if self.cost[op]]
            if expensive:
                peaks.append(live)
            else:
                peaks[-1] = max(peaks[-1], live)
            for op in expensive:
                parts = [
                    s
                    for s in graph.operators[op].writes
                    if graph.saved_as[s] is not None and graph.first_use[s] >= 0
                ]
                size = graph.nbytes_of(parts)
                if parts:
                    # Of equal ones the latest, as it is saved for the shortest time.
                    density = self.cost[op] / max(size, 1)
                    items.append((-density, -op, size, len(peaks) - 1, parts))
        items.sort()
        for target in targets:
            room = [target - peak for peak in peaks]
            chosen = set(base)
            # For each size, the first entry where it no longer fits: room only shrinks.
            full: dict[int, int] = {}
            for _, _, size, before, parts in items:
                if before >= full.get(size, before + 1):
                    continue
                if min(room[:before]) >= size:
                    room[:before] = [free - size for free in room[:before]]
                    chosen.update(parts)
                else:
                    full[size] = before
            yield frozenset(chosen)
            if not full:
                break
