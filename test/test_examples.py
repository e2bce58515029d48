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
    assert "is not kept" not in ran.stderr
    if example == "plain_loop.py":
        assert printed in (REPOSITORY / "docs/step.md").read_text()
    if example == "fsdp.py":
        assert "all ranks plan alike: True" in printed
