"""Measures the solvers against every mark they have to reach.

    scripts/benchmark.sh solvers            all rows
    scripts/benchmark.sh solvers --check    counts only, as CI does

Our solvers come from the patched checkout, upstream's from the untouched wheel
beside it. Times are CPU seconds on one thread, medians of interleaved runs after one
that does not count; they are reported and never enforced. The exit status is 1 only if
a count (violations, optima, proofs, values below greedy) is off.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch._functorch._activation_checkpointing import knapsack
from upstream import untouched_knapsack

from benchmarks import corpus, options
from benchmarks.live_bytes import allocations
from benchmarks.marks import conclude, Mark


# Budgets at which times are compared; the counts use all budgets of optimum.json.
TIMED_BUDGETS = (0.1, 0.3, 0.5, 0.8)
# Items -> runs. Upstream's dp needs a table of gigabytes for the last two.
PR_GRID = {1: 1000, 5: 1000, 10: 1000, 20: 200, 50: 20, 100: 10}
HARD_SIZES = (100, 1_000, 10_000, 22_000, 100_000, 1_000_000)

console = Console()
upstream = untouched_knapsack()
solvers: Any = knapsack  # with more in it than the one that mypy finds
Case = tuple[list[float], list[Any], float]  # what solvers take
Call = Callable[[], Any]


def exact() -> Any:
    """The patched checkout's; the wheel, with which pages are made, has none."""
    from torch._functorch._activation_checkpointing import (  # type: ignore[attr-defined]
        knapsack_exact,
    )

    return knapsack_exact


def progress(cases: Iterable[Any], what: str) -> Iterable[Any]:
    """The cases; without a thread, which would be part of what is measured."""
    cases = list(cases)
    return track(cases, what, console=console, transient=True, auto_refresh=False)


def timed(nets: list[corpus.Instance]) -> Iterator[tuple[str, Case, Case]]:
    """Cases where not everything that fits alone also fits together.

    Their names, and what they are in shares of the range and in bytes.
    """
    for net, budget in itertools.product(nets, TIMED_BUDGETS):
        if math.fsum(m for m in net.memory if m <= budget) > budget:
            shares: Case = net.memory, net.runtimes, budget
            in_bytes: Any = net.sizes, net.runtimes, net.capacity(budget)
            yield f"{net.name}@{budget:g}", shares, in_bytes


def large_nets() -> list[corpus.Instance]:
    return [net for net in corpus.instances() if len(net.memory) >= 400]


def seconds(call: Call) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def ratio(call: Call, reference: Call, repeats: int) -> float:
    """Median time of ``call`` over the median time of ``reference``, interleaved."""
    pairs = [(seconds(call), seconds(reference)) for _ in range(repeats + 1)]
    ours, theirs = zip(*pairs[1:])
    return float(statistics.median(ours) / statistics.median(theirs))


def peak_bytes(call: Call) -> int:
    """Peak of what Python allocates, and of what torch does."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] + allocations(call).peak
    finally:
        tracemalloc.stop()


def greedy_floor(memory: list[float], runtimes: list[int], budget: float) -> int:
    """What upstream's greedy saves; it cannot handle items without size."""
    sized = [i for i, m in enumerate(memory) if m > 0]
    _, saved, _ = upstream.greedy_knapsack(
        [memory[i] for i in sized], [runtimes[i] for i in sized], budget
    )
    free = [i for i, m in enumerate(memory) if m == 0]
    return sum(runtimes[i] for i in (*free, *(sized[i] for i in saved)))


def count(what: str, found: int, total: int) -> Mark:
    """A line that decides the exit status."""
    return Mark(what, f"{found} of {total}", "0", found == 0)


def counts(repeats: int) -> Iterator[Mark]:
    over = wrong = unproven = below = 0
    cases = list(itertools.product(corpus.instances(), corpus.BUDGETS))
    for net, budget in progress(cases, "corpus"):
        capacity = net.capacity(budget)
        solution = exact().solve_knapsack(net.sizes, net.runtimes, capacity)
        value = sum(net.runtimes[i] for i in solution.saved)
        over += corpus.used(net.memory, solution.saved) > budget
        wrong += not value == solution.value == corpus.optima()[net.name, budget]
        unproven += not solution.proven
        below += value < greedy_floor(net.memory, net.runtimes, budget)
    yield count("corpus: over budget by math.fsum", over, len(cases))
    yield count("corpus: differ from optimum.json", wrong, len(cases))
    yield count("corpus: not proven", unproven, len(cases))
    yield count("corpus: below greedy", below, len(cases))


def times(repeats: int) -> Iterator[Mark]:
    results = []
    for where, shares, in_bytes in progress(timed(corpus.instances()), "time"):
        ours = functools.partial(solvers.exact_knapsack, *in_bytes)
        theirs = functools.partial(upstream.dp_knapsack, *shares)
        results.append((ratio(ours, theirs, repeats), where))
    mean = 1 / statistics.geometric_mean(r for r, _ in results)
    worst, where = max(results)
    text = f"{mean:.1f}x over {len(results)} cases"
    yield Mark("dp / exact, geometric mean", text, "15x", mean >= 15, False)
    slowest = f"{1 / worst:.1f}x ({where})"
    yield Mark("dp / exact, worst case", slowest, "1.0x", worst <= 1, False)


