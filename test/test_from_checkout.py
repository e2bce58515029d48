"""What a contributor changes in a patched checkout gets back into the set."""

import os
import shutil
import sys

import pytest
from conftest import called, contents, edit, rewrite, run, snapshot, USUAL
from patchset.patch import CONFIG, PARTITIONERS, planner_path, REPOSITORY
from patchset.target import find
from patchset.transaction import read_journal
from upkeep import from_checkout, refresh


ASK = planner_path("ask")
SPARED = (
    "        if must_save_nodes:\n"
    "            return aggressive_recomputation_saved_values\n"
)
# A word of an edit.
SIDE = "must run on the side of what it depends on"
REGENERATE = f"""\
from upkeep import generate
generate.RELEASES = ["{USUAL}"]
generate.main([])
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of what this repository makes the set of."""
    root = tmp_path / "project"
    for part in (*from_checkout.PARTS, "scripts/upkeep"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / part, root / part, ignore=ignored)
    (root / "build").mkdir()
    (root / "build/releases").symlink_to(REPOSITORY / "build/releases")
    monkeypatch.setattr(from_checkout, "REPOSITORY", root)
    monkeypatch.setattr(from_checkout, "OVERLAY", root / "torch_overlay")
    return root


def by(project, *words):
    """A command of the copy, which reads what was written there."""
    environment = {**os.environ, "PYTHONPATH": str(project / "scripts")}
    done = called(sys.executable, *words, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def take(root):
    return refresh.main(["--from", str(root)])


def test_round_trip(repository, checkout, project, capsys):
    root = repository
    pristine = contents(root)
    assert run(root).code == 0
    # In an overlay's file, the end; in edits, lines that are added, changed and taken
    # away, at their ends too, in two side by side, and one of upstream's.
    rewrite(root / ASK, lambda text: text + b"\n# the end\n")
    called = "random_ops.mark_what_runs_once(joint_graph, node_info.tangents_closure)"
    marks = f"    {called}\n"
    below = "    # todo(chilli): This is the most questionable of the 3 heuristics "
    last = "        if needed or is_source(node):\n            dependent.add(node)\n"
    solver = 'activation_memory_budget_solver = "exact"\n'
    for path, old, new in (
        (PARTITIONERS, "if draws_anew(node) and not", "if draws_anew(node) or not"),
        (PARTITIONERS, f'"{SIDE}"', '"must run there"'),
        (PARTITIONERS, marks, f"    # mine\n{marks}    # mine as well\n"),
        (PARTITIONERS, below, "    # of upstream's "),
        (PARTITIONERS, last, ""),
        (PARTITIONERS, SPARED, SPARED.replace("nodes:", "nodes != []:")),
        (CONFIG, solver, f"{solver}# the last\n"),
    ):
        edit(root / path, old, new)
    changed = contents(root)
    assert take(root) == 0
    said = capsys.readouterr().out
    assert f"wrote torch_overlay/{ASK}\n" in said
    topics = "random_tags", "draws_on_one_side", "random_ops", "exact_by_default"
    for name in topics:
        assert f"wrote scripts/patchset/topics/{name}.py\n" in said
    assert said.count("wrote ") == 1 + len(topics)
    assert "was changed for 2.11 to 2.13 alone; look at those for other" in said

    by(project, "-c", REGENERATE)
    (mail,) = (project / f"patches/{USUAL}").glob("*-random-ops.patch")
    assert "\n+    # mine as well\n" in mail.read_text()
    clean = checkout(USUAL, "clean")
    by(project, "-m", "patchset.apply", clean)
    assert contents(clean) == changed != pristine

    # There it is the new set that is applied.
    states = by(project, "-m", "patchset.apply", "--status", root)
    assert "applies" not in states and states.count(" applied\n") > 20
    assert "already applied" in by(project, "-m", "patchset.apply", root)
    by(project, "-m", "patchset.apply", "--reverse", root)
    assert contents(root) == pristine


def test_nothing_has_changed(repository, project, capsys):
    assert run(repository).code == 0
    before = snapshot(project)
    assert take(repository) == 0
    assert "nothing has changed" in capsys.readouterr().out
    assert snapshot(project) == before


def line_of(place, text):
    content = place.read_text()
    return content.count("\n", 0, content.index(text)) + 1


def test_what_cannot_be_placed_is_listed(repository, project, capsys):
    """Beside what could be; nothing of it is written."""
    root = repository
    assert run(root).code == 0
    rewrite(root / ASK, lambda text: text + b"\n# the end\n")
    edit(root / PARTITIONERS, "import os\n", "import os  # mine\n")
    edit(root / PARTITIONERS, SIDE, "runs\\\\once")
    first = "    # networkx blows up on graphs with no required backward nodes\n"
    edit(root / PARTITIONERS, first, f"{first}    # below upstream's line\n")
    added = planner_path("graph/mine")
    (root / added).write_text("")
    gone = planner_path("decide")
    (root / gone).unlink()
    stranger = "torch/version.py"
    rewrite(root / stranger, lambda text: text + b"# mine\n")
    before, journal = snapshot(project), read_journal(find(str(root)))
    assert take(root) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "conflict: cannot be placed, so nothing was written:"
    where = {
        text: f"{PARTITIONERS}:{line_of(root / PARTITIONERS, text)}: "
        for text in ("import os  # mine", "runs\\\\once", "# below upstream's line")
    }
    wanted = (
        where["import os  # mine"] + "within no edit",
        where["runs\\\\once"]
        + "scripts/patchset/topics/draws_on_one_side.py would have to",
        where["# below upstream's line"] + "within no edit",
        f"{added}: a new file",
        f"{gone}: deleted",
        f"{stranger}: no topic edits this file",
    )
    for words in wanted:
        assert any(line.startswith(f"    {words}") for line in said), (words, said)
    assert len(said) == 1 + len(wanted), said
    assert snapshot(project) == before
    assert read_journal(find(str(root))) == journal


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # It would be no edit of that function any more.
        (("def should_ban_recomputation(", "def renamed("), "within no edit"),
        ((f'"{SIDE}"', f'"{SIDE}'), "does not apply"),
        # What is left of the edit is elsewhere in the file as well.
        ((SPARED, ""), "would give another line"),
    ],
)
def test_what_would_not_apply_is_refused(repository, project, change, words, capsys):
    assert run(repository).code == 0
    edit(repository / PARTITIONERS, *change)
    before = snapshot(project)
    assert take(repository) == 1
    assert words in capsys.readouterr().err
    assert snapshot(project) == before


def test_what_is_not_by_this_set_is_refused(repository, tmp_path, capsys):
    assert take(repository) == 1
    assert "is not there by scripts/apply_patch.sh" in capsys.readouterr().err
    assert run("--without", "exact-by-default", repository).code == 0
    assert take(repository) == 1
    assert "exact_by_default.py: what was applied" in capsys.readouterr().err
    assert take(tmp_path / "missing") == 2
    assert "no such folder" in capsys.readouterr().err
