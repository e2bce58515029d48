"""What steps hold where no product waits for its addend."""

from benchmarks.scheduled import measured, WHAT


__all__ = ["WHAT", "measured"]