def many(repeats: int) -> Iterator[Mark]:
    grid = [percent / 100 for percent in range(1, 100)]
    results = []
    for net in progress(corpus.instances(), "budgets"):
        items = net.sizes, net.runtimes
        capacities = list(map(net.capacity, grid))
        ours = functools.partial(exact().solve_knapsack_budgets, *items, capacities)
        theirs = functools.partial(upstream.dp_knapsack, net.memory, net.runtimes, 0.5)
        results.append(ratio(ours, theirs, repeats))
    median = statistics.median(results)
    text = f"{median:.2f} (worst {max(results):.1f})"
    what = "99 budgets / one dp at 0.5, median"
    yield Mark(what, text, "2.0", median <= 2, False)


def memory(repeats: int) -> Iterator[Mark]:
    results = []
    for where, (items, _, budget), in_bytes in timed(large_nets()):
        # Upstream's dp fills a float32 table of (items + 1) x (quanta + 1) cells.
        table = 4 * (len(items) + 1) * (round(budget * corpus.QUANTA) + 1)
        call = functools.partial(solvers.exact_knapsack, *in_bytes)
        results.append((peak_bytes(call) / table, where))
    worst, where = max(results)
    what = "peak memory / dp's table, nets of 400 items or more, worst"
    yield Mark(what, f"{worst:.3f} ({where})", "1.00", worst <= 1, False)


def hirschberg(repeats: int) -> Iterator[Mark]:
    """The solver of few rows against upstream's dp, on real nets and the PR's grid."""
    ours = solvers.dp_knapsack_sliding_hirschberg
    theirs = upstream.dp_knapsack
    faster, smaller = [], []
    real = [net for net in large_nets() if not net.name.startswith("synth")]
    for where, case, _ in progress(timed(real), "Hirschberg"):
        calls = functools.partial(ours, *case), functools.partial(theirs, *case)
        faster.append((1 / ratio(*calls, repeats), where))
        smaller.append((allocations(calls[1]).peak / peak_bytes(calls[0]), where))
    for unit, found, mark in (("faster", faster, 10), ("less memory", smaller, 20)):
        worst, where = min(found)
        mean = statistics.geometric_mean(factor for factor, _ in found)
        what = f"Hirschberg, times {unit} than dp, real nets of 400 items or more"
        text = f"{worst:.1f} ({where}); geometric mean {mean:.1f}"
        yield Mark(f"{what}, worst", text, str(mark), worst >= mark, False)
    for n, runs in PR_GRID.items():
        ours_s, theirs_s = [], []
        for run in range(-1, runs):
            items = corpus.unnormalised(n, seed=max(run, 0))
            theirs_s.append(seconds(functools.partial(theirs, *items)))
            ours_s.append(seconds(functools.partial(ours, *items)))
        less = 1 - statistics.median(ours_s[1:]) / statistics.median(theirs_s[1:])
        what = f"Hirschberg, less time than dp, unnormalised sizes, n = {n}"
        yield Mark(
            f"{what}, {runs} runs", f"{less:.1%}", "37.25%", less >= 0.3725, False
        )


def hard(repeats: int) -> Iterator[Mark]:
    """CPU time of one call on what no graph is like, and what the answer is worth."""
    kinds = (*corpus.HARD_CLASSES, "chain")
    unproven = below = wrong = 0
    results = []
    for n, kind in progress(itertools.product(HARD_SIZES, kinds), "hard classes"):
        r = random.Random(f"{kind}-{n}")
        items = (
            corpus.chain(n) if kind == "chain" else corpus.pisinger(kind, n, 10**7, r)
        )
        case = *items, math.fsum(items[0]) / 3
        start = time.process_time()
        solution = exact().solve_knapsack(*case)
        results.append((time.process_time() - start, f"{kind}-{n}"))
        unproven += not solution.proven
        most = dantzig(*case) * (1 + 1e-9)
        wrong += not solution.value <= solution.upper_bound <= most
        below += solution.value < greedy_floor(*case)
    worst, where = max(results)
    text = f"{worst:.1f} s ({where}); {unproven} of {len(results)} unproven"
    yield Mark("hard classes: worst CPU time", text, "10 s", worst <= 10, False)
    yield count("hard classes: below greedy", below, len(results))
    yield count("hard classes: bound not Dantzig's", wrong, len(results))


def dantzig(sizes: list[float], values: list[int], budget: float) -> float:
    """Dantzig's bound, written anew to compare with."""
    bound = 0.0
    for size, value in sorted(zip(sizes, values), key=lambda i: -i[1] / i[0]):
        if size > budget:
            return bound + value * budget / size
        budget -= size
        bound += value
    return bound


# Runs per time.
REPEATS = 5

PARTS = (counts, times, many, memory, hirschberg, hard)


def main() -> int:
    parser = options.parser(__doc__, check="only the counts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # The profiler's library announces every start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    rows: list[Mark] = []
    for part in [counts] if arguments.check else PARTS:
        rows += part(REPEATS)
    return conclude(rows, REPEATS, arguments.json)
