"""What the replay of inductor's wrappers and the judgement of schedules say."""

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import blocks, bounds, nets, pages, replay, schedule, tracing
from benchmarks.architectures import Shape


pytestmark = pytest.mark.usefixtures("alone")


def failed(rows):
    return [mark.what for mark in schedule.judged(rows) if not mark.passed]


def test_a_replay_for_the_cpu_is_what_its_allocator_notes():
    task = {"net": "mlp-dropout", "kind": "allocator", "device": "cpu"}
    row = {**task, **schedule.measure(task)}
    assert not failed([row])
    row["replayed"] += 1000
    assert failed([row])


@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")
def test_a_schedule_for_a_gpu(monkeypatch):
    """A GPU that need not be there: what the two ends hold and take."""
    monkeypatch.setattr(schedule, "DRAWN", "vit")
    task = {"net": "vit", "kind": "graph", "device": "h100", "budgets": [1.0, 0.0]}
    most, least = schedule.measure(task)["steps"]
    assert least["peak"] < most["peak"] and least["flops"] > most["flops"]
    assert least["peak"] == pytest.approx(least["predicted"], rel=1e-3)
    assert least["peak"] <= least["allowed"] and least["compiled"] >= 1
    assert max(least["curve"]) == least["peak"]
    gpu = replay.GPUS["h100"]
    assert most["flops"] / gpu.flops_per_s < most["seconds"] < least["seconds"]


def test_the_roofline_of_kernels_and_operators():
    """A product is bound by its flops; a kernel's view counts its own bytes, once."""
    gpu = replay.GPUS["h100"]
    x = torch.empty(4096, 4096, dtype=torch.bfloat16)
    mode = nets.FakeTensorMode(allow_non_fake_inputs=True)
    with mode, replay._Roofline(gpu) as meter:
        y = x @ x.t()
        product, meter.seconds = meter.seconds, 0.0
        replay._Kernel().run(y, y, y[:1024].expand(1024, 4096), 7, stream=0)
    assert product == 2 * 4096**3 / gpu.flops_per_s
    assert meter.seconds == pytest.approx(1.25 * y.nbytes / gpu.bytes_per_s)


def small(monkeypatch, kind, *budgets):
    """What is measured of a net of a few layers, by inductor for the CPU."""
    net = nets.decoder("x", Shape(layers=1, tokens=32))
    monkeypatch.setitem(nets.NETS, net.name, net)
    task = {"net": net.name, "kind": kind, "device": "cpu", "budgets": budgets}
    return schedule.measure(task)["steps"]


def test_upstreams_budgets_are_scheduled_once_for_each_plan(monkeypatch):
    budgets = (1.0, 0.5, 0.25, 0.0)
    steps = small(monkeypatch, "upstream", *budgets)
    plans = [step["budgets"] for step in steps]
    assert [b for plan in plans for b in plan] == [*budgets]
    assert 1 < len({step["flops"] for step in steps}) == len(plans)
    *_, budget = plans[-2]
    (wanted,) = small(monkeypatch, "upstream", budget)
    assert (steps[-2]["peak"], steps[-2]["flops"]) == (wanted["peak"], wanted["flops"])


@pytest.mark.parametrize("kind", ["blocks", "whole", "bytes"])
def test_a_plan_says_what_is_replayed(monkeypatch, kind):
    (step,) = small(monkeypatch, kind, 0.0)
    assert step["predicted"] == pytest.approx(step["peak"], rel=0.02)
    assert step["peak"] <= step["allowed"] and step["flops"] and step["compile_s"] > 0


def test_a_warning_has_both_numbers():
    with schedule.warnings_noted() as said:
        Peak = tracing.overlay("decision").Peak
        Peak(allowed=10, predicted=10, floor=10, fastest=20).warn_if_over()
        assert not said
        Peak(allowed=9, predicted=10, floor=10, fastest=20).warn_if_over()
    assert len(said) == 1 and "9 bytes are allowed" in said[0]


def rows():
    """As if a net's plans, for a GPU, were all that one can ask for."""
    step = {"peak": 100, "allowed": 100, "predicted": 100, "flops": 8, "seconds": 4.0}
    less = {**step, "peak": 50, "allowed": 50, "predicted": 50}
    row = {"set": "second", "net": "x", "device": "h100"}
    for kind in ("upstream", *schedule.OURS):
        ends = [{"budget": 1.0, **step}, {"budget": 0.0, **less}]
        yield {**row, "kind": kind, "steps": ends}


@pytest.mark.parametrize(
    "kind, entry, value, wrong",
    [
        ("graph", "peak", 49, []),
        ("graph", "allowed", 49, ["over what is allowed", "plans within what is"]),
        ("graph", "allowed", 49.9, ["plans within what is allowed"]),
        ("blocks", "predicted", 52, ["predictions of StepBudgets within 2%"]),
        ("bytes", "allowed", 49, ["limits in bytes kept"]),
        ("whole", "allowed", 99, ["plans within what is allowed"]),
        ("upstream", "peak", 49, ["lowest peak", "lowest peak", "lowest peak"]),
        ("whole", "flops", 9, ["flops / upstream's"]),
        ("blocks", "seconds", 5.0, ["roofline time / upstream's"]),
    ],
)
def test_what_is_off_is_seen(kind, entry, value, wrong):
    measured = list(rows())
    least = next(row for row in measured if row["kind"] == kind)["steps"][-1]
    least[entry] = value
    # Of a plan that is far over a warning tells.
    least["warned"] = kind == "whole"
    marks = failed(measured)
    assert len(marks) == len(wrong)
    for what, begin in zip(marks, wrong):
        assert what.startswith(f"Second set of nets, NVIDIA H100 80GB HBM3: {begin}")


def test_without_cuda(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit):
        command.main("schedule", "--device", "h100")
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
