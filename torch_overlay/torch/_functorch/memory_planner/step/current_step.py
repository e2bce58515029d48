"""The step that is running, and the code that began it."""

from __future__ import annotations

import dis
import inspect
import sys
import threading
from contextvars import ContextVar
from typing import Optional, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from .budget import StepBudget
    from .calls import Step


__all__ = [
    "Caller",
    "close_step_of",
    "running",
    "running_step",
    "running_steps",
]


# The step that this thread runs.
running: ContextVar[Optional[Step]] = ContextVar("running step", default=None)


def running_step() -> Optional[Step]:
    """The step that this thread runs, or whose backward this thread serves."""
    step = running.get()
    while step is not None and step.caller.has_failed():
        _abandon(step)
        step = step.outer
    if step is None and torch._C._is_key_in_tls("context"):
        context = torch._C._get_obj_in_tls("context")
        step = context.get(running) if context is not None else None
    return step


def running_steps() -> Iterator[Step]:
    """The running step, then the steps that enclose it."""
    step = running_step()
    while step is not None:
        yield step
        step = step.outer


def close_step_of(budget: StepBudget) -> Optional[Step]:
    """Close the running step of a budget, and those that were begun within it."""
    steps = [*running_steps()]
    own = next((step for step in steps if step.budget is budget), None)
    if own is not None:
        own.caller.has_failed()
    for step in steps[: steps.index(own) + 1] if own is not None else ():
        step.leave()
    return own


def _abandon(step: Step) -> None:
    """Close a step, unless its recorder is handling an operator."""
    modes = _get_current_dispatch_mode_stack()
    if step.recorder is None or (modes and modes[-1] is step.recorder):
        step.leave()


class Caller:
    """The code that began a step, for as long as it may still end the step.

    A callback that begins a step returns, and another one is to end the step.  If an
    exception leaves the loop that calls them, none does, and the step would stay open
    for whatever the thread runs next.
    """

    def __init__(self, frame: Optional[FrameType]) -> None:
        while frame is not None and frame.f_code.co_flags & _RESUMED:
            frame = frame.f_back
        self._frame, self._thread = frame, threading.get_ident()
        self._has_failed = False
        # Whether the code that began the step was still running when last asked.
        self.is_running = frame is not None

    def has_failed(self) -> bool:
        """Whether an exception has ended that code.  O(depth of the stack)."""
        if self._frame is None or threading.get_ident() != self._thread:
            return self._has_failed
        while self._frame is not None and not _is_running(self._frame):
            # If this frame has returned, its caller may still end the step.
            frame, self._frame = self._frame, self._frame.f_back
            self.is_running = False
            if frame.f_code.co_flags & _RESUMED:
                self._frame = None
            elif not _has_returned(frame):
                self._frame, self._has_failed = None, True
        return self._has_failed

    def forget(self) -> None:
        """Release the frame, and with it the code's local variables."""
        self._frame = None


# Code that may be suspended and resumed: nobody can tell whether it has ended.
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _is_running(frame: FrameType) -> bool:
    current: Optional[FrameType] = sys._getframe()
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def _has_returned(frame: FrameType) -> bool:
    """Whether the last instruction of a frame that has ended was a return."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")
