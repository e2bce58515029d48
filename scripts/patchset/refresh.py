"""The command behind ``scripts/refresh.sh``: takes a release of torch in.

Text alone does not tell whether upstream has landed a patch: it may have landed a
version that is still wrong. So each patch's own test is run twice, on the release with
the patches that this one needs: without it, where the test passes only if the fault is
gone, and with it, where the test has to pass. No other patch of the set is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from rich.console import Console
from rich.progress import track
from rich.table import Table

from . import generate
from .files import clone, replace_file
from .images import ABSENT, CONFLICTS, FAULTY, LANDED, overlay, survey_untouched
from .patch import minor, Patch, RELEASES, REPOSITORY
from .releases import tree
from .series import FORMS, stack
from .target import find
from .upstream_checks import run_test


BUILD = REPOSITORY / "build"
RESULTS = REPOSITORY / "results" / "releases.json"
EPILOG = """\
exit codes: 0 taken in, or all as it was; 1 a person must decide, nothing was
written; 2 bad call, or the release cannot be had
"""

WORDS = {None: "-", True: "passes", False: "fails"}

console = Console()


@dataclass(frozen=True)
class Finding:
    """One of ``FORMS`` against one release.

    ``without`` and ``with_it`` say whether the patch's own test passes on top of what
    it needs, without it and with it; None: it was not run.
    """

    name: str
    patch: Patch
    state: str
    detail: str
    without: Optional[bool] = None
    with_it: Optional[bool] = None

    @property
    def verdict(self) -> str:
        """The state by behaviour where the test was run, by text otherwise."""
        if self.state == ABSENT or self.without is None:
            return self.state
        if self.without:
            return LANDED
        if self.state in (LANDED, FAULTY):
            return FAULTY
        return self.state

    @property
    def question(self) -> Optional[str]:
        """What a person must decide, if anything."""
        name = self.name
        if self.verdict == CONFLICTS:
            return (
                f"{name}: {self.detail}. Has upstream moved it? Give the edit an "
                "`until` and add one for the new text"
            )
        if self.verdict == LANDED and self.state != LANDED:
            return (
                f"{name}: its test passes without it, but its text is not there. Say "
                "in `landed` how to see that it landed, or make the test stricter"
            )
        if self.verdict == FAULTY and self.state == LANDED:
            return (
                f"{name}: the text says landed, but its test fails without it. Say "
                "in `faults` what is still wrong there"
            )
        if self.with_it is False:
            return f"{name}: applies, but its test fails: {self.patch.tested}"
        return None


def untouched(release: str, python: str) -> Path:
    """A checkout of the torch that ``python`` has, as it was released."""
    place = BUILD / f"untouched-pytorch-{release}"
    done = subprocess.run(
        [python, "scripts/checkout.py", "assemble", str(place)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-500:])
    return place


def isolated(
    patch: Patch, checkout: Path, release: str, python: str
) -> tuple[bool, Optional[bool]]:
    """Whether the patch's own test passes without it and with it, on what it needs.

    ``checkout`` is the untouched release; it is cloned, and left alone. The second is
    None where the patch has a conflict there.
    """
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        patches = stack(patch)
        paths = [path for patch in patches for path in patch.paths()]
        target = find(str(clone(checkout, Path(folder) / "pytorch", paths)))
        *below, top = survey_untouched(target, release, patches).patches

        def lay(path: str, content: bytes) -> None:
            place = target.root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_file(place, content)

        def passes() -> bool:
            return run_test([patch.test], target.root, python).returncode == 0

        for change in (change for step in below for change in step.changes):
            lay(change.path, change.after or b"")
        # The test alone: what it imports is there or it is not.
        lay(patch.test, overlay(patch.test))
        without = passes()
        if top.state == CONFLICTS:
            return without, None
        for change in top.changes:
            lay(change.path, change.after or b"")
        return without, passes()


def examine(release: str, python: Optional[str]) -> list[Finding]:
    """Every form of every patch against the release, in the series' order.

    By behaviour where ``python`` has that torch, by text alone where it is None.
    """
    target = find(str(tree(release)))
    of = {s.patch.name: s for s in survey_untouched(target, release).patches}
    findings = []
    for name, patch in track(FORMS.items(), f"torch {release}", console=console):
        state = (
            of.get(name) or survey_untouched(target, release, stack(patch)).patches[-1]
        )
        without = with_it = None
        if python and state.state != ABSENT:
            checkout = untouched(release, python)
            without, with_it = isolated(patch, checkout, release, python)
            console.print(
                f"{name}: test {WORDS[without]} without, {WORDS[with_it]} with"
            )
        findings.append(
            Finding(name, patch, state.state, state.detail, without, with_it)
        )
    return findings


def environment_of(release: str) -> Optional[str]:
    """The Python of the environment that was set up with that torch, if any."""
    for folder in (f".venv-{release}", ".venv"):
        python = REPOSITORY / folder / "bin" / "python"
        stamp = REPOSITORY / folder / ".complete"
        if stamp.is_file() and stamp.read_text().startswith(f"torch=={release} "):
            return str(python)
    return None


def show(release: str, findings: Sequence[Finding]) -> None:
    table = Table(
        "patch", "state", "test without it", "test with it", title=f"torch {release}"
    )
    for f in findings:
        table.add_row(f.name, f.verdict, WORDS[f.without], WORDS[f.with_it])
    console.print(table)


def take_in(release: str, findings: Sequence[Finding]) -> int:
    """Write the release's patches and manifest row, unless a person must decide."""
    questions = [f.question for f in findings if f.question]
    for question in questions:
        console.print(f"a person must decide: {question}", soft_wrap=True)
    if questions:
        return 1
    releases = sorted({*RELEASES, release}, key=lambda r: (minor(r), r))
    changes = generate.differences(releases)
    generate.write(changes)
    for place in changes:
        console.print(f"wrote {place.relative_to(REPOSITORY)}", soft_wrap=True)
    console.print(
        f"torch {release} is "
        + ("as it was" if not changes else "taken in; commit the files above")
    )
    return 0


def store(found: dict[str, list[Finding]]) -> None:
    """Write the table "patch x release" for the pages."""
    rows = {
        release: {
            f.name: {"state": f.verdict, "without": f.without, "with": f.with_it}
            for f in findings
        }
        for release, findings in found.items()
    }
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(f"wrote {RESULTS.relative_to(REPOSITORY)}; now run scripts/report.sh")


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="refresh.sh",
        description="Takes a new release of torch in: fetches its Python tree, tries "
        "every edit, runs each patch's own test with and without the patch, and, where "
        "nobody has to decide anything, writes patches/ and the manifest.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("release", nargs="?", metavar="VERSION", help="such as 2.15.0")
    parser.add_argument(
        "--all",
        action="store_true",
        help="check every release again and store the table for the README; tests run "
        "where an environment with that torch is set up",
    )
    parser.add_argument(
        "--structure-only",
        action="store_true",
        help="by text alone: needs no torch of that version",
    )
    options = parser.parse_args(arguments)
    if options.all == bool(options.release):
        parser.error("name one VERSION, or --all")
    releases = RELEASES if options.all else [options.release]
    found = {}
    try:
        for release in sorted(releases, key=minor):  # ValueError: no version
            python = None if options.structure_only else environment_of(release)
            found[release] = examine(release, python)
            show(release, found[release])
    except ValueError:
        parser.error(f"{options.release!r} is no version such as 2.15.0")
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.all:
        return take_in(options.release, found[options.release])
    questions = [f.question for findings in found.values() for f in findings]
    store(found)
    return int(any(questions))


if __name__ == "__main__":
    sys.exit(main())
