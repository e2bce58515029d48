"""What the replay of inductor's wrappers and the judgement of schedules say."""

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import blocks, bounds, nets, pages, replay, schedule
from benchmarks.architectures import Shape


pytestmark = pytest.mark.usefixtures("alone")


def test_a_replay_for_the_cpu_is_what_its_allocator_notes():
    found = schedule.measure({"net": "mlp-dropout", "kind": "allocator", "gpu": None})
    assert abs(found["replayed"] - found["allocated"]) <= schedule.SCALARS
    marks = list(schedule.judged([{"net": "x", "kind": "allocator", **found}]))
    assert [mark.passed for mark in marks] == [True]
    found["replayed"] += 1000
    marks = list(schedule.judged([{"net": "x", "kind": "allocator", **found}]))
    assert [mark.passed for mark in marks] == [False]


@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")
def test_a_schedule_for_a_gpu():
    """A GPU that need not be there: the peaks of the two ends, and their estimates."""
    task = {"net": "vit", "kind": "peak", "gpu": "h100", "_draw": True}
    most, least = schedule.measure({**task, "budgets": [1.0, 0.0]})["steps"]
    assert least["peak"] < most["peak"] and least["flops"] > most["flops"]
    for step in (most, least):
        assert step["estimated"] == pytest.approx(step["peak"], rel=0.1)
        assert max(step["curve"]) == step["peak"]
        assert len(step["live"]) == schedule.SHOWN
        assert all(live["line"].startswith("nets.py:") for live in step["live"])


@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")
def test_what_a_compile_tells_is_what_is_replayed():
    task = {"net": "mlp-dropout", "kind": "peak", "gpu": "h100"}
    more, less = schedule.measure({**task, "budgets": [0.5, 0.0]})["steps"]
    for step in (more, less):
        assert step["compiled"] >= 1
        assert step["peak"] <= 1.005 * step["allowed"]
    assert less["peak"] <= more["peak"] and less["flops"] > more["flops"]


def test_upstreams_budgets_are_scheduled_once_for_each_plan(monkeypatch):
    """As for a GPU, but by inductor for the CPU."""
    net = nets.decoder("x", Shape(layers=1, tokens=32))
    monkeypatch.setitem(nets.NETS, net.name, net)
    monkeypatch.setitem(replay.GPUS, "h100", None)
    task = {"net": net.name, "kind": "upstream", "gpu": "h100"}
    budgets = (1.0, 0.5, 0.25, 0.0)
    steps = schedule.measure({**task, "budgets": budgets})["steps"]
    plans = [step["budgets"] for step in steps]
    assert [b for plan in plans for b in plan] == [*budgets]
    assert 1 < len({step["flops"] for step in steps}) == len(plans)
    *_, budget = plans[-2]
    wanted = schedule.measure_plan(task, budget)
    assert (steps[-2]["peak"], steps[-2]["flops"]) == (wanted["peak"], wanted["flops"])


def test_without_cuda(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit):
        command.main("schedule")
    assert (
        "TORCH_VERSION=2.15.0 scripts/benchmark.sh schedule" in capsys.readouterr().err
    )
    with pytest.raises(RuntimeError, match="built without CUDA"):
        replay.compiled_for(replay.GPUS["h100"]).__enter__()


def test_a_net_measured_anew_replaces_its_rows(tmp_path):
    stored = [{"net": net, "kind": "peak", "steps": net} for net in "xyz"]
    new = [{"net": "y", "kind": kind, "steps": kind} for kind in ("peak", "saved")]
    path = tmp_path / "result.json"
    assert pages.merged(path, new, ("net", "kind")) == new
    pages.store(path, {"measured": stored})
    found = pages.merged(path, new, ("net", "kind"))
    assert [row["steps"] for row in found] == ["x", "peak", "z", "saved"]


def test_a_step_of_sharded_blocks(monkeypatch):
    """As for a GPU, but by inductor for the CPU: what is predicted is what is held."""
    name = nets.SHARDED.name
    small = nets.decoder(name, Shape(layers=2, tokens=512))
    monkeypatch.setitem(blocks.NETS, name, small)
    monkeypatch.setattr(nets, "SHARDED", small)
    monkeypatch.setitem(replay.GPUS, blocks.GPU, None)
    task = {"net": name, "backend": "inductor", "shares": (0.0,)}
    row = blocks.measure(task)
    (found,) = row["steps"]
    module, inputs = small.make()
    parameters = sum(p.nbytes for p in module.parameters())
    # A rank's share of the parameters and AdamW's two states.
    given = 3 * parameters / blocks.RANKS + sum(x.nbytes for x in inputs)
    assert found["predicted"] == pytest.approx(found["peak"], rel=0.05)
    assert found["given"] == pytest.approx(given, rel=0.01)


@pytest.mark.parametrize(
    "entry, value, wrong",
    [
        (None, None, ()),
        ("allowed", 49, ("peak / allowed",)),
        ("predicted", 60, ("predicted / measured",)),
        ("peak", 101, ("peak / allowed", "predicted / measured", "rises")),
    ],
)
def test_a_bound_that_is_not_kept_is_seen(entry, value, wrong):
    steps = [
        {"share": share, "peak": peak, "predicted": peak, "allowed": peak}
        for share, peak in ((1.0, 100), (0.0, 50))
    ]
    if entry:
        steps[-1][entry] = value
    plans = bounds.every({"x": steps})
    marks = [
        *bounds.bounds(plans, "operators", exact=True),
        *bounds.rising({"x": steps}, "rises"),
    ]
    failed = [mark.what for mark in marks if not mark.passed]
    assert len(marks) == 3 and len(failed) == len(wrong)
    assert all(what.startswith(begin) for what, begin in zip(failed, wrong))
