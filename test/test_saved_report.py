"""The example of docs/report.md prints what the page shows."""

import re
import subprocess
import sys
from pathlib import Path


PAGE = Path(__file__).parents[1] / "docs" / "report.md"


def block(marker):
    """The fenced block after a marker."""
    found = re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)```", PAGE.read_text(), re.S)
    return found[1]


def test_page_shows_what_its_example_prints(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(block(r"train\.py"))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == block(r"printed by train\.py")
