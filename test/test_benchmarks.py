"""capture and the benchmarks, on models of a few layers and instances of a few items."""

import gzip
import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import (
    capture,
    compare,
    compile,
    corpus,
    fresh,
    nets,
    results,
    techniques,
)
from benchmarks.training import relative_error
from torch import nn
from upstream import untouched_partitioners


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


def no_loss():
    return nn.Linear(SIDE, SIDE), (torch.randn(ROWS, SIDE),)


def one_product():
    return nn.Linear(SIDE, 1), (torch.randn(1, SIDE),)


def not_a_pair():
    return 3


def own(function):
    return f"{__name__}:{function.__name__}"


# ------------------------------------------------------------------ capture


def test_capture_of_a_model_of_ones_own(tmp_path):
    """Eight products of one size; the last needs only its sigmoid's value."""
    found = capture.capture(nets.find(own(chain)))
    with gzip.open(corpus.FOLDER / "dlrm_dcn_fp32_b65536.json.gz", "rt") as file:
        assert found.keys() == json.load(file).keys()
    assert found["bytes"] == [MATRIX] * 8
    assert found["runtimes"] == [2 * ROWS * SIDE * SIDE] * 8
    assert found["targets"] == [0] * 8
    assert found["target_table"] == ["aten.addmm.default"]
    # The input and all parameters; what the fastest plan saves of them (no bias, not
    # the first weight), and eight sigmoids' values.
    assert found["min_act_bytes"] == MATRIX + 8 * (SIDE + 1) * SIDE * 4
    assert found["max_act_bytes"] == 9 * MATRIX + 7 * SIDE * SIDE * 4
    capture.write(found, tmp_path / "chain.json.gz")
    with gzip.open(tmp_path / "chain.json.gz", "rt") as file:
        assert json.load(file) == found


def test_capture_finds_the_seeds_of_random_operators():
    """As inductor's graph has them: one seed of eight bytes for each dropout."""
    found = capture.capture(nets.NETS["mlp-dropout"])
    seed = found["target_table"].index("prims.inductor_lookup_seed.default")
    assert found["targets"].count(seed) == 6


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("llama-9", "no model named 'llama-9'; there are llama-8"),
        (
            "no_such_module:make",
            "ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (f"{__name__}:not_a_pair", r"returned int, not \(model, inputs\)"),
        (f"{__name__}:no_loss", r"Linear returned a tensor of shape \[128, 32\]"),
    ],
)
def test_capture_says_what_is_wrong_with_a_model(spec, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["capture", spec])
    assert capture.main() == 1
    printed = capsys.readouterr().err
    assert printed.startswith("capture: ")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(printed)


# ------------------------------------------------------------- fresh process


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """``measure(body, ...)``: run a module of that body, which may change the task."""
    monkeypatch.syspath_prepend(tmp_path)

    def run(body, tasks=(1, 2), result=None, limits=fresh.Limits(30, 2)):  # noqa: B008
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        (tmp_path / "measures.py").write_text(
            "import os, pathlib, signal, time\ndef measure(task):\n"
            f"{lines}    return {{'twice': 2 * task['x']}}\n"
        )
        tasks = [x if isinstance(x, dict) else {"x": x} for x in tasks]
        return fresh.run("measures", tasks, limits, result)

    return run


@pytest.mark.parametrize(
    ("body", "limits", "message"),
    [
        ("time.sleep(60)", fresh.Limits(0.5, 2), "took more than 0.5 s"),
        (
            "waste = bytes(range(256)) * 2**20; time.sleep(60)",
            fresh.Limits(30, 0.1),
            "needed more than 0.1 GB",
        ),
        (
            "raise SystemExit('broken')",
            fresh.Limits(30, 2),
            "ended with status 1: broken",
        ),
        ("raise ValueError('odd')", fresh.Limits(30, 2), "ValueError: odd"),
    ],
    ids=["time", "memory", "crash", "exception"],
)
def test_what_goes_wrong_is_a_row(measure, body, limits, message):
    body = f"if task['x'] == 1: {body}"
    first, second = measure(body, limits=limits)
    assert first == {"x": 1, "error": message}
    assert second in ({"x": 2, "twice": 4}, {"x": 2, "error": "took more than 0.5 s"})


