"""The patch set as one table: every patch, its edits, and the releases they fit.

Everything else (the checked-in patches, the manifest, the exported series, what
``apply_patch.sh`` does) is derived from ``SERIES`` and the files in
``torch_overlay/``. To change what is patched, change this file and run
``scripts/generate_patches.sh``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Optional


REPOSITORY = Path(__file__).resolve().parents[2]
OVERLAY = REPOSITORY / "torch_overlay"

RELEASES = (
    "2.6.0",
    "2.7.1",
    "2.8.0",
    "2.9.1",
    "2.10.0",
    "2.11.0",
    "2.12.1",
    "2.13.0",
    "2.14.1",
    "2.15.0",
)

PARTITIONERS = "torch/_functorch/partitioners.py"
CONFIG = "torch/_functorch/config.py"
KNAPSACK = "torch/_functorch/_activation_checkpointing/knapsack.py"
EXACT = "torch/_functorch/_activation_checkpointing/knapsack_exact.py"
EVALUATOR = "torch/_functorch/_activation_checkpointing/knapsack_evaluator.py"


def minor(version: str) -> tuple[int, int]:
    """``"2.13.0a0+git1"`` -> ``(2, 13)``; ValueError where that cannot be read."""
    major, _, rest = version.partition(".")
    return int(major), int(rest.partition(".")[0])


@dataclass(frozen=True)
class Edit:
    """One replacement in one file that is not ours.

    ``anchor`` must occur exactly once in the file. Where the text to replace is
    longer, it runs from ``anchor`` to the end of the next ``through``, and
    ``digest`` (first 16 hex digits of its SHA-256) pins it, so that upstream's
    lines need not stand here and no unknown line can be swallowed.
    ``inside`` names the function that must hold the new text, None the module
    level. The edit is for releases ``since`` to ``until``, both included.
    """

    path: str
    anchor: str
    replacement: str
    inside: Optional[str] = None
    since: tuple[int, int] = (2, 6)
    until: Optional[tuple[int, int]] = None
    through: Optional[str] = None
    digest: Optional[str] = None

    def fits(self, release: str) -> bool:
        return self.since <= minor(release) and (
            self.until is None or minor(release) <= self.until
        )

    def locate(self, text: str) -> tuple[int, int]:
        """Start and end of the text to replace; LookupError says what is off."""
        count = text.count(self.anchor)
        if count != 1:
            line = self.anchor.strip().splitlines()[0]
            raise LookupError(f"{self.path}: {line!r} occurs {count} times, not once")
        start = text.index(self.anchor)
        end = start + len(self.anchor)
        if self.through is not None:
            last = text.find(self.through, end)
            if last < 0:
                raise LookupError(
                    f"{self.path}: no {self.through.strip()!r} after "
                    f"{self.anchor.strip()!r}"
                )
            end = last + len(self.through)
            found = hashlib.sha256(text[start:end].encode()).hexdigest()[:16]
            if found != self.digest:
                number = text.count("\n", 0, start) + 1
                raise LookupError(
                    f"{self.path}:{number}: the lines from {self.anchor.strip()!r} on "
                    f"have digest {found}, not {self.digest}"
                )
        return start, end


@dataclass(frozen=True)
class Fault:
    """What is wrong with upstream's own version, and how its text shows it.

    The fault is there when all of ``texts`` are in the file, or when ``missing``
    is not.
    """

    what: str
    path: str
    texts: tuple[str, ...] = ()
    missing: Optional[str] = None

    def found(self, text: str) -> bool:
        if self.missing is not None:
            return self.missing not in text
        return all(part in text for part in self.texts)


@dataclass(frozen=True)
class Patch:
    """One topic: whole files of the overlay, edits, and the words for a reviewer.

    ``landed`` lists (path, text) pairs that are all present where upstream
    already has the feature; ``faults`` is what may still be wrong with it there.
    """

    name: str
    subject: str
    why: str
    trailers: tuple[str, ...]
    tested: str
    files: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    landed: tuple[tuple[str, str], ...] = ()
    faults: tuple[Fault, ...] = ()

    def paths(self) -> tuple[str, ...]:
        return self.files + tuple(dict.fromkeys(e.path for e in self.edits))


def _unknown_solver(others: str) -> str:
    return f'''\
        raise RuntimeError(
            f"Unknown activation_memory_budget_solver {{SOLVER!r}}: known are "
            f"{{', '.join(KNAPSACK_SOLVERS)}}, "
            "{others}"
        )
'''


_OLD_ERROR = (
    "        raise RuntimeError("
    'f"Not aware of memory budget knapsack solver: {SOLVER}")\n'
)
_OLD_IMPORT = "from ._activation_checkpointing.knapsack import (\n"
_NEW_IMPORT = (
    "from ._activation_checkpointing.knapsack import dp_knapsack, KNAPSACK_SOLVERS\n"
)
_DISPATCH = "_optimize_runtime_with_given_memory"
_LOOK_UP = """\
    if isinstance(SOLVER, str) and SOLVER in KNAPSACK_SOLVERS:
        return KNAPSACK_SOLVERS[SOLVER](memory, runtimes, max_memory)
