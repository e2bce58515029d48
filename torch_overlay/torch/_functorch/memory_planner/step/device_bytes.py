"""The live bytes that the allocator of a device counts."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Optional, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["DeviceBytes", "memory_of"]


class DeviceBytes:
    """What is live on a device, and the peak where its allocator counts that as well.

    torch counts what it allocates on accelerators, but not on a CPU: there, ``live`` is
    what the C library has handed out to the whole process, and only its growth from
    step to step means anything.  Each call takes microseconds.
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
