"""The benchmarks, on models of a few layers."""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import (
    catalogue,
    compare,
    cost,
    everything,
    fits,
    fresh,
    loops,
    options,
    plans,
    provenance,
    unasked,
)
from benchmarks.meters import relative_error, TOLERANCE
from benchmarks.replay import GPUS
from benchmarks.runner import Runner
from torch import nn


SIDE = 32
ROWS = 128
MATRIX = ROWS * SIDE * 4
# What has the place of a net and is none.
PROGRAMS = {*loops.PROGRAMS, cost.FIRST, fits.LLAMA}
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


# ------------------------------------------------------------------- runner


QUESTION = """
import json, os, pathlib, time
NETS = {"project": ("one", "two"), "held-out": ("three",), "check": ()}
FOLDER = pathlib.Path(__file__).parent
TORCH, DEVICE, PARTS = "patched", "h100", ()
def tasks(asked, rows):
    for net in asked.nets:
        of = {"set": asked.set, "net": net, "torch": TORCH, "device": DEVICE}
        yield {**of, "kind": "first"}
        best = [row["found"] for row in rows if row["kind"] == "first"]
        yield {**of, "kind": "second", "_best": best}
        for part in PARTS:
            yield {**of, "kind": "third", **part}
def measure(task):
    with open(FOLDER / "log", "a") as log:
        print(task["net"], task["kind"], os.getpid(), file=log)
    while task["net"] == "two" and (FOLDER / "wait").exists():
        time.sleep(0.1)
    return {"found": task.get("_best", 1)}
"""


