"""Measures the solvers against every mark they have to reach.

    scripts/benchmark.sh solvers                    all rows
    scripts/benchmark.sh solvers --check            counts only, as CI does
    scripts/benchmark.sh solvers --rows time many   some of them

Our solvers come from the patched checkout, upstream's from the untouched wheel
beside it. Times are medians of interleaved runs on one thread; they are reported and
never enforced. The exit status is 1 only if a count (violations, optima, proofs,
values below greedy) is off.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch._functorch._activation_checkpointing import knapsack
from upstream import untouched_knapsack

from benchmarks import corpus
from benchmarks.marks import failed, Mark, show


# Budgets at which times are compared; the counts use all budgets of optimum.json.
TIMED_BUDGETS = (0.1, 0.3, 0.5, 0.8)
# Items -> runs. Upstream's dp needs a table of gigabytes for the last two.
PR_GRID = {1: 1000, 5: 1000, 10: 1000, 20: 200, 50: 20, 100: 10}
HARD_CLASSES = [
    *("uncorrelated", "weak", "strong", "inverse", "subset", "ceiling", "circle"),
    "spanner",
]
HARD_SIZES = (100, 1_000, 10_000, 22_000, 100_000, 1_000_000)

console = Console()


Net = corpus.Instance


def is_trivial(net: Net, budget: float) -> bool:
    """Whether everything that fits alone also fits together."""
    return math.fsum(m for m in net.memory if m <= budget) <= budget


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(call: Callable[[], Any], reference: Callable[[], Any], repeats: int) -> float:
    """Median time of ``call`` over the median time of ``reference``, interleaved."""
    pairs = [(seconds(call), seconds(reference)) for _ in range(repeats)]
    ours, theirs = zip(*pairs)
    return float(statistics.median(ours) / statistics.median(theirs))


def python_bytes(call: Callable[[], Any]) -> int:
    """Peak of what Python allocates."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def tensor_bytes(call: Callable[[], Any]) -> int:
    """Peak of what torch's CPU allocator has handed out."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    live = itertools.accumulate((int(event.nbytes()) for event in changes), initial=0)
    return int(max(live))


def peak_bytes(call: Callable[[], Any]) -> int:
    return python_bytes(call) + tensor_bytes(call)


def dp_bytes(net: Net, budget: float) -> int:
    """Size of upstream dp's float32 table: (items + 1) x (quanta + 1) cells."""
    return 4 * (len(net.memory) + 1) * (round(budget * 10_000) + 1)


def greedy_floor(upstream: Any, net: Net, budget: float) -> int:
    """What upstream's greedy saves; it cannot handle items without size."""
    sized = [i for i, m in enumerate(net.memory) if m > 0]
    _, saved, _ = upstream.greedy_knapsack(
        [net.memory[i] for i in sized], [net.runtimes[i] for i in sized], budget
    )
    free: int = sum(r for m, r in zip(net.memory, net.runtimes) if m == 0)
    return int(free + sum(net.runtimes[sized[i]] for i in saved))


def counts(solver: Any, upstream: Any) -> Iterator[Mark]:
    by_name = {net.name: net for net in corpus.instances()}
    over = wrong = unproven = below = 0
    for (name, budget), optimum in track(
        corpus.optima().items(),
        "corpus",
        console=console,
        transient=True,
        auto_refresh=False,
    ):
        if name not in by_name:
            continue
        net = by_name[name]
        solution = solver.solve_knapsack(net.memory, net.runtimes, budget)
        value = sum(net.runtimes[i] for i in solution.saved)
        over += math.fsum(net.memory[i] for i in solution.saved) > budget
        wrong += value != optimum or solution.value != value
        unproven += not solution.proven
        below += value < greedy_floor(upstream, net, budget)
    total = sum(name in by_name for name, _ in corpus.optima())
    for what, found in (
        ("over budget by math.fsum", over),
        ("differ from optimum.json", wrong),
        ("not proven", unproven),
        ("below greedy", below),
    ):
        yield Mark(f"corpus: {what}", f"{found} of {total}", "0", found == 0, True)


def timed_cases(nets: list[Net]) -> list[tuple[Net, float]]:
    return [(n, b) for n in nets for b in TIMED_BUDGETS if not is_trivial(n, b)]


