"""What steps hold, as a device counts, beside what was planned for them."""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

from torch._dynamo.utils import counters

from ..report.saved_values import format_bytes


if TYPE_CHECKING:
    from ..report.step_summary import StepSummary
    from .warnings import Warns


__all__ = ["NEW", "OVER", "Watch", "check_held"]

# By so much a step may hold more than is allowed without a word.
OVER = 0.005
# What a device counts may be as much more or less than what was predicted.
_MISS = 0.02
# Of what eager code makes, what a step may leave behind and be recorded only once.  Of a
# planned peak, by how much what is live between steps may grow.
NEW = 0.01
# Less than that tells nothing on a CPU, where the whole process counts.
_NOISE = 2**18


class Watch:
    """Compares what a device counts with the plan of a step.

    ``counts_all`` tells whether plans are for all bytes, not those beyond a step's start;
    ``missed`` are bytes that plans leave free, as so many more were counted than
    predicted.  What is counted may be None, where nothing counts it.
    """

    def __init__(self, counts_all: bool) -> None:
        self._counts_all = counts_all
        self.missed = 0
        # Live bytes at the start of the step, and of the steps before it.
        self._start: Optional[int] = None
        self._usual_start: Optional[int] = None
        # How many graphs Dynamo had made by then: compiling leaves bytes behind, too.
        self._compiled = 0

    def begin(self, live: Optional[int]) -> None:
        """A step starts, with so many bytes."""
        self._start = live

    def more_at_start(self, plan: StepSummary) -> int:
        """By how much more is live than when earlier steps began; 0 for next to nothing.

        As of a queue that fills, or of states that an optimizer makes late.
        """
        if self._start is None:
            return 0
        if self._usual_start is None or self._has_compiled():
            self._usual_start = self._start
            self._compiled = counters["stats"]["unique_graphs"]
        more = self._start - self._usual_start
        if more <= max(NEW * plan.predicted_peak, _NOISE):
            return 0
        self._usual_start = self._start
        return more

    def was_compiling(self) -> None:
        """What is live as steps begin is another number from here on."""
        self._usual_start = None

    def _has_compiled(self) -> bool:
        return counters["stats"]["unique_graphs"] != self._compiled

    def _beyond_start(self, start: int) -> int:
        return 0 if self._counts_all else start

    def check_live(self, live: Optional[int], plan: StepSummary, warns: Warns) -> None:
        """Warn where more is live than is allowed at any time.

        As of what eager code has made of an evaluation that is not planned for.
        """
        start = self._start
        if live is not None and start is not None and not self._has_compiled():
            check_held(live - self._beyond_start(start), plan, warns, _NOISE)

    def measure(
        self, counted: Optional[int], plan: StepSummary, is_all: bool, warns: Warns
    ) -> tuple[Optional[int], bool]:
        """The peak that was counted in a step, and whether plans are to leave more free.

        That may be less than predicted, unless the step ``is_all`` that was planned for.
        """
        start = self._start
        if counted is None or start is None:
            return None, False
        peak = counted - self._beyond_start(start)
        missed = peak - plan.predicted_peak
        if missed > _MISS * plan.predicted_peak or (
            is_all and -missed > _MISS * plan.predicted_peak
        ):
            warns.warn(
                f"the device counted {format_bytes(peak)} in a step, and "
                f"{format_bytes(plan.predicted_peak)} were predicted",
                "counted",
                is_risk=missed > 0,
            )
        # What was not predicted of one step will not be of the next.
        misses = peak > plan.allowed and missed > self.missed * (1 + _MISS)
        if misses:
            self.missed = missed
        return peak, misses


def check_held(held: int, plan: StepSummary, warns: Warns, more: int = 0) -> None:
    """Warn where a step held more than is allowed, as eager code did.

    By no less than ``more``.
    """
    allowed = max(plan.allowed, plan.predicted_peak)
    if held > allowed + max(OVER * allowed, more):
        warns.warn(
            f"a step held {format_bytes(held)}, and {format_bytes(plan.allowed)} are "
            "allowed; what eager code holds in it had not been recorded",
            "eager",
        )
