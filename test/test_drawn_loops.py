"""Training loops that are drawn at random: a StepBudget changes nothing but the peaks.

Each is trained without a StepBudget and with one. Losses and gradients have to be the
same, bit for bit, and nothing may be raised that is not without a budget. From the fourth
step on there is a plan, once two steps have trained, and the allocator's peak is at most
what it allows; unless a warning was logged before. With a share of 1, that is no more
than without a StepBudget.
"""

import functools
import os
from dataclasses import replace

import pytest
import torch
from drawn_loops import BLOCKS, KINDS_OF_TURNS, Loop, Program, run, Turn
from hypothesis import event, given, HealthCheck, reject, settings
from hypothesis import strategies as st
from torch._dynamo import config as dynamo_config
from torch._functorch import config
from torch._functorch.memory_planner.step import budget as step_budget


# How many loops; without it a few small ones, always the same.
FUZZ = os.environ.get("FUZZ")
# Peaks count from this step on, and may be above what is allowed by so much.
SETTLED = 3
ROOM = 1.005
# The state of a generator, which is kept where a random operator is repeated.
GENERATOR = 5056

pytestmark = pytest.mark.usefixtures("alone")


@functools.lru_cache(1)
def without_budget(loop):
    return [*run(loop)]


def check(loop):
    """Whether a warning was logged, if nothing is wrong."""
    limits = {"recompile_limit": 64, "accumulated_recompile_limit": 512}
    with config.patch(enable_autograd_cache=False), dynamo_config.patch(limits):
        try:
            plain = without_budget(loop)
        except Exception:
            # What does not train without a budget, either, says nothing.
            reject()
        budget = budget_for(loop, plain)
        without = max((peak for _, peak, _ in plain[SETTLED:]), default=0)
        warned, trained = False, 0
        steps = zip(loop.turns, plain, run(loop, budget))
        for at, (turn, (wanted, *_), (computed, peak, said)) in enumerate(steps):
            warned = warned or bool(said)
            assert computed == wanted, f"step {at} computes something else"
            if at >= SETTLED and not warned:
                if budget.plan is None:
                    assert trained < 2, f"step {at} has no plan"
                else:
                    most = budget.plan.allowed
                    if loop.share == 1:
                        most = min(most, without)
                    most = ROOM * most + states_of_generators(loop, turn)
                    assert peak <= most, f"step {at} holds too much: {budget.plan}"
            trained += not turn.what
    return warned


def budget_for(loop, plain):
    if loop.share is not None:
        return step_budget.StepBudget(share=loop.share)
    most = max((peak for _, peak, _ in plain[SETTLED:]), default=0)
    return step_budget.StepBudget(peak_bytes=max(1, int(loop.part * most)))


def states_of_generators(loop, turn):
    """The bytes that docs say do not count."""
    blocks = sum(map(len, loop.programs[turn.program].models))
    return GENERATOR * 2 * blocks * turn.batches if loop.dropout else 0


# -------------------------------------------------------------------- drawn


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
        checkpoints=draw(rarely) * (not is_overwritten) * draw(st.integers(1, 3)),
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
    turns = draw(st.lists(turns, min_size=4, max_size=12 if FUZZ else 7))
    # Programs take turns, step by step or after several.
    length = draw(st.sampled_from((1, 3)))
    turns = (
        replace(turn, program=at // length % len(chosen))
        for at, turn in enumerate(turns)
    )
    shares = st.fixed_dictionaries(
        {"share": st.sampled_from((0.0, 0.2, 0.5, 0.9, 1.0))}
    )
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


# What once had a fault: a step without gradients that holds most, ...
LSTM, MLP = Program((("lstm",),)), Program((("mlp",),))
IN_TURN = (Turn((9, 96)), Turn((9, 96), program=1, what="no_grad")) * 2
# ... sums of gradients, which do not grow, ...
GROWING = (*3 * (Turn((7, 32)),), Turn((12, 32)))
# ... what a checkpoint of several blocks runs again, ...
PAIRS = Program((4 * ("mlp",),), whole=False, checkpoints=2)
# ... and a backward that alone holds the gradient that it gets.
NORM = Loop((Program((("spectral",),)),), 5 * (Turn((9, 96)),), share=1.0)
DROPOUT = Loop((Program((("transformer",),)),), 5 * (Turn((4, 64)),), 0.2, dropout=0.1)
KNOWN = (
    Loop((LSTM, MLP), IN_TURN, share=0.5),
    Loop((replace(LSTM, whole=False),), GROWING, share=0.0),
    Loop((PAIRS,), 5 * (Turn((9, 96)),), share=0.0),
    NORM,
    DROPOUT,
)


@settings(
    max_examples=int(FUZZ or 25),
    derandomize=FUZZ is None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[*HealthCheck],
)
@given(loops(most=3 if FUZZ else 1))
def test_drawn_loops_have_no_fault(loop):
    event("warned of" if check(loop) else "without a warning")


@pytest.mark.parametrize("loop", KNOWN)
def test_known_loops_train_and_have_no_fault(loop):
    check(loop)


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
        raise KeyError("planted")

    def warn(self, reason, *_, **__):
        raise RuntimeError(reason)


@pytest.mark.parametrize(
    "budget, fault",
    [
        (Halved, "step 3 holds too much"),
        (Random, "step 2 computes something else"),
        (Silent, "step 3 has no plan"),
        (Broken, "planted"),
    ],
)
def test_a_planted_fault_is_seen(budget, fault, monkeypatch):
    monkeypatch.setattr(step_budget, "StepBudget", budget)
    with pytest.raises((AssertionError, RuntimeError), match=fault):
        check(DROPOUT)
