from ..patch import edits, Patch, planner_path


PATCH = Patch(
    name="peak-budget",
    subject="Let the activation memory budget bound the peak",
    why="""\
The budget bounds what is saved for the backward, not what training runs out of.
If little is saved, the first step of the backward recomputes most of the forward
at once: a small budget has a higher peak than no budget.

With activation_memory_budget_target = "peak", budget b bounds the peak by
floor + b * (peak at budget 1 - floor), and activation_memory_peak_bytes by a number
of bytes. A model of live bytes evaluates some hundred plans; the cheapest that fits is
used, so a smaller budget never has a higher peak.

With the default target, a plan that peaks above budget 1, or above the plan before this
patch, gives way to another one within the budget of saved bytes.
Where no plan can be made, a warning says why and the plan is that for saved bytes.
""",
    trailers=("Fixes: #197838",),
    test="test/functorch/test_ac_peak_budget.py",
    sources=(
        planner_path("graph/inputs_outputs"),
        planner_path("graph/kernels"),
        planner_path("graph/other_sizes"),
        planner_path("peak/__init__"),
        planner_path("graph/chunking_cost"),
        planner_path("peak/chains"),
        planner_path("peak/curve"),
        planner_path("peak/graph_plans"),
        planner_path("peak/lower_peak"),
        planner_path("peak/menu"),
        planner_path("peak/plan_search"),
        planner_path("peak/plans"),
        planner_path("peak/peak_bytes"),
    ),
    needs=("saved-report",),
    edits=edits("""\
@@ torch/_functorch/config.py
 activation_memory_budget = 1.0
+
+# What the budget bounds. "saved": the bytes saved for the backward, from what must not
+# be recomputed (0) to the plan that runs fastest (1). "peak": the peak of live bytes
+# without parameters and inputs, from the lowest found (0) to the fastest plan's (1).
+activation_memory_budget_target = "saved"
+
+# Bound for the peak in bytes, without parameters and inputs; overrides the budget and
+# its target. A graph that cannot meet it gets the lowest peak found, and a warning.
+activation_memory_peak_bytes: int | None = None
+
+# Safety margin: fraction by which the real peak of inductor's kernels may exceed the
+# estimate. A plan is chosen that much below the bound.
+activation_memory_peak_margin = 0.05
+
+# How many calls of a graph wait for their backward at once, for the target "peak" and a
+# peak in bytes. None: one. Set it if each block of a model is compiled separately.
+activation_memory_graph_calls: int | None = None
@@ torch/_inductor/compile_fx.py partition_fn
+                fused=True,
                 # pyrefly: ignore[bad-argument-type]
                 **kwargs,
             )
"""),
    landed=(("torch/_inductor/compile_fx.py", "                fused=True,\n"),),
    risks="""\
With the default target, a plan may recompute more where its peak was above that of
budget 1; nothing changes at budget 1. At budget 0 a min cut is made to compare with.
Peaks are exact for graphs that run op by op and estimates for inductor's kernels. Kernel
workspaces are not counted.
""",
)
