"""What steps hold without a second, wider table of an embedding's gradient."""

from benchmarks.scheduled import measured, WHAT


__all__ = ["WHAT", "measured"]
