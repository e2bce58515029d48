from ..patch import edits, PARTITIONERS, Patch, planner_path


PATCH = Patch(
    name="memory-budget",
    subject="Choose what an activation memory budget saves in a module of its own",
    why="""\
Plans of choose_saved_values_set may be over their budget (a U-Net keeps 0.593 at 0.5),
as the min cut after the knapsack saves other values than the solver chose. A budget of
NaN is accepted, a custom solver's answer is not checked, and operators without a FLOP
formula are recomputed first, however long they take.

memory_planner.decide takes a request and returns a decision: what to save, what decided it,
the range, the knapsack and the bytes kept. A model of the graph's storages tells what
each plan keeps and recomputes; if the cut's is over the budget, or recomputes more,
only the solver's items are saved. Options are checked before the first cut.
choose_saved_values_set stays, for graphs that cannot be modelled.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_memory_budget.py",
    sources=(
        planner_path("__init__"),
        planner_path("ask"),
        planner_path("decide"),
        planner_path("decision"),
        planner_path("graph/__init__"),
        planner_path("graph/joint"),
        planner_path("graph/live_bytes"),
        planner_path("graph/liveness"),
        planner_path("graph/reading"),
        planner_path("graph/recompute_cost"),
        planner_path("graph/storages"),
        planner_path("saved/__init__"),
        planner_path("saved/pareto_plot"),
        planner_path("saved/saved_bytes"),
        planner_path("solve/__init__"),
        planner_path("solve/solver"),
        planner_path("solve/ties"),
    ),
    edits=edits("""\
@@ torch/_functorch/config.py
-# NOTE: This *cannot* be treated as
+# It bounds the bytes that the forward leaves alive for the backward (whole storages,
+# without parameters and inputs) by low + budget * (high - low), where low and high are
+# what budgets 0 and 1 keep: see
+# torch/_functorch/memory_planner/saved/saved_bytes.py.
@@ torch/_functorch/config.py
+# "roofline": FLOP or the bytes moved, whichever takes longer
 # "testing": Returns 1 for everything
@@ torch/_inductor/custom_graph_pass.py
     1) The __call__() method contains the implementation of the knapsack solver.
+    A parameter named ``runtimes``, if there is one, gets the cost of recomputing each
+    item. The lists returned have to name every item once; see
+    torch/_functorch/memory_planner/saved/saved_bytes.py.
@@ torch/_functorch/partitioners.py
 from torch._functorch._aot_autograd.utils import is_with_effects
+from torch._functorch.memory_planner.decide import decide, Request
+from torch._functorch.memory_planner.graph.recompute_cost import is_costly
@@ torch/_functorch/partitioners.py should_ban_recomputation
-            if op_types.is_compute_intensive(node):
+            if op_types.is_compute_intensive(node) or is_costly(node):
@@ torch/_functorch/partitioners.py min_cut_rematerialization_partition
     compiler: str = "inductor",
     *,
+    # What to plan for, if not what the config says.
+    request: Request | None = None,
+    # Whether inductor compiles the two graphs: then peaks are those of its kernels.
+    fused: bool = False,
@@ torch/_functorch/partitioners.py min_cut_rematerialization_partition
-    saved_values = choose_saved_values_set(
~2682dbbcfdd08e77
-    )
+    decision = decide(
+        joint_graph, node_info, num_fwd_outputs, memory_budget, request, fused
+    )
+    saved_values = decision.saved_values
"""),
    landed=((PARTITIONERS, "decision = decide("),),
    needs=("solver-by-name", "overwritten-inputs", "random-ops", "knapsack-exact"),
    risks="""\
Plans change where they were over the budget or recomputed more than they had to. A
budget is now a share of the bytes really kept, not of a sum of sizes. A budget out of
range, a wrong name, and a custom solver's answer that names an index twice or not at
all used to pass unnoticed and now raise.
""",
)
