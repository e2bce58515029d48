"""Measures a StepBudget in training loops whose steps differ.

    scripts/benchmark.sh loops                      all nets (hours)
    scripts/benchmark.sh loops --check              two loops of one net, as CI does
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
"""

from __future__ import annotations

import gc
import itertools
import operator
import random
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Optional
from unittest import mock

import torch
from torch import nn, Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config, partitioners

from benchmarks import fresh, nets, second_set
from benchmarks.architectures import ClassicShape
from benchmarks.meters import CountedFlops, CountedStorages, gradients
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


PROJECT = ("llama-4", "bert", "vit")
NETS = (*PROJECT, *(net.name for net in second_set.SMALL))
CHECK = "one net, two loops, as CI does"
KIND, KEY = "loop", ("net", "loop", "way", "share")
LIMITS = fresh.Limits(seconds=900, gigabytes=14)
SHARE = 0.2
WAYS = ("blocks", "whole")
# What takes turns with a net.
PARTNER = nets.classic("partner", ClassicShape(layers=2, tokens=128), 8)


# -------------------------------------------------------------------- loops


# Rows of a batch, and eighths of the length that its text may have.
Size = tuple[int, int]
SIZES: tuple[Size, ...] = (
    *((5, 6), (7, 5), (2, 8), (8, 4)),
    *((4, 7), (6, 8), (3, 6), (9, 8)),
)
STEPS, MANY = 1000, [(rows, 1 + rows % 4) for rows in range(2, 22)]


@dataclass(frozen=True)
class Turn:
    """A step of a loop: micro-batches of a size, and what is trained, all if nothing."""

    size: Size = SIZES[0]
    batches: int = 1
    trained: str = ""
    # What happens before that, or instead.
    also: str = ""

    @property
    def alone(self) -> Turn:
        """Without what happens outside of it."""
        return self if self.also == "no_grad" else replace(self, also="")

    @property
    def name(self) -> str:
        """For people, and to find again what it takes alone."""
        words = (f"{self.batches} x {self.size}", self.trained, self.alone.also)
        return " ".join(filter(None, words))


def lengths() -> list[Turn]:
    """Larger sizes come later."""
    order = random.Random(nets.SEED)
    seen = (4,) * 10 + (6,) * 10 + (8,) * 20
    return [Turn(SIZES[order.randrange(most)]) for most in seen]


def in_turn(*turns: Turn, times: int = 4) -> list[Turn]:
    return [*turns] * times


LARGEST = Turn(SIZES[-1])
ACCUMULATED = [Turn(batches=count) for count in (2, 4, 1, 3)]
HALVES = Turn(trained="first half"), Turn(trained="second half")
# Each with whether sizes are known to vary, as torch.compile has it.
LOOPS: dict[str, tuple[list[Turn], Optional[bool]]] = {
    "lengths, dynamic": (lengths(), True),
    "lengths, automatic": (lengths(), None),
    "lengths, buckets": (lengths(), False),
    "last batch": (in_turn(LARGEST, LARGEST, LARGEST, Turn()), None),
    "last batch, dynamic": (in_turn(LARGEST, LARGEST, LARGEST, Turn()), True),
    "evaluation": (in_turn(Turn(), Turn(), Turn(also="evaluation")), None),
    "no_grad": (in_turn(Turn(also="no_grad")), None),
    "accumulation": (in_turn(*ACCUMULATED), None),
    "skipped": (
        in_turn(Turn(), Turn(), Turn(also="skipped"), Turn(also="empty")),
        None,
    ),
    "gan": (in_turn(Turn(), Turn(trained="partner")), None),
    "heads": (in_turn(*HALVES), None),
    "curriculum": (in_turn(*[Turn()] * 4, *[LARGEST] * 4, times=2), False),
}
VARYING = tuple(name for name in LOOPS if name.startswith("lengths"))
ALTERNATING = ("gan", "heads", "curriculum")


