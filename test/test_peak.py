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
    # No plan does better, and the best of ours is not far from it.
    assert row["lower_bound"] < floor < 2 * row["lower_bound"]
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


def upstream(rows, share):
    """As if upstream's steps were ours, at a share of the peak."""
    row = copy.deepcopy({**rows[0], "kind": "upstream", "curve": []})
    for step in row["steps"]:
        step["budgets"] = [step["budget"]]
        step["peak"] *= share
    return row


LOWEST = "lowest peak, graph / upstream"
FLOPS = "flops at no higher peak, graph / upstream"


def test_upstreams_better_plan_is_seen(rows):
    assert all(verdicts([*rows, upstream(rows, 1.01)]).values())
    marks = verdicts([*rows, upstream(rows, 2 / 3)])
    assert not marks[LOWEST]
    cheaper = upstream(rows, 1.0)
    cheaper["steps"][-1]["flops"] *= 0.99
    marks = verdicts([*rows, cheaper])
    assert marks[LOWEST] and not marks[FLOPS]


def test_a_plan_with_wrong_gradients_is_not_upstreams_lowest(rows):
    theirs = upstream(rows, 2 / 3)
    for step in theirs["steps"][1:]:
        step["off_budget_1"] = 1e-3
    assert plans.lowest(theirs["steps"])["budget"] == 1.0
    assert verdicts([*rows, theirs])[LOWEST]


def test_what_is_held_to_others_is_compared_with_them():
    """A StepBudget at the peak of each block's own budget, and a graph at its own."""
    rows = []
    kinds = {"saved": (1.0, 0.0), "blocks": (1.0, 0.0), "held": (), "one graph": ()}
    for task in plans.tasks(["llama-4"], kinds, plans.RUN, rows):
        rows.append({**task, **plans.measure(task)})
    saved, blocks, held, graph = (row["steps"] for row in rows)
    assert [step["peak_bytes"] for step in held] == [step["peak"] for step in saved]
    assert all(step["peak"] <= step["allowed"] for step in held)
    assert graph[0]["allowed"] == blocks[1]["peak"]
    found = verdicts(rows)
    assert len(found) == 8
    assert [mark for mark in found if not found[mark]] in (
        [],
        ["floor / the floor of one graph"],
    )
    held[0]["flops"] *= 2
    blocks[0]["flops"] *= 2
    assert not verdicts(rows)["flops at no higher peak, blocks / saved"]


def test_each_plan_is_told_once():
    figures = {1.0: 9, 0.75: 8, 0.5: 8, 0.25: 7, 0.0: 8}
    steps = plans.swept(lambda b: {"peak": figures[b], "flops": 1}, [*figures])
    assert [step["budgets"] for step in steps] == [[1.0], [0.75, 0.5], [0.25], [0.0]]
    assert plans.lowest(steps)["peak"] == 7
