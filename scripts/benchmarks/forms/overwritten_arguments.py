"""What steps hold by orders that are compared as they will be generated."""

from benchmarks.scheduled import measured, WHAT


__all__ = ["WHAT", "measured"]
