"""Writes results/*.md, what guides say in short, and the pictures, from the stored results.

``--check`` only compares. A question has a page, results/NAME.md. What a guide says of it
stands between ``<!-- report: NAME -->`` and ``<!-- report end -->``: a few lines, and a link
to the page. The README's tables are those of `TABLES`.
"""

import argparse
import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patchset.patch import REPOSITORY

from benchmarks import compare, cost, everything, provenance, unasked
from benchmarks.options import IN_SETS, SETS
from benchmarks.pages import brief
from benchmarks.pictures import PICTURES


GUIDES = (REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md")))
RESULTS = REPOSITORY / "results"
BLOCK = re.compile(r"(<!-- report: (\w+) -->\n).*?(<!-- report end -->)", re.DOTALL)

# What is asked of what is stored as results/NAME.json.
QUESTIONS = {
    "solvers": "How good are the solvers?",
    "saved": "Is a budget of saved bytes kept?",
    "operators": "What does one graph hold at its peak, operator by operator?",
    "kernels": "What does one graph hold at its peak, by inductor's kernels?",
    "steps": "What does a whole step hold at its peak, each block compiled by itself?",
    "gpu": "What does a GPU hold and take?",
    "loops": "Is a budget kept in loops whose steps differ?",
    "cost": "What does it cost to compile, and to begin?",
    "unasked": "Is anything worse where nothing is asked?",
    "chunks": "What do large heads hold in chunks?",
    "fits": "Does what_fits.sh tell the truth?",
    "forms": "What does each pull request change?",
    "releases": "Which patch was tested on which release?",
}
# The module whose ``page`` gets it, where that is not its name.
MODULES = {"forms": "proposal"}
# Of a guide alone.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "headline": ("compare", compare.headline),
    "techniques": ("compare", compare.techniques),
    "installed": ("unasked", unasked.installed),
    "compiling": ("cost", cost.compiling),
}
# That of the RFC is of one net.
DRAWN = {name: name for name in PICTURES} | {"rfc": "operators"}
HEAD = "<!-- written by scripts/report.sh -->\n\n"


def stored(name: str) -> Any:
    """What results/NAME.json holds, None where nobody has run it."""
    place = RESULTS / f"{name}.json"
    return json.loads(place.read_text()) if place.exists() else None


def not_yet(name: str) -> str:
    if name in everything.QUESTIONS:
        command = f"scripts/benchmark.sh all --only {name}"
        return f"Not measured with the code as it is: `{command}` does it.\n"
    command = f"scripts/benchmark.sh {name} --json results/{name}.json"
    return f"Nobody has run this yet: `{command}`.\n"


def page_of(name: str) -> str:
    if (data := stored(name)) is None:
        return not_yet(name)
    module = importlib.import_module(f"benchmarks.{MODULES.get(name, name)}")
    text: str = module.page(data)
    return text + left_out(name, module, data)


def left_out(name: str, module: Any, data: Any) -> str:
    """The nets of a question that have no rows of this set."""
    if name not in IN_SETS:
        return ""
    own = (row for row in data["measured"] if row.get("code") != provenance.STOCK)
    found = {row.get("net") for row in own}
    nets = {net for of in SETS for net in module.NETS[of]}
    if not nets - found:
        return ""
    return (
        f"\nNot measured with the code as it is: {', '.join(sorted(nets - found))}. "
        f"`scripts/benchmark.sh all --only {name}` does it, for each `--set`.\n"
    )


def filled(guide: Path) -> str:
    """A guide with what its blocks should say."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name in TABLES:
            file, table = TABLES[name]
            data = stored(file)
            return (
                match[1] + (not_yet(file) if data is None else table(data)) + match[3]
            )
        if name not in QUESTIONS:
            known = ", ".join((*QUESTIONS, *TABLES))
            raise SystemExit(f"{guide}: no report is named {name!r}; there are {known}")
        link = os.path.relpath(REPOSITORY / f"results/{name}.md", guide.parent)
        more = f"\n[All that was measured]({link}).\n"
        return match[1] + brief(page_of(name)) + more + match[3]

    return BLOCK.sub(fill, guide.read_text())


def written() -> Iterator[tuple[Path, str]]:
    """Each file, and what it should hold."""
    for guide in GUIDES:
        yield guide, filled(guide)
    index = (
        f"{HEAD}# What was measured\n\nOne page a question; the files beside them have "
    )
    index += "all figures. `scripts/report.sh` writes the pages.\n\n"
    for name, asked in QUESTIONS.items():
        picture = f"![{asked}]({name}.svg)\n\n" if name in PICTURES else ""
        page = f"{HEAD}# {asked}\n\n{picture}{page_of(name)}"
        yield RESULTS / f"{name}.md", page
        index += f"- [{asked}]({name}.md)\n"
    yield RESULTS / "README.md", index
    for name, draw in PICTURES.items():
        if (data := stored(DRAWN[name])) is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, f"{name}.svg")
            draw(place, data)
            yield RESULTS / place.name, place.read_text()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="report.sh", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    # All of it, before anything is written.
    stale = [
        (place, text)
        for place, text in [*written()]
        if not place.exists() or place.read_text() != text
    ]
    for place, text in stale:
        if check:
            print(
                f"{place.parent.name}/{place.name} is not what the stored results give"
            )
        else:
            place.write_text(text)
    if stale and check:
        print("run scripts/report.sh and commit the result")
    wrong = complaints() if check else []
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(check and bool(stale or wrong))


def complaints() -> list[str]:
    """Rows of one question that are of several codes, or not of the code as it is."""
    return [
        text
        for name in everything.QUESTIONS
        for text in provenance.complaints(
            name, everything.stored(RESULTS / f"{name}.json")
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
