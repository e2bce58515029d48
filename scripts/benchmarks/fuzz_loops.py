"""Training loops without a StepBudget and with one, and what is wrong where they differ.

Each trains small nets on a CPU, operator by operator. It has a fault where

    differs     a loss or a gradient is not the same, bit for bit
    raises      a step raises, and does not without a budget
    exceeds     the allocator's peak is above what the budget allows, from the fourth
                step on, and no warning was logged before
    no plan     there is none by then, after two steps that trained, and no warning
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

from benchmarks.drawn_loops import BLOCKS, CLASSES, Loop, Program, Turn, WIDTH
from benchmarks.meters import allocations, digest
from benchmarks.pages import Row
from benchmarks.plans import warnings_noted
from benchmarks.tracing import overlay
from benchmarks.ways import OPERATORS


# Peaks count from this step on, and may be above what is allowed by so much.
SETTLED = 3
ROOM = 1.005
# The state of a generator, which is kept where a random operator is repeated.
GENERATOR = 5056


class Planned(Exception):
    """What a loop raises by itself, catches, and goes on after."""


# --------------------------------------------------------------------- runs


class Model(nn.Module):
    """Blocks, and in a program's last model, a head."""

    def __init__(self, blocks: Sequence[str], program: Program, loop: Loop) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BLOCKS[name](loop.dropout) for name in blocks)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.outputs = program.outputs
        self.checkpoints = program.checkpoints
        self.keeps_state = loop.dropout > 0
        self.changes = loop.changes

    def forward(self, x: Tensor, wanted: Optional[Tensor] = None) -> Any:
        for block in self.blocks:
            if self.checkpoints:
                x = checkpoint(
                    block, x, use_reentrant=False, preserve_rng_state=self.keeps_state
                )
            else:
                x = block(x)
            if self.changes:
                x.mul_(0.9)
        if wanted is None:
            return x
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        if self.outputs == "loss":
            return loss
        return loss, logits.flatten(0, 1) if self.outputs == "flat" else logits


class Trained:
    """A program, compiled, with its optimizer."""

    def __init__(self, program: Program, loop: Loop) -> None:
        self.outputs = program.outputs
        models = [Model(blocks, program, loop) for blocks in program.models]
        for model in models[:-1]:
            del model.head
        self.parameters = [p for m in models for p in m.parameters() if p.requires_grad]
        optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[loop.optimizer]
        self.optimizer: torch.optim.Optimizer = optimizer(self.parameters, lr=0.01)
        blocks = [block for model in models for block in model.blocks]
        for part in models if program.whole else blocks:
            part.compile(backend=OPERATORS, dynamic=loop.dynamic)
        self.models = models
        self.kept: Optional[Tensor] = None

    def forward(self, x: Tensor, wanted: Tensor) -> Any:
        for model in self.models[:-1]:
            x = model(x)
        return self.models[-1](x, wanted)

    def take(self, batches: Sequence[Any], turn: Turn, zero_grad: str) -> Iterator[Any]:
        """What a step computes, without keeping it: losses, then its gradients."""
        if zero_grad == "first":
            self.optimizer.zero_grad()
        for x, wanted in batches:
            logits = None
            if self.outputs == "loss":
                loss = self.forward(x, wanted)
            elif self.outputs in ("held", "kept"):
                loss, logits = self.forward(x, wanted)
            else:
                loss = self.forward(x, wanted)[0]
            if self.outputs == "kept":
                self.kept = logits
            yield loss.item()
            if turn.what == "raises early":
                raise Planned
            if turn.what in ("skipped", "no_grad"):
                continue
            (loss / len(batches)).backward()
        yield digest(each.grad for each in self.parameters)
        if turn.what == "raises late":
            raise Planned
        if turn.what not in ("skipped", "no_grad"):
            self.optimizer.step()
        if zero_grad == "last":
            self.optimizer.zero_grad()


def batch(size: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*size, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, size, generator=generator)


