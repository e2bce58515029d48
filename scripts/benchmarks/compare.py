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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from matplotlib.figure import Figure
from torch._functorch._activation_checkpointing import knapsack
from upstream import untouched_evaluator, untouched_knapsack

from benchmarks import corpus, fresh, options
from benchmarks.results import (
    environment,
    fail,
    markdown,
    measured_on,
    Row,
    save,
)


GRID, GROWTH, CORPUS = "grid", "growth", "corpus"
FAMILIES = (GRID, GROWTH, CORPUS)
GRID_SIZES = (1, 5, 10, 20, 50, 100)
GROWTH_SIZES = (1_000, 10_000, 100_000, 1_000_000)
GROWTH_BUDGET = 0.5
CORPUS_BUDGETS = (0.1, 0.3, 0.5, 0.8)
# Smaller nets tell no solvers apart.
CORPUS_ITEMS = 500
# Of the time a process may take, what measured calls may; starting up takes some, too.
SHARE_OF_CALLS = 0.1
# Divisions that make a share may err by this much.
ROUNDING = 1e-12
NOT_TRIED = "not tried"
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


def tasks_for(arguments: argparse.Namespace, runs: int) -> list[fresh.Task]:
    """Instances in the order of their size, and for each all solvers."""
    repeats = arguments.repeats
    instances = [(f"{GRID} n={n}", GRID, n, runs) for n in GRID_SIZES]
    instances += [(f"{GROWTH} n={n}", GROWTH, n, repeats) for n in GROWTH_SIZES]
    instances = [each for each in instances if each[2] <= arguments.largest]
    instances += [
        (net.name, CORPUS, len(net.memory), repeats * len(CORPUS_BUDGETS))
        for net in sorted(corpus.instances(), key=lambda net: len(net.memory))
        if len(net.memory) >= CORPUS_ITEMS
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
        if family in arguments.families
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


def measure(task: fresh.Task) -> Row:
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
    grown = fresh.high_water_mark() - before
    return {
        "calls": len(times),
        "median_s": statistics.median(times),
        "worst_s": max(times),
        "grown_bytes": grown,
        **judged(task, answers),
    }


def judged(task: fresh.Task, answers: Sequence[Sequence[int]]) -> Row:
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
    }


# ------------------------------------------------------------------- report


def hopeless(task: fresh.Task, rows: Sequence[Row]) -> Optional[str]:
    """Why there is no use in trying, where a smaller instance was too much."""
    if task["family"] == CORPUS:
        return None
    for row in rows:
        same = all(row[key] == task[key] for key in ("solver", "family"))
        if same and fresh.over_limit(row):
            return f"{NOT_TRIED}: with {row['n']:,} items it {row['error']}"
    return None


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
    if part < ROUNDING:
        return "0"
    return f"{part:.2%}" if part >= 1e-4 else f"{part:.0e}"


def milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def by_solver(rows: Sequence[Row], family: str) -> dict[str, list[Row]]:
    solvers = dict.fromkeys(row["solver"] for row in rows)
    return {
        solver: [r for r in rows if (r["solver"], r["family"]) == (solver, family)]
        for solver in solvers
    }


def by_size(rows: Sequence[Row], family: str) -> str:
    """A line for each solver, a column for each number of items."""
    sizes = dict.fromkeys(row["n"] for row in rows if row["family"] == family)
    lines = []
    for solver, mine in by_solver(rows, family).items():
        line = [solver]
        for row in mine:
            if "error" not in row:
                few = row["runs"] > row["calls"] and family == GRID
                time, size = milliseconds(row["median_s"]), row["grown_bytes"] / 1e6
                line.append(f"{time} / {size:,.0f}" + few * f" ({row['calls']})")
            else:
                tried = not row["error"].startswith(NOT_TRIED)
                line.append(row["error"] if tried else "-")
        lines.append([*line, *kept(mine)])
    return markdown(["solver", *(f"{n:,}" for n in sizes), *KEPT], lines)


def by_net(rows: Sequence[Row]) -> str:
    """A line for each solver, over all nets of the corpus."""
    lines = []
    for solver, mine in by_solver(rows, CORPUS).items():
        done = [row for row in mine if "error" not in row]
        line = [solver, f"{len(done)} of {len(mine)}", "-", "-", "-"]
        if done:
            times = [row["median_s"] for row in done]
            grown = max(row["grown_bytes"] for row in done)
            line[2:] = milliseconds(min(times)), milliseconds(max(times))
            line.append(f"{grown / 1e6:,.0f}")
        errors = dict.fromkeys(row["error"] for row in mine if "error" in row)
        lines.append([*line, *kept(mine), "; ".join(errors)])
    heading = ("solver", "nets", "least ms", "most ms", "most MB", *KEPT, "errors")
    return markdown(heading, lines)


