from ..patch import CONFIG, edits, Patch


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
    edits=edits("""\
@@ torch/_functorch/config.py
-# This controls the solver used for the 0-1 knapsack. By default we use a
~c28108c815efaed1 717407bca1a847d4
-activation_memory_budget_solver = "dp"
+# The solver that picks what is saved: "exact" (optimal on the true sizes and never
+# over the budget), "dp" (optimal on sizes rounded to 1/10000 of the range),
+# "dp_knapsack_sliding_hirschberg" (another name of "dp"), "greedy", or "ilp" (another
+# name of "exact").
+activation_memory_budget_solver = "exact"
"""),
    since=(2, 6),
    landed=((CONFIG, 'activation_memory_budget_solver = "exact"'),),
    needs=("solver-by-name",),
    risks="""\
Where dp overspent, less is saved and more recomputed than before; whoever tuned a
budget against that may have to raise it.
""",
)
