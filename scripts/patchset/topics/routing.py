from ..patch import edits, PARTITIONERS, Patch


PATCH = Patch(
    name="routing",
    lines=60,
    subject="Do not recompute what decides which elements are read",
    why="""\
Inductor stores a value in bfloat16 for the backward, while the kernel that computed it
goes on with all of its digits. If the backward recomputes a router from what was stored,
a gate of 0.5001 is 0.5, and the token goes to another expert than in the forward. The
gradients then belong to another forward: an expert gets those of tokens that it never
saw. It happens under a memory budget and within checkpoints.

Ops that decide what is read are now found and marked MUST_SAVE. These are ops that make
integers or booleans of values that may be rounded, if the result is positions (topk,
sort, argmax) or becomes an index, a mask that selects rows, a size or a branch's
predicate. The positions are kept, or the numbers of the experts: some bytes per token.
""",
    repro="""\
import torch, torch._functorch.config as config

config.activation_memory_budget = 0.5

@torch.compile
def net(x, gate, experts):
    gate = (x * gate).sum(-1).sigmoid()
    return experts[(gate > 0.5).long()], gate.square().sum()

x = torch.randn(4096, 64).bfloat16()
gate = (torch.randn(64) * 0.02).bfloat16().requires_grad_()
experts = torch.arange(2.0, requires_grad=True)
went, loss = net(x, gate, experts)
(went.sum() + loss).backward()
print("forward", went.long().bincount().tolist(), "backward", experts.grad.tolist())
""",
    beyond="""\
- config.emulate_precision_casts_on_saved_tensors, on by default, does not help: it rounds
  what pointwise kernels save, and routers end in a reduction or a product, as here.
- A position that is counted or rounded in floating point is kept only where it becomes
  an integer. A weight made of the rounded value may still differ.
- Decisions inside of a higher-order op are not seen.
- Where the forward of an eager checkpoint differs from its recomputation, it still does.
- The mask of a ReLU or a where is recomputed as before: near the threshold both of its
  choices are about the same.
""",
    trailers=("See also: #186572",),
    test="test/functorch/test_ac_routing.py",
    edits=edits("""\
@@ torch/_functorch/partitioners.py
+# Their integer results are positions, whatever reads them.
+SELECTIONS = (
+    "argmax argmin bucketize cummax cummin kthvalue max median min mode nanmedian "
+    "nonzero searchsorted sort topk"
+)
+
+
+def is_exact(node: fx.Node) -> bool:
+    \"""Whether a tensor holds masks or positions; smaller integers may be quantized.\"""
+    dtypes = torch.bool, torch.int16, torch.int32, torch.int64
+    return getattr(node.meta.get("val"), "dtype", None) in dtypes
+
+
+def find_decisions(
+    graph: fx.Graph, exact: OrderedSet[fx.Node], backward: OrderedSet[fx.Node]
+) -> OrderedSet[fx.Node]:
+    \"""
+    Find the forward ops that decide which elements are read, such as a router's topk.
+
+    They make exact values of others that may be rounded. What they make is positions,
+    or becomes an index, a mask that selects rows, a size or a branch's predicate. The
+    mask of a ReLU is none: where it may flip, both of its choices are about the same.
+    \"""
+    decisions, read_by = OrderedSet[fx.Node](), OrderedSet[fx.Node]()
+    for node in reversed(graph.nodes):
+        if node.op != "call_function" or node in backward:
+            continue
+        inputs, tags = node.all_input_nodes, getattr(node.target, "tags", ())
+        tensors = [x for x in inputs if isinstance(x.meta.get("val"), torch.Tensor)]
+        rounded = any(x not in exact for x in tensors)
+        parts = [x for x in node.users if x.target is operator.getitem]
+        selects = getattr(node.target, "_opname", "") in SELECTIONS.split()
+        if node in read_by and node.target is operator.getitem:
+            read_by.update(inputs)
+        elif node in read_by or (selects and any(map(is_exact, parts or [node]))):
+            read_by.update(x for x in tensors if x in exact)
+            if rounded:
+                decisions.add(node)
+        if (
+            (rounded and torch.Tag.pointwise not in tags)
+            or torch.Tag.data_dependent_output in tags
+            or torch.Tag.dynamic_output_shape in tags
+        ):
+            read_by.update(filter(is_exact, tensors))
+    return decisions
+
+
+def force_save(nodes: OrderedSet[fx.Node]) -> None:
+    for node in nodes:
+        if node.meta.get("recompute") != CheckpointPolicy.MUST_RECOMPUTE:
+            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
+            # A tuple cannot be saved: its parts must not be recomputed either.
+            for part in filter(must_recompute, node.users):
+                if part.target is operator.getitem:
+                    del part.meta["recompute"]
+
+
 def solve_min_cut(
@@ torch/_functorch/partitioners.py min_cut_rematerialization_partition
+    exact = OrderedSet(filter(is_exact, joint_graph.nodes))
+    force_save(find_decisions(joint_graph, exact, node_info.tangents_closure))
+
     # networkx blows up on graphs with no required backward nodes
"""),
    landed=((PARTITIONERS, "find_decisions("),),
    risks="""\
Plans of nets that route, sort or index by what they compute keep the positions, at
every budget above 0, and plain checkpoints keep them too, unless a MUST_RECOMPUTE tag
insists. Other plans do not change. The list of ops that return positions has to grow
with new ones.
""",
)
