"""Measures a StepBudget in training loops whose steps differ.

    scripts/benchmark.sh loops                      all nets (hours)
    scripts/benchmark.sh loops --check              one loop of one net, as CI does
    scripts/benchmark.sh loops --net llama-4 --kind evaluation "last batch"
    scripts/benchmark.sh loops --json results/loops.json

Every net is compiled as a whole and by blocks, and trained in several loops on a CPU,
operator by operator. In each row, a letter for each step says what it did to the plans:
R, it was recorded; C, plans were compiled; w, it warned. Peaks are bytes beyond those
that are there when a step starts, over what the budget says is allowed.

    lengths             forty steps of eight sizes, by graphs for all sizes from the start
                        (dynamic), once a second size is seen (automatic), or for each
                        size (buckets)
    last batch          a smaller one ends each epoch
    evaluation          between steps
    accumulation        over one to four micro-batches
    skipped             a batch without a backward, and a step without a batch
    gan, heads, curriculum    two models, halves of one, and two sizes take turns

"two ranks" are programs of their own: DDP, FSDP2, tensor parallelism and a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Optional

import torch
from torch._dynamo import config as dynamo_config
from torch._functorch import config

from benchmarks import fresh, nets, ranks, second_set
from benchmarks.pages import at_most, columns, good, Mark, marks_table, measured_on, Row
from benchmarks.tracing import cpu_attention_counted
from benchmarks.turns import LOOPS, SHARE, taken


PROJECT = ("llama-4", "bert", "vit")
HELD_OUT = tuple(net.name for net in second_set.SMALL)
RANKS = "two ranks"
NETS = (*PROJECT, *HELD_OUT, RANKS)
CHECK = "one loop of one net, as CI does"
KIND, KEY = "loop", ("net", "loop", "way", "share")
LIMITS = fresh.Limits(seconds=900, gigabytes=14)
WAYS = ("blocks", "whole")


def tasks(
    names: Optional[Sequence[str]], check: bool, rows: Sequence[Row]
) -> Iterator[fresh.Task]:
    for net in names or (PROJECT[:1] if check else NETS):
        task = {"net": net, "share": SHARE, "held_out": net in HELD_OUT}
        if net == RANKS:
            yield {**task, "loop": "ddp", "way": "whole"}
            for loop in ranks.PARALLEL:
                yield {**task, "loop": loop, "way": "blocks"}
            continue
        for way in WAYS[:1] if check else WAYS:
            for loop in ("last batch",) if check else LOOPS:
                yield {**task, "way": way, "loop": loop}
                if group_of(loop) == "lengths":
                    yield {**task, "way": way, "loop": loop, "share": 1.0}


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    net, loop, way = task["net"], task["loop"], task["way"]
    if net == RANKS:
        return ranks.in_ranks(loop, way)
    limits = {"recompile_limit": 64, "accumulated_recompile_limit": 512}
    with (
        config.patch(enable_autograd_cache=False),
        dynamo_config.patch(limits),
        cpu_attention_counted(),
    ):
        in_float = replace(nets.find(net), dtype=torch.float32)
        return taken(in_float, loop, way, task["share"])


# -------------------------------------------------------------------- marks


QUESTIONS = {
    "lengths": "Steps of eight sizes, larger ones later",
    "others": "A smaller last batch, evaluation, accumulation, skipped batches",
    "alternating": "Two programs that take turns",
    "programs": "Parallel training",
}


def group_of(loop: str) -> str:
    """The question that a loop answers."""
    if loop in ranks.PARALLEL:
        return "programs"
    if loop in ("gan", "heads", "curriculum"):
        return "alternating"
    return "lengths" if loop.startswith("lengths") else "others"


def parts(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """The rows of each set of nets, by question."""
    for name, held_out in ("Nets of the project", False), ("Held out", True):
        for group in QUESTIONS:
            mine = [row for row in rows if group_of(row["loop"]) == group]
            mine = good(mine, held_out=held_out)
            if mine:
                yield name, group, mine


def told(row: Row) -> str:
    return f"{row['net']}, {row['loop']}, {row['way']}, share {row['share']:g}"


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    for name, group, mine in parts(rows):
        for mark in judged_steps(mine, warnings=int(group == "lengths")):
            yield mark._replace(what=f"{name}, {group}: {mark.what}")


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
        ("peaks / allowed", "bound", 1.005),
        ("flops at share 1 / those without a budget", "flops", 1.0),
    ):
        pairs = [
            (row["worst"][entry][0], f"{told(row)}, {row['worst'][entry][1]}")
            for row in rows
            if entry in row["worst"]
        ]
        yield from at_most(what, pairs, limit, enforced=entry == "bound")


# ------------------------------------------------------------------- report


def table(rows: Sequence[Row]) -> str:
    """What came of each loop; the worst of its steps."""

    def ratio(entry: str) -> Callable[[Row], str]:
        return lambda row: "".join(f"{r:.3f}" for r in row["worst"].get(entry, ())[:1])

    cells: dict[str, Any] = {
        "net": lambda row: row["net"],
        "loop": lambda row: row["loop"],
        "way": lambda row: row["way"],
        "share": lambda row: f"{row['share']:g}",
        "first / floor": ratio("first"),
        "peaks / allowed": ratio("bound"),
        "flops / needed": ratio("flops"),
        "learned again": lambda row: str(row.get("again", "")),
        "warnings": lambda row: str(row["warned"]),
        "steps": lambda row: f"`{row['trace']}`",
    }
    return columns(rows, cells)


def page(data: dict[str, Any]) -> str:
    rows = data["measured"]
    text = marks_table(mark._asdict() for mark in judged(rows))
    for name, group, mine in parts(rows):
        text += f"\n{name}. {QUESTIONS[group]}:\n\n{table(mine)}"
    return f"{text}\n{measured_on(data['environment'], 'Run, operator by operator,')}"
