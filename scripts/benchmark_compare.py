"""Compares knapsack solvers: upstream's, this project's, and those of other libraries.

    scripts/benchmark.sh compare                             all of it
    scripts/benchmark.sh compare --families growth --largest 10000
    scripts/benchmark.sh compare --json results/compare.json

Three families of instances: the grid of pytorch#160914 (sizes far above 1, another
instance in every run), growth to a million items (sizes as the partitioner has them,
shares of the whole), and nets of the corpus. Upstream's solvers are those of the
untouched wheel, ours those of the patched checkout; OR-tools' knapsack solver and
HiGHS, through scipy's milp, stand for what else could be asked.

Each solver meets each instance in a fresh process with one thread. A process that
takes more time or memory than it may is a row that says so, and larger instances of
its family are not tried. Time is CPU time, per call. Memory is by how much the process grew
while the solver ran. Values are compared with the bound that the exact solver
proves, and with the corpus's stored optima; only answers within the budget count.
With --json a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import corpus
import fresh
import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch._functorch._activation_checkpointing import knapsack
from upstream import untouched_evaluator, untouched_knapsack


GRID, GROWTH, CORPUS = "grid", "growth", "corpus"
TITLES = {
    GRID: "grid of the pull request",
    GROWTH: "growth",
    CORPUS: "captured nets",
}
GRID_SIZES = (1, 5, 10, 20, 50, 100)
GROWTH_SIZES = (1_000, 10_000, 100_000, 1_000_000)
GROWTH_BUDGET = 0.5
CORPUS_BUDGETS = (0.1, 0.3, 0.5, 0.8)
# Of the time a process may take, what measured calls may; starting up takes some, too.
SHARE_OF_CALLS = 0.1
# Divisions that make a share may err by this much.
ROUNDING = 1e-12
# Sizes for OR-tools are whole numbers of this share of the total, rounded up.
FINEST = 2**53

# A type checker sees the wheel's module, which has less.
patched: Any = knapsack

Instance = tuple[list[float], Sequence[float], float]
# Maps (memory, runtimes, budget) to the indices of the saved items.
Solve = Callable[[list[float], Sequence[float], float], list[int]]


# ------------------------------------------------------------------ solvers


def upstream_knee(
    memory: list[float], runtimes: Sequence[float], budget: float
) -> list[int]:
    """What upstream's dispatch does for ``"dynamic_memory_budget_dp"``.

    The graph's edges are left out: the knee depends on sizes and runtimes only.
    """
    evaluator, solve = untouched_evaluator(), untouched_knapsack().dp_knapsack
    names = [str(i) for i in range(len(memory))]
    provider = evaluator.GraphInfoProvider(
        graph_nodes_in_order=names,
        graph_edges=[],
        all_recomputable_banned_nodes=names,
        recorded_knapsack_input_memories=memory,
        recorded_knapsack_input_runtimes=runtimes,
    )
    knee = evaluator.KnapsackEvaluator(provider).get_knee_point_memory_budget(
        knapsack_algo=solve, max_mem_budget=budget
    )
    saved: list[int] = solve(memory, runtimes, knee)[1]
    return saved


def integers(numbers: Sequence[float]) -> tuple[list[int], float]:
    """The numbers times a factor, rounded up, and the factor; whole ones stay."""
    total = math.fsum(numbers)
    if total < FINEST and all(float(number).is_integer() for number in numbers):
        return [int(number) for number in numbers], 1.0
    factor = FINEST / total
    return [math.ceil(number * factor) for number in numbers], factor


def or_tools(seconds: float) -> Solve:
    from ortools.algorithms.python import knapsack_solver

    def solve(
        memory: list[float], runtimes: Sequence[float], budget: float
    ) -> list[int]:
        kind = knapsack_solver.SolverType
        solver = knapsack_solver.KnapsackSolver(
            kind.KNAPSACK_MULTIDIMENSION_BRANCH_AND_BOUND_SOLVER, "compare"
        )
        solver.set_time_limit(seconds)
        sizes, factor = integers(memory)
        solver.init(integers(runtimes)[0], [sizes], [math.floor(budget * factor)])
        solver.solve()
        return [i for i in range(len(memory)) if solver.best_solution_contains(i)]

    return solve


def highs(seconds: float) -> Solve:
    import numpy
    from scipy.optimize import Bounds, LinearConstraint, milp

    def solve(
        memory: list[float], runtimes: Sequence[float], budget: float
    ) -> list[int]:
        values = numpy.array(runtimes, dtype=float)
        found = milp(
            c=-values / values.max(),
            constraints=LinearConstraint(numpy.array([memory]), ub=budget),
            integrality=numpy.ones_like(values),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 0.0, "time_limit": seconds},
        )
        if found.x is None:
            raise RuntimeError(f"HiGHS found nothing in {seconds:g} s")
        saved: list[int] = numpy.flatnonzero(found.x > 0.5).tolist()
        return saved

    return solve


def indices(solver: Callable[..., tuple[float, list[int], list[int]]]) -> Solve:
    return lambda memory, runtimes, budget: solver(memory, runtimes, budget)[1]


def of_upstream(name: str) -> Callable[[float], Solve]:
    return lambda seconds: indices(getattr(untouched_knapsack(), name))


def of_ours(name: str) -> Callable[[float], Solve]:
    return lambda seconds: indices(patched.KNAPSACK_SOLVERS[name])


# Each is made from the seconds after which a solver with a clock should stop.
SOLVERS: dict[str, Callable[[float], Solve]] = {
    "exact": of_ours("exact"),
    "dp": of_ours("dp"),
    "Hirschberg": of_ours("dp_knapsack_sliding_hirschberg"),
    "upstream greedy": of_upstream("greedy_knapsack"),
    "upstream ilp": of_upstream("ilp_knapsack"),
    "upstream dp": of_upstream("dp_knapsack"),
    "upstream Hirschberg": of_upstream("dp_knapsack_sliding_hirschberg"),
    "upstream knee": lambda seconds: upstream_knee,
    "OR-tools": or_tools,
    "HiGHS": highs,
}


# ---------------------------------------------------------------- instances


def tasks_for(arguments: argparse.Namespace) -> list[fresh.Task]:
    """Instances in the order of their size, and for each all solvers."""
    instances: list[tuple[str, str, int, int]] = []
    if GRID in arguments.families:
        instances += [
            (f"{GRID} n={n}", GRID, n, arguments.runs)
            for n in GRID_SIZES
            if n <= arguments.largest
        ]
    if GROWTH in arguments.families:
        instances += [
            (f"{GROWTH} n={n}", GROWTH, n, arguments.repeats)
            for n in GROWTH_SIZES
            if n <= arguments.largest
        ]
    if CORPUS in arguments.families:
        runs = arguments.repeats * len(CORPUS_BUDGETS)
        instances += [
            (net.name, CORPUS, len(net.memory), runs)
            for net in sorted(corpus.instances(), key=lambda net: len(net.memory))
            if len(net.memory) >= arguments.items
        ]
    return [
        {
            "solver": solver,
            "instance": name,
            "family": family,
            "n": n,
            "runs": runs,
            "seconds": arguments.seconds * SHARE_OF_CALLS,
        }
        for name, family, n, runs in instances
        for solver in arguments.solvers
    ]


@functools.lru_cache(maxsize=1)
def net_named(name: str) -> corpus.Instance:
    return next(net for net in corpus.instances() if net.name == name)


@functools.lru_cache(maxsize=1)
def growth(n: int) -> Instance:
    sizes, values, _ = corpus.uncorrelated(n, seed=n)
    total = math.fsum(sizes)
    return [size / total for size in sizes], values, GROWTH_BUDGET


def instance(task: fresh.Task, run: int) -> Instance:
    """The items and the budget of a run; another one in each run of the grid only."""
    if task["family"] == GRID:
        return corpus.unnormalised(task["n"], seed=run)
    if task["family"] == GROWTH:
        return growth(task["n"])
    net = net_named(task["instance"])
    return net.memory, net.runtimes, CORPUS_BUDGETS[run % len(CORPUS_BUDGETS)]


def bound(task: fresh.Task, run: int) -> float:
    """No feasible answer is worth more."""
    memory, runtimes, budget = instance(task, run)
    if task["family"] == CORPUS:
        return corpus.optima()[task["instance"], budget]
    return float(patched.solve_knapsack(memory, runtimes, budget).upper_bound)


# --------------------------------------------------------- in a fresh process


def measure(task: fresh.Task) -> fresh.Row:
    torch.set_num_threads(1)
    solve = SOLVERS[task["solver"]](task["seconds"])
    solve([1.0], [1.0], 2.0)  # What the first call pays once.
    instance(task, 0)
    before = fresh.reset_high_water_mark()
    times, answers = [], []
    start = time.process_time()
    for run in range(task["runs"]):
        items = instance(task, run)
        began = time.process_time()
        answers.append(solve(*items))
        ended = time.process_time()
        times.append(ended - began)
        if ended - start > task["seconds"]:
            break
    peak = fresh.high_water_mark()
    # One time alone has no quartiles.
    low, median, high = statistics.quantiles(
        times if len(times) > 1 else 2 * times, n=4, method="inclusive"
    )
    return {
        "calls": len(times),
        "median_s": median,
        "quartile_1_s": low,
        "quartile_3_s": high,
        "worst_s": max(times),
        "peak_bytes": peak,
        "grown_bytes": peak - before,
        **judged(task, answers),
    }


def judged(task: fresh.Task, answers: Sequence[Sequence[int]]) -> fresh.Row:
    """How far over the budget the answers are, and how much of the value they have."""
    kinds = {GRID: len(answers), GROWTH: 1, CORPUS: len(CORPUS_BUDGETS)}
    bounds = functools.lru_cache(maxsize=None)(functools.partial(bound, task))
    shares, overspends = [], []
    for run, saved in enumerate(answers):
        memory, runtimes, budget = instance(task, run)
        overspend = math.fsum(memory[i] for i in saved) / budget - 1
        if math.fsum(memory[i] for i in saved) > budget:
            overspends.append(overspend)
            continue
        best = bounds(run % kinds[task["family"]])
        value = math.fsum(runtimes[i] for i in saved)
        shares.append(value / best if best else 1.0)
    if shares and max(shares) > 1 + ROUNDING:
        raise RuntimeError(
            f"an answer of {task['solver']} on {task['instance']} is within the budget "
            f"and worth {max(shares)} of what was proven to be the most"
        )
    return {
        "over_budget": len(overspends),
        "worst_overspend": max(overspends, default=0.0),
        "worst_value": min(shares, default=None),
        "mean_value": statistics.fmean(shares) if shares else None,
    }


# ------------------------------------------------------------------- report


def hopeless(task: fresh.Task, rows: Sequence[fresh.Row]) -> Optional[str]:
    """Why there is no use in trying, where a smaller instance was too much."""
    if task["family"] == CORPUS:
        return None
    for row in rows:
        same = all(row[key] == task[key] for key in ("solver", "family"))
        if same and fresh.over_limit(row):
            return f"not tried: with {row['n']:,} items it {row['error']}"
    return None


def summary(rows: Sequence[fresh.Row]) -> fresh.Row:
    """What all of one solver's rows of a family come to."""
    done = [row for row in rows if "error" not in row]
    values = [row["worst_value"] for row in done if row["worst_value"] is not None]
    return {
        "calls": sum(row["calls"] for row in done),
        "over_budget": sum(row["over_budget"] for row in done),
        "worst_overspend": max((row["worst_overspend"] for row in done), default=0.0),
        "worst_value": min(values, default=None),
    }


