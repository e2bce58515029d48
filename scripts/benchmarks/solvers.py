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
HARD_CLASSES = ("strong", "inverse", "subset", "spanner")

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
    # The solver uses no array library on such nets: both marks are for one code path.
    yield Mark("dp / exact, torch only, geometric mean", text, "10x", mean >= 10, False)
    yield Mark("dp / exact, with numpy, geometric mean", text, "20x", mean >= 20, False)
    yield Mark(
        "exact / dp, worst case", f"{worst:.2f} ({where})", "1.0", worst <= 1, False
    )


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

    for what, least, mark in (("400", 400, 1.0), ("6,000", 6000, 1 / 20)):
        cases = [
            (share(net, budget), f"{net.name}@{budget:g}")
            for net in nets
            if len(net.memory) >= least
            for budget in TIMED_BUDGETS
            if not is_trivial(net, budget)
        ]
        if cases:
            worst, where = max(cases)
            yield Mark(
                f"peak memory / dp's table, nets of {what} items or more, worst",
                f"{worst:.3f} ({where})",
                f"{mark:.2f}",
                worst <= mark,
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


def growth(solver: Any, upstream: Any, repeats: int) -> Iterator[Mark]:
    for n, instances, mark in ((100_000, 5, 1.0), (1_000_000, 1, 2.0)):
        measured = 0.0
        for instance in range(instances):
            items = corpus.uncorrelated(n, seed=n + instance)
            found = ratio(
                functools.partial(solver.exact_knapsack, *items),
                functools.partial(upstream.greedy_knapsack, *items),
                repeats,
            )
            measured = max(measured, found)
        yield Mark(
            f"exact / greedy, uncorrelated, n = {n:,}, worst of {instances}",
            f"{measured:.2f}",
            f"{mark:.1f}",
            measured <= mark,
            False,
        )


def pisinger(
    kind: str, n: int, largest: int, seed: int
) -> tuple[list[float], list[int]]:
    """An instance of one of Pisinger's hard classes, as (sizes, values)."""
    r = random.Random(f"{kind}-{n}-{largest}-{seed}")
    weights = [r.randint(1, largest) for _ in range(n)]
    if kind == "strong":
        values = [w + largest // 10 for w in weights]
    elif kind == "inverse":
        values = weights
        weights = [v + largest // 10 for v in values]
    elif kind == "subset":
        values = weights
    else:
        # Spanner: multiples up to 10 of two items of the strong class.
        kit = [(-(-w // 5), -(-(w + largest // 10) // 5)) for w in weights[:2]]
        drawn = [(r.randint(1, 10), r.choice(kit)) for _ in range(n)]
        weights = [a * w for a, (w, _) in drawn]
        values = [a * p for a, (_, p) in drawn]
    return [float(w) for w in weights], values


def hard(solver: Any, upstream: Any, seeds: int) -> Iterator[Mark]:
    cases = [
        (kind, n, largest, seed)
        for kind in HARD_CLASSES
        for n in (50, 100, 200, 1_000, 10_000)
        for largest in (10**3, 10**5, 10**7)
        for seed in range(seeds)
    ]
    unproven, below, worst_gap, worst_time, where = 0, 0, 0.0, 0.0, ""
    for case in track(
        cases, "hard classes", console=console, transient=True, auto_refresh=False
    ):
        sizes, values = pisinger(*case)
        budget = float(sum(sizes) * (case[3] % 5 + 1) // 6)
        start = time.perf_counter()
        solution = solver.solve_knapsack(sizes, values, budget)
        worst_time = max(worst_time, time.perf_counter() - start)
        gap = (solution.upper_bound - solution.value) / max(1, solution.value)
        unproven += not solution.proven
        if gap > worst_gap:
            worst_gap, where = gap, "-".join(map(str, case))
        below += solution.value < greedy_floor(upstream, Net("", sizes, values), budget)
    yield Mark(
        "Pisinger's hard classes: worst proven gap",
        f"{worst_gap:.1e} {where} ({unproven} of {len(cases)} unproven, "
        f"worst {worst_time:.1f} s)",
        "1e-8",
        worst_gap <= 1e-8,
        True,
    )
    yield Mark(
        "Pisinger's hard classes: below greedy",
        f"{below} of {len(cases)}",
        "0",
        below == 0,
        True,
    )


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": platform.processor() or platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "repeats": arguments.repeats,
        "hard_seeds": list(range(arguments.seeds)),
        "timed_budgets": TIMED_BUDGETS,
    }


def main() -> int:
    names = ("counts", "time", "many", "memory", "hirschberg", "growth", "hard")
    parser = argparse.ArgumentParser(
        prog="benchmark.sh solvers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--check", action="store_true", help="only the counts")
    parser.add_argument("--repeats", type=int, default=5, help="runs per time")
    parser.add_argument("--seeds", type=int, default=1, help="per hard class and size")
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
        "growth": lambda: growth(knapsack, upstream, repeats),
        "hard": lambda: hard(knapsack, upstream, arguments.seeds),
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
