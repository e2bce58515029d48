"""scripts/apply_patch.sh where things go wrong around it: full or read-only disks,
damaged journals, a torch that was uninstalled or is newer than any that is known, a
Python that cannot read the tree."""

import errno
import os
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
from conftest import called, edit, FEW, git, KEPT, lay, refuses, rewrite, run, snapshot
from patchset import images
from patchset.patch import CONFIG, module_path, PARTITIONERS, RELEASES, REPOSITORY
from patchset.target import STATE_NAME


SCRIPT = REPOSITORY / "scripts" / "apply_patch.sh"


def mount(place, *options):
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", place]
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def root_on_disk(root, tmp_path):
    """On a file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        mount(place, "-o", "size=16m")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield shutil.copytree(root, place / "pytorch", symlinks=True)
    subprocess.run(["umount", place], check=True)


# ------------------------------------------------------------- a full disk


def no_space(place):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)


@pytest.mark.parametrize(
    "action, lasting, codes",
    [
        ("apply", True, {0, 1, 4}),
        ("reverse", False, {0, 4}),
        ("update", True, {0, 4}),
    ],
)
def test_fault_at_every_step(
    root, steps, tmp_path, monkeypatch, action, lasting, codes
):
    """Whatever is done to files may fail, and then once or from there on."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    pristine, applied = tmp_path / "pristine", tmp_path / "applied"
    copy = partial(shutil.copytree, copy_function=os.link)
    calls = {"apply": [*FEW, root], "update": [*FEW[2:], root]}
    calls["reverse"] = ["--reverse", root]
    copy(root, pristine)
    assert run(*calls["apply"]).code == 0
    copy(root, applied)
    before = pristine if action == "apply" else applied
    after = snapshot(pristine if action == "reverse" else applied)
    if action == "update":
        assert run(*calls["update"]).code == 0
        after = snapshot(root)
    results = []

    def work():
        results.append(run(*calls[action]))

    for step in range(500):
        shutil.rmtree(root)
        copy(before, root)
        if steps.run(step, work, no_space, lasting):
            break
        result = results[-1]
        if result.code == 4:
            command = shlex.split(result.text.rpartition("run: ")[2])
            assert command[1:] == [*map(str, calls[action]), "--json"]
            assert run(*calls[action]).code == 0
        wanted = snapshot(before) if result.code == 1 else after
        assert snapshot(root) == wanted, f"failed at {step}: {result.text}"
    assert snapshot(root) == after
    assert {result.code for result in results} == codes


def test_backups_on_another_file_system(root_on_disk, tmp_path):
    """They cannot be moved into place there."""
    root = root_on_disk
    git(root, "init", "--quiet", "--separate-git-dir", tmp_path / "elsewhere")
    before = snapshot(root)
    assert run(root).code == 0
    assert (tmp_path / "elsewhere" / STATE_NAME).is_dir()
    assert run("--reverse", root).code == 0
    assert snapshot(root) == before


def test_read_only_tree(root_on_disk):
    root = root_on_disk
    assert run(root).code == 0
    mount(root.parent, "-o", "remount,ro")
    assert set(run("--status", root).states.values()) == {images.APPLIED}
    assert "already applied" in run("--check", root).text
    refuses(1, "is not writable", "--reverse", root, tree=root)
    mount(root.parent, "-o", "remount,rw")
    assert run("--reverse", root).code == 0
    mount(root.parent, "-o", "remount,ro")
    for action in ([], ["--check"]):
        refuses(1, f"the folder {root} is not writable", *action, root, tree=root)


# --------------------------------------------------- journals and backups


ACTIONS = ([], ["--status"], ["--check"], ["--reverse"])


def cut(content):
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    "damage",
    [
        None,
        cut,
        lambda content: b"{}",
        lambda content: b"[]",
        lambda content: content.replace(b'"format": 1', b'"format": 2'),
    ],
)
def test_damaged_journal(root, damage):
    assert run(root).code == 0
    place = root / STATE_NAME / "journal.json"
    pristine = place.read_bytes()
    if damage is None:
        place.unlink()
    else:
        rewrite(place, damage)
        assert place.read_bytes() != pristine
    for action in ACTIONS:
        words = f"{place}: {'damaged' if damage else 'missing'}"
        result = refuses(1, words, *action, root, tree=root)
        assert f"delete {root / STATE_NAME}" in result.text


@pytest.mark.parametrize("gone", [True, False])
def test_missing_or_damaged_backup(root, gone):
    original = (root / CONFIG).read_bytes()
    assert run(root).code == 0
    before = snapshot(root)
    place = root / STATE_NAME / "backups" / CONFIG
    place.unlink() if gone else rewrite(place, cut)
    for action in ACTIONS:
        words = f"{place}: the backup is {'gone' if gone else 'damaged'}"
        assert (
            f"upstream's {CONFIG}" in refuses(1, words, *action, root, tree=root).text
        )
    # As it says:
    (root / CONFIG).unlink()
    (root / CONFIG).write_bytes(original)
    assert run("--reverse", root).code == 0
    assert run(root).code == 0
    assert snapshot(root) == before


