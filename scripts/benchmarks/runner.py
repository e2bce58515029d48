"""Runs what a benchmark asks, two tasks at a time, and stores every row when it is there.

Tasks of one net come one after the other, since some are held to what others found. What is
stored of the same task and the same code is not measured again.
"""

import copy
import json
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from statistics import fmean
from typing import Any, Optional

from benchmarks import fresh, provenance
from benchmarks.everything import AT_A_TIME, minutes, stored
from benchmarks.pages import environment, Row, store
from benchmarks.plans import DEVICES


# What --kind chooses by, and what tells rows apart.
KINDS = ("kind", "loop")
KEY = (*KINDS, "set", "part", "net", "device", "way", "share")


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in KEY)


def put(rows: list[Row], new: Row) -> None:
    """In the place of the row of its key, or at the end."""
    for at, row in enumerate(rows):
        if key(row) == key(new):
            rows[at] = new
            return
    rows.append(new)


def nets_of(benchmark: Any, asked: Any) -> Sequence[str]:
    """Those that were asked for, or that the benchmark has for the set."""
    nets = benchmark.NETS
    if isinstance(nets, dict):
        nets = nets["check" if asked.check else asked.set]
    found: Sequence[str] = asked.nets or nets
    return found


class Runner:
    """The tasks of a benchmark, for what was asked of it."""

    def __init__(self, benchmark: Any, asked: Any) -> None:
        self.benchmark, self.asked = benchmark, asked
        self.path: Optional[Path] = asked.json
        self.stored: list[Row] = stored(self.path) if self.path is not None else []
        self.rows = list(self.stored)
        self.took = {key(r): r["took"] for r in self.rows if "took" in r}
        # A question as a whole leaves no rows of its set behind that it does not have.
        chosen = ("nets", "kind", "check")
        self.is_whole = not any(getattr(asked, name, None) for name in chosen)
        self.code = provenance.here()
        self.lock = threading.Lock()
        self.started, self.begun, self.measured = time.monotonic(), 0, list[float]()
        self.todo: list[fresh.Task] = []

    # ------------------------------------------------------------------ tasks

    def groups(self) -> list[Any]:
        """What was asked, net by net; the longest first, so that both end together."""
        names = nets_of(self.benchmark, self.asked)
        if not names:
            return [self.asked]
        asked = [Namespace(**{**vars(self.asked), "nets": [name]}) for name in names]
        return sorted(asked, key=self.seconds_of, reverse=True)

    def seconds_of(self, asked: Any) -> float:
        rows = (row for row in self.rows if row["net"] in asked.nets)
        return sum(float(row.get("took", 0)) for row in rows)

    def tasks(self, asked: Any, rows: list[Row]) -> Iterator[fresh.Task]:
        for task in self.benchmark.tasks(asked, rows):
            kinds = {str(task.get(kind)) for kind in KINDS}
            if not self.asked.kind or kinds & {*self.asked.kind}:
                yield task

    def code_of(self, task: fresh.Task) -> Row:
        # Times are held to each other, and have to be of one run.
        is_timed = task.get("device") in DEVICES
        if task.get("torch") == fresh.UNTOUCHED and not is_timed:
            return {"release": self.code["release"], "code": provenance.STOCK}
        return self.code

    def stored_row(self, task: fresh.Task) -> Optional[Row]:
        """Its row, where it has been measured by this code."""
        wanted = json.loads(json.dumps({**fresh.public(task), **self.code_of(task)}))
        for row in self.stored:
            same = all(row.get(k) == v for k, v in wanted.items() if k != "commit")
            if same and "error" not in row:
                return dict(row)
        return None

    # -------------------------------------------------------------------- run

    def run(self) -> list[Row]:
        groups = self.groups()
        self.todo = [t for asked in groups for t in self.expected(asked)]
        pool = ThreadPoolExecutor(AT_A_TIME)
        found: list[list[Row]] = []
        try:
            futures = [pool.submit(self.run_group, asked) for asked in groups]
            wait(futures, return_when=FIRST_EXCEPTION)
            found = [future.result() for future in futures if future.done()]
        except BaseException:
            fresh.stop_all()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        if self.is_whole:
            self.rows = self.in_order(found)
        self.save()
        return self.rows

    def expected(self, asked: Any) -> Iterator[fresh.Task]:
        """What is likely to be measured: how many tasks there are rows may decide."""
        tasks = self.tasks(asked, copy.deepcopy(self.rows))
        return (task for task in tasks if self.stored_row(task) is None)

    def run_group(self, asked: Any) -> list[Row]:
        rows = [] if self.is_whole else list(self.rows)
        mine, is_new = list[Row](), False
        for task in self.tasks(asked, rows):
            # What depends on others' rows is of no use once those have changed.
            is_held = any(name.startswith("_") for name in task)
            row = None if is_new and is_held else self.stored_row(task)
            if row is None:
                row, is_new = self.measure(task), True
            put(rows, row)
            if key(row) in map(key, mine):
                raise ValueError(
                    f"two tasks whose rows nothing tells apart: {key(row)}"
                )
            mine.append(row)
        return mine

    def measure(self, task: fresh.Task) -> Row:
        self.tell(task)
        before = time.monotonic()
        row = fresh.measured(self.benchmark.__name__, task)
        took = round(time.monotonic() - before, 1)
        row.update(took=took, **self.code_of(task))
        with self.lock:
            self.measured.append(took)
            put(self.rows, row)
            self.save()
        return row

    def in_order(self, found: Sequence[Sequence[Row]]) -> list[Row]:
        """Nets as the benchmark has them, beside what is stored of the other set."""
        mine = [row for rows in found for row in rows]
        names = [*nets_of(self.benchmark, self.asked)]
        if names:
            mine.sort(key=lambda row: names.index(row["net"]))
        of = self.asked.set
        others = [row for row in self.rows if row.get("set", of) != of]
        return others + mine if of == "held-out" else mine + others

    def save(self) -> None:
        if self.path is not None:
            store(self.path, {"environment": environment(), "measured": self.rows})

    # --------------------------------------------------------------- progress

    def tell(self, task: fresh.Task) -> None:
        with self.lock:
            elapsed = time.monotonic() - self.started
            self.todo = [each for each in self.todo if key(each) != key(task)]
            self.begun += 1
            most = self.begun + len(self.todo)
            name = self.benchmark.__name__.rpartition(".")[2]
            text = f"{name}: task {self.begun} of {most} ({fresh.words(task)})"
            print(f"{text}, {minutes(elapsed)}{self.left(task)}", file=sys.stderr)

    def left(self, task: fresh.Task) -> str:
        """By how long each took last time, or else the mean of this time."""
        mean = fmean(self.measured) if self.measured else None
        every = [self.took.get(key(t), mean) for t in (task, *self.todo)]
        known = [seconds for seconds in every if seconds is not None]
        if len(known) < len(every):
            return ""
        return f", about {minutes(sum(known) / AT_A_TIME)} left"
