"""The series as mails: what is checked in is current, and git agrees with us."""

import itertools

from conftest import commit_all, contents, git
from patchset import apply
from patchset.patch import KNOWN, REPOSITORY
from patchset.series import SERIES
from upkeep import generate


def test_check_sees_a_difference(
    release_tree, derived_elsewhere, tmp_path, monkeypatch, capsys
):
    """On one release; patches that are edited, left over or gone are all named."""
    release_tree("2.13.0")
    row = {"2.13.0": KNOWN["2.13.0"]}
    monkeypatch.setattr(generate, "RELEASES", ["2.13.0"])
    assert generate.main([]) == 0 and generate.main(["--check"]) == 0
    assert generate.json.loads((tmp_path / "manifest.json").read_text()) == row
    edited, gone, *_ = sorted((tmp_path / "patches/2.13.0").iterdir())
    edited.write_text(edited.read_text() + "\n")
    gone.rename(gone.with_name("0099-stale.patch"))
    capsys.readouterr()
    assert generate.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert all(
        f"{name}: not" in said for name in (edited.name, gone.name, "0099-stale.patch")
    )


def test_git_gives_the_same_tree(checkout, tmp_path, release, capsys):
    by_git, by_us = (commit_all(checkout(release, n)) for n in ("by_git", "by_us"))
    base = contents(by_us)
    assert apply.main(["--commit", str(by_us)]) == 0

    # The patches for reviewers hold exactly the edits: the overlay is not in them.
    edited = {e.path for p in SERIES for e in p.edits_for(release)}
    for mail in sorted((REPOSITORY / "patches" / release).iterdir()):
        git(by_git, "apply", "--index", str(mail))
    for path in edited:
        assert (by_git / path).read_bytes() == (by_us / path).read_bytes()
    assert set(git(by_git, "diff", "--cached", "--name-only").split()) == edited
    git(by_git, "reset", "--quiet", "--hard")

    series = tmp_path / "series"
    wanted = [p for p in SERIES if p.fits(release)]
    git(by_us, "format-patch", "--quiet", f"-{len(wanted)}", "-o", str(series))
    git(by_git, "am", "--quiet", *map(str, sorted(series.iterdir())))
    assert contents(by_git) == contents(by_us) != base
    assert git(by_git, "status", "--porcelain") == ""
    subjects = git(by_git, "log", "--format=%s", "--reverse").splitlines()
    assert subjects == ["base", *(patch.subject for patch in wanted)]
    capsys.readouterr()
    assert apply.main(["--status", str(by_git)]) == 0
    assert capsys.readouterr().out.count(" applied") == len(wanted)


def test_no_edit_is_of_a_line_that_another_wrote():
    edits = [(patch.name, edit) for patch in SERIES for edit in patch.edits]
    for (one, first), (other, second) in itertools.permutations(edits, 2):
        if one != other and first.path == second.path:
            added = first.replacement.replace(first.anchor, "")
            assert second.anchor not in added, (one, other, second.anchor)


def test_every_script_is_documented():
    pages = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
    text = "".join(page.read_text() for page in pages)
    scripts = {place.name for place in (REPOSITORY / "scripts").glob("*.sh")}
    missing = [name for name in scripts if f"scripts/{name}" not in text]
    assert missing == ["environment.sh"]
