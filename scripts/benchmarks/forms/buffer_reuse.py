"""What steps hold where freed buffers are kept only below the real peak."""

from benchmarks.scheduled import measured, WHAT


__all__ = ["WHAT", "measured"]
