"""Writes what is checked in but derived: ``patches/`` and ``manifest.json``.

``--check`` writes nothing and fails where the checked-in files differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Optional

from . import images
from .mailbox import mail
from .releases import tree
from .series import RELEASES, REPOSITORY, SERIES
from .target import find, Target
from .transaction import digest


PATCHES = REPOSITORY / "patches"


def derived(release: str, target: Target) -> tuple[dict[str, object], dict[Path, str]]:
    """A release's manifest row and its patches, from its untouched tree.

    Whole files of the overlay are not repeated in the patches, and the manifest
    holds their digest from before only: the overlay itself says what comes after.
    """
    result = images.survey(target, None, known={})
    if result.conflicts:
        raise SystemExit(
            f"{release}: "
            + "; ".join(f"{p.patch.name}: {p.detail}" for p in result.conflicts)
        )
    edited = {edit.path for patch in SERIES for edit in patch.edits}
    row: dict[str, object] = {}
    for path in images.series_paths(target):
        change = next((c for c in result.changes if c.path == path), None)
        before = target.read(path)
        after = before if change is None else change.after
        row[path] = {"before": digest(before)}
        if path in edited:
            row[path] = {"before": digest(before), "after": digest(after)}
    mails = {}
    for number, state in enumerate(result.patches, 1):
        edits = [c for c in state.changes if c.path in edited]
        if edits:
            name = f"{number:04d}-{state.patch.name}.patch"
            mails[PATCHES / release / name] = mail(
                state.patch, edits, number, len(SERIES), context=1
            )
    return row, mails


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check

    manifest: dict[str, object] = {}
    wanted: dict[Path, str] = {}
    for release in RELEASES:
        row, mails = derived(release, find(str(tree(release))))
        manifest[release] = row
        wanted.update(mails)
    wanted[images.MANIFEST] = json.dumps(manifest, indent=1) + "\n"

    present = {*PATCHES.rglob("*.patch"), images.MANIFEST}
    stale = sorted(present - wanted.keys())
    differing = [
        place
        for place, text in wanted.items()
        if not place.is_file() or place.read_text() != text
    ]
    if check:
        for place in [*differing, *stale]:
            print(f"{place.relative_to(REPOSITORY)}: not what the table gives")
        if differing or stale:
            print("run scripts/generate_patches.sh and commit the result")
        return int(bool(differing or stale))
    for place in differing:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(wanted[place])
    for place in stale:
        place.unlink()
    print(f"{len(differing)} written, {len(stale)} removed, {len(wanted)} in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
