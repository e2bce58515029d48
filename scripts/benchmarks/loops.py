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
    gan, curriculum     two models, or two sizes, take turns
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Optional
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config, partitioners

from benchmarks import fresh, nets
from benchmarks.architectures import ClassicShape
from benchmarks.meters import CountedStorages, gradients
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
from benchmarks.plans import warnings_noted
from benchmarks.tracing import cpu_attention_counted, overlay
from benchmarks.ways import compiled, OPERATORS, Training


SHARE = 0.2
# What takes turns with a net.
PARTNER = nets.language("partner", ClassicShape(layers=2, tokens=128))


# -------------------------------------------------------------------- loops


# Rows of a batch, and eighths of the length that its text may have.
Size = tuple[int, int]
SIZES: tuple[Size, ...] = (
    *((5, 6), (7, 5), (2, 8), (8, 4)),
    *((4, 7), (6, 8), (3, 6), (9, 8)),
)


@dataclass(frozen=True)
class Turn:
    """A step of a loop: micro-batches of a size, and what is trained if not the net."""

    size: Size = SIZES[0]
    batches: int = 1
    trained: str = ""
    # What happens before that, or instead.
    also: str = ""


def lengths() -> list[Turn]:
    """Larger sizes come later."""
    order = random.Random(nets.SEED)
    seen = (4,) * 10 + (6,) * 10 + (8,) * 20
    return [Turn(SIZES[order.randrange(most)]) for most in seen]


LARGEST = Turn(SIZES[-1])
ACCUMULATED = [Turn(batches=count) for count in (2, 4, 1, 3)]
# Each with whether sizes are known to vary, as torch.compile has it.
LOOPS: dict[str, tuple[list[Turn], Optional[bool]]] = {
    "lengths, dynamic": (lengths(), True),
    "lengths, automatic": (lengths(), None),
    "lengths, buckets": (lengths(), False),
    "last batch": ([LARGEST, LARGEST, LARGEST, Turn()] * 4, None),
    "evaluation": ([Turn(), Turn(), Turn(also="evaluation")] * 4, None),
    "accumulation": (ACCUMULATED * 4, None),
    "skipped": ([Turn(), Turn(), Turn(also="skipped"), Turn(also="empty")] * 4, None),
    "gan": ([Turn(), Turn(trained="partner")] * 8, None),
    "curriculum": (([Turn()] * 4 + [LARGEST] * 4) * 2, False),
}
NETS = ("llama-4", "bert", "vit")
WAYS = ("blocks", "whole")


# --------------------------------------------------------------------- runs