def test_untouched_tasks_run_on_the_wheel(measure):
    tasks = [{"torch": "patched"}, {"torch": fresh.UNTOUCHED}]
    body = "from importlib.util import find_spec\nreturn {'file': find_spec('torch').origin}"
    patched, wheel = measure(body, tasks)
    assert patched["file"] == torch.__file__
    assert Path(wheel["file"]).is_relative_to(sys.prefix)
    assert not os.path.samefile(wheel["file"], torch.__file__)


def test_interrupted_run_goes_on_where_it_stopped(measure, tmp_path):
    """Each task leaves a line in a log: what is kept is not measured again."""
    log, result = tmp_path / "log", tmp_path / "result.json"
    body = f"print(task['x'], file=open({str(log)!r}, 'a'))"
    measure(body, [1], result)
    with open(fresh.partial_file(result), "a") as file:
        file.write('{"key": "half a li')
    rows = measure(body, [1, 2], result)
    assert rows == [{"x": 1, "twice": 2}, {"x": 2, "twice": 4}]
    assert log.read_text().split() == ["1", "2"]
    assert len(fresh.partial_file(result).read_text().splitlines()) == 2
    (changed,) = measure("task['x'] *= 10", [1], result)
    assert changed["twice"] == 20, "another module's rows were kept"
    fresh.finish(result, {"rows": rows}, lambda data: str(data["rows"]))
    assert json.loads(result.read_text()) == {"rows": rows}
    measure(body, [1], result)
    assert log.read_text().split() == ["1", "2", "1"], "finished rows were kept"


def test_interrupt_loses_only_what_was_running(measure, tmp_path):
    """The second task interrupts the run, the first time; its process is ended."""
    log, result = tmp_path / "log", tmp_path / "result.json"
    body = (
        f"log = pathlib.Path({str(log)!r})\n"
        "before = log.read_text() if log.exists() else ''\n"
        "log.write_text(before + f\"{task['x']} \")\n"
        "if task['x'] == 2 and '2' not in before:\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(60)"
    )
    # A shell starts what runs in the background with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            measure(body, [1, 2, 3], result)
    finally:
        signal.signal(signal.SIGINT, before)
    rows = measure(body, [1, 2, 3], result)
    assert [row["twice"] for row in rows] == [2, 4, 6]
    assert log.read_text() == "1 2 2 3 "


def test_larger_instances_are_not_tried():
    rows = [
        {"solver": "a", "family": "growth", "n": 1},
        {"solver": "a", "family": "growth", "n": 2, "error": "took more than 2 s"},
        {"solver": "b", "family": "growth", "n": 2, "error": "RuntimeError: broken"},
    ]
    larger = {"solver": "a", "family": "growth", "n": 3}
    reason = "not tried: with 2 items it took more than 2 s"
    assert compare.hopeless(larger, rows) == reason
    assert compare.hopeless({**larger, "solver": "b"}, rows) is None
    assert compare.hopeless({**larger, "family": "grid"}, rows) is None
    assert compare.hopeless({**larger, "family": "corpus"}, rows) is None


# --------------------------------------------------------------- techniques


def technique(name, budget=None, function=chain):
    torch._dynamo.reset()
    return techniques.measure(
        {
            "technique": name,
            "budget": budget,
            "model": own(function),
            "device": "cpu",
            "backend": "aot_eager_decomp_partition",
            "modules": techniques.MODULES,
            "repeats": 1,
        }
    )


@pytest.fixture(scope="module")
def eager_row():
    return technique("eager")


# Of each block: its input, and the inner sigmoid; the last block's outer one as well.
EAGER = 9 * MATRIX
PRODUCT = 2 * ROWS * SIDE * SIDE


def test_eager_step_by_kind(eager_row):
    parameters = 8 * (SIDE * SIDE + SIDE) * 4
    assert eager_row["parameter_bytes_at_peak"] == parameters
    assert eager_row["optimizer_bytes_at_peak"] == 2 * parameters + 16 * 4
    assert eager_row["input_bytes_at_peak"] == MATRIX
    assert (
        eager_row["saved_bytes"] == EAGER - MATRIX
    )  # The first input is no activation.
    assert eager_row["forward_flops"] == 8 * PRODUCT
    assert eager_row["recomputed_flops"] == 0
    assert eager_row["gradient_error"] == 0


