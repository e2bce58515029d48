"""The series as mails: what is checked in is current, and git am agrees with us."""

import os
import subprocess
import sys

import pytest
from conftest import commit_all, contents, git, snapshot
from patchset import apply, export, generate
from patchset.patch import RELEASES, REPOSITORY
from patchset.series import SERIES
from patchset.target import STATE_NAME


def in_release(release):
    """The patches that have something to change there."""
    return [p for p in SERIES if p.fits(release)]


@pytest.fixture
def repository(checkout):
    """A git checkout with one commit, of the files that the series touches."""

    def make(release, name):
        return commit_all(checkout(release, name))

    return make


def test_checked_in_patches_are_current():
    assert generate.main(["--check"]) == 0


def test_check_sees_a_difference(capsys):
    place = next(generate.PATCHES.rglob("*.patch"))
    text = place.read_text()
    extra = place.with_name("0099-stale.patch")
    try:
        place.write_text(text + "\n")
        extra.write_text(text)
        assert generate.main(["--check"]) == 1
    finally:
        place.write_text(text)
        extra.unlink()
    said = capsys.readouterr().out
    assert str(place.relative_to(REPOSITORY)) in said and "0099-stale" in said


@pytest.mark.parametrize("release", RELEASES)
def test_git_am_gives_the_same_tree(repository, tmp_path, release, capsys):
    by_git = repository(release, "by_git")
    by_us = repository(release, "by_us")
    base = contents(by_us)
    assert export.main([str(by_git), str(tmp_path / "series")]) == 0
    assert apply.main([str(by_us)]) == 0

    # From an applied tree the same series comes out.
    assert export.main([str(by_us), str(tmp_path / "again")]) == 0
    assert snapshot(tmp_path / "series") == snapshot(tmp_path / "again")

    mails = sorted((tmp_path / "series").iterdir())
    wanted = in_release(release)
    assert [m.name[5:] for m in mails] == [f"{p.name}.patch" for p in wanted]
    git(by_git, "am", "--quiet", *map(str, mails))
    assert contents(by_git) == contents(by_us) != base
    assert git(by_git, "status", "--porcelain") == ""
    subjects = git(by_git, "log", "--format=%s", "--reverse").splitlines()
    assert subjects == ["base", *(patch.subject for patch in wanted)]
    capsys.readouterr()
    assert apply.main(["--status", str(by_git)]) == 0
    assert capsys.readouterr().out.count(" applied") == len(wanted)


@pytest.mark.parametrize("release", RELEASES)
def test_checked_in_patches_apply(repository, release):
    """The patches for reviewers hold exactly the edits: the overlay is not in them."""
    by_git = repository(release, "by_git")
    by_us = repository(release, "by_us")
    assert apply.main([str(by_us)]) == 0
    edited = {e.path for p in SERIES for e in p.edits if e.fits(release)}
    for mail in sorted((REPOSITORY / "patches" / release).iterdir()):
        git(by_git, "apply", "--index", str(mail))
    for path in edited:
        assert (by_git / path).read_bytes() == (by_us / path).read_bytes()
    touched = git(by_git, "diff", "--cached", "--name-only").split()
    assert set(touched) == edited


def test_export_refuses(repository, tmp_path, capsys):
    root = repository("2.13.0", "pytorch")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert export.main([str(root), str(tmp_path / "full")]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert export.main([str(tmp_path / "full"), str(tmp_path / "new")]) == 2
    assert "not a PyTorch tree" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "script", sorted(p.name for p in (REPOSITORY / "scripts").glob("*.sh"))
)
def test_every_script_is_documented(script):
    """README names each script, and each that takes arguments explains itself."""
    assert f"scripts/{script}" in (REPOSITORY / "README.md").read_text()
    if script in ("environment.sh", "run_patched.sh"):
        return
    done = subprocess.run(
        [REPOSITORY / "scripts" / script, "--help"],
        env={**os.environ, "APPLY_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "usage:" in done.stdout
    assert STATE_NAME not in done.stdout
