"""Measures the solvers against every mark they have to reach.

    scripts/benchmark.sh solvers            all rows
    scripts/benchmark.sh solvers --check    counts only, as CI does

The corpus (test/corpus) was captured from the joint graphs of real architectures
(``synth_*``: built by hand for scale): bytes and flops per item, in the partitioner's own
order, with proven optima. Our solvers come from the patched checkout, upstream's from the untouched wheel
beside it. Times are CPU seconds on one thread, medians of interleaved runs after one
that does not count; they are reported and never enforced. The exit status is 1 only if
a count (violations, optima, proofs, values below greedy) is off.
"""

import functools
import gzip
import itertools
import json
import math
import random
import statistics
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch._functorch._activation_checkpointing import knapsack

from benchmarks import fresh, pages
from benchmarks.meters import allocations, cpu_seconds
from benchmarks.pages import Mark, Row, stored_marks
from benchmarks.tracing import overlay, untouched_knapsack


FOLDER = Path(__file__).resolve().parents[2] / "test" / "corpus"
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Budgets at which times are compared; the counts use all budgets of optimum.json.
TIMED_BUDGETS = (0.1, 0.3, 0.5, 0.8)
# Items -> runs. Upstream's dp needs a table of gigabytes for the last two.
PR_GRID = {1: 1000, 5: 1000, 10: 1000, 20: 200, 50: 20, 100: 10}
REPEATS = 5
NETS: tuple[str, ...] = ()

upstream = untouched_knapsack()
ours: Any = knapsack  # with more in it than the one that mypy finds
Call = Callable[[], Any]


@dataclass(frozen=True)
class Instance:
    name: str
    sizes: list[int]  # bytes
    range: float  # the bytes that a budget of 1 allows
    runtimes: list[int]  # flops

    @functools.cached_property
    def memory(self) -> list[float]:
        """Shares of the range, as upstream's partitioner has them."""
        return [size / self.range for size in self.sizes]

    def capacity(self, budget: float) -> int:
        """The bytes that a budget allows."""
        return math.floor(budget * self.range)

    def __str__(self) -> str:
        return self.name


@functools.cache
def instances() -> list[Instance]:
    found = []
    for path in sorted(FOLDER.glob("*.json.gz")):
        with gzip.open(path, "rt") as file:
            data = json.load(file)
        span = data["denominator_gb"] * 1e9
        found.append(Instance(data["name"], data["bytes"], span, data["runtimes"]))
    return found


@functools.cache
def optima() -> dict[tuple[str, float], int]:
    """The greatest runtime that fits, on true sizes, by (name, budget)."""
    known = json.loads((FOLDER / "optimum.json").read_text())
    by_place = (key.rsplit("@", 1) for key in known)
    return {
        (name, float(budget)): value
        for (name, budget), value in zip(by_place, known.values())
    }


def repeated(call: Call, reference: Call) -> float:
    """Median time of a call over that of another, interleaved; the first does not count."""
    pairs = [(cpu_seconds(call), cpu_seconds(reference)) for _ in range(REPEATS + 1)]
    first, other = map(statistics.median, zip(*pairs[1:]))
    return float(first / other)


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


def counts() -> Iterator[Mark]:
    over = wrong = unproven = below = 0
    cases = list(itertools.product(instances(), BUDGETS))
    for net, budget in cases:
        capacity = net.capacity(budget)
        solution = overlay("_activation_checkpointing.knapsack_exact").solve_knapsack(
            net.sizes, net.runtimes, capacity
        )
        value = sum(net.runtimes[i] for i in solution.saved)
        over += math.fsum(net.memory[i] for i in solution.saved) > budget
        wrong += not value == solution.value == optima()[net.name, budget]
        unproven += not solution.proven
        below += value < greedy_floor(net.memory, net.runtimes, budget)
    yield count("corpus: over budget by math.fsum", over, len(cases))
    yield count("corpus: differ from optimum.json", wrong, len(cases))
    yield count("corpus: not proven", unproven, len(cases))
    yield count("corpus: below greedy", below, len(cases))


