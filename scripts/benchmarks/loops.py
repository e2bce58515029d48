"""Measures a StepBudget in training loops whose steps differ.

    scripts/benchmark.sh loops                      all nets (hours)
    scripts/benchmark.sh loops --check              one loop of one net, as CI does
    scripts/benchmark.sh loops --net llama-4 --kind alone "last batch"
    scripts/benchmark.sh loops --json results/loops.json

Every net is compiled as a whole and by blocks, and trained in several loops on a CPU,
operator by operator. What each step may take is found first, in the loop "alone": steps
of one kind, each with graphs and a StepBudget of its own. In each row, a letter for each
step says what it did to the plans: R, it was recorded; C, plans were compiled; w, it
warned. Peaks are bytes beyond those that are there when a step starts.

    lengths             forty steps of eight sizes, by graphs for all sizes from the start
                        (dynamic), once a second size is seen (automatic), or for each
                        size (buckets)
    last batch          a smaller one ends each epoch
    evaluation, no_grad    between steps, and within them
    accumulation        over one to four micro-batches
    skipped             a batch without a backward, and a step without a batch
    gan, heads, curriculum    two models, halves of one, and two sizes take turns
    logits              a model that returns them, too: they are dropped before the backward
    cost, memory        what a budget takes once it has learned

The nets "hf-trainer" and "two ranks" are programs of their own: Hugging Face's Trainer in
several settings, and DDP, FSDP2, tensor parallelism and a pipeline, by gloo.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Optional

import torch
from torch._dynamo import config as dynamo_config
from torch._functorch import config

from benchmarks import fresh, nets, second_set, turns
from benchmarks.pages import (
    at_most,
    columns,
    good,
    Mark,
    marks_table,
    measured_on,
    Named,
    Row,
)
from benchmarks.tracing import cpu_attention_counted
from benchmarks.turns import ALTERNATING, LOOPS, SHARE, VARYING


PROJECT = ("llama-4", "bert", "vit")
HELD_OUT = tuple(net.name for net in second_set.SMALL)
# With their loops, each in these ways.
PROGRAMS: dict[str, dict[str, tuple[str, ...]]] = {
    "hf-trainer": dict.fromkeys(
        (
            *("plain", "bf16", "accumulation", "evaluation", "last batch"),
            *("checkpointing", "peft"),
        ),
        ("blocks", "regional", "whole"),
    ),
    "two ranks": {
        "ddp": ("blocks", "whole"),
        **dict.fromkeys(("fsdp2", "tensor parallel", "pipeline"), ("blocks",)),
    },
}
NETS = (*PROJECT, *HELD_OUT, *PROGRAMS)
CHECK = "one loop of one net, as CI does"
KIND, KEY = "loop", ("net", "loop", "way", "share")
LIMITS = fresh.Limits(seconds=900, gigabytes=14)
WAYS = ("blocks", "whole")
SPECIAL = {
    "alone": turns.alone,
    "logits": turns.logits,
    "cost": turns.cost,
    "memory": turns.memory,
}
# A thousand steps of others take too long.
SMALLEST = (PROJECT[0], HELD_OUT[0])


def tasks(
    names: Optional[Sequence[str]], check: bool, rows: Sequence[Row]
) -> Iterator[fresh.Task]:
    loops = ("last batch, dynamic",) if check else tuple(LOOPS)
    for net in names or (PROJECT[:1] if check else NETS):
        task = {"net": net, "share": SHARE, "held_out": net in HELD_OUT}
        if net in PROGRAMS:
            for loop, ways in PROGRAMS[net].items():
                yield from ({**task, "loop": loop, "way": way} for way in ways)
            continue
        for way in WAYS[:1] if check else WAYS:
            task["way"] = way
            yield {**task, "loop": "alone", "loops": loops}
            found = good(rows, net=net, way=way, loop="alone")
            task["_alone"] = found[0]["steps"] if found else None
            for loop in loops:
                yield {**task, "loop": loop}
            if not check:
                yield from ({**task, "loop": loop, "share": 1.0} for loop in VARYING)
                yield {**task, "loop": "cost"}
                yield from ({**task, "loop": "memory"} for n in SMALLEST if n == net)
        if not check:
            yield {**task, "loop": "logits", "way": "whole"}


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    net, loop = task["net"], task["loop"]
    with ExitStack() as stack:
        stack.enter_context(config.patch(enable_autograd_cache=False))
        limits = {"recompile_limit": 64, "accumulated_recompile_limit": 512}
        stack.enter_context(dynamo_config.patch(limits))
        stack.enter_context(cpu_attention_counted())
        if net in PROGRAMS:
            # It takes long to import what these need.
            programs: Any = importlib.import_module("benchmarks.programs")
            row: Row = programs.MEASURED[net](loop, task["way"])
            return row
        measured = SPECIAL.get(loop, turns.taken)
        return measured(replace(nets.find(net), dtype=torch.float32), task)


# -------------------------------------------------------------------- marks


QUESTIONS = {
    "lengths": "Steps of eight sizes, larger ones later",
    "others": "A smaller last batch, evaluation, accumulation, skipped batches",
    "alternating": "Two programs that take turns",
    "programs": "Trainers and parallel training",
}


def group_of(row: Row) -> str:
    """The question that a row answers by its steps, if any."""
    if row["net"] in PROGRAMS:
        return "programs"
    for group, loops in ("lengths", VARYING), ("alternating", ALTERNATING):
        if row["loop"] in loops:
            return group
    return "others" if row["loop"] in LOOPS else ""


def parts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each set of nets."""
    names = {False: "Nets of the project", True: "Held out"}
    found = {name: [r for r in rows if r["held_out"] == k] for k, name in names.items()}
    return {name: part for name, part in found.items() if part}


