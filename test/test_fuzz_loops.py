"""Training loops that are drawn at random have no fault, and a fault is seen."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import fuzz_loops
from benchmarks.drawn_loops import BLOCKS, KINDS_OF_TURNS, Loop, Program, read, Turn
from hypothesis import assume, event, given, HealthCheck, note, settings
from hypothesis import strategies as st
from torch._functorch.memory_planner.step import budget as step_budget


CORPUS = json.loads((Path(__file__).parent / "corpus/loops.json").read_text())
# How many loops; without it a few small ones, always the same.
FUZZ = os.environ.get("FUZZ")


rarely = st.sampled_from((False, False, False, False, True))


@st.composite
def programs(draw, most):
    """Of few kinds of blocks, which come again, as in real nets."""
    kinds = draw(st.lists(st.sampled_from([*BLOCKS]), min_size=1, max_size=3))
    blocks = st.lists(st.sampled_from(kinds), min_size=1, max_size=most)
    models = draw(st.lists(blocks.map(tuple), min_size=1, max_size=min(most, 3)))
    is_overwritten = any("codebook" in model for model in models)
    return Program(
        tuple(models),
        whole=draw(st.booleans()),
        # A codebook that is overwritten again by a checkpoint is an error in itself.
        checkpoints=draw(rarely) and not is_overwritten,
        outputs=draw(st.sampled_from(("loss", "dropped", "flat", "held", "kept"))),
    )


@st.composite
def loops(draw, most=1):
    """A program has at most so many blocks in each of its models."""
    count = 1 + draw(rarely)
    chosen = tuple(draw(programs(most)) for _ in range(count))
    dynamic = draw(st.sampled_from((False, True, None)))
    sizes = st.tuples(st.integers(4, 12), st.sampled_from((32, 64, 96)))
    # Each size is compiled for if they are static.
    sizes = draw(st.lists(sizes, min_size=1, max_size=2 if dynamic is False else 4))
    others = st.lists(st.sampled_from(KINDS_OF_TURNS), max_size=1)
    turns = st.builds(
        Turn,
        st.sampled_from(sizes),
        batches=st.integers(1, draw(st.sampled_from((1, 2, 4)))),
        what=st.sampled_from(6 * [""] + draw(others)),
    )
    turns = draw(st.lists(turns, min_size=4, max_size=12))
    # Programs take turns, step by step or after several.
    length = draw(st.sampled_from((1, 3)))
    turns = (
        replace(turn, program=at // length % len(chosen))
        for at, turn in enumerate(turns)
    )
    shares = st.fixed_dictionaries({"share": st.sampled_from((0.0, 0.2, 0.5, 0.9))})
    parts = st.fixed_dictionaries({"part": st.sampled_from((0.9, 0.7, 0.5))})
    return Loop(
        chosen,
        tuple(turns),
        **draw(shares | parts),
        dynamic=dynamic,
        zero_grad=draw(st.sampled_from(("last", "first", "outside"))),
        optimizer=draw(st.sampled_from(("sgd", "adamw"))),
        dropout=draw(st.sampled_from((0.0, 0.1))),
        changes=draw(rarely),
    )


@pytest.mark.usefixtures("alone")
@settings(
    max_examples=int(FUZZ or 25),
    derandomize=FUZZ is None,
    deadline=None,
    suppress_health_check=[*HealthCheck],
)
@given(loops(most=3 if FUZZ else 1))
def test_drawn_loops_have_no_fault(loop):
    note(str(loop))
    outcome = fuzz_loops.tried(loop)
    # What does not train without a budget, either, says nothing.
    assume(not outcome.error)
    event("warned of" if outcome.said else "without a warning")
    assert outcome.fault is None


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
        self.plan = replace(self.plan, allowed=self.plan.allowed // 2)

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
