"""The measurement of peaks: what it says of a real net, and that its marks can fail."""

import copy

import pytest
from benchmarks import peak


@pytest.fixture(scope="module")
def rows():
    """A net's steps, ours at three budgets."""
    task = {"net": "mlp-dropout", "kind": "ours", "budgets": [1.0, 0.3, 0.0]}
    return [{**task, **peak.measure(task)}]


def verdicts(rows):
    return {mark.what.split(",")[0]: mark.passed for mark in peak.judged(rows)}


def test_a_small_net_reaches_its_marks(rows):
    found = verdicts(rows)
    assert len(found) == 4 and all(found.values())
    steps = {step["budget"]: step for step in rows[0]["steps"]}
    assert steps[0.0]["peak"] < steps[1.0]["peak"]
    assert steps[0.0]["recomputed"] > 0 and abs(steps[1.0]["recomputed"]) < 1e-6
    # What the curve says of the floor is what the floor's step does.
    floor, recomputed = rows[0]["curve"][0]
    assert floor == steps[0.0]["predicted"]
    assert recomputed == pytest.approx(steps[0.0]["recomputed"], abs=1e-4)


@pytest.mark.parametrize(
    "entry, budget, factor, what",
    [
        ("predicted", 0.3, 1.01, "predicted / measured peak"),
        ("fastest", 0.0, 0.99, "predicted / measured peak"),
        ("allowed", 0.0, 0.9, "measured peak / what the budget allows"),
        ("peak", 0.0, 2.0, "measured peak / that of the next larger budget"),
    ],
)
def test_each_mark_fails_where_it_should(rows, entry, budget, factor, what):
    broken = copy.deepcopy(rows)
    for step in broken[0]["steps"]:
        if step["budget"] == budget or (entry == "fastest" and step[entry]):
            step[entry] *= factor
    assert not verdicts(broken)[what]


def test_a_wrong_gradient_fails(rows):
    broken = copy.deepcopy(rows)
    broken[0]["steps"][-1]["off_budget_1"] = 1e-3
    assert not verdicts(broken)["gradients against the plan of budget 1"]


def test_upstreams_better_plan_is_seen(rows):
    """Upstream's steps are ours at two thirds of the peak."""
    steps = copy.deepcopy(rows[0]["steps"])
    found = peak.shares(rows[0]["curve"], steps)
    assert max(found.values()) <= 1.0005
    for step in steps:
        step["peak"] *= 2 / 3
    assert max(peak.shares(rows[0]["curve"], steps).values()) > 1.4
    steps[0]["off_budget_1"] = 1e-3
    assert steps[0]["budget"] not in peak.shares(rows[0]["curve"], steps)
