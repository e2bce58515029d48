"""Every topic becomes a branch and a text that a reviewer can be sent."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import commit_all, contents, git
from patchset import pull_request, upstream_checks
from patchset.patch import KNAPSACK, REPOSITORY
from patchset.series import SERIES
from test_debian_source import fetch


TOPICS = [patch.name for patch in SERIES]


@pytest.fixture
def repository(checkout):
    """A git checkout of 2.13.0, of the files that the series touches."""
    return commit_all(checkout("2.13.0"))


@pytest.fixture
def bodies(tmp_path, monkeypatch):
    """Where the texts go, instead of build/pr."""
    monkeypatch.setattr(pull_request, "BODIES", tmp_path / "pr")
    return tmp_path / "pr"


@pytest.mark.parametrize("topic", TOPICS)
def test_branch(repository, bodies, tmp_path, topic):
    """One commit above what it needs, in words and files that ``git am`` takes."""
    before = contents(repository)
    assert pull_request.main([topic, str(repository)]) == 0
    assert contents(repository) == before and not git(repository, "status", "--short")
    branch = f"ac-budget/{topic}"
    patches = pull_request.stack(topic)
    subjects = git(repository, "log", "--format=%s", f"HEAD..{branch}").splitlines()
    assert subjects == [patch.subject for patch in reversed(patches)]
    changed = git(repository, "diff", "--name-only", f"{branch}^", branch).split()
    assert changed and set(changed) <= set(patches[-1].paths())

    git(
        repository,
        "format-patch",
        "--quiet",
        "-o",
        str(tmp_path / "mails"),
        f"HEAD..{branch}",
    )
    git(repository, "am", "--quiet", *map(str, sorted((tmp_path / "mails").iterdir())))
    assert git(repository, "diff", "HEAD", branch) == ""


@pytest.mark.parametrize("topic", TOPICS)
def test_body_has_the_stored_figures(repository, bodies, topic):
    assert pull_request.main([topic, str(repository)]) == 0
    text = (bodies / f"{topic}.md").read_text()
    patch = pull_request.stack(topic)[-1]
    for heading in (
        "Problem and mechanism",
        "Change",
        "Evidence",
        "Test plan",
        "Risks",
    ):
        section = re.search(rf"^## {heading}\n\n(.+?)(?=^## |\Z)", text, re.M | re.S)
        assert section and len(section[1].strip()) > 40, heading
    assert patch.tested in text and all(item in text for item in patch.trailers)
    ours = SERIES[TOPICS.index(topic)]
    for result, beginning in ours.evidence:
        rows = json.loads((REPOSITORY / "results" / f"{result}.json").read_text())[
            "rows"
        ]
        rows = [row for row in rows if row["what"].startswith(beginning)]
        assert rows and all(f"| {r['what']} | {r['measured']} |" in text for r in rows)
    assert (
        "| 2.13.0 | fails | passes |" in text or "| 2.15.0 | fails | passes |" in text
    )


def test_missing_evidence_is_refused(repository, bodies, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pull_request, "RESULTS", tmp_path)
    monkeypatch.setattr(pull_request, "REPOSITORY", tmp_path)
    assert pull_request.main(["knapsack-exact", str(repository)]) == 1
    said = capsys.readouterr().err
    assert "releases.json is missing" in said and "scripts/refresh.sh --all" in said
    (tmp_path / "releases.json").write_text(
        (REPOSITORY / "results" / "releases.json").read_text()
    )
    (tmp_path / "solvers.json").write_text('{"rows": []}')
    assert pull_request.main(["knapsack-exact", str(repository)]) == 1
    assert "has no row 'corpus:'" in capsys.readouterr().err
    assert "ac-budget" not in git(repository, "branch") and not bodies.exists()


def test_wrong_calls(repository, bodies, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        pull_request.main(["exakt-solver", str(repository)])
    assert "invalid choice: 'exakt-solver'" in capsys.readouterr().err
    assert pull_request.main(["knapsack-exact", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert pull_request.main(["knapsack-exact", str(repository)]) == 0
    assert pull_request.main(["knapsack-exact", str(repository)]) == 1
    assert "branch ac-budget/knapsack-exact exists" in capsys.readouterr().err
    (repository / KNAPSACK).unlink()
    (repository / KNAPSACK).write_text("def mine(): ...\n")
    assert pull_request.main(["knapsack-solvers", str(repository)]) == 1
    assert "no edit is for torch 2.9.1" in capsys.readouterr().err


@pytest.fixture(scope="module")
def assembled(tmp_path_factory):
    """A git checkout of the installed torch, its binaries beside it."""
    root = tmp_path_factory.mktemp("assembled") / "pytorch"
    command = [sys.executable, "scripts/checkout.py", "assemble", str(root)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
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
    tested = pull_request.stack(topic)[-1].tested
    assert (
        f"passed  {tested}" in said and "FAILED" not in said and "not run" not in said
    )
    assert len(git(assembled, "worktree", "list").splitlines()) == 1


def test_upstreams_linters_on_the_source_tree(tmp_path, bodies, capsys):
    """On 2.6.0 as Debian has it: every linter that works offline, none of the tests."""
    source = fetch()
    root = tmp_path / "pytorch"
    for path in (
        "torch/_functorch", "torch/__init__.py", "test/functorch", "tools/linter",
        "version.txt", "setup.py", "pyproject.toml", ".lintrunner.toml", ".flake8",
    ):  # fmt: skip
        if (source / path).is_dir():
            shutil.copytree(source / path, root / path)
        elif (source / path).exists():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / path, root / path)
    commit_all(root)
    assert pull_request.main(["knapsack-exact", str(root), "--check"]) == 0
    said = capsys.readouterr().out
    for code in upstream_checks.LINTERS:
        assert f"passed  lintrunner {code}\n" in said
    assert "not run python test/functorch/test_aotdispatch.py -k Partitioning" in said
