from ..patch import edits, module_path, PARTITIONERS, Patch, planner_path


PATCH = Patch(
    name="saved-report",
    subject="Report what a plan saves for the backward, and why",
    why="""\
After a compile it is hard to find out which activations it saves: the partitioner's
debug log has sizes and names, and the knapsack's choice may differ from the final
min cut. print_saved_values() prints, for the graph compiled last, each kind of
value that is saved or recomputed with its operator, shape, size, runtime and source
line, why it is there, and the budget asked and used; last_plan() and the structured
trace have the same as data. They go into the compile cache with the graph.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_saved_report.py",
    sources=(
        planner_path("report/__init__"),
        planner_path("report/saved_values"),
        # Where scripts imported from before there was a package.
        module_path("saved_report"),
    ),
    edits=edits("""\
@@ torch/_functorch/partitioners.py min_cut_rematerialization_partition
+    from .memory_planner.report.saved_values import attach_plan
+
+    attach_plan(decision, fw_module, bw_module, num_fwd_outputs)
+
     if AOT_PARTITIONER_DEBUG:
         # Calculate sorted sizes of saved values
@@ torch/_functorch/_aot_autograd/graph_compile.py _aot_stage2a_partition until 2.11
             fw_metadata.num_symints_saved_for_bw = num_symints_saved_for_bw
+            from ..memory_planner.report.saved_values import log_plan
+
+            log_plan(fw_module, fw_metadata)
@@ torch/_functorch/_aot_autograd/autograd_cache.py try_load until 2.11
                     log.info("AOTAutograd cache hit for key %s", cache_key)
+                    from ..memory_planner.report.saved_values import log_cached_plan
+
+                    log_cached_plan(entry.runtime_metadata)
@@ torch/_functorch/_aot_autograd/graph_compile.py _categorize_saved_tensors_for_backward since 2.12
     fw_metadata.num_symints_saved_for_bw = num_symints_saved_for_bw
+    from ..memory_planner.report.saved_values import log_plan
+
+    log_plan(fw_module, fw_metadata)
@@ torch/_functorch/_aot_autograd/autograd_cache.py try_load since 2.12
                 log.info("AOTAutograd cache hit for key %s", cache_key)
+                from ..memory_planner.report.saved_values import log_cached_plan
+
+                log_cached_plan(entry.runtime_metadata)
"""),
    landed=((PARTITIONERS, "    attach_plan("),),
    risks="""\
Every partitioned graph leaves a record of names and numbers, of the last few graphs
only; no tensor or graph is kept alive. Plans do not change.
""",
    needs=("memory-budget",),
)
