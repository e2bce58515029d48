"""capture and the benchmarks, on models of a few layers and instances of a few items."""

import gzip
import io
import json
import math
import sys

import benchmark_compare
import benchmark_compile
import benchmark_techniques
import capture
import corpus
import fresh
import nets
import pytest
import torch
from corpus import FOLDER
from rich.console import Console
from torch import nn
from upstream import untouched_partitioners


SIDE = 32
ROWS = 128
MATRIX = ROWS * SIDE * 4


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """One thread, a compile cache of its own, and nothing left of other tests."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


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


def test_capture_reproduces_an_instance_of_the_corpus(tmp_path):
    with gzip.open(FOLDER / "dlrm_dcn_fp32_b65536.json.gz", "rt") as file:
        stored = json.load(file)
    found = capture.capture(nets.NETS["dlrm-dcn"])
    assert found.keys() == stored.keys()
    # The graph differs in a few nodes that cost nothing.
    for key in stored.keys() - {"name", "notes", "joint_nodes", "denominator_gb"}:
        assert found[key] == stored[key], key
    assert found["denominator_gb"] == pytest.approx(stored["denominator_gb"])
    capture.write(found, tmp_path / "dlrm.json.gz")
    with gzip.open(tmp_path / "dlrm.json.gz", "rt") as file:
        assert json.load(file) == found


def test_capture_of_a_model_of_ones_own():
    """Eight products of one size; the last needs only its sigmoid's value."""
    found = capture.capture(nets.find(own(chain)))
    assert set(found["bytes"]) == {MATRIX}
    assert set(found["runtimes"]) == {2 * ROWS * SIDE * SIDE}
    assert found["target_table"] == ["aten.addmm.default"]
    assert len(found["bytes"]) == found["n_items"] == 8


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
        (f"{__name__}:nothing", "AttributeError: .* 'nothing'"),
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


def script(folder, body):
    path = folder / "measures.py"
    path.write_text(
        "import json, pathlib, sys, time\n"
        "task = json.loads(sys.argv[2])\n"
        f"{body}\n"
        "pathlib.Path(sys.argv[3]).write_text(json.dumps({'twice': 2 * task['x']}))\n"
    )
    return str(path)


def run(script, result=None, limits=fresh.Limits(30, 2), tasks=(1, 2)):  # noqa: B008
    pairs = [({"x": x}, {}) for x in tasks]
    return fresh.run(script, pairs, limits, result, Console(quiet=True))


def test_rows_of_fresh_processes(tmp_path):
    assert run(script(tmp_path, "")) == [{"x": 1, "twice": 2}, {"x": 2, "twice": 4}]


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
    ],
    ids=["time", "memory", "crash"],
)
def test_what_goes_wrong_is_a_row(tmp_path, body, limits, message):
    body = f"if task['x'] == 1: {body}"
    first, second = run(script(tmp_path, body), limits=limits)
    assert first == {"x": 1, "error": message}
    assert second in ({"x": 2, "twice": 4}, {"x": 2, "error": "took more than 0.5 s"})


def test_exception_in_a_measurement_is_its_row(tmp_path, monkeypatch):
    target = tmp_path / "row.json"
    task = json.dumps({"model": "llama-9", "budget": 0.5})
    monkeypatch.setattr(sys, "argv", ["script", fresh.CHILD, task, str(target)])
    assert fresh.is_child()
    assert fresh.answer(benchmark_compile.measure) == 1
    error = json.loads(target.read_text())["error"]
    assert error.startswith("ValueError: no model named 'llama-9'")


def test_interrupted_run_goes_on_where_it_stopped(tmp_path):
    """Each task leaves a line in a log: what is kept is not measured again."""
    log, result = tmp_path / "log", tmp_path / "result.json"
    path = script(tmp_path, f"print(task['x'], file=open({str(log)!r}, 'a'))")
    run(path, result, tasks=[1])
    rows = run(path, result, tasks=[1, 2])
    assert rows == [{"x": 1, "twice": 2}, {"x": 2, "twice": 4}]
    assert log.read_text().split() == ["1", "2"]
    fresh.finish(result, {"facts": 1}, rows)
    assert json.loads(result.read_text()) == {"environment": {"facts": 1}, "rows": rows}
    assert (tmp_path / "result.csv").read_text() == "x,twice\n1,2\n2,4\n"
    run(path, result, tasks=[1])
    assert log.read_text().split() == ["1", "2", "1"], "finished rows were kept"


