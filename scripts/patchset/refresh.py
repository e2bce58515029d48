"""The command behind ``scripts/refresh.sh``: takes a release of torch in.

Text alone does not tell whether upstream has landed a patch: it may have landed a
version that is still wrong. So each patch's own test is run against the untouched
release, where it passes only if the fault is gone, and against the patched one,
where it has to pass.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from rich.console import Console
from rich.progress import track
from rich.table import Table

from . import generate
from .images import ABSENT, CONFLICTS, FAULTY, LANDED, survey_untouched
from .patch import minor, OVERLAY, Patch, RELEASES, REPOSITORY
from .releases import tree
from .series import SERIES
from .target import find
from .upstream_checks import run_test


RESULTS = REPOSITORY / "results" / "releases.json"
TESTS = [path for patch in SERIES for path in patch.files if path.startswith("test/")]
EPILOG = """\
exit codes: 0 taken in, or all as it was; 1 a person must decide, nothing was
written; 2 bad call, or the release cannot be had
"""

console = Console()


@dataclass(frozen=True)
class Finding:
    """One patch against one release.

    ``without`` and ``with_it`` say whether the patch's own test passes on the
    untouched and on the patched release; None: it was not run.
    """

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
        name = self.patch.name
        if self.verdict == CONFLICTS:
            return (
                f"{name}: {self.detail}. Has upstream moved it? Give the edit an "
                "`until` and add one for the new text"
            )
        if self.verdict == LANDED and self.state != LANDED:
            return (
                f"{name}: its test passes on the untouched release, but its text is "
                "not there. Say in `landed` how to see that it landed, or make the "
                "test stricter"
            )
        if self.verdict == FAULTY and self.state == LANDED:
            return (
                f"{name}: the text says landed, but its test fails on the untouched "
                "release. Say in `faults` what is still wrong there"
            )
        if self.with_it is False:
            return f"{name}: applies, but its test fails: {self.patch.tested}"
        return None


def passes(patch: Patch, checkout: Path, python: str) -> bool:
    """Run the patch's own test with torch imported from ``checkout``."""
    words = shlex.split(patch.tested)[1:]
    return run_test(words, checkout, python).returncode == 0


def assembled(release: str, python: str, patched: bool) -> Path:
    """A checkout of the torch that ``python`` has, as released or with the set on."""
    place = (
        REPOSITORY / "build" / (f"{'' if patched else 'untouched-'}pytorch-{release}")
    )
    steps = [[python, "scripts/checkout.py", "assemble", str(place)]]
    if patched:
        steps.append(["scripts/apply_patch.sh", str(place)])
    for step in steps:
        done = subprocess.run(
            step,
            cwd=REPOSITORY,
            env={**os.environ, "APPLY_PYTHON": sys.executable},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 3):
            raise RuntimeError((done.stderr or done.stdout).strip()[-500:])
    if not patched:
        # The tests alone: what they import is there or it is not.
        for path in TESTS:
            copy = place / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((OVERLAY / path).read_bytes())
    return place


def examine(
    release: str, python: Optional[str], only: Sequence[str] = ()
) -> list[Finding]:
    """Every patch against the release, by behaviour where ``python`` has that torch."""
    states = survey_untouched(find(str(tree(release))), release).patches
    if python is None:
        return [Finding(s.patch, s.state, s.detail) for s in states]
    untouched = assembled(release, python, patched=False)
    conflicts = any(s.state == CONFLICTS for s in states)
    patched = None if conflicts else assembled(release, python, patched=True)
    findings = []
    for s in track(states, f"tests on torch {release}", console=console):
        without = with_it = None
        if s.state != ABSENT and (not only or s.patch.name in only):
            without = passes(s.patch, untouched, python)
            if patched is not None:
                with_it = passes(s.patch, patched, python)
        findings.append(Finding(s.patch, s.state, s.detail, without, with_it))
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
    words = {None: "-", True: "passes", False: "fails"}
    table = Table(
        "patch", "state", "test without it", "test with it", title=f"torch {release}"
    )
    for f in findings:
        table.add_row(f.patch.name, f.verdict, words[f.without], words[f.with_it])
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


def store(found: dict[str, list[Finding]], only: Sequence[str] = ()) -> None:
    """Write the table "patch x release" for the README.

    Where ``only`` some patches were tested, the others keep their stored outcome.
    """
    rows = {
        release: {
            f.patch.name: {
                "state": f.verdict,
                "without": f.without,
                "with": f.with_it,
            }
            for f in findings
        }
        for release, findings in found.items()
    }
    before = json.loads(RESULTS.read_text()) if only else {}
    for release, patches in rows.items():
        stored = before.get(release, {})
        kept = [name for name in patches if name in stored and name not in only]
        patches.update((name, stored[name]) for name in kept)
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
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATCH",
        choices=[patch.name for patch in SERIES],
        help="run this patch's test only; may be repeated; with --all, the others keep "
        "the outcome that is stored",
    )
    options = parser.parse_args(arguments)
    if options.all == bool(options.release):
        parser.error("name one VERSION, or --all")
    try:
        for release in [options.release] if options.release else []:
            minor(release)
        found = {}
        for release in RELEASES if options.all else [options.release]:
            python = None if options.structure_only else environment_of(release)
            found[release] = examine(release, python, options.only)
            show(release, found[release])
    except ValueError:
        parser.error(f"{options.release!r} is no version such as 2.15.0")
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.all:
        return take_in(options.release, found[options.release])
    questions = [f.question for findings in found.values() for f in findings]
    store(found, options.only)
    return int(any(questions))


if __name__ == "__main__":
    sys.exit(main())
