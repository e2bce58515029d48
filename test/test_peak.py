"""The measurement of peaks: what it says of a real net, and that its marks can fail."""

import copy

import pytest
import torch
from benchmarks import peak, sweep
from benchmarks.meters import record_step
from benchmarks.ways import budgeted, OPERATORS
from torch import nn


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
    "entry, factor, what",
    [
        ("predicted", 1.01, "predicted / measured peak"),
        ("allowed", 0.9, "measured peak / what the budget allows"),
        ("peak", 2.0, "measured peak / that of the next larger budget"),
        ("off_budget_1", 1e9, "gradients against the plan of budget 1"),
    ],
)
def test_each_mark_fails_where_it_should(rows, entry, factor, what):
    broken = copy.deepcopy(rows)
    least = broken[0]["steps"][-1]
    least[entry] = (least[entry] or 1e-12) * factor
    assert not verdicts(broken)[what]


def upstream(rows, share):
    """As if upstream's steps were ours, at a share of the peak."""
    row = copy.deepcopy({**rows[0], "kind": "upstream"})
    for step in row["steps"]:
        step["budgets"] = [step["budget"]]
        step["peak"] *= share
    return row


def test_upstreams_better_plan_is_seen(rows):
    for share, floor, worst in ((1, 1, 1), (2 / 3, 1.5, 1.5)):
        (found,) = peak.beside_upstream([*rows, upstream(rows, share)])
        assert found.floor / found.lowest["peak"] == pytest.approx(floor, abs=1e-3)
        assert found.worst == pytest.approx(worst, abs=0.05)
    marks = verdicts([*rows, upstream(rows, 2 / 3)])
    assert not marks["our floor / the lowest peak of upstream's budgets"]
    assert not marks["ours at no more flops / upstream's peak"]
    assert all(verdicts([*rows, upstream(rows, 1.01)]).values())


def test_a_plan_with_wrong_gradients_is_not_upstreams_lowest(rows):
    theirs = upstream(rows, 1)
    least = sweep.lowest(theirs["steps"])
    assert least["budget"] == 0
    least["off_budget_1"] = 1e-3
    (found,) = peak.beside_upstream([*rows, theirs])
    assert found.lowest["budget"] == 0.3
    assert (found.plans, found.budgets) == (2, 3)


# -------------------------------------------------------------------- sweep


def recorded(step, parameters, x):
    return record_step(lambda: step(x), parameters, [x])


class Chain(nn.Module):
    """Two graphs of three products each, with a sigmoid behind each."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(32, 32) if n % 2 else nn.Sigmoid() for n in range(1, 13)]
        self.first, self.second = nn.Sequential(*layers[:6]), nn.Sequential(*layers[6:])

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).sum()


def test_a_sweep_runs_by_the_plan_of_each_budget():
    torch._dynamo.reset()
    module, x = Chain(), torch.randn(256, 32)
    parameters = list(module.parameters())
    backend = sweep.Sweep()
    swept = torch.compile(module, backend=backend)
    swept(x)
    assert len(backend.graphs) == 2
    for budget in (1.0, 0.5, 0.0):
        backend.budget = budget
        found = recorded(swept, parameters, x)
        with budgeted(budget):
            step = torch.compile(module, backend=OPERATORS)
            step(x)
            wanted = recorded(step, parameters, x)
        torch._dynamo.reset()
        assert found[:-1] == wanted[:-1]
        assert all(map(torch.equal, found.gradients, wanted.gradients))


def test_each_plan_is_measured_once():
    """A few items of one size: more budgets than plans."""
    torch._dynamo.reset()
    graphs, asked = [], []
    module = Chain()
    with sweep.noted(graphs), budgeted(1.0):
        torch.compile(module, backend=OPERATORS)(torch.randn(256, 32))

    def measure(budget):
        asked.append(budget)
        return {"peak": abs(budget - 0.6)}

    steps = sweep.measured(graphs, measure)
    assert 1 < len(steps) < 8 and asked == [max(s["budgets"]) for s in steps]
    assert [b for step in steps for b in step["budgets"]] == [*sweep.BUDGETS]
    assert sweep.lowest(steps)["peak"] == min(step["peak"] for step in steps)
