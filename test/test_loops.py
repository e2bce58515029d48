"""What a StepBudget does to steps that differ is seen, and judged."""

import pytest
import torch
from benchmarks import loops, nets
from benchmarks.architectures import Shape
from benchmarks.loops import LARGEST, Turn


SMALL, MIDDLE = Turn(), Turn((7, 5))
TURNS = [SMALL, MIDDLE, SMALL, LARGEST, SMALL, SMALL, LARGEST]
PLANNED = {"recorded": False, "compiled": False, "learned": False, "warnings": []}
PLANNED.update(peak=10, allowed=10, floor=10, given=5)


@pytest.mark.parametrize(
    "step, change, marks",
    [
        (3, {"learned": True}, []),
        (2, {"learned": True}, []),
        (5, {"learned": True}, ["steps learned again"]),
        (6, {"warnings": ["one", "two"]}, ["warnings"]),
        (4, {"peak": 11}, ["peaks / allowed"]),
        (3, {"peak": 11, "recorded": True}, []),
        (0, {"peak": 11}, ["first"]),
        # What it makes for good is given to later steps.
        (0, {"peak": 11, "given": 4}, []),
    ],
)
def test_what_is_off_is_seen(step, change, marks):
    found = [dict(PLANNED) for _ in TURNS]
    found[step].update(change)
    row = {**loops.summed_up(found), "again": loops.again(TURNS, found)}
    row.update(net="x", loop="gan", way="whole", share=0.2)
    failed = [mark.what for mark in loops.judged([row]) if not mark.passed]
    assert len(failed) == len(marks)
    for what, begin in zip(failed, marks):
        assert what.startswith(f"Nets of the project: {begin}")


def test_a_loop_without_a_plan_is_seen():
    found = [dict(PLANNED) for _ in TURNS]
    for now in found:
        del now["allowed"]
    row = {**loops.summed_up(found), "again": 0}
    row.update(net="x", loop="gan", way="whole", share=0.2)
    (mark,) = (mark for mark in loops.judged([row]) if not mark.passed)
    assert "x, gan, whole, share 0.2" in mark.limit


def test_a_batch_is_cut():
    ids, noise = torch.arange(32).view(4, 8), torch.randn(4, 8)
    small, same = loops.cut((ids, noise), (6, 5))
    assert small.shape == (6, 5) and same.shape == (6, 8)
    assert torch.equal(small[4:], ids[:2, :5])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("loop, share", [("evaluation", 0.2), ("last batch", 1.0)])
def test_a_loop_is_measured(loop, share, monkeypatch):
    net = nets.language("x", Shape(layers=1, tokens=32))
    monkeypatch.setitem(nets.NETS, net.name, net)
    found = loops.measure({"net": "x", "way": "whole", "loop": loop, "share": share})
    assert found["trace"].startswith("RR") and found["trace"].endswith("........")
    assert (found["again"], found["warnings"]) == (0, [])
    assert found["worst"]["first"][0] >= 1 >= found["worst"]["bound"][0]
    assert ("flops" in found["worst"]) == (share == 1)


@pytest.mark.usefixtures("alone")
def test_logits_are_measured(monkeypatch):
    net = nets.language("x", Shape(layers=1, tokens=32))
    monkeypatch.setitem(nets.NETS, net.name, net)
    found = loops.measure({"net": "x", "way": "whole", "loop": "logits", "share": 0.2})
    assert found["real"] == found["predicted"] == [1, 1]
