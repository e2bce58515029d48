"""Loops whose steps differ, and what a StepBudget makes of each.

A `Turn` is a step of a loop; `LOOPS` has them all. `alone` finds what each takes by
itself, and `taken` runs a loop and holds its steps against that.
"""

from __future__ import annotations

import gc
import itertools
import operator
import random
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Optional
from unittest import mock

import torch
from torch import nn, Tensor
from torch._functorch import partitioners

from benchmarks import fresh, nets
from benchmarks.architectures import ClassicShape
from benchmarks.meters import CountedFlops, CountedStorages, gradients
from benchmarks.pages import Named, Row
from benchmarks.plans import warnings_noted
from benchmarks.tracing import overlay
from benchmarks.ways import compiled, OPERATORS, Training


SHARE = 0.2
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
    "no_grad": (in_turn(Turn(), Turn(), Turn(also="no_grad")), None),
    "accumulation": (in_turn(*ACCUMULATED), None),
    "skipped": (
        in_turn(Turn(), Turn(), Turn(also="skipped"), Turn(also="empty")),
        None,
    ),
    "gan": (in_turn(Turn(), Turn(trained="partner"), times=8), None),
    "heads": (in_turn(*HALVES, times=8), None),
    "curriculum": (in_turn(*[Turn()] * 4, *[LARGEST] * 4, times=2), False),
}
VARYING = tuple(name for name in LOOPS if name.startswith("lengths"))
ALTERNATING = ("gan", "heads", "curriculum")


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
        with watched(self.budget, there) as row:
            train(turn, training)
        gradients(training.parameters)
        return row


@contextmanager
def watched(budget: Any, there: Sequence[Tensor]) -> Iterator[Row]:
    """A step within a budget: its peak and flops, and what it did to the plans."""
    decide = mock.Mock(wraps=vars(partitioners)["decide"])
    gc.collect()
    row: Row = {}
    with (
        warnings_noted() as said,
        mock.patch.object(partitioners, "decide", decide),
        budget,
    ):
        step = overlay("step_recorder").running_step()
        row["recorded"] = step is not None and step.recorder is not None
        with CountedFlops() as counter, CountedStorages(there) as storages:
            yield row
    plan = getattr(budget, "plan", None)
    row.update(peak=storages.peak, flops=counter.flops, planned=plan is not None)
    row.update(compiled=bool(decide.call_count), warnings=said)
    if plan is not None:
        row.update(allowed=plan.allowed, floor=plan.floor)


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


def budget_of(share: float) -> Any:
    return overlay("step_budget").StepBudget(share=share)


def taken(net: nets.Net, task: fresh.Task) -> Row:
    """A loop, each step of which is held against what it takes alone."""
    turns, dynamic = LOOPS[task["loop"]]
    if task["_alone"] is None:
        raise ValueError("what its steps take alone is not known")
    training = Loop(net, task["way"], dynamic)
    training.budget = budget_of(task["share"])
    found = [training.take(turn) for turn in turns]
    return judged_loop(turns, found, task["_alone"], dynamic, task["share"])


