from ..patch import edits, module_path, PARTITIONERS, Patch


PATCH = Patch(
    name="overwritten-inputs",
    lines=30,
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
+    drop_unsaved_copies(joint_module.graph, saved_values)
+
     # Now that we have the finalized list of saved values, we need to ensure
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
    risks="""\
Where the backward needs an input that the forward overwrites, the forward copies it.
Other graphs do not change: statistics that a decomposed batch norm only updates, say.
""",
)
