"""The command behind ``scripts/export_pr.sh``: topics as pull requests."""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple, Optional

from patchset.commits import check_committable, commit_on_branch
from patchset.images import ABSENT, CONFLICTS, PatchState
from patchset.patch import Patch, REPOSITORY
from patchset.series import exported, FORMS, SERIES, stack
from patchset.target import BadCall, Conflict, exit_status, find, Target

from . import forms, landed
from .upstream_checks import check, conclude, new_findings


RESULTS = REPOSITORY / "results" / "releases.json"
BODIES = REPOSITORY / "build" / "pr"
TOPICS = tuple(patch.name for patch in SERIES)
LISTED = ", ".join(TOPICS)
EPILOG = """\
exit codes:
  0  made, each within its mark and without a finding of the linters; or, with
     --status, told
  1  conflict, over its mark, a check that failed, or a test that could not be run: the
     message says which; with --all the other branches are made all the same
  2  bad call, not a PyTorch tree, or with --status one that cannot be run
"""


class Branch(NamedTuple):
    """A topic's branch: ``step`` is its own commit, ``made`` a line for each new one."""

    name: str
    step: PatchState
    made: list[str]

    @property
    def topic(self) -> str:
        return self.step.patch.name

    @property
    def lines(self) -> int:
        return forms.added(self.step.changes)

    @property
    def over(self) -> bool:
        mark = self.step.patch.lines
        return mark is not None and self.lines > mark


def tested_on(patch: Patch, changed: bool = False) -> list[str]:
    """Where its own test was seen to fail without it and to pass with it.

    On its files as they are, or on those before they were ``changed``.
    """
    name = next(name for name, form in FORMS.items() if form is patch)
    return [
        release
        for release, patches in json.loads(RESULTS.read_text()).items()
        if (found := patches.get(name))
        and (found["without"], found["with"]) == (False, True)
        and found.get("changed", False) == changed
    ]


def body(patch: Patch, below: list[Patch]) -> str:
    """The text of the pull request; Conflict where the test was never run."""
    now, before = tested_on(patch), tested_on(patch, changed=True)
    ran = [f"on torch {', '.join(now)}"] * bool(now)
    ran += [f"before its last edit on torch {', '.join(before)}"] * bool(before)
    if not ran:
        raise Conflict(
            f"the test of {patch.name} was not run: scripts/refresh.sh --all"
        )
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
        "Test plan": f"`{patch.tested}` fails without this change and passes with it, "
        f"{'; '.join(ran)}.",
        "What it does not do": patch.beyond,
        "Risks": patch.risks,
    }
    return (
        f"# {patch.subject}\n"
        + (f"\n{items}\n" if items else "")
        + "".join(
            f"\n## {heading}\n\n{text.strip()}\n"
            for heading, text in sections.items()
            if text
        )
    )


def make(target: Target, topic: str, force: bool) -> Branch:
    """Make the branch and the text; Conflict where that cannot be."""
    branch = f"ac-budget/{topic}"
    patches = stack(FORMS[exported(topic)])
    text = body(patches[-1], patches[:-1])
    result = landed.fitted(target, patches)
    for step in result.patches:
        if step.state in (ABSENT, CONFLICTS):
            raise Conflict(f"{step.patch.name}: {step.state} ({step.detail})")
    steps = [step for step in result.patches if step.changes]
    if not steps or steps[-1].patch.name != topic:
        raise Conflict(f"{topic}: {result.patches[-1].state}")
    check_committable(target, result.changes)
    commits = [(step.patch.message, step.changes) for step in steps]
    made = commit_on_branch(target, branch, commits, force)
    BODIES.mkdir(parents=True, exist_ok=True)
    (BODIES / f"{topic}.md").write_text(text)
    return Branch(branch, steps[-1], made)


def one(target: Target, topic: str, force: bool, checked: bool) -> None:
    """Make it, and check it where that is asked."""
    branch = make(target, topic, force)
    print(
        *(f"commit {line}" for line in branch.made),
        sep="\n",
        end="\n" * bool(branch.made),
    )
    said = "" if branch.made else ", as it was"
    print(f"branch {branch.name}{said}: git switch {branch.name}")
    print(f"text   {BODIES / topic}.md")
    if checked:
        (found,) = findings([branch]).values()
        conclude(check(target, branch.name, branch.step.patch, found))


