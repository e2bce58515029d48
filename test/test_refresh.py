"""A release that comes out is taken in: proven on history, and on trees made up from it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import edit, lay, snapshot, TRIED
from patchset import images, series
from patchset.patch import CONFIG, Edit, KNAPSACK, KNOWN, RELEASES, REPOSITORY
from patchset.series import SERIES
from upkeep import refresh
from upkeep.refresh import Finding


NEWEST = RELEASES[-1]


def test_history(release_tree, derived_elsewhere, tmp_path, monkeypatch, capsys):
    """Told only about older releases, it ports itself to the newest."""
    for release in TRIED:
        release_tree(release)
    monkeypatch.setattr(refresh, "RELEASES", TRIED[:-1])
    monkeypatch.setattr(refresh, "REPOSITORY", tmp_path)
    assert refresh.take_in(NEWEST, refresh.by_text(NEWEST)) == 0
    assert f"wrote patches/{NEWEST}/" in capsys.readouterr().out
    mails = (root / "patches" / NEWEST for root in (tmp_path, REPOSITORY))
    assert len({str(snapshot(folder)) for folder in mails}) == 1
    rows = json.loads((tmp_path / "manifest.json").read_text())
    assert rows == {release: KNOWN[release] for release in TRIED}
    assert refresh.take_in(NEWEST, refresh.by_text(NEWEST)) == 0
    assert "is as it was" in capsys.readouterr().out


def test_what_upstream_changed_is_for_a_person(
    release_tree, tmp_path, monkeypatch, capsys
):
    """A release 2.99.0: the newest with one function more."""
    lay(release_tree(NEWEST), tmp_path)
    known = "def greedy_knapsack("
    newer = "def newer_knapsack():\n    pass\n\n\n"
    edit(tmp_path / KNAPSACK, known, newer + known)
    monkeypatch.setattr(refresh, "tree", lambda release: tmp_path)
    monkeypatch.setattr(refresh.generate, "write", None)
    assert refresh.take_in("2.99.0", refresh.by_text("2.99.0")) == 1
    said = capsys.readouterr().out
    assert "a person must decide: " in said and f"{KNAPSACK}: " in said
    assert "newer_knapsack" in said


@pytest.mark.parametrize(
    "state, without, with_it, verdict, asks",
    [
        ("applies", False, True, "applies", None),
        ("applies", True, True, "landed upstream", "its text is not there"),
        ("applies", False, False, "applies", "its test fails"),
        ("landed upstream", True, True, "landed upstream", None),
        ("landed upstream", False, True, images.FAULTY, "`faults`"),
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


def test_a_test_that_another_patch_makes_pass_gets_no_tick(
    release_tree, monkeypatch, tmp_path
):
    """The same test for the patch that mends something, and for one on top of it."""
    release = torch.__version__.partition("+")[0]
    release_tree(release)
    mends = next(p for p in SERIES if p.name == "knapsack-solvers").minimal
    idle = replace(
        mends,
        name="idle",
        needs=("mends",),
        sources=(),
        edits=(Edit(CONFIG, anchor="import os\n", replacement="import os  # idle\n"),),
    )
    monkeypatch.setitem(series.FORMS, "mends", mends)
    monkeypatch.setattr(refresh, "tree", release_tree)
    monkeypatch.setattr(refresh, "FORMS", {"mends": mends, "idle": idle})
    before = snapshot(Path(torch.__file__).parent / "_functorch")
    monkeypatch.setattr(refresh, "RESULTS", tmp_path / "releases.json")
    refresh.RESULTS.write_text("{}")
    ticked, unticked = refresh.check(release)
    assert (ticked.without, ticked.with_it, ticked.question) == (False, True, None)
    assert (unticked.without, unticked.with_it) == (True, True)
    assert "make the test stricter" in unticked.question
    assert snapshot(Path(torch.__file__).parent / "_functorch") == before

    # What was run on the same files is not run again.
    monkeypatch.setattr(refresh, "isolated", None)
    assert refresh.check(release) == [ticked, unticked]
    assert list(json.loads(refresh.RESULTS.read_text())) == [release]
    for text, is_same in (
        ("import os  # other words\n", True),
        ("import os, sys\n", False),
    ):
        other = replace(idle, edits=(replace(idle.edits[0], replacement=text),))
        monkeypatch.setitem(refresh.FORMS, "idle", other)
        assert (refresh.read("idle", release).tree == unticked.tree) == is_same

    # Of other files, it is due again; until then it is kept, and marked.
    assert refresh.marked([release]) == 1
    cells = json.loads(refresh.RESULTS.read_text())[release]
    assert cells == {"mends": ticked.cell, "idle": {**unticked.cell, "changed": True}}
    monkeypatch.setitem(refresh.FORMS, "idle", idle)
    assert refresh.marked([release]) == 0
    assert json.loads(refresh.RESULTS.read_text())[release]["idle"] == unticked.cell