"""

_KNAPSACK_MODULE = "torch._functorch._activation_checkpointing.knapsack"
_SIGNATURE = "    def get_saved_values_knapsack("
_TYPED_PARAMETERS = """\
        memory_budget: float, node_info: NodeInfo, joint_graph: fx.Graph
    ) -> tuple[list[fx.Node], float]:
"""
_CURVE = """\
        # The whole curve from one call, and one min cut for each distinct set.
        def solve(
            memory: list[float], runtimes: list[float], max_memory: float
        ) -> tuple[float, list[int], list[int]]:
            return _optimize_runtime_with_given_memory(
                joint_graph,
                memory,
                runtimes,
                max_memory,
                node_info,
                all_recomputable_banned_nodes,
            )

        solver_name = str(config.activation_memory_budget_solver)
        budgets = [percent / 100 for percent in range(101)]
        with no_dispatch():
            solutions = solve_budgets(
                KNAPSACK_SOLVERS.get(solver_name, solve),
                memories_banned_nodes,
                runtimes_banned_nodes,
                budgets,
            )
        options: list[tuple[float, float, float]] = []
        previous: list[int] | None = None
        for budget, solution in zip(budgets, solutions):
            if solution[1] == previous:
                continue
            previous = solution[1]
            saved_values, expected_runtime = get_saved_values_knapsack(
                budget, node_info, joint_graph, solution
            )
            options.append(
                (
                    budget,
                    sum(runtimes_banned_nodes) - expected_runtime,
                    get_mem_ratio(saved_values),
                )
            )
"""
_DEFAULT = """\
# The solver that picks what is saved: "exact" (optimal on the true sizes and never
# over the budget), "dp" (optimal on sizes rounded to 1/10000 of the range),
# "dp_knapsack_sliding_hirschberg" (as "dp", in memory for a few rows), "greedy", or
# "ilp" (needs scipy).
activation_memory_budget_solver = "exact"
"""


def _default(
    digest: str, since: tuple[int, int], until: Optional[tuple[int, int]]
) -> Edit:
    return Edit(
        CONFIG,
        anchor="# This controls the solver used for the 0-1 knapsack. "
        "By default we use a\n",
        through='activation_memory_budget_solver = "dp"\n',
        digest=digest,
        replacement=_DEFAULT,
        since=since,
        until=until,
    )


SERIES = (
    Patch(
        name="exact-solver",
        subject="Add an exact knapsack solver for the activation memory budget",
        why="""\
Every solver there is either overspends the budget or loses runtime: dp rounds
sizes to 1/10000 of the range, so that on real joint graphs it ends up to 19 %
over, rounding up instead gives away up to 23 % of the value, and greedy has no
bound. Real graphs repeat their layers, so their hundreds of items are copies of
5 to 60 distinct ones, and the problem on the true sizes is small.

The new module solves it: integers without loss, Dantzig's bound, a core that
grows around the break item, Pareto states. The answer never weighs more than the
budget, is the proven optimum (or says how far it can be from it), and depends on
nothing but the arguments. Many budgets share one preparation.
""",
        trailers=("Upstream-PR: pytorch/pytorch#160914",),
        tested="python test/functorch/test_ac_knapsack_exact.py",
        files=(EXACT, "test/functorch/test_ac_knapsack_exact.py"),
        landed=((EXACT, "def solve_knapsack("),),
    ),
    Patch(
        name="knapsack-solvers",
        subject="Rewrite the knapsack solvers so that the capacity is kept",
        why="""\
dp_knapsack_sliding_hirschberg increments its capacity for slicing and then
splits the incremented value, so every split hands out one unit too many: three
items of one unit each and a budget of one unit give two saved items, and real
joint graphs end up to 24 % over their budget. In the same module, greedy
divides by zero on items without size, ilp drops items that the solver returns
as 0.9999999, and dp's float32 table absorbs small runtimes beside large ones.

