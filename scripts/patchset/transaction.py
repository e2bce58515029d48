"""Writing a set of files so that a kill at any point can be undone.

A ``Change`` says what a file was and what it becomes. ``commit`` saves backups
and a journal, then replaces file by file; ``undo`` goes the opposite way from
the backups. The journal says "writing" from before the first replacement until
after the last, so the next call finds an interrupted one and undoes it
(``recover``) before it does anything else.

Files are replaced by siblings, never written into: other trees may share their
inode through hard links.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from .files import locked, replace_file, sibling, sync_folder, write_synced
from .target import Conflict, Target


JOURNAL = "journal.json"
FORMAT = 1


def digest(content: Optional[bytes]) -> Optional[str]:
    return None if content is None else hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Change:
    """One file: its bytes before and after, None where there is no file."""

    path: str
    before: Optional[bytes]
    after: Optional[bytes]


@dataclass(frozen=True)
class Journal:
    """What was written, in order of writing, and what it takes to undo it.

    ``files`` maps a path to its digests ``before`` and ``after`` (None where
    there is no file) and its ``mode``; ``folders`` were made for new files.
    """

    folder: Path
    phase: str
    files: dict[str, dict[str, Any]]
    folders: list[str]

    def backup(self, path: str) -> Optional[bytes]:
        if self.files[path]["before"] is None:
            return None
        place = self.folder / "backups" / path
        content = place.read_bytes()
        if digest(content) != self.files[path]["before"]:
            raise Conflict(f"{place}: the backup was altered; it cannot be put back")
        return content


@contextmanager
def lock(target: Target) -> Iterator[None]:
    """One process at a time; the kernel drops the lock with its process."""
    try:
        with locked(target.root / "torch", wait=False):
            yield
    except BlockingIOError:
        raise Conflict(
            f"{target.root}: another process is patching this tree; "
            "try again when it is done"
        ) from None


def read_journal(target: Target) -> Optional[Journal]:
    place = target.state / JOURNAL
    if not place.is_file():
        return None
    data: dict[str, Any] = json.loads(place.read_text())
    if data["format"] != FORMAT:
        raise Conflict(
            f"{place}: written by another version of these scripts (format "
            f"{data['format']}); reverse with that version first"
        )
    return Journal(target.state, data["phase"], data["files"], data["folders"])


def commit(target: Target, changes: Sequence[Change]) -> Journal:
    """Make every file what its change says; what is returned undoes it."""
    fresh = target.state.with_name(target.state.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "backups").mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {}
    folders: list[str] = []
    for change in changes:
        place = target.root / change.path
        if change.before is None:
            mode = _usual_mode(place)
            missing = (p for p in place.parents if not p.exists())
            new = [str(p.relative_to(target.root)) for p in missing]
            folders += [p for p in reversed(new) if p not in folders]
        else:
            mode = place.stat().st_mode & 0o777
            backup = fresh / "backups" / change.path
            backup.parent.mkdir(parents=True, exist_ok=True)
            write_synced(backup, change.before)
        files[change.path] = {
            "before": digest(change.before),
            "after": digest(change.after),
            "mode": mode,
        }
    journal = Journal(target.state, "writing", files, folders)
    _write_journal(fresh, journal)
    os.replace(fresh, target.state)
    sync_folder(target.state.parent)
    for folder in folders:
        (target.root / folder).mkdir()
    for change in changes:
        _put(target, change.path, change.after, files[change.path]["mode"])
    for change in changes:
        if target.read(change.path) != change.after:
            raise Conflict(f"{change.path}: reads back other than it was written")
    journal = replace(journal, phase="applied")
    _write_journal(target.state, journal)
    return journal


def undo(target: Target, journal: Journal) -> None:
    """Give every file its bytes from before, in the opposite order.

    Conflict, before the first write, where a file is neither what was written
    nor what it was before: somebody changed it since.
    """
    pending: list[tuple[str, Optional[bytes]]] = []
    for path, known in reversed(list(journal.files.items())):
        current = digest(target.read(path))
        if current == known["before"]:
            continue
        if current != known["after"]:
            raise Conflict(
                f"{path}: changed since the patch set was applied; undo that change "
                f"or restore the file from {journal.folder / 'backups' / path}"
            )
        pending.append((path, journal.backup(path)))
    _write_journal(target.state, replace(journal, phase="writing"))
    for path, content in pending:
        _put(target, path, content, journal.files[path]["mode"])
    for path, known in journal.files.items():
        sibling(target.root / path).unlink(missing_ok=True)
        if digest(target.read(path)) != known["before"]:
            raise Conflict(f"{path}: not restored; the backups stay in {target.state}")
    forget(target, journal)


def recover(target: Target) -> bool:
    """Undo what a killed call left half done; whether there was anything."""
    for place in target.state.parent.glob(target.state.name + ".*"):
        shutil.rmtree(place)
    sibling(target.state / JOURNAL).unlink(missing_ok=True)
    journal = read_journal(target)
    if journal is None or journal.phase != "writing":
        return False
    undo(target, journal)
    return True


def forget(target: Target, journal: Journal) -> None:
    """Drop the journal at once, then the backups and the folders made for files."""
    gone = target.state.with_name(target.state.name + ".old")
    shutil.rmtree(gone, ignore_errors=True)
    for folder in reversed(journal.folders):
        place = target.root / folder
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()
    os.replace(target.state, gone)
    shutil.rmtree(gone)


def _usual_mode(place: Path) -> int:
    """The mode of a new file: its neighbour's, or what the folder lets read."""
    neighbour = next(iter(sorted(place.parent.glob("*.py"))), None)
    return (neighbour.stat().st_mode & 0o777) if neighbour else 0o644


def _put(target: Target, path: str, content: Optional[bytes], mode: int) -> None:
    place = target.root / path
    if content is None:
        place.unlink(missing_ok=True)
        return
    replace_file(place, content, mode)


def _write_journal(folder: Path, journal: Journal) -> None:
    text = json.dumps(
        {
            "format": FORMAT,
            "phase": journal.phase,
            "files": journal.files,
            "folders": journal.folders,
        },
        indent=1,
    )
    replace_file(folder / JOURNAL, text.encode())
