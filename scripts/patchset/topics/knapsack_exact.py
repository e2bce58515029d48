from dataclasses import replace

from ..patch import edits, module_path, Patch


_ADDITION = Patch(
    name="knapsack-exact",
    subject="Add an exact knapsack solver for the activation memory budget",
    why="""\
Every existing solver either overspends the budget or loses runtime: dp rounds
sizes to 1/10000 of the range, so that on real joint graphs it ends up to 19 %
over, and greedy has no bound. Real graphs repeat their layers, so their hundreds of
items are copies of 5 to 60 distinct ones, and the problem on the true sizes is small.

The new module solves it by Pareto states, pruned by a bound on every completion. The
answer never weighs more than the budget, is the proven optimum (or says how far it can
be from it), and depends on nothing but the arguments.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_knapsack_exact.py",
    sources=(module_path("knapsack_exact"), module_path("knapsack_numbers")),
    since=(2, 6),
    landed=((module_path("knapsack_exact"), "def solve_knapsack("),),
    risks="""\
Used only where the config asks for "exact". A cap on states, not on time, bounds its
work: at the cap it returns the best set found, no worse than greedy's.
""",
)

# The set lists it in KNAPSACK_SOLVERS; by itself it needs a branch of the dispatch.
PATCH = replace(
    _ADDITION,
    minimal=replace(
        _ADDITION,
        lines=250,
        edits=edits("""\
@@ torch/_functorch/partitioners.py until 2.6
     ilp_knapsack,
 )
+from ._activation_checkpointing.knapsack_exact import exact_knapsack
@@ torch/_functorch/partitioners.py since 2.11
 from ._activation_checkpointing.knapsack_evaluator import KnapsackEvaluator
+from ._activation_checkpointing.knapsack_exact import exact_knapsack
@@ torch/_functorch/partitioners.py _optimize_runtime_with_given_memory
         return dp_knapsack(memory, runtimes, max_memory)
+    elif SOLVER == "exact":
+        return exact_knapsack(memory, runtimes, max_memory)
@@ torch/_functorch/config.py
+# "exact" is optimal on the true sizes and never over the budget.
 activation_memory_budget_solver = "dp"
"""),
    ),
)