The solvers are written anew under their old names and signatures. Both dynamic
programs share one core with two rolling rows in float64, so they agree in
value, and KNAPSACK_SOLVERS names the solvers that a config string may select.
""",
        trailers=("Fixes: #197871", "Upstream-PR: pytorch/pytorch#160914"),
        tested="python test/functorch/test_ac_knapsack_solvers.py",
        files=(KNAPSACK, "test/functorch/test_ac_knapsack_solvers.py"),
        landed=((KNAPSACK, "def dp_knapsack_sliding_hirschberg("),),
        faults=(
            Fault(
                "#197871: every split hands out one unit too many",
                KNAPSACK,
                ("capacity = capacity + 1", "right_capacity = capacity - best_split"),
            ),
            Fault(
                "greedy divides by zero on items without size",
                KNAPSACK,
                ("runtimes[i] / memory[i]",),
            ),
            Fault("ilp drops items returned as 0.9999999", KNAPSACK, ("if i == 1:",)),
            Fault(
                "dp's float32 table absorbs small runtimes",
                KNAPSACK,
                ("dtype=torch.float32",),
            ),
            Fault("no table of solvers by name", KNAPSACK, missing="KNAPSACK_SOLVERS"),
        ),
    ),
    Patch(
        name="solver-by-name",
        subject="Look the knapsack solver up by name and list the known ones",
        why="""\
The dispatch repeats one branch per solver, and a misspelt name is answered
without saying which names there are. Looking the name up in KNAPSACK_SOLVERS
makes every solver of the module selectable, the sliding Hirschberg one before
2.10 included, and the error lists them.
""",
        trailers=("Upstream-PR: pytorch/pytorch#160914",),
        tested="python test/functorch/test_ac_knapsack_solvers.py",
        edits=(
            Edit(
                PARTITIONERS,
                anchor=_OLD_IMPORT,
                through="    ilp_knapsack,\n)\n",
                digest="a5a82a77df22275b",
                replacement="from ._activation_checkpointing.knapsack import "
                "KNAPSACK_SOLVERS\n",
                until=(2, 6),
            ),
            Edit(
                PARTITIONERS,
                anchor=_OLD_IMPORT,
                through="    ilp_knapsack,\n)\n",
                digest="a5a82a77df22275b",
                replacement=_NEW_IMPORT,
                since=(2, 7),
                until=(2, 9),
            ),
            Edit(
                PARTITIONERS,
                anchor=_OLD_IMPORT,
                through="    ilp_knapsack,\n)\n",
                digest="1c723d8eb237fd0f",
                replacement=_NEW_IMPORT,
                since=(2, 10),
            ),
            Edit(
                PARTITIONERS,
                anchor='    if SOLVER == "greedy":\n',
                through="        return dp_knapsack(memory, runtimes, max_memory)\n",
                digest="0a2098dfac5ac524",
                replacement=_LOOK_UP,
                inside=_DISPATCH,
                until=(2, 9),
            ),
            Edit(
                PARTITIONERS,
                anchor='    if SOLVER == "greedy":\n',
                through="        return dp_knapsack_sliding_hirschberg"
                "(memory, runtimes, max_memory)\n",
                digest="0012834c85af406d",
                replacement=_LOOK_UP,
                inside=_DISPATCH,
                since=(2, 10),
            ),
            Edit(
                PARTITIONERS,
                anchor=_OLD_ERROR,
                replacement=_unknown_solver("or a callable"),
                inside=_DISPATCH,
                until=(2, 6),
            ),
            Edit(
                PARTITIONERS,
                anchor=_OLD_ERROR,
                replacement=_unknown_solver("dynamic_memory_budget_dp, or a callable"),
                inside=_DISPATCH,
                since=(2, 7),
                until=(2, 10),
            ),
            Edit(
                PARTITIONERS,
                anchor=_OLD_ERROR,
                replacement=_unknown_solver(
                    "dynamic_memory_budget_dp, or a CustomKnapsackSolver"
                ),
                inside=_DISPATCH,
                since=(2, 11),
            ),
        ),
        landed=((PARTITIONERS, "KNAPSACK_SOLVERS[SOLVER]("),),
    ),
    Patch(
        name="config-solver-name",
        subject="Give the sliding Hirschberg solver a name in the config",
        why="""\
The article on this solver selects it as config.dp_knapsack_sliding_hirschberg,
which raises an AttributeError. The name now stands in the config and equals the
plain string, so both ways of writing it select the same solver.
""",
        trailers=("Upstream-PR: pytorch/pytorch#160914",),
        tested="python test/functorch/test_ac_knapsack_solvers.py",
        edits=(
            Edit(
                CONFIG,
                anchor='activation_memory_budget_runtime_estimator = "flops"\n',
                replacement="""\
activation_memory_budget_runtime_estimator = "flops"

# The name of the solver that answers like "dp" and holds a few rows instead of a
# table, so that code can write config.dp_knapsack_sliding_hirschberg or the string.
dp_knapsack_sliding_hirschberg = "dp_knapsack_sliding_hirschberg"
""",
            ),
        ),
        landed=((CONFIG, "\ndp_knapsack_sliding_hirschberg = "),),
    ),
    Patch(
        name="budgets-together",
        subject="Solve the budgets of a curve together",
        why="""\
