"""What a benchmark leaves: rows as JSON, marks, tables, figures, and where it ran."""

import importlib.util
import json
import os
import platform
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


def measured_on(facts: dict[str, Any], how: str = RUN) -> str:
    """The end of a caption: how, on what, and by which torch."""
    device = facts.get("gpu") or "a CPU, one thread"
    versions = f"torch {facts['torch']}, Python {facts['python']}, {facts['system']}"
    return f"{how} on {device}; {versions}.\n"


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


# -------------------------------------------------------------------- marks


class Mark(NamedTuple):
    """What was found beside the mark it has to reach; ``enforced`` ones decide the
    exit status."""

    what: str
    measured: str
    mark: str
    passed: bool
    enforced: bool = True


Named = tuple[float, str]  # a number, and where it was found


def at_most(
    what: str,
    found: Iterable[Named],
    most: float,
    mark: str = "",
    show: str = "{:.4f} ({})",
    enforced: bool = False,
) -> Iterator[Mark]:
    """The largest of what was found has to be at most ``most``; none where none was."""
    found = list(found)
    if found:
        value, where = max(found)
        mark = mark or f"at most {most:g}"
        yield Mark(what, show.format(value, where), mark, value <= most, enforced)


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


def marks_table(rows: Iterable[Row]) -> str:
    """The marks, each as its dict."""

    def reached(row: Row) -> str:
        return "yes" if row["passed"] else "**no**"

    names = ("what", "measured", "mark")
    lines = ([*(row[name] for name in names), reached(row)] for row in rows)
    return markdown((*names, "reached"), lines)


def marks_page(data: dict[str, Any]) -> str:
    """Of benchmarks that have marks alone."""
    return f"{marks_table(data['rows'])}\n{measured_on(data['environment'])}"


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"


def show(text: str, least_width: int = 140) -> None:
    """Print Markdown; tables get room enough, wherever they go."""
    if importlib.util.find_spec("rich") is None:
        # A machine with a GPU may have nothing but torch.
        print(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    Console(width=max(console.width, least_width)).print(Markdown(text))
