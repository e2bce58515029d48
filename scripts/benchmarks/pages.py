"""What a benchmark leaves: rows as JSON, what has to hold of them, tables, where it ran."""

import importlib.util
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


Row = dict[str, Any]


def environment() -> dict[str, Any]:
    """Where this runs, as every report says it."""
    cuda = torch.cuda.is_available()
    return {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


# How a page came by its figures, for `measured_on`.
RUN = "Run"
PLANNED = "No step was run: planned for fake tensors"
SIMULATED = "Simulated, no kernel was run: scheduled for fake tensors"


def measured_on(
    facts: dict[str, Any], how: str = RUN, rows: Iterable["Row"] = ()
) -> str:
    """The end of a caption: how, on what, by which torch and, where rows have it, commit."""
    device = facts.get("gpu") or "a CPU, one thread"
    versions = f"torch {facts['torch']}, Python {facts['python']}, {facts['system']}"
    commits = dict.fromkeys(row["commit"][:7] for row in rows if row.get("commit"))
    code = f"; code of commit {', '.join(commits)}" if commits else ""
    return f"{how} on {device}; {versions}{code}.\n"


# -------------------------------------------------------------------- files


def store(path: Path, data: dict[str, Any]) -> None:
    """Write a file so that it holds either all of the data or what it held before."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(data, indent=1) + "\n")
    new.replace(path)


def good(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows without an error that have these entries."""
    return [
        row
        for row in rows
        if "error" not in row and all(row.get(k) == v for k, v in wanted.items())
    ]


SETS_OF_NETS = ("Nets of the project", "Held-out nets")


def by_set(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of the project's nets, and of those that nothing was tuned on, if any."""
    found: dict[str, list[Row]] = {name: [] for name in SETS_OF_NETS}
    for row in good(rows):
        found[SETS_OF_NETS[row.get("set", "project") != "project"]].append(row)
    return {name: part for name, part in found.items() if part}


def held_out(rows: Iterable[Row]) -> str:
    """How many are of nets that nothing was tuned on, in words."""
    count = len(by_set(rows).get(SETS_OF_NETS[1], ()))
    return f"{count or 'none'} of them held out from tuning"


# -------------------------------------------------------------------- marks


class Mark(NamedTuple):
    """What was found beside the mark it has to reach; ``enforced`` ones decide the
    exit status, and ``limit`` tells a user what a missed one means."""

    what: str
    measured: str
    mark: str
    passed: bool
    enforced: bool = True
    limit: str = ""


Named = tuple[float, str]  # a number, and where it was found


def at_most(
    what: str,
    found: Iterable[Named],
    most: float,
    mark: str = "",
    show: str = "{mean:.3f} on average, {0:.3f} at most ({1}); {count} in all",
    enforced: bool = False,
    limit: str = "",
) -> Iterator[Mark]:
    """The largest of what was found has to be at most ``most``; none where none was.

    ``show`` and ``limit`` are formatted with it, where it was found, and it minus 1.
    """
    found = list(found)
    if found:
        value, place = max(found)
        mean = statistics.fmean(each for each, _ in found)
        shown, told = (
            text.format(value, place, value - 1, mean=mean, count=len(found))
            for text in (show, limit)
        )
        mark = mark or f"at most {most:g}"
        yield Mark(what, shown, mark, value <= most, enforced, told)


def stored_marks(rows: Iterable[Row]) -> list[Mark]:
    """Of benchmarks whose tasks find marks."""
    return [Mark(**mark) for row in good(rows) for mark in row["marks"]]


def failed(marks: Iterable[Mark]) -> bool:
    return any(mark.enforced and not mark.passed for mark in marks)


# ------------------------------------------------------------------- tables


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, for a page or for `show`."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def columns(items: Iterable[Any], cells: Mapping[str, Callable[..., str]]) -> str:
    """A line for each item; one that is a tuple gives its parts to each cell."""
    lines = []
    for item in items:
        parts = item if isinstance(item, tuple) else (item,)
        lines.append([cell(*parts) for cell in cells.values()])
    return markdown([*cells], lines)


def found(marks: Iterable[Mark]) -> str:
    """What was measured, whatever the marks are; a column for each set of nets."""
    cells: dict[str, dict[str, str]] = {}
    for mark in marks:
        name, _, what = mark.what.partition(": ")
        if name not in SETS_OF_NETS:
            name, what = "", mark.what
        cells.setdefault(what, {})[name] = mark.measured
    named = {name for of in cells.values() for name in of}
    columns = [name for name in ("", *SETS_OF_NETS) if name in named]
    heads = [name.lower() or ("all" if columns[1:] else "found") for name in columns]
    lines = (
        [what, *(of.get(name, "") for name in columns)] for what, of in cells.items()
    )
    return markdown(("what", *heads), lines)


def limits(marks: Iterable[Mark], rows: Iterable[Row] = ()) -> list[str]:
    """What a user meets where a mark was missed, and what could not be measured."""
    missed = [
        mark.limit or f"{mark.what}: {mark.measured}, not {mark.mark}."
        for mark in marks
        if not mark.passed
    ]
    broken = [
        f"{row.get('net', 'A row')} could not be measured: {row['error'].rstrip('.')}."
        for row in rows
        if "error" in row
    ]
    return [*dict.fromkeys(missed + broken)]


SHORT, LIMITS = "In short", "Limits"


def page(
    legend: str,
    origin: str,
    short: str,
    limits: Iterable[str],
    tables: Mapping[str, str],
) -> str:
    """How it was measured, and sections with all tables last; guides have what is in short."""
    lines = "".join(f"- {line}\n" for line in limits)
    sections = {SHORT: short, **({LIMITS: lines} if lines else {}), **tables}
    text = "".join(f"\n## {name}\n\n{told}" for name, told in sections.items())
    return f"{legend}\n{origin}{text}"


def brief(page: str) -> str:
    """What a guide has of a page: what is in short, and how it was measured."""
    before, _, after = page.partition(f"\n## {SHORT}\n\n")
    origin = before.rpartition("\n\n")[2]
    short, _, _ = after.partition("\n## ")
    return f"{short}\n{origin}" if after else before


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"


def show(text: str) -> None:
    """Print Markdown; tables get room enough, wherever they go."""
    if importlib.util.find_spec("rich") is None:
        # A machine with a GPU may have nothing but torch.
        print(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    Console(width=max(console.width, 140)).print(Markdown(text))
