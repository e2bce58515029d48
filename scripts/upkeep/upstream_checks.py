"""Upstream's linters and our test on a branch, in a work tree that is thrown away."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Optional

from patchset.commits import git
from patchset.patch import Patch, REPOSITORY
from patchset.target import Conflict, Target


# What of upstream's pyproject.toml (of 2.15) bears on what the set changes. The overlay
# runs on Python 3.9, so `Optional[X]` is no fault.
SETTINGS = """
[tool.usort]
preserve_inline_comments = true
collapse_blank_lines_in_category = false
[tool.usort.known]
first_party = ["caffe2", "torch", "torchgen", "functorch", "test"]
standard_library = ["typing_extensions"]
[tool.ruff]
line-length = 88
target-version = "py39"
[tool.ruff.format]
docstring-code-format = true
[tool.ruff.lint]
select = [
    "B", "C4", "E", "F", "FURB", "G", "LOG", "PERF", "PGH004", "PIE", "PLE", "PYI",
    "RSE", "RUF100", "S101", "SIM", "SLOT", "TC", "TRY002", "TRY203", "TRY401", "UP", "W",
]
ignore = [
    "B007", "B008", "B017", "B018", "B023", "B028", "B905", "C408", "E402", "E501",
    "E741", "FURB122", "PERF203", "PERF401", "PYI024", "PYI036", "PYI041", "PYI056",
    "SIM102", "SIM103", "SIM105", "SIM108", "SIM110", "SIM112", "SIM114", "SIM116",
    "SIM117", "SIM300", "TC006", "UP045",
]
[tool.ruff.lint.per-file-ignores]
"**/torch/_inductor/**" = ["S101"]
"""
_RUFF_LINE = r"^(?P<path>[^:\n]+):\d+:\d+: (?P<words>.+)$"
# The commands, and how a line of what they say names a file.
SETTLED = {
    "usort check .": r"^(?P<words>Would sort) (?P<path>.+)$",
    "ruff check --no-cache --quiet --output-format=concise .": _RUFF_LINE,
    "ruff format --no-cache --quiet --check --output-format=concise .": _RUFF_LINE,
}


class Check(NamedTuple):
    """One command: ``passed`` is None where it cannot be run, ``said`` tells why."""

    name: str
    passed: Optional[bool]
    said: str = ""


def check(
    target: Target, branch: str, patch: Patch, findings: Sequence[str]
) -> Iterator[Check]:
    """Yield the outcome of the linters, which is known, and of the patch's test."""
    yield Check(
        "usort and ruff, by upstream's settings", not findings, "\n".join(findings)
    )
    with _work_tree(target, branch) as tree:
        if (tree / ".lintrunner.toml").is_file():
            words = (
                "in the checkout, on the branch: lintrunner init; lintrunner -r HEAD^"
            )
            yield Check("the tree's own linters", None, words)
        link = [sys.executable, "-m", "upkeep.checkout", "link", str(tree)]
        done = _run(link, REPOSITORY / "scripts")
        if done.returncode:
            yield Check(patch.tested, None, done.stdout)
        else:
            done = run_test([patch.test], tree)
            yield Check(patch.tested, done.returncode == 0, done.stdout)


@contextmanager
def _work_tree(target: Target, branch: str) -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="ac-budget-")
    tree = Path(folder) / "pytorch"
    try:
        git(target, "worktree", "add", "--quiet", "--detach", str(tree), branch)
        yield tree
    finally:
        shutil.rmtree(folder)
        git(target, "worktree", "prune")


def _run(
    command: Sequence[str], tree: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def run_test(
    words: Sequence[str],
    checkout: Path,
    python: str = sys.executable,
    path: Sequence[Path] = (),
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` in the checkout and by its torch; stdout has both streams.

    ``path`` has more folders to import from.
    """
    with tempfile.TemporaryDirectory() as cache:
        return _run(
            [python, *words],
            checkout,
            PYTHONPATH=os.pathsep.join(map(str, (checkout, *path))),
            TORCHINDUCTOR_CACHE_DIR=cache,
            # Where CI is set, torch's test runner wants packages of upstream's own CI.
            CI="",
        )


def new_findings(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What upstream's linters say of the files ``after`` that they did not before.

    Both map paths in a PyTorch tree to texts; the paths may begin with a folder that
    tells several trees apart. Lines may move: a finding is known by its words.
    """
    found = _said(after)
    named = {path for path, _ in found}
    found -= _said({path: text for path, text in before.items() if path in named})
    return [f"{path}: {words}" for path, words in found.elements()]


def _said(files: dict[str, str]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        (tree / "pyproject.toml").write_text(SETTINGS)
        for path, text in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        for command, line in SETTLED.items():
            done = _run([sys.executable, "-m", *command.split()], tree)
            matches = list(re.finditer(line, done.stdout, re.M))
            if done.returncode and not matches:
                raise RuntimeError(f"{command}: {done.stdout.strip()}")
            for match in matches:
                found[os.path.relpath(tree / match["path"], tree), match["words"]] += 1
    return found


def conclude(checks: Iterator[Check]) -> None:
    """Print every outcome; Conflict where one failed."""
    failed = []
    for name, passed, said in checks:
        print(f"{ {True: 'passed', False: 'FAILED', None: 'not run'}[passed]:<8}{name}")
        if not passed:
            print("\n".join(f"    {line}" for line in said.strip().splitlines()[-20:]))
        if passed is False:
            failed.append(name)
    if failed:
        raise Conflict(f"{len(failed)} checks failed: {', '.join(failed)}")
