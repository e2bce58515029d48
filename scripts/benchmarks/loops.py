"""Measures a StepBudget in training loops whose steps differ.

    scripts/benchmark.sh loops
    scripts/benchmark.sh loops --check              one loop of one net, as CI does
    scripts/benchmark.sh loops --net llama-4 --kind evaluation "last batch"
    scripts/benchmark.sh loops --json results/loops.json

Every net is compiled as a whole and by blocks, and trained in several loops on a CPU,
operator by operator. In each row, a letter for each step says what it did to the plans:
R, it was recorded; C, plans were compiled; w, it warned. Peaks are bytes beyond those
that are there when a step starts, over what the budget says is allowed.

    lengths             forty steps of eight sizes, by graphs for all sizes once a second
                        one is seen (automatic), or by one for each size (buckets)
    last batch          a smaller one ends each epoch
    evaluation          between steps
    accumulation        over one to four micro-batches
    skipped             a batch without a backward, and a step without a batch
    gan, curriculum     two models, or two sizes, take turns
    logits              a model that returns them, too: they are dropped before the backward
    cost, memory        of a step, and of a thousand

Programs that have their own loops are Hugging Face's Trainer, in several settings, and DDP,
FSDP2, tensor parallelism and a pipeline, by gloo.
"""

import operator
import random
import resource
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import nn, Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config

from benchmarks import catalogue, fresh, nets, pages
from benchmarks.architectures import ClassicShape
from benchmarks.catalogue import HELD_OUT, PROJECT
from benchmarks.meters import gradients
from benchmarks.pages import good, Mark, Row
from benchmarks.tracing import cpu_attention_counted
from benchmarks.watched import budget_of, SHARE, summed_up, watched
from benchmarks.ways import compiled, OPERATORS, Training


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
    "lengths, automatic": (lengths(), None),
    "lengths, buckets": (lengths(), False),
    "last batch": ([LARGEST, LARGEST, LARGEST, Turn()] * 4, None),
    "evaluation": ([Turn(), Turn(), Turn(also="evaluation")] * 4, None),
    "accumulation": (ACCUMULATED * 4, None),
    "skipped": ([Turn(), Turn(), Turn(also="skipped"), Turn(also="empty")] * 4, None),
    "gan": ([Turn(), Turn(trained="partner")] * 8, None),
    "curriculum": (([Turn()] * 4 + [LARGEST] * 4) * 2, False),
}
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
        with watched(self.budget, there) as row:
            if turn.also == "skipped":
                training.loss()
            elif turn.also != "empty":
                for _ in range(turn.batches):
                    training.loss().backward()
        gradients(training.parameters)
        training.inputs = all_inputs
        return row


def taken(net: nets.Net, loop: str, way: str, share: float) -> Row:
    """A loop; at share 1 its steps have to compute what those of eager mode do."""
    turns, dynamic = LOOPS[loop]
    eager, needed = Loop(net, "eager"), {}
    if share == 1:
        needed = {turn: eager.take(turn)["flops"] for turn in {*turns}}
    training = Loop(net, way, dynamic)
    training.budget = budget_of(share)
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