def cut(inputs: Sequence[Tensor], size: Size) -> tuple[Tensor, ...]:
    """So many rows of a batch, repeated where it has fewer, and of text so much."""
    rows, eighths = size

    def part(values: Tensor) -> Tensor:
        values = values[torch.arange(rows) % len(values)]
        if values.ndim == 2 and not values.is_floating_point():
            values = values[:, : values.shape[1] * eighths // 8]
        return values.contiguous()

    return tuple(map(part, inputs))


class Loop:
    """A net, its partner, and a budget, if any, that both are trained by."""

    def __init__(
        self, net: nets.Net, way: str, dynamic: Optional[bool] = False
    ) -> None:
        ways: dict[str, Any] = {}
        if way != "eager":
            ways[way] = compiled(OPERATORS, dynamic=dynamic)
        self.net = Training(net, **ways)
        self.partner = Training(PARTNER, **ways, beside=True)
        self.budget: Any = nullcontext()

    def take(self, turn: Turn) -> Row:
        """A step: its peak and flops, and what it did to the plans."""
        training = self.partner if turn.trained == "partner" else self.net
        all_inputs = training.inputs
        training.inputs = cut(all_inputs, turn.size)
        if turn.also == "evaluation":
            with torch.no_grad():
                training.module.eval()
                training.loss()
                training.module.train()
        torch.manual_seed(nets.SEED)
        there = [*training.inputs]
        for each in (self.net, self.partner):
            there += [*each.parameters, *each.module.buffers()]
        row = self.watched(turn, training, there)
        gradients(training.parameters)
        training.inputs = all_inputs
        return row

    def watched(self, turn: Turn, training: Training, there: list[Tensor]) -> Row:
        decide = mock.Mock(wraps=vars(partitioners)["decide"])
        gc.collect()
        with (
            warnings_noted() as said,
            mock.patch.object(partitioners, "decide", decide),
            self.budget,
        ):
            step = overlay("step_recorder").running_step()
            is_recorded = step is not None and step.recorder is not None
            with CountedStorages(there) as counted:
                if turn.also == "skipped":
                    training.loss()
                for _ in range(
                    0 if turn.also in ("skipped", "empty") else turn.batches
                ):
                    training.loss().backward()
        plan = getattr(self.budget, "plan", None)
        row: Row = {"peak": counted.peak, "flops": counted.flops, "warnings": said}
        row.update(recorded=is_recorded, compiled=bool(decide.call_count))
        row["learned"] = is_recorded or row["compiled"] or plan is None
        if plan is not None:
            row.update(allowed=plan.allowed, floor=plan.floor)
        return row


def taken(net: nets.Net, loop: str, way: str, share: float) -> Row:
    """A loop; at share 1 its steps have to compute what those of eager mode do."""
    turns, dynamic = LOOPS[loop]
    eager, needed = Loop(net, "eager"), {}
    if share == 1:
        needed = {turn: eager.take(turn)["flops"] for turn in {*turns}}
    training = Loop(net, way, dynamic)
    training.budget = overlay("step_budget").StepBudget(share=share)
    found = [training.take(turn) for turn in turns]
    row = summed_up(found)
    flops = [
        (now["flops"] / needed[turn], f"step {at + 1}")
        for at, (turn, now) in enumerate(zip(turns, found))
        if needed.get(turn) and not now["learned"]
    ]
    if flops:
        row["worst"]["flops"] = max(flops)
    return {**row, "again": again(turns, found)}


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    for net in asked.nets or (NETS[:1] if asked.check else NETS):
        task = {"net": net, "share": SHARE}
        for way in WAYS[:1] if asked.check else WAYS:
            for loop in ("last batch",) if asked.check else LOOPS:
                yield {**task, "way": way, "loop": loop}
                if loop.startswith("lengths"):
                    yield {**task, "way": way, "loop": loop, "share": 1.0}


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    limits = {"recompile_limit": 64, "accumulated_recompile_limit": 512}
    with (
        config.patch(enable_autograd_cache=False),
        dynamo_config.patch(limits),
        cpu_attention_counted(),
    ):
        net = replace(nets.find(task["net"]), dtype=torch.float32)
        return taken(net, task["loop"], task["way"], task["share"])


# ------------------------------------------------------------------- judged


def again(turns: Sequence[Turn], found: Sequence[Row]) -> int:
    """Steps that changed plans though neither they nor those before them were new.

    Plans may be made in a step that has to change them, and when the next one starts.
    """
    kinds = [replace(turn, also="") for turn in turns]
    is_new = [False, *(kind not in kinds[:at] for at, kind in enumerate(kinds))]
    may_change = map(any, zip(is_new, is_new[1:]))
    return sum(now["learned"] and not may for now, may in zip(found, may_change))


def summed_up(found: Sequence[Row]) -> Row:
    """The worst peaks over what the budget says, and what each step did to the plans."""
    # Buffers that the first step makes may have the second one recorded, too.
    plans = [(k, now) for k, now in enumerate(found) if k and "allowed" in now]
    if not plans:
        raise RuntimeError(f"no plan in {len(found)} steps")
    bound: list[Named] = [
        (now["peak"] / now["allowed"], f"step {at + 1}")
        for at, now in plans
        if not now["recorded"]
    ]
    first = found[0]["peak"] / plans[0][1]["floor"], "step 1"

    def letter(now: Row) -> str:
        did = "R" if now["recorded"] else "C" if now["compiled"] else "."
        return did + "w" * bool(now["warnings"])

    warnings = [text for now in found for text in now["warnings"]]
    return {
        "worst": {"first": first, "bound": max(bound)},
        "trace": "".join(map(letter, found)),
        "warned": len(warnings),
        "warnings": [*dict.fromkeys(warnings)],
    }


def told(row: Row) -> str:
    return f"{row['net']}, {row['loop']}, {row['way']}, share {row['share']:g}"


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    rows = good(rows)
    for what, entry in ("steps learned again", "again"), ("warnings", "warned"):
        found = [(row[entry], told(row)) for row in rows]
        yield from at_most(what, found, 0, "", "{:.0f} ({})")
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


def page(data: dict[str, Any]) -> str:
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
        "learned again": lambda row: str(row["again"]),
        "warnings": lambda row: str(row["warned"]),
        "steps": lambda row: f"`{row['trace']}`",
    }
    table = columns(good(data["measured"]), cells)
    origin = measured_on(data["environment"], "Run, operator by operator,")
    return f"{marks_table(data['rows'])}\n{table}\n{origin}"