def times() -> Iterator[Mark]:
    results = []
    for net, budget in itertools.product(instances(), TIMED_BUDGETS):
        capacity = net.capacity(budget)
        exact = partial(ours.exact_knapsack, net.sizes, net.runtimes, capacity)
        dp = partial(upstream.dp_knapsack, net.memory, net.runtimes, budget)
        results.append((repeated(exact, dp), f"{net.name}@{budget:g}"))
    mean = 1 / statistics.geometric_mean(r for r, _ in results)
    worst, where = max(results)
    text = f"{mean:.1f}x over {len(results)} cases"
    yield Mark("dp / exact, geometric mean", text, "10x", mean >= 10, False)
    slowest = f"{1 / worst:.1f}x ({where})"
    yield Mark("dp / exact, worst case", slowest, "1.0x", worst <= 1, False)


def peak_bytes(call: Call) -> int:
    """Peak of what Python allocates, and of what torch does."""
    tracemalloc.start()
    try:
        _, torchs, _ = allocations(call)
        return tracemalloc.get_traced_memory()[1] + torchs
    finally:
        tracemalloc.stop()


def hirschberg() -> Iterator[Mark]:
    """What answers to that name against upstream's dp, on real nets and the PR's grid."""
    solvers = ours.dp_knapsack_sliding_hirschberg, upstream.dp_knapsack
    found: dict[str, list[tuple[float, str]]] = {"faster": [], "less memory": []}
    large = [net for net in instances() if len(net.memory) >= 400]
    real = [net for net in large if not net.name.startswith("synth")]
    for net, budget in itertools.product(real, TIMED_BUDGETS):
        case = net.memory, net.runtimes, budget
        mine, theirs = (partial(solver, *case) for solver in solvers)
        where = f"{net.name}@{budget:g}"
        found["faster"].append((1 / repeated(mine, theirs), where))
        less = allocations(theirs)[1] / peak_bytes(mine)
        found["less memory"].append((less, where))
    for unit, mark in (("faster", 10), ("less memory", 20)):
        worst, where = min(found[unit])
        mean = statistics.geometric_mean(factor for factor, _ in found[unit])
        what = f"Hirschberg, times {unit} than dp, real nets of 400 items or more"
        text = f"{worst:.1f} ({where}); geometric mean {mean:.1f}"
        yield Mark(f"{what}, worst", text, str(mark), worst >= mark, False)
    for n, runs in PR_GRID.items():
        draw = random.Random(n)
        pairs = []
        for _ in range(runs + 1):
            # As pytorch#160914 measured: far above 1.
            sizes = [draw.uniform(0.1, 10) for _ in range(n)]
            runtimes = [draw.uniform(0.1, 10) for _ in range(n)]
            room = draw.uniform(0.2, 0.8) * sum(sizes)
            calls = (partial(solver, sizes, runtimes, room) for solver in solvers)
            pairs.append([*map(cpu_seconds, calls)])
        # The first one does not count.
        first, other = map(statistics.median, zip(*pairs[1:]))
        less = 1 - first / other
        what = (
            f"Hirschberg, less time than dp, unnormalised sizes, n = {n}, {runs} runs"
        )
        yield Mark(what, f"{less:.1%}", "37.25%", less >= 0.3725, False)


PARTS = {"counts": counts, "times": times, "hirschberg": hirschberg}
judged = stored_marks
LEGEND = """The solvers, each by itself, on knapsacks that were captured from the joint graphs of real
nets (test/corpus; those called synth were built by hand for their size). An item is a value
that can be saved: its bytes, and the flops that saving it spares. "dp" is upstream's solver,
from the untouched wheel; "Hirschberg" is what answers to its name here, against upstream's
dp. Counts should be 0, "differ" is from a proven optimum. Times are CPU seconds, medians of
interleaved runs.
"""


def page(data: Row) -> str:
    marks = judged(data["measured"])
    source = pages.measured_on(data["environment"], pages.RUN, data["measured"])
    drawn = [mark for mark in marks if "n = " in mark.what]
    short = pages.found(mark for mark in marks if mark not in drawn)
    tables = {"Sizes drawn at random": pages.found(drawn)}
    return pages.page(LEGEND, source, short, pages.limits(marks), tables)


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    for part in ("counts",) if asked.check else PARTS:
        yield {"part": part}


def measure(task: fresh.Task) -> Row:
    return {"marks": [mark._asdict() for mark in PARTS[task["part"]]()]}
