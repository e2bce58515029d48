"""python -m benchmarks NAME OPTIONS, as scripts/benchmark.sh calls it.

A benchmark is a module. Its docstring is its --help, and it has

    NETS              the nets, if it has any
    tasks(asked, rows)    the tasks, see `fresh.measured`, for what was asked: ``nets``,
                      ``check`` for those that CI runs, and what OPTIONS has by name for
                      add_argument. ``rows`` are those found so far
    measure(task)     a row, in a process of its own
    judged(rows)      the marks
    page(data)        what is printed

"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch._functorch._activation_checkpointing import knapsack

from benchmarks import catalogue, fresh
from benchmarks.pages import environment, failed, Row, show, store
from benchmarks.replay import GPUS


# What --kind chooses by, and what tells rows apart.
KINDS = ("kind", "loop", "part")
KEY = (*KINDS, "net", "device", "way", "share")


def options(name: str, benchmark: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"benchmark.sh {name.replace('_', '-')}",
        description=benchmark.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument

    def net(text: str) -> str:
        try:
            return text if text in benchmark.NETS else catalogue.find(text).name
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    def in_a_folder(text: str) -> Path:
        if not Path(text).parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {Path(text).parent}")
        return Path(text)

    add("--check", action="store_true", help="a few of them, as CI does")
    if benchmark.NETS:
        add(
            *("--net", "--model"),
            dest="nets",
            type=net,
            nargs="+",
            help="these alone, or your own as module:function; others stay in FILE",
        )
    add("--kind", nargs="+", help="these kinds alone, likewise")
    for option, described in getattr(benchmark, "OPTIONS", {}).items():
        add(f"--{option}", **described)
    add("--json", type=in_a_folder, metavar="FILE", help="store what was measured")
    return parser


def found_by(benchmark: Any, arguments: argparse.Namespace) -> list[Row]:
    """The rows of all tasks; of some, among those stored, whose place they take."""
    rows: list[Row] = []
    path = arguments.json
    names = ("nets", "kind", "part")
    is_some = any(getattr(arguments, name, None) for name in names)
    if is_some and path is not None and path.exists():
        rows += json.loads(path.read_text())["measured"]
    for task in benchmark.tasks(arguments, rows):
        kinds = {str(task.get(kind)) for kind in KINDS}
        if not arguments.kind or kinds & {*arguments.kind}:
            put(rows, fresh.measured(benchmark.__name__, task))
    return rows


def put(rows: list[Row], new: Row) -> None:
    """In the place of the row of its key, or at the end."""
    for at, row in enumerate(rows):
        if all(row.get(name) == new.get(name) for name in KEY):
            rows[at] = new
            return
    rows.append(new)


def main(name: str, *words: str) -> int:
    if not hasattr(knapsack, "KNAPSACK_SOLVERS"):
        print(f"torch is not patched; run scripts/benchmark.sh {name}", file=sys.stderr)
        return 2
    benchmark: Any = importlib.import_module(f"benchmarks.{name}")
    parser = options(name, benchmark)
    arguments = parser.parse_args(words)
    if getattr(arguments, "device", None) in GPUS and torch.version.cuda is None:
        parser.error(
            f"torch {torch.__version__} was built without CUDA, which schedules for a "
            f"GPU need; try TORCH_VERSION=2.15.0 scripts/{parser.prog}"
        )
    rows = found_by(benchmark, arguments)
    data: Row = {"environment": environment(), "measured": rows}
    show(benchmark.page(data))
    if arguments.json is not None:
        store(arguments.json, data)
    return int(failed(benchmark.judged(rows)) or any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
