from ..patch import edits, GRAPH_COMPILE, module_path, Patch


PATCH = Patch(
    name="step-budget",
    subject="One activation memory budget for a training step",
    why="""\
A budget is set for a graph, but training runs out of memory in a step. Most training
stacks compile each block separately, or break the graph: whatever the calls keep adds
up, and a plan for the peak of one block makes the step's peak worse.

StepBudget is a context manager around a training step. The first step runs by lean
plans and is recorded. Then one or two plans are chosen for each graph, so that the
step's peak stays within the bound and little is recomputed, and the graphs are
partitioned and compiled again from their joint graphs.
""",
    test="test/functorch/test_ac_step_budget.py",
    sources=(
        module_path("device_bytes"),
        module_path("step_backward"),
        module_path("step_budget"),
        module_path("step_calls"),
        module_path("step_graph"),
        module_path("step_recorder"),
        module_path("step_report"),
        module_path("step_timeline"),
        module_path("symbols"),
        module_path("workspaces"),
        module_path("graph_calls"),
        "test/functorch/test_ac_step_loops.py",
    ),
    needs=("compiled-peak", "frozen-layers"),
    edits=edits("""\
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile until 2.14
-        return aot_stage2_autograd(
+        from .._activation_checkpointing.step_graph import for_step
+
+        return for_step(aot_stage2_autograd)(
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile until 2.14
-        return aot_stage2_inference(
+        from .._activation_checkpointing.step_graph import noted_in_step
+
+        return noted_in_step(aot_stage2_inference)(
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile since 2.15
-            return aot_stage2_autograd(
+            from .._activation_checkpointing.step_graph import for_step
+
+            return for_step(aot_stage2_autograd)(
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile since 2.15
-            return aot_stage2_inference(
+            from .._activation_checkpointing.step_graph import noted_in_step
+
+            return noted_in_step(aot_stage2_inference)(
@@ torch/_functorch/_aot_autograd/autograd_cache.py try_load
                 compiled_fn = entry.wrap_post_compile(args, aot_config, fx_config)
+                from torch._functorch._activation_checkpointing import graph_calls
+
+                compiled_fn = graph_calls.with_warnings(
+                    compiled_fn, args, entry.runtime_metadata
+                )
"""),
    since=(2, 13),
    landed=((GRAPH_COMPILE, "for_step(aot_stage2_autograd)"),),
    risks="""\
Opt-in: nothing changes outside a StepBudget. Peaks are exact for graphs that run op by
op, else estimates. Workspaces and fragmentation are not counted.
""",
)