# --------------------------------------------------- an installed torch


def test_torch_is_uninstalled_under_the_set(root, release_tree):
    """As pip does it, which takes away what it knows of, and folders that are empty."""
    (root / "version.txt").unlink()
    shutil.rmtree(root / "test")
    pristine = snapshot(root)

    result = run(root)
    assert result.code == 0 and result.report["installed"]
    for path in sorted(pristine, reverse=True):
        if not (root / path).is_dir():
            (root / path).unlink()
        elif not any((root / path).iterdir()):
            (root / path).rmdir()
    for action in ACTIONS:
        result = refuses(2, "torch was uninstalled", *action, root, tree=root)
        assert f"Delete {root / 'torch'} and {root / STATE_NAME}" in result.text

    lay(release_tree("2.13.0"), root)
    shutil.rmtree(root / "test", ignore_errors=True)
    assert run("--reverse", root).code == 0
    assert snapshot(root) == pristine


def test_the_torch_that_pythonpath_has(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    monkeypatch.setenv("PYTHONPATH", root.name)
    done = called(SCRIPT, "--status", "--json", "--installed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'"target": "{root}"' in done.stdout


# --------------------------------------------------------- a newer torch


@pytest.fixture
def newer(checkout):
    """A commit of main: no file of it is known, and no release is of its version."""
    root = checkout(RELEASES[-1])
    (root / "version.txt").write_text("2.16.0a0\n")
    edit(root / PARTITIONERS, "import os\n", "import os\n\nimport sys\n")
    return root


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (module_path("random_ops"), "random-ops"),
        # What Python would import instead of a module of ours, or not any more.
        (module_path("random_ops/__init__"), "random-ops"),
        ("torch/_functorch/memory_planner.py", "memory-budget"),
    ],
)
def test_a_file_of_upstreams_where_the_set_adds_one(newer, path, name):
    (newer / path).parent.mkdir(exist_ok=True)
    (newer / path).write_text("def theirs(): ...\n")
    words = f"{path}: is in the way of what the patch adds, and is upstream's or"
    for action in ([], ["--check"]):
        result = refuses(1, words, *action, newer, tree=newer)
        assert f"conflict: {name}: {path}" in result.text
        assert "move it away; if it is upstream's, leave the patch out" in result.text
    status = run("--status", newer)
    assert status.code == 1 and status.states[name] == images.CONFLICTS
    assert words in status.details[name]
    # As it says:
    before = snapshot(newer)
    assert run("--without", name, newer).code == 3
    assert (newer / path).read_text() == "def theirs(): ...\n"
    assert run("--reverse", newer).code == 0
    assert snapshot(newer) == before
    (newer / path).unlink()
    assert run(newer).code == 3


def test_a_file_that_upstream_has_since(root):
    """Or that somebody changed, under an applied set: it is not written over."""
    assert run(root).code == 0
    path = module_path("random_ops")
    rewrite(root / path, lambda text: b"def theirs(): ...\n")
    words = f"{path}: is in the way of what the patch adds"
    assert "refresh.sh --from" in refuses(1, words, root, tree=root).text
    (root / path).unlink()
    assert run(root).code == 0


# ------------------------------------------------------- an older Python


def test_a_python_that_cannot_read_the_tree(checkout, monkeypatch):
    """Python 3.9, for PyTorch 2.13."""
    places = sorted(Path.home().glob(".pyenv/versions/3.9.*/bin/python3.9"))
    python = next(iter(places), None) or shutil.which("python3.9")
    if python is None:
        pytest.skip("no Python 3.9 is here")
    monkeypatch.setenv("APPLY_PYTHON", str(python))
    root = checkout("2.13.0")
    before = snapshot(root)
    for action in ACTIONS:
        done = called(SCRIPT, *action, root)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Python 3.10 or newer is needed to read PyTorch 2.13.0" in done.stderr
        assert "APPLY_PYTHON" in done.stderr and snapshot(root) == before
    done = called(SCRIPT, "--status", checkout("2.6.0", "old"))
    assert done.returncode == 0, done.stdout + done.stderr


# --------------------------------------------------------- what is said


def test_commits_that_cannot_be_made(repository):
    """The files are written by then: the next call goes on from there."""
    lock = repository / ".git/index.lock"
    lock.touch()
    result = run("--commit", *FEW, repository)
    assert result.code == 4 and "index.lock" in result.text
    lock.unlink()
    result = run("--commit", *FEW, repository)
    assert len(result.report["commits"]) == len(KEPT), result.text
    assert git(repository, "status", "--porcelain") == ""
