"""What a benchmark found beside the mark that it has to reach: a line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class Mark(NamedTuple):
    """One line of a report; ``enforced`` ones decide the exit status.

    Where ``mark`` is empty, the line only tells.
    """

    what: str
    measured: str
    mark: str
    passed: bool
    enforced: bool = True


def show(title: str, marks: Sequence[Mark], console: Console, caption: str) -> None:
    table = Table(title=title, caption=caption)
    for heading in ("what", "measured", "mark", ""):
        table.add_column(heading, overflow="fold")
    for mark in marks:
        verdict = "[green]pass[/]" if mark.passed else "[red]FAIL[/]"
        table.add_row(mark.what, mark.measured, mark.mark, verdict if mark.mark else "")
    console.print(table)


def failed(marks: Sequence[Mark]) -> bool:
    return any(mark.enforced and not mark.passed for mark in marks)