@pytest.fixture
def question(tmp_path, monkeypatch):
    """``question(set)``: asks it, and what was measured for that."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "question.py").write_text(QUESTION)
    monkeypatch.delitem(sys.modules, "question", raising=False)
    module = importlib.import_module("question")
    path = tmp_path / "question.json"

    def ask(of="project", **more):
        asked = {"set": of, "nets": None, "kind": None, "check": False, "json": path}
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        Runner(module, argparse.Namespace(**{**asked, **more})).run()
        lines = log.read_text().splitlines() if log.exists() else []
        return sorted(line.rpartition(" ")[0] for line in lines)

    ask.here = lambda: monkeypatch.setattr(
        fresh, "measure_in_child", lambda _, task, *options: module.measure(task)
    )
    ask.rows = lambda: json.loads(path.read_text())["measured"]
    ask.code = lambda code: monkeypatch.setattr(
        provenance, "here", lambda: {"release": "2.13.0", "commit": "c", "code": code}
    )
    return ask


def test_what_the_same_code_has_stored_is_not_measured_again(question):
    every = ["one first", "one second", "two first", "two second"]
    question.here()
    question.code("old")
    assert question() == every
    assert [row["found"] for row in question.rows()] == [1, [1], 1, [1]]
    assert all(row["took"] >= 0 and row["code"] == "old" for row in question.rows())
    assert question() == []
    assert question("held-out") == ["three first", "three second"]
    # The other set's rows stay.
    nets = [row["net"] for row in question.rows()]
    assert nets == ["one", "one", "two", "two", "three", "three"]
    question.code("new")
    assert question(nets=["two"], kind=["first"]) == ["two first"]
    assert question() == ["one first", "one second", "two second"]
    codes = [row["code"] for row in question.rows()]
    assert codes == ["new"] * 4 + ["old"] * 2


def test_what_the_untouched_wheel_does_is_measured_once(question, monkeypatch):
    monkeypatch.setattr(sys.modules["question"], "TORCH", "untouched")
    question.here()
    question.code("old")
    assert "two first" in question(nets=["two"])
    question.code("new")
    assert question(nets=["two"]) == []
    assert {row["code"] for row in question.rows()} == {provenance.STOCK}
    assert provenance.complaints("question", question.rows()) == []
    # Where kernels run, times are of one run.
    monkeypatch.setattr(sys.modules["question"], "DEVICE", "inductor")
    assert "two first" in question(nets=["two"])


def test_rows_of_different_tasks_are_kept_apart(question, monkeypatch):
    question.here()
    parts = [{"part": "times"}, {"part": "counts"}]
    monkeypatch.setattr(sys.modules["question"], "PARTS", parts)
    question("held-out")
    assert [row.get("part") for row in question.rows()] == [
        None,
        None,
        "times",
        "counts",
    ]
    monkeypatch.setattr(sys.modules["question"], "PARTS", [{"x": 1}, {"x": 2}])
    # It would stop what later tests start, too.
    monkeypatch.setattr(fresh, "stop_all", lambda: None)
    with pytest.raises(ValueError, match="nothing tells apart"):
        question("held-out")


def test_a_signal_ends_all_tasks_and_leaves_what_is_stored(question, tmp_path):
    (tmp_path / "wait").touch()
    runs = (
        "import argparse, json, pathlib, signal, sys\n"
        "import question\n"
        "from benchmarks.runner import Runner\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "asked = argparse.Namespace(set='project', nets=None, kind=None, check=False,\n"
        "    json=pathlib.Path('question.json'))\n"
        "Runner(question, asked).run()\n"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", runs],
        cwd=tmp_path,
        env=variables,
        stderr=subprocess.DEVNULL,
    )
    log, stored = tmp_path / "log", tmp_path / "question.json"
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.1)
        is_there = stored.exists() and len(json.loads(stored.read_text())["measured"])
        if is_there == 2 and "two" in log.read_text():
            break
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) != 0
    assert [row["net"] for row in question.rows()] == ["one", "one"]
    (waiting,) = [
        int(line.split()[2])
        for line in log.read_text().splitlines()
        if line.startswith("two")
    ]
    with pytest.raises(ProcessLookupError):
        os.kill(waiting, 0)


# --------------------------------------------------------------- provenance


def test_a_comment_leaves_a_fingerprint_and_code_does_not(tmp_path, monkeypatch):
    place = tmp_path / "torch" / "module.py"
    place.parent.mkdir()
    monkeypatch.setattr(provenance, "OVERLAY", place.parent)

    def found(text):
        place.write_text(text)
        provenance.fingerprint.cache_clear()
        return provenance.fingerprint("2.15.0")

    plain = found("def f(x):\n    return x + 1\n")
    assert found('"""Adds."""\ndef f(x):  # One.\n    return (x + 1)\n') == plain
    assert found("def f(x):\n    return x + 2\n") != plain
    # So does the order of what is imported, but not what that is.
    imports = found("from torch import nn, Tensor\n")
    assert found("from torch import Tensor, nn\n") == imports
    assert found("from torch import fx, Tensor\n") != imports
    provenance.fingerprint.cache_clear()


def test_rows_of_several_codes_and_of_other_code_are_complained_of():
    now = provenance.fingerprint("2.15.0")
    row = {"release": "2.15.0", "commit": "abc", "code": now}
    other = {**row, "commit": "def", "code": "other"}
    assert provenance.complaints("steps", [row, row]) == []
    several, changed = provenance.complaints("steps", [row, other])
    assert "several codes (abc, def)" in several
    assert "steps: the code has changed since def" in changed
    older = {"release": "2.13.0", "code": provenance.STOCK}
    (releases,) = provenance.complaints("steps", [row, older])
    assert "several releases (2.13.0, 2.15.0)" in releases
    (unknown,) = provenance.complaints("steps", [{}])
    assert "1 rows do not say" in unknown


def test_what_has_to_be_measured_again_takes_as_long_as_before(tmp_path, monkeypatch):
    monkeypatch.setattr(everything, "RESULTS", tmp_path)
    stock = {"release": "2.13.0", "code": provenance.STOCK}
    row = {"set": "full", "took": 120.0, **stock}
    rows = [{**row, "error": "gone"}, row]
    (tmp_path / "compare.json").write_text(json.dumps({"measured": rows}))
    said = everything.estimate(["compare", "steps"], "project")
    assert said.startswith("about 60 s for") and said.endswith("known of steps")


def test_the_options_are_those_that_torch_has():
    assert tuple(GPUS) == options.GPUS
    for name in everything.QUESTIONS:
        benchmark = importlib.import_module(f"benchmarks.{name}")
        assert isinstance(benchmark.NETS, dict) == (
            name in (*options.IN_SETS, "compare")
        )
        nets = benchmark.NETS if name in options.IN_SETS else {}
        for of in nets.keys() & {*options.SETS}:
            found = {catalogue.set_of(n) for n in nets[of] if n not in PROGRAMS}
            assert found == {of}


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


# ---------------------------------------------------------------------- unasked


def test_a_net_that_holds_more_than_with_the_wheel_is_harmed():
    stock = {"peak": 1000, "bits": "same"}
    row = {"net": "mine", "set": "project", "device": plans.RUN, "kind": "training"}

    def failing(**other):
        rows = [{**row, "stock": stock, "installed": {**stock, **other}}]
        marks = [mark for mark in unasked.judged(rows) if not mark.passed]
        assert "mine" in unasked.page(
            {
                "measured": rows,
                "environment": {"torch": "", "python": "", "system": ""},
            }
        )
        return [(mark.what.split(":")[0], mark.enforced) for mark in marks]

    assert failing(peak=1000) == failing(peak=600) == []
    assert failing(peak=1002) == [("training", True)]
    assert failing(bits="other") == [("losses and gradients the same bits", True)]
