"""The command behind ``scripts/refresh.sh``: takes a release of torch in.

Text alone does not tell whether upstream has landed a patch: it may have landed a
version that is still wrong. So each patch's own test is run twice, on the release with
the patches that this one needs: without it, where the test passes only if the fault is
gone, and with it, where the test has to pass. No other patch of the set is there.
The release's own torch runs them, in an environment that is deleted afterwards unless
it was there before.
"""

import argparse
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from patchset.files import replace_file
from patchset.images import ABSENT, CONFLICTS, FAULTY, LANDED, overlay, survey
from patchset.meaning import meaning
from patchset.patch import minor, Patch, RELEASES, REPOSITORY
from patchset.series import FORMS, stack
from patchset.target import exit_status, find
from patchset.transaction import Change

from . import from_checkout, generate
from .releases import tree
from .upstream_checks import run_test


BUILD = REPOSITORY / "build"
RESULTS = REPOSITORY / "results" / "releases.json"
EPILOG = """\
What was stored of the very same files is not run again, so that a call that was stopped
goes on where it was. exit codes: 0 taken in, or all as it was; 1 a person must decide,
nothing was written, or with --check tests have to be run again; 2 bad call, or the
release or the checkout cannot be had
"""

WORDS = {None: "-", True: "passes", False: "fails"}


@dataclass(frozen=True)
class Finding:
    """One of ``FORMS`` against one release.

    ``without`` and ``with_it`` say whether the patch's own tests pass on top of what
    it needs, without it and with it; None: they were not run. ``tree`` is a digest of
    what they ran on, ``date`` the day; ``changed`` where that is not what is there now.
    """

    name: str
    patch: Patch
    state: str
    detail: str
    without: Optional[bool] = None
    with_it: Optional[bool] = None
    tree: Optional[str] = None
    date: Optional[str] = None
    changed: bool = False

    @property
    def is_due(self) -> bool:
        """Whether its test has to be run, for the first time or again."""
        return self.state != ABSENT and (self.changed or not self.with_it)

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

    @property
    def cell(self) -> dict[str, Any]:
        return {
            "state": self.verdict,
            "without": self.without,
            "with": self.with_it,
            "tree": self.tree,
            "date": self.date,
            **({"changed": True} if self.changed else {}),
        }


# The Python of a release's environment, and a checkout of its torch as it came out.
SET_UP = """\
source scripts/environment.sh
ensure_environment
untouched=$REPO/build/untouched-pytorch-$TORCH_VERSION
echo "$PYTHON" "$untouched"
run_module "$PYTHON" upkeep.checkout assemble "$untouched" >&2
"""


@contextmanager
def environment(release: str) -> Iterator[tuple[str, Path]]:
    """What ``SET_UP`` makes, deleted again if the environment was made here.

    With its libraries for GPUs it takes up to 8 GB. RuntimeError where it cannot be had.
    """
    made = not (REPOSITORY / f".venv-{release}" / ".complete").is_file()
    done = subprocess.run(
        ["bash", "-ec", SET_UP],
        cwd=REPOSITORY,
        env={**os.environ, "TORCH_VERSION": release},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"no environment with torch {release}: see above")
    python, checkout = map(Path, done.stdout.split())
    try:
        yield str(python), checkout
    finally:
        folder = python.parents[1]
        if made and folder.name != ".venv":
            shutil.rmtree(folder)
            shutil.rmtree(checkout)


@contextmanager
def clone(checkout: Path) -> Iterator[Path]:
    """A copy of its own for a while. It shares its files by hard links: they are
    replaced, as `lay` does it, and never written into."""
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        root = Path(folder) / "pytorch"
        shutil.copytree(checkout, root, symlinks=True, copy_function=os.link)
        yield root


