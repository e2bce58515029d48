"""What a device counts during steps, compared with what was planned for them."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Optional, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters

from ..report.saved_values import format_bytes


if TYPE_CHECKING:
    from collections.abc import Callable

    from ..report.step_summary import StepSummary
    from .messages import StepWarnings


# The share by which a step may exceed what is allowed without a warning.
SLACK = 0.005
# The share by which a device's count may differ from the prediction.
_MISS = 0.02
# If the first step leaves behind more than this share of what its eager code makes,
# another one is recorded.  Also the share of a planned peak by which bytes may grow
# before that counts as new.
NEGLIGIBLE = 0.01
# Fewer bytes mean nothing on a CPU, where the whole process is counted.
_NOISE = 2**18


class DeviceBytes:
    """What is live on a device, and the peak where its allocator counts that as well.

    torch counts what it allocates on accelerators, but not on a CPU: there, ``live`` is
    what the C library has handed out to the whole process, and only its growth from
    step to step means anything.  Where nothing counts them, it returns None.  Each call
    takes microseconds.
    """

    def __init__(self, device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        self._device = device
        self._counters = module if hasattr(module, "reset_peak_memory_stats") else None
        self.live: Callable[[], Optional[int]] = lambda: None
        if self._counters is not None:
            self.live = self.given
        elif device.type == "cpu":
            self.live = _counter_of_malloc() or self.live

    @property
    def counts_peak(self) -> bool:
        return self._counters is not None

    def given(self) -> int:
        """The live bytes of tensors alone; 0 where torch does not count them."""
        counters = self._counters
        return int(counters.memory_allocated(self._device)) if counters else 0

    def begin(self) -> None:
        """Start counting a new peak."""
        if self._counters is not None:
            self._counters.reset_peak_memory_stats(self._device)

    def peak(self) -> Optional[int]:
        """The most live bytes since `begin`; None where nothing counts them."""
        if self._counters is None:
            return None
        return int(self._counters.max_memory_allocated(self._device))


class PeakWatch:
    """Compares what a device counts with the plan of a step.

    ``counts_all`` tells whether plans are for all live bytes, not just those beyond a
    step's start.  ``missed`` is how many bytes plans have to leave free, because that
    many more were counted than predicted.  Counts are in bytes, None if unknown.
    """

    def __init__(self, counts_all: bool) -> None:
        self._counts_all = counts_all
        self.missed = 0
        # Live bytes at the start of this step, and of the steps before it.
        self._start: Optional[int] = None
        self._usual_start: Optional[int] = None
        # How many graphs Dynamo had made by then: compiling leaves bytes behind, too.
        self._compiled = 0
        # How many frames it had not compiled when this step began.
        self._not_compiled = 0

    def begin(self, live: Optional[int]) -> None:
        """A step starts, with so many live bytes."""
        self._start = live
        self._not_compiled = _frames_not_compiled()

    def more_at_start(self, plan: StepSummary) -> int:
        """How many more bytes are live than when earlier steps began; 0 for very few.

        A queue may be filling up, or an optimizer may have made its states late.
        """
        if self._start is None:
            return 0
        if self._usual_start is None or self._has_compiled():
            self._usual_start = self._start
            self._compiled = counters["stats"]["unique_graphs"]
        more = self._start - self._usual_start
        if more <= max(NEGLIGIBLE * plan.predicted_peak, _NOISE):
            return 0
        self._usual_start = self._start
        return more

    def warn_if_not_compiled(self, warns: StepWarnings) -> bool:
        """Warn if Dynamo did not compile some frame of this step; return whether."""
        is_less = _frames_not_compiled() > self._not_compiled
        if is_less:
            warns.warn(
                "Dynamo did not compile all of this step, and what runs eagerly "
                "instead had not been recorded; if its recompile limit was reached, "
                "raise torch._dynamo.config.recompile_limit"
            )
        return is_less

    def forget_usual_start(self) -> None:
        """Forget what was live as steps began: compiling changes that."""
        self._usual_start = None

    def _has_compiled(self) -> bool:
        return counters["stats"]["unique_graphs"] != self._compiled

    def _beyond_start(self, start: int) -> int:
        return 0 if self._counts_all else start

    def warn_if_live_exceeds(
        self, live: Optional[int], plan: Optional[StepSummary], warns: StepWarnings
    ) -> None:
        """Warn if more is live now than is allowed at any time.

        Eager code may hold results of an evaluation that is not planned for.
        """
        held = self._held_by_step(live)
        if plan is not None and held is not None:
            self.warn_of_excess(held, plan, warns, more=_NOISE)

    def has_room_for(
        self, nbytes: float, live: Optional[int], plan: StepSummary
    ) -> bool:
        """Whether so many bytes more than are live now are allowed, as far as known."""
        held = self._held_by_step(live)
        return held is None or held + nbytes <= plan.allowed + _NOISE

    def _held_by_step(self, live: Optional[int]) -> Optional[int]:
        """What the step holds, None if unknown, as when a compile left bytes behind."""
        if live is None or self._start is None or self._has_compiled():
            return None
        return live - self._beyond_start(self._start)

    def peak_of(self, counted: Optional[int]) -> Optional[int]:
        """A counted peak, less the step's start where plans are for what is beyond it.

        None if either is unknown.
        """
        if counted is None or self._start is None:
            return None
        return counted - self._beyond_start(self._start)

    def compare(
        self, peak: int, plan: StepSummary, is_all: bool, warns: StepWarnings
    ) -> bool:
        """Warn if the prediction missed; return whether plans have to leave more free.

        A lower peak is no miss, unless the step ran all that was planned (``is_all``).
        """
        missed = peak - plan.predicted_peak
        if missed > _MISS * plan.predicted_peak or (
            is_all and -missed > _MISS * plan.predicted_peak
        ):
            warns.warn(
                f"the device counted {format_bytes(peak)} in a step, and "
                f"{format_bytes(plan.predicted_peak)} were predicted",
                "counted",
                is_risk=missed > 0,
                nbytes=peak,
            )
        # The next prediction would miss the same bytes.
        misses = peak > plan.allowed and missed > self.missed * (1 + _MISS)
        if misses:
            self.missed = missed
        return misses

    def warn_of_excess(
        self,
        held: int,
        plan: StepSummary,
        warns: StepWarnings,
        has_new_calls: bool = False,
        more: int = 0,
    ) -> None:
        """Warn if a step held more than is allowed, as some of it is not planned for.

        That is calls or, by default, eager code.  An excess of ``more`` bytes is always
        tolerated.
        """
        allowed = max(plan.allowed, plan.predicted_peak)
        if held > allowed + max(SLACK * allowed, more):
            what = (
                "some of its calls" if has_new_calls else "what eager code holds in it"
            )
            warns.warn(
                f"a step held {format_bytes(held)}, and {format_bytes(plan.allowed)} "
                f"are allowed; {what} had not been recorded",
                "eager",
                nbytes=held,
            )

    def warn_of_workspace(
        self, nbytes: int, plan: StepSummary, warns: StepWarnings
    ) -> None:
        """Warn if a kernel's workspace on a CPU matters beside the plan's peak."""
        if nbytes > SLACK * plan.predicted_peak:
            warns.warn(
                f"a kernel takes up to {format_bytes(nbytes)} for itself on this CPU, "
                "which no plan counts",
                "workspaces",
                is_risk=False,
            )


def _frames_not_compiled() -> int:
    frames = counters["frames"]
    return frames["total"] - frames["ok"]


def memory_of(accelerator: Optional[torch.device]) -> int:
    """The bytes of an accelerator's memory.  Raises ValueError without one."""
    if accelerator is None:
        raise ValueError("no accelerator found: pass share, peak_bytes or device_bytes")
    total: int = torch.get_device_module(accelerator).mem_get_info()[1]
    return total


@functools.cache
def _counter_of_malloc() -> Optional[Callable[[], int]]:
    """A function that returns the bytes malloc has handed out; None without glibc."""

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO.split()]

    try:
        mallinfo: Any = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    mallinfo.restype = Info

    def count() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return count


# The fields of the struct that mallinfo2 returns, from glibc 2.33 on.
_MALLINFO = (
    "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
)
