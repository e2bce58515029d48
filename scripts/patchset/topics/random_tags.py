from ..patch import edits, PARTITIONERS, Patch


PATCH = Patch(
    name="random-tags",
    lines=20,
    subject="Do not recompute random ops under an activation memory budget",
    why="""\
With an activation_memory_budget between 0 and 1, and with aggressive_recomputation at
every budget, the backward may run a random op again and draws other numbers than the
forward did. A net with dropout then trains on gradients that are off by a tenth to four
fifths of their norm, and nothing says so.

Two things are wrong. The ban on recomputing random ops names native_dropout, rand_like
and randn_like, but what decompositions and inductor's passes make of dropout is rand,
bernoulli or prims.inductor_seeds. And a ban does not last: whatever is banned becomes
an item that the knapsack may choose to recompute.

Random ops are now known by their tag, as in functionalize_rng_ops, and are marked
MUST_SAVE before the cut, those of the backward too, to which it means nothing. To the
min cut that means "not twice": it may save a dropout's boolean mask, or inductor's
seed, in place of the numbers. Ops that a checkpoint tags for recomputation are left
alone, because functionalize_rng_ops replays the generator's state for them.
""",
    repro="""\
import torch
import torch._functorch.config as config

config.activation_memory_budget = 0.1

@torch.compile(backend="aot_eager_decomp_partition")
def net(x):
    return torch.nn.functional.dropout(x.sin(), 0.5)

x = torch.randn(64, 64, requires_grad=True)
y = net(x)
y.sum().backward()
print("dropped, but with a gradient:", ((y == 0) & (x.grad != 0)).sum().item())
""",
    beyond="""\
- At budget 0 nothing but inputs is saved, whatever its tag (#190717). That is a separate
  change.
- A random op inside of a higher-order op (nested_compile_region, cond) cannot be seen
  from the outer graph, and is recomputed as before.
- The generator's state is not replayed, so a mask is kept where #191684 would keep a
  state. The test here holds for either.
""",
    trailers=("See also: #190758",),
    test="test/functorch/test_ac_random_tags.py",
    edits=edits("""\
@@ torch/_functorch/partitioners.py since 2.14
+def draws_anew(node: fx.Node) -> bool:
+    \"""Whether each run draws other numbers; philox_rand is handed the state.\"""
+    return is_rng_op(node) and getattr(node.target, "namespace", "") != "rngprims"
+
+
 def has_recomputable_ops(fx_g: fx.GraphModule) -> bool:
@@ torch/_functorch/partitioners.py until 2.13
+def draws_anew(node: fx.Node) -> bool:
+    \"""Whether each run draws other numbers; philox_rand is handed the state.\"""
+    op = node.target
+    if not isinstance(op, torch._ops.OpOverload) or op.namespace == "rngprims":
+        return False
+    for place, parameter in enumerate(op._schema.arguments):
+        if parameter.name == "dropout_p":
+            given = node.kwargs.get("dropout_p", parameter.default_value)
+            given = node.args[place] if place < len(node.args) else given
+            # A probability that was traced is a node or a symbol.
+            return not isinstance(given, (int, float)) or given != 0
+    return torch.Tag.nondeterministic_seeded in op.tags
+
+
 def has_recomputable_ops(fx_g: fx.GraphModule) -> bool:
@@ torch/_functorch/partitioners.py
+def force_save_random_ops(joint_module: fx.GraphModule) -> None:
+    \"""
+    Keep every random op out of the backward, where it would draw other numbers.
+
+    The cut may save what is made of the numbers instead, such as a dropout's mask.
+    \"""
+    for node in joint_module.graph.nodes:
+        if draws_anew(node) and not must_recompute(node):
+            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
+
+
 def is_getitem_of_multi_output(node: fx.Node) -> bool:
@@ torch/_functorch/partitioners.py min_cut_rematerialization_partition
         joint_module = cleanup_recompute_tags(joint_module, is_default_partition=False)
+    force_save_random_ops(joint_module)
@@ torch/_functorch/partitioners.py choose_saved_values_set until 2.13
-        return node_info.inputs + must_save_nodes
+        if must_save_nodes:
+            return aggressive_recomputation_saved_values
+        return node_info.inputs
"""),
    landed=((PARTITIONERS, "force_save_random_ops("),),
    lacking="below budget 1, dropout gets wrong gradients there, as without the set "
    "(pytorch/pytorch#190758)",
    risks="""\
Below budget 1, plans of nets with random ops keep a mask or a seed where numbers used
to be drawn again, so the same budget recomputes a little more of the rest. Budget 1 and
nets without random ops are untouched. An op that is tagged nondeterministic_seeded but
happens to draw nothing is saved too, unless its dropout_p is known to be 0.
""",
)
