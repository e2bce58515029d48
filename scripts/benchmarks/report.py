"""Writes the tables of the README and of docs/, and the figures, from the stored results.

``--check`` only compares. Each table stands between ``<!-- report: NAME -->`` and
``<!-- report end -->`` and is made from ``results/NAME.json`` by the benchmark of that
name, as it prints it; those of `PARTS` from others. The
RFC's table and picture are those of `proposal`. A figure stands beside its result.
"""

import argparse
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from patchset.patch import REPOSITORY
from patchset.series import FORMS

from benchmarks import bounds, compare, front, proposal, schedule
from benchmarks.pages import markdown


PAGES = (REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md")))
RESULTS = REPOSITORY / "results"
BLOCK = re.compile(r"(<!-- report: (\w+) -->\n).*?(<!-- report end -->)", re.DOTALL)


def releases(data: dict[str, Any]) -> str:
    short = {
        "not for this release": "-",
        "landed upstream but still faulty": "faulty",
        "landed upstream": "landed",
    }
    # Of one that is new, the releases that it was tried on.
    unknown = {"state": "not tried", "without": None, "with": None, "date": None}
    rows = []
    for patch in (name for name in FORMS if any(name in row for row in data.values())):
        cells = []
        for found in (row.get(patch, unknown) for row in data.values()):
            outcome = (found["without"], found["with"])
            tested = {(False, True): " ✓", (False, False): " ✗"}.get(outcome, "")
            cells.append(short.get(found["state"], found["state"]) + tested)
        rows.append([patch, *cells])
    dates = [{cell["date"] for cell in row.values()} - {None} for row in data.values()]
    rows.append(["tested", *(min(found, default="-") for found in dates)])
    return markdown(["patch", *data], rows) + (
        "\napplies: the edits fit and the result compiles. ✓: the patch's own tests were "
        "run on a CPU by that release's torch, fail without it and pass with it; ✗: they fail "
        "with it. faulty: upstream has it, but with the bug. -: not for this release.\n"
    )


# Each by the result that it is drawn from, and how.
FIGURES: dict[str, tuple[str, Callable[[dict[str, Any], Path], None]]] = {
    **{name: (name, bounds.plot) for name in ("peak", "step", "blocks")},
    "rfc": ("peak", proposal.plot),
}
# What other tables are made from, and how.
PARTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "headline": ("compare", compare.headline),
    "techniques": ("compare", compare.techniques),
    "installed": ("harm", front.installed),
    "compiling": ("compiles", front.compiling),
    "releases": ("releases", releases),
    "forms": ("forms", proposal.page),
    **{
        name: (name, schedule.page)
        for name in ("peak", "step", "blocks", "schedule_cpu", "gpu")
    },
}


def load(name: str) -> Any:
    place = RESULTS / f"{name}.json"
    if not place.exists():
        raise SystemExit(
            f'{place} is missing; CONTRIBUTING.md, under "Store new results", has the '
            "command that makes it"
        )
    return json.loads(place.read_text())


# Needs what not every machine has.
NOT_YET = {
    "gpu": "Nobody has run it yet: `scripts/benchmark.sh gpu --json results/gpu.json`.\n"
}


def rendered(text: str) -> str:
    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name in NOT_YET and not (RESULTS / f"{name}.json").exists():
            return match[1] + NOT_YET[name] + match[3]
        if name in PARTS:
            source, page = PARTS[name]
        else:
            source, page = name, importlib.import_module(f"benchmarks.{name}").page
        return match[1] + page(load(source)) + match[3]

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
    for name, (source, plot) in FIGURES.items():
        stored = RESULTS / f"{name}.svg"
        with tempfile.TemporaryDirectory() as folder:
            plot(load(source), Path(folder, stored.name))
            drawn = Path(folder, stored.name).read_text()
        if not stored.exists() or drawn != stored.read_text():
            stale[stored] = drawn
    for page, text in stale.items():
        if check:
            print(f"{page.name} is not what results/ gives")
        else:
            page.write_text(text)
    if stale and check:
        print("run scripts/report.sh and commit the result")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
