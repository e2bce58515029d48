"""What steps hold where inputs count by their storage."""

from benchmarks.scheduled import measured, WHAT


__all__ = ["WHAT", "measured"]
