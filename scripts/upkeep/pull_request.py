"""The command behind ``scripts/export_pr.sh``: one topic as a pull request."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Optional

from patchset.commits import check_committable, commit_on_branch
from patchset.images import ABSENT, CONFLICTS, survey
from patchset.mailbox import message
from patchset.patch import Patch, REPOSITORY
from patchset.series import FORMS, SERIES, stack
from patchset.target import BadCall, Conflict, exit_status, find
from patchset.transaction import read_journal

from .upstream_checks import check, conclude


RESULTS = REPOSITORY / "results"
BODIES = REPOSITORY / "build" / "pr"


def command(result: str) -> str:
    """What makes the result."""
    if result == "releases":
        return "scripts/refresh.sh --all"
    return f"scripts/benchmark.sh {result} --json results/{result}.json"


def stored(result: str) -> Any:
    place = RESULTS / f"{result}.json"
    if not place.is_file():
        raise Conflict(
            f"{place.relative_to(REPOSITORY)} is missing; make it with: "
            f"{command(result)}"
        )
    return json.loads(place.read_text())


def before_and_after(patch: Patch) -> str:
    """Where the patch's own test was seen to fail without it and to pass with it."""
    name = next(name for name, form in FORMS.items() if form is patch)
    releases = [
        release
        for release, patches in stored("releases").items()
        for found in [patches.get(name, {})]
        if found.get("without") is False and found.get("with")
    ]
    if not releases:
        raise Conflict(
            f"the test of {name} was run on no release; make that with: "
            f"{command('releases')}"
        )
    on = ", ".join(releases)
    return f"fails without this change and passes with it, on torch {on}.\n"


def measured(patch: Patch) -> str:
    """The rows of the stored results that belong to the patch."""
    text = ""
    for result, beginning in patch.evidence:
        rows = [r for r in stored(result)["rows"] if r["what"].startswith(beginning)]
        if not rows:
            raise Conflict(
                f"results/{result}.json has no row {beginning!r}; make it with: "
                f"{command(result)}"
            )
        text += "".join(f"| {r['what']} | {r['measured']} |\n" for r in rows)
    return text and f"\n| what | measured |\n| --- | --- |\n{text}"


def body(patch: Patch, ours: Patch, below: list[Patch]) -> str:
    """The text of the pull request; Conflict where a figure is not stored."""
    *problem, change = patch.why.strip().split("\n\n")
    items = "\n".join(patch.trailers)
    stacked = "".join(f"- {needed.subject}\n" for needed in below)
    commands = sorted({command(result) for result, _ in ours.evidence})
    return (
        f"# {patch.subject}\n\n{items}\n\n"
        + (f"Stacked on:\n\n{stacked}\n" if stacked else "")
        + "## Problem and mechanism\n\n"
        + "\n\n".join(problem or [change])
        + f"\n\n## Change\n\n{change}\n\n"
        + f"## Evidence\n\n`{patch.tested}` {before_and_after(patch)}"
        + measured(ours)
        + "".join(f"\nMade with `{line}`.\n" for line in commands)
        + f"\n## Test plan\n\n```\n{patch.tested}\n```\n\n## Risks\n\n{ours.risks}"
    )


def write_branch(options: argparse.Namespace) -> None:
    """Make the branch and the text, and check both where that is asked."""
    branch = f"ac-budget/{options.topic}"
    ours = FORMS[options.topic]
    patches = stack(ours.minimal or ours)
    target = find(options.checkout)
    if target.git_dir is None:
        raise BadCall(f"{target.root} is not a git checkout")
    text = body(patches[-1], ours, patches[:-1])
    result = survey(target, read_journal(target), series=patches)
    if not patches[-1].fits(result.release):
        raise Conflict(
            f"{options.topic}: no edit is for torch {result.release}, which this "
            "tree looks like most"
        )
    for step in result.patches:
        if step.state in (ABSENT, CONFLICTS):
            raise Conflict(f"{step.patch.name}: {step.state} ({step.detail})")
    steps = [step for step in result.patches if step.changes]
    if not steps or steps[-1].patch.name != options.topic:
        raise Conflict(f"{options.topic}: {result.patches[-1].state}")
    check_committable(target, result.changes)
    commits = [(message(step.patch), step.changes) for step in steps]
    made = commit_on_branch(target, branch, commits)
    place = BODIES / f"{options.topic}.md"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    print(*(f"commit {line}" for line in made), sep="\n")
    print(f"branch {branch}: git switch {branch}")
    print(f"text   {place}")
    if options.check:
        conclude(check(target, branch, patches[-1]))


def main(arguments: Optional[list[str]] = None) -> int:
    names = [patch.name for patch in SERIES]
    parser = argparse.ArgumentParser(
        prog="export_pr.sh",
        description="Makes a branch in a PyTorch git checkout that holds one topic in "
        "its smallest form, and the text of its pull request in build/pr/TOPIC.md. The "
        "work tree stays as it is.",
        epilog="topics: " + ", ".join(names) + ". exit codes: 0 made; 1 conflict, or "
        "evidence is missing; 2 bad call or not a PyTorch tree",
    )
    parser.add_argument("topic", metavar="TOPIC", choices=names)
    parser.add_argument("checkout", metavar="CHECKOUT", help="a git checkout")
    parser.add_argument(
        "--check",
        action="store_true",
        help="run on the branch usort and ruff by upstream's settings, upstream's tests and "
        "ours; tests need the torch of the checkout's version in this project's "
        "environment",
    )
    options = parser.parse_args(arguments)
    return exit_status(lambda: write_branch(options))


if __name__ == "__main__":
    sys.exit(main())
