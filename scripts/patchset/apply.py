"""The command behind ``scripts/apply_patch.sh``."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Optional

from . import transaction
from .commits import check_committable, commit_on_head
from .files import fault
from .images import ABSENT, APPLIED, Survey, survey
from .patch import MANIFEST, OVERLAY, RELEASES, REPOSITORY
from .series import SERIES
from .target import (
    BadCall,
    Conflict,
    find,
    find_installed,
    import_fault,
    NEEDS,
    Target,
    Unfinished,
)
from .transaction import Change, Journal


DONE, CONFLICT, BAD_CALL, NOT_IN_MANIFEST, UNFINISHED = range(5)

EPILOG = """\
exit codes:
  0  done, or nothing to do: every file was, to the byte, as in a known release
  1  conflict: nothing was written, or what was is undone; the message has the way on
  2  bad call, no PyTorch tree, a release that the set is not for, or a Python that
     cannot read it
  3  applied (or, with --check, would apply) to any other tree, such as a commit of
     main: verified by structure only, not by checksum
  4  could not finish, nor undo it: run the command that the message names
"""


# What became of a report's files.
WROTE = {"apply": "wrote", "check": "would write", "reverse": "restored"}


@dataclass
class Report:
    """What one call did, for people and, with --json, for programs."""

    action: str
    target: Optional[str] = None
    version: Optional[str] = None
    installed: Optional[bool] = None
    release: Optional[str] = None
    in_manifest: Optional[bool] = None
    patches: list[dict[str, str]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    exit_code: int = DONE

    def fail(self, exit_code: int, words: str) -> None:
        self.exit_code = exit_code
        self.messages.append(words)

    def take(self, result: Survey) -> None:
        self.release, self.in_manifest = result.release, result.in_manifest
        self.patches = [
            {"name": p.patch.name, "state": p.state, "detail": p.detail}
            for p in result.patches
        ]

    def as_text(self, verbose: bool) -> str:
        lines = []
        if self.target is not None:
            kind = "installed torch" if self.installed else "checkout"
            known = "every file as in" if self.in_manifest else "no release; edits for"
            release = f" ({known} {self.release})" if self.release else ""
            lines.append(f"{self.target}: {kind}, PyTorch {self.version}{release}")
        verb = WROTE.get(self.action, "")
        if verbose or self.action == "status":
            for patch in self.patches:
                detail = f"  ({patch['detail']})" if patch["detail"] else ""
                lines.append(f"  {patch['name']:<24} {patch['state']}{detail}")
            lines += [f"  {verb} {path}" for path in self.files]
        else:
            states = Counter(patch["state"] for patch in self.patches)
            counts = ", ".join(f"{count} {state}" for state, count in states.items())
            lines += [f"  patches: {counts}"] * bool(counts)
            lines += [f"  {verb} {len(self.files)} files"] * bool(self.files)
        lines += [f"  commit {name}" for name in self.commits]
        return "\n".join(lines + self.messages)


class Version(argparse.Action):
    """Prints the set's version, the releases it is for, and a digest of what it writes."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        project = (REPOSITORY / "pyproject.toml").read_text()
        version = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)[0]
        content = hashlib.sha256()
        for place in (MANIFEST, *sorted(OVERLAY.rglob("*.py"))):
            content.update(hashlib.sha256(place.read_bytes()).digest())
        print(f"activation memory budget patch set {version}")
        print(
            f"for PyTorch {', '.join(RELEASES[1:])}; {RELEASES[0]} gets the solvers only"
        )
        print(f"sha256 of what it writes: {content.hexdigest()}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadCall(f"{message}. {self.prog} --help tells more")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="apply_patch.sh",
        description="Puts the activation memory budget patch set onto a PyTorch tree, "
        "takes it off again, or tells where it stands.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", help=NEEDS)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="say, but do not write")
    mode.add_argument("--reverse", action="store_true", help="restore every file")
    mode.add_argument("--status", action="store_true", help="classify every patch")
    mode.add_argument(
        "--commit", action="store_true", help="git checkouts: one commit per patch"
    )
    parser.add_argument(
        "--without",
        metavar="PATCH",
        action="append",
        default=[],
        choices=[patch.name for patch in SERIES],
        help="leave this patch out, as --status names it; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="report as JSON")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="name every patch and file"
    )
    parser.add_argument(
        "--version",
        action=Version,
        nargs=0,
        help="the set's version, the releases of PyTorch it is for, and its digest",
    )
    parser.add_argument(
        "--installed", action="store_true", help="the torch that a Python imports"
    )
    parser.add_argument("--python", metavar="PY", help="that Python (default: python3)")
    return parser


