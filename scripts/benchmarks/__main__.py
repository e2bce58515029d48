"""python -m benchmarks NAME OPTIONS, as scripts/benchmark.sh calls it.

A benchmark is a module. Its docstring is its --help, and it has

    NETS              the nets, if it has any; where they are asked about in sets, by
                      ``project`` and ``held-out``, and by ``check`` those that CI runs
    tasks(asked, rows)    the tasks, see `fresh.measured`, for what was asked, by the names
                      that `options` has: ``nets``, ``check`` and others. ``rows`` are
                      those found so far of a net
    measure(task)     a row, in a process of its own
    judged(rows)      the marks
    page(data)        what is printed

"""

import importlib
import signal
import sys
from typing import Any

import torch
from torch._functorch._activation_checkpointing import knapsack

from benchmarks import catalogue, options
from benchmarks.pages import environment, failed, show
from benchmarks.replay import GPUS
from benchmarks.runner import Runner


def known(benchmark: Any, name: str) -> str:
    """The name of a net that the benchmark can ask about, or an error."""
    nets = benchmark.NETS
    every = nets.values() if isinstance(nets, dict) else [nets]
    return name if any(name in some for some in every) else catalogue.find(name).name


def main(name: str, *words: str) -> int:
    if not hasattr(knapsack, "KNAPSACK_SOLVERS"):
        print(f"torch is not patched; run scripts/benchmark.sh {name}", file=sys.stderr)
        return 2
    parser = options.parser(name)
    arguments = parser.parse_args(words)
    benchmark: Any = importlib.import_module(f"benchmarks.{name}")
    try:
        nets = [known(benchmark, net) for net in getattr(arguments, "nets", None) or ()]
    except ValueError as error:
        parser.error(f"argument --net/--model: {error}")
    arguments.nets = nets
    if getattr(arguments, "device", None) in GPUS and torch.version.cuda is None:
        parser.error(
            f"torch {torch.__version__} was built without CUDA, which schedules for a "
            f"GPU need; try TORCH_VERSION=2.15.0 scripts/{parser.prog}"
        )

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        rows = Runner(benchmark, arguments).run()
    except KeyboardInterrupt:
        print("stopped; what was measured is stored", file=sys.stderr)
        return 130
    show(benchmark.page({"environment": environment(), "measured": rows}))
    return int(failed(benchmark.judged(rows)) or any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
