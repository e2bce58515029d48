"""Fuzz the exact solver against an exact oracle; not part of CI.

    scripts/run_patched.sh python test/fuzz_exact.py --instances 100000 --seed 0

Prints the seed of every instance that fails and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path


sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from benchmarks.corpus import HARD_CLASSES, pisinger
from test_exact import check_optimal, random_instance


def one(seed: int) -> None:
    r = random.Random(seed)
    if r.random() < 0.2:
        memory, runtime = pisinger(r.choice(HARD_CLASSES), r.randint(1, 14), 100, r)
        budget = float(int(sum(memory) * r.random()))
    else:
        memory, runtime, budget = random_instance(r, r.randint(1, 13))
    check_optimal(memory, runtime, budget)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    arguments = parser.parse_args()
    failures, start = 0, time.perf_counter()
    for seed in range(arguments.seed, arguments.seed + arguments.instances):
        try:
            one(seed)
        except Exception as error:
            failures += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    print(
        f"{arguments.instances} instances from seed {arguments.seed}: "
        f"{failures} failures, {time.perf_counter() - start:.0f} s"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
