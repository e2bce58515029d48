"""python -m benchmarks NAME OPTIONS, as scripts/benchmark.sh calls it."""

import importlib
import sys

from torch._functorch._activation_checkpointing import knapsack


def main(name: str, *arguments: str) -> int:
    if not hasattr(knapsack, "KNAPSACK_SOLVERS"):
        raise SystemExit(f"this torch is not patched; run scripts/benchmark.sh {name}")
    sys.argv = [f"benchmark.sh {name}", *arguments]
    status: int = importlib.import_module(f"benchmarks.{name}").main()
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
