"""Training loops that are drawn at random have no fault; a fault is seen and shrunk."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from benchmarks import fuzz_loops
from benchmarks.drawn_loops import (
    BLOCKS,
    drawn,
    KINDS_OF_TURNS,
    Loop,
    Program,
    read,
    Turn,
)
from torch._functorch.memory_planner.step import budget as step_budget


CORPUS = json.loads((Path(__file__).parent / "corpus/loops.json").read_text())
# Seeds of the tests' loops that have a fault today, and its kind.
KNOWN: dict[str, str] = {}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("seeds", [range(8), range(8, 16), range(16, 25)], ids=str)
def test_drawn_loops_have_no_fault(seeds):
    loops = [(str(seed), drawn(seed, most=1)) for seed in seeds]
    found = fuzz_loops.summed_up(loops, tries=0)
    assert {fault["seed"]: fault["kind"] for fault in found["faults"]} == {
        seed: KNOWN[seed] for seed, _ in loops if seed in KNOWN
    }


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("known", CORPUS, ids=[known["name"] for known in CORPUS])
def test_a_fault_that_was_found_is_gone(known, request):
    if "open" in known:
        request.applymarker(pytest.mark.xfail(reason=known["open"], strict=True))
    outcome = fuzz_loops.tried(read(json.dumps(known["loop"])))
    assert (outcome.fault, outcome.error) == (None, "")


# ---------------------------------------------------------------- planted


class Halved(step_budget.StepBudget):
    """Allows half of what it plans for, and does not say so."""

    def make_plan(self):
        super().make_plan()
        self.plan = dataclasses.replace(self.plan, allowed=self.plan.allowed // 2)

    def warn(self, *_, **__):
        pass


class Random(step_budget.StepBudget):
    """Draws numbers, and so other dropout than without it."""

    def __enter__(self):
        torch.rand(int(self.plan is not None))
        return super().__enter__()


class Silent(step_budget.StepBudget):
    """Makes no plan."""

    def make_plan(self):
        pass


class Broken(step_budget.StepBudget):
    def make_plan(self):
        raise KeyboardInterrupt if self.plan else KeyError("planted")

    def warn(self, reason, kind=""):
        raise RuntimeError(reason)


TURN = Turn((4, 64))
LOOP = Loop((Program((("transformer",),)),), (TURN,) * 5, share=0.2, dropout=0.1)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "budget, kind, step",
    [(Halved, "exceeds", 3), (Random, "differs", 2), (Silent, "no plan", 3)]
    + [(Broken, "raises", 1), (step_budget.StepBudget, None, None)],
)
def test_a_planted_fault_is_seen(budget, kind, step, monkeypatch):
    monkeypatch.setattr(step_budget, "StepBudget", budget)
    fault = fuzz_loops.tried(LOOP).fault
    assert (fault and (fault.kind, fault.step)) == (kind and (kind, step))


# ------------------------------------------------------- drawn, and shrunk


def test_a_loop_can_be_printed_and_read():
    loops = [drawn(seed) for seed in range(200)]
    assert [read(str(loop)) for loop in loops] == loops
    programs = {program for loop in loops for program in loop.programs}
    turns = {turn for loop in loops for turn in loop.turns}
    # Whatever can be drawn is.
    blocks = {name for each in programs for model in each.models for name in model}
    assert blocks == BLOCKS.keys() - {"mlp"}
    assert {turn.what for turn in turns} == {"", *KINDS_OF_TURNS}
    assert {turn.batches for turn in turns} == {1, 2, 3, 4}
    assert {len(program.models) for program in programs} == {1, 2, 3}
    assert {loop.dynamic for loop in loops} == {False, True, None}


def test_a_fault_is_shrunk(monkeypatch):
    def tried(loop):
        """A fault where a step without gradients follows one with a checkpoint."""
        kinds = [turn.what for turn in loop.turns]
        if "no_grad" in kinds[1:] and any(p.checkpoints for p in loop.programs):
            return fuzz_loops.Outcome(fuzz_loops.Fault("exceeds", "", 0))
        return fuzz_loops.Outcome()

    monkeypatch.setattr(fuzz_loops, "tried", tried)
    big = next(
        loop for loop in map(drawn, range(1000)) if tried(loop).fault and loop.dropout
    )
    least, _ = fuzz_loops.shrunk(big, tried(big).fault, tries=1000)
    (program,), turns = least.programs, least.turns
    assert program == Program((("mlp",),), checkpoints=True)
    assert [turn.what for turn in turns] == ["", "no_grad"]
    assert least == Loop((program,), turns, least.share, least.part)
    same, _ = fuzz_loops.shrunk(big, tried(big).fault, tries=0)
    assert same == big