def main(arguments: Optional[Sequence[str]] = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    # As given, for a bad call has no options.
    report = Report(next((a for a in ACTIONS if f"--{a}" in arguments), "apply"))
    try:
        options = _parser().parse_args(arguments)
        target = _find(options)
        report.target, report.version = str(target.root), target.version
        report.installed = target.installed
        with transaction.lock(target):
            ACTIONS[report.action](report, target, options)
    except BadCall as error:
        report.fail(BAD_CALL, f"error: {error}")
    except Conflict as error:
        report.fail(CONFLICT, f"conflict: {error}")
    except Unfinished as error:
        again = shlex.join(["scripts/apply_patch.sh", *arguments])
        words = f"could not finish: {error}. Fix that, then run: {again}"
        report.fail(UNFINISHED, words)
    except OSError as error:  # Where writing fails, these are Conflict or Unfinished.
        words = f"conflict: {fault(error)}; nothing was written"
        report.fail(CONFLICT, f"{words}. Fix that, then run this again")
    failed = report.exit_code in (CONFLICT, BAD_CALL, UNFINISHED)
    # All is done by now: a reader that has gone away must not change the exit code.
    with contextlib.suppress(BrokenPipeError):
        if "--json" in arguments:
            print(json.dumps(vars(report), indent=1), flush=True)
        else:
            text = report.as_text(verbose={"-v", "--verbose"} & {*arguments} != set())
            print(text, file=sys.stderr if failed else sys.stdout, flush=True)
    return report.exit_code


def _find(options: argparse.Namespace) -> Target:
    if options.installed:
        if options.target:
            raise BadCall("--installed and TARGET exclude each other")
        target = find_installed(options.python or "python3")
    elif options.python:
        raise BadCall("--python goes with --installed")
    elif not options.target:
        raise BadCall(f"no TARGET. {NEEDS}")
    else:
        target = find(options.target)
    if options.commit and target.git_dir is None:
        raise BadCall(f"--commit: {target.root} is not a git checkout")
    return target


def _status(report: Report, target: Target, options: argparse.Namespace) -> None:
    journal = transaction.read_journal(target)
    result = survey(target, journal, options.without)
    report.take(result)
    if journal is not None and journal.phase == transaction.WRITING:
        report.messages.append(
            "an earlier call was interrupted; the next apply or --reverse cleans up"
        )
    if result.conflicts:
        report.exit_code = CONFLICT


def _apply(report: Report, target: Target, options: argparse.Namespace) -> None:
    if not options.check and transaction.recover(target):
        report.messages.append("an interrupted earlier call was undone first")
    journal = transaction.read_journal(target)
    result = survey(target, journal, options.without)
    report.take(result)
    if result.conflicts:
        raise Conflict("\nconflict: ".join(result.conflicts))
    lacks = [step.patch for step in result.patches if step.state == ABSENT]
    if lacks:
        names = ", ".join(patch.name for patch in lacks)
        warnings = (f"; {patch.lacking}" for patch in lacks if patch.lacking)
        report.messages.append(
            f"not for PyTorch {result.release}: {names}{''.join(warnings)}"
        )
    if options.commit:
        check_committable(target, result.changes)
    pending = _pending(target, journal, result.changes)
    if pending and not result.in_manifest:
        report.exit_code = NOT_IN_MANIFEST
        report.messages.append(
            "not a known release: every edit finds its place and the "
            "result compiles, but no checksum vouches for the base"
        )
    if pending:
        target.check_writable(*pending)
        words = "would apply"
        if not options.check:
            words = _write(target, journal, result.changes)
        report.files = pending
        report.messages.append(words)
    else:
        report.messages.append("already applied")
    if options.commit:
        steps = [(s.patch.message, s.changes) for s in result.patches if s.changes]
        try:
            report.commits = commit_on_head(target, steps)
        except (Conflict, OSError) as error:
            raise Unfinished(f"not committed: {fault(error)}") from None
    if not options.check:
        report.take(survey(target, transaction.read_journal(target), options.without))


def _reverse(report: Report, target: Target, options: argparse.Namespace) -> None:
    if transaction.recover(target):
        report.messages.append("an interrupted earlier call was undone")
    journal = transaction.read_journal(target)
    result = survey(target, journal)
    report.release, report.in_manifest = result.release, result.in_manifest
    if journal is not None:
        transaction.undo(target, journal)
        report.files = list(journal.files)
        report.messages.append("reversed; every file is as it was before")
    elif any(step.state == APPLIED for step in result.patches):
        raise Conflict(
            "the patch set is there, but was not applied by this script (git am? a "
            "copied tree?): undo it the way it came (git revert, or reinstall torch)"
        )
    else:
        report.messages.append("not applied; nothing to do")


ACTIONS = {"status": _status, "check": _apply, "apply": _apply, "reverse": _reverse}


def _pending(
    target: Target, journal: Optional[Journal], changes: Sequence[Change]
) -> list[str]:
    """Files to write: not as wanted, or still as a patch now left out made them."""
    wanted = {c.path: c.after for c in changes}
    pending = [path for path, after in wanted.items() if target.read(path) != after]
    if journal is not None:
        pending += [
            path
            for path, known in journal.files.items()
            if path not in wanted
            and transaction.digest(target.read(path)) == known["after"]
        ]
    return pending


def _write(target: Target, old: Optional[Journal], changes: list[Change]) -> str:
    """Write and import the result; where it no longer imports, take it off again.

    A bare source tree, another platform's binaries or missing packages: then the
    checksums and the syntax, checked while writing, are the proof.
    """
    built = any((target.root / "torch").glob("_C.*"))
    if old is not None:
        transaction.undo(target, old)
    imported = built and import_fault(target.python, target.root) is None
    try:
        journal = transaction.commit(target, changes)
        if not imported:
            return f"verified: checksums and syntax ({target.python} cannot import it)"
        failure = import_fault(target.python, target.root)
        if failure is not None:
            transaction.take_back(
                target, journal, f"the patched torch does not import: {failure}"
            )
    except (Conflict, OSError) as error:
        if old is None:
            raise
        why = f"the old set is removed and the new one is not applied: {fault(error)}"
        raise Unfinished(why) from None
    return f"verified: checksums, syntax, and an import by {target.python}"


if __name__ == "__main__":
    sys.exit(main())
