"""Whether what_fits.sh tells the truth: beside real training.

    scripts/benchmark.sh fits --check

Small nets are trained on the CPU, operator by operator, by the plans that were told, and
torch's allocator notes what they hold; AdamW, as one graph and in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from what_fits import __main__ as command
from what_fits import page as fits
from what_fits.page import total

from benchmarks import fresh, plans
from benchmarks.pages import (
    at_most,
    columns,
    good,
    Mark,
    marks_table,
    measured_on,
    Row,
    SIMULATED,
)
from benchmarks.ways import Training


NETS = ("llama-8", "vit", "bert")
HOW = """
Told: what fake tensors hold at the peak, with all that is fixed, by shares. Found: what the
allocator notes of the same plans in real training.

"""


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    for net in asked.nets or (("vit",) if asked.check else NETS):
        for kind in ("graph", "blocks"):
            yield {"net": net, "kind": kind, "batch": None, "torch": "patched"}


# -------------------------------------------------------------- in a process


class Real(plans.Plans):
    """Plans of steps that run, and what the allocator notes of them."""

    def found(self, training: Training) -> Row:
        step = training.measured(allocator=True)
        return {"peak": step.own_peak, "given": step.given}


def measure(task: fresh.Task) -> Row:
    """The same plans, told and run."""
    words = ["--model", task["net"], *["--blocks"] * (task["kind"] == "blocks")]
    asked = vars(command.options().parse_args(words))
    task = {**task, "length": None, "way": fits.OURS, "_asked": asked}
    told, found = fits.steps_of(task), fits.steps_of(task, Real)
    return {
        "steps": [
            {"asked": step["share"], "told": total(step), "found": total(real)}
            for step, real in zip(told, found)
        ]
    }


# ------------------------------------------------------------------- report


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    yield from at_most(
        "told / found by the allocator, operators on the CPU",
        (
            (abs(step["told"] / step["found"] - 1), f"{row['net']}, {row['kind']}")
            for row in good(rows)
            for step in row["steps"]
        ),
        *(0.03, "within 3 %", "off by {:.2%} at most ({})", True),
    )


def page(data: dict[str, Any]) -> str:
    cells: dict[str, Any] = {
        "net": lambda row: row["net"],
        "plans": lambda row: row["kind"],
        "told / found, MB": lambda row: "; ".join(
            f"{s['asked']}: {s['told'] / 1e6:.1f} / {s['found'] / 1e6:.1f}"
            for s in row["steps"]
        ),
    }
    text = marks_table(data["rows"]) + HOW + columns(good(data["measured"]), cells)
    return text + "\n" + measured_on(data["environment"], SIMULATED)