def run(loop: Loop, budget: Any = None) -> Iterator[Row]:
    """What each step computes, holds, and warns of."""
    torch._dynamo.reset()
    gc.collect()
    # The collections between steps need not look at what is there by now.
    gc.freeze()
    torch.manual_seed(0)
    programs = [Trained(program, loop) for program in loop.programs]
    for at, turn in enumerate(loop.turns):
        row: Row = {"computed": [], "said": []}
        program = programs[turn.program]
        step = _step(loop, turn, at, program, budget, row["computed"])
        gc.collect()
        with warnings_noted() as row["said"]:
            # The first steps too: the profiler tells only of those frees whose memory it
            # has seen allocated, as gradients that a later step gives up.
            row["peak"] = allocations(step, scratch=False)[1]
        yield row


def _step(
    loop: Loop, turn: Turn, at: int, program: Trained, budget: Any, computed: list[Any]
) -> Callable[[], None]:
    count = 0 if turn.what == "empty" else turn.batches
    batches = [batch(turn.size, 16 * at + index) for index in range(count)]
    if loop.zero_grad == "outside":
        program.optimizer.zero_grad()

    def step() -> None:
        torch.manual_seed(at)
        try:
            with (
                budget or nullcontext(),
                torch.set_grad_enabled(turn.what != "no_grad"),
            ):
                if batches:
                    computed.extend(program.take(batches, turn, loop.zero_grad))
        except Planned:
            computed.append("raised")

    return step


# ------------------------------------------------------------------- faults


class Fault(NamedTuple):
    kind: str
    detail: str
    step: int


class Outcome(NamedTuple):
    """What became of a loop: an ``error`` is one that it has without a budget, too."""

    fault: Optional[Fault] = None
    error: str = ""
    said: Sequence[str] = ()


def tried(loop: Loop) -> Outcome:
    """The first fault of a loop, if any."""
    limits = {"recompile_limit": 64, "accumulated_recompile_limit": 512}
    with config.patch(enable_autograd_cache=False), dynamo_config.patch(limits):
        try:
            plain = [*run(loop)]
        except Exception as error:
            return Outcome(error=told(error))
        return budgeted(loop, plain)


def told(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def budget_for(loop: Loop, plain: Sequence[Row]) -> Any:
    make = overlay("memory_planner").StepBudget
    if loop.share is not None:
        return make(share=loop.share)
    most = max((row["peak"] for row in plain[SETTLED:]), default=0)
    return make(peak_bytes=max(1, int(loop.part * most)))


def budgeted(loop: Loop, plain: Sequence[Row]) -> Outcome:
    budget = budget_for(loop, plain)
    said: list[str] = []
    steps = run(loop, budget)
    trained = 0
    for at, (turn, wanted) in enumerate(zip(loop.turns, plain)):
        try:
            row = next(steps)
        except Exception as error:
            return Outcome(Fault("raises", told(error), at), said=said)
        said += row["said"]
        if row["computed"] != wanted["computed"]:
            detail = f"{row['computed']}, not {wanted['computed']}"
            return Outcome(Fault("differs", detail, at), said=said)
        if at >= SETTLED and not said:
            if budget.plan is None and trained > 1:
                return Outcome(Fault("no plan", "", at))
            fault = exceeds(loop, turn, row["peak"], budget.plan)
            if fault is not None:
                return Outcome(Fault("exceeds", fault, at))
        trained += not turn.what
    return Outcome(said=said)


def exceeds(loop: Loop, turn: Turn, peak: int, plan: Any) -> Optional[str]:
    """How, if the peak is above what is allowed."""
    if plan is None:
        return None
    states = 0
    if loop.dropout:
        # Docs say that these do not count.
        program = loop.programs[turn.program]
        blocks = sum(map(len, program.models))
        states = GENERATOR * 2 * blocks * turn.batches
    if peak <= ROOM * plan.allowed + states:
        return None
    return (
        f"{peak / plan.allowed:.3f} times {plan.allowed}; predicted "
        f"{plan.predicted_peak}, floor {plan.floor}, no budget {plan.unbudgeted}"
    )
