from dataclasses import replace

from ..patch import Edit, PARTITIONERS, Patch


def _edits(
    names: str, import_digest: str, last: str, digest: str, others: str
) -> tuple[Edit, ...]:
    dispatch = "_optimize_runtime_with_given_memory"
    return (
        Edit(
            PARTITIONERS,
            anchor="from ._activation_checkpointing.knapsack import (\n",
            through="    ilp_knapsack,\n)\n",
            digests=(import_digest,),
            replacement=f"from ._activation_checkpointing.knapsack import {names}\n",
        ),
        Edit(
            PARTITIONERS,
            anchor='    if SOLVER == "greedy":\n',
            through=f"        return {last}(memory, runtimes, max_memory)\n",
            digests=(digest,),
            replacement="""\
    if isinstance(SOLVER, str) and SOLVER in KNAPSACK_SOLVERS:
        return KNAPSACK_SOLVERS[SOLVER](memory, runtimes, max_memory)
""",
            inside=dispatch,
        ),
        Edit(
            PARTITIONERS,
            anchor="        raise RuntimeError("
            'f"Not aware of memory budget knapsack solver: {SOLVER}")\n',
            replacement=f'''\
        raise RuntimeError(
            f"Unknown activation_memory_budget_solver {{SOLVER!r}}: known are "
            f"{{', '.join(KNAPSACK_SOLVERS)}}, "
            "{others}"
        )
''',
            inside=dispatch,
        ),
    )


_IN_2_6 = _edits(
    "KNAPSACK_SOLVERS",
    "a5a82a77df22275b",
    "dp_knapsack",
    "0a2098dfac5ac524",
    "or one of your own",
)
_SINCE_2_11 = _edits(
    "dp_knapsack, KNAPSACK_SOLVERS",
    "1c723d8eb237fd0f",
    "dp_knapsack_sliding_hirschberg",
    "0012834c85af406d",
    "dynamic_memory_budget_dp, or one of your own",
)

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
        *(replace(edit, until=(2, 6)) for edit in _IN_2_6),
        *(replace(edit, since=(2, 11)) for edit in _SINCE_2_11),
    ),
    landed=((PARTITIONERS, "KNAPSACK_SOLVERS[SOLVER]("),),
    needs=("knapsack-solvers",),
    risks="""\
The four existing names keep their meaning, and custom solvers work as before. Code
that replaces one of the solvers in partitioners.py has to replace it in
KNAPSACK_SOLVERS now.
""",
)