def table(rows: Sequence[fresh.Row]) -> Table:
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("instance", no_wrap=True)
    result.add_column("solver", no_wrap=True)
    for heading in (
        "calls",
        "median ms",
        "quartiles",
        "grown\nMB",
        "over\nbudget",
        "by at\nmost",
        "least\nvalue",
    ):
        result.add_column(heading, justify="right", no_wrap=True)
    before = None
    for row in rows:
        name = row["instance"] if row["instance"] != before else ""
        before = row["instance"]
        if "error" in row:
            result.add_row(name, row["solver"], "", f"[yellow]{row['error']}[/]")
            continue
        value = row["worst_value"]
        result.add_row(
            name,
            row["solver"],
            f"{row['calls']:,}",
            f"{row['median_s'] * 1e3:,.3f}",
            f"{row['quartile_1_s'] * 1e3:,.3f} to {row['quartile_3_s'] * 1e3:,.3f}",
            f"{row['grown_bytes'] / 1e6:,.1f}",
            f"{row['over_budget']:,}",
            f"{row['worst_overspend']:.2%}" if row["over_budget"] else "",
            "-" if value is None else f"{value:.6f}",
        )
    return result


def plot(rows: Sequence[fresh.Row], facts: dict[str, Any], result: Path) -> None:
    """Time and memory against items, and what is over budget; beside ``result``."""
    figure = Figure(figsize=(12, 9), dpi=110)
    (grid, growing), (memory, over) = figure.subplots(2, 2)
    solvers = list(dict.fromkeys(row["solver"] for row in rows))
    styles = {solver: style(solver, place) for place, solver in enumerate(solvers)}
    for axes, family, key, factor in (
        (grid, GRID, "median_s", 1e3),
        (growing, GROWTH, "median_s", 1e3),
        (memory, GROWTH, "grown_bytes", 1e-6),
    ):
        for solver in solvers:
            line = [
                row
                for row in rows
                if row["solver"] == solver and row["family"] == family
            ]
            done = [row for row in line if "error" not in row]
            x = [row["n"] for row in done]
            # Less than a megabyte is noise, and nothing has no place on such an axis.
            y = [max(row[key] * factor, 1 if axes is memory else 0) for row in done]
            axes.plot(x, y, label=solver, **styles[solver])
            if done and len(done) < len(line):
                axes.plot(x[-1], y[-1], "x", ms=13, mew=2, c=styles[solver]["color"])
        if any(len(line.get_xdata()) for line in axes.lines):
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.set_xlabel("items")
        axes.grid(alpha=0.3)
    grid.set_ylabel("median CPU time of a call, ms")
    grid.set_title("Time, grid of the pull request (unnormalised sizes)", loc="left")
    growing.set_ylabel("median CPU time of a call, ms")
    growing.set_title(
        "Time, sizes as in the partitioner; X: the next failed", loc="left"
    )
    memory.set_ylabel("growth of the process, MB, at least 1")
    memory.set_title("Memory, sizes as in the partitioner", loc="left")
    families = [
        family for family in TITLES if any(row["family"] == family for row in rows)
    ]
    height = 0.8 / max(1, len(families))
    for place, family in enumerate(families):
        found = [
            summary([r for r in rows if (r["solver"], r["family"]) == (s, family)])
            for s in solvers
        ]
        shares = [100 * f["over_budget"] / max(1, f["calls"]) for f in found]
        places = [index + place * height for index in range(len(solvers))]
        over.barh(places, shares, height=height * 0.9, label=TITLES[family])
        for at, share, each in zip(places, shares, found):
            text = " none" if each["calls"] else " no answer"
            if each["over_budget"]:
                most = 100 * each["worst_overspend"]
                text = f" {share:.3g} %, by up to {most:.3g} %"
            over.text(share, at, text, va="center", fontsize=6.5)
    over.set_yticks([i + 0.4 - height / 2 for i in range(len(solvers))], solvers)
    over.invert_yaxis()
    over.set_xlim(0, 135)
    over.set_xlabel("answers over the budget, %; by up to how much of it")
    over.set_title("Budgets not kept", loc="left")
    over.legend(fontsize=8, loc="lower right")
    for axes in (grid, growing, memory, over):
        axes.spines[["top", "right"]].set_visible(False)
    low, high = grid.get_ylim()
    grid.set_ylim(low, high * 1e3)
    grid.legend(fontsize=8, ncols=2, loc="upper left")
    fresh.save(figure, result, facts)


