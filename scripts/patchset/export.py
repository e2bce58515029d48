"""The command behind ``scripts/export_patches.sh``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Optional

from .apply import add_without
from .images import survey
from .mailbox import mail
from .target import BadCall, Conflict, exit_status, find
from .transaction import read_journal


def write_series(options: argparse.Namespace) -> None:
    """Write the patches, in order; nothing where one conflicts."""
    target = find(options.checkout)
    out = Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadCall(f"{out}: exists and is not an empty folder")
    result = survey(target, read_journal(target), options.without)
    if result.conflicts:
        raise Conflict("; ".join(result.conflicts))
    steps = [step for step in result.patches if step.changes]
    out.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(steps, 1):
        place = out / f"{number:04d}-{step.patch.name}.patch"
        place.write_text(mail(step.patch, step.changes, number, len(steps), context=3))
        print(place)


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="export_patches.sh",
        description="Writes the complete series for the checkout at hand, overlay "
        "included, one patch a topic. Apply it with: git am OUT/*.patch",
        epilog="exit codes: 0 written; 1 conflict; 2 bad call or not a PyTorch tree",
    )
    parser.add_argument("checkout", metavar="CHECKOUT")
    parser.add_argument("out", metavar="OUT", help="a new or empty folder")
    add_without(parser)
    options = parser.parse_args(arguments)
    return exit_status(lambda: write_series(options))


if __name__ == "__main__":
    sys.exit(main())
