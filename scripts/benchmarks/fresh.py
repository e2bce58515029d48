"""Measurements that run one by one, each in a fresh process, within limits.

A benchmark is a module with a function ``measure`` from a task to a row, which `run`
calls in a process of its own for each task.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import psutil
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.results import Row, show, store


# A task whose ``torch`` is this runs on the wheel that the checkout was made from.
UNTOUCHED = "untouched"
Task = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """What one task may take; what takes more is ended and becomes a row that says so."""

    seconds: float
    gigabytes: float


def environment(patched: bool, cache: Path) -> dict[str, str]:
    """Variables under which torch is this process's checkout, or the wheel."""
    checkout = str(Path(torch.__file__).parents[1])
    path = [place for place in sys.path if place and place != checkout]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([checkout] * patched + path),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        # The profiler's library announces every start and stop on stderr.
        "KINETO_LOG_LEVEL": "99",
        "MPLBACKEND": "Agg",
    }


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


def measure_in_child(module: str, task: Task, limits: Limits) -> Row:
    """The row of one task, or a row whose ``error`` says why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        target, log = Path(folder, "row.json"), Path(folder, "log")
        patched = task.get("torch") != UNTOUCHED
        # -P: a folder named torch where this is called is not meant.
        command = [sys.executable, "-P", "-m", "benchmarks.child"]
        start = time.monotonic()
        with open(log, "w") as output:
            child = subprocess.Popen(
                [*command, module, json.dumps(task), str(target)],
                env=environment(patched, Path(folder, "cache")),
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
                        error = f"took more than {limits.seconds:g} s"
                    elif resident_bytes(watched) > limits.gigabytes * 1e9:
                        error = f"needed more than {limits.gigabytes:g} GB"
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


def run(module: str, tasks: Sequence[Task], limits: Limits) -> list[Row]:
    """One row for each task, in order: the task's own entries and what was measured."""
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(tasks))
        for task in tasks:
            progress.update(bar, description=describe(task))
            found = measure_in_child(module, task, limits)
            rows.append({**task, **found})
            if "error" in found:
                progress.console.print(f"[yellow]{describe(task)}: {found['error']}[/]")
            progress.advance(bar)
    return rows


def describe(task: Task) -> str:
    """The two entries that come first tell a benchmark's tasks apart."""
    return " ".join(
        str(value) for value in list(task.values())[:2] if value is not None
    )


def finish(
    result: Optional[Path],
    data: dict[str, Any],
    page: Callable[[dict[str, Any]], str],
) -> None:
    """Print what was measured, and store it."""
    show(page(data))
    if result is not None:
        store(result, data)
