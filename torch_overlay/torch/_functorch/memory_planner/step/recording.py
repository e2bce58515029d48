"""Which steps are recorded: the first ones, and some where something new was seen."""

from __future__ import annotations


__all__ = ["MOST_RECORDED", "Recording"]

# Steps that are recorded at most, in order to see again what was not planned for.
MOST_RECORDED = 8


class Recording:
    """How many of the next steps are recorded.

    ``left`` is their number, and ``expects_new`` tells that the next step may be another
    program, of which no warning has to tell.
    """

    def __init__(self) -> None:
        self.left = 1
        self.expects_new = True
        # How many steps come before more are recorded, and how many come next time.
        self._wait = self._pause = 0
        # Whether no step that trains was learned from, and steps that did not train.
        self._is_first, self._idle = True, 0

    def again(self, count: int) -> None:
        """Record the next steps, unless that was done for something new just before."""
        if not self._wait:
            self.left = count
            # Not a multiple of the steps after which a loop repeats itself.
            self._pause = 2 * self._pause + 1
            self._wait = count + self._pause

    def end_step(self) -> None:
        """A step has come to its end; no exception ended it."""
        self._wait = max(self._wait - 1, 0)

    def end_without_backward(self) -> bool:
        """A step that was recorded does not train; whether that is worth a warning.

        What is first may be a check of all but the training.
        """
        self._idle += 1
        if self._idle < MOST_RECORDED:
            self.left = max(self.left, 1)
            self.expects_new = True
        return self._idle > 1

    def begin_training(self, reduces: bool, leaves_much: bool) -> bool:
        """A step that trains was recorded; whether it is the first.

        Buffers that the first step makes once and for all are there in a second.  DDP,
        which ``reduces``, makes its own anew in that, beside those of the first.
        """
        is_first, self._is_first = self._is_first, False
        if is_first and reduces:
            self.left = 2
        elif is_first and leaves_much:
            self.left = 1
        return is_first

    def after_program(self, is_first: bool) -> None:
        """A new program that trains was learned.

        Of two that take turns, the second runs next.
        """
        self.left = int(is_first)
        self.expects_new = is_first