def alone(net: nets.Net, task: fresh.Task) -> Row:
    """What each step of the loops takes by itself: once recorded, and then planned."""
    turns = {turn.alone for loop in task["loops"] for turn in LOOPS[loop][0]}
    eager, steps = Loop(net, "eager"), {}
    by_size = sorted(turns, key=lambda turn: (turn.size, turn.name))
    for _size, same in itertools.groupby(by_size, lambda turn: turn.size):
        # Its graphs are compiled once.
        training = Loop(net, task["way"])
        for turn in same:
            training.budget = budget = budget_of(SHARE)
            # The first may leave behind what has the second recorded, too.
            for _ in range(3):
                training.take(turn)
            steps[turn.name] = {
                "floor": budget.plan.floor,
                "unbudgeted": budget.plan.unbudgeted,
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


def logits(net: nets.Net, task: fresh.Task) -> Row:
    """Its peaks, real and predicted, over those of the model that returns the loss only."""

    def build() -> nets.Built:
        module, inputs = net.build()
        return WithLogits(module), inputs

    def peaks(net: nets.Net, picked: Callable[[Any], Tensor]) -> list[int]:
        """At the ends of the range, where there is no choice of plans."""
        training, found = Loop(net, task["way"]), []
        forward = training.net.forward
        # The caller drops the others before the backward.
        training.net.forward = lambda *inputs: picked(forward(*inputs))
        for share in 0.0, 1.0:
            training.budget = budget = budget_of(share)
            step = [training.take(LARGEST) for _ in range(3)][-1]
            found += [step["peak"], budget.plan.predicted_peak]
        return found

    plain = peaks(net, lambda loss: loss)
    both = peaks(replace(net, build=build), operator.itemgetter(0))
    ratios = [b / a for a, b in zip(plain, both)]
    return {"real": ratios[::2], "predicted": ratios[1::2]}


def cost(net: nets.Net, task: fresh.Task) -> Row:
    """CPU time of a step over that without a budget, which computes the same."""

    def seconds(budget: Any) -> float:
        training = Loop(net, task["way"]).net
        training.inputs = cut(training.inputs, SIZES[-1])
        training.within = budget
        training.warmed(4)
        return min(training.seconds() for _ in range(20))

    return {"time": seconds(budget_of(1.0)) / seconds(nullcontext())}


def memory(net: nets.Net, task: fresh.Task) -> Row:
    """The most that the process had, after a third of the steps and after all."""
    training = Loop(net, task["way"], dynamic=True).net
    training.within = budget_of(SHARE)
    whole, most = training.inputs, []
    for step in range(STEPS):
        training.inputs = cut(whole, MANY[step % len(MANY)])
        training.step()
        if step in (STEPS // 3, STEPS - 1):
            most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return {"third": most[0], "end": most[1]}


# ------------------------------------------------------------------- judged


def dues(
    turns: Sequence[Turn], bounds: Sequence[float], dynamic: Optional[bool]
) -> Iterator[tuple[float, bool]]:
    """Of each step what any was allowed before, and whether plans have to change in it.

    They do where what is trained is new, or larger than before, or has to be compiled
    anew: each size, or the second, of which graphs for all sizes are made.
    """
    before: dict[str, float] = {}
    known: dict[str, set[Size]] = {}
    for turn, bound in zip(turns, bounds):
        most = before.get(turn.trained, 0.0)
        allowed = max(before.values(), default=0.0)
        seen = known.setdefault(turn.trained, set())
        is_compiled = dynamic is False or (dynamic is None and len(seen) < 2)
        yield allowed, bound > most or (is_compiled and turn.size not in seen)
        seen.add(turn.size)
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
    again, was_due = 0, False
    changes = dues(turns, bounds, dynamic)
    for at, (now, o, bound, (before, is_due)) in enumerate(
        zip(found, own, bounds, changes)
    ):
        what, most = "bound", max(before, bound)
        if bound > before:
            what, most = ("larger", bound) if before else ("first", o["floor"])
        elif now["recorded"]:
            what, most = "relearned", max(before, o["floor"])
        where = f"step {at + 1}, {turns[at].name}"
        ratios.setdefault(what, []).append((now["peak"] / most, where))
        is_learned = now["recorded"] or now["compiled"] or not now["planned"]
        again += is_learned and not (is_due or was_due)
        if share == 1 and not is_learned:
            ratios.setdefault("flops", []).append((now["flops"] / o["flops"], where))
        was_due = is_due
    return {**summed_up(found, ratios), "again": again}


def summed_up(found: Sequence[Row], ratios: Mapping[str, Sequence[Named]]) -> Row:
    """The worst of each ratio, and what each step did to the plans."""

    def letter(now: Row) -> str:
        did = "R" if now["recorded"] else "C" if now["compiled"] else "."
        return did + "w" * bool(now["warnings"])

    warnings = [text for now in found for text in now["warnings"]]
    return {
        "worst": {what: max(values) for what, values in ratios.items() if values},
        "trace": "".join(map(letter, found)),
        "warned": len(warnings),
        "warnings": [*dict.fromkeys(warnings)],
    }
