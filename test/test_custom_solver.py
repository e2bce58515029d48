"""The solver of docs/solvers.md, as it stands there, on a small real model."""

import importlib.util
import re
from unittest import mock

import pytest
import torch
import torch._functorch.config as fconfig
from benchmarks.nets import Shape, Transformer
from patchset.patch import REPOSITORY
from torch._functorch.memory_planner.saved import saved_bytes as memory_budget


SHAPE = Shape(width=48, heads=4, mlp=128, layers=2, vocabulary=64, tokens=32)
MM = torch.ops.aten.mm.default


@pytest.fixture
def example(tmp_path):
    """The page's code block, imported as a module of the user's would be."""
    text = (REPOSITORY / "docs/solvers.md").read_text()
    section = text.partition("## Your own solver\n")[2].partition("\n#")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    place = tmp_path / "own_solver.py"
    place.write_text(code)
    spec = importlib.util.spec_from_file_location(place.stem, place)
    module = importlib.util.module_from_spec(spec)
    with fconfig.patch(
        activation_memory_budget=1.0, activation_memory_budget_solver="dp"
    ):
        spec.loader.exec_module(module)
        yield module


def compiled(model, batch):
    """The paths of the modules whose products the backward repeats; the gradients."""
    torch._dynamo.reset()
    asked = []
    ask = memory_budget.ask_solver

    def watched(solver, graph, capacity):
        asked.append((graph.items, ask(solver, graph, capacity)))
        return asked[-1][1]

    with mock.patch.object(memory_budget, ask.__name__, watched):
        step = torch.compile(model, backend="aot_eager_decomp_partition")
        loss = step(batch[:, :-1], batch[:, 1:])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    items, saved = asked[-1]
    paths = {
        list(item.node.meta["nn_module_stack"].values())[-1][0]
        for i, item in enumerate(items)
        if item.node.target is MM and i not in saved
    }
    return paths, gradients


def test_the_documented_solver_pins_what_it_is_told_to(example):
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    batch = torch.randint(SHAPE.vocabulary, (4, 33))
    loss = model(batch[:, :-1], batch[:, 1:])
    expected = torch.autograd.grad(loss, list(model.parameters()))

    repeated, gradients = compiled(model, batch)
    for gradient, wanted in zip(gradients, expected):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    assert repeated and not any(path.endswith(".down") for path in repeated)
