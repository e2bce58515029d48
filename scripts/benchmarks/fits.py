"""Whether what_fits.sh tells the truth: beside real training, and published figures.

    TORCH_VERSION=2.15.0 scripts/benchmark.sh fits
    scripts/benchmark.sh fits --check

Small nets are trained on the CPU, operator by operator, by the plans that were told, and
torch's allocator notes what they hold; AdamW, as one graph and in blocks. A Llama of 8B
parameters is planned as torchtitan trains it, FSDP2 over 8 H100s, with a sequence of 8,192
tokens on each. torchtitan's pull request 3429 published its peaks: 32.07 GiB with full
checkpoints, 52.44 where attention and products are saved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from what_fits import __main__ as command
from what_fits import page as fits
from what_fits.page import total

from benchmarks import fresh, nets, pages, plans
from benchmarks.architectures import Transformer
from benchmarks.meters import allocations
from benchmarks.pages import good, Mark, Row
from benchmarks.ways import Training


NETS = ("llama-8", "vit", "bert")
LLAMA = "benchmarks.fits:llama3_8b"
PUBLISHED = {"checkpoint": 32.07, "saving products": 52.44}
GIB = 2**30
HOW = """
Told: what fake tensors hold at the peak, with all that is fixed, by shares and by a number
of bytes. Found: what the allocator notes of the same plans in real training.

"""


def llama3_8b(batch: int, length: int) -> tuple[nn.Module, nets.Inputs]:
    shape = replace(nets.LLAMA3_8B, batch=batch, tokens=length)
    return Transformer(shape), nets.tokens(shape.vocabulary, batch, length)


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    for net in asked.nets or (("vit",) if asked.check else NETS):
        for kind in ("graph", "blocks"):
            yield {"net": net, "kind": kind, "batch": None, "torch": "patched"}
    if asked.nets or asked.check or torch.version.cuda is None:
        return
    for kind in (*PUBLISHED, fits.OURS, fits.UPSTREAM):
        wheel = fresh.UNTOUCHED if kind == fits.UPSTREAM else "patched"
        yield {"net": LLAMA, "kind": kind, "batch": 1, "torch": wheel}


# -------------------------------------------------------------- in a process


class Real(plans.Plans):
    """Plans of steps that run, and what the allocator notes of them."""

    def found(self, training: Training) -> Row:
        given = training.measured().given
        return {"peak": allocations(training.step)[1], "given": given}


def measure(task: fresh.Task) -> Row:
    return at_size(task) if task["net"] == LLAMA else beside_allocator(task)


def beside_allocator(task: fresh.Task) -> Row:
    """The same plans, told and run, and that for a memory half way between two of them."""
    words = ["--model", task["net"], "--headroom", "0"]
    words += ["--blocks"] * (task["kind"] == "blocks")
    asked = vars(command.options().parse_args(words))
    task = {**task, "length": None, "way": fits.OURS, "_asked": asked}
    told = fits.steps_of(task)
    asked["memory"] = (total(told[0]) + total(told[-1])) // 2
    told, found = fits.steps_of(task), fits.steps_of(task, Real)
    return {
        "steps": [
            {
                "asked": step.get("share", "bytes"),
                "told": total(step),
                "found": total(real),
            }
            for step, real in zip(told, found)
        ]
    }


def at_size(task: fresh.Task) -> Row:
    words = ["--model", LLAMA, "--gpu", "h100", "--fsdp", "8", "--blocks"]
    asked = vars(command.options().parse_args([*words, "--compile-loss"]))
    way = {**task, "length": 8192, "way": task["kind"], "_asked": asked}
    return {"steps": fits.steps_of(way)}


# ------------------------------------------------------------------- report


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    yield from pages.at_most(
        "told / found by the allocator, operators on the CPU",
        (
            (abs(step["told"] / step["found"] - 1), f"{row['net']}, {row['kind']}")
            for row in good(rows)
            for step in row["steps"]
            if "found" in step
        ),
        *(0.03, "within 3 %", "off by {:.2%} at most ({})", True),
    )
    theirs = PUBLISHED["saving products"] - PUBLISHED["checkpoint"]
    least = {
        row["kind"]: total(row["steps"][0]) / GIB
        for row in good(rows, net=LLAMA)
        if row["kind"] in PUBLISHED
    }
    if len(least) == len(PUBLISHED):
        ours = least["saving products"] - least["checkpoint"]
        yield Mark(
            "Llama of 8B: what full checkpoints save of saved products",
            f"{ours:.2f} GiB simulated",
            f"{theirs:.2f} GiB published, within 10 %",
            abs(ours / theirs - 1) <= 0.1,
            False,
        )


def page(data: dict[str, Any]) -> str:
    rows = data["measured"]
    text = pages.marks_table(data["rows"]) + HOW
    small = [row for row in good(rows) if row["net"] != LLAMA]
    text += pages.columns(
        small,
        {
            "net": lambda row: row["net"],
            "plans": lambda row: row["kind"],
            "told / found, MB": lambda row: "; ".join(
                f"{s['asked']}: {s['told'] / 1e6:.1f} / {s['found'] / 1e6:.1f}"
                for s in row["steps"]
            ),
        },
    )
    large = good(rows, net=LLAMA)
    if large:
        text += "\n" + pages.columns(
            [(row, step) for row in large for step in row["steps"]],
            {
                "Llama of 8B": lambda row, step: row["kind"],
                "at": lambda row, step: f"{step.get('share', step.get('budget', ''))}",
                "fixed, GiB": lambda row, step: f"{step['given'] / GIB:.2f}",
                "peak with it": lambda row, step: f"{total(step) / GIB:.2f}",
                "published": lambda row, step: f"{PUBLISHED.get(row['kind'], '')}",
                "PFLOP": lambda row, step: f"{step['flops'] / 1e15:.3f}",
                "roofline, s": lambda row, step: f"{step['seconds']:.3f}",
            },
        )
    return text + "\n" + pages.measured_on(data["environment"], pages.SIMULATED)
