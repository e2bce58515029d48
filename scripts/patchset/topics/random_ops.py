from ..patch import edits, module_path, PARTITIONERS, Patch


PATCH = Patch(
    name="random-ops",
    subject="Keep random ops and decisions of higher-order operators and of rounding",
    why="""\
The backward may run a region (nested_compile_region, cond) again, and with it the
dropout or the router in its graph, whose tags cannot be seen from outside. A checkpoint
tags such a region for recomputation, but nothing can replay its generator. And where a
position is counted in floats or rounded, a weight that is made of the rounded value may
belong to another position than the one that was saved.

A region is now marked as what its graph runs. Floats that hold integers count as exact
values: the operator that rounds is the one that decides.
""",
    trailers=("See also: #190758", "See also: #186572"),
    test="test/functorch/test_ac_random_ops.py",
    sources=(module_path("random_ops"), "test/functorch/test_ac_decisions.py"),
    edits=edits("""\
@@ torch/_functorch/partitioners.py

 from . import config
+from ._activation_checkpointing import random_ops
@@ torch/_functorch/partitioners.py min_cut_rematerialization_partition
+    random_ops.mark_what_runs_once(joint_graph, node_info.tangents_closure)
+
     for node in reversed(joint_module.graph.nodes):
         if node.op == "output":
             node.dist_from_bw = int(1e9)
@@ torch/_functorch/partitioners.py solve_min_cut
+    keep_on_one_side(random_ops.may_differ, joint_graph, node_info, nx_graph)
+
     # This heuristic is fairly straightforward. The idea is that although it is
"""),
    landed=((PARTITIONERS, "random_ops.mark_what_runs_once("),),
    needs=("random-tags", "must-save-at-zero", "draws-on-one-side", "routing"),
    risks="""\
Plans of nets with random regions save what these return. A position that is rounded
first is saved as a float. Other plans do not change.
""",
)
