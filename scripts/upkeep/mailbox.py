"""A patch of the series as a mail that ``git am`` takes, the same on every machine."""

import difflib
import hashlib
import io
from collections.abc import Sequence

from patchset.patch import Patch
from patchset.transaction import Change


AUTHOR = "activation memory budget patch set <patches@localhost>"
DATE = "Thu, 1 Jan 2026 00:00:00 +0000"
# Unchanged lines around a change.
CONTEXT = 1


def mail(patch: Patch, changes: Sequence[Change], number: int, total: int) -> str:
    """The whole mail, of changes to files that are there."""
    subject, _, body = patch.message.partition("\n\n")
    diffs = "".join(map(_file_diff, changes))
    return (
        "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"
        f"From: {AUTHOR}\n"
        f"Date: {DATE}\n"
        f"Subject: [PATCH {number}/{total}] {subject}\n\n"
        f"{body}---\n\n{diffs}-- \n"
    )


def _file_diff(change: Change) -> str:
    before, after = change.before or b"", change.after
    old, new = f"a/{change.path}", f"b/{change.path}"
    # The full blob names let `git am --3way` find its base.
    head = f"diff --git {old} {new}\nindex {_blob(before)}..{_blob(after)} 100644\n"
    # Upstream's linter sees to it that every file ends with a newline.
    diff = difflib.unified_diff(_split(before), _split(after), old, new, n=CONTEXT)
    return head + "".join(diff)


def _split(content: bytes) -> list[str]:
    # Lines end at "\n" only, as git has it; str.splitlines knows other ends too.
    return [line.decode() for line in io.BytesIO(content).readlines()]


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
