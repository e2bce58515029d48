"""Every topic becomes a branch and a text that a reviewer can be sent."""

import re

import pytest
from conftest import commit_all, contents, git
from patchset.images import survey
from patchset.patch import KNAPSACK, RELEASES
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
    for heading in ("Problem and mechanism", "Change", "Test plan", "Risks"):
        section = text.partition(f"## {heading}\n\n")[2].partition("\n## ")[0]
        assert len(section.strip()) > 40, heading
    assert all(item in text for item in patches[-1].trailers)
    assert "fails without this change and passes with it, on torch 2." in text

    mails = tmp_path / "mails"
    git(repository, "format-patch", "--quiet", "-o", str(mails), f"HEAD..{branch}")
    git(repository, "am", "--quiet", *map(str, sorted(mails.iterdir())))
    assert git(repository, "diff", "HEAD", branch) == ""
    assert patches[-1].tested in text
    named = re.findall(r"\btest/[\w/]+\.py", text + git(repository, "log"))
    assert named and all((repository / path).is_file() for path in named)


def test_no_topic_brings_upstreams_linters_a_finding(release_tree):
    """The series and the smallest forms; lintrunner looks at whole files."""
    newest = RELEASES[-1]
    target = find(str(release_tree(newest)))
    forms = {"all": SERIES, **{p.name: stack(p.minimal) for p in SERIES if p.minimal}}
    before, after = {}, {}
    for name, series in forms.items():
        for change in survey(target, series=series, release=newest).changes:
            if change.before is not None:
                before[f"{name}/{change.path}"] = change.before.decode()
                after[f"{name}/{change.path}"] = change.after.decode()
    assert len(after) > 10
    assert upstream_checks.new_findings(before, after) == []


def test_a_branch_that_cannot_be_made_is_refused(repository, bodies, capsys):
    assert pull_request.main(["knapsack-exact", str(repository)]) == 0
    assert pull_request.main(["knapsack-exact", str(repository)]) == 1
    assert "branch ac-budget/knapsack-exact exists" in capsys.readouterr().err
    (repository / KNAPSACK).unlink()
    (repository / KNAPSACK).write_text("def mine(): ...\n")
    assert pull_request.main(["knapsack-solvers", str(repository)]) == 1
    assert "nothing to change in 2.6.0" in capsys.readouterr().err


def test_check_of_a_branch(bodies, tmp_path, capsys):
    """In a checkout that runs; scripts/refresh.sh tests every form on every release."""
    root = tmp_path / "pytorch"
    assert checkout.main(["assemble", str(root)]) == 0
    built = ("*.so*", "torch/bin", "torch/lib", "torch/include", "torch/share")
    ignored = "\n".join(["__pycache__", *built, ""])
    (root / ".gitignore").write_text(ignored)
    commit_all(root)
    code = pull_request.main(["knapsack-solvers", str(root), "--check"])
    said = capsys.readouterr().out
    assert code == 0 and "FAILED" not in said and "not run" not in said, said
    assert f"passed  {FORMS['knapsack-solvers'].minimal.tested}" in said
    assert len(git(root, "worktree", "list").splitlines()) == 1