def tasks(
    names: Optional[Sequence[str]], check: bool, rows: Sequence[Row]
) -> Iterator[fresh.Task]:
    loops = ("last batch, dynamic",) if check else tuple(LOOPS)
    for net in names or (PROJECT[:1] if check else NETS):
        for way in WAYS[:1] if check else WAYS:
            task = {"net": net, "way": way, "share": SHARE}
            task["held_out"] = nets.find(net).held_out
            yield {**task, "loop": "alone", "loops": loops}
            found = good(rows, net=net, way=way, loop="alone")
            needs = {"_alone": found[0]["steps"] if found else None}
            for loop in loops:
                yield {**task, **needs, "loop": loop}
                if loop in VARYING:
                    yield {**task, **needs, "loop": loop, "share": 1.0}
            for loop in ("cost", "memory") if not check else ():
                yield {**task, "loop": loop}
        yield {**task, "way": "whole", "loop": "logits"}


# -------------------------------------------------------------- in a process


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
            forward_only(training, is_training=False)
        try:
            with half_trained(training.parameters, turn.trained):
                return self.measured(turn, training)
        finally:
            training.inputs = all_inputs

    def measured(self, turn: Turn, training: Training) -> Row:
        torch.manual_seed(nets.SEED)
        there = [*training.inputs]
        for each in (self.net, self.partner):
            there += [*each.parameters, *each.module.buffers()]
        decide = mock.Mock(wraps=vars(partitioners)["decide"])
        gc.collect()
        with (
            warnings_noted() as said,
            mock.patch.object(partitioners, "decide", decide),
            self.budget,
        ):
            step = overlay("step_recorder").running_step()
            is_recorded = step is not None and step.recorder is not None
            with CountedFlops() as counter, CountedStorages(there) as storages:
                train(turn, training)
            gradients(training.parameters)
        return {
            "peak": storages.peak,
            "flops": counter.flops,
            "recorded": is_recorded,
            "planned": getattr(self.budget, "plan", None) is not None,
            "compiled": bool(decide.call_count),
            "warnings": said,
        }


def train(turn: Turn, training: Training) -> None:
    if turn.also == "no_grad":
        forward_only(training, is_training=True)
    if turn.also == "skipped":
        training.loss()
    elif turn.also != "empty":
        for _ in range(turn.batches):
            training.loss().backward()


def forward_only(training: Training, is_training: bool) -> None:
    with torch.no_grad():
        training.module.train(is_training)
        training.loss()
        training.module.train()


@contextmanager
def half_trained(parameters: Sequence[Tensor], trained: str) -> Iterator[None]:
    """The other half of the parameters is frozen, if one is named."""
    middle = len(parameters) // 2
    halves = {"first half": parameters[middle:], "second half": parameters[:middle]}
    frozen = halves.get(trained, ())
    for each in frozen:
        each.requires_grad_(False)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(True)


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    net = replace(nets.find(task["net"]), dtype=torch.float32)
    loop, way, share = task["loop"], task["way"], task["share"]
    special = {"alone": alone, "logits": logits, "cost": cost, "memory": memory}
    with ExitStack() as stack:
        stack.enter_context(config.patch(enable_autograd_cache=False))
        limits = {"recompile_limit": 64, "accumulated_recompile_limit": 512}
        stack.enter_context(dynamo_config.patch(limits))
        stack.enter_context(cpu_attention_counted())
        if loop in special:
            return special[loop](net, way, task)
        turns, dynamic = LOOPS[loop]
        steps = task["_alone"]
        if steps is None:
            raise ValueError("what its steps take alone is not known")
        training = Loop(net, way, dynamic)
        training.budget = budget_of(share)
        found = [training.take(turn) for turn in turns]
    return judged_loop(turns, found, steps, dynamic, share)


def budget_of(share: float) -> Any:
    return overlay("step_budget").StepBudget(share=share)


def alone(net: nets.Net, way: str, task: fresh.Task) -> Row:
    """What each step of the loops takes by itself: once recorded, and then planned."""
    turns = {turn.alone for loop in task["loops"] for turn in LOOPS[loop][0]}
    eager, steps = Loop(net, "eager"), {}
    by_size = sorted(turns, key=lambda turn: (turn.size, turn.name))
    for _size, same in itertools.groupby(by_size, lambda turn: turn.size):
        # Its graphs are compiled once.
        training = Loop(net, way)
        for turn in same:
            training.budget = budget = budget_of(SHARE)
            found = [training.take(turn) for _ in range(3)]
            steps[turn.name] = {
                "floor": budget.plan.floor,
                "unbudgeted": budget.plan.unbudgeted,
                "peak": found[-1]["peak"],
                "flops": eager.take(turn)["flops"],
            }
    return {"steps": steps}


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