class WithLogits(nn.Module):
    """Returns what the last of a model's products is, too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.last: Optional[Tensor] = None
        for each in module.modules():
            if isinstance(each, nn.Linear):
                each.register_forward_hook(self.keep)

    def keep(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.last = output

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        loss = self.module(*inputs)
        last, self.last = self.last, None
        return loss, last


def logits(net: nets.Net, way: str) -> Row:
    """Its peaks, real and told, over those of the model that returns the loss only."""

    def build() -> nets.Built:
        module, inputs = net.build()
        return WithLogits(module), inputs

    def peaks(net: nets.Net, picked: Callable[[Any], Tensor]) -> list[int]:
        """At the ends of the range, where there is no choice of plans."""
        training, found = Loop(net, way), []
        forward = training.net.forward
        # The caller drops the others before the backward.
        training.net.forward = lambda *inputs: picked(forward(*inputs))
        for share in 0.0, 1.0:
            training.budget = budget_of(share)
            step = [training.take(LARGEST) for _ in range(3)][-1]
            found += [step["peak"], step["told"]]
        return found

    plain = peaks(net, lambda loss: loss)
    both = peaks(replace(net, build=build), operator.itemgetter(0))
    ratios = [b / a for a, b in zip(plain, both)]
    return {"real": ratios[::2], "predicted": ratios[1::2]}


def cost(net: nets.Net, way: str) -> Row:
    """CPU time of a step over that of one without a budget, which computes the same."""
    ways: dict[str, Any] = {way: compiled(OPERATORS)}
    pair = [Training(net, **ways), Training(net, **ways, beside=True)]
    for training, within in zip(pair, (nullcontext(), budget_of(1.0))):
        training.inputs = cut(training.inputs, SIZES[-1])
        training.within = within
        training.warmed(4)
    # In turn, so that what else runs slows both.
    found = [[training.seconds() for training in pair] for _ in range(40)]
    return {"time": statistics.median(budgeted / plain for plain, budgeted in found)}


def memory(net: nets.Net, way: str) -> Row:
    """The most that the process had after a third of a thousand steps, and after all."""
    training = Loop(net, way, dynamic=True).net
    training.within = budget_of(SHARE)
    whole, most = training.inputs, []
    for step in range(1000):
        training.inputs = cut(whole, (1 + step % 5, 2 + 2 * (step // 5 % 4)))
        training.step()
        if step in (333, 999):
            most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return {"third": most[0], "end": most[1]}


MEASURED = {"logits": logits, "cost": cost, "memory": memory}
# With their loops, each in these ways.
TRAINER = ("plain", "accumulation", "checkpointing", "peft")
PROGRAMS: dict[str, dict[str, tuple[str, ...]]] = {
    "hf-trainer": {
        **dict.fromkeys(TRAINER, ("blocks",)),
        "last batch": ("blocks", "regional", "whole"),
    },
    "two ranks": {
        "ddp": WAYS,
        **dict.fromkeys(("fsdp2", "tensor parallel", "pipeline"), WAYS[:1]),
    },
}
NETS = {
    PROJECT: ("llama-4", "vit", *PROGRAMS),
    HELD_OUT: ("hiera-small", "m2m100-small", "mobilenet-small", "encodec-small"),
    "check": ("llama-4",),
}
WHOLE = ("lengths, automatic", "last batch", "evaluation", "gan", "cost")
# The net that a thousand steps are taken with.
LONG = "llama-4"


def loops_of(way: str, is_check: bool) -> Sequence[str]:
    """A model that is compiled as a whole is trained in fewer."""
    if is_check:
        return ("last batch",)
    return (*LOOPS, "cost") if way == "blocks" else WHOLE


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    for net in asked.nets:
        of = PROJECT if net in PROGRAMS else catalogue.set_of(net)
        task = {"set": of, "net": net, "share": SHARE}
        for loop, ways in PROGRAMS.get(net, {}).items():
            yield from ({**task, "way": way, "loop": loop} for way in ways)
        for way in () if net in PROGRAMS else WAYS[:1] if asked.check else WAYS:
            for loop in loops_of(way, asked.check):
                yield {**task, "way": way, "loop": loop}
                if loop == "lengths, automatic":
                    yield {**task, "way": way, "loop": loop, "share": 1.0}
        if not asked.check and net not in PROGRAMS:
            yield {**task, "way": "whole", "loop": "logits"}
        if not asked.check and net == LONG:
            yield {**task, "way": "blocks", "loop": "memory"}


def measure(task: fresh.Task) -> Row:
    limits = {"recompile_limit": 1024, "accumulated_recompile_limit": 4096}
    with (
        config.patch(enable_autograd_cache=False),
        dynamo_config.patch(limits),
        cpu_attention_counted(),
    ):
        loop, way = task["loop"], task["way"]
        if task["net"] in PROGRAMS:
            # It takes long to import what these need.
            from benchmarks import programs

            return programs.MEASURED[task["net"]](loop, way)
        net = replace(catalogue.find(task["net"]), dtype=torch.float32)
        if loop in MEASURED:
            return MEASURED[loop](net, way)
        return taken(net, loop, way, task["share"])


# ------------------------------------------------------------------- judged


def again(turns: Sequence[Turn], found: Sequence[Row]) -> int:
    """Steps that changed plans though neither they nor those before them were new.

    Plans may be made in a step that has to change them, and when the next one starts.
    """
    kinds = [replace(turn, also="") for turn in turns]
    is_new = [False, *(kind not in kinds[:at] for at, kind in enumerate(kinds))]
    may_change = map(any, zip(is_new, is_new[1:]))
    return sum(now["learned"] and not may for now, may in zip(found, may_change))


def told(row: Row) -> str:
    return f"{row['net']}, {row['loop']}, {row['way']}, share {row['share']:g}"


LIMITS = {
    "again": "Steps that are like earlier ones are planned again, up to {0} times ({1}).",
    "warned": "Steps warn, up to {0} times ({1}).",
    "first": "The first step peaks {2:.0%} above the lowest peak ({1}).",
    "bound": "A peak is {2:.1%} above what is allowed ({1}).",
    "flops": "At share 1, a step computes {2:.1%} more than without a budget ({1}).",
    "logits": "Returning logits, too, raises the peak by {2:.1%} ({1}).",
    "cost": "A step takes {2:.1%} more CPU time than without a budget ({1}).",
    "memory": "The process grows by {2:.1%} in the later steps of a thousand ({1}).",
}


# Of loops whose plans are not judged: what should be 1, and the most that it may be.
OTHERS = {
    "logits": ("peaks with logits returned / without", 1.03),
    "cost": ("CPU time of a step / without a budget", 1.01),
    "memory": ("host memory at the end / at a third", 1.01),
}


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    """The held-out nets by themselves."""
    for judge in (judged_set, judged_others):
        for name, part in pages.by_set(rows).items():
            for mark in judge(part):
                yield mark._replace(what=f"{name}: {mark.what}")


def judged_set(rows: Sequence[Row]) -> Iterator[Mark]:
    planned = [row for row in rows if "worst" in row]
    for what, entry in ("steps learned again", "again"), ("warnings", "warned"):
        found = [(row[entry], told(row)) for row in planned if entry in row]
        show = "", "{:.0f} ({})"
        yield from pages.at_most(what, found, 0, *show, limit=LIMITS[entry])
    without = [told(row) for row in planned if not row["worst"]]
    if without:
        said = f"Nothing was compiled, so no step is planned: {'; '.join(without)}."
        yield Mark("loops without a plan", str(len(without)), "none", False, limit=said)
    for what, entry, limit in (
        ("first step's peak / floor and what stays of it", "first", 1.05),
        ("peaks / allowed", "bound", 1.005),
        ("flops at share 1 / those without a budget", "flops", 1.0),
    ):
        pairs = [
            (row["worst"][entry][0], f"{told(row)}, {row['worst'][entry][1]}")
            for row in planned
            if entry in row["worst"]
        ]
        yield from pages.at_most(
            *(what, pairs, limit), enforced=entry == "bound", limit=LIMITS[entry]
        )


def judged_others(rows: Sequence[Row]) -> Iterator[Mark]:
    for loop, (what, limit) in OTHERS.items():
        found = [(ratio_of(row), told(row)) for row in good(rows, loop=loop)]
        yield from pages.at_most(what, found, limit, limit=LIMITS[loop])


def ratio_of(row: Row) -> float:
    """What should be 1 of a loop whose plans are not judged."""
    if row["loop"] == "logits":
        return float(max(*row["real"], *row["predicted"]))
    return float(row["time"] if row["loop"] == "cost" else row["end"] / row["third"])


# ------------------------------------------------------------------- report


LEGEND = """Every net is trained in several loops under a StepBudget. "way" is how it is compiled: each
block by itself, or as a whole. "first / floor" is the peak of the first step, which has no
plan yet, beside the lowest that can be held and what the step leaves behind for good. "peaks
/ allowed" is the worst of the later steps, "flops / needed" is what they compute at share 1
beside steps without a budget. "learned again" counts steps that changed plans though neither
they nor those before them were new. In "steps" a letter stands for each: R, it was recorded;
C, plans were compiled; w, it warned; a dot, none of these. Peaks are bytes beyond those that
are there when a step starts.

