"""scripts/apply_patch.sh on real trees: states, faults, kills, and the way back."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest
from conftest import called, edit, FEW, git, lay, PATHS, refuses, rewrite, run, snapshot
from patchset import apply, images, transaction
from patchset.patch import (
    CONFIG,
    KNAPSACK,
    KNOWN,
    OVERLAY,
    PARTITIONERS,
    RELEASES,
    REPOSITORY,
)
from patchset.series import SERIES
from patchset.target import find, STATE_NAME


SCRIPT = REPOSITORY / "scripts" / "apply_patch.sh"
TEST = "test/functorch/test_ac_knapsack_solvers.py"


def test_round_trip(checkout, release_tree, release, monkeypatch):
    root = checkout(release)
    before = snapshot(root)
    shared = snapshot(release_tree(release) / "torch/_functorch")
    wanted = {
        p.name: {images.APPLIES, images.FAULTY} if p.fits(release) else {images.ABSENT}
        for p in SERIES
    }

    status = run("--status", root)
    assert status.code == 0 and status.report["in_manifest"]
    assert status.report["release"] == release
    assert all(state in wanted[name] for name, state in status.states.items())
    assert run("--check", root).code == 0
    assert snapshot(root) == before

    result = run(root)
    assert result.code == 0
    warned = "dropout gets wrong gradients there" in result.text
    assert warned == (release == "2.6.0") == ("2.6.0: cache-key" in result.text)
    assert (root / KNAPSACK).read_bytes() == (OVERLAY / KNAPSACK).read_bytes()
    for path in (PARTITIONERS, CONFIG):
        assert snapshot(root)[path][1] == KNOWN[release][path]["after"]
    # The clone's files were hard links; what they linked to is as it was.
    assert snapshot(release_tree(release) / "torch/_functorch") == shared
    applied = snapshot(root)
    times = {p: (root / p).stat().st_mtime_ns for p in (KNAPSACK, PARTITIONERS)}

    with monkeypatch.context() as idle:
        # What is there is not compiled again, which takes seconds.
        idle.setattr(images, "_check_syntax", None)
        again = run(root)
    assert again.code == 0 and "already applied" in again.text
    assert snapshot(root) == applied
    assert times == {p: (root / p).stat().st_mtime_ns for p in times}
    states = set(run("--status", root).states.values())
    assert states - {images.ABSENT} == {images.APPLIED}

    assert run("--reverse", root).code == 0
    assert snapshot(root) == before
    assert run("--reverse", root).code == 0


# ------------------------------------------------------------ what is refused


def test_bad_calls(root, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    refuses(2, "TARGET must be the root of a PyTorch checkout")
    refuses(2, "no such folder", tmp_path / "missing")
    refuses(2, "not a PyTorch tree (no torch/__init__.py)", tmp_path / "empty")
    refuses(2, "exclude each other", "--installed", root, tree=root)
    refuses(2, "--python goes with --installed", "--python", "python3", root)
    refuses(2, "cannot be run", "--installed", "--python", tmp_path / "no-python")
    refuses(2, "is not a git checkout", "--commit", root, tree=root)
    refuses(2, "not allowed with", "--reverse", "--commit", root)
    assert SERIES[0].name in refuses(2, "--without", "--without", "typo", root).text
    refuses(2, "--chek", "--chek", root)
    assert apply.main(["--status", "--check"]) == 2
    assert "apply_patch.sh --help tells more" in capsys.readouterr().err
    (root / "version.txt").unlink()
    (root / "torch/version.py").unlink()
    refuses(2, "neither version.txt nor torch/version.py", root, tree=root)


ANCHOR = "from ._activation_checkpointing.knapsack import (\n"
SOLVE = "def _optimize_runtime_with_given_memory"


def edited(old, new):
    return partial(edit, old=old, new=new)


def to_link(place):
    place.rename(place.parent / "elsewhere")
    place.symlink_to(place.parent / "elsewhere")


def to_read_only(place):
    edit(place, "import os", "import os")
    place.chmod(0o444)


@pytest.mark.parametrize(
    "path, change, words",
    [
        (CONFIG, to_link, "is a symbolic link"),
        ("torch/_functorch", to_link, "is a symbolic link"),
        (CONFIG, to_read_only, f"{CONFIG}: read-only"),
        (PARTITIONERS, edited(ANCHOR, ANCHOR + ANCHOR), "occurs 2 times, not once"),
        (PARTITIONERS, edited('SOLVER == "ilp"', "SOLVER == 0"), "have digest"),
        (PARTITIONERS, edited(SOLVE, "def _renamed"), "the edit is inside _renamed"),
        (
            KNAPSACK,
            edited("import torch\n", "def newer(): ..."),
            "defines newer, which",
        ),
        (
            TEST,
            lambda place: place.write_text("# theirs\n"),
            "is in the way of what the patch adds",
        ),
    ],
)
def test_refused_tree(root, path, change, words):
    change(root / path)
    assert path in refuses(1, words, root, tree=root).text


def test_second_process(root):
    with transaction.lock(find(str(root))):
        refuses(1, "another process is patching this tree", root, tree=root)
    assert run(root).code == 0


def test_reverse_refuses(root):
    assert run(root).code == 0
    text = (root / CONFIG).read_text()
    edit(root / CONFIG, "import os", "import os  # mine")
    refuses(1, f"{CONFIG}: changed since", "--reverse", root, tree=root)
    (root / CONFIG).write_text(text)

    # A copied tree: nothing says what was there before.
    shutil.rmtree(root / STATE_NAME)
    assert set(run("--status", root).states.values()) == {images.APPLIED}
    refuses(1, "was not applied by this script", "--reverse", root, tree=root)


# ------------------------------------------------- trees that are no release


def test_files_of_a_known_release_whatever_the_version(root):
    (root / "version.txt").write_text("2.8.0\n")
    result = run(root)
    assert result.code == 0 and result.report["in_manifest"]
    assert result.report["release"] == "2.13.0"


@pytest.mark.parametrize("version", ["2.9.1", "2.5.1"])
def test_a_release_that_is_not_offered(root, version):
    (root / "version.txt").write_text(version + "\n")
    edit(root / PARTITIONERS, "import os\n", "import os  # a local change\n")
    for action in ((), ("--check",), ("--status",)):
        words = f"not for PyTorch {version}"
        refuses(2, words, *action, root, tree=root)


@pytest.mark.parametrize(
    ("base", "version", "taken"),
    [
        ("2.13.0", "2.6.0a0", RELEASES[1:]),
        ("2.13.0", "2.99.0a0", RELEASES[1:]),
        (RELEASES[-1], "2.16.0a0", RELEASES[-1:]),
    ],
)
def test_unknown_base_is_checked_by_structure(checkout, base, version, taken):
    """Where the version misleads, as on main, the edits that fit are taken."""
    root = checkout(base)
    (root / "version.txt").write_text(version + "\n")
    edit(root / PARTITIONERS, "import os\n", "import os\n\nimport sys\n")
    before = snapshot(root)

    def status(state):
        result = run("--status", root)
        assert result.code == 0 and not result.report["in_manifest"]
        assert result.report["version"] == version
        assert result.report["release"] in taken
        assert set(result.states.values()) <= {state, images.FAULTY}

    status(images.APPLIES)
    assert run("--check", root).code == 3
    assert snapshot(root) == before
    result = run(root)
    assert result.code == 3 and "no checksum vouches" in result.text
    status(images.APPLIED)
    assert run(root).code == run("--check", root).code == 0
    assert run("--reverse", root).code == 0
    assert snapshot(root) == before


def test_landed_upstream(checkout):
    """Each fault goes by itself; with the last one the patch leaves the file alone."""
    root, name = checkout("2.15.0"), "knapsack-solvers"
    place = root / KNAPSACK
    edit(place, "right_capacity = capacity - ", "right_capacity = capacity - 1 - ")
    half = run("--status", root)
    assert half.states[name] == images.FAULTY
    assert "#197871" not in half.details[name]
    edit(place, "runtimes[i] / memory[i]", "runtimes[i] / max(memory[i], 1e-300)")
    edit(place, "if i == 1:", "if i > 0.5:")
    edit(place, "dtype=torch.float32", "dtype=torch.float64")
    place.write_text(place.read_text() + "\nKNAPSACK_SOLVERS = {}\n")
    before = place.read_bytes()
    assert run("--status", root).states[name] == images.LANDED
    run(root)
    assert place.read_bytes() == before


# ---------------------------------------------------------- leaving one out


def test_without_one_patch(root):
    name = "exact-by-default"
    pristine = snapshot(root / "torch")
    result = run("--without", name, root)
    assert result.code == 0
    assert result.states[name] == images.LEFT_OUT
    assert 'budget_solver = "dp"\n' in (root / CONFIG).read_text()
    assert run(root).code == 0
    assert set(run("--status", root).states.values()) == {images.APPLIED}

    # On an applied set, leaving some out takes those off, whole files included.
    without = []
    for patch in SERIES:
        if CONFIG in patch.paths():
            without += ["--without", patch.name]
    assert run(*without, root).code == 0
    assert snapshot(root / "torch")[CONFIG[6:]] == pristine[CONFIG[6:]]
    assert "already applied" in run(*without, root).text


def test_what_needs_a_patch_is_left_out_with_it(root):
    status = run("--status", "--without", "random-ops", root)
    assert status.code == 0 and status.states["cache-key"] == images.APPLIES
    assert status.details["memory-budget"] == "it needs random-ops"
    assert status.details["step-budget"] == "it needs compiled-peak"


# -------------------------------------------------------- kills at every step


def killed_for_real(steps, step, work):
    """In a child, which gets a SIGKILL; whether the work came to its end."""
    child = os.fork()
    if not child:
        steps.run(step, work, lambda place: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return status == 0


def hook_has_its_function(root):
    partitioners = (root / PARTITIONERS).read_text()
    if "KNAPSACK_SOLVERS" in partitioners:
        assert "KNAPSACK_SOLVERS" in (root / KNAPSACK).read_text()
    for path in {path for patch in SERIES for path in patch.files}:
        if f".{Path(path).stem} import" in partitioners:
            assert (root / path).is_file()


@pytest.mark.parametrize("action", ["apply", "reverse"])
def test_kill_at_every_step(root, steps, monkeypatch, action):
    # A kill loses nothing that was written; a power cut does, and is not tried here.
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    calls = {"apply": [*FEW, str(root)], "reverse": ["--reverse", str(root)]}
    opposite = {"apply": "reverse", "reverse": "apply"}[action]
    outcomes = {"reverse": snapshot(root)}
    assert run(*calls["apply"]).code == 0
    outcomes["apply"] = snapshot(root)
    following = "apply"

    for step in range(500):
        if following == action:
            assert run(*calls[opposite]).code == 0
        kill = steps.run if step % 8 else partial(killed_for_real, steps)
        if kill(step, lambda: apply.main([*calls[action], "--json"])):
            break
        hook_has_its_function(root)
        # The next call brings the tree to where it says, whichever call it is, and
        # whether or not one before it was killed as well.
        following = action if step % 3 else opposite
        steps.run(step // 2, partial(apply.main, [*calls[following], "--json"]))
        hook_has_its_function(root)
        assert run(*calls[following]).code == 0
        assert snapshot(root) == outcomes[following], f"killed before step {step}"
    assert snapshot(root) == outcomes[action]
    assert step > 25


def test_status_of_an_interrupted_call(root, steps):
    assert not steps.run(200, lambda: run(root))
    before = snapshot(root)
    assert "was interrupted" in run("--status", root).text
    assert run("--check", root).code == 0
    assert snapshot(root) == before


# --------------------------------------------------- upgrades and reinstalls


@pytest.mark.parametrize("after", ["2.13.0", "2.15.0"])
def test_torch_is_installed_again_under_an_applied_set(root, release_tree, after):
    """What an installer does: remove the old files, put down the new ones."""
    assert run(root).code == 0
    for folder in ("_functorch", "_inductor"):
        shutil.rmtree(root / "torch" / folder)
    lay(release_tree(after), root)
    pristine = snapshot(root / "torch")
    status = run("--status", root)
    assert status.report["release"] == after
    assert status.states["solver-by-name"] == images.APPLIES
    if after != "2.13.0":
        assert run(root).code == 0
    assert run("--reverse", root).code == 0
    assert snapshot(root / "torch") == pristine
    assert not (root / TEST).exists()


# ------------------------------------------------------------------ git


def test_commit_and_revert(repository):
    base = git(repository, "rev-parse", "HEAD^{tree}")
    (repository / "mine.txt").write_text("staged by the user\n")
    git(repository, "add", "mine.txt")

    assert run(repository).code == 0
    changed = git(repository, "status", "--porcelain", "-uall").splitlines()
    assert {line[3:] for line in changed} == {"mine.txt", *PATHS}
    result = run("--commit", repository)
    assert result.code == 0 and len(result.report["commits"]) == len(SERIES)
    assert git(repository, "status", "--porcelain") == "A  mine.txt\n"
    subjects = git(repository, "log", "--format=%s", "--reverse").splitlines()
    assert subjects == ["base", *(patch.subject for patch in SERIES)]
    assert "Fixes: #197871" in git(repository, "log", "--format=%B")
    assert run("--commit", repository).report["commits"] == []

    assert run("--reverse", repository).code == 0
    git(repository, "commit", "--quiet", "-m", "revert", *PATHS)
    assert git(repository, "rev-parse", "HEAD^{tree}") == base


def test_commit_refuses_uncommitted_changes(repository):
    edit(repository / CONFIG, "import os\n", "import os  # mine\n")
    refuses(1, "not committed", "--commit", repository, tree=repository / "torch")


# ------------------------------------------------- a real installed torch


def test_installed(tmp_path, monkeypatch):
    """A virtual environment that shares its torch with ours by links.

    It stands inside a git repository that is not PyTorch's, as a project's own
    environment does.
    """
    git(tmp_path, "init", "--quiet")
    venv, ours = tmp_path / ".venv", Path(sysconfig.get_path("purelib"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = next((venv / "lib").glob("python*/site-packages"))
    shutil.copytree(ours / "torch", packages / "torch", copy_function=os.link)
    # What torch needs, but for torch.
    (packages / "needed.pth").write_text(f"{ours}\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(venv / "bin")
    functorch = packages / "torch/_functorch"
    pristine, old_time = snapshot(functorch), (packages / PARTITIONERS).stat().st_mtime

    # A result that does not import is undone.
    place = functorch / "_activation_checkpointing/__init__.py"
    text = place.read_bytes()
    forbids = (
        b"import pathlib\n"
        b"source = pathlib.Path(__file__).with_name('knapsack.py').read_text()\n"
        b"assert 'KNAPSACK_SOLVERS' not in source, 'this tree forbids it'\n"
    )
    rewrite(place, lambda text: forbids)
    before = snapshot(packages / "torch/_functorch")
    result = run("--installed", "--python", "./python")
    assert result.code == 1 and "this tree forbids it" in result.text
    assert before == snapshot(packages / "torch/_functorch")
    rewrite(place, lambda forbids: text)

    result = run("--installed", "--python", "./python")
    assert result.code == 0 and "an import by" in result.text, result.text
    assert result.report["target"] == str(packages)
    assert result.report["installed"] and not (packages / "test").exists()
    assert int((packages / PARTITIONERS).stat().st_mtime) > int(old_time)
    assert run("--reverse", "--installed", "--python", "./python").code == 0
    assert snapshot(functorch) == pristine == snapshot(ours / "torch/_functorch")
    assert not list(packages.glob(STATE_NAME + "*"))
    shutil.rmtree(venv)


def test_no_suitable_python(tmp_path):
    environment = {**os.environ, "APPLY_PYTHON": str(tmp_path / "none")}
    done = called(SCRIPT, tmp_path, env=environment)
    assert done.returncode == 2 and "name one in APPLY_PYTHON" in done.stderr