def all_of_them(target: Target, force: bool) -> None:
    """Make every branch that can be made, and say how each stands."""
    branches, faults = [], []
    for number, patch in enumerate(SERIES, 1):
        print(f"{patch.name} ({number} of {len(SERIES)}) ...", flush=True)
        try:
            branches.append(make(target, patch.name, force))
        except Conflict as error:
            print(f"    not made: {error}", flush=True)
            faults.append(f"{patch.name}: not made: {error}")
    print("usort and ruff, by upstream's settings ...", flush=True)
    found = findings(branches)
    print(f"\n{overview(branches, found)}")
    for branch in branches:
        faults += (f"{branch.topic}: {said}" for said in found[branch.topic])
        if branch.over:
            mark = branch.step.patch.lines
            faults.append(
                f"{branch.topic}: {branch.lines} lines, over its mark of {mark}"
            )
    print(f"{len(branches)} of {len(SERIES)} branches; their texts are in {BODIES}")
    if faults:
        raise Conflict("\nconflict: ".join(faults))


def findings(branches: Sequence[Branch]) -> dict[str, list[str]]:
    """What upstream's linters say of each topic's own commit and did not before it."""
    before, after = {}, {}
    for branch in branches:
        for change in branch.step.changes:
            path = f"{branch.topic}/{change.path}"
            after[path] = change.after.decode()
            if change.before is not None:
                before[path] = change.before.decode()
    found: dict[str, list[str]] = {branch.topic: [] for branch in branches}
    for said in new_findings(before, after):
        topic, _, words = said.partition("/")
        found[topic].append(words)
    return found


def overview(branches: Sequence[Branch], found: dict[str, list[str]]) -> str:
    rows = [("topic", "lines", "mark", "linters", "models", "tested on", "needs")]
    measured = forms.stored()
    for branch in branches:
        patch = branch.step.patch
        before_its_last_edit = (f"({r})" for r in tested_on(patch, changed=True))
        rows.append(
            (
                branch.topic,
                str(branch.lines),
                "-" if patch.lines is None else str(patch.lines),
                f"{len(found[branch.topic])} new" if found[branch.topic] else "clean",
                str(len(forms.by_model(measured.get(branch.topic, {}))) or "-"),
                " ".join([*tested_on(patch), *before_its_last_edit]),
                " ".join(patch.needs) or "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "".join(
        f"{'  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()}\n"
        for row in rows
    )


def run(options: argparse.Namespace) -> None:
    target = find(options.checkout)
    if options.status:
        landed.report(target, [options.topic] if options.topic else [*TOPICS])
        return
    if target.git_dir is None:
        raise BadCall(f"{target.root} is not a git checkout")
    if options.all:
        all_of_them(target, options.force)
    else:
        one(target, options.topic, options.force, options.check)


def options(arguments: Optional[list[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="export_pr.sh",
        usage="%(prog)s TOPIC CHECKOUT [--force] [--check]\n"
        "       %(prog)s --all CHECKOUT [--force]\n"
        "       %(prog)s --status [TOPIC] CHECKOUT",
        description="Makes a branch in a PyTorch git checkout that holds one topic in "
        "its smallest form,\nand the text of its pull request in build/pr/TOPIC.md. The "
        "work tree stays as it is.",
        epilog=f"{textwrap.fill(f'topics: {LISTED}', 80, break_on_hyphens=False)}\n\n{EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("topic", metavar="TOPIC", nargs="?", choices=TOPICS)
    parser.add_argument("checkout", metavar="CHECKOUT", help="a git checkout")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check",
        action="store_true",
        help="run on the branch usort and ruff by upstream's settings, and the test; "
        "that needs the torch of the checkout's version in this project's environment",
    )
    mode.add_argument(
        "--all",
        action="store_true",
        help="every topic; then how many lines each adds, tests aside, beside the mark "
        "that it must keep, what upstream's linters find that is new, on how many "
        "models it was measured, and where its test was run",
    )
    mode.add_argument(
        "--status",
        action="store_true",
        help="make nothing: say which topics have landed there, by running their tests "
        "on the checkout as it is",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="make a branch of that name that holds something else anew",
    )
    found = parser.parse_intermixed_args(arguments)
    if found.all and found.topic:
        parser.error("name a TOPIC, or --all")
    if found.status and found.force:
        parser.error("--status makes no branch, so there is nothing to force")
    if not (found.all or found.status or found.topic):
        parser.error("name a TOPIC, --all or --status")
    return found


def main(arguments: Optional[list[str]] = None) -> int:
    asked = options(arguments)
    return exit_status(lambda: run(asked))


if __name__ == "__main__":
    sys.exit(main())
