from __future__ import annotations

from ..patch import Edit, PARTITIONERS, Patch


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
NEW_IMPORT = (
    "from ._activation_checkpointing.knapsack import dp_knapsack, KNAPSACK_SOLVERS\n"
)
DISPATCH = "_optimize_runtime_with_given_memory"
_LOOK_UP = """\
    if isinstance(SOLVER, str) and SOLVER in KNAPSACK_SOLVERS:
        return KNAPSACK_SOLVERS[SOLVER](memory, runtimes, max_memory)
"""

PATCH = Patch(
    name="solver-by-name",
    subject="Look the knapsack solver up by name and list the known ones",
    why="""\
The dispatch repeats one branch per solver, and the error for a misspelt name does
not list the valid ones. Looking the name up in KNAPSACK_SOLVERS
makes every solver of the module selectable, the sliding Hirschberg one on 2.6
included, and the error lists them.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_solver_by_name.py",
    edits=(
        Edit(
            PARTITIONERS,
            anchor=_OLD_IMPORT,
            through="    ilp_knapsack,\n)\n",
            digests=("a5a82a77df22275b",),
            replacement="from ._activation_checkpointing.knapsack import "
            "KNAPSACK_SOLVERS\n",
            until=(2, 6),
        ),
        Edit(
            PARTITIONERS,
            anchor=_OLD_IMPORT,
            through="    ilp_knapsack,\n)\n",
            digests=("1c723d8eb237fd0f",),
            replacement=NEW_IMPORT,
            since=(2, 11),
        ),
        Edit(
            PARTITIONERS,
            anchor='    if SOLVER == "greedy":\n',
            through="        return dp_knapsack(memory, runtimes, max_memory)\n",
            digests=("0a2098dfac5ac524",),
            replacement=_LOOK_UP,
            inside=DISPATCH,
            until=(2, 6),
        ),
        Edit(
            PARTITIONERS,
            anchor='    if SOLVER == "greedy":\n',
            through="        return dp_knapsack_sliding_hirschberg"
            "(memory, runtimes, max_memory)\n",
            digests=("0012834c85af406d",),
            replacement=_LOOK_UP,
            inside=DISPATCH,
            since=(2, 11),
        ),
        Edit(
            PARTITIONERS,
            anchor=_OLD_ERROR,
            replacement=_unknown_solver("or one of your own"),
            inside=DISPATCH,
            until=(2, 6),
        ),
        Edit(
            PARTITIONERS,
            anchor=_OLD_ERROR,
            replacement=_unknown_solver("dynamic_memory_budget_dp, or one of your own"),
            inside=DISPATCH,
            since=(2, 11),
        ),
    ),
    landed=((PARTITIONERS, "KNAPSACK_SOLVERS[SOLVER]("),),
    needs=("knapsack-solvers",),
    risks="""\
The four existing names keep their meaning, and custom solvers work as before. Code
that replaces one of the solvers in partitioners.py has to replace it in
KNAPSACK_SOLVERS now.
""",
    kind="improvements",
)
