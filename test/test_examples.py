"""The examples run, within their budgets, and print what the page says, and every loop
of the pages and docstrings trains as it stands."""

from __future__ import annotations

import ast
import copy
import doctest
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import called
from torch import nn, Tensor
from torch._functorch import config


REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"


def docstrings(text: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [ast.get_docstring(node) or "" for node in nodes]


def loops() -> dict[str, str]:
    """The training loops of pages and docstrings, by the file and which one it is."""
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")]
    found = {}
    for page in sorted(pages):
        fenced = re.findall(
            r"^ *```python\n(.+?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE
        )
        for number, text in enumerate(map(textwrap.dedent, fenced)):
            found[f"{page.name}-{number}"] = text
    for module in sorted(REPOSITORY.glob("torch_overlay/torch/**/*.py")):
        for number, words in enumerate(docstrings(module.read_text())):
            steps = doctest.DocTestParser().get_examples(words)
            found[f"{module.name}-{number}"] = "".join(step.source for step in steps)
    # The README's program has a model and data of its own.
    loop = re.compile(r"^for batch in", re.M)
    return {name: text for name, text in found.items() if loop.search(text)}


class Net(nn.Module):
    """Maps a batch to its loss, and notes each."""

    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))] * 2
        self.layers = nn.Sequential(*copy.deepcopy(wide), nn.Linear(32, 1))
        self.losses: list[float] = []

    def forward(self, batch: Tensor) -> Tensor:
        return (self.layers(batch) - batch[:, :1]).square().mean()


def names_of_a_loop() -> dict[str, Any]:
    """What the loops take for granted, from one seed."""
    torch.manual_seed(0)
    model = Net()
    model.register_forward_hook(lambda net, _, loss: net.losses.append(loss.item()))
    model.compile(backend="aot_eager_decomp_partition")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = [torch.randn(64, 32)] * 6
    return {"torch": torch, "model": model, "optimizer": optimizer, "data": data}


def trained(loop: str) -> list[float]:
    torch._dynamo.reset()
    names = names_of_a_loop()
    # The first lines may be another block's of the page.
    exec("from torch._functorch.memory_planner import StepBudget", names)  # noqa: S102
    with config.patch(enable_autograd_cache=False):
        exec(loop, names)  # noqa: S102
    assert all(parameter.grad is None for parameter in names["model"].parameters())
    losses: list[float] = names["model"].losses
    return losses


REFERENCE = """
for batch in data:
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_there_are_loops() -> None:
    files = {name.partition("-")[0] for name in loops()}
    assert {"step.md", "budget.py"} <= files


@pytest.mark.parametrize("name", loops())
def test_loop_trains(name: str, alone: None) -> None:
    """Losses fall, as they do without a budget."""
    losses = trained(loops()[name])
    assert losses == pytest.approx(trained(REFERENCE), rel=1e-4)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example(example: str) -> None:
    ran = called(sys.executable, "-W", "ignore", EXAMPLES / example, timeout=300)
    assert ran.returncode == 0, ran.stderr
    losses = re.findall(r"loss\W+([\d.]+)", ran.stdout)
    assert float(losses[-1]) < 0.95 * float(losses[0])
    printed = ran.stdout[ran.stdout.index("StepBudget: ") :]
    assert "may be exceeded" not in ran.stderr
    if example == "plain_loop.py":
        assert printed in (REPOSITORY / "docs/step.md").read_text()
    if example == "fsdp.py":
        assert "all ranks plan alike: True" in printed, printed
