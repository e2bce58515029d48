"""Shared fixtures: real trees of every supported release, cloned by hard links.

Every clone shares its inodes with the tree it came from, as an installation by
uv does: nothing may be written through a link. ``release_tree`` compares the
originals at the end of the run.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from patchset.releases import tree
from patchset.series import SERIES


def snapshot(root, skip=()):
    """Every path below ``root`` with its mode and content, folders included."""
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skip]
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
    paths = sorted({path for patch in SERIES for path in patch.paths()})
    return {p: (root / p).read_bytes() if (root / p).exists() else None for p in paths}


def clone(source, destination):
    shutil.copytree(source, destination, copy_function=os.link, symlinks=True)
    return destination


def git(folder, *arguments, **options):
    """git's output; a file's ctime is no news here, for every clone changes it."""
    return subprocess.run(
        ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
        + ["-c", "core.trustctime=false"]
        + ["-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
        **options,
    ).stdout


@pytest.fixture(scope="session")
def release_tree():
    """``release_tree("2.13.0")``: that release's Python files; not to be changed."""
    before = {}

    def get(release):
        place = tree(release)
        if release not in before:
            before[release] = snapshot(place / "torch/_functorch")
        return place

    yield get
    for release, known in before.items():
        assert snapshot(tree(release) / "torch/_functorch") == known, release


@pytest.fixture
def checkout(release_tree, tmp_path):
    """``checkout("2.13.0")``: a clone of the partitioner's folder, as a checkout."""

    def make(release, name="pytorch"):
        source = release_tree(release)
        root = tmp_path / name
        (root / "torch").mkdir(parents=True)
        clone(source / "torch/_functorch", root / "torch/_functorch")
        for path in ("torch/__init__.py", "torch/version.py"):
            os.link(source / path, root / path)
        (root / "version.txt").write_text(f"{release}a0\n")
        (root / "test" / "functorch").mkdir(parents=True)
        return root

    return make
