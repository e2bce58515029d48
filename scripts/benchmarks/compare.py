"""Compares knapsack solvers: upstream's, this project's, and those of other libraries.

    scripts/benchmark.sh compare                             all of it
    scripts/benchmark.sh compare --check                     some counts, as CI does
    scripts/benchmark.sh compare --json results/compare.json

Three families of instances: the grid of pytorch#160914 (sizes far above 1, another
instance in every run), growth to a million items (sizes as the partitioner has them,
shares of the whole), and nets of the corpus. Upstream's solvers are those of the
untouched wheel, ours those of the patched checkout; OR-tools' knapsack solver and
HiGHS, through scipy's milp, stand for what else could be asked.

Each solver meets each instance in a fresh process with one thread. A process that
takes more time or memory than it may is a row that says so. Time is CPU time, per call.
Memory is by how much the process grew while the solver ran. Values are compared with
the bound that the exact solver proves, and with the corpus's stored optima; only
answers within the budget count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch._activation_checkpointing import knapsack
from upstream import untouched_knapsack

from benchmarks import corpus, fresh, options, solvers
from benchmarks.results import environment, fail, markdown, measured_on, Row


GRID, GROWTH, CORPUS = "grid", "growth", "corpus"
GRID_SIZES = (1, 5, 10, 20, 50, 100)
GROWTH_SIZES = (1_000, 10_000, 100_000, 1_000_000)
CHECKED_SIZES = (10, 100, 1_000)
GROWTH_BUDGET = 0.5
CORPUS_BUDGETS = (0.1, 0.3, 0.5, 0.8)
# Smaller nets tell no solvers apart.
CORPUS_ITEMS = 500
GRID_RUNS = 1000
REPEATS = 3
LIMITS = fresh.Limits(seconds=40, gigabytes=4)
# Of these, what measured calls may take; starting up takes some, too.
SECONDS_OF_CALLS = 4.0
# Sizes for OR-tools are whole numbers of this share of the total, rounded up.
FINEST = 2**53

Instance = tuple[list[float], Sequence[float], float]
# Maps (memory, runtimes, budget) to the indices of the saved items.
Solve = Callable[[list[float], Sequence[float], float], list[int]]


# ------------------------------------------------------------------ solvers


def integers(numbers: Sequence[float]) -> tuple[list[int], float]:
    """The numbers times a factor, rounded up, and the factor; whole ones stay."""
    total = math.fsum(numbers)
    if total < FINEST and all(float(number).is_integer() for number in numbers):
        return [int(number) for number in numbers], 1.0
    factor = FINEST / total
    return [math.ceil(number * factor) for number in numbers], factor


def or_tools(
    memory: list[float], runtimes: Sequence[float], budget: float
) -> list[int]:
    from ortools.algorithms.python import knapsack_solver

    kind = knapsack_solver.SolverType
    solver = knapsack_solver.KnapsackSolver(
        kind.KNAPSACK_MULTIDIMENSION_BRANCH_AND_BOUND_SOLVER, "compare"
    )
    solver.set_time_limit(SECONDS_OF_CALLS)
    sizes, factor = integers(memory)
    solver.init(integers(runtimes)[0], [sizes], [math.floor(budget * factor)])
    solver.solve()
    return [i for i in range(len(memory)) if solver.best_solution_contains(i)]


def highs(memory: list[float], runtimes: Sequence[float], budget: float) -> list[int]:
    import numpy
    from scipy.optimize import Bounds, LinearConstraint, milp

    values = numpy.array(runtimes, dtype=float)
    found = milp(
        c=-values / values.max(),
        constraints=LinearConstraint(numpy.array([memory]), ub=budget),
        integrality=numpy.ones_like(values),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": SECONDS_OF_CALLS},
    )
    if found.x is None:
        raise RuntimeError(f"HiGHS found nothing in {SECONDS_OF_CALLS:g} s")
    saved: list[int] = numpy.flatnonzero(found.x > 0.5).tolist()
    return saved


def of(module: Callable[[], Any], name: str) -> Solve:
    """A solver of the set or of the wheel, looked up when it is called."""
    return lambda *instance: getattr(module(), name)(*instance)[1]


def patched() -> Any:
    # A type checker sees the wheel's module, which has less.
    return knapsack


SOLVERS: dict[str, Solve] = {
    "exact": of(patched, "exact_knapsack"),
    "dp": of(patched, "dp_knapsack"),
    "Hirschberg": of(patched, "dp_knapsack_sliding_hirschberg"),
    "upstream greedy": of(untouched_knapsack, "greedy_knapsack"),
    "upstream ilp": of(untouched_knapsack, "ilp_knapsack"),
    "upstream dp": of(untouched_knapsack, "dp_knapsack"),
    "upstream Hirschberg": of(untouched_knapsack, "dp_knapsack_sliding_hirschberg"),
    "OR-tools": or_tools,
    "HiGHS": highs,
}


# ---------------------------------------------------------------- instances


def tasks() -> list[fresh.Task]:
    """Instances in the order of their size, and for each all solvers."""
    instances = [(f"{GRID} n={n}", GRID, n, GRID_RUNS) for n in GRID_SIZES]
    instances += [(f"{GROWTH} n={n}", GROWTH, n, REPEATS) for n in GROWTH_SIZES]
    instances += [
        (net.name, CORPUS, len(net.memory), REPEATS * len(CORPUS_BUDGETS))
        for net in sorted(corpus.instances(), key=lambda net: len(net.memory))
        if len(net.memory) >= CORPUS_ITEMS
    ]
    return [
        {"solver": solver, "instance": name, "family": family, "n": n, "runs": runs}
        for name, family, n, runs in instances
        for solver in SOLVERS
    ]


def problems(task: fresh.Task) -> list[Instance]:
    """What the runs of a task ask, in turns: another one in each run of the grid."""
    if task["family"] == GRID:
        return [corpus.unnormalised(task["n"], seed=run) for run in range(task["runs"])]
    if task["family"] == GROWTH:
        sizes, values, _ = corpus.uncorrelated(task["n"], seed=task["n"])
        total = math.fsum(sizes)
        return [([size / total for size in sizes], values, GROWTH_BUDGET)]
    (net,) = (net for net in corpus.instances() if net.name == task["instance"])
    return [(net.memory, net.runtimes, budget) for budget in CORPUS_BUDGETS]


def bound(task: fresh.Task, problem: Instance) -> float:
    """No feasible answer is worth more."""
    if task["family"] == CORPUS:
        return corpus.optima()[task["instance"], problem[2]]
    return float(solvers.exact().solve_knapsack(*problem).upper_bound)


# --------------------------------------------------------- in a fresh process


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    solve = SOLVERS[task["solver"]]
    solve([1.0], [1.0], 2.0)  # What the first call pays once.
    asked = problems(task)
    before = fresh.reset_high_water_mark()
    times: list[float] = []
    answers = []
    for run in range(task["runs"]):
        began = time.process_time()
        answers.append(solve(*asked[run % len(asked)]))
        times.append(time.process_time() - began)
        if sum(times) > SECONDS_OF_CALLS:
            break
    grown = fresh.high_water_mark() - before
    return {
        "calls": len(times),
        "median_s": statistics.median(times),
        "worst_s": max(times),
        "grown_bytes": grown,
        **judged(task, asked, answers),
    }


def judged(
    task: fresh.Task, asked: Sequence[Instance], answers: Sequence[Sequence[int]]
) -> Row:
    """How far over the budget the answers are, and how much of the value they have."""
    bounds = [bound(task, problem) for problem in asked[: len(answers)]]
    shares, overspends = [], []
    for run, saved in enumerate(answers):
        memory, runtimes, budget = asked[run % len(asked)]
        used = corpus.used(memory, saved)
        if used > budget:
            overspends.append(used / budget - 1)
            continue
        best = bounds[run % len(asked)]
        value = math.fsum(runtimes[i] for i in saved)
        shares.append(value / best if best else 1.0)
    if shares and max(shares) > 1 + corpus.ROUNDING:
        raise RuntimeError(
            f"an answer of {task['solver']} on {task['instance']} is within the budget "
            f"and worth {max(shares)} of what was proven to be the most"
        )
    return {
        "over_budget": len(overspends),
        "worst_overspend": max(overspends, default=0.0),
        "worst_value": min(shares, default=None),
    }


# ------------------------------------------------------------------- report


KEPT = ("answers over budget", "by up to", "loses up to")


def kept(rows: Sequence[Row]) -> list[str]:
    """How the answers kept the budget, and how far below the optimum those are."""
    done = [row for row in rows if "error" not in row]
    over = sum(row["over_budget"] for row in done)
    text = f"{over:,} of {sum(row['calls'] for row in done):,}"
    most = max((row["worst_overspend"] for row in done), default=0.0)
    values = [row["worst_value"] for row in done if row["worst_value"] is not None]
    return [
        f"**{text}**" if over else text,
        share(most) if over else "",
        share(1 - min(values)) if values else "-",
    ]


def share(part: float) -> str:
    """A share of something: in percent where that has digits to show."""
    if part < corpus.ROUNDING:
        return "0"
    return f"{part:.2%}" if part >= 1e-4 else f"{part:.0e}"


def milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def by_instance(rows: Sequence[Row], family: str) -> str:
    """A line for each solver, a column for each instance, named by its items."""
    rows = [row for row in rows if row["family"] == family]
    sizes = dict.fromkeys((row["instance"], f"{row['n']:,}") for row in rows)
    lines = []
    for solver in dict.fromkeys(row["solver"] for row in rows):
        mine = [row for row in rows if row["solver"] == solver]
        line = [solver]
        for row in mine:
            if "error" not in row:
                few = row["runs"] > row["calls"] and family == GRID
                time, size = milliseconds(row["median_s"]), row["grown_bytes"] / 1e6
                line.append(f"{time} / {size:,.0f}" + few * f" ({row['calls']})")
            else:
                line.append(row["error"])
        lines.append([*line, *kept(mine)])
    return markdown(["solver", *(n for _, n in sizes), *KEPT], lines)


def page(data: dict[str, Any]) -> str:
    rows, facts = data["rows"], data["environment"]
    nets = dict.fromkeys(r["instance"] for r in rows if r["family"] == CORPUS)
    budgets = ", ".join(f"{budget:g}" for budget in facts["corpus_budgets"])
    titles = {
        GRID: f"Grid of the pull request, {facts['grid_runs']:,} instances per size (in brackets: as many as "
        "there was time for), median ms of a call / MB by which the process grew, by items",
        GROWTH: f"Growth, sizes as in the partitioner, budget {facts['growth_budget']:g}, the same",
        CORPUS: f"Captured nets ({', '.join(nets)}), budgets {budgets}, each asked {facts['repeats']} times, the same",
    }
    text = "".join(
        f"{title}:\n\n{by_instance(rows, family)}\n"
        for family, title in titles.items()
        if any(row["family"] == family for row in rows)
    )
    return text + (
        f"CPU time. A process may take {facts['limit_s']:g} s and {facts['limit_gb']:g} GB. "
        "Loses: of the proven optimum, by answers within the budget. "
        f"OR-tools {facts['ortools']}, scipy {facts['scipy']}. {measured_on(facts)}"
    )


def faults(rows: Sequence[Row]) -> list[str]:
    """What the exact solver must not do: fail, be over the budget, miss the optimum."""
    found = []
    for row in rows:
        if row["solver"] != "exact":
            continue
        if "error" in row:
            found.append(f"{row['instance']}: {row['error']}")
        elif row["over_budget"] or not row["worst_value"] >= 1 - corpus.ROUNDING:
            found.append(
                f"{row['instance']}: {row['over_budget']} of {row['calls']} answers are "
                f"over the budget, the least value is {row['worst_value']}"
            )
    return found


def main() -> int:
    parser = options.parser(
        __doc__,
        check="few instances; exit status 1 if the exact solver is over a budget or "
        "misses an optimum",
    )
    arguments = parser.parse_args()
    wanted = tasks()
    if arguments.check:
        wanted = [
            {**task, "runs": min(task["runs"], 20)}
            for task in wanted
            if task["solver"] == "exact" and task["n"] in CHECKED_SIZES
        ]
    rows = fresh.run(__name__, wanted, LIMITS)
    facts = {
        **environment("numpy", "scipy", "ortools"),
        "limit_s": LIMITS.seconds,
        "limit_gb": LIMITS.gigabytes,
        "repeats": REPEATS,
        "seeds": "grid: the number of the run, growth: the number of items",
        "grid_runs": GRID_RUNS,
        "growth_budget": GROWTH_BUDGET,
        "corpus_budgets": CORPUS_BUDGETS,
    }
    fresh.finish(arguments.json, {"environment": facts, "rows": rows}, page)
    return fail(faults(rows) if arguments.check else [])
