"""Whether what_fits.sh tells the truth: beside real training, and published figures.

    TORCH_VERSION=2.15.0 scripts/benchmark.sh fits
    scripts/benchmark.sh fits --check

Small nets are trained on the CPU, operator by operator, by the plans that were told, and
torch's allocator notes what they hold; AdamW, as one graph and in blocks. A Llama of 8B
parameters is planned as torchtitan trains it, FSDP2 over 8 H100s, with a sequence of 8,192
tokens on each. torchtitan's pull request 3429 published its peaks: 32.07 GiB with full
checkpoints, 52.44 where attention and products are saved.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from what_fits import __main__ as command
from what_fits import page as fits
from what_fits.page import total

from benchmarks import catalogue, fresh, nets, pages, plans
from benchmarks.architectures import Transformer
from benchmarks.catalogue import HELD_OUT, PROJECT
from benchmarks.meters import allocations
from benchmarks.pages import good, Mark, Row
from benchmarks.ways import Training


LLAMA = "benchmarks.fits:llama3_8b"
NETS = {
    PROJECT: ("llama-8", "vit", "bert", LLAMA),
    HELD_OUT: ("deberta-small", "hiera-small", "w2v-bert-small"),
    "check": ("vit",),
}
PUBLISHED = {"checkpoint": 32.07, "saving products": 52.44}
GIB = 2**30
LEGEND = """Whether what_fits.sh tells the truth. Small nets: what was told, by fake tensors, and what
torch's allocator counted, in MB, when the same plans trained for real on a CPU, operator by operator,
in float32 with AdamW; parameters, optimizer states and gradients included. Each pair is for a
share of the budget, or for a number of bytes half way. "graph" is one graph by the target
"peak", "blocks" a StepBudget.

A Llama of 8B parameters, as torchtitan trains it: FSDP2 over 8 H100s, 8,192 tokens on each,
bfloat16 where it computes; simulated. "published" is what torchtitan measured for the same
ways, with a batch that it does not give.
"""


def llama3_8b(batch: int, length: int) -> tuple[nn.Module, nets.Inputs]:
    shape = replace(nets.LLAMA3_8B, batch=batch, tokens=length)
    return Transformer(shape), nets.tokens(shape.vocabulary, batch, length)


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    for net in asked.nets:
        of_set = PROJECT if net == LLAMA else catalogue.set_of(net)
        of = {"set": of_set, "net": net}
        if net != LLAMA:
            for kind in ("graph", "blocks"):
                yield {**of, "kind": kind, "batch": None, "torch": "patched"}
        elif torch.version.cuda is not None:
            for kind in (*PUBLISHED, fits.OURS, fits.UPSTREAM):
                wheel = fresh.UNTOUCHED if kind == fits.UPSTREAM else "patched"
                yield {**of, "kind": kind, "batch": 1, "torch": wheel}


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
        "What is told of small nets, beside what the allocator counts on a CPU",
        (
            (abs(step["told"] / step["found"] - 1), f"{row['net']}, {row['kind']}")
            for row in good(rows)
            for step in row["steps"]
            if "found" in step
        ),
        *(0.03, "within 3 %", "off by {:.2%} at most ({})", True),
        "What is told is off by up to {0:.1%} of what the allocator counts ({1}).",
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
            "What full checkpoints save of a Llama of 8B, beside saving products",
            f"{ours:.2f} GiB simulated, {theirs:.2f} GiB published",
            "within 10 %",
            abs(ours / theirs - 1) <= 0.1,
            False,
            f"What full checkpoints save of a Llama of 8B is {ours:.2f} GiB as simulated, "
            f"and {theirs:.2f} GiB as published.",
        )


def at(step: Row) -> str:
    return f"{step.get('share', step.get('budget', ''))}"


def named(kind: str) -> str:
    return "stock" if kind == fits.UPSTREAM else kind


def of_llama(rows: Sequence[Row], budgets: Container[Any] = ()) -> str:
    """All plans of the large one, or those of some budgets."""
    cells = {
        "Llama of 8B": lambda row, step: named(row["kind"]),
        "budget": lambda row, step: at(step),
        "fixed, GiB": lambda row, step: f"{step['given'] / GIB:.2f}",
        "peak with it": lambda row, step: f"{total(step) / GIB:.2f}",
        "published": lambda row, step: f"{PUBLISHED.get(row['kind'], '')}",
        "PFLOP": lambda row, step: f"{step['flops'] / 1e15:.3f}",
        "roofline, s": lambda row, step: f"{step['seconds']:.3f}",
    }
    large = [(row, step) for row in good(rows, net=LLAMA) for step in row["steps"]]
    return pages.columns(
        [
            each
            for each in large
            if not budgets or not at(each[1]) or at(each[1]) in budgets
        ],
        cells,
    )


def page(data: Row) -> str:
    rows = data["measured"]
    small = [row for row in good(rows) if row["net"] != LLAMA]

    def pair(row: Row, asked: Any) -> str:
        found = [step for step in row["steps"] if step["asked"] == asked]
        return "".join(f"{s['told'] / 1e6:.1f} / {s['found'] / 1e6:.1f}" for s in found)

    cells: dict[str, Any] = {
        "net": lambda row: row["net"],
        "by": lambda row: row["kind"],
    }
    for asked in dict.fromkeys(s["asked"] for row in small for s in row["steps"]):
        cells[f"{asked}"] = partial(pair, asked=asked)
    marks = [*judged(rows)]
    short = f"{pages.found(marks)}\n{of_llama(rows, ('1.0', '0.2', '0.0'))}"
    tables = {
        "Small nets": pages.columns(small, cells),
        "A Llama of 8B": of_llama(rows),
    }
    origin = pages.measured_on(data["environment"], pages.SIMULATED, rows)
    return pages.page(LEGEND, origin, short, pages.limits(marks, rows), tables)
