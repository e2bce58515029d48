"""What a pull request changes is measured on the release as it is and with its branch."""

import importlib
import json

import pytest
import torch
from benchmarks import catalogue
from patchset.images import survey
from patchset.patch import RELEASES
from patchset.series import exported, FORMS, SERIES, stack
from patchset.target import find
from upkeep import forms, pull_request


RELEASE = torch.__version__.partition("+")[0]
TOPIC = "knapsack-solvers"
# Tells which torch ran it, and that nothing of an earlier process is cached.
MODULE = """\
import os
from pathlib import Path
import torch._functorch._activation_checkpointing.knapsack as knapsack

WHAT = "capacities that are kept, of 1"

def measured():
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert not list(cache.iterdir())
    (cache / "used").touch()
    kept = "capacity - 1 - best" in Path(knapsack.__file__).read_text()
    return {"one": float(kept), "large": 2e6}
"""


@pytest.fixture
def own(tmp_path, monkeypatch, release_tree):
    """A module for one topic, in a folder and with results of its own."""
    release_tree(RELEASE)
    modules = tmp_path / "scripts" / "benchmarks" / "forms"
    modules.mkdir(parents=True)
    for place in forms.SCRIPTS.iterdir():
        if place.name != "benchmarks":
            (tmp_path / "scripts" / place.name).symlink_to(place)
    for place in forms.MODULES.parent.iterdir():
        if place.name != "forms":
            (modules.parent / place.name).symlink_to(place)
    (modules / "__init__.py").touch()
    (modules / "knapsack_solvers.py").write_text(MODULE)
    monkeypatch.setattr(forms, "SCRIPTS", tmp_path / "scripts")
    monkeypatch.setattr(forms, "MODULES", modules)
    monkeypatch.setattr(forms, "RESULTS", tmp_path / "forms.json")
    monkeypatch.setattr(forms, "RELEASES", (RELEASE,))
    return modules / "knapsack_solvers.py"


def test_before_and_after(own, capsys, monkeypatch):
    assert forms.main(["--check"]) == 1
    assert f"{TOPIC}: not measured on its files" in capsys.readouterr().out
    assert forms.main([]) == 0
    entry = json.loads(forms.RESULTS.read_text())[TOPIC]
    assert entry["models"] == {"one": [0, 1], "large": [2e6, 2e6]}
    assert entry["what"] == "capacities that are kept, of 1"
    assert entry["torch"] == RELEASE
    rows = "| one | 0 → 1 |\n| large | 2,000,000 |\n"
    assert rows in capsys.readouterr().out

    # The text of the pull request has it, and of one without a module nothing.
    text = pull_request.body(FORMS[f"{TOPIC}, smallest form"], [])
    assert f"## Measured\n\n{forms.table(entry)}" in text
    assert "## Measured" not in pull_request.body(FORMS["cache-key"], [])

    # It is measured again where its files changed, and nothing is lost if that fails.
    with monkeypatch.context() as still:
        still.setattr(forms, "run", None)
        assert forms.main([]) == forms.main(["--check"]) == 0
        assert f"{TOPIC}: as stored" in capsys.readouterr().out
    own.write_text(MODULE.replace("float(kept)", "2 * kept"))
    with monkeypatch.context() as still:
        found = iter([{"models": {"without": 0}}, {"models": {"with": 0}}])
        still.setattr(forms, "run", lambda *_: next(found))
        assert forms.main([]) == 1
    assert "of different models" in capsys.readouterr().err
    own.write_text(MODULE.replace("float(kept)", "1 / 0"))
    assert forms.main(["--form", TOPIC]) == 1
    said = capsys.readouterr().err
    assert f"{TOPIC}: ZeroDivisionError: division by zero" in said
    assert f"could not be measured: {TOPIC}" in said
    assert json.loads(forms.RESULTS.read_text()) == {TOPIC: entry}


def test_several_figures_of_a_model_are_columns():
    models = {"one: s": [1, 2], "one: MB": [3, 3], "two: s": [4, 5], "two: MB": [6, 7]}
    told = forms.table({"what": "a step", "torch": "2.15.0", "models": models})
    assert told.startswith("A step, before → after, on torch 2.15.0:")
    assert "| one | 1 → 2 | 3 |\n| two | 4 → 5 | 6 → 7 |\n" in told
    assert told.endswith(
        "| after / before: geometric mean, most | 1.581, 2.000 | 1.080, 1.167 |\n"
    )


def test_a_branch_that_cannot_be_made_is_not_measured(own, monkeypatch, capsys):
    monkeypatch.setattr(forms, "RELEASES", ("2.6.0",))
    monkeypatch.setattr(forms, "run", None)
    assert forms.main([]) == 1
    assert "not for this release on torch 2.6.0" in capsys.readouterr().err


def test_every_module_is_a_topics():
    known = {patch.name for patch in SERIES}
    topics = forms.topics()
    assert TOPIC in topics and known.issuperset(topics)
    for topic in topics:
        form = importlib.import_module(f"benchmarks.forms.{forms.module(topic)}")
        assert len(form.WHAT) > 10 and callable(form.measured)
    assert forms.stored().keys() <= set(topics)


def test_what_decides_a_measurement_counts():
    found = {place.name for place in forms.measuring("cache-key")}
    assert found == {"cache_key.py", "nets.py", "architectures.py", "libraries.py"}
    # Also what it imports for others, but nothing of running and telling.
    found = {place.name for place in forms.measuring("kernel-order")}
    assert found > {"scheduled.py", "replay.py", "catalogue.py", "held_out.py"}
    assert not found & {"fresh.py", "options.py", "pages.py", "patch.py"}
    # These measure the nets of the catalogue.
    nets = {net.name for of in catalogue.AT_SIZE.values() for net in of}
    assert nets == forms.by_model(forms.stored()["kernel-order"]).keys()


def test_a_small_form_adds_no_more_lines_than_its_patch_allows(release_tree):
    target = find(str(release_tree(RELEASES[-1])))
    for topic in (patch.name for patch in SERIES):
        patch = FORMS[exported(topic)]
        if patch.lines is not None:
            own = survey(target, series=stack(patch), release=RELEASES[-1]).patches[-1]
            assert forms.added(own.changes) <= patch.lines, topic
