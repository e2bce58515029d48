from dataclasses import replace

from ..patch import edits, PARTITIONERS, Patch


# Where the dispatch looks names up; the set's own table is in its knapsack module.
_DISPATCH = Patch(
    name="solver-by-name",
    lines=25,
    subject="Look the knapsack solver up by name and list the known ones",
    why="""\
Whoever misspells activation_memory_budget_solver, or takes a name from a newer release,
is told that there is no such solver, but not which ones there are: the names stand in a
chain of branches, one for each solver. Whoever adds a solver edits that chain, and an
import, and so do all forks that try one out.

KNAPSACK_SOLVERS maps the names to the solvers. The partitioner looks the name up there,
and the error lists the names it has.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_solver_by_name.py",
    edits=edits("""\
@@ torch/_functorch/partitioners.py until 2.6
-from ._activation_checkpointing.knapsack import (
~a5a82a77df22275b
-    ilp_knapsack,
-)
+from ._activation_checkpointing.knapsack import KNAPSACK_SOLVERS
@@ torch/_functorch/partitioners.py _optimize_runtime_with_given_memory until 2.6
-    if SOLVER == "greedy":
~0a2098dfac5ac524
-        return dp_knapsack(memory, runtimes, max_memory)
+    if isinstance(SOLVER, str) and SOLVER in KNAPSACK_SOLVERS:
+        return KNAPSACK_SOLVERS[SOLVER](memory, runtimes, max_memory)
@@ torch/_functorch/partitioners.py _optimize_runtime_with_given_memory until 2.6
-        raise RuntimeError(f"Not aware of memory budget knapsack solver: {SOLVER}")
+        raise RuntimeError(
+            f"Unknown activation_memory_budget_solver {SOLVER!r}: known are "
+            f"{', '.join(KNAPSACK_SOLVERS)}, "
+            "or one of your own"
+        )
@@ torch/_functorch/partitioners.py since 2.11
-from ._activation_checkpointing.knapsack import (
~1c723d8eb237fd0f
-    ilp_knapsack,
-)
+from ._activation_checkpointing.knapsack import dp_knapsack, KNAPSACK_SOLVERS
@@ torch/_functorch/partitioners.py _optimize_runtime_with_given_memory since 2.11
-    if SOLVER == "greedy":
~0012834c85af406d
-        return dp_knapsack_sliding_hirschberg(memory, runtimes, max_memory)
+    if isinstance(SOLVER, str) and SOLVER in KNAPSACK_SOLVERS:
+        return KNAPSACK_SOLVERS[SOLVER](memory, runtimes, max_memory)
@@ torch/_functorch/partitioners.py _optimize_runtime_with_given_memory since 2.11
-        raise RuntimeError(f"Not aware of memory budget knapsack solver: {SOLVER}")
+        raise RuntimeError(
+            f"Unknown activation_memory_budget_solver {SOLVER!r}: known are "
+            f"{', '.join(KNAPSACK_SOLVERS)}, "
+            "dynamic_memory_budget_dp, or one of your own"
+        )
"""),
    since=(2, 6),
    landed=((PARTITIONERS, "KNAPSACK_SOLVERS[SOLVER]("),),
    needs=("knapsack-solvers",),
    risks="""\
The four existing names keep their meaning, and custom solvers work as before. Code
that replaces one of the solvers in partitioners.py has to replace it in
KNAPSACK_SOLVERS now, which is also where a test or a fork can add one.
""",
)

PATCH = replace(
    _DISPATCH,
    minimal=replace(
        _DISPATCH,
        since=(2, 11),
        needs=(),
        repro="""\
import torch, torch._functorch.config as config

def layers(x, *weights):
    for w in weights:
        x = x @ w
    return x.sum()

config.activation_memory_budget = 0.5
config.activation_memory_budget_solver = "hirschberg"
inputs = [torch.ones(8, 8, requires_grad=True) for _ in range(5)]
torch.compile(layers, backend="aot_eager_decomp_partition")(*inputs)
""",
        beyond="""\
No solver and no plan changes. A name is still looked up only where a graph needs a
solver, so at budgets 0 and 1 a wrong one passes. dynamic_memory_budget_dp keeps its
branch, as it needs the graph, and so do solvers of the user's own.
""",
        edits=edits("""\
@@ torch/_functorch/_activation_checkpointing/knapsack.py
     recomputable_items.reverse()
     return max_runtime, saved_items, recomputable_items
+
+
+# The solvers by the name that selects them in activation_memory_budget_solver.
+KNAPSACK_SOLVERS = {
+    "dp": dp_knapsack,
+    "dp_knapsack_sliding_hirschberg": dp_knapsack_sliding_hirschberg,
+    "greedy": greedy_knapsack,
+    "ilp": ilp_knapsack,
+}
""")
        + _DISPATCH.edits,
    ),
)
