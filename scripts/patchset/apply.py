"""The command behind ``scripts/apply_patch.sh``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from .commits import check_committable, commit_on_head
from .images import APPLIED, stale_bytecode, Survey, survey
from .mailbox import message
from .series import SERIES
from .target import (
    BadCall,
    Conflict,
    find,
    find_installed,
    import_fault,
    NEEDS,
    Target,
)
from .transaction import (
    Change,
    commit,
    digest,
    forget,
    Journal,
    lock,
    read_journal,
    recover,
    undo,
)


DONE, CONFLICT, BAD_CALL, NOT_IN_MANIFEST = range(4)

EPILOG = """\
exit codes:
  0  done, or already in the wanted state: every file that the set touches was, to
     the byte, as in a known release
  1  conflict: nothing was written; the message names file and reason
  2  bad call, or TARGET is no PyTorch tree, or of a release that the set is not for
  3  applied (or, with --check, would apply) to any other tree, such as a commit of
     main: verified by structure only, not by checksum

examples:
  scripts/apply_patch.sh --status ~/pytorch        what each patch would do
  scripts/apply_patch.sh --commit ~/pytorch        one git commit per patch
  scripts/apply_patch.sh --installed               the torch that python3 imports
  scripts/apply_patch.sh --reverse --installed     take it off, byte for byte