def logits(net: nets.Net, way: str, _task: fresh.Task) -> Row:
    """Its peaks, real and predicted, over those of the model that returns the loss only."""

    def build() -> nets.Built:
        module, inputs = net.build()
        return WithLogits(module), inputs

    def peaks(net: nets.Net, picked: Any) -> tuple[int, int]:
        training = Loop(net, way)
        forward = training.net.forward
        # The caller drops the others before the backward.
        training.net.forward = lambda *inputs: picked(forward(*inputs))
        training.budget = budget = budget_of(SHARE)
        found = [training.take(LARGEST) for _ in range(4)]
        return found[-1]["peak"], budget.plan.predicted_peak

    plain = peaks(net, lambda loss: loss)
    both = peaks(replace(net, build=build), operator.itemgetter(0))
    real, predicted = (b / a for a, b in zip(plain, both))
    return {"real": real, "predicted": predicted}


def cost(net: nets.Net, way: str, _task: fresh.Task) -> Row:
    """CPU time of a step over that without a budget, which computes the same."""

    def seconds(budget: Any) -> float:
        training = Loop(net, way).net
        training.inputs = cut(training.inputs, SIZES[-1])
        training.within = budget
        training.warmed(4)
        return min(training.seconds() for _ in range(20))

    return {"time": seconds(budget_of(1.0)) / seconds(nullcontext())}


