from ..patch import edits, module_path, PARTITIONERS, Patch


PATCH = Patch(
    name="random-ops",
    subject="Never recompute random ops or routing decisions",
    why="""\
At any budget below 1, and with aggressive_recomputation at every budget, the
backward draws new random numbers: the gradients of a net with dropout are off by
more than their own norm, and nothing says so. Where inductor rounds a recomputed value
differently, a recomputed router sends some tokens to other experts.

Random operators are now known by their tag, in subgraphs of higher-order operators
too, and no cut may recompute them; it saves dropout's mask, or inductor's seed, not the
noise. Effectful ops and MUST_SAVE tags, which budget 0 ignored, are kept in the same
way, and so are decisions: integers that a graph makes of floats, and masks that do more
than select between two values of an element.
""",
    trailers=("Fixes: #190758", "Fixes: #190717", "See also: #186572"),
    test="test/functorch/test_ac_random_ops.py",
    sources=(module_path("random_ops"), "test/functorch/test_ac_decisions.py"),
    edits=edits("""\
@@ torch/_functorch/partitioners.py

 from . import config
+from ._activation_checkpointing import random_ops
@@ torch/_functorch/partitioners.py must_recompute
-    return node.meta.get("recompute", None) in [
~21f58ef922ca0f88
-    ]
+    return random_ops.is_replayed(node)
@@ torch/_functorch/partitioners.py should_ban_recomputation
-        if node.meta.get("recompute", None) == CheckpointPolicy.MUST_SAVE:
+        if random_ops.must_run_once(node):
@@ torch/_functorch/partitioners.py should_ban_recomputation
-            return "marked MUST_SAVE"
+            return "must not run twice"
@@ torch/_functorch/partitioners.py min_cut_rematerialization_partition
+    random_ops.mark_decisions(joint_graph, node_info.tangents_closure)
+
     # networkx blows up on graphs with no required backward nodes
@@ torch/_functorch/partitioners.py solve_min_cut
+    random_ops.draw_on_one_side(joint_graph, node_info, nx_graph)
+
     if min_cut_options.ban_if_used_far_apart:
@@ torch/_functorch/partitioners.py choose_saved_values_set
             ban_if_not_in_allowlist=False,
         )
+    if memory_budget == 0:
+        dont_ban = random_ops.recomputable_nodes(joint_graph)
+        if dont_ban is not None:
+            return solve_min_cut(joint_graph, node_info, min_cut_options, dont_ban)[0]
@@ torch/_functorch/partitioners.py choose_saved_values_set
-        i
-        for i in recomputable_banned_nodes
-        if i.meta.get("recompute", False) == CheckpointPolicy.MUST_SAVE
+        i for i in recomputable_banned_nodes if random_ops.must_run_once(i)
@@ torch/_functorch/partitioners.py choose_saved_values_set until 2.13
-        return node_info.inputs + must_save_nodes
+        if must_save_nodes:
+            return aggressive_recomputation_saved_values
+        return node_info.inputs
"""),
    landed=((PARTITIONERS, "random_ops.must_run_once("),),
    lacking="below budget 1, dropout gets wrong gradients there, as without the set "
    "(pytorch/pytorch#190758)",
    risks="""\
Plans of nets with random ops save a mask or a seed where numbers used to be drawn
again. Plans of nets that route or sort save the positions, at every budget and under
checkpoints, unless a MUST_RECOMPUTE tag insists. Other plans do not change.
""",
)
