"""What steps hold where a kernel can run where its last node stood."""

from benchmarks.scheduled import measured, WHAT


__all__ = ["WHAT", "measured"]
