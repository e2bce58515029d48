"""Which code a stored row is of, and whether that is the code as it is now.

What decides a figure is the overlay and what is applied of the patches to that release of
torch. A row has a digest of these (``code``) that comments, docstrings and layout leave as
it is, so that it can be compared where there is no history, and the commit that changed
them last. Where a later change was proven to decide none of them, as its commit says, the
rows have its digest and keep their commit. The untouched wheel has none of it: what it was
measured to do stays.
"""

import functools
import hashlib
import subprocess
from collections.abc import Iterable
from typing import Any

from patchset.meaning import meaning
from patchset.patch import REPOSITORY


Row = dict[str, Any]
OVERLAY = REPOSITORY / "torch_overlay" / "torch"
PATCHES = REPOSITORY / "patches"
# The code of rows that nothing of this project decides.
STOCK = "stock"


@functools.cache
def fingerprint(release: str) -> str:
    digest = hashlib.sha256()
    for place in sorted(OVERLAY.rglob("*.py")):
        digest.update(f"{place.relative_to(OVERLAY)}\n".encode())
        digest.update(meaning(place.read_text()).encode())
    for place in sorted((PATCHES / release).glob("*.patch")):
        digest.update("\n".join(changes(place.read_text())).encode())
    return digest.hexdigest()[:12]


def changes(patch: str) -> Iterable[str]:
    """The lines that come and go, and in which files; none that are comments."""
    for line in patch.splitlines():
        is_change = line.startswith(("+", "-", "diff --git "))
        if is_change and line[1:].strip() and not line[1:].lstrip().startswith("#"):
            yield line


@functools.cache
def commit() -> str:
    """The last one that changed what decides a figure; with a + what is not committed."""
    places = [str(place) for place in (OVERLAY, PATCHES)]
    last = git("log", "-1", "--format=%h", "--", *places)
    return last + ("+" if last and git("status", "--porcelain", "--", *places) else "")


def git(*words: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def here() -> Row:
    """What a row that is measured by this process's torch says of its code."""
    import torch  # Not needed to compare.

    release = torch.__version__.partition("+")[0]
    return {"release": release, "commit": commit(), "code": fingerprint(release)}


def is_of_now(row: Row) -> bool:
    return row["code"] in (STOCK, fingerprint(row["release"]))


def complaints(name: str, rows: Iterable[Row]) -> list[str]:
    """What is wrong with the rows of a table: of several codes, or not of this one."""
    rows, again = list(rows), f"run scripts/benchmark.sh all --only {name}"
    wrong = []
    releases = sorted({row["release"] for row in rows if "release" in row})
    if len(releases) > 1:
        several = ", ".join(releases)
        wrong.append(f"{name}: the rows are of several releases ({several}); {again}")
    unknown = sum("code" not in row for row in rows)
    if unknown:
        wrong.append(
            f"{name}: {unknown} rows do not say which code they are of; {again}"
        )
    known = (row for row in rows if row.get("code", STOCK) != STOCK)
    found = {row["code"]: row for row in known}
    if len(found) > 1:
        commits = ", ".join(row["commit"] for row in found.values())
        wrong.append(f"{name}: the rows are of several codes ({commits}); {again}")
    for row in found.values():
        if not is_of_now(row):
            wrong.append(f"{name}: the code has changed since {row['commit']}; {again}")
    return wrong