def lay(root: Path, changes: Iterable[Change]) -> None:
    for change in changes:
        (root / change.path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(root / change.path, change.after)


def isolated(
    patch: Patch, checkout: Path, release: str, python: str
) -> tuple[bool, Optional[bool]]:
    """Whether the patch's own tests pass without it and with it, on what it needs.

    ``checkout`` is the untouched release; it is cloned, and left alone. The second is
    None where the patch has a conflict there. Without it ``patch.test`` alone is run.
    """
    with clone(checkout) as root:
        target = find(str(root))
        *below, top = survey(target, series=stack(patch), release=release).patches
        lay(root, (change for step in below for change in step.changes))
        # The test alone: what it imports is there or it is not.
        lay(root, [Change(patch.test, None, overlay(patch.test))])
        stop = "--failfast"
        without = run_test([patch.test, stop], root, python).returncode == 0
        if top.state == CONFLICTS:
            return without, None
        lay(root, top.changes)
        for test in patch.tests:
            done = run_test([test], root, python)
            if done.returncode:
                last = done.stdout.strip().splitlines()[-20:]
                print(f"{test} fails on torch {release}:", *last, sep="\n    ")
                return without, False
        return without, True


def read(name: str, release: str) -> Finding:
    """One of ``FORMS`` against the release's text."""
    patch = FORMS[name]
    target = find(str(tree(release)))
    steps = survey(target, series=stack(patch), release=release).patches
    top = steps[-1]
    # A wheel's tree has no tests.
    run = [Change(path, None, overlay(path)) for path in patch.tests]
    digest = digest_of([*run, *(change for step in steps for change in step.changes)])
    return Finding(name, patch, top.state, top.detail, tree=digest)


def digest_of(changes: Iterable[Change]) -> str:
    """Of what the files mean after them."""
    found = hashlib.sha256()
    for change in changes:
        after = change.after
        if change.path.endswith(".py"):
            after = meaning(after.decode()).encode()
        found.update(change.path.encode() + b"\0" + after + b"\0")
    return found.hexdigest()[:16]


def by_text(release: str) -> list[Finding]:
    """Every form of every patch against the release's text, in the series' order."""
    return [read(name, release) for name in FORMS]


def examine(release: str, wanted: Sequence[Finding]) -> Iterator[Finding]:
    """The findings with what the release's own torch makes of them, as each is known."""
    # Each test is one process of one thread.
    pool = ThreadPoolExecutor(os.cpu_count())
    with environment(release) as (python, checkout), pool:

        def tried(finding: Finding) -> Finding:
            without, with_it = isolated(finding.patch, checkout, release, python)
            date = datetime.date.today().isoformat()
            return replace(finding, without=without, with_it=with_it, date=date)

        for found in pool.map(tried, wanted):
            said = f"{WORDS[found.without]} without, {WORDS[found.with_it]} with"
            print(f"{found.name}: {found.verdict}; test {said}", flush=True)
            yield found


def take_in(release: str, findings: Sequence[Finding]) -> int:
    """Write the release's patches and manifest row, unless a person must decide."""
    questions = [f.question for f in findings if f.question]
    for question in questions:
        print(f"a person must decide: {question}")
    if questions:
        return 1
    releases = sorted({*RELEASES, release}, key=lambda r: (minor(r), r))
    changes = generate.differences(releases)
    generate.write(changes)
    for place in changes:
        print(f"wrote {place.relative_to(REPOSITORY)}")
    said = "taken in; commit the files above" if changes else "as it was"
    print(f"torch {release} is {said}")
    return 0


def recalled(finding: Finding, cell: dict[str, Any]) -> Finding:
    """The finding with what is stored of it, and whether its files have changed since."""
    if not cell.get("date"):
        return finding
    return replace(
        finding,
        without=cell["without"],
        with_it=cell["with"],
        tree=cell["tree"],
        date=cell["date"],
        changed=cell["tree"] != finding.tree,
    )


def check(release: str, runs: bool = True) -> list[Finding]:
    """Every form on the release by its own torch, but for what is stored of it.

    Of a known release each finding is stored at once.  Without ``runs`` no test is run:
    those that have to be keep what is stored, marked as of other files.
    """
    stored = json.loads(RESULTS.read_text()).get(release, {})
    now = {f.name: f for f in by_text(release)}
    row = {name: recalled(f, stored.get(name, {})) for name, f in now.items()}
    wanted = [now[f.name] for f in row.values() if f.is_due]
    for finding in examine(release, wanted) if wanted and runs else ():
        row[finding.name] = finding
        if release in RELEASES:
            store(release, [*row.values()])
    # Where none had to be run, text alone may tell something new.
    if release in RELEASES:
        store(release, [*row.values()])
    return [*row.values()]


def marked(releases: Iterable[str]) -> int:
    """Store what has to be run again, and say how much it is."""
    due = 0
    for release in releases:
        names = [
            finding.name for finding in check(release, runs=False) if finding.is_due
        ]
        due += len(names)
        print(
            f"torch {release}: {'; '.join(names) or 'all tests are of the code as it is'}"
        )
    return int(due > 0)


def store(release: str, findings: Sequence[Finding]) -> None:
    """Write the release's column of the table "patch x release" for the pages."""
    rows = json.loads(RESULTS.read_text())
    rows[release] = {f.name: f.cell for f in findings}
    kept = sorted(rows.keys() & {*RELEASES, release}, key=minor)
    text = json.dumps({release: rows[release] for release in kept}, indent=1)
    replace_file(RESULTS, f"{text}\n".encode())


def options(arguments: Optional[list[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="refresh.sh",
        description="Takes a new release of torch in: fetches its Python tree, tries "
        "every edit, runs each patch's own test with and without the patch, and, where "
        "nobody has to decide anything, writes patches/ and the manifest.",
        epilog=EPILOG,
    )
    parser.add_argument("release", nargs="?", metavar="VERSION", help="such as 2.15.0")
    parser.add_argument(
        "--all",
        action="store_true",
        help="check every known release again, the newest first, each by its own torch; "
        "then scripts/report.sh shows the table",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="with --all: run no test, mark in the table those that were run on other files",
    )
    parser.add_argument(
        "--from",
        dest="checkout",
        metavar="CHECKOUT",
        help="take in no release, but what was changed in a checkout that the set was "
        "applied to: whole files go back into torch_overlay/, what is within an edit "
        "into its topic. Where something cannot be placed, it is listed and nothing "
        "is written",
    )
    found = parser.parse_args(arguments)
    if [found.all, bool(found.release), bool(found.checkout)].count(True) != 1:
        parser.error("name one VERSION, --all or --from CHECKOUT")
    if found.check and not found.all:
        parser.error("--check goes with --all")
    if found.release:
        try:
            minor(found.release)
        except ValueError:
            parser.error(f"{found.release!r} is no version such as 2.15.0")
    return found


def main(arguments: Optional[list[str]] = None) -> int:
    asked = options(arguments)
    if asked.checkout:
        return exit_status(lambda: from_checkout.take(find(asked.checkout)))
    try:
        if asked.check:
            return marked(RELEASES)
        if asked.all:
            # The newest matter most.
            found = [finding for r in reversed(RELEASES) for finding in check(r)]
            return int(any(finding.question for finding in found))
        findings = check(asked.release)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    code = take_in(asked.release, findings)
    if not code:
        store(asked.release, findings)
    return code


if __name__ == "__main__":
    sys.exit(main())