def page(data: dict[str, Any]) -> str:
    rows, facts = data["rows"], data["environment"]
    families = {row["family"] for row in rows}
    text = ""
    if GRID in families:
        text += (
            f"Grid of the pull request, {facts['grid_runs']:,} instances per size (in brackets: as many as "
            "there was time for), median ms of a call / MB by which the process grew, by items:\n\n"
            f"{by_size(rows, GRID)}\n"
        )
    if GROWTH in families:
        text += (
            f"Growth, sizes as in the partitioner, budget {facts['growth_budget']:g}, the same:\n\n"
            f"{by_size(rows, GROWTH)}\n"
        )
    if CORPUS in families:
        nets = dict.fromkeys(r["instance"] for r in rows if r["family"] == CORPUS)
        budgets = ", ".join(f"{budget:g}" for budget in facts["corpus_budgets"])
        text += (
            f"Captured nets ({', '.join(nets)}), budgets {budgets}, each asked "
            f"{facts['repeats']} times, median ms of a net's calls:\n\n{by_net(rows)}\n"
        )
    return text + (
        f"CPU time. A process may take {facts['limit_s']:g} s and {facts['limit_gb']:g} GB. "
        "Loses: of the proven optimum, by answers within the budget. "
        f"OR-tools {facts['ortools']}, scipy {facts['scipy']}, {measured_on(facts)}"
    )


def plot(data: dict[str, Any], result: Path) -> None:
    """Time and memory against items; written beside ``result``."""
    rows = data["rows"]
    figure = Figure(figsize=(15, 5), dpi=110)
    for axes, (family, key, factor, title) in zip(
        figure.subplots(1, 3),
        (
            (GRID, "median_s", 1e3, "CPU ms of a call, grid of the pull request"),
            (GROWTH, "median_s", 1e3, "CPU ms of a call, sizes as in the partitioner"),
            (GROWTH, "grown_bytes", 1e-6, "MB grown, at least 1, the same"),
        ),
    ):
        for place, (solver, line) in enumerate(by_solver(rows, family).items()):
            done = [row for row in line if "error" not in row]
            x = [row["n"] for row in done]
            # Less than a megabyte is noise, and nothing has no place on such an axis.
            least = 1 if key == "grown_bytes" else 0
            y = [max(row[key] * factor, least) for row in done]
            look = style(solver, place)
            axes.plot(x, y, label=solver, **look)
            if done and len(done) < len(line):
                axes.plot(x[-1], y[-1], "x", ms=13, mew=2, c=look["color"])
        if any(row["family"] == family and "error" not in row for row in rows):
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.set_xlabel("items; X: the next failed")
        axes.set_title(title, loc="left")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, result, data["environment"])


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


def faults(rows: Sequence[Row]) -> list[str]:
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
    parser = options.parser(
        __doc__,
        check="few instances; exit status 1 if the exact solver is over a budget or "
        "misses an optimum",
    )
    for name, known in (("--families", FAMILIES), ("--solvers", SOLVERS)):
        parser.add_argument(
            name,
            nargs="+",
            choices=known,
            default=tuple(known),
            metavar="NAME",
            help=f"some of: {', '.join(known)} (default: all)",
        )
    parser.add_argument(
        "--largest",
        type=options.positive,
        default=max(GROWTH_SIZES),
        metavar="N",
        help="most items of the grid and of growth (default: %(default)s)",
    )
    options.add_limits(parser, repeats=3, seconds=30, gigabytes=4)
    arguments = parser.parse_args()
    runs = 1000
    if arguments.check:
        arguments.solvers, arguments.families = ["exact"], [GRID, GROWTH]
        arguments.largest, runs = min(GROWTH_SIZES), 20
    limits = fresh.Limits(arguments.seconds, arguments.gigabytes)
    tasks = tasks_for(arguments, runs)
    rows = fresh.run(__name__, tasks, limits, arguments.json, hopeless)
    facts = {
        **environment("numpy", "scipy", "ortools"),
        "limit_s": limits.seconds,
        "limit_gb": limits.gigabytes,
        "repeats": arguments.repeats,
        "seeds": "grid: the number of the run, growth: the number of items",
        "grid_runs": runs,
        "growth_budget": GROWTH_BUDGET,
        "corpus_budgets": CORPUS_BUDGETS,
    }
    data = {"environment": facts, "rows": rows}
    fresh.finish(arguments.json, data, page, plot)
    return fail(faults(rows) if arguments.check else [])