def told(row: Row) -> str:
    return f"{row['net']}, {row['loop']}, {row['way']}, share {row['share']:g}"


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    for name, part in parts(rows).items():
        for mark in judged_part(part):
            yield mark._replace(what=f"{name}: {mark.what}")


def judged_part(rows: Sequence[Row]) -> Iterator[Mark]:
    broken = [(1.0, f"{told(row)}: {row['error']}") for row in rows if "error" in row]
    shown = f"{len(broken)} ({{1}})"
    yield from at_most("rows with an error", broken, 0, "none", shown)
    for group in QUESTIONS:
        mine = [row for row in good(rows) if group_of(row) == group]
        for mark in judged_steps(mine, warnings=int(group == "lengths")):
            yield mark._replace(what=f"{group}: {mark.what}")
    plain = good(rows, loop="logits")
    for what in "real", "predicted":
        apart = [(abs(ratio - 1), told(row)) for row in plain for ratio in row[what]]
        what = f"{what} peak of a model that returns logits, too / without"
        yield from at_most(what, apart, 0.03, "3 %", "off by {:.1%} ({})")
    show = ("at most +1%", "{:+.1%} ({})")
    times = [(row["time"] - 1, told(row)) for row in good(rows, loop="cost")]
    yield from at_most("step time / without a budget", times, 0.01, *show)
    grown = [(r["end"] / r["third"] - 1, told(r)) for r in good(rows, loop="memory")]
    what = "memory of the process after a thousand steps / after a third of them"
    yield from at_most(what, grown, 0.01, *show)


def judged_steps(rows: Sequence[Row], warnings: int) -> Iterator[Mark]:
    for what, entry, most in (
        ("steps learned again", "again", 0),
        ("warnings", "warned", warnings),
    ):
        # Of programs that are not ours it is not known how many there have to be.
        found = [(row[entry], told(row)) for row in rows if "again" in row]
        yield from at_most(what, found, most, "", "{:.0f} ({})")
    for what, entry, limit in (
        ("first step's peak / floor", "first", 1.05),
        ("peak of a larger step / allowed for it", "larger", 1.005),
        ("peak of a step learned again / allowed, or its floor", "relearned", 1.005),
        ("other peaks / allowed for the largest seen", "bound", 1.005),
        ("flops at share 1 / those without a budget", "flops", 1.0),
    ):
        pairs: list[Named] = [
            (row["worst"][entry][0], f"{told(row)}, {row['worst'][entry][1]}")
            for row in rows
            if entry in row["worst"]
        ]
        yield from at_most(what, pairs, limit, enforced=entry == "bound")


# ------------------------------------------------------------------- report


def table(rows: Sequence[Row]) -> str:
    """What came of each loop; the worst of its steps."""

    def ratio(entry: str) -> Callable[[Row], str]:
        return lambda row: "{:.3f}".format(*row["worst"].get(entry, [math.nan]))

    entries = {
        "first / floor": "first",
        "larger / allowed": "larger",
        "again / allowed": "relearned",
        "others / allowed": "bound",
        "flops / needed": "flops",
    }
    used = {e for row in rows for e in row["worst"]}
    cells: dict[str, Any] = {
        "net": lambda row: row["net"],
        "loop": lambda row: row["loop"],
        "way": lambda row: row["way"],
        "share": lambda row: f"{row['share']:g}",
        **{name: ratio(e) for name, e in entries.items() if e in used},
        "learned again": lambda row: str(row.get("again", "")),
        "warnings": lambda row: str(row["warned"]),
        "steps": lambda row: f"`{row['trace']}`",
    }
    return columns(rows, cells)


def page(data: dict[str, Any]) -> str:
    text = ""
    for name, part in parts(data["measured"]).items():
        text += f"### {name}\n\n"
        text += marks_table(mark._asdict() for mark in judged_part(part))
        for group, question in QUESTIONS.items():
            rows = [row for row in good(part) if group_of(row) == group]
            if rows:
                text += f"\n{question}:\n\n{table(rows)}"
        text += "\n"
    return text + measured_on(data["environment"], "Run, operator by operator,")
