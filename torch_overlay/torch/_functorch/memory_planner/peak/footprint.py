"""What a plan of one graph keeps and holds.

A plan *keeps* bytes from the forward to the backward, and *holds* those that are live
while either runs.  A :class:`Footprint` has these as estimated, :class:`Told` as they
are in compiled code.
"""

from __future__ import annotations

import operator
from typing import NamedTuple, Protocol, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..graph.liveness import Evaluation, Program
    from ..graph.symbols import Values


# The names of nodes, each with its bytes.
Names = tuple[tuple[str, int], ...]


class Footprint(NamedTuple):
    """A plan of one graph: bytes beyond the graph's inputs and outputs, and a cost.

    Args:
        kept: what the forward leaves alive.
        forward: the most that is live while the forward runs, with what it returns.
        backward: the most that is live while the backward runs, with what was kept.
        cost: what is recomputed, in the estimator's unit.
        outputs: the indices of those outputs of the forward that are saved too.
        storages: what to save, by numbers of the variant's model.
        chunks: the number of chunks that the graph's head runs in: its variant.
    """

    kept: int
    forward: int
    backward: int
    cost: float
    outputs: frozenset[int]
    storages: frozenset[int]
    chunks: int = 1

    def holds_no_more(self, other: Footprint) -> bool:
        """Whether it keeps and holds at most as much as another."""
        is_no_more = all(map(operator.le, self[:3], other[:3]))
        return is_no_more and self.outputs <= other.outputs


def hold_no_more(plans: Iterable[Footprint], others: Iterable[Footprint]) -> bool:
    """Whether each plan holds no more than its counterpart, of equally many."""
    return all(map(Footprint.holds_no_more, plans, others))


def footprint_bytes(model: Program, evaluation: Evaluation) -> tuple[int, int, int]:
    """The first three fields of a plan's :class:`Footprint`."""
    kept = model.nbytes_of(evaluation.saved - model.outputs)
    backward = max(evaluation.step_peaks) - model.held_by_caller
    return kept, evaluation.forward_peak, backward


class Told(NamedTuple):
    """What the two compiled graphs of a joint graph hold, in bytes.

    Args:
        kept: what the forward leaves alive for the backward, beyond inputs and outputs.
        forward: the most that is live while the forward runs, beyond the inputs.
        backward: the most that is live while the backward runs, including what was
            kept, the tangents and what the forward returned.
    """

    kept: int
    forward: int
    backward: int


class Tell(Protocol):
    """Tells what a plan's compiled graphs hold, whose sizes may be symbolic.

    For others than ``values`` has, their hints count.  The backward alone holds the
    values that ``alone`` names; if ``is_retained``, it frees nothing that was kept.
    """

    def __call__(
        self, values: Values = (), alone: Names = (), is_retained: bool = False
    ) -> Told: ...
