"""The measurement of peaks: what it says of real nets, and that its marks can fail."""

import copy

import pytest
from benchmarks import plans, schedule


@pytest.fixture(scope="module")
def rows():
    """A net's steps, ours at three budgets."""
    task = {"net": "mlp-dropout", "kind": "graph", "device": plans.RUN}
    return [{**task, **schedule.measure({**task, "budgets": (1.0, 0.3, 0.0)})}]


def verdicts(rows):
    return {mark.what: mark.passed for mark in schedule.judged(rows)}


def test_a_small_net_reaches_its_marks(rows):
    found = verdicts(rows)
    assert len(found) == 4 and all(found.values())
    (row,) = rows
    steps = {step["budget"]: step for step in row["steps"]}
    assert steps[0.0]["peak"] < steps[1.0]["peak"]
    assert steps[0.0]["flops"] > steps[1.0]["flops"]
    # What the curve says of the floor is what the floor's step does.
    floor, flops = row["curve"][0]
    assert floor == steps[0.0]["predicted"]
    assert flops == pytest.approx(steps[0.0]["flops"], rel=1e-4)


@pytest.mark.parametrize(
    "entry, factor, what",
    [
        ("predicted", 1.01, "predicted / measured peak"),
        ("allowed", 0.9, "peak / allowed, without a warning"),
        ("peak", 2.0, "peak / at the next larger budget, graph"),
        ("off_budget_1", 1.0, "gradients against those of budget 1"),
    ],
)
def test_each_mark_fails_where_it_should(rows, entry, factor, what):
    broken = copy.deepcopy(rows)
    least = broken[0]["steps"][-1]
    least[entry] = (least[entry] or 1e-12) * factor
    least["floor"] = 0
    assert not verdicts(broken)[what]


def test_what_is_held_to_others_is_compared_with_them():
    """A StepBudget at the peak of each block's own budget."""
    rows = []
    kinds = {"saved": (1.0, 0.0), "blocks": (1.0, 0.0), "held": ()}
    for task in plans.tasks(["llama-4"], kinds, plans.RUN, rows):
        rows.append({**task, **plans.measure(task)})
    saved, blocks, held = (row["steps"] for row in rows)
    assert [step["peak_bytes"] for step in held] == [step["peak"] for step in saved]
    assert all(step["peak"] <= step["allowed"] for step in held)
    found = verdicts(rows)
    assert len(found) == 6 and all(found.values())
    held[0]["flops"] *= 2
    blocks[0]["flops"] *= 2
    assert not verdicts(rows)["flops at no higher peak, blocks / saved"]
