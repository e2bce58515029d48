from ..patch import edits, module_path, PARTITIONERS, Patch


PATCH = Patch(
    name="overwritten-inputs",
    subject="Do not let the backward read an input that the forward overwrites",
    why="""\
A net may read a buffer and overwrite it later in its forward: a codebook, a queue of
keys, a running mean that is used. The partitioner saves such an input as any other, or
a view of it, or computes from it again, and the backward reads what was written. Under
inductor the gradients are silently wrong, with no budget set; where AOTAutograd writes
after the graph, the backward raises. The clone that a user makes of such a buffer does
not help, as inductor's joint passes remove it.

What reaches the backward now reads a copy of the input, which only the forward may make.
The copy is saved, or what is made of it, whichever is smaller. Where it is not saved, it
is not made.
""",
    trailers=("See also: #197039", "See also: #185876"),
    test="test/functorch/test_ac_overwritten_inputs.py",
    sources=(module_path("overwritten_inputs"),),
    edits=edits("""\
@@ torch/_functorch/partitioners.py
+from ._activation_checkpointing.overwritten_inputs import (
+    copy_overwritten_inputs,
+    drop_unsaved_copies,
+)
 from ._aot_autograd.descriptors import (
@@ torch/_functorch/partitioners.py _extract_fwd_bwd_modules
+    drop_unsaved_copies(fwd_graph, saved_values)
     fwd_module = fx._lazy_graph_module._make_graph_module(joint_module, fwd_graph)
@@ torch/_functorch/partitioners.py default_partition
-    saved_values = []
+    # Copies of inputs, which were made last.
+    saved_values = [node for node in node_info.inputs if node.op != "placeholder"]
     saved_sym_nodes = []
@@ torch/_functorch/partitioners.py classify_nodes
+    copies = copy_overwritten_inputs(joint_module, num_fwd_outputs)
     name_to_node = get_name_to_node(joint_module.graph)
@@ torch/_functorch/partitioners.py classify_nodes
+    required_fw_nodes.update(copies)
     unclaimed_nodes: OrderedSet[fx.Node] = OrderedSet(
@@ torch/_functorch/partitioners.py classify_nodes
     return NodeInfo(
-        inputs,
+        inputs + copies,
"""),
    landed=((PARTITIONERS, "copy_overwritten_inputs("),),
    minimal=Patch(
        name="overwritten-inputs",
        lines=30,
        since=(2, 12),
        subject="Save copies of inputs that the forward overwrites",
        why="""\
A net may read a buffer and overwrite it later in its forward: a codebook, a queue of
keys, a running mean that is used. The partitioner saves such an input, or a view of it,
as any other, and the backward reads what was written. Under inductor the graph itself
writes to the input, and the gradients are silently wrong with no budget set, by three to
130 % of their norm in the nets below. A clone that the user makes of a row does not help,
as inductor's joint passes remove it. Where AOTAutograd writes after the graph, the
backward raises.

Once the partitioner has chosen what to save, each saved value that is an input which the
forward overwrites, or a view of one, is replaced by a clone of it. The backward reads the
clone and recomputes from it; the forward makes it and is otherwise as it was. This comes
after any budget and for both partitioners, and other graphs do not change.
""",
        repro="""\
import torch

@torch.compile
def net(x, buffer):
    loss = ((x * buffer[0].clone()).tanh() * buffer[1].clone()).sum()
    buffer.copy_(buffer.roll(1, 0))
    return loss

torch.manual_seed(0)
x, buffer = torch.randn(64, 32, requires_grad=True), torch.randn(2, 32)
one, other = buffer.clone()
expected = one * other * (1 - (x * one).tanh().square())
net(x, buffer).backward()
print("off by", ((x.grad - expected).norm() / expected.norm()).item())
""",
        beyond="""\
- The copies are not counted: the partitioner takes the input as free to save, as before.
  Something smaller that is made of it might have been saved instead.
- A view is copied by itself, at its own size.
- Parts of a tensor subclass are copied where the graph writes to them, as under inductor.
  Where AOTAutograd writes to the subclass after the graph, gradients stay wrong.
- An input that the forward sets to another storage (set_) is saved as before.
""",
        trailers=("See also: #197039", "See also: #185876"),
        test="test/functorch/test_ac_saved_copies.py",
        risks="""\
The forward makes a copy of each saved input that it overwrites, and the copy lives until
the backward. Running statistics of a batch norm in training are not saved, so they are
not copied. An input that the backward writes to as well stays saved beside its copy.
""",
        edits=edits("""\
@@ torch/_functorch/partitioners.py
+    InputMutationAOTOutput,
     SavedForBackwardsAOTOutput,
@@ torch/_functorch/partitioners.py
+def _copy_overwritten(
+    graph: fx.Graph, descs: list[AOTOutput], saved_values: list[fx.Node]
+) -> dict[fx.Node, fx.Node]:
+    \"""Save copies of the inputs that the forward overwrites, and of their views.\"""
+    writes = graph.find_nodes(op="call_function", target=aten.copy_.default)
+    copied = [node.args[0] for node in writes if _must_be_in_forward(node)]
+    # AOTAutograd writes to these after the forward.
+    mutated = [d.mutated_input for d in descs if isinstance(d, InputMutationAOTOutput)]
+    copies = {}
+    for node in [*saved_values]:
+        base: Any = node
+        while base.target is operator.getitem or getattr(base.target, "is_view", False):
+            base = base.args[0]
+        if base in copied or base.meta.get("desc") in mutated:
+            with graph.inserting_after(node):
+                copies[node] = graph.call_function(aten.clone.default, (node,))
+            copies[node].meta = {"val": node.meta["val"].clone()}
+            saved_values.append(copies[node])
+            if not any(map(_must_be_in_backward, node.users)):
+                saved_values.remove(node)
+    return copies
+
+
 def _extract_fwd_bwd_modules(
@@ torch/_functorch/partitioners.py _extract_fwd_bwd_modules
+        copies = _copy_overwritten(joint_module.graph, fwd_outputs_descs, saved_values)
         saved_values_with_vc_check = []
@@ torch/_functorch/partitioners.py _extract_fwd_bwd_modules
+        # From here on, only the backward's readers matter.
+        for node, copy in copies.items():
+            node.replace_all_uses_with(copy, lambda n: n.target != aten.copy_.default)
+            copy.args = (node,)
+        bwd_outputs = [copies.get(node, node) for node in bwd_outputs]
         bwd_graph = _extract_graph_with_inputs_outputs(
             joint_module.graph,
             saved_sym_nodes
             + saved_values
             + saved_opaque_objects
"""),
        landed=((PARTITIONERS, "_copy_overwritten("),),
    ),
)
