"""Writing a set of files so that a fault or a kill at any point can be undone.

A ``Change`` says what a file was and what it becomes. ``commit`` saves backups
and a journal, then replaces file by file, and undoes that at once where a write
fails. ``undo`` goes the opposite way: it moves the backups back, which takes no
space, so that a full disk cannot stop it. The journal says "writing" from before
the first replacement until after the last, so the next call finds an interrupted
one and undoes it (``recover``) before it does anything else.

Files are replaced by siblings, never written into: other trees may share their
inode through hard links.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Optional

from .files import (
    fault,
    locked,
    move_over,
    naming,
    replace_file,
    sibling,
    sync_folder,
    write_synced,
)
from .target import Conflict, Target, Unfinished


JOURNAL = "journal.json"
FORMAT = 1
WRITING, WRITTEN = "writing", "applied"


def digest(content: Optional[bytes]) -> Optional[str]:
    return None if content is None else hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Change:
    """One file: its bytes before, None where there is no file, and after."""

    path: str
    before: Optional[bytes]
    after: bytes


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
        """The file's bytes before, None for no file; Conflict without a sound backup."""
        before = self.files[path]["before"]
        if before is None:
            return None
        place = self.folder / "backups" / path
        content = place.read_bytes() if place.is_file() else None
        if digest(content) != before:
            raise Conflict(
                f"{place}: the backup is {'gone' if content is None else 'damaged'}; "
                f"get upstream's {path} back (with git, or by installing or unpacking "
                "torch again) and run this again"
            )
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
    """What was written, None where nothing was; Conflict where that cannot be told."""
    place = target.state / JOURNAL
    if not os.path.lexists(target.state):
        return None
    try:
        data: dict[str, Any] = json.loads(place.read_bytes())
        if data.pop("format") != FORMAT:
            raise ValueError("written by another version of these scripts")
        return Journal(target.state, **data)
    except FileNotFoundError:
        problem = "missing"
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"damaged ({error})"
    raise Conflict(
        f"{place}: {problem}, so nobody can tell what was written. Get upstream's files "
        "back (with git, or by installing or unpacking torch again), delete "
        f"{target.state} and run this again"
    )


def commit(target: Target, changes: Sequence[Change]) -> Journal:
    """Make every file what its change says; what is returned undoes it.

    Where that fails nothing stays written: OSError before the first file was touched,
    Conflict afterwards, or Unfinished.
    """
    fresh = target.state.with_name(target.state.name + ".new")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        journal = _prepare(target, changes, fresh)
        os.replace(fresh, target.state)
    except OSError as error:
        with suppress(OSError):
            shutil.rmtree(fresh)
        if fresh.exists():
            raise Unfinished(fault(error)) from error
        raise
    try:
        sync_folder(target.state.parent)
        for folder in journal.folders:
            (target.root / folder).mkdir()
        for change in changes:
            mode = journal.files[change.path]["mode"]
            replace_file(target.root / change.path, change.after, mode)
        for change in changes:
            with naming(target.root / change.path):
                if target.read(change.path) != change.after:
                    raise OSError(errno.EIO, "reads back other than it was written")
        journal = replace(journal, phase=WRITTEN)
        _write_journal(target.state, journal)
    except OSError as error:
        take_back(target, journal, fault(error))
    return journal


def _prepare(target: Target, changes: Sequence[Change], folder: Path) -> Journal:
    """The journal, stored in ``folder`` with a backup of each file."""
    (folder / "backups").mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {}
    folders: list[str] = []
    for change in changes:
        place = target.root / change.path
        if change.before is None:
            mode = 0o644
            missing = (p for p in place.parents if not p.exists())
            new = [str(p.relative_to(target.root)) for p in missing]
            folders += [p for p in reversed(new) if p not in folders]
        else:
            mode = place.stat().st_mode & 0o777
            backup = folder / "backups" / change.path
            backup.parent.mkdir(parents=True, exist_ok=True)
            write_synced(backup, change.before)
        files[change.path] = {
            "before": digest(change.before),
            "after": digest(change.after),
            "mode": mode,
        }
    journal = Journal(target.state, WRITING, files, folders)
    _write_journal(folder, journal)
    return journal


