"""A patch of the series as a mail that ``git am`` takes, the same on every machine."""

from __future__ import annotations

import difflib
import hashlib
import io
from collections.abc import Sequence
from typing import Optional

from .patch import Patch
from .transaction import Change


AUTHOR = "activation memory budget patch set <patches@localhost>"
DATE = "Thu, 1 Jan 2026 00:00:00 +0000"


def message(patch: Patch) -> str:
    """The commit message: subject, reason, trailers, how it was tested."""
    trailers = "\n".join((*patch.trailers, f"Tested: {patch.tested}"))
    return f"{patch.subject}\n\n{patch.why}\n{trailers}\n"


def mail(
    patch: Patch, changes: Sequence[Change], number: int, total: int, context: int
) -> str:
    """The whole mail; ``context`` is the number of unchanged lines around a change."""
    subject, _, body = message(patch).partition("\n\n")
    diffs = "".join(_file_diff(change, context) for change in changes)
    return (
        "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"
        f"From: {AUTHOR}\n"
        f"Date: {DATE}\n"
        f"Subject: [PATCH {number}/{total}] {subject}\n\n"
        f"{body}---\n\n{diffs}-- \n"
    )


def _file_diff(change: Change, context: int) -> str:
    before, after = change.before, change.after
    path = change.path
    head = f"diff --git a/{path} b/{path}\n"
    if before is None:
        head += "new file mode 100644\n"
    # The full blob names let `git am --3way` find its base.
    head += f"index {_blob(before)}..{_blob(after)}"
    head += "\n" if before is None else " 100644\n"
    # Upstream's linter sees to it that every file ends with a newline.
    return head + "".join(
        difflib.unified_diff(
            _split(before),
            _split(after),
            "/dev/null" if before is None else f"a/{path}",
            f"b/{path}",
            n=context,
        )
    )


def _split(content: Optional[bytes]) -> list[str]:
    # Lines end at "\n" only, as git has it; str.splitlines knows other ends too.
    return [line.decode() for line in io.BytesIO(content or b"").readlines()]


def _blob(content: Optional[bytes]) -> str:
    if content is None:
        return "0" * 40
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
