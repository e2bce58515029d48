"""The benchmarks, on models of a few layers."""

import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import compare, fresh, harm, plans
from benchmarks.meters import relative_error, TOLERANCE
from torch import nn


SIDE = 32
ROWS = 128
MATRIX = ROWS * SIDE * 4
pytestmark = pytest.mark.usefixtures("alone")


class Chain(nn.Module):
    """Four blocks of two products with a sigmoid behind each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(SIDE, SIDE), nn.Sigmoid(), nn.Linear(SIDE, SIDE))
            for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x).sigmoid()
        return {"loss": x.sum()}["loss"]


def chain():
    return Chain(), {"x": torch.randn(ROWS, SIDE)}


def own(function):
    return f"{__name__}:{function.__name__}"


# ------------------------------------------------------------- fresh process


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """``measure(body, *tasks)``: by a module whose ``measure`` has that body."""
    monkeypatch.syspath_prepend(tmp_path)

    def run(body, *tasks, seconds=30):
        (tmp_path / "measures.py").write_text(
            "import os, pathlib, signal, time\nfrom importlib.util import find_spec\n"
            f"def measure(task):\n{textwrap.indent(body, '    ')}\n"
        )
        return [fresh.measured("measures", task, seconds) for task in tasks]

    return run


@pytest.mark.parametrize(
    ("body", "seconds", "message"),
    [
        ("time.sleep(60)", 0.5, "took more than 0.5 s"),
        ("raise SystemExit('broken')", 30, "ended with status 1: broken"),
    ],
    ids=["time", "crash"],
)
def test_what_goes_wrong_is_a_row(measure, body, seconds, message):
    body = f"if task['x'] == 1: {body}\nreturn {{'twice': 2 * task['x']}}"
    first, second = measure(body, {"x": 1}, {"x": 2}, seconds=seconds)
    assert first == {"x": 1, "error": message}
    assert second in ({"x": 2, "twice": 4}, {"x": 2, "error": "took more than 0.5 s"})


def test_untouched_tasks_run_on_the_wheel(measure):
    body = "return {'file': find_spec('torch').origin}"
    patched, wheel = measure(body, {"torch": "patched"}, {"torch": fresh.UNTOUCHED})
    assert patched["file"] == torch.__file__
    assert Path(wheel["file"]).is_relative_to(sys.prefix)
    assert not os.path.samefile(wheel["file"], torch.__file__)


# ----------------------------------------------------------------- compare


def technique(kind, budget=1.0):
    task = {"net": own(chain), "kind": kind, "budgets": (budget,), "device": plans.RUN}
    (step,) = compare.timed(task)
    return step


# Of each block: its input, and the inner sigmoid; the last block's outer one as well.
EAGER = 9 * MATRIX


@pytest.mark.parametrize(
    ("kind", "budget", "saved", "recomputed"),
    [
        # The first input is no activation.
        ("eager", 1.0, EAGER - MATRIX, 0),
        ("upstream", 0.55, 4 * MATRIX, 4 / 8),
        ("graph", 1.0, EAGER - MATRIX, 0),
    ],
)
def test_technique_saves_and_recomputes(kind, budget, saved, recomputed):
    step = technique(kind, budget)
    assert (step["saved"], step["recomputed"]) == (saved, recomputed)
    assert step["off_eager"] <= TOLERANCE
    # Parameters, two states and a step count of each, and the input are there.
    parameters = 8 * (SIDE * SIDE + SIDE) * 4
    assert step["peak"] > 3 * parameters + 16 * 4 + MATRIX + saved


def test_step_budget_saves_memory():
    step, plain = technique("blocks", 0.0), technique("eager")
    assert step["peak"] < plain["peak"] and step["recomputed"] > 0
    assert step["off_eager"] <= TOLERANCE


@pytest.mark.parametrize("wrong", [float("nan"), 1.001])
def test_an_error_in_a_small_gradient_is_seen(wrong):
    large, small = torch.tensor([1e3, -2e3]), torch.tensor([3.0, 4.0])
    assert relative_error([large, small], [large, small]) == 0
    error = relative_error([large, small * wrong], [large, small])
    assert not error <= 9e-4
    # What is next to nothing beside the others is rounding.
    assert relative_error([large, small * 1e-6], [large, small * 2e-6]) < 1e-5


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--net", "llama-9"], "no model named 'llama-9'"),
        (["--json", "/no/such/file"], "there is no folder /no/such"),
    ],
)
def test_wrong_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main("compare", *arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------- harm


def test_a_net_that_holds_more_than_with_the_wheel_is_harmed():
    stock = {"peak": 1000, "bits": "same"}
    row = {"net": "mine", "set": "project", "device": plans.RUN, "kind": "training"}

    def failing(**other):
        rows = [{**row, "stock": stock, "installed": {**stock, **other}}]
        marks = [mark for mark in harm.judged(rows) if not mark.passed]
        assert "mine" in harm.page(
            {
                "measured": rows,
                "rows": [],
                "environment": {"torch": "", "python": "", "system": ""},
            }
        )
        return [(mark.what.split(":")[0], mark.enforced) for mark in marks]

    assert failing(peak=1000) == failing(peak=600) == []
    assert failing(peak=1002) == [("training", True)]
    assert failing(bits="other") == [("losses and gradients the same bits", True)]