def test_interrupt_loses_only_what_was_running(tmp_path):
    """The second task interrupts the run, the first time; its process is ended."""
    log, result = tmp_path / "log", tmp_path / "result.json"
    path = script(
        tmp_path,
        "import os, signal\n"
        f"log = pathlib.Path({str(log)!r})\n"
        "before = log.read_text() if log.exists() else ''\n"
        "log.write_text(before + f\"{task['x']} \")\n"
        "if task['x'] == 2 and '2' not in before:\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(60)",
    )
    with pytest.raises(KeyboardInterrupt):
        run(path, result, tasks=[1, 2, 3])
    with open(fresh.partial_file(result), "a") as file:
        file.write('{"key": "half a li')
    rows = run(path, result, tasks=[1, 2, 3])
    assert [row["twice"] for row in rows] == [2, 4, 6]
    assert log.read_text() == "1 2 2 3 "
    assert len(fresh.partial_file(result).read_text().splitlines()) == 3


def test_larger_instances_are_not_tried(tmp_path):
    """Of two solvers, one takes too long with two items: it is not asked for three."""
    path = script(tmp_path, "if task['x'] == 2: time.sleep(60)")
    tasks = [
        ({"solver": solver, "instance": "", "family": "growth", "n": n, "x": x}, {})
        for n, pair in ((1, (1, 1)), (2, (2, 1)), (3, (1, 1)))
        for solver, x in zip("ab", pair)
    ]
    limits, console = fresh.Limits(2, 2), Console(quiet=True)
    rows = fresh.run(path, tasks, limits, None, console, benchmark_compare.hopeless)
    assert [(row["solver"], row.get("error")) for row in rows] == [
        ("a", None),
        ("b", None),
        ("a", "took more than 2 s"),
        ("b", None),
        ("a", "not tried: with 2 items it took more than 2 s"),
        ("b", None),
    ]


def test_changed_script_measures_again(tmp_path):
    result = tmp_path / "result.json"
    run(script(tmp_path, ""), result, tasks=[1])
    changed = script(tmp_path, "task['x'] *= 10")
    assert run(changed, result, tasks=[1]) == [{"x": 1, "twice": 20}]


# --------------------------------------------------------------- techniques


def technique(name, budget=None, function=chain):
    torch._dynamo.reset()
    return benchmark_techniques.measure(
        {
            "technique": name,
            "budget": budget,
            "model": own(function),
            "device": "cpu",
            "backend": "aot_eager_decomp_partition",
            "modules": benchmark_techniques.MODULES,
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
        ("set_to_none=False", None, 8 * MATRIX, 0),
        ("compile, exact", 0.55, 4 * MATRIX, 4),
        ("compile, exact", 0.0, 0, 8),
    ],
)
def test_technique_saves_and_recomputes(name, budget, saved, recomputed):
    row = technique(name, budget)
    assert row["saved_bytes"] == saved
    assert row["recomputed_flops"] == recomputed * PRODUCT
    assert row["gradient_error"] <= benchmark_techniques.TOLERANCE
    assert not benchmark_techniques.faults(
        [{"technique": name, "budget": budget, **row}]
    )


def test_autocast_and_inference(eager_row):
    assert technique("autocast bf16")["saved_bytes"] < eager_row["saved_bytes"]
    row = technique("inference mode")
    assert row["peak_without_given_bytes"] < 4 * MATRIX
    assert row["saved_bytes"] is None


def test_technique_that_cannot_run_says_why():
    row = technique("checkpoint", function=one_product)
    assert "no submodule's name is matched by" in row["skipped"]


def test_wrong_gradients_are_a_fault():
    row = {"technique": "checkpoint", "budget": None, "gradient_error": float("nan")}
    row["gradient_error_float64"] = 2e-6
    (fault,) = benchmark_techniques.faults([row])
    assert "gradients differ" in fault


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
    assert row["gradient_error"] > benchmark_techniques.TOLERANCE
    assert row["gradient_error_float64"] <= benchmark_techniques.TOLERANCE_FLOAT64
    named = {"technique": "compile, exact", "budget": 1.0, **row}
    assert not benchmark_techniques.faults([named])
    named["gradient_error_float64"] = 1e-3
    assert benchmark_techniques.faults([named])


# ------------------------------------------------------------------ compare


def compared(solver, family="grid", n=8, runs=20, instance="", seconds=10.0):
    task = {"solver": solver, "instance": instance, "family": family, "n": n}
    return benchmark_compare.measure({**task, "runs": runs, "seconds": seconds})


@pytest.mark.parametrize("solver", ["exact", "OR-tools", "HiGHS"])
@pytest.mark.parametrize("family", ["grid", "growth"])
def test_exact_solvers_agree(solver, family):
    row = compared(solver, family)
    assert row["calls"] == 20
    assert row["over_budget"] == 0
    assert row["worst_value"] == pytest.approx(1, abs=1e-9)
    assert 0 < row["quartile_1_s"] <= row["median_s"] <= row["quartile_3_s"]
    assert row["quartile_3_s"] <= row["worst_s"]


