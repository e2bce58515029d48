"""What a StepBudget does to steps that differ is seen, and judged."""

import pytest
import torch
from benchmarks import loops, nets, turns
from benchmarks.architectures import Shape
from benchmarks.turns import judged_loop, LARGEST, Turn


SMALL, MIDDLE = Turn(), Turn((7, 5))
STEPS = {
    "1 x (5, 6)": {"floor": 10, "unbudgeted": 20, "flops": 8},
    "1 x (7, 5)": {"floor": 15, "unbudgeted": 25, "flops": 10},
    "1 x (9, 8)": {"floor": 30, "unbudgeted": 60, "flops": 24},
}
TURNS = [SMALL, MIDDLE, SMALL, LARGEST, SMALL, SMALL, LARGEST]
PLANNED = {"recorded": False, "compiled": False, "planned": True, "warnings": []}


@pytest.mark.parametrize(
    "dynamic, wanted, backwards",
    [
        (True, [1, 1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]),
        (None, [1, 1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]),
        (False, [1, 1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 1, 0]),
    ],
)
def test_what_has_to_be_learned(dynamic, wanted, backwards):
    """Larger sizes; and others where Dynamo has to compile for them."""
    for order, due in (TURNS, wanted), (TURNS[::-1], backwards):
        bounds = [STEPS[turn.name]["unbudgeted"] for turn in order]
        assert [is_due for _, is_due in turns.dues(order, bounds, dynamic)] == due


@pytest.mark.parametrize(
    "step, change, marks",
    [
        (3, {"recorded": True, "warnings": ["once"]}, []),
        (2, {"recorded": True}, []),
        (5, {"recorded": True}, ["steps learned again"]),
        (6, {"compiled": True}, ["steps learned again"]),
        (6, {"planned": False}, ["steps learned again"]),
        (6, {"warnings": ["one", "two"]}, ["warnings"]),
        (4, {"peak": 61}, ["other peaks"]),
        (3, {"peak": 61}, ["peak of a larger step"]),
        (5, {"peak": 61, "recorded": True}, ["steps", "peak of a step learned again"]),
        (6, {"flops": 25}, ["flops"]),
        (0, {"peak": 11}, ["first"]),
    ],
)
def test_what_is_off_is_seen(step, change, marks):
    found = [
        {**PLANNED, "peak": STEPS[t.name]["floor"], "flops": STEPS[t.name]["flops"]}
        for t in TURNS
    ]
    found[step].update(change)
    row = judged_loop(TURNS, found, STEPS, True, 1.0)
    row.update(net="x", loop="lengths, dynamic", way="whole", share=1.0, held_out=True)
    failed = [mark.what for mark in loops.judged([row]) if not mark.passed]
    assert len(failed) == len(marks)
    for what, begin in zip(failed, marks):
        assert what.startswith(f"Held out: lengths: {begin}")


def test_a_batch_is_cut():
    ids, noise = torch.arange(32).view(4, 8), torch.randn(4, 8)
    small, same = turns.cut((ids, noise), (6, 5))
    assert small.shape == (6, 5) and same.shape == (6, 8)
    assert torch.equal(small[4:], ids[:2, :5])


@pytest.mark.usefixtures("alone")
def test_a_loop_is_measured(monkeypatch):
    net = nets.decoder("x", Shape(layers=1, tokens=32))
    monkeypatch.setitem(nets.NETS, net.name, net)
    task = {"net": "x", "way": "whole", "share": 0.2}
    alone = {"loop": "alone", "loops": ["evaluation"]}
    known = loops.measure({**task, **alone})["steps"]
    found = loops.measure({**task, "loop": "evaluation", "_alone": known})
    assert found["trace"] == "RC.........."
    assert (found["again"], found["warnings"]) == (0, [])
    assert found["worst"]["first"][0] >= 1 >= found["worst"]["bound"][0]
    with pytest.raises(ValueError, match="alone is not known"):
        loops.measure({**task, "loop": "evaluation", "_alone": None})