@pytest.mark.parametrize(
    ("name", "budget", "saved", "recomputed"),
    [
        # The inputs of three blocks and the last block's value; all products again but
        # the last of each block, whose value nobody needs.
        ("checkpoint", None, 4 * MATRIX, 4),
        ("selective checkpoint", None, 12 * MATRIX, 0),
        ("compile, exact", 0.55, 4 * MATRIX, 4),
        ("compile, exact", 0.0, 0, 8),
    ],
)
def test_technique_saves_and_recomputes(name, budget, saved, recomputed):
    row = technique(name, budget)
    assert row["saved_bytes"] == saved
    assert row["recomputed_flops"] == recomputed * PRODUCT
    assert row["gradient_error"] <= techniques.TOLERANCE
    assert not techniques.faults([{"technique": name, "budget": budget, **row}])


def test_autocast_and_inference(eager_row):
    assert technique("autocast bf16")["saved_bytes"] < eager_row["saved_bytes"]
    row = technique("inference mode")
    assert row["peak_without_given_bytes"] < 4 * MATRIX
    assert row["saved_bytes"] is None


def test_technique_that_cannot_run_says_why():
    row = technique("checkpoint", function=one_product)
    assert "no submodule's name is matched by" in row["skipped"]


def magnifies_rounding():
    """A batch norm over values that hardly differ, behind a bias without a gradient."""
    module = nn.Sequential(
        nn.Linear(SIDE, SIDE), nn.BatchNorm1d(SIDE, eps=1e-20), nn.Linear(SIDE, 1)
    )
    x = 1 + 1e-3 * torch.randn(4, SIDE)
    return Loss(module), (x,)


class Loss(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x).square().sum()


def test_rounding_is_told_from_wrong_gradients():
    row = technique("compile, exact", 1.0, magnifies_rounding)
    assert row["gradient_error"] > techniques.TOLERANCE
    assert row["gradient_error_float64"] <= techniques.TOLERANCE_FLOAT64
    named = {"technique": "compile, exact", "budget": 1.0, **row}
    assert not techniques.faults([named])
    named.update(gradient_error=float("nan"), gradient_error_float64=1e-3)
    (fault,) = techniques.faults([named])
    assert "gradients differ from eager mode's by 1e-03 in float64" in fault


@pytest.mark.parametrize("wrong", [float("nan"), 1.001])
def test_an_error_in_a_small_gradient_is_seen(wrong):
    large, small = torch.tensor([1e3, -2e3]), torch.tensor([3.0, 4.0])
    assert relative_error([large, small], [large, small]) == 0
    error = relative_error([large, small * wrong], [large, small])
    assert not error <= 9e-4
    # What is next to nothing beside the others is rounding.
    assert relative_error([large, small * 1e-6], [large, small * 2e-6]) < 1e-5


# ------------------------------------------------------------------ compare


def compared(solver, family="grid", n=8, runs=20, instance="", seconds=10.0):
    task = {"solver": solver, "instance": instance, "family": family, "n": n}
    return compare.measure({**task, "runs": runs, "seconds": seconds})


@pytest.mark.parametrize(
    ("solver", "family"),
    [("exact", "growth"), ("OR-tools", "growth"), ("HiGHS", "grid")],
)
def test_exact_solvers_agree(solver, family):
    row = compared(solver, family)
    assert row["calls"] == 20
    assert row["over_budget"] == 0
    assert row["worst_value"] == pytest.approx(1, abs=1e-9)
    assert 0 < row["median_s"] <= row["worst_s"]


def test_answers_over_the_budget_are_counted():
    """At some budgets of this net; the true sizes decide."""
    name = "convnext_l_bf16_b64"
    net = compare.net_named(name)
    solve = compare.SOLVERS["upstream Hirschberg"](10)
    spent = [
        math.fsum(net.memory[i] for i in solve(net.memory, net.runtimes, b)) / b - 1
        for b in compare.CORPUS_BUDGETS
    ]
    over = [overspend for overspend in spent if overspend > 0]
    assert 0 < len(over) < 4
    row = compared("upstream Hirschberg", "corpus", 159, 8, name)
    assert row["over_budget"] == 2 * len(over)
    assert row["worst_overspend"] == pytest.approx(max(over))
    mine = compared("exact", "corpus", 159, 8, name)
    assert (mine["over_budget"], mine["worst_value"]) == (0, 1)


