"""Measurements that run one by one, each in a fresh process, within limits.

A script calls `run` for its tasks, and is itself what the processes run: it hands
its function from a task to a row to `answer` when `is_child` says so. Rows that are
finished are kept beside the result, so that a run that was interrupted goes on where
it stopped.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import matplotlib
import psutil
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


CHILD = "--in-a-fresh-process"
TOOK_MORE, NEEDED_MORE = "took more than", "needed more than"
Task = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """What one task may take; what takes more is ended and becomes a row that says so."""

    seconds: float
    gigabytes: float


def is_child() -> bool:
    return len(sys.argv) == 4 and sys.argv[1] == CHILD


def answer(measure: Callable[[Task], Row]) -> int:
    """In the child: measure the task of the command line and write the row down."""
    task, target = json.loads(sys.argv[2]), Path(sys.argv[3])
    try:
        row = measure(task)
    except Exception as error:
        traceback.print_exc()
        message = str(error).strip().splitlines() or [""]
        row = {"error": f"{type(error).__name__}: {message[0]}"}
    target.write_text(json.dumps(row))
    return int("error" in row)


def python_path(patched: bool) -> dict[str, str]:
    """Environment variables under which torch is the patched checkout, or the wheel.

    The scripts run with the checkout first on PYTHONPATH.
    """
    checkout = str(Path(torch.__file__).parents[1])
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [place for place in path if place and place != checkout]
    return {"PYTHONPATH": os.pathsep.join([checkout, *kept] if patched else kept)}


def high_water_mark() -> int:
    """Most bytes of this process that were resident since `reset_high_water_mark`."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def reset_high_water_mark() -> int:
    """Forget earlier peaks; returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return high_water_mark()


def resident_bytes(process: psutil.Process) -> int:
    """Resident memory of a process and of all that it started."""
    total = 0
    try:
        for each in (process, *process.children(recursive=True)):
            total += each.memory_info().rss
    except psutil.Error:
        pass  # It has just ended.
    return total


def measure_in_child(
    script: str, task: Task, variables: Mapping[str, str], limits: Limits
) -> Row:
    """The row of one task, or a row whose ``error`` says why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        target, log = Path(folder, "row.json"), Path(folder, "log")
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "cache"))}
        start = time.monotonic()
        with open(log, "w") as output:
            child = subprocess.Popen(
                [sys.executable, script, CHILD, json.dumps(task), str(target)],
                env={**os.environ, **variables, **cache},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            error = None
            try:
                watched = psutil.Process(child.pid)
                while child.poll() is None and error is None:
                    time.sleep(0.1)
                    if time.monotonic() - start > limits.seconds:
                        error = f"{TOOK_MORE} {limits.seconds:g} s"
                    elif resident_bytes(watched) > limits.gigabytes * 1e9:
                        error = f"{NEEDED_MORE} {limits.gigabytes:g} GB"
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if error is not None:
            return {"error": error}
        if target.exists():
            row: Row = json.loads(target.read_text())
            return row
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or [""]
        return {"error": f"ended with status {child.returncode}: {last[0]}"}


def run(
    script: str,
    tasks: Sequence[tuple[Task, Mapping[str, str]]],
    limits: Limits,
    result: Optional[Path],
    console: Console,
    hopeless: Callable[[Task, Sequence[Row]], Optional[str]] = lambda task, rows: None,
) -> list[Row]:
    """One row for each task, in order: the task's own entries and what was measured.

    ``hopeless`` tells from the rows so far why a task is not tried; that is its error.

    Where a ``result`` will be written, finished rows are kept in a file beside it
    until `finish`, and are not measured again. Rows with an error are.
    """
    kept: dict[str, Row] = {}
    partial = partial_file(result)
    if partial is not None and partial.exists():
        text = partial.read_text()
        # A kill in the middle of a line leaves one without an end.
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            replace(partial, whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            kept[entry["key"]] = entry["row"]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    rows: list[Row] = []
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(tasks))
        for task, variables in tasks:
            progress.update(bar, description=describe(task))
            key = json.dumps([task, source_digest(script)], sort_keys=True)
            reason = hopeless(task, rows)
            if reason is not None:
                kept[key] = {"error": reason}
            elif key not in kept:
                kept[key] = measure_in_child(script, task, variables, limits)
                if partial is not None and "error" not in kept[key]:
                    with open(partial, "a") as file:
                        file.write(json.dumps({"key": key, "row": kept[key]}) + "\n")
            row = {**task, **kept[key]}
            if "error" in row:
                progress.console.print(f"[yellow]{describe(task)}: {row['error']}[/]")
            rows.append(row)
            progress.advance(bar)
    return rows


def over_limit(row: Row) -> bool:
    """Whether the process was ended because it took more than it may."""
    return str(row.get("error", "")).startswith((TOOK_MORE, NEEDED_MORE))


def describe(task: Task) -> str:
    """The two entries that come first tell a script's tasks apart."""
    return " ".join(
        str(value) for value in list(task.values())[:2] if value is not None
    )


def source_digest(script: str) -> str:
    """What the measurement depends on: the scripts beside this one, and torch's."""
    digest = hashlib.sha256()
    functorch = Path(torch.__file__).parent / "_functorch"
    for path in (
        Path(script),
        *sorted(Path(__file__).parent.glob("*.py")),
        functorch / "partitioners.py",
        *sorted((functorch / "_activation_checkpointing").glob("*.py")),
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def partial_file(result: Optional[Path]) -> Optional[Path]:
    return result and result.with_name(f"{result.name}.partial")


def finish(result: Path, facts: dict[str, Any], rows: list[Row]) -> None:
    """Write the rows, as .json with the facts and as .csv, and forget the kept ones."""
    report = {"environment": facts, "rows": rows}
    replace(result, json.dumps(report, indent=1) + "\n")
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = io.StringIO()
    writer = csv.DictWriter(lines, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace(result.with_suffix(".csv"), lines.getvalue())
    partial = partial_file(result)
    assert partial is not None
    partial.unlink(missing_ok=True)


def replace(path: Path, text: str) -> None:
    """Write a file so that it holds either all of the text or what it held before."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def save(figure: Figure, result: Path, facts: dict[str, Any]) -> None:
    """Write a figure as .svg and .png, with where it was measured, and no dates."""
    machine = facts["gpu"] or f"{facts['cores']} cores, {facts['system']}"
    origin = f"torch {facts['torch']}, {machine}"
    figure.text(0.01, 0.005, origin, fontsize=7, alpha=0.7)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    # Or the names of clip paths would be random.
    with matplotlib.rc_context({"svg.hashsalt": result.stem}):
        figure.savefig(result.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(result.with_suffix(".png"), metadata={"Software": None})


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def in_a_folder(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def add_options(
    parser: argparse.ArgumentParser,
    repeats: int,
    seconds: float,
    gigabytes: float = 12.0,
) -> None:
    """How often and how long to measure, and where to."""
    parser.add_argument(
        "--repeats",
        type=positive,
        default=repeats,
        help="measurements per time (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="limit per process (default: %(default)s)",
    )
    parser.add_argument(
        "--gigabytes",
        type=float,
        default=gigabytes,
        help="limit per process (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        type=in_a_folder,
        metavar="FILE",
        help="write rows and environment here, and a .csv, .svg and .png beside it",
    )


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
