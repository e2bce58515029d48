"""A release that comes out is taken in: proven on history, and on trees made up from it."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import snapshot, TRIED, USUAL
from patchset import refresh, series
from patchset.files import clone
from patchset.patch import CONFIG, Edit, KNAPSACK, PARTITIONERS, RELEASES, REPOSITORY
from patchset.refresh import Finding
from patchset.series import SERIES


NEWEST = RELEASES[-1]


@pytest.fixture
def project(release_tree, tmp_path):
    """``project(*releases)``: a copy of this project that knows only those."""

    def make(*known):
        for release in TRIED:
            release_tree(release)
        root = tmp_path / "project"
        for folder in ("scripts", "torch_overlay", "patches"):
            shutil.copytree(REPOSITORY / folder, root / folder)
        (root / "build").mkdir()
        (root / "build/releases").symlink_to(REPOSITORY / "build/releases")
        place = root / "scripts/patchset/manifest.json"
        rows = json.loads(place.read_text())
        for release in set(RELEASES) - set(known):
            del rows[release]
            shutil.rmtree(root / "patches" / release)
        place.write_text(json.dumps(rows, indent=1) + "\n")
        return root

    return make


def take_in(root, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "patchset.refresh", *arguments],
        env={**os.environ, "PYTHONPATH": str(root / "scripts"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def state(root):
    found = {**snapshot(root / "patches"), **snapshot(root / "scripts/patchset")}
    return {path: known for path, known in found.items() if "__pycache__" not in path}


def test_history(project):
    """Told only about older releases, it ports itself to the newest."""
    root = project(RELEASES[0], USUAL)
    done = take_in(root, NEWEST, "--structure-only")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"wrote patches/{NEWEST}/" in done.stdout
    mails, stored = (r / "patches" / NEWEST for r in (root, REPOSITORY))
    assert snapshot(mails) == snapshot(stored)
    rows, stored = (
        json.loads((r / "scripts/patchset/manifest.json").read_text())
        for r in (root, REPOSITORY)
    )
    assert rows == {release: stored[release] for release in TRIED}
    done = take_in(root, NEWEST, "--structure-only")
    assert "is as it was" in done.stdout and done.returncode == 0


@pytest.mark.parametrize(
    "path, old, new, words",
    [
        (
            PARTITIONERS,
            'raise RuntimeError(f"Not aware of memory budget knapsack solver: {SOLVER}")',
            "raise RuntimeError(SOLVER)",
            "occurs 0 times",
        ),
        (
            KNAPSACK,
            "def greedy_knapsack(",
            "def newer_knapsack():\n    pass\n\n\ndef greedy_knapsack(",
            "newer_knapsack",
        ),
    ],
)
def test_what_upstream_changed_is_for_a_person(
    project, release_tree, path, old, new, words
):
    """A release 2.99.0: the newest with one file changed, where the project looks."""
    root = project(NEWEST)
    releases = root / "build/releases"
    releases.unlink()
    clone(release_tree(NEWEST), releases / "2.99.0")
    (releases / NEWEST).symlink_to(REPOSITORY / "build/releases" / NEWEST)
    for name, before, after in (
        (path, old, new),
        ("torch/version.py", NEWEST, "2.99.0"),
    ):
        place = releases / "2.99.0" / name
        text = place.read_text()
        assert before in text
        place.unlink()
        place.write_text(text.replace(before, after))
    before = state(root)
    done = take_in(root, "2.99.0", "--structure-only")
    assert done.returncode == 1 and "a person must decide: " in done.stdout
    assert f"{path}: " in done.stdout and words in done.stdout
    assert state(root) == before


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "name one VERSION"),
        ((NEWEST, "--all"), "name one VERSION"),
        (("newest",), "'newest' is no version"),
    ],
)
def test_wrong_calls(capsys, arguments, words):
    with pytest.raises(SystemExit, match="2"):
        refresh.main(list(arguments))
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "state, without, with_it, verdict, asks",
    [
        ("applies", False, True, "applies", None),
        ("applies", True, True, "landed upstream", "its text is not there"),
        ("applies", False, False, "applies", "its test fails"),
        ("landed upstream", True, True, "landed upstream", None),
        (
            "landed upstream",
            False,
            True,
            "landed upstream but still faulty",
            "`faults`",
        ),
        ("conflicts", False, None, "conflicts", "`until`"),
        ("conflicts", True, None, "landed upstream", "its text is not there"),
        ("not for this release", None, None, "not for this release", None),
        ("applies", None, None, "applies", None),
    ],
)
def test_behaviour_decides(state, without, with_it, verdict, asks):
    finding = Finding(SERIES[0].name, SERIES[0], state, "", without, with_it)
    assert finding.verdict == verdict
    assert (finding.question is None) == (asks is None)
    if asks:
        assert asks in finding.question


def test_a_test_that_another_patch_makes_pass_gets_no_tick(release_tree, monkeypatch):
    """The same test for the patch that mends something, and for one on top of it."""
    release = torch.__version__.partition("+")[0]
    release_tree(release)
    mends = next(p for p in SERIES if p.name == "knapsack-solvers").minimal
    idle = replace(
        mends,
        name="idle",
        needs=("mends",),
        files=(),
        edits=(Edit(CONFIG, anchor="import os\n", replacement="import os  # idle\n"),),
    )
    monkeypatch.setitem(series.FORMS, "mends", mends)
    monkeypatch.setattr(refresh, "tree", release_tree)
    monkeypatch.setattr(refresh, "FORMS", {"mends": mends, "idle": idle})
    before = snapshot(Path(torch.__file__).parent / "_functorch")
    ticked, unticked = refresh.examine(release, sys.executable)
    assert (ticked.without, ticked.with_it, ticked.question) == (False, True, None)
    assert (unticked.without, unticked.with_it) == (True, True)
    assert "make the test stricter" in unticked.question
    assert snapshot(Path(torch.__file__).parent / "_functorch") == before