def times(solver: Any, upstream: Any, nets: list[Net], repeats: int) -> Iterator[Mark]:
    cases = timed_cases(nets)
    results = []
    for net, budget in track(
        cases, "time", console=console, transient=True, auto_refresh=False
    ):
        results.append(
            (
                ratio(
                    functools.partial(
                        solver.exact_knapsack, net.memory, net.runtimes, budget
                    ),
                    functools.partial(
                        upstream.dp_knapsack, net.memory, net.runtimes, budget
                    ),
                    repeats,
                ),
                f"{net.name}@{budget:g}",
            )
        )
    mean = 1 / statistics.geometric_mean(r for r, _ in results)
    worst, where = max(results)
    text = f"{mean:.1f}x over {len(results)} cases"
    yield Mark("dp / exact, geometric mean", text, "15x", mean >= 15, False)
    slowest = f"{1 / worst:.1f}x ({where})"
    yield Mark("dp / exact, worst case", slowest, "1.0x", worst <= 1, False)


def many(solver: Any, upstream: Any, nets: list[Net], repeats: int) -> Iterator[Mark]:
    grid = [percent / 100 for percent in range(1, 100)]
    results = []
    for net in track(
        nets, "budgets", console=console, transient=True, auto_refresh=False
    ):
        results.append(
            ratio(
                functools.partial(
                    solver.solve_knapsack_budgets, net.memory, net.runtimes, grid
                ),
                functools.partial(upstream.dp_knapsack, net.memory, net.runtimes, 0.5),
                repeats,
            )
        )
    median = statistics.median(results)
    yield Mark(
        "99 budgets / one dp at 0.5, median",
        f"{median:.2f} (worst {max(results):.1f})",
        "2.0",
        median <= 2,
        False,
    )


def memory(solver: Any, nets: list[Net]) -> Iterator[Mark]:
    def share(net: Net, budget: float) -> float:
        peak = peak_bytes(
            functools.partial(solver.exact_knapsack, net.memory, net.runtimes, budget)
        )
        return peak / dp_bytes(net, budget)

    worst, where = max(
        (share(net, budget), f"{net.name}@{budget:g}")
        for net, budget in timed_cases(nets)
        if len(net.memory) >= 400
    )
    yield Mark(
        "peak memory / dp's table, nets of 400 items or more, worst",
        f"{worst:.3f} ({where})",
        "1.00",
        worst <= 1,
        False,
    )


def hirschberg(upstream: Any, nets: list[Net], repeats: int) -> Iterator[Mark]:
    """The two-row solver against upstream's dp, on real nets and on the PR's grid."""
    ours: Callable[..., Any] = knapsack.dp_knapsack_sliding_hirschberg
    theirs = upstream.dp_knapsack
    faster, smaller = [], []
    large = [n for n in nets if len(n.memory) >= 400 and not n.name.startswith("synth")]
    for net, budget in track(
        timed_cases(large),
        "Hirschberg",
        console=console,
        transient=True,
        auto_refresh=False,
    ):
        our_call = functools.partial(ours, net.memory, net.runtimes, budget)
        their_call = functools.partial(theirs, net.memory, net.runtimes, budget)
        where = f"{net.name}@{budget:g}"
        faster.append((1 / ratio(our_call, their_call, repeats), where))
        smaller.append((tensor_bytes(their_call) / peak_bytes(our_call), where))
    for what, found, mark in (
        ("times faster", faster, 10),
        ("times less memory", smaller, 20),
    ):
        worst, where = min(found)
        mean = statistics.geometric_mean(factor for factor, _ in found)
        yield Mark(
            f"Hirschberg, {what} than dp, real nets of 400 items or more, worst",
            f"{worst:.1f} ({where}); geometric mean {mean:.1f}",
            str(mark),
            worst >= mark,
            False,
        )
    for n, runs in PR_GRID.items():
        for solve in (ours, theirs):
            solve([1.0], [1.0], 2.0)  # What the first call pays once.
        ours_s, theirs_s = [], []
        # No progress bar here: its thread would be most of what is measured.
        for run in range(runs):
            items = corpus.unnormalised(n, seed=run)
            theirs_s.append(seconds(functools.partial(theirs, *items)))
            ours_s.append(seconds(functools.partial(ours, *items)))
        less = 1 - statistics.median(ours_s) / statistics.median(theirs_s)
        yield Mark(
            f"Hirschberg, less time than dp, unnormalised sizes, n = {n}, {runs} runs",
            f"{less:.1%}",
            "37.25%",
            less >= 0.3725,
            False,
        )


