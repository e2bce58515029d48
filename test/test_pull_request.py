"""Every topic becomes a branch and a text that a reviewer can be sent."""

import json
import re

import pytest
from conftest import commit_all, contents, git
from patchset.images import survey
from patchset.patch import KNAPSACK, RELEASES, REPOSITORY
from patchset.series import FORMS, SERIES, stack
from patchset.target import find
from upkeep import checkout, pull_request, upstream_checks


TOPICS = [patch.name for patch in SERIES]


@pytest.fixture
def bodies(tmp_path, monkeypatch):
    """Where the texts go, instead of build/pr."""
    monkeypatch.setattr(pull_request, "BODIES", tmp_path / "pr")
    return tmp_path / "pr"


@pytest.mark.parametrize("topic", TOPICS)
def test_branch_and_text(repository, bodies, tmp_path, topic):
    """One commit above what it needs, in words and files that ``git am`` takes."""
    before = contents(repository)
    assert pull_request.main([topic, str(repository)]) == 0
    assert contents(repository) == before and not git(repository, "status", "--short")
    branch = f"ac-budget/{topic}"
    ours = FORMS[topic]
    patches = stack(ours.minimal or ours)
    subjects = git(repository, "log", "--format=%s", f"HEAD..{branch}").splitlines()
    assert subjects == [patch.subject for patch in reversed(patches)]
    changed = git(repository, "diff", "--name-only", f"{branch}^", branch).split()
    assert changed and set(changed) <= set(patches[-1].paths())

    text = (bodies / f"{topic}.md").read_text()
    for heading in (
        "Problem and mechanism",
        "Change",
        "Evidence",
        "Test plan",
        "Risks",
    ):
        section = text.partition(f"## {heading}\n\n")[2].partition("\n## ")[0]
        assert len(section.strip()) > 40, heading
    assert all(item in text for item in patches[-1].trailers)
    assert "fails without this change and passes with it, on torch 2." in text
    for result, beginning in ours.evidence:
        stored = json.loads((REPOSITORY / f"results/{result}.json").read_text())
        rows = [r for r in stored["rows"] if r["what"].startswith(beginning)]
        assert rows and all(f"| {r['what']} | {r['measured']} |" in text for r in rows)

    mails = tmp_path / "mails"
    git(repository, "format-patch", "--quiet", "-o", str(mails), f"HEAD..{branch}")
    git(repository, "am", "--quiet", *map(str, sorted(mails.iterdir())))
    assert git(repository, "diff", "HEAD", branch) == ""
    assert patches[-1].tested in text
    named = re.findall(r"\btest/[\w/]+\.py", text + git(repository, "log"))
    assert named and all((repository / path).is_file() for path in named)


def test_no_topic_brings_upstreams_linters_a_finding(release_tree):
    """Every form on what it needs, on the newest release."""
    newest = RELEASES[-1]
    target = find(str(release_tree(newest)))
    before, after = {}, {}
    for name, patch in FORMS.items():
        found = survey(target, series=stack(patch), release=newest)
        for change in found.patches[-1].changes:
            path = f"{name}/{change.path}"
            after[path] = change.after.decode()
            if change.before is not None:
                before[path] = change.before.decode()
    assert len(after) > len(FORMS)
    assert upstream_checks.new_findings(before, after) == []


def test_missing_evidence_is_refused(repository, bodies, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pull_request, "RESULTS", tmp_path)
    monkeypatch.setattr(pull_request, "REPOSITORY", tmp_path)
    assert pull_request.main(["knapsack-exact", str(repository)]) == 1
    said = capsys.readouterr().err
    assert "releases.json is missing" in said and "scripts/refresh.sh --all" in said
    assert "ac-budget" not in git(repository, "branch") and not bodies.exists()


def test_a_branch_that_cannot_be_made_is_refused(repository, bodies, capsys):
    assert pull_request.main(["knapsack-exact", str(repository)]) == 0
    assert pull_request.main(["knapsack-exact", str(repository)]) == 1
    assert "branch ac-budget/knapsack-exact exists" in capsys.readouterr().err
    (repository / KNAPSACK).unlink()
    (repository / KNAPSACK).write_text("def mine(): ...\n")
    assert pull_request.main(["knapsack-solvers", str(repository)]) == 1
    assert "no edit is for torch 2.6.0" in capsys.readouterr().err


@pytest.fixture(scope="module")
def assembled(tmp_path_factory):
    """A git checkout of the installed torch, its binaries beside it."""
    root = tmp_path_factory.mktemp("assembled") / "pytorch"
    assert checkout.main(["assemble", str(root)]) == 0
    built = ("*.so*", "torch/bin", "torch/lib", "torch/include", "torch/share")
    (root / ".gitignore").write_text("\n".join(built) + "\n")
    return commit_all(root)


MINIMAL = [patch.name for patch in SERIES if patch.minimal]


@pytest.mark.parametrize("topic", MINIMAL)
def test_the_smallest_form_passes_the_same_tests(assembled, bodies, topic, capsys):
    """In a checkout that runs; the other topics' forms are the patched checkout itself."""
    assert pull_request.main([topic, str(assembled), "--check"]) == 0, (
        capsys.readouterr()
    )
    said = capsys.readouterr().out
    tested = FORMS[topic].minimal.tested
    assert (
        f"passed  {tested}" in said and "FAILED" not in said and "not run" not in said
    )
    assert len(git(assembled, "worktree", "list").splitlines()) == 1
