from ..patch import edits, PARTITIONERS, Patch


PATCH = Patch(
    name="must-save-at-zero",
    lines=15,
    subject="Keep what must be saved at activation memory budget 0",
    why="""\
With activation_memory_budget = 0 the partitioner saves the graph's inputs and nothing
else, and ignores MUST_SAVE tags. A matmul or a collective that a selective checkpoint
wants kept is run again, and an effectful op has its effect twice. Effectful ops run again
at every budget below 1: force_save_effectful_ops tags the parts of the result, but the
min cut asks for the tag of the op itself.

The effectful op is now tagged as well. At budget 0, if the backward needs what a tagged op
returns, one min cut decides what to save, in which only tagged ops may not be recomputed.
""",
    repro="""\
import functools, torch
import torch._functorch.config as config
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

config.activation_memory_budget = 0
kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
layer = lambda x, w: (x @ w).sin().exp()
net = lambda x, w: checkpoint(layer, x, w, use_reentrant=False, context_fn=kept)
x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
loss = torch.compile(net, backend="aot_eager_decomp_partition")(x, w).sum()
with torch.profiler.profile() as trace:
    loss.backward()
# Two of the gradients; the third is the product that was to be saved.
print([event.count for event in trace.key_averages() if event.key == "aten::mm"])
""",
    beyond="""\
- Random ops are not tagged, so budget 0 still recomputes them: a separate change.
- A checkpoint that tags an effectful op MUST_RECOMPUTE still raises.
- Collectives are tagged as well: with tensor parallelism or FSDP budget 0 now saves what
  they return. How much that is was not measured.
""",
    trailers=("See also: #190717", "See also: #190758"),
    test="test/functorch/test_ac_must_save_at_zero.py",
    edits=edits("""\
@@ torch/_functorch/partitioners.py force_save_effectful_ops since 2.15
         mark_getitem_outputs(node)
+        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
@@ torch/_functorch/partitioners.py force_save_effectful_ops until 2.14
             mark_getitem_outputs(node)
+            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
@@ torch/_functorch/partitioners.py
+def get_recomputable_nodes(joint_graph: fx.Graph) -> OrderedSet[fx.Node] | None:
+    \"""All that may run again, or None where the inputs are all there is to save.\"""
+    computed = [node for node in joint_graph.nodes if node.op == "call_function"]
+    again = OrderedSet(
+        node
+        for node in computed
+        if node.meta.get("recompute") != CheckpointPolicy.MUST_SAVE
+    )
+    runs_twice = (0 < n.dist_from_bw < int(1e9) for n in computed if n not in again)
+    return again if any(runs_twice) else None
+
+
 def choose_saved_values_set(
@@ torch/_functorch/partitioners.py choose_saved_values_set
             ban_if_not_in_allowlist=False,
         )
+    if memory_budget == 0 and (again := get_recomputable_nodes(joint_graph)):
+        return solve_min_cut(joint_graph, node_info, min_cut_options, again)[0]
"""),
    landed=((PARTITIONERS, "get_recomputable_nodes("),),
    risks="""\
Graphs without such tags keep the plan that they had. The partitioner itself sets some, as
where one checkpoint follows another, so plain checkpoints at budget 0 may change, too. With
tags, budget 0 keeps what they ask for, perhaps in place of an input that is larger, and
takes one min cut, as budget 1 does. PREFER_RECOMPUTE of an effectful op is overwritten.
""",
)
