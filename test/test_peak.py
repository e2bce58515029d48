"""The measurement of peaks: what it says of a real net, and that its marks can fail."""

import copy

import benchmark_peak
import pytest


@pytest.fixture(scope="module")
def rows():
    """A net's steps, ours at three budgets."""
    task = {"net": "mlp-dropout", "kind": "ours", "budgets": [1.0, 0.3, 0.0]}
    return [{**task, **benchmark_peak.measure(task)}]


def verdicts(rows):
    return {
        mark.what.split(",")[0]: mark.passed for mark in benchmark_peak.judged(rows)
    }


def test_a_small_net_reaches_its_marks(rows):
    found = verdicts(rows)
    assert len(found) == 4 and all(found.values())
    steps = {step["budget"]: step for step in rows[0]["steps"]}
    assert steps[0.0]["peak"] < steps[1.0]["peak"]
    assert steps[0.0]["recomputed"] > 0 and abs(steps[1.0]["recomputed"]) < 1e-6
    # What the curve says of the floor is what the floor's step does.
    peak, recomputed = rows[0]["curve"][0]
    assert peak == steps[0.0]["predicted"]
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


def test_upstreams_better_plan_fails(rows):
    """Upstream's steps are ours at two thirds of the peak."""
    upstream = copy.deepcopy(rows[0])
    upstream["kind"] = "upstream"
    for step in upstream["steps"]:
        step["peak"] *= 2 / 3
    found = verdicts([*rows, upstream])
    assert not found["peak / upstream's at no more flops"]
    upstream["steps"] = copy.deepcopy(rows[0]["steps"])
    assert verdicts([*rows, upstream])["peak / upstream's at no more flops"]
