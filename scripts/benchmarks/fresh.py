"""Measurements that run one by one, each in a fresh process, within limits.

A benchmark is a module with a function ``measure`` from a task to a row, which `run`
calls in a process of its own for each task.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from benchmarks.pages import Row


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


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and all that it started."""
    with suppress(psutil.Error):  # It may have just ended.
        return [process, *process.children(recursive=True)]
    return []


def resident_bytes(process: psutil.Process) -> int:
    total = 0
    with suppress(psutil.Error):
        for each in family(process):
            total += each.memory_info().rss
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
            watched = psutil.Process(child.pid)
            try:
                while child.poll() is None and error is None:
                    time.sleep(0.1)
                    if time.monotonic() - start > limits.seconds:
                        error = f"took more than {limits.seconds:g} s"
                    elif resident_bytes(watched) > limits.gigabytes * 1e9:
                        error = f"needed more than {limits.gigabytes:g} GB"
            finally:
                for each in family(watched):
                    with suppress(psutil.Error):
                        each.kill()
                child.wait()
        if error is not None:
            return {"error": error}
        if target.exists():
            row: Row = json.loads(target.read_text())
            return row
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or [""]
        return {"error": f"ended with status {child.returncode}: {last[0]}"}


def run(module: str, tasks: Iterable[Task], limits: Limits) -> list[Row]:
    """One row for each task, in order: the task's own entries and what was measured.

    Entries whose name begins with an underscore are for ``measure`` alone.
    """
    rows: list[Row] = []
    console = Console(stderr=True)
    for task in tasks:
        with console.status(describe(task)):
            found = measure_in_child(module, task, limits)
        if "error" in found:
            console.print(f"[yellow]{describe(task)}: {found['error']}[/]")
        row = {**task, **found}
        rows.append({k: v for k, v in row.items() if not k.startswith("_")})
    return rows


def describe(task: Task) -> str:
    """The entries by which a benchmark's tasks differ."""
    words = (v for v in task.values() if isinstance(v, (str, int, float)))
    return " ".join(map(str, words))
