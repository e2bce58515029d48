"""Every topic becomes a branch and a text that a reviewer can be sent."""

import re
from dataclasses import replace

import pytest
from conftest import commit_all, contents, edit, git, snapshot
from patchset import apply
from patchset.images import survey
from patchset.patch import CONFIG, Edit, KNAPSACK, RELEASES
from patchset.series import exported, FORMS, SERIES, stack
from patchset.target import find
from upkeep import checkout, landed, pull_request, upstream_checks


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
    patches = stack(FORMS[exported(topic)])
    subjects = git(repository, "log", "--format=%s", f"HEAD..{branch}").splitlines()
    assert subjects == [patch.subject for patch in reversed(patches)]
    changed = git(repository, "diff", "--name-only", f"{branch}^", branch).split()
    assert changed and set(changed) <= set(patches[-1].paths())

    text = (bodies / f"{topic}.md").read_text()
    for heading in ("Problem and mechanism", "Change", "Test plan", "Risks"):
        section = text.partition(f"## {heading}\n\n")[2].partition("\n## ")[0]
        assert len(section.strip()) > 40, heading
    assert all(item in text for item in patches[-1].trailers)
    # A reviewer pastes it.
    assert len(patches[-1].repro.strip().splitlines()) <= 15
    ran = r"passes with it, (before its last edit )?on torch 2\."
    assert "fails without this change and passes with it, " in text
    assert re.search(ran, text)

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


def test_each_form_names_its_risks():
    assert [p.name for p in SERIES if not FORMS[exported(p.name)].risks] == []


def test_a_branch_that_cannot_be_made_is_refused(repository, bodies, capsys):
    call = ["knapsack-exact", str(repository)]
    branch = "ac-budget/knapsack-exact"
    assert pull_request.main(call) == 0
    # With the contributor's name on it.
    git(repository, "switch", "--quiet", branch)
    git(repository, "commit", "--quiet", "--amend", "--reset-author", "--no-edit")
    git(repository, "switch", "--quiet", "-")
    capsys.readouterr()
    assert pull_request.main(call) == 0
    assert f"branch {branch}, as it was:" in capsys.readouterr().out
    git(repository, "switch", "--quiet", branch)
    git(repository, "commit", "--quiet", "--amend", "-m", "mine")
    git(repository, "switch", "--quiet", "-")
    assert pull_request.main(call) == 1
    assert f"branch {branch} exists and holds" in capsys.readouterr().err
    git(repository, "worktree", "add", "--quiet", "../other", branch)
    assert pull_request.main([*call, "--force"]) == 1
    assert f"branch {branch} is checked out in" in capsys.readouterr().err
    git(repository, "worktree", "remove", "../other")
    assert pull_request.main([*call, "--force"]) == 0
    subject = FORMS["knapsack-exact"].subject
    assert git(repository, "log", "-1", "--format=%s", branch) == f"{subject}\n"
    (repository / KNAPSACK).unlink()
    (repository / KNAPSACK).write_text("def mine(): ...\n")
    assert pull_request.main(["knapsack-solvers", str(repository)]) == 1
    words = "conflicts (torch/_functorch/_activation_checkpointing/knapsack.py: "
    assert words in capsys.readouterr().err


def test_check_of_a_branch(bodies, tmp_path, capsys):
    """In a checkout that runs; scripts/refresh.sh tests every form on every release."""

    def out():
        return capsys.readouterr().out

    root = tmp_path / "pytorch"
    assert checkout.main(["assemble", str(root)]) == 0
    built = ("*.so*", "torch/bin", "torch/lib", "torch/include", "torch/share")
    ignored = "\n".join(["__pycache__", *built, ""])
    (root / ".gitignore").write_text(ignored)
    commit_all(root)
    code = pull_request.main(["knapsack-solvers", str(root), "--check"])
    said = out()
    assert code == 0 and "FAILED" not in said and "not run" not in said, said
    assert f"passed  {FORMS['knapsack-solvers'].minimal.tested}" in said
    assert len(git(root, "worktree", "list").splitlines()) == 1

    # What has landed is told by the tests, and nothing is left there.
    status = ["--status", "knapsack-solvers", str(root)]
    assert pull_request.main(status) == 0
    assert re.search(r"solvers +open +AssertionError.*; its edits fit\n1 open", out())
    git(root, "switch", "--quiet", "ac-budget/knapsack-solvers")
    assert pull_request.main(status) == 0
    assert re.search(r"solvers +landed\n1 landed", out())
    assert git(root, "status", "--porcelain") == ""