def pisinger(kind: str, n: int, largest: int) -> tuple[list[float], list[int]]:
    """An instance of one of Pisinger's classes, as (sizes, values)."""
    r = random.Random(f"{kind}-{n}-{largest}")
    weights = [r.randint(1, largest) for _ in range(n)]
    if kind == "uncorrelated":
        values = [r.randint(1, largest) for _ in weights]
    elif kind == "weak":
        values = [max(1, w + r.randint(-largest, largest) // 10) for w in weights]
    elif kind == "strong":
        values = [w + largest // 10 for w in weights]
    elif kind == "inverse":
        values = weights
        weights = [v + largest // 10 for v in values]
    elif kind == "subset":
        values = weights
    elif kind == "ceiling":
        values = [3 * -(-w // 3) for w in weights]
    elif kind == "circle":
        values = [1 + int(math.sqrt(w * (4 * largest - w)) * 2 / 3) for w in weights]
    else:
        # Spanner: multiples up to 10 of two items of the strong class.
        kit = [(-(-w // 5), -(-(w + largest // 10) // 5)) for w in weights[:2]]
        drawn = [(r.randint(1, 10), r.choice(kit)) for _ in range(n)]
        weights = [a * w for a, (w, _) in drawn]
        values = [a * p for a, (_, p) in drawn]
    return [float(w) for w in weights], values


def chain(n: int) -> tuple[list[float], list[int]]:
    """A chain of layers without two alike: sizes in shares of all, flops."""
    r = random.Random(n)
    sizes = [512 * r.randint(1, 1 << 16) for _ in range(n)]
    values = [1 + int(size * r.uniform(0.2, 3)) for size in sizes]
    gigabytes = sum(sizes) / 1e9
    return [size / 1e9 / gigabytes for size in sizes], values


def hard(solver: Any, upstream: Any) -> Iterator[Mark]:
    """CPU time of one call on what no graph is like, and what the answer is worth."""
    cases = [(k, n) for n in HARD_SIZES for k in (*HARD_CLASSES, "chain")]
    unproven = below = wrong = 0
    worst = 0.0, ""
    for kind, n in track(
        cases, "hard classes", console=console, transient=True, auto_refresh=False
    ):
        sizes, values = chain(n) if kind == "chain" else pisinger(kind, n, 10**7)
        budget = math.fsum(sizes) / 3
        start = time.process_time()
        solution = solver.solve_knapsack(sizes, values, budget)
        worst = max(worst, (time.process_time() - start, f"{kind}-{n}"))
        bound = dantzig(sizes, values, budget)
        unproven += not solution.proven
        wrong += not solution.value <= solution.upper_bound <= bound * (1 + 1e-9)
        below += solution.value < greedy_floor(upstream, Net("", sizes, values), budget)
    text = f"{worst[0]:.1f} s ({worst[1]}); {unproven} of {len(cases)} unproven"
    yield Mark("hard classes: worst CPU time", text, "10 s", worst[0] <= 10, False)
    for what, found in (("below greedy", below), ("bound not Dantzig's", wrong)):
        text = f"{found} of {len(cases)}"
        yield Mark(f"hard classes: {what}", text, "0", found == 0, True)


def dantzig(sizes: list[float], values: list[int], budget: float) -> float:
    """Dantzig's bound, written anew to compare with."""
    bound = 0.0
    for size, value in sorted(zip(sizes, values), key=lambda i: -i[1] / i[0]):
        if size > budget:
            return bound + value * budget / size
        budget -= size
        bound += value
    return bound


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": platform.processor() or platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "repeats": arguments.repeats,
        "timed_budgets": TIMED_BUDGETS,
    }


def main() -> int:
    names = ("counts", "time", "many", "memory", "hirschberg", "hard")
    parser = argparse.ArgumentParser(
        prog="benchmark.sh solvers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--check", action="store_true", help="only the counts")
    parser.add_argument("--repeats", type=int, default=5, help="runs per time")
    parser.add_argument("--json", type=Path, help="write rows and environment here")
    arguments = parser.parse_args()
    if not hasattr(knapsack, "KNAPSACK_SOLVERS"):
        raise SystemExit("this torch is not patched; run scripts/benchmark.sh solvers")
    torch.set_num_threads(1)
    # The profiler's library announces every start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    upstream, nets = untouched_knapsack(), corpus.instances()
    repeats = arguments.repeats
    parts: dict[str, Callable[[], Iterator[Mark]]] = {
        "counts": lambda: counts(knapsack, upstream),
        "time": lambda: times(knapsack, upstream, nets, repeats),
        "many": lambda: many(knapsack, upstream, nets, repeats),
        "memory": lambda: memory(knapsack, nets),
        "hirschberg": lambda: hirschberg(upstream, nets, repeats),
        "hard": lambda: hard(knapsack, upstream),
    }
    rows: list[Mark] = []
    for name in ["counts"] if arguments.check else arguments.rows:
        rows += parts[name]()
    facts = environment(arguments)
    caption = f"{facts['system']}, torch {facts['torch']}"
    show("solvers", rows, console, caption)
    if arguments.json:
        report = {"environment": facts, "rows": [row._asdict() for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed(rows))


if __name__ == "__main__":
    sys.exit(main())