Lengths are forty steps of eight sizes, by graphs for all sizes once a second one is seen
(automatic), or by one for each size (buckets). A smaller last batch ends
each epoch. Accumulation is over one to four micro-batches. Skipped are a batch without a
backward, and a step without a batch. In gan and curriculum two models, or two sizes, take
turns.
"""


def by_program(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Those with plans, of each set of nets and of programs with loops of their own."""
    found: dict[str, list[Row]] = {}
    for name, part in pages.by_set(rows).items():
        for row in part:
            if "worst" in row:
                program = row["net"] if row["net"] in PROGRAMS else name
                found.setdefault(program, []).append(row)
    return found


def worst(row: Row, entry: str) -> str:
    return "".join(f"{ratio:.3f}" for ratio in row["worst"].get(entry, ())[:1])


def page(data: Row) -> str:
    """What came of each loop; the worst of its steps. What first steps cost has a page."""
    cells: dict[str, Any] = {
        "net": lambda row: row["net"],
        "loop": lambda row: row["loop"],
        "way": lambda row: row["way"],
        "share": lambda row: f"{row['share']:g}",
        "first / floor": lambda row: worst(row, "first"),
        "peaks / allowed": lambda row: worst(row, "bound"),
        "flops / needed": lambda row: worst(row, "flops"),
        "learned again": lambda row: str(row.get("again", "")),
        "warnings": lambda row: str(row["warned"]),
        "steps": lambda row: f"`{row['trace']}`",
    }
    rows = data["measured"]
    marks = [*judged(rows)]
    tables = {
        f"{name[0].upper()}{name[1:]}": pages.columns(part, cells)
        for name, part in by_program(rows).items()
    }
    how = "Run operator by operator, float32,"
    origin = pages.measured_on(data["environment"], how, rows)
    others = tuple(what for what, _ in OTHERS.values())
    of_plans = [mark for mark in marks if not mark.what.endswith(others)]
    tables["Logits, time and host memory"] = pages.found(
        mark for mark in marks if mark not in of_plans
    )
    short = pages.found(of_plans)
    return pages.page(LEGEND, origin, short, pages.limits(marks, rows), tables)
