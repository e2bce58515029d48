"""Sentences of the README that are made from what other benchmarks stored."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import unasked
from benchmarks.catalogue import HELD_OUT
from benchmarks.cost import pairs, stepped
from benchmarks.pages import good, Row


# Less than this is no difference.
LESS = 2 - unasked.SAME


def installed(data: dict[str, Any]) -> str:
    """Peaks and times of training with nothing asked, beside stock's."""
    trained = good(data["measured"], kind="training")
    rows = [row for row in trained if "seconds" in row["stock"]]
    peaks = sorted((unasked.ratio(row, "peak"), row["net"]) for row in rows)
    ratios = [ratio for ratio, _ in peaks]
    times = [unasked.ratio(row, "seconds") for row in rows]
    lower = sum(ratio < LESS for ratio in ratios)
    higher = sum(ratio > unasked.SAME for ratio in ratios)
    least = ", ".join(f"`{net}` {lost(ratio)}" for ratio, net in peaks[:3])
    return (
        f"Of {len(rows)} nets in training, {held_out(rows)}, {lower} have a lower peak than with stock and "
        f"{higher or 'none'} a higher one. It is {lost(statistics.median(ratios))} lower in "
        f"the median, and most where the vocabulary is large: {least}. No step takes longer "
        f"than {max(times):.3f} times stock's. Simulated by inductor's schedule for an H100, bfloat16, "
        f"with the roofline's times; torch {data['environment']['torch']}.\n"
    )


def held_out(rows: Iterable[Row]) -> str:
    """How many are of nets that nothing was tuned on."""
    count = sum(row["set"] == HELD_OUT for row in rows)
    return f"{count or 'none'} of them held out from tuning"


def lost(ratio: float) -> str:
    return f"{1 - ratio:.0%}"


def compiling(data: dict[str, Any]) -> str:
    """What a compile takes with a peak asked, beside stock's."""
    rows = data["measured"]
    both = [*pairs(rows)]
    ratios = [ours["compile_s"] / theirs["compile_s"] for ours, theirs in both]
    return (
        "A whole compile with a peak asked, kernels included, takes "
        f"{statistics.median(ratios):.2f} times stock's in the median of {len(ratios)}, "
        f"{held_out(ours for ours, _ in both)}, and {max(ratios):.2f} at worst, where a plan that held too much was replaced. A "
        "StepBudget compiles again when the second step starts, in the mean "
        f"{mean_after(rows):.1f} plans of each graph. CPU seconds of small nets by inductor on a CPU, "
        f"torch {data['environment']['torch']}; on a GPU nobody has measured it.\n"
    )


def mean_after(rows: Sequence[Row]) -> float:
    return statistics.fmean(row["plans_after"] for row in stepped(rows))