def test_all_branches(repository, bodies, monkeypatch, capsys):
    """What is over its mark, has findings or cannot be made is named; the rest is made."""
    names = ("cache-key", "config-solver-name", "conv-layout", "knapsack-solvers")
    monkeypatch.setattr(pull_request, "SERIES", [FORMS[name] for name in names])
    unused = Edit(CONFIG, anchor="import os\n", replacement="import json\nimport os\n")
    made_up = {
        "cache-key": replace(FORMS["cache-key"], lines=6),
        "config-solver-name": replace(FORMS["config-solver-name"], edits=(unused,)),
        "knapsack-solvers, smallest form": replace(
            FORMS["knapsack-solvers, smallest form"], lines=2
        ),
    }
    for name, form in made_up.items():
        monkeypatch.setitem(FORMS, name, form)
    path = FORMS["conv-layout"].edits[0].path
    edit(repository / path, FORMS["conv-layout"].edits[0].anchor, "")
    git(repository, "commit", "--quiet", "--all", "-m", "newer")
    for _ in range(2):
        assert pull_request.main(["--all", str(repository)]) == 1
        printed = capsys.readouterr()
        assert "conv-layout (3 of 4) ...\n    not made: conv-layout: conflicts" in (
            printed.out
        )
        assert re.search(
            r"cache-key +7 +6 +clean +\d +2.11.0 2.*2.15.0 +-\n", printed.out
        )
        assert re.search(r"config-solver-name +1 +- +1 new", printed.out)
        assert re.search(r"knapsack-solvers +1 +2 +clean +5 +\(?2", printed.out)
        assert "3 of 4 branches" in printed.out
        conflicts = printed.err.splitlines()
        assert len(conflicts) == 3, conflicts
        assert conflicts[0].startswith("conflict: conv-layout: not made: ")
        assert conflicts[1] == "conflict: cache-key: 7 lines, over its mark of 6"
        assert re.match(f"conflict: config-solver-name: {CONFIG}.*F401", conflicts[2])
    branches = git(repository, "branch", "--format=%(refname:short)").split()
    made = [f"ac-budget/{name}" for name in names if name != "conv-layout"]
    assert [name for name in branches if "/" in name] == made

    monkeypatch.setattr(pull_request, "SERIES", [FORMS["knapsack-solvers"]])
    assert pull_request.main(["--all", str(repository)]) == 0


# ------------------------------------------------------------- what has landed


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.15.0a0+git1", "TORCH_VERSION=2.15.0 scripts/link_build.sh {root}\n"),
        ("2.99.0a0", "APPLY_PYTHON=PYTHON scripts/export_pr.sh --status {root}\n"),
    ],
)
def test_status_of_what_cannot_be_run(repository, version, words, capsys):
    (repository / "version.txt").write_text(f"{version}\n")
    assert pull_request.main(["--status", str(repository)]) == 2
    said = capsys.readouterr().err
    assert "cannot be run" in said and words.format(root=repository) in said


def test_status_of_a_patched_checkout(repository, capsys):
    assert apply.main([str(repository)]) == 0
    before = snapshot(repository)
    assert pull_request.main(["--status", str(repository)]) == 1
    command = f"scripts/apply_patch.sh --reverse {repository}"
    assert command in capsys.readouterr().err
    assert snapshot(repository) == before


@pytest.mark.parametrize(
    ("body", "state", "why"),
    [
        ("pass", landed.LANDED, ""),
        ("raise ValueError('off')", landed.OPEN, "ValueError: off"),
        ("raise ValueError('off' * 99)", landed.OPEN, "off..."),
        ("import torch.no_such", landed.OPEN, "No module named 'torch.no_such'"),
        ("import no_such", landed.NOT_RUN, "No module named 'no_such'"),
        ("self.skipTest('no GPU')", landed.NOT_RUN, "all of its tests are skipped"),
        ("os.kill(os.getpid(), 9)", landed.NOT_RUN, "killed by signal 9"),
    ],
)
def test_what_a_tests_run_says(tmp_path, body, state, why):
    test = (
        "import os, unittest\n"
        "class Test(unittest.TestCase):\n"
        f"    def test(self):\n        {body}\n"
        "unittest.main()\n"
    )
    (tmp_path / "test_it.py").write_text(test)
    found, words = landed.outcome(upstream_checks.run_test(["test_it.py"], tmp_path))
    assert found == state and why in words
