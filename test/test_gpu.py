"""The benchmark of a GPU, with a CPU in its place."""

import functools
from argparse import Namespace

import pytest
from benchmarks import gpu, nets
from benchmarks.architectures import MLP
from benchmarks.pages import environment


pytestmark = pytest.mark.usefixtures("alone")


def test_what_runs_is_what_was_told(monkeypatch):
    # Of few kernels: each is compiled for real.
    batch = functools.partial(nets.features, (1024, 64), 8)
    net = nets.Net("x", lambda: (MLP([64] * 5, 8, 0.0), batch()))
    monkeypatch.setitem(nets.NETS, net.name, net)
    task = {"set": "project", "net": net.name, "kind": "graph", "device": "inductor"}
    rows = [{**task, **gpu.measure({**task, "budgets": [1.0, 0.0]})}]
    wrong = [mark for mark in gpu.judged(rows) if mark.enforced and not mark.passed]
    assert not wrong
    lowest = rows[0]["steps"][1]
    assert lowest["predicted"] == pytest.approx(lowest["peak"], rel=0.01)
    assert lowest["gradients_off"] < 1e-4
    lowest["peak"] *= 2
    assert not all(mark.passed for mark in gpu.judged(rows))
    page = gpu.page({"environment": environment(), "measured": rows})
    assert "Run on a CPU" in page


def test_no_gpu_is_said(capsys, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        next(gpu.tasks(Namespace(device="cuda"), []))
    assert stopped.value.code == 2
    assert "sees no GPU" in capsys.readouterr().err
