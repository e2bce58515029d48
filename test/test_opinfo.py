"""Budgets change nothing that torch's operators compute, and it is seen if they do."""

import argparse
import json

import pytest
import torch
from benchmarks import opinfo, opinfo_programs
from benchmarks.opinfo import Plan, Sweep
from torch._functorch.memory_planner.graph import joint


pytestmark = pytest.mark.usefixtures("alone")
LEAST = (Plan("saved", 0.0), Plan("peak", 0.0))
OPERATORS, PARTS = 40, 4


def sweep(*names, plans=LEAST, only=("plain", "in place", "int64")):
    known = opinfo_programs.database()
    found = Sweep("operators", plans, only)
    for name in names:
        found.compare(name, known[name])
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_a_sample_of_operators(part):
    names = opinfo.sample([*opinfo_programs.database()], OPERATORS)[part::PARTS]
    found = sweep(*names)
    assert found.differs == found.raises == found.unplanned == []
    assert found.counts["operators compared"] > 0.8 * len(names)
    assert all(found.replanned[str(plan)] for plan in LEAST)


def test_what_differs_is_seen(monkeypatch):
    """Without the rule that what is random runs once, it runs twice."""
    monkeypatch.setattr(joint, "recomputable_nodes", lambda graph: None)
    found = sweep("randn_like", "cos", only=("plain",))
    (wrong,) = found.differs
    assert wrong.startswith("randn_like (plain), saved 0: other bits: gradient")
    assert not found.raises
    (mark, *others) = opinfo.judged([{"kind": "operators", **found.row()}])
    assert not mark.passed and mark.measured.startswith("1 of 4 (randn_like (plain)")
    assert all(other.passed for other in others)


def test_what_raises_under_a_budget_alone_is_seen():
    found = sweep("cos", plans=[Plan("neither", 0.5)], only=("plain",))
    (wrong,) = found.raises
    assert wrong.startswith("cos (plain), neither 0.5: RuntimeError: activation_memory")


def test_what_does_not_work_without_a_budget_is_named():
    found = sweep("jiterator_unary", only=("plain",))
    ((reason, names),) = found.skipped.items()
    assert reason.startswith("AssertionError: Jiterator is only supported on CUDA")
    assert names == ["jiterator_unary (plain)"]
    assert not found.counts["operators compared"]


def test_what_ends_its_process_is_left_out():
    asked = argparse.Namespace(ops=["cos"], sample=None, part=None, check=True)
    rows = []
    tasks = opinfo.tasks(asked, rows)
    task = next(tasks)
    place = ["cos", "together", "saved 0"]
    with open(task["_note"], "w") as note:
        json.dump(place, note)
    rows.append({"kind": "operators", "part": 0, "error": "ended with status -11: "})
    task = next(tasks)
    found = Sweep("operators", LEAST, stopped=task["_stopped"])
    found.compare("cos", opinfo_programs.database()["cos"])
    (wrong,) = found.raises
    assert wrong == "cos (together), saved 0: RuntimeError: ended with status -11:"
    # What was together is compared one by one.
    assert found.compared["saved 0"] == found.counts["cases compared"] > 1
    rows[0] = {"kind": "operators", "part": 0}
    assert not [*tasks]


@pytest.mark.parametrize("by, wrong", [(1e-6, ""), (1e-2, "off: loss by 0.005")])
def test_rounding(by, wrong):
    one = [torch.ones(()), torch.ones(3)]
    assert opinfo.in_rounding([one[0] + by, one[1]], one) == wrong
    assert opinfo.in_bits([one[0] + by, one[1]], one) == "other bits: loss"
