"""Which steps are recorded: the first ones, and some where something new was seen."""

from __future__ import annotations


# Most steps recorded while waiting for an unplanned call pattern to recur.
MOST_RECORDED = 8
# After how many steps the first of those are recorded that only check.
_FIRST_CHECK = 64


class Recording:
    """How many of the next steps are recorded.

    ``left`` is their number, and ``expects_new`` tells that the next step may be
    another program without a warning.
    """

    def __init__(self) -> None:
        self.left = 1
        self.expects_new = True
        # Steps until recording may start again, and the pause that is part of them.
        self._wait = self._pause = 0
        # Whether a step is recorded after the pause.
        self._is_due = False
        # How often recording has started again.
        self.occasions = 0
        self._steps, self._next_check = 0, _FIRST_CHECK
        # How many of the next steps are recorded to check eager code.
        self._checks = 0
        # Whether no training step was recorded yet; steps that did not train.
        self._is_first, self._idle = True, 0

    def record_again(self, count: int, at_once: bool = False) -> None:
        """Record the next ``count`` steps.

        If some were recorded too recently, one is after a pause, unless it is
        ``at_once``.
        """
        self._is_due = self._wait > 0 and not at_once
        if not self._is_due:
            self.left = count
            self.occasions += 1
            # Pauses of 1, 3, 7, ... do not stay aligned with a loop's period.
            self._pause = 2 * self._pause + 1
            self._wait = count + self._pause

    def end_step(self, counts_peak: bool) -> None:
        """A step ended without an exception.

        Unless the device ``counts_peak``, nothing but a recording notices that eager
        code holds more than it did.  So some more steps are recorded, ever fewer.
        """
        self._wait = max(self._wait - 1, 0)
        if self._is_due and not self._wait:
            self.record_again(1)
        self._checks = max(self._checks - 1, 0)
        self._steps += 1
        if self._steps == self._next_check:
            self._next_check *= 2
            if not counts_peak:
                # Two, as programs may take turns.
                self._checks = 2
                self.left = max(self.left, 2)

    def recorded_without_backward(self) -> bool:
        """A recorded step had no backward; returns whether that is worth a warning.

        Not for the first one, as trainers may try out validation before they train.
        """
        self._idle += 1
        if self._idle < MOST_RECORDED:
            self.left = max(self.left, 1)
            self.expects_new = True
        return self._idle > 1

    def recorded_training(self, reduces: bool, leaves_much: bool) -> bool:
        """A step that trains was recorded; returns whether it is the first.

        If it ``leaves_much`` behind, another one is recorded, in which buffers that are
        made for good are already there.  Two are for DDP, which ``reduces`` gradients:
        in the second step it makes its buckets again, beside those of the first.
        """
        is_first, self._is_first = self._is_first, False
        if is_first and reduces:
            self.left = 2
        elif is_first and leaves_much:
            self.left = 1
        return is_first

    def learned_program(self, is_first: bool, is_more: bool) -> None:
        """A new program that trains was learned, or that a known one holds more.

        If two take turns, the other one runs next.  Eager code may go on to hold more.
        """
        self.left = max(int(is_first), self._checks)
        self.expects_new = is_first
        if is_more:
            self.record_again(1)