The knee search of dynamic_memory_budget_dp solves a hundred knapsacks of one
instance one by one, and the Pareto plot bisects with a knapsack and a min cut
per point. Both now ask for all their budgets in one call, which prepares the
instance once, and the plot cuts once for each distinct set of items. The knee
search and its answer use the exact solver, so they keep the budget.
""",
        trailers=("Upstream-PR: pytorch/pytorch#160914",),
        tested="python test/functorch/test_ac_knapsack_solvers.py",
        edits=(
            Edit(
                EVALUATOR,
                anchor="    GraphInfoProvider,\n)\n",
                replacement="    GraphInfoProvider,\n)\n"
                f"from {_KNAPSACK_MODULE} import solve_budgets\n",
                since=(2, 7),
            ),
            Edit(
                EVALUATOR,
                anchor="        for memory_budget in memory_budget_values:\n",
                through="                memory_budget,\n            )\n",
                digest="f47800037f27d387",
                replacement="""\
        solutions = solve_budgets(
            knapsack_algo,
            self._graph_info_provider.get_knapsack_memory_input(),
            self._graph_info_provider.get_knapsack_runtime_input(),
            memory_budget_values,
        )
        for memory_budget, solution in zip(memory_budget_values, solutions):
            _, saved_nodes, recomputed_nodes = solution
""",
                inside="evaluate_distribution_of_results_for_knapsack_algo",
                since=(2, 7),
            ),
            Edit(
                PARTITIONERS,
                anchor=_NEW_IMPORT,
                replacement="""\
from ._activation_checkpointing.knapsack import (
    exact_knapsack,
    KNAPSACK_SOLVERS,
    solve_budgets,
)
""",
                since=(2, 7),
            ),
            Edit(
                PARTITIONERS,
                anchor="        return dp_knapsack(\n",
                replacement="        return exact_knapsack(\n",
                inside=_DISPATCH,
                since=(2, 7),
            ),
            Edit(
                PARTITIONERS,
                anchor="                knapsack_algo=dp_knapsack,\n",
                replacement="                knapsack_algo=exact_knapsack,\n",
                inside=_DISPATCH,
                since=(2, 7),
            ),
            Edit(
                PARTITIONERS,
                anchor=f"{_SIGNATURE}memory_budget, node_info, joint_graph):\n",
                replacement=f"{_SIGNATURE}\n"
                "        memory_budget, node_info, joint_graph, solution=None\n    ):\n",
                inside="get_saved_values_knapsack",
                since=(2, 7),
                until=(2, 10),
            ),
            Edit(
                PARTITIONERS,
                anchor=_TYPED_PARAMETERS,
                replacement="""\
        memory_budget: float,
        node_info: NodeInfo,
        joint_graph: fx.Graph,
        solution: tuple[float, list[int], list[int]] | None = None,
    ) -> tuple[list[fx.Node], float]:
""",
                inside="get_saved_values_knapsack",
                since=(2, 11),
            ),
            Edit(
                PARTITIONERS,
                anchor="            ) = _optimize_runtime_with_given_memory(\n",
                replacement="            ) = solution or "
                "_optimize_runtime_with_given_memory(\n",
                inside="get_saved_values_knapsack",
                since=(2, 7),
            ),
            Edit(
                PARTITIONERS,
                anchor="        def estimate_for_budget(b):\n",
                through="        options.sort()\n",
                digest="80f793321c70f95b",
                replacement=_CURVE,
                inside="choose_saved_values_set",
                since=(2, 7),
                until=(2, 10),
            ),
            Edit(
                PARTITIONERS,
                anchor="        def estimate_for_budget(b: float) "
                "-> tuple[float, float, float]:\n",
                through="        options.sort()\n",
                digest="4095d117242129fa",
                replacement=_CURVE,
                inside="choose_saved_values_set",
                since=(2, 11),
            ),
        ),
        landed=(
            (EVALUATOR, "solve_budgets("),
            (PARTITIONERS, "solve_budgets("),
        ),
    ),
    Patch(
        name="exact-by-default",
        subject="Make the exact solver the default for the activation memory budget",
        why="""\
With "dp" a budget is a suggestion. The exact solver keeps it, saves at least as
much runtime as any solver that does, and takes less time. This patch changes the
default alone, so that it can be left out.
""",
        trailers=("Upstream-PR: pytorch/pytorch#160914",),
        tested="python test/functorch/test_ac_knapsack_exact.py",
        edits=(
            _default("c28108c815efaed1", (2, 6), (2, 9)),
            _default("a240ae6aaec7e501", (2, 10), (2, 10)),
            _default("717407bca1a847d4", (2, 11), None),
        ),
        landed=((CONFIG, 'activation_memory_budget_solver = "exact"'),),
    ),
)
