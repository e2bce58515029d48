"""Writes results/*.md, what guides say in short, and the pictures, from the stored results.

``--check`` only compares. A question has a page, results/NAME.md. What a guide says of it
stands between ``<!-- report: NAME -->`` and ``<!-- report end -->``: a few lines, and a link
to the page.
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
from typing import Any, NamedTuple

from patchset.patch import REPOSITORY

from benchmarks import quickstart
from benchmarks.pages import brief
from benchmarks.pictures import PICTURES


GUIDES = (REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md")))
RESULTS = REPOSITORY / "results"
BLOCK = re.compile(r"(<!-- report: (\w+) -->\n).*?(<!-- report end -->)", re.DOTALL)


class Question(NamedTuple):
    """What is asked, the module with its ``page``, and the files that the page gets."""

    asked: str
    module: str
    files: tuple[str, ...]


QUESTIONS = {
    "solvers": Question("How good are the solvers?", "solvers", ("solvers",)),
    "saved": Question("Is a budget of saved bytes kept?", "kept", ("kept",)),
    "operators": Question(
        "What does one graph hold at its peak, operator by operator?",
        *("schedule", ("peak",)),
    ),
    "kernels": Question(
        "What does one graph hold at its peak, by inductor's kernels?",
        *("schedule", ("schedule", "schedule_cpu")),
    ),
    "steps": Question(
        "What does a whole step hold at its peak, each block compiled by itself?",
        *("schedule", ("step", "blocks")),
    ),
    "gpu": Question("What does a GPU hold and take?", "schedule", ("gpu",)),
    "loops": Question(
        "Is a budget kept in loops whose steps differ?", "loops", ("loops",)
    ),
    "cost": Question(
        "What does it cost to compile, and to begin?", "compiles", ("compiles", "loops")
    ),
    "unasked": Question("Is anything worse where nothing is asked?", "harm", ("harm",)),
    "chunks": Question("What do large heads hold in chunks?", "chunks", ("chunks",)),
    "fits": Question("Does what_fits.sh tell the truth?", "fits", ("fits",)),
    "opinfo": Question("Does every operator compute the same?", "opinfo", ("opinfo",)),
    "forms": Question("What does each pull request change?", "proposal", ("forms",)),
    "releases": Question(
        "Which patch was tested on which release?", "releases", ("releases",)
    ),
}
# Of a guide alone.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "headline": ("techniques", quickstart.headline),
    "techniques": ("techniques", quickstart.page),
    "quickstart": ("quickstart", quickstart.page),
}
# What each picture is drawn from; that of the RFC is of one net.
DRAWN = {"rfc": QUESTIONS["operators"], **QUESTIONS}
HEAD = "<!-- written by scripts/report.sh -->\n\n"


def stored(files: tuple[str, ...]) -> list[Any]:
    """What those files hold that are there."""
    places = [RESULTS / f"{name}.json" for name in files]
    return [json.loads(place.read_text()) for place in places if place.exists()]


def page_of(name: str) -> str:
    question = QUESTIONS[name]
    if data := stored(question.files):
        text: str = importlib.import_module(f"benchmarks.{question.module}").page(*data)
        return text
    command = f"scripts/benchmark.sh {question.files[0]}"
    return f"Nobody has run this yet: `{command} --json results/{name}.json`.\n"


def filled(guide: Path) -> str:
    """A guide with what its blocks should say."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name in TABLES:
            file, table = TABLES[name]
            return match[1] + table(*stored((file,))) + match[3]
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
    for name, question in QUESTIONS.items():
        drawn = name in PICTURES and stored(question.files)
        picture = f"![{question.asked}]({name}.svg)\n\n" if drawn else ""
        page = f"{HEAD}# {question.asked}\n\n{picture}{page_of(name)}"
        yield RESULTS / f"{name}.md", page
        index += f"- [{question.asked}]({name}.md)\n"
    yield RESULTS / "README.md", index
    for name, draw in PICTURES.items():
        data = stored(DRAWN[name].files)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, f"{name}.svg")
            if data:
                draw(place, *data)
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
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
