"""What the replay of inductor's wrappers and the judgement of schedules say."""

import argparse

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import bounds, kernels, nets, plans, replay
from benchmarks.architectures import Shape
from benchmarks.ways import compiled, Training


pytestmark = pytest.mark.usefixtures("alone")


def failed(rows):
    return [mark.what for mark in kernels.judged(rows) if not mark.passed]


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


def small(monkeypatch, kind, *budgets, device="cpu"):
    """What is measured of a net of one layer."""
    net = nets.language("x", Shape(layers=1, tokens=32))
    monkeypatch.setitem(nets.NETS, net.name, net)
    task = {"net": net.name, "kind": kind, "device": device, "budgets": budgets}
    return kernels.measure(task)["steps"]


def test_upstreams_budgets_are_scheduled_once_for_each_plan(monkeypatch):
    budgets = [1.0, 0.25, 0.0]
    steps = small(monkeypatch, "upstream", *budgets)
    assert [b for step in steps for b in step["budgets"]] == budgets
    assert 1 < len({step["flops"] for step in steps}) == len(steps)


class Scaled(torch.nn.Module):
    """Each forward makes a constant of its graph, which the backward needs, too."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return (torch.tensor([2.0]) * (x @ self.weight).sin()).sum()


def test_graphs_of_fakes_may_have_constants():
    net = nets.Net("scaled", lambda: (Scaled(), (torch.ones(4, 8),)))
    with plans.backend_of(plans.RUN) as backend:
        made = plans.Plans(net, plans.RUN, backend, True)
        steps = [*made.upstreams([0.5], False), *made.asked("graph", [{"share": 1.0}])]
    assert len(steps) == 2 and all(step["peak"] > 0 for step in steps)


@pytest.mark.parametrize(
    "kind, device",
    [("blocks", "cpu"), ("graph", "h100"), ("blocks", "h100")],
)
def test_a_plan_says_what_is_replayed(monkeypatch, kind, device):
    if device != "cpu" and torch.version.cuda is None:
        pytest.skip("torch was built without CUDA")
    (step,) = small(monkeypatch, kind, 0.0, device=device)
    assert step["predicted"] == pytest.approx(step["peak"], rel=0.02)
    assert step["warned"] == (step["peak"] > step["allowed"])
    assert not step["warned"]


@pytest.mark.parametrize(
    "kind, entry, value, wrong",
    [
        ("graph", "peak", 49, []),
        ("graph", "peak", 101, ["peak, above", "plans", "peak / at", "lowest"]),
        ("graph", "allowed", 49.9, ["plans over"]),
        ("graph", "off_budget_1", 1e-12, ["gradients against"]),
        ("blocks", "predicted", 52, ["predicted"]),
        ("bytes", "allowed", 49, ["peak, above", "plans over"]),
        ("upstream", "peak", 49, ["lowest peak"] * 2),
        ("blocks", "seconds", 5.0, ["time at no"]),
        ("upstream", "seconds", 3.9, ["time at no"] * 2),
    ],
)
def test_what_is_off_is_seen(kind, entry, value, wrong):
    rows = []
    for each in ("upstream", *bounds.OURS, "bytes"):
        seconds = 4.5 if each == "upstream" else 4.0
        ends = [{"budget": b, "flops": 8, "seconds": seconds} for b in (1.0, 0.0)]
        for step, peak in zip(ends, (100, 50)):
            step.update(dict.fromkeys(("peak", "allowed", "predicted"), peak))
        row = {"set": "second", "net": "x", "device": "h100", "kind": each}
        rows.append({**row, "steps": ends})
        ends[1].update({entry: value} if each == kind else {})
    marks = failed(rows)
    assert len(marks) == len(wrong)
    assert all(map(str.startswith, marks, wrong))


def test_limits_are_upstreams_peaks_where_budgets_plans_cost_more():
    row = {"set": "project", "net": "x", "device": "h100"}
    upstream = [{"budgets": [1.0], "peak": 90, "flops": 10}]
    upstream += [{"budgets": [0.9, 0.8], "peak": 80, "flops": 12}]
    graph = [{"budget": 1.0, "peak": 90, "flops": 8}]
    graph += [{"budget": 0.5, "peak": 70, "flops": 13}]
    rows = [{**row, "kind": "upstream", "steps": upstream}]
    rows += [{**row, "kind": "graph", "steps": graph}]
    (held,) = bounds.cheaper(rows, net="x", device="h100")
    assert held == {"budgets": [0.9, 0.8], "peak": 80}
    assert any("compute at no higher" in what for what in failed(rows))
    steps = [{**held, "allowed": 80, "peak": 79, "flops": 11}]
    rows += [{**row, "kind": "bytes", "steps": steps}]
    assert not any("compute at no higher" in what for what in failed(rows))
    # Measured anew they are the same.
    assert bounds.cheaper(rows, net="x", device="h100") == [held]
    # Where no plan of upstream's costs less, there is none to measure.
    asked = argparse.Namespace(device="cpu", check=False, nets=["vit"])
    assert "bytes" not in {task["kind"] for task in kernels.tasks(asked, rows)}


def test_without_cuda(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit):
        command.main("kernels", "--device", "h100")
    assert (
        "TORCH_VERSION=2.15.0 scripts/benchmark.sh kernels" in capsys.readouterr().err
    )
    with pytest.raises(RuntimeError, match="built without CUDA"):
        replay.compiled_for(replay.GPUS["h100"]).__enter__()


def test_a_step_of_sharded_blocks(monkeypatch):
    """As for a GPU, but by inductor for the CPU: what is predicted is what is held."""
    small = nets.language(nets.SHARDED.name, Shape(layers=2, tokens=512))
    monkeypatch.setitem(nets.NETS, small.name, small)
    task = {"net": small.name, "kind": "blocks", "device": "cpu", "budgets": (0.0,)}
    (found,) = kernels.measure(task)["steps"]
    assert found["predicted"] == pytest.approx(found["peak"], rel=0.05)
    with plans.fake_ranks(kernels.RANKS):
        way = compiled("aot_eager")
        training = plans.sharded(Training(small, blocks=way, fake=True))
        given = sum(each.to_local().nbytes for each in training.parameters)
    whole = sum(each.nbytes for each in small.make()[0].parameters())
    assert given == pytest.approx(whole / kernels.RANKS, rel=0.01)
