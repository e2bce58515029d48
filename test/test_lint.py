"""Every linter of .lintrunner.toml finds what it is there for, by lintrunner."""

import json
import shutil
import sys

import pytest
import tomllib
from conftest import called, commit_all
from patchset.patch import REPOSITORY


CONFIG = ".lintrunner.toml"
# In two parts, or the linters would find them here.
FAULTS = {
    "RUFF": ("scripts/unused.py", "import os\n"),
    "FORMAT": ("test/wide.py", "x  = 1\n"),
    "UPSTREAM": ("torch_overlay/torch/order.py", "import torch\nimport os\n"),
    "MYPY": ("scripts/typed.py", 'x: int = ""\n'),
    "CODESPELL": ("docs/spelling.md", "t" + "eh word\n"),
    "SHELLCHECK": ("scripts/lost.sh", "# shellcheck shell=bash\ncd there\n"),
    "NEWLINE": ("docs/end.md", "one\n\n"),
    "SPACES": ("docs/spaces.md", "one \n"),
    "TABS": ("docs/tabs.md", "one\ttwo\n"),
    "COPYRIGHT": ("docs/owned.md", "Confidential and " + "proprietary\n"),
    "TESTOWNERS": (
        "torch_overlay/test/test_lost.py",
        'if __name__ == "__main__":\n    run_tests()\n',
    ),
    "TEST_HAS_MAIN": ("torch_overlay/test/test_idle.py", '# Owner(s): ["module: x"]\n'),
}
NEEDED = (CONFIG, "pyproject.toml", "scripts/upkeep", "scripts/patchset")


@pytest.fixture
def tree(tmp_path):
    """What lintrunner needs of this project, and a file with each fault."""
    root = tmp_path / "project"
    for path in NEEDED:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (REPOSITORY / path).is_dir() else shutil.copy
        copy(REPOSITORY / path, root / path)
    for path, text in FAULTS.values():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / ".gitignore").write_text("/.venv\n__pycache__/\n.*_cache/\n")
    (root / ".venv").symlink_to(sys.prefix)
    return commit_all(root)


def test_each_finds_its_fault(tree):
    options = ["--all-files", "--output=json", f"--data-path={tree / '.venv_cache'}"]
    done = called(".venv/bin/lintrunner", *options, cwd=tree)
    found = {}
    for line in done.stdout.splitlines():
        finding = json.loads(line)
        assert finding["path"], finding["description"]
        place = (tree / finding["path"]).relative_to(tree)
        found.setdefault(finding["code"], set()).add(str(place))
    listed = {
        each["code"] for each in tomllib.loads((tree / CONFIG).read_text())["linter"]
    }
    assert listed == set(FAULTS) and done.returncode == 1, done.stderr
    for code, (path, _) in FAULTS.items():
        assert path in found[code], code
    clean = {path for paths in found.values() for path in paths if "patchset" in path}
    assert not clean, found
