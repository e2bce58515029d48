"""Files that a reader sees old or new, never in part, and locks that a kill frees."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Optional


@contextmanager
def naming(place: Path) -> Iterator[None]:
    """Let an OSError in the block name ``place``: that of a write names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from error


def fault(error: Exception) -> str:
    """What is wrong, for people; of an OSError with the file and the way out."""
    if not isinstance(error, OSError):
        return str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{error.filename}: {error.strerror}" + " (free some space)" * full


def write_synced(place: Path, content: bytes) -> None:
    with naming(place), open(place, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sibling(place: Path) -> Path:
    """Where the new content of ``place`` lies until it is complete."""
    return place.with_name(f".{place.name}.activation-memory-budget")


def replace_file(place: Path, content: bytes, mode: Optional[int] = None) -> None:
    """Give ``place`` the content by way of a sibling; without ``mode``, its old one."""
    with naming(place):
        write_synced(sibling(place), content)
        move_over(sibling(place), place, mode)


def move_over(fresh: Path, place: Path, mode: Optional[int] = None) -> None:
    """Replace ``place`` by the file ``fresh``, which takes no space.

    The owner stays, and the time of change moves on by a second at least: Python takes
    bytecode for current when size and whole second agree.
    """
    if place.exists():
        before = place.stat()
        mode = before.st_mode & 0o777 if mode is None else mode
        time = max(fresh.stat().st_mtime, before.st_mtime + 1)
        os.utime(fresh, (time, time))
    if mode is not None:
        os.chmod(fresh, mode)
    if os.geteuid() == 0:
        owner = (place if place.exists() else place.parent).stat()
        os.chown(fresh, owner.st_uid, owner.st_gid)
    os.replace(fresh, place)
    sync_folder(place.parent)


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold the folder's lock; where ``wait`` is false, BlockingIOError if it is held."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)