"""


@dataclass
class Report:
    """What one call did, for people and, with --json, for programs."""

    action: str
    target: Optional[Target] = None
    release: Optional[str] = None
    in_manifest: Optional[bool] = None
    patches: list[dict[str, str]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    exit_code: int = DONE

    def take(self, result: Survey) -> None:
        self.release, self.in_manifest = result.release, result.in_manifest
        self.patches = [
            {"name": p.patch.name, "state": p.state, "detail": p.detail}
            for p in result.patches
        ]

    def as_json(self) -> str:
        place: dict[str, Any] = {}
        if self.target is not None:
            place = {
                "target": str(self.target.root),
                "version": self.target.version,
                "installed": self.target.installed,
            }
        rest = {k: v for k, v in vars(self).items() if k not in ("target", "action")}
        return json.dumps({"action": self.action, **place, **rest}, indent=1)

    def as_text(self) -> str:
        lines = []
        if self.target is not None:
            kind = "installed torch" if self.target.installed else "checkout"
            known = (
                f"every file as in {self.release}"
                if self.in_manifest
                else f"no known release; edits for {self.release}"
            )
            lines.append(
                f"{self.target.root}: {kind}, PyTorch {self.target.version}"
                + (f" ({known})" if self.release else "")
            )
        for patch in self.patches:
            detail = f"  ({patch['detail']})" if patch["detail"] else ""
            lines.append(f"  {patch['name']:<24} {patch['state']}{detail}")
        lines += [f"  wrote {path}" for path in self.files]
        lines += [f"  commit {name}" for name in self.commits]
        return "\n".join(lines + self.messages)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="apply_patch.sh",
        description="Puts the activation memory budget patch set onto a PyTorch tree, "
        "takes it off again, or tells where it stands.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", help=NEEDS)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="say, but do not write")
    mode.add_argument("--reverse", action="store_true", help="take the set off")
    mode.add_argument("--status", action="store_true", help="classify every patch")
    parser.add_argument(
        "--commit", action="store_true", help="git checkouts: one commit per patch"
    )
    add_without(parser)
    parser.add_argument("--json", action="store_true", help="report as JSON")
    parser.add_argument(
        "--installed", action="store_true", help="the torch that a Python imports"
    )
    parser.add_argument("--python", metavar="PY", help="that Python (default: python3)")
    options = parser.parse_args(arguments)

    action = next(
        (name for name in ("check", "reverse", "status") if getattr(options, name)),
        "apply",
    )
    report = Report(action)
    try:
        report.target = _find(options)
        with lock(report.target):
            ACTIONS[action](report, report.target, options)
    except BadCall as error:
        report.exit_code = BAD_CALL
        report.messages.append(f"error: {error}")
    except Conflict as error:
        report.exit_code = CONFLICT
        report.messages.append(f"conflict: {error}")
    failed = report.exit_code in (CONFLICT, BAD_CALL)
    # All is done by now: a reader that has gone away must not change the exit code.
    with contextlib.suppress(BrokenPipeError):
        if options.json:
            print(report.as_json(), flush=True)
        else:
            stream = sys.stderr if failed else sys.stdout
            print(report.as_text(), file=stream, flush=True)
    return report.exit_code


def add_without(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without",
        metavar="PATCH",
        action="append",
        default=[],
        choices=[patch.name for patch in SERIES],
        help="leave this patch out, as --status names it; may be repeated",
    )


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
    if options.commit and options.status + options.check:
        raise BadCall("--commit goes with applying and --reverse only")
    if options.commit and target.git_dir is None:
        raise BadCall(f"--commit: {target.root} is not a git checkout")
    return target


def _status(report: Report, target: Target, options: argparse.Namespace) -> None:
    journal = read_journal(target)
    result = survey(target, journal, options.without)
    report.take(result)
    if journal is not None and journal.phase == "writing":
        report.messages.append(
            "an earlier call was interrupted; the next apply or --reverse cleans up"
        )
    if result.conflicts:
        report.exit_code = CONFLICT


def _apply(report: Report, target: Target, options: argparse.Namespace) -> None:
    if not options.check and recover(target):
        report.messages.append("an interrupted earlier call was undone first")
    journal = read_journal(target)
    result = survey(target, journal, options.without)
    report.take(result)
    if result.conflicts:
        raise Conflict("\nconflict: ".join(result.conflicts))
    if result.lacks:
        names = ", ".join(patch.name for patch in result.lacks)
        warnings = (f"; {patch.lacking}" for patch in result.lacks if patch.lacking)
        report.messages.append(
            f"PyTorch {result.release} is too old for {names}{''.join(warnings)}"
        )
    if options.commit:
        check_committable(target, result.changes)
    pending = _pending(target, journal, result.changes)
    if pending and not result.in_manifest:
        report.exit_code = NOT_IN_MANIFEST
        report.messages.append(
            "a tree that is no known release: every edit finds its place and the "
            "result compiles, but no checksum vouches for the base"
        )
    if not pending:
        report.messages.append("already applied")
    elif options.check:
        report.messages += [f"would write {path}" for path in pending]
        report.messages.append("would apply")
    else:
        if journal is not None:
            _take_off(target, journal)
            result = survey(target, None, options.without)
        report.files = [change.path for change in result.changes]
        report.messages.append(_write(target, result.changes))
    if options.commit:
        steps = [(message(s.patch), s.changes) for s in result.patches if s.changes]
        report.commits = commit_on_head(target, steps)
    if not options.check:
        report.take(survey(target, read_journal(target), options.without))


def _reverse(report: Report, target: Target, options: argparse.Namespace) -> None:
    if recover(target):
        report.messages.append("an interrupted earlier call was undone")
    journal = read_journal(target)
    result = survey(target, journal)
    if journal is None:
        if any(p.state == APPLIED for p in result.patches):
            raise Conflict(
                "the patch set is there, but was not applied by this script (git am? "
                "a copied tree?): undo it the way it came (git revert, or reinstall "
                "torch)"
            )
        report.messages.append("not applied; nothing to do")
    else:
        missing = [p.patch.name for p in result.patches if p.state != APPLIED]
        result = survey(target, journal, missing)
        if options.commit:
            check_committable(target, result.changes)
        _take_off(target, journal)
        report.files = list(journal.files)
        if options.commit:
            steps = [
                (
                    f"Revert: {message(s.patch)}",
                    tuple(Change(c.path, c.after, c.before) for c in s.changes),
                )
                for s in reversed(result.patches)
                if s.changes
            ]
            report.commits = commit_on_head(target, steps)
        report.messages.append("reversed; every file is as it was before")
    report.take(survey(target, None))


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
            and known["after"] is not None
            and digest(target.read(path)) == known["after"]
        ]
    return pending


def _take_off(target: Target, journal: Journal) -> None:
    """Undo, or drop a journal that a reinstall or upgrade of torch outlived.

    Superseded means: none of upstream's files is as we wrote it any more. New
    files of ours, which no installer knows of, are then taken away all the same.
    """
    written = [path for path, known in journal.files.items() if known["after"]]
    ours = [p for p in written if digest(target.read(p)) == journal.files[p]["after"]]
    if any(journal.files[path]["before"] for path in ours):
        undo(target, journal)
        return
    for path in ours:
        (target.root / path).unlink()
    forget(target, journal)


def _write(target: Target, changes: list[Change]) -> str:
    """Write and import the result; where it no longer imports, take it off again.

    A bare source tree, another platform's binaries or missing packages: then the
    checksums and the syntax, checked while writing, are the proof.
    """
    built = any((target.root / "torch").glob("_C.*"))
    imported = built and import_fault(target.python, target.root) is None
    journal = commit(target, stale_bytecode(target, changes) + changes)
    if not imported:
        return f"verified: checksums and syntax ({target.python} cannot import it)"
    fault = import_fault(target.python, target.root)
    if fault is not None:
        undo(target, journal)
        raise Conflict(f"the patched torch does not import; undone: {fault}")
    return f"verified: checksums, syntax, and an import by {target.python}"


if __name__ == "__main__":
    sys.exit(main())
