"""Checkpoints at narrow places of the forward, as between a transformer's layers.

A plan that saves what is live across such places repeats one segment between them at a
time.  A segment's own peak hardly depends on the others.  So it is measured once, and
dynamic programming finds the checkpoints with the lowest peak, or those that save least
within a peak (after Beaumont et al., "Optimal checkpointing for heterogeneous chains",
2019).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Optional, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..graph.liveness import Program
    from .plans import Plans


# Checkpoints may be at the narrowest of the local minima: one list of candidates for
# each of these shares of all minima.
_SHARES = (1, 0.75, 0.5, 0.25)
# The most candidate places that a segment may span.
_SPAN = 8
# The most times that the dynamic program is corrected by measuring its answer.
_CORRECTIONS = 8


def checkpoint_places(graph: Program) -> list[list[int]]:
    """The places in the forward across which few bytes are live: lists of local minima.

    There is a list for each share of ``_SHARES``, without duplicates.  A place is the
    index of the operator before it.  O(operators + storages), plus sorting the minima.
    """
    steps = len(graph.forward)
    change = [0] * (steps + 1)
    for s, birth in enumerate(graph.first_use):
        if birth >= 0 and s not in graph.outputs:
            change[birth] += graph.nbytes[s]
            change[graph.last_use[s]] -= graph.nbytes[s]
    crossing = list(accumulate(change))
    # Of equally narrow neighbors, the last.
    ends = [at for at in range(steps - 1) if crossing[at] != crossing[at + 1]]
    before = [math.inf, *(crossing[at] for at in ends)]
    minima = [
        (crossing[at], at)
        for more, at in zip(before, ends)
        if more > crossing[at] < crossing[at + 1]
    ]
    widths = sorted(width for width, _ in minima)
    choices: dict[tuple[int, ...], None] = {}
    for share in _SHARES:
        if widths:
            widest = widths[math.ceil(len(widths) * share) - 1]
            choices[tuple(at for width, at in minima if width <= widest)] = None
    return [list(choice) for choice in choices]


def add_plans_of_checkpoints(plans: Plans, chains: Sequence[Chain]) -> None:
    """Find the checkpoints of each chain that have the lowest peak.

    If a segment's peak depends on its neighbors after all, the answer has a higher peak
    than expected.  Learning the segments' peaks from that leads to a different answer.
    Chains are evaluated together, which takes little longer than evaluating one.
    """
    open_chains = [*chains]
    for _ in range(_CORRECTIONS + 1):
        plans.evaluate(
            saved for chain in open_chains for saved in chain.choices.values()
        )
        for chain in open_chains:
            chain.measure_segments()
        open_chains = [
            chain
            for chain in open_chains
            if chain.expected is None or chain.found[-1][0] > chain.expected
        ]
        for chain in open_chains:
            chain.choose_checkpoints()


class Chain:
    """Plans that save what is live across some of the ``places`` in the forward.

    Places are numbered from 1.  Number 0 is the start of the forward, where nothing
    crosses, and ``end`` is its end.  ``peak[i, j]`` has the most bytes that are live
    while the backward is between places i and j, without those that the checkpoints up
    to i keep; ``width[i, j]`` has the bytes that a checkpoint at j adds to these.
    """

    def __init__(self, plans: Plans, places: Sequence[int]) -> None:
        self.plans = plans
        graph = self.graph = plans.graph
        self.end = len(places) + 1
        self.at = [-1, *places, len(graph.forward)]
        self.crossing = self._storages_crossing(places)
        self.everything = self.storages(range(self.end))
        self.width = {
            (i, j): graph.nbytes_of(self.crossing[j] - self.crossing[i])
            for i in range(self.end)
            for j in range(i + 1, min(i + _SPAN, self.end) + 1)
        }
        self.forward_positions = self._forward_positions()
        self.peak: dict[tuple[int, int], int] = {}
        # What to measure next: chosen places, with the storages that they save.
        self.choices = self._saving(
            [i for i in range(1, self.end) if i % span == offset]
            for span in range(1, _SPAN + 1)
            for offset in range(span)
        )
        # The peak that the dynamic program expects of its last answer.
        self.expected: Optional[int] = None
        # The answers of the dynamic program: the measured peak, and what is saved.
        self.found: list[tuple[int, frozenset[int]]] = []

    def storages(self, chosen: Iterable[int]) -> frozenset[int]:
        """The storages that are live across any of these places."""
        return frozenset().union(*(self.crossing[i] for i in chosen))

    def _storages_crossing(self, places: Sequence[int]) -> list[set[int]]:
        graph = self.graph
        found: list[set[int]] = [set() for _ in range(len(places) + 2)]
        for s, (birth, death) in enumerate(zip(graph.first_use, graph.last_use)):
            if birth >= 0 and graph.saved_as[s] is not None:
                crossed = range(bisect_left(places, birth), bisect_left(places, death))
                for i in crossed:
                    found[i + 1].add(s)
        return found

    def _forward_positions(self) -> list[int]:
        """How far back in the forward each backward step has got, the last step first.

        That is the operator that makes the latest of the large storages that this step
        or later ones read.  Small ones (a mask, a constant) may be read anywhere.
        """
        graph = self.graph
        large = max(graph.nbytes, default=0) // 128
        where: list[int] = []
        latest = -1
        for step in reversed(graph.steps):
            reads = (s for s in step.operator.reads if graph.nbytes[s] >= large)
            latest = max(latest, *(graph.first_use[s] for s in reads), -1)
            where.append(latest)
        return where

    def _saving(
        self, choices: Iterable[Sequence[int]]
    ) -> dict[tuple[int, ...], frozenset[int]]:
        return {tuple(chosen): self.storages(chosen) for chosen in choices}

    def measure_segments(self) -> None:
        """Learn the segments' peaks from the choices, once these are evaluated."""
        for chosen, storages in self.choices.items():
            live = self.plans.evaluations[storages].step_peaks[::-1]
            done = kept = 0
            for segment in zip((0, *chosen), (*chosen, self.end)):
                steps = bisect_right(
                    self.forward_positions, self.at[segment[1]], lo=done
                )
                own = max(live[done:steps], default=0) - kept
                done = steps
                self.peak[segment] = max(self.peak.get(segment, 0), own)
                kept += self.width[segment]
            if self.expected is not None:
                self.found.append((self.plans.peaks[storages], storages))
        self.segments = sorted(
            (stop, start, own, self.width[start, stop])
            for (start, stop), own in self.peak.items()
        )

    def choose_checkpoints(self) -> None:
        """Pick the checkpoints that should have the lowest peak, to measure next."""
        # Checkpoints at all places stay within the upper bound.
        low, high = 0, max(self.peak.values()) + self.graph.nbytes_of(self.everything)
        chosen: Sequence[int] = range(1, self.end)
        while high - low > high // 1000 + 1:
            middle = (low + high) // 2
            fewest = self.fewest_checkpoints_within(middle)
            if fewest is None:
                low = middle
            else:
                high, chosen = middle, fewest
        self.choices, self.expected = self._saving([chosen]), high

    def fewest_checkpoints_within(self, peak: int) -> Optional[list[int]]:
        """The places that save the fewest bytes with all segments within ``peak``.

        All that matters to the segments after a place is how many bytes the checkpoints
        up to it keep, so dynamic programming finds the fewest.  None if no places will
        do.  O(places * _SPAN).
        """
        kept = [math.inf] * (self.end + 1)
        previous = [0] * (self.end + 1)
        kept[0] = 0
        for stop, start, own, width in self.segments:
            total = kept[start] + width
            if total < kept[stop] and kept[start] + own <= peak:
                kept[stop], previous[stop] = total, start
        if math.isinf(kept[self.end]):
            return None
        chosen: list[int] = []
        place = previous[self.end]
        while place:
            chosen.append(place)
            place = previous[place]
        return chosen[::-1]
