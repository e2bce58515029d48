"""What steps hold that repeat convolutions in the backward."""

from benchmarks import scheduled


WHAT = scheduled.WHAT + ", at budget 0.1"


def measured() -> dict[str, float]:
    return scheduled.measured(budget=0.1)
