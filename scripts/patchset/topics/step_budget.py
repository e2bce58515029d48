from ..patch import edits, GRAPH_COMPILE, module_path, Patch, planner_path


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
        planner_path("graph/symbols"),
        planner_path("graph/workspaces"),
        planner_path("report/step_summary"),
        planner_path("step/__init__"),
        planner_path("step/aot_calls"),
        planner_path("step/partial_backward"),
        planner_path("step/plan_file"),
        planner_path("step/budget"),
        planner_path("step/calls"),
        planner_path("step/device_bytes"),
        planner_path("step/compiled_graph"),
        planner_path("step/single_graph_warnings"),
        planner_path("step/aot_stages"),
        planner_path("step/step_programs"),
        planner_path("step/plan_request"),
        planner_path("step/plan_step"),
        planner_path("step/recorder"),
        planner_path("step/recording_schedule"),
        planner_path("step/current_step"),
        planner_path("step/timeline"),
        planner_path("step/traced_graph"),
        planner_path("step/messages"),
        planner_path("step/peak_check"),
        # Where scripts imported from before there was a package.
        module_path("step_budget"),
        module_path("step_recorder"),
        "test/functorch/test_ac_step_loops.py",
    ),
    needs=("compiled-peak", "frozen-layers"),
    edits=edits("""\
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile until 2.14
-        return aot_stage2_autograd(
+        from ..memory_planner.step.aot_stages import for_step
+
+        return for_step(aot_stage2_autograd)(
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile until 2.14
-        return aot_stage2_inference(
+        from ..memory_planner.step.aot_stages import noted_in_step
+
+        return noted_in_step(aot_stage2_inference)(
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile since 2.15
-            return aot_stage2_autograd(
+            from ..memory_planner.step.aot_stages import for_step
+
+            return for_step(aot_stage2_autograd)(
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile since 2.15
-            return aot_stage2_inference(
+            from ..memory_planner.step.aot_stages import noted_in_step
+
+            return noted_in_step(aot_stage2_inference)(
@@ torch/_functorch/_aot_autograd/autograd_cache.py try_load
                 compiled_fn = entry.wrap_post_compile(args, aot_config, fx_config)
+                from ..memory_planner.step.single_graph_warnings import with_warnings
+
+                compiled_fn = with_warnings(compiled_fn, args, entry.runtime_metadata)
"""),
    since=(2, 13),
    landed=((GRAPH_COMPILE, "for_step(aot_stage2_autograd)"),),
    risks="""\
Opt-in: nothing changes outside a StepBudget. Peaks are exact for graphs that run op by
op, else estimates. Workspaces and fragmentation are not counted.
""",
)
