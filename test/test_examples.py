"""The examples run, within their budgets, and print what the page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example(example: str) -> None:
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / example)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    printed = ran.stdout[ran.stdout.index("StepBudget: ") :]
    assert "may not be kept" not in ran.stderr
    if example == "plain_loop.py":
        assert printed in (REPOSITORY / "docs/step.md").read_text()
    if example == "fsdp.py":
        assert "all ranks plan alike: True" in printed


def test_trainer_goes_on_after_an_exception(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", INTERRUPTED, str(tmp_path)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=EXAMPLES
    )
    assert ran.returncode == 0, ran.stderr
    assert "StepBudget: " in ran.stdout
    assert "may not be kept" not in ran.stderr


INTERRUPTED = """
import sys
import torch
import trainer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

budget = trainer.StepBudget(share=0.2)
training = trainer.make_trainer(budget, sys.argv[1])
resize = torch.UntypedStorage.resize_

def interrupt(*_):
    handle.remove()
    raise RuntimeError("interrupted")

handle = training.model.lm_head.register_forward_hook(interrupt)
try:
    training.train()
except RuntimeError as error:
    assert str(error) == "interrupted", error
else:
    raise AssertionError("was not interrupted")
training.train()
assert not _get_current_dispatch_mode_stack()
assert torch.UntypedStorage.resize_ is resize
assert budget.plan is not None
print(budget)
"""