def memory(net: nets.Net, way: str, _task: fresh.Task) -> Row:
    """The most that the process had, after a third of the steps and after all."""
    training = Loop(net, way, dynamic=True).net
    training.within = budget_of(SHARE)
    whole, most = training.inputs, []
    for step in range(STEPS):
        training.inputs = cut(whole, MANY[step % len(MANY)])
        training.step()
        if step in (STEPS // 3, STEPS - 1):
            most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return {"third": most[0], "end": most[1]}


# -------------------------------------------------------------------- marks


def dues(
    turns: Sequence[Turn], bounds: Sequence[float], dynamic: Optional[bool]
) -> Iterator[tuple[float, bool]]:
    """Of each step what was allowed before, and whether plans have to change in it.

    They do where what is trained is new, or larger than before, or has to be compiled
    anew: each size, or the second, of which graphs for all sizes are made.
    """
    before: dict[str, float] = {}
    known: dict[str, set[Turn]] = {}
    for turn, bound in zip(turns, bounds):
        most = before.get(turn.trained, 0.0)
        seen = known.setdefault(turn.trained, set())
        is_compiled = dynamic is False or (dynamic is None and len(seen) < 2)
        yield most, bound > most or (is_compiled and turn.alone not in seen)
        seen.add(turn.alone)
        before[turn.trained] = max(bound, most)


def judged_loop(
    turns: Sequence[Turn],
    found: Sequence[Row],
    steps: dict[str, Row],
    dynamic: Optional[bool],
    share: float,
) -> Row:
    """The worst of a loop's steps, against what each takes alone.

    Plans may be made in a step that has to change them, and when the next one starts.
    """
    ratios: dict[str, list[Named]] = {}
    own = [steps[turn.alone.name] for turn in turns]
    bounds = [o["floor"] + share * (o["unbudgeted"] - o["floor"]) for o in own]
    again, trace, was_due = 0, "", False
    changes = dues(turns, bounds, dynamic)
    for at, (now, o, bound, (before, is_due)) in enumerate(
        zip(found, own, bounds, changes)
    ):
        what, most = "bound", max(before, bound)
        if bound > before:
            what, most = "larger" if at else "first", max(before, o["floor"])
        elif now["recorded"]:
            what, most = "relearned", max(before, o["floor"])
        where = f"step {at + 1}, {turns[at].name}"
        ratios.setdefault(what, []).append((now["peak"] / most, where))
        is_learned = now["recorded"] or now["compiled"] or not now["planned"]
        again += is_learned and not (is_due or was_due)
        if share == 1 and not is_learned:
            ratios.setdefault("flops", []).append((now["flops"] / o["flops"], where))
        letter = "R" if now["recorded"] else "C" if now["compiled"] else "."
        trace += letter + "w" * bool(now["warnings"])
        was_due = is_due
    warnings = [text for now in found for text in now["warnings"]]
    return {
        "worst": {what: max(values) for what, values in ratios.items()},
        "again": again,
        "trace": trace,
        "warned": len(warnings),
        "warnings": [*dict.fromkeys(warnings)],
    }


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


GROUPS = {
    "lengths": VARYING,
    "alternating": ALTERNATING,
    "others": tuple(set(LOOPS) - {*VARYING, *ALTERNATING}),
}


def judged_part(rows: Sequence[Row]) -> Iterator[Mark]:
    broken = [(1.0, f"{told(row)}: {row['error']}") for row in rows if "error" in row]
    yield from at_most(
        "rows with an error", broken, 0, "none", f"{len(broken)} ({{1}})"
    )
    for group, loops in GROUPS.items():
        mine = [row for row in good(rows) if row["loop"] in loops]

        def counted(what: str, mine: Sequence[Row] = mine) -> list[Named]:
            return [(row[what], told(row)) for row in mine]

        def worst(what: str, mine: Sequence[Row] = mine) -> list[Named]:
            rows = (row for row in mine if what in row["worst"])
            return [(row["worst"][what][0], at(row, what)) for row in rows]

        show = "{:.0f} ({})"
        yield from at_most(
            f"{group}: steps learned again", counted("again"), 0, "", show
        )
        most = int(group == "lengths")
        yield from at_most(f"{group}: warnings", counted("warned"), most, "", show)
        what = f"{group}: peak / allowed for the largest seen"
        yield from at_most(what, worst("bound"), 1.005)
        what = f"{group}: peak of a step larger than all / allowed before, or its floor"
        yield from at_most(what, worst("larger"), 1.005)
        what = f"{group}: peak of a step learned again / allowed, or its floor"
        yield from at_most(what, worst("relearned"), 1.005)
        what = f"{group}: flops at share 1 / those without a budget"
        yield from at_most(what, worst("flops"), 1.0)
        yield from at_most(f"{group}: first step's peak / floor", worst("first"), 1.05)
    for what in "real", "predicted":
        apart = [(abs(row[what] - 1), told(row)) for row in good(rows, loop="logits")]
        yield from at_most(
            f"{what} peak with logits / without",
            apart,
            0.03,
            "3 %",
            "off by {:.1%} ({})",
        )
    times = [(row["time"] - 1, told(row)) for row in good(rows, loop="cost")]
    yield from at_most(
        "step time / without a budget", times, 0.01, "at most +1%", "{:+.1%} ({})"
    )
    grown = [
        (row["end"] / row["third"] - 1, told(row)) for row in good(rows, loop="memory")
    ]
    what = f"memory of the process, step {STEPS} / step {STEPS // 3}"
    yield from at_most(what, grown, 0.01, "at most +1%", "{:+.1%} ({})")


def at(row: Row, what: str) -> str:
    return f"{told(row)}, {row['worst'][what][1]}"


# ------------------------------------------------------------------- report


def page(data: dict[str, Any]) -> str:
    text = ""
    for name, part in parts(data["measured"]).items():
        text += f"\n### {name}\n\n" + marks_table(
            m._asdict() for m in judged_part(part)
        )
        rows = [row for row in good(part) if row["loop"] in LOOPS]

        def ratio(row: Row, what: str) -> str:
            return f"{row['worst'][what][0]:.3f}" if what in row["worst"] else ""

        ends: dict[str, Any] = {
            "first / floor": lambda row: ratio(row, "first"),
            "larger / floor": lambda row: ratio(row, "larger"),
            "others / allowed": lambda row: ratio(row, "bound"),
            "flops": lambda row: ratio(row, "flops"),
        }
        cells: dict[str, Any] = {
            "net": lambda row: row["net"],
            "loop": lambda row: row["loop"],
            "way": lambda row: row["way"],
            "share": lambda row: f"{row['share']:g}",
            "again": lambda row: str(row["again"]),
            "warnings": lambda row: str(row["warned"]),
            **ends,
            "steps": lambda row: f"`{row['trace']}`",
        }
        text += "\n" + columns(rows, cells)
    how = "Run, operator by operator,"
    return text + "\n" + measured_on(data["environment"], how)
