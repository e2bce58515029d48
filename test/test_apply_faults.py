"""scripts/apply_patch.sh where things go wrong around it: full or read-only disks,
damaged journals, a torch that was uninstalled, a Python that cannot read the tree."""

import errno
import os
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
from conftest import git, lay, refuses, rewrite, run, snapshot
from patchset import images
from patchset.patch import CONFIG, KNAPSACK, PARTITIONERS, REPOSITORY
from patchset.series import SERIES, stack
from patchset.target import STATE_NAME


SCRIPT = REPOSITORY / "scripts" / "apply_patch.sh"
PAGE = 4096
# Enough patches for files that are new, and edited by several.
_KEPT = stack(next(p for p in SERIES if p.name == "solver-by-name"))
FEW = [word for p in SERIES if p not in _KEPT for word in ("--without", p.name)]


class Disk:
    """A file system of its own, of 16 MiB."""

    def __init__(self, place):
        self.place = place
        self.ballast = place / "ballast"

    def mount(self, *options):
        subprocess.run(
            ["mount", "-t", "tmpfs", *options, "tmpfs", self.place],
            check=True,
            capture_output=True,
            text=True,
        )

    def remount(self, access):
        self.mount("-o", f"remount,{access}")

    def leave(self, pages=None):
        """Fill the disk but for so many pages; None: do not."""
        shutil.rmtree(self.ballast, ignore_errors=True)
        self.ballast.mkdir()
        if pages is not None:
            free = os.statvfs(self.place).f_bavail
            (self.ballast / "pages").write_bytes(bytes(PAGE * (free - pages)))


@pytest.fixture
def disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    disk = Disk(place)
    try:
        disk.mount("-o", "size=16m")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield disk
    subprocess.run(["umount", place], check=True)


@pytest.fixture
def root_on_disk(disk, root):
    return shutil.copytree(root, disk.place / "pytorch", symlinks=True)


# ------------------------------------------------------------- a full disk


def test_full_at_every_write(disk, root_on_disk):
    root = root_on_disk
    before = snapshot(root)
    named = set()
    for left in range(0, 400, 2):
        disk.leave(left)
        result = run(*FEW, root)
        if result.code == 0:
            break
        assert result.code == 1 and "free some space" in result.text
        named.add(result.text.partition(": No space left")[0].rpartition(" ")[2])
        assert snapshot(root) == before, left
        assert run("--status", root).code == 0
    assert result.code == 0 and left > 10
    backups = root / f"{STATE_NAME}.new" / "backups"
    # What is replaced gives its space back: not every file can take the last of it.
    assert {str(root / KNAPSACK), str(backups / PARTITIONERS)} <= named
    assert str(root / f"{STATE_NAME}.new" / "journal.json") in named

    disk.leave(0)
    assert run("--reverse", root).code == 0
    assert snapshot(root) == before


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


def test_backups_on_another_file_system(disk, root_on_disk, tmp_path):
    """They cannot be moved into place there."""
    root = root_on_disk
    git(root, "init", "--quiet", "--separate-git-dir", tmp_path / "elsewhere")
    before = snapshot(root)
    assert run(root).code == 0
    assert (tmp_path / "elsewhere" / STATE_NAME).is_dir()
    disk.leave(pages=3)
    result = run("--reverse", root)
    assert result.code == 4 and "No space left" in result.text
    disk.leave()
    assert run("--reverse", root).code == 0
    assert snapshot(root) == before


# ------------------------------------------------- what cannot be written


def test_read_only_tree(disk, root_on_disk):
    root = root_on_disk
    disk.remount("ro")
    assert set(run("--status", root).states.values()) <= {images.APPLIES, images.FAULTY}
    for action in ([], ["--check"]):
        refuses(1, f"the folder {root} is not writable", *action, root, tree=root)
    assert run("--reverse", root).code == 0

    disk.remount("rw")
    assert run(root).code == 0
    disk.remount("ro")
    assert set(run("--status", root).states.values()) == {images.APPLIED}
    assert "already applied" in run("--check", root).text
    refuses(1, "is not writable", "--reverse", root, tree=root)


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

    def uninstall():
        for path in sorted(pristine, reverse=True):
            if not (root / path).is_dir():
                (root / path).unlink()
            elif not any((root / path).iterdir()):
                (root / path).rmdir()

    result = run(root)
    assert result.code == 0 and result.report["installed"]
    written = snapshot(root)
    uninstall()
    for action in ACTIONS:
        result = refuses(2, "torch was uninstalled", *action, root, tree=root)
        assert f"Delete {root / 'torch'} and {root / STATE_NAME}" in result.text

    lay(release_tree("2.13.0"), root)
    shutil.rmtree(root / "test", ignore_errors=True)
    assert run(root).code == 0
    assert snapshot(root).keys() == written.keys()
    uninstall()
    lay(release_tree("2.13.0"), root)
    shutil.rmtree(root / "test", ignore_errors=True)
    result = run("--reverse", root)
    assert result.code == 0
    assert snapshot(root) == pristine


def test_the_torch_that_pythonpath_has(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    monkeypatch.setenv("PYTHONPATH", root.name)
    command = [SCRIPT, "--status", "--json", "--installed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'"target": "{root}"' in done.stdout


# ------------------------------------------------------- an older Python


@pytest.fixture
def old_python():
    """A Python 3.9, which cannot read PyTorch 2.13."""
    places = [shutil.which("python3.9")]
    places += sorted(Path.home().glob(".pyenv/versions/3.9.*/bin/python3.9"))
    code = "import sys; sys.exit(sys.version_info[:2] != (3, 9))"
    for place in filter(None, places):
        command = [place, "-c", code]
        if not subprocess.run(command, check=False, capture_output=True).returncode:
            return Path(place)
    pytest.skip("no Python 3.9 is here")


def test_a_python_that_cannot_read_the_tree(checkout, old_python, monkeypatch):
    monkeypatch.setenv("APPLY_PYTHON", str(old_python))

    def call(*arguments):
        command = [SCRIPT, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    root = checkout("2.13.0")
    before = snapshot(root)
    for action in ACTIONS:
        done = call(*action, root)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Python 3.10 or newer is needed to read PyTorch 2.13.0" in done.stderr
        assert "APPLY_PYTHON" in done.stderr and snapshot(root) == before
    done = call("--status", checkout("2.6.0", "old"))
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
    assert len(result.report["commits"]) == len(_KEPT), result.text
    assert git(repository, "status", "--porcelain") == ""