def style(solver: str, place: int) -> dict[str, Any]:
    """Ours are drawn through, upstream's dashed, others dotted."""
    theirs = solver.startswith("upstream")
    ours = not theirs and solver not in ("OR-tools", "HiGHS")
    return {
        "color": f"C{place}",
        "ls": "-" if ours else "--" if theirs else ":",
        # What lies under another line still shows.
        "lw": max(1.3, 3.5 - 0.8 * place) if ours else 1.3,
        "marker": "o",
        "ms": 4,
    }


def faults(rows: Sequence[fresh.Row]) -> list[str]:
    """What the exact solver must not do: fail, be over the budget, miss the optimum."""
    found = []
    for row in rows:
        if row["solver"] != "exact":
            continue
        if "error" in row:
            found.append(f"{row['instance']}: {row['error']}")
        elif row["over_budget"] or not row["worst_value"] >= 1 - ROUNDING:
            found.append(
                f"{row['instance']}: {row['over_budget']} of {row['calls']} answers are "
                f"over the budget, the least value is {row['worst_value']}"
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark.sh compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--families",
        nargs="+",
        choices=TITLES,
        default=tuple(TITLES),
        metavar="NAME",
        help=f"some of: {', '.join(TITLES)} (default: all)",
    )
    parser.add_argument(
        "--solvers",
        nargs="+",
        choices=SOLVERS,
        default=tuple(SOLVERS),
        metavar="NAME",
        help=f"some of: {', '.join(SOLVERS)} (default: all)",
    )
    parser.add_argument(
        "--runs",
        type=fresh.positive,
        default=1000,
        help="instances per size of the grid, as many as there is time for "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--largest",
        type=fresh.positive,
        default=max(GROWTH_SIZES),
        metavar="N",
        help="most items of the grid and of growth (default: %(default)s)",
    )
    parser.add_argument(
        "--items",
        type=fresh.positive,
        default=500,
        help="least items of a net of the corpus (default: %(default)s; 1: all nets)",
    )
    fresh.add_options(parser, repeats=3, seconds=30, gigabytes=4)
    parser.add_argument(
        "--check",
        action="store_true",
        help="few instances; exit status 1 if the exact solver is over a budget or "
        "misses an optimum",
    )
    arguments = parser.parse_args()
    if not hasattr(patched, "KNAPSACK_SOLVERS"):
        raise SystemExit("this torch is not patched; run scripts/benchmark.sh compare")
    if arguments.check:
        arguments.solvers, arguments.families = ["exact"], [GRID, GROWTH]
        arguments.largest, arguments.runs = min(GROWTH_SIZES), 20
    tasks = [(task, fresh.python_path(True)) for task in tasks_for(arguments)]
    console = Console()
    console = Console(width=max(console.width, 140))
    limits = fresh.Limits(arguments.seconds, arguments.gigabytes)
    rows = fresh.run(__file__, tasks, limits, arguments.json, console, hopeless)
    facts = {
        **fresh.environment("numpy", "scipy", "ortools"),
        "limit_s": limits.seconds,
        "limit_gb": limits.gigabytes,
        "repeats": arguments.repeats,
        "seeds": "grid: the number of the run, growth: the number of items",
        "grid_runs": arguments.runs,
        "growth_budget": GROWTH_BUDGET,
        "corpus_budgets": CORPUS_BUDGETS,
    }
    console.print(table(rows))
    if arguments.json:
        fresh.finish(arguments.json, facts, rows)
        plot(rows, facts, arguments.json)
    found = faults(rows) if arguments.check else []
    for fault in found:
        console.print(f"[red]FAILED[/] {fault}", highlight=False)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(fresh.answer(measure) if fresh.is_child() else main())