def test_time_for_calls_is_limited():
    assert compared("exact", runs=10**9, seconds=0.05)["calls"] < 10**5


def test_memory_of_a_table_is_seen():
    """A float32 for each row and quantum, beside which nothing else counts."""
    budget = corpus.unnormalised(60, seed=0)[2]
    grown = compared("upstream dp", n=60, runs=1)["grown_bytes"]
    assert grown == pytest.approx(4 * 61 * 10_000 * budget, rel=0.3)


def test_knee_is_what_upstream_dispatches_to():
    memory, runtimes, _ = corpus.unnormalised(12, seed=3)
    memory = [size / sum(memory) for size in memory]
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(12)]
    with torch._functorch.config.patch(
        activation_memory_budget_solver="dynamic_memory_budget_dp"
    ):
        dispatch = untouched_partitioners()._optimize_runtime_with_given_memory
        wanted = dispatch(graph, memory, runtimes, 0.5, None, nodes)[1]
    assert compare.upstream_knee(memory, runtimes, 0.5) == wanted


def test_value_beyond_the_bound_is_an_error(monkeypatch):
    monkeypatch.setattr(compare, "bound", lambda task, run: 1e-3)
    with pytest.raises(RuntimeError, match="of what was proven to be the most"):
        compared("exact")


def test_page_plot_and_faults_of_a_comparison(tmp_path):
    rows = []
    for solver in ("exact", "upstream greedy"):
        task = {"solver": solver, "instance": "growth n=8", "family": "growth"}
        rows.append({**task, "n": 8, "runs": 20, **compared(solver, "growth")})
        rows.append({**task, "n": 9, "runs": 20, "error": "took more than 1 s"})
    assert compare.faults(rows) == ["growth n=8: took more than 1 s"]
    worse = {**rows[0], "worst_value": 0.99}
    (fault,) = compare.faults([worse])
    assert "0 of 20 answers are over the budget, the least value is 0.99" in fault
    facts = {**results.environment("scipy", "ortools"), "limit_s": 1, "limit_gb": 1}
    data = {"environment": {**facts, "growth_budget": 0.5}, "rows": rows}
    lines = compare.page(data).splitlines()
    (exact,) = (line for line in lines if line.startswith("| exact"))
    assert exact.endswith("| took more than 1 s | 0 of 20 |  | 0 |")
    drawn = []
    for _ in range(2):
        compare.plot(data, tmp_path / "compare.json")
        drawn.append((tmp_path / "compare.svg").read_bytes())
    assert drawn[0] == drawn[1] and b"<svg" in drawn[0]


# ------------------------------------------------------------------ compile


def test_parts_of_a_compile_add_up():
    row = compile.measure({"model": own(chain), "budget": 0.5})
    parts = [row[part] for part in compile.PARTS]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(row["total_s"])
    assert row["min_cuts"] == 4
    assert row["items"] == 8
    assert row["used"] <= 0.5 and not row["over"]
    assert row["peak_bytes"] >= row["start_bytes"] > 10**8
    rows = [
        {"model": "m", "variant": "before", "budget": 0.5, **row, "total_s": seconds}
        for seconds in (1, 3, 2)
    ]
    rows.append({"model": "m", "variant": "after", "budget": 0.5, "error": "blew up"})
    rows = compile.medians(rows)
    assert [row["runs"] for row in rows] == [3, 0]
    assert rows[0]["total_s"] == 2
    assert compile.faults(rows) == ["m, after: blew up"]
    data = {"environment": results.environment(), "rows": rows}
    assert "| m | after | blew up |" in compile.page(data)


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (compile, ["--budget", "2"], "2 is not between 0 and 1"),
        (techniques, ["--model", "llama-9"], "no model named 'llama-9'"),
        (compile, ["--json", "/no/such/file"], "there is no folder /no/such"),
        (techniques, ["--modules", "("], "unterminated subpattern"),
        (techniques, ["--repeats", "0"], "0 is less than 1"),
    ],
)
def test_wrong_options_are_refused(main, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
