"""A release that comes out is taken in: proven on history, and on trees made up from it."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import clone, snapshot
from patchset.patch import KNAPSACK, PARTITIONERS, RELEASES, REPOSITORY
from patchset.refresh import Finding, store
from patchset.series import SERIES


@pytest.fixture
def project(release_tree, tmp_path):
    """``project("2.13.0")``: a copy of this project that knows releases up to that."""

    def make(newest):
        for release in RELEASES:
            release_tree(release)
        root = tmp_path / "project"
        for folder in ("scripts", "torch_overlay", "patches"):
            shutil.copytree(REPOSITORY / folder, root / folder)
        (root / "build").mkdir()
        (root / "build/releases").symlink_to(REPOSITORY / "build/releases")
        place = root / "scripts/patchset/manifest.json"
        rows = json.loads(place.read_text())
        for release in RELEASES[RELEASES.index(newest) + 1 :]:
            del rows[release]
            shutil.rmtree(root / "patches" / release)
        place.write_text(json.dumps(rows, indent=1) + "\n")
        return root

    return make


def refresh(root, *arguments):
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
    """Told only about 2.6 to 2.13, it ports itself to the releases since."""
    root = project("2.13.0")
    assert state(root) != state(REPOSITORY)
    for release in ("2.14.1", "2.15.0"):
        done = refresh(root, release, "--structure-only")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"wrote patches/{release}/" in done.stdout
    assert state(root) == state(REPOSITORY)
    done = refresh(root, "2.15.0", "--structure-only")
    assert "is as it was" in done.stdout and done.returncode == 0


def made_up(root, release_tree, change):
    """A release 2.99.0: 2.15.0 with one file changed, where the project looks for it."""
    releases = root / "build/releases"
    releases.unlink()
    clone(release_tree("2.15.0"), releases / "2.99.0")
    for release in RELEASES:
        (releases / release).symlink_to(REPOSITORY / "build/releases" / release)
    path, old, new = change
    place = releases / "2.99.0" / path
    text = place.read_text()
    assert old in text
    place.unlink()
    place.write_text(text.replace(old, new))
    version = releases / "2.99.0/torch/version.py"
    text = version.read_text()
    version.unlink()
    version.write_text(text.replace("2.15.0", "2.99.0"))


def test_a_moved_anchor_is_for_a_person(project, release_tree):
    root = project("2.15.0")
    old = 'raise RuntimeError(f"Not aware of memory budget knapsack solver: {SOLVER}")'
    made_up(root, release_tree, (PARTITIONERS, old, "raise RuntimeError(SOLVER)"))
    before = state(root)
    done = refresh(root, "2.99.0", "--structure-only")
    assert done.returncode == 1
    assert "a person must decide: solver-by-name" in done.stdout
    assert f"{PARTITIONERS}: " in done.stdout and "occurs 0 times" in done.stdout
    assert state(root) == before


def test_a_new_upstream_function_is_for_a_person(project, release_tree):
    root = project("2.15.0")
    old = "def greedy_knapsack("
    new = "def newer_knapsack():\n    pass\n\n\ndef greedy_knapsack("
    made_up(root, release_tree, (KNAPSACK, old, new))
    done = refresh(root, "2.99.0", "--structure-only")
    assert done.returncode == 1 and "newer_knapsack" in done.stdout


def test_wrong_calls(project):
    root = project("2.15.0")
    for arguments, words in (
        ((), "name one VERSION"),
        (("2.15.0", "--all"), "name one VERSION"),
        (("newest",), "'newest' is no version"),
        (("2.15.0", "--only", "nothing"), "invalid choice: 'nothing'"),
    ):
        done = refresh(root, *arguments)
        assert done.returncode == 2 and words in done.stderr, arguments


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
    finding = Finding(SERIES[0], state, "", without, with_it)
    assert finding.verdict == verdict
    assert (finding.question is None) == (asks is None)
    if asks:
        assert asks in finding.question


def test_what_was_not_tested_again_keeps_its_outcome(tmp_path, monkeypatch):
    place = tmp_path / "releases.json"
    monkeypatch.setattr("patchset.refresh.RESULTS", place)
    monkeypatch.setattr("patchset.refresh.REPOSITORY", tmp_path)
    one, other = SERIES[:2]
    store({"2.13.0": [Finding(p, "applies", "", False, True) for p in (one, other)]})
    untested = Finding(other, "applies", "")
    store({"2.13.0": [Finding(one, "applies", "", False, False), untested]}, [one.name])
    row = json.loads(place.read_text())["2.13.0"]
    assert (row[one.name]["with"], row[other.name]["with"]) == (False, True)
    store({"2.13.0": [untested]})
    assert json.loads(place.read_text())["2.13.0"][other.name]["with"] is None
