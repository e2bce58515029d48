"""Writes the README's tables from the stored results; ``--check`` only compares.

Each table stands between ``<!-- report: NAME -->`` and ``<!-- report end -->`` and
is made from ``results/NAME.json`` by the function of that name.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional


REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
RESULTS = REPOSITORY / "results"
BLOCK = re.compile(r"(<!-- report: (\w+) -->\n).*?(<!-- report end -->)", re.DOTALL)


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def quickstart(data: dict[str, Any]) -> str:
    rows = []
    for row in data["rows"]:
        choice, measured = row["choice"], row["measured"]
        used, over, solver_time = "-", "-", "-"
        if choice is not None:
            used = f"{choice['used']:.5f}"
            over = f"+{choice['used'] / row['budget'] - 1:.2%}"
            over = f"**{over}**" if choice["over"] else "no"
            solver_time = f"{choice['solver_seconds'] * 1e3:.1f}"
        rest = ["", "", ""]
        if measured is not None:
            rest = [
                f"{measured['saved_bytes'] / 1024:,.1f}",
                "yes" if measured["equals_eager"] else "**no**",
                f"{measured['partition_seconds']:.2f}",
            ]
        rows.append([str(row["budget"]), row["solver"], used, over, *rest, solver_time])
    heading = (
        "budget asked",
        "solver",
        "really used",
        "over",
        "saved KiB, measured",
        "loss and gradients as eager",
        "partition s",
        "solver ms",
    )
    machine = data["machine"]
    return markdown(heading, rows) + (
        f"\ntorch {data['torch']}, backend {data['backend']}, seed {data['seed']}, "
        f"{machine['processor']}, Python {machine['python']}. At budget 1.0 no solver is "
        "asked. The rows named upstream are the untouched wheel's solvers on the same "
        "instance.\n"
    )


def solvers(data: dict[str, Any]) -> str:
    rows = [
        [
            row["what"],
            row["measured"],
            row["mark"],
            "yes" if row["passed"] else "**no**",
        ]
        for row in data["rows"]
    ]
    facts = data["environment"]
    return markdown(("what", "measured", "mark", "reached"), rows) + (
        f"\ntorch {facts['torch']}, {facts['machine']}, Python {facts['python']}, one "
        f"thread, medians of {facts['repeats']} interleaved runs.\n"
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "quickstart": quickstart,
    "solvers": solvers,
}


def rendered(text: str) -> str:
    def fill(match: re.Match[str]) -> str:
        data = json.loads((RESULTS / f"{match[2]}.json").read_text())
        return match[1] + TABLES[match[2]](data) + match[3]

    return BLOCK.sub(fill, text)


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="report.sh", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    before = README.read_text()
    after = rendered(before)
    if check:
        if before != after:
            print("README.md: its tables are not those of results/")
            print("run scripts/report.sh and commit the result")
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
