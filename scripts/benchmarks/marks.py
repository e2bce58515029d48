"""What a benchmark found beside the mark that it has to reach: a line each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from benchmarks import fresh
from benchmarks.results import environment, markdown, measured_on, Row


class Mark(NamedTuple):
    """One line of a report; ``enforced`` ones decide the exit status.

    Where ``mark`` is empty, the line only tells.
    """

    what: str
    measured: str
    mark: str
    passed: bool
    enforced: bool = True


def table(rows: Sequence[Row]) -> str:
    """The marks, each as its dict."""
    lines = []
    for row in rows:
        reached = "yes" if row["passed"] else "**no**"
        lines.append(
            [row["what"], row["measured"], row["mark"], reached if row["mark"] else ""]
        )
    return markdown(("what", "measured", "mark", "reached"), lines)


def page(data: dict[str, Any]) -> str:
    facts = data["environment"]
    return table(data["rows"]) + (
        f"\nMedians of {facts['repeats']} interleaved runs. {measured_on(facts)}"
    )


def failed(marks: Sequence[Mark]) -> bool:
    return any(mark.enforced and not mark.passed for mark in marks)


def conclude(marks: Sequence[Mark], repeats: int, result: Optional[Path]) -> int:
    """Print the marks and store them; returns the exit status."""
    facts = {**environment(), "repeats": repeats}
    rows = [mark._asdict() for mark in marks]
    fresh.finish(result, {"environment": facts, "rows": rows}, page)
    return int(failed(marks))
