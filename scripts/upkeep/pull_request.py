"""The command behind ``scripts/export_pr.sh``: one topic as a pull request."""

import argparse
import json
import sys
from typing import Optional

from patchset.commits import check_committable, commit_on_branch
from patchset.images import ABSENT, CONFLICTS, survey
from patchset.mailbox import message
from patchset.patch import Patch, REPOSITORY
from patchset.series import exported, FORMS, SERIES, stack
from patchset.target import BadCall, Conflict, exit_status, find
from patchset.transaction import read_journal

from . import forms
from .upstream_checks import check, conclude


RESULTS = REPOSITORY / "results" / "releases.json"
BODIES = REPOSITORY / "build" / "pr"


def before_and_after(patch: Patch) -> str:
    """Where the patch's own test was seen to fail without it and to pass with it."""
    name = next(name for name, form in FORMS.items() if form is patch)
    releases = [
        release
        for release, patches in json.loads(RESULTS.read_text()).items()
        if name in patches and patches[name]["with"] and not patches[name]["without"]
    ]
    if not releases:
        raise Conflict(f"the test of {name} was not run: scripts/refresh.sh --all")
    on = ", ".join(releases)
    return f"fails without this change and passes with it, on torch {on}.\n"


def body(patch: Patch, below: list[Patch]) -> str:
    """The text of the pull request; Conflict where the test was never run."""
    *problem, change = patch.why.strip().split("\n\n")
    items = "\n".join(patch.trailers)
    measured = forms.stored().get(patch.name)
    stacked = "".join(f"- {needed.subject}\n" for needed in below)
    sections = {
        "Stacked on": stacked,
        "Problem and mechanism": "\n\n".join(problem or [change]),
        "Repro": patch.repro and f"```python\n{patch.repro.strip()}\n```",
        "Change": change,
        "Measured": measured and forms.table(measured),
        "Test plan": f"`{patch.tested}` {before_and_after(patch)}",
        "What it does not do": patch.beyond,
        "Risks": patch.risks,
    }
    return f"# {patch.subject}\n\n{items}\n" + "".join(
        f"\n## {heading}\n\n{text.strip()}\n"
        for heading, text in sections.items()
        if text
    )


def write_branch(options: argparse.Namespace) -> None:
    """Make the branch and the text, and check both where that is asked."""
    branch = f"ac-budget/{options.topic}"
    patches = stack(FORMS[exported(options.topic)])
    target = find(options.checkout)
    if target.git_dir is None:
        raise BadCall(f"{target.root} is not a git checkout")
    text = body(patches[-1], patches[:-1])
    result = survey(target, read_journal(target), series=patches)
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
        epilog="topics: " + ", ".join(names) + ". exit codes: 0 made; 1 conflict; "
        "2 bad call or not a PyTorch tree",
    )
    parser.add_argument("topic", metavar="TOPIC", choices=names)
    parser.add_argument("checkout", metavar="CHECKOUT", help="a git checkout")
    parser.add_argument(
        "--check",
        action="store_true",
        help="run on the branch usort and ruff by upstream's settings, and the test; "
        "that needs the torch of the checkout's version in this project's environment",
    )
    options = parser.parse_args(arguments)
    return exit_status(lambda: write_branch(options))


if __name__ == "__main__":
    sys.exit(main())
