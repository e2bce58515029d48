"""Shared fixtures: real trees of every supported release, cloned by hard links.

Every clone shares its inodes with the tree it came from, as an installation by
uv does: nothing may be written through a link. ``release_tree`` compares the
originals at the end of the run.
"""

import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from patchset import apply
from patchset.patch import RELEASES
from patchset.series import SERIES, stack
from upkeep import generate
from upkeep.releases import tree, Unavailable


USUAL = "2.13.0"
# The others' texts are checked by scripts/generate_patches.sh --check.
TRIED = (RELEASES[0], USUAL, RELEASES[-1])


FOLDER = "torch/_functorch"
PATHS = sorted({path for patch in SERIES for path in patch.paths()})
# What tests a smallest form fails where the set does the same in another way.
OF_SMALLEST_FORMS = {p.minimal.test for p in SERIES if p.minimal} - {*PATHS}
# Enough patches for files that are new, and edited by several.
KEPT = stack(next(p for p in SERIES if p.name == "solver-by-name"))
FEW = [word for p in SERIES if p not in KEPT for word in ("--without", p.name)]


def pytest_addoption(parser):
    parser.addoption(
        "--all-releases",
        action="store_true",
        help=f"tests per release on all {len(RELEASES)}, not just {', '.join(TRIED)}; "
        "fetches about 400 MB more",
    )


class FewerToCollect:
    """No test of a smallest form alone, which scripts/refresh.sh runs; and what there is
    before a test stays: its many collections need not look at that."""

    def pytest_runtest_setup(self):
        gc.collect()
        gc.freeze()

    def pytest_ignore_collect(self, collection_path):
        place = collection_path.as_posix()
        return place.endswith(tuple(OF_SMALLEST_FORMS)) or None


def pytest_configure(config):
    # A hook of this file would be for the tests beside it only.
    config.pluginmanager.register(FewerToCollect())
    # A shell starts its background jobs with this ignored, and children inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_generate_tests(metafunc):
    if "release" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-releases")
        metafunc.parametrize("release", RELEASES if every else TRIED)


def snapshot(root):
    """Every path below ``root`` with its mode and content, folders included.

    But for bytecode, which any import may leave behind.
    """
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in folders + files:
            place = Path(folder, name)
            status = place.lstat()
            content = None
            if place.is_symlink():
                content = os.readlink(place)
            elif place.is_file():
                content = hashlib.sha256(place.read_bytes()).hexdigest()
            found[str(place.relative_to(root))] = (status.st_mode, content)
    return found


def contents(root):
    """The files that the series touches, None where there is none."""
    return {p: (root / p).read_bytes() if (root / p).exists() else None for p in PATHS}


def lay(source, root):
    """Of a release what the series looks at, and what makes it a PyTorch tree."""
    for path in ["torch/__init__.py", "torch/version.py", *PATHS]:
        if (source / path).exists():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).unlink(missing_ok=True)
            os.link(source / path, root / path)


def called(*command, **options):
    """A command that has ended, with what it printed."""
    command = [*map(str, command)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )


def git(folder, *arguments, **options):
    """git's output; a file's ctime is no news here, for every clone changes it."""
    return subprocess.run(
        ["git", "-c", "core.trustctime=false", "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
        **options,
    ).stdout


def commit_all(root):
    """Make ``root`` a git checkout with one commit."""
    git(root, "init", "--quiet")
    git(root, "config", "user.name", "test")
    git(root, "config", "user.email", "test@localhost")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", "base")
    return root


def rewrite(place, change):
    """Give the file another content, without writing through its hard links."""
    content = place.read_bytes()
    place.unlink()
    place.write_bytes(change(content))


def edit(place, old, new):
    """Replace text that must be there, in the same way."""
    assert old.encode() in place.read_bytes()
    rewrite(place, lambda content: content.replace(old.encode(), new.encode()))


class Result:
    def __init__(self, code, output):
        self.code = code
        self.report = json.loads(output)
        self.text = "\n".join(self.report["messages"])
        self.states = {p["name"]: p["state"] for p in self.report["patches"]}
        self.details = {p["name"]: p["detail"] for p in self.report["patches"]}
        assert self.report["exit_code"] == code


def run(*arguments):
    """The command, in this process: what it parsed and compiled once stays known."""
    with redirect_stdout(StringIO()) as output:
        code = apply.main([*map(str, arguments), "--json"])
    return Result(code, output.getvalue())


def refuses(code, words, *arguments, tree=None):
    """The call fails with ``code`` and ``words``, and leaves the tree alone."""
    before = tree and snapshot(tree)
    result = run(*arguments)
    assert result.code == code, result.text
    assert words in result.text
    assert before == (tree and snapshot(tree))
    return result


@pytest.fixture
def root(checkout):
    return checkout(USUAL)


class Killed(BaseException):
    """Nothing in a command catches it, as nothing catches a SIGKILL."""


def raise_killed(place):
    raise Killed


class Steps:
    """Calls ``stop`` with the path before a command's step ``left``; idle below 0.

    With ``lasting``, before each step after that as well.

    A step is anything that the command does to a file system, seen through Python's
    audit events. There is one of these, as their hooks stay for good.
    """

    KINDS = frozenset(
        ["open", "shutil.rmtree"]
        + [f"os.{call}" for call in ("chmod", "chown", "mkdir", "remove", "rename")]
        + [f"os.{call}" for call in ("rmdir", "symlink", "utime")]
    )

    def __init__(self):
        self.left, self.stop, self.lasting = -1, None, False
        sys.addaudithook(self.watch)

    def watch(self, event, details):
        if self.left < 0 or event not in self.KINDS:
            return
        if event == "open" and not details[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if self.left == 0:
            self.reached = True
            self.left = 0 if self.lasting else -1
            self.stop(details[0])
        self.left -= 1

    def run(self, number, work, stop=raise_killed, lasting=False):
        """Whether the work came to its end before that step."""
        self.left, self.stop, self.lasting = number, stop, lasting
        self.reached = False
        try:
            work()
        except Killed:
            return False
        finally:
            self.left = -1
        return not self.reached


@pytest.fixture(scope="session")
def steps():
    return Steps()


@pytest.fixture(scope="session")
def release_tree():
    """``release_tree("2.13.0")``: that release's Python files; not to be changed."""
    before = {}
    missing = {}

    def get(release):
        if release not in missing:
            try:
                place = tree(release)
            except Unavailable as reason:
                missing[release] = str(reason)
        if release in missing:
            pytest.skip(missing[release])
        if release not in before:
            before[release] = snapshot(place / FOLDER), contents(place)
        return place

    yield get
    for release, known in before.items():
        place = tree(release)
        assert (snapshot(place / FOLDER), contents(place)) == known, release


@pytest.fixture
def checkout(release_tree, tmp_path):
    """``checkout("2.13.0")``: what the series looks at of it, as a checkout."""

    def make(release, name="pytorch"):
        root = tmp_path / name
        lay(release_tree(release), root)
        (root / "version.txt").write_text(f"{release}a0\n")
        (root / "test" / "functorch").mkdir(parents=True)
        (root / "test" / "inductor").mkdir()
        return root

    return make


@pytest.fixture
def repository(checkout):
    """A git checkout of 2.13.0 with one commit."""
    return commit_all(checkout(USUAL))


@pytest.fixture
def derived_elsewhere(tmp_path, monkeypatch):
    """What ``generate`` writes goes to ``tmp_path``."""
    monkeypatch.setattr(generate, "REPOSITORY", tmp_path)
    monkeypatch.setattr(generate, "PATCHES", tmp_path / "patches")
    monkeypatch.setattr(generate, "MANIFEST", tmp_path / "manifest.json")


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """One thread, a compile cache of its own, and nothing left of other tests.

    Inductor makes plain loops, which compile fastest.
    """
    import torch
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with config.patch({"cpp.simdlen": 1}):
        yield
    torch.set_num_threads(threads)
