from __future__ import annotations

from ..patch import CONFIG, Edit, Patch


PATCH = Patch(
    name="exact-by-default",
    subject="Make the exact solver the default for the activation memory budget",
    why="""\
With "dp" a budget is a suggestion. The exact solver keeps it, saves at least as
much runtime as any solver that does, and takes less time. This patch changes the
default alone, so that it can be left out.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_exact_by_default.py",
    edits=(
        Edit(
            CONFIG,
            anchor="# This controls the solver used for the 0-1 knapsack. "
            "By default we use a\n",
            through='activation_memory_budget_solver = "dp"\n',
            digests=("c28108c815efaed1", "717407bca1a847d4"),
            replacement="""\
# The solver that picks what is saved: "exact" (optimal on the true sizes and never
# over the budget), "dp" (optimal on sizes rounded to 1/10000 of the range),
# "dp_knapsack_sliding_hirschberg" (another name of "dp"), "greedy", or "ilp" (another
# name of "exact").
activation_memory_budget_solver = "exact"
""",
        ),
    ),
    landed=((CONFIG, 'activation_memory_budget_solver = "exact"'),),
    needs=("solver-by-name",),
    evidence=(("solvers", "corpus:"), ("solvers", "dp / exact")),
    risks="""\
Default plans change at every budget that reaches the knapsack. Where dp overspent,
less is saved and more recomputed than before; whoever tuned a budget against dp's
overspending may have to raise it.
""",
    kind="improvements",
)
