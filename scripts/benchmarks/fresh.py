"""Measurements that run one by one, each in a fresh process.

A benchmark is a module with a function ``measure`` from a task to a row, which
`measured` calls in a process of its own.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.pages import Row


# A task whose ``torch`` is this runs on the wheel that the checkout was made from.
UNTOUCHED = "untouched"
Task = dict[str, Any]
# What a task may take; what takes more becomes a row that says so.
SECONDS = 1800.0
# The process groups that run now, and whether no more may start.
_running: set[int] = set()
_stopped = threading.Event()
_lock = threading.Lock()


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


class Stopped(Exception):
    """There is no row, since all was stopped."""


def stop_all() -> None:
    """Every process that runs a task, with all that it started; none starts any more."""
    with _lock:
        _stopped.set()
        for group in _running:
            stop(group)


def stop(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def public(task: Task) -> Task:
    """The entries by which tasks differ, without those for ``measure`` alone."""
    return {name: v for name, v in task.items() if not name.startswith("_")}


def words(task: Task) -> str:
    values = public(task).values()
    return " ".join(str(v) for v in values if isinstance(v, (str, float)))


def measure_in_child(
    module: str, task: Task, seconds: float, is_group: bool = True
) -> Row:
    """The row of one task, or a row whose ``error`` says why there is none.

    A child of a child stays in the group of its parent, and ends with it.
    """
    with tempfile.TemporaryDirectory() as folder:
        target, log = Path(folder, "row.json"), Path(folder, "log")
        patched = task.get("torch") != UNTOUCHED
        # -P: a folder named torch where this is called is not meant.
        command = [sys.executable, "-P", "-m", "benchmarks.fresh", module]
        with open(log, "w") as output:
            with _lock:
                if _stopped.is_set():
                    raise Stopped
                child = subprocess.Popen(
                    [*command, json.dumps(task), str(target)],
                    env=environment(patched, Path(folder, "cache")),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=is_group,
                )
                if is_group:
                    _running.add(child.pid)
            try:
                child.wait(seconds)
            except subprocess.TimeoutExpired:
                return {"error": f"took more than {seconds:g} s"}
            finally:
                if is_group:
                    # With all that it started.
                    with _lock:
                        stop(child.pid)
                        _running.discard(child.pid)
                child.kill()
                child.wait()
        if _stopped.is_set():
            raise Stopped
        if target.exists():
            row: Row = json.loads(target.read_text())
            return row
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or [""]
        return {"error": f"ended with status {child.returncode}: {last[0]}"}


def measured(module: str, task: Task, seconds: float = SECONDS) -> Row:
    """The task's own entries and what was measured.

    Entries whose name begins with an underscore are for ``measure`` alone.
    """
    row = {**public(task), **measure_in_child(module, task, seconds)}
    if "error" in row:
        print(f"{words(task)}: {row['error']}", file=sys.stderr)
    return row


def main(module: str, task: str, target: str) -> int:
    """What a child runs, on one thread: it writes the task's row, or its error, down."""
    torch.set_num_threads(1)
    try:
        row = importlib.import_module(module).measure(json.loads(task))
    except Exception as error:
        traceback.print_exc()
        message = str(error).strip().splitlines() or [""]
        row = {"error": f"{type(error).__name__}: {message[0]}"}
    Path(target).write_text(json.dumps(row))
    return int("error" in row)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
