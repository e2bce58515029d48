"""What a benchmark leaves: rows as JSON, tables, figures, and where it was measured."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import matplotlib
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown


Row = dict[str, Any]


def environment(*packages: str) -> dict[str, Any]:
    """Where this runs, as every report says it, and the versions of more packages."""
    cuda = torch.cuda.is_available()
    return {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: importlib.metadata.version(package) for package in packages},
    }


# How a page came by its figures, for `measured_on` and `save`.
RUN = "Run"
PLANNED = "No step was run: planned for fake tensors"
SIMULATED = "Simulated, no kernel was run: scheduled for fake tensors"


def measured_on(facts: dict[str, Any], how: str = RUN) -> str:
    """The end of a caption: how, on what, and by which torch."""
    device = facts.get("gpu") or "a CPU, one thread"
    versions = f"torch {facts['torch']}, Python {facts['python']}, {facts['system']}"
    return f"{how} on {device}; {versions}.\n"


def replace(path: Path, text: str) -> None:
    """Write a file so that it holds either all of the text or what it held before."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def store(path: Path, data: dict[str, Any]) -> None:
    replace(path, json.dumps(data, indent=1) + "\n")


def merged(path: Optional[Path], new: Sequence[Row], *key: str) -> list[Row]:
    """The rows stored in a file, in their order, those of a new one's key replaced."""
    stored: list[Row] = []
    if path is not None and path.exists():
        stored = json.loads(path.read_text())["measured"]
    found = {tuple(row.get(name) for name in key): row for row in (*stored, *new)}
    return list(found.values())


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, for a page or for `show`."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show(text: str, least_width: int = 140) -> None:
    """Print Markdown; tables get room enough, wherever they go."""
    console = Console()
    Console(width=max(console.width, least_width)).print(Markdown(text))


def fail(faults: Sequence[str]) -> int:
    """Print what must not be; returns the exit status."""
    console = Console(soft_wrap=True)
    for fault in faults:
        console.print(f"[red]FAILED[/] {fault}", highlight=False)
    return int(bool(faults))


def save(figure: Figure, result: Path, facts: dict[str, Any], how: str = RUN) -> None:
    """Write a figure as .svg beside ``result``, with where it was measured, no dates."""
    origin = measured_on(facts, how).strip()
    figure.text(0.01, 0.005, origin, fontsize=7, alpha=0.7)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    # Or the names of clip paths would be random.
    with matplotlib.rc_context({"svg.hashsalt": result.stem}):
        figure.savefig(result.with_suffix(".svg"), metadata={"Date": None})
