"""Writes the tables of the README and of docs/ from the stored results.

``--check`` only compares. Each table stands between ``<!-- report: NAME -->`` and ``<!-- report end -->`` and
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
PAGES = (REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md")))
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


def marks(data: dict[str, Any]) -> str:
    rows = [
        [
            row["what"],
            row["measured"],
            row["mark"],
            ("yes" if row["passed"] else "**no**") if row["mark"] else "",
        ]
        for row in data["rows"]
    ]
    facts = data["environment"]
    return markdown(("what", "measured", "mark", "reached"), rows) + (
        f"\ntorch {facts['torch']}, {facts['machine']}, Python {facts['python']}, one "
        f"thread, medians of {facts['repeats']} interleaved runs.\n"
    )


def curves(data: dict[str, Any]) -> str:
    names = {"small": "gated blocks", "bert": "BERT-large"}
    rows = []
    for row in data["rows"]:
        ours = row["torch"] == "patched"
        rows.append(
            [
                names[row["net"]],
                row["torch"],
                f"{row['nodes']:,}",
                str(row["items"]),
                str(row["min_cuts"]),
                str(row["solver_calls"]),
                f"{row['plan_and_plot_seconds']:.1f}",
                f"{data['marks'][row['net']]:g}" if ours else "",
                f"{row['report_seconds'] / row['partition_seconds']:.2%}"
                if ours
                else "",
            ]
        )
    heading = (
        "net",
        "torch",
        "nodes",
        "items",
        "min cuts",
        "solver calls",
        "CPU s",
        "mark",
        "recording",
    )
    return markdown(heading, rows) + (
        f"\ntorch {data['torch']}, {data['machine']}, Python {data['python']}, one "
        f"thread, budget {data['budget']}, solver of the release's default.\n"
    )


def releases(data: dict[str, Any]) -> str:
    short = {
        "not for this release": "-",
        "landed upstream but still faulty": "faulty",
        "landed upstream": "landed",
    }
    rows = []
    for patch in next(iter(data.values())):
        cells = []
        for found in (patches[patch] for patches in data.values()):
            tested = " ✓" if (found["without"], found["with"]) == (False, True) else ""
            cells.append(short.get(found["state"], found["state"]) + tested)
        rows.append([patch, *cells])
    return markdown(["patch", *data], rows) + (
        "\napplies: the edits fit and the result compiles. ✓: the patch's own test was "
        "run there, fails without it and passes with it. faulty: upstream has it, with "
        "its fault. -: not for this release.\n"
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "quickstart": quickstart,
    "solvers": marks,
    "curves": curves,
    "releases": releases,
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
    stale = {}
    for page in PAGES:
        before = page.read_text()
        after = rendered(before)
        if before != after:
            stale[page] = after
    if check:
        for page in stale:
            print(f"{page.name}: its tables are not those of results/")
        if stale:
            print("run scripts/report.sh and commit the result")
        return int(bool(stale))
    for page, text in stale.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