def test_answers_over_the_budget_are_counted():
    """At some budgets of this net; the true sizes decide."""
    name = "convnext_l_bf16_b64"
    net = benchmark_compare.net_named(name)
    solve = benchmark_compare.SOLVERS["upstream Hirschberg"](10)
    spent = [
        math.fsum(net.memory[i] for i in solve(net.memory, net.runtimes, b)) / b - 1
        for b in benchmark_compare.CORPUS_BUDGETS
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
    assert benchmark_compare.upstream_knee(memory, runtimes, 0.5) == wanted


def test_value_beyond_the_bound_is_an_error(monkeypatch):
    monkeypatch.setattr(benchmark_compare, "bound", lambda task, run: 1e-3)
    with pytest.raises(RuntimeError, match="of what was proven to be the most"):
        compared("exact")


def test_table_plot_and_faults_of_a_comparison(tmp_path):
    rows = []
    for solver in ("exact", "upstream greedy"):
        task = {"solver": solver, "instance": "growth n=8", "family": "growth"}
        rows.append({**task, "n": 8, **compared(solver, "growth")})
        rows.append({**task, "n": 9, "error": "took more than 1 s"})
    assert benchmark_compare.faults(rows) == ["growth n=8: took more than 1 s"]
    worse = {**rows[0], "worst_value": 0.99}
    (fault,) = benchmark_compare.faults([worse])
    assert "0 of 20 answers are over the budget, the least value is 0.99" in fault
    drawn = []
    for _ in range(2):
        benchmark_compare.plot(rows, fresh.environment(), tmp_path / "compare.json")
        drawn.append((tmp_path / "compare.svg").read_bytes())
    assert drawn[0] == drawn[1] and b"<svg" in drawn[0]
    console = Console(width=140, file=io.StringIO())
    console.print(benchmark_compare.table(rows))
    assert "took more than 1 s" in console.file.getvalue()


# ------------------------------------------------------------------ compile


@pytest.fixture(scope="module")
def compile_row():
    return benchmark_compile.measure({"model": own(chain), "budget": 0.5})


def test_parts_of_a_compile_add_up(compile_row):
    row = compile_row
    parts = [row[part] for part in benchmark_compile.PARTS]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(row["total_s"])
    assert row["min_cuts"] == 4
    assert row["items"] == 8
    assert row["used"] <= 0.5 and not row["over"]
    assert row["peak_bytes"] >= row["start_bytes"] > 10**8


def test_tables_and_plots_of_both(tmp_path, eager_row, compile_row):
    facts = fresh.environment()
    rows = [
        {"model": "m", "variant": "before", "budget": 0.5, "run": run, **compile_row}
        for run in range(3)
    ]
    rows.append({"model": "m", "variant": "after", "budget": 0.5, "error": "blew up"})
    rows = benchmark_compile.medians(rows)
    assert [row["runs"] for row in rows] == [3, 0]
    assert benchmark_compile.faults(rows) == ["m, after: blew up"]
    benchmark_compile.plot(rows, facts, tmp_path / "compile.json")
    named = [{"technique": "eager", "budget": None, **eager_row}]
    benchmark_techniques.plot(
        named, {**facts, "model": "m"}, tmp_path / "techniques.json"
    )
    for name in ("compile", "techniques"):
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    console = Console(width=140, file=io.StringIO())
    console.print(benchmark_compile.table(rows, "title"))
    console.print(benchmark_techniques.table(named, "title"))
    printed = console.file.getvalue()
    assert "blew up" in printed and "eager" in printed


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (benchmark_compile, ["--budget", "1"], "1 is not between 0 and 1"),
        (benchmark_techniques, ["--model", "llama-9"], "no model named 'llama-9'"),
        (benchmark_compile, ["--json", "/no/such/file"], "there is no folder /no/such"),
        (benchmark_techniques, ["--budgets", "2"], "2 is not between 0 and 1"),
        (benchmark_techniques, ["--modules", "("], "unterminated subpattern"),
        (benchmark_techniques, ["--repeats", "0"], "0 is less than 1"),
        (benchmark_techniques, ["--techniques", "magic"], "invalid choice: 'magic'"),
        (benchmark_compare, ["--solvers", "magic"], "invalid choice: 'magic'"),
        (benchmark_compare, ["--largest", "0"], "0 is less than 1"),
        (benchmark_compare, ["--json", "/no/such/file"], "there is no folder /no/such"),
        (capture, [], "a model is needed"),
    ],
)
def test_wrong_options_are_refused(main, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