def take_back(target: Target, journal: Journal, why: str) -> NoReturn:
    """Undo what was written because of ``why``: Conflict, or Unfinished."""
    try:
        undo(target, journal)
    except Conflict as error:
        raise Unfinished(f"{why}; it cannot be undone: {error}") from None
    raise Conflict(f"{why}; what was written is undone")


def undo(target: Target, journal: Journal) -> None:
    """Give every file its bytes from before, in the opposite order.

    A journal that a reinstall or upgrade of torch outlived is dropped: none of
    upstream's files is as we wrote it any more. New files of ours, which no installer
    knows of, are then taken away all the same.

    Conflict, before the first write, where a file is neither what was written
    nor what it was before: somebody changed it since. Unfinished where a write fails.
    """
    pending = restorable(target, journal)
    try:
        for path in journal.files:
            sibling(target.root / path).unlink(missing_ok=True)
        for path in pending:
            _restore(target, journal, path)
        _forget(target, journal)
    except OSError as error:
        raise Unfinished(fault(error)) from error


def renew(target: Target, journal: Journal) -> None:
    """Take the files as they are for what was written, so that they can be undone."""
    files = {
        path: {**known, "after": digest(target.read(path))}
        for path, known in journal.files.items()
    }
    _write_journal(target.state, replace(journal, files=files))


def restorable(target: Target, journal: Journal) -> list[str]:
    """The files that ``undo`` has to restore; Conflict where it could not."""
    pending: list[str] = []
    changed: list[str] = []
    for path, known in reversed(list(journal.files.items())):
        current = digest(target.read(path))
        if current != known["before"]:
            (pending if current == known["after"] else changed).append(path)
    if changed and any(journal.files[p]["before"] for p in pending):
        backup = journal.folder / "backups" / changed[0]
        cure = f" or restore the file from {backup}" if backup.is_file() else ""
        if journal.files[changed[0]]["before"] is None:
            cure = " or delete the file"
        raise Conflict(
            f"{changed[0]}: changed since the patch set was applied; undo that change"
            f"{cure}"
        )
    for path in pending:
        journal.backup(path)
    target.check_writable(*pending)
    return pending


def _restore(target: Target, journal: Journal, path: str) -> None:
    place, backup = target.root / path, journal.folder / "backups" / path
    mode = journal.files[path]["mode"]
    if journal.files[path]["before"] is None:
        place.unlink(missing_ok=True)
    elif backup.stat().st_dev == place.parent.stat().st_dev:
        move_over(backup, place, mode)
    else:
        replace_file(place, backup.read_bytes(), mode)


def recover(target: Target) -> bool:
    """Undo what a killed call left half done; whether there was anything."""
    for place in target.state.parent.glob(target.state.name + ".*"):
        shutil.rmtree(place)
    journal = read_journal(target)
    if journal is None or journal.phase != WRITING:
        return False
    undo(target, journal)
    return True


def _forget(target: Target, journal: Journal) -> None:
    """Drop the journal at once, then the backups and the folders made for files."""
    gone = target.state.with_name(target.state.name + ".old")
    shutil.rmtree(gone, ignore_errors=True)
    for folder in reversed(journal.folders):
        place = target.root / folder
        # What importing the files has left there.
        shutil.rmtree(place / "__pycache__", ignore_errors=True)
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()
    os.replace(target.state, gone)
    shutil.rmtree(gone)


def _write_journal(folder: Path, journal: Journal) -> None:
    data = {"format": FORMAT, **vars(journal)}
    del data["folder"]
    replace_file(folder / JOURNAL, json.dumps(data, indent=1).encode())
