from ..patch import edits, PARTITIONERS, Patch


PATCH = Patch(
    name="solver-by-name",
    lines=25,
    subject="Look the knapsack solver up by name and list the known ones",
    why="""\
The dispatch repeats one branch per solver, and the error for a misspelt name does not
list the valid ones. Looking the name up in KNAPSACK_SOLVERS makes every solver of the
module selectable, and the error lists them.
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
KNAPSACK_SOLVERS now.
""",
)
