from ..patch import edits, GRAPH_COMPILE, module_path, PARTITIONERS, Patch


_CONVOLUTIONS = "test/functorch/test_ac_frozen_convolutions.py"

PATCH = Patch(
    name="frozen-layers",
    subject="Do not save tensors of which the backward only needs the shape",
    why="""\
A frozen convolution needs the gradient of its input, which comes from the weight,
and still saves that input: convolution_backward takes it as an argument, whatever its
output mask, and the partitioner sees the argument. The same holds for batch norm in
eval mode, for grid samplers with a fixed grid, and for pooling and padding.

A pass ahead of every partitioner gives such operators an uninitialized tensor of the
same sizes and strides, made in the backward. A table says for each operator which
outputs depend on the values of which argument.
""",
    test="test/functorch/test_ac_frozen_layers.py",
    sources=(module_path("frozen_layers"), _CONVOLUTIONS),
    edits=edits("""\
@@ torch/_functorch/config.py
+# Give backward operators a stand-in for an argument of which they only use the shape
+# (the input of a frozen convolution, say), so that it need not be saved.
+drop_unread_arguments = True
+
 # By default, the partitioner is purely trying to optimize for runtime (although
@@ torch/_functorch/_aot_autograd/graph_compile.py
 from .. import config
+from .._activation_checkpointing.frozen_layers import without_unread_arguments
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile
         inference_compiler = fw_compiler
+    partition_fn = without_unread_arguments(partition_fn)
"""),
    landed=((GRAPH_COMPILE, "without_unread_arguments("),),
    minimal=Patch(
        name="frozen-layers",
        lines=60,
        subject="Do not save the input of a frozen convolution",
        why="""\
Training often runs through frozen convolutions: of a backbone, the stem or the norms
alone are trained, or a perceptual loss or a discriminator passes a gradient on to an
image. The
gradient of such a convolution's input is computed from grad_output and the weight alone.
But convolution_backward takes the input as an argument, whatever its output mask, and the
partitioner saves what is an argument: a frozen network keeps as many bytes for its
backward as a trained one. Eager mode does so, too. Frozen linear layers keep none.

With config.drop_unread_arguments, which is off by default, min_cut_rematerialization_partition
first gives every convolution_backward that does not compute the gradient of its weight an
uninitialized tensor with the sizes and strides of its input. It is made in the backward,
from grad_output, and lives for that one operator. Where another operator of the backward
reads the input anyway, and where sizes are symbolic, nothing changes.
""",
        repro="""\
import torch
import torch._functorch.config as config
from torch import nn

config.drop_unread_arguments = True  # without this change there is no such option
frozen = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(8)))
net = torch.compile(frozen.requires_grad_(False), backend="aot_eager_decomp_partition")
image, saved = torch.randn(4, 16, 64, 64, requires_grad=True), {}
with torch.autograd.graph.saved_tensors_hooks(
    lambda t: saved.setdefault(t.untyped_storage()._cdata, t), lambda t: t
):
    net(image).sum().backward()
print(sum(t.nbytes for t in saved.values() if t.shape == image.shape))
# 8388608 without this change (and that line), the inputs of all layers; 0 with it
""",
        beyond="""\
Other operators that take an argument for its shape alone (batch norm in eval mode,
pooling, padding, grid samplers with a fixed grid) and eager mode. Dynamic shapes save
what they did: inductor cannot lay out an empty tensor of symbolic sizes.
""",
        test=_CONVOLUTIONS,
        edits=edits('''\
@@ torch/_functorch/config.py
+# Give convolution_backward a stand-in for its input where it does not compute the
+# gradient of its weight, so that frozen convolutions need not save their inputs.
+drop_unread_arguments = False
+
 # By default, the partitioner is purely trying to optimize for runtime (although
@@ torch/_functorch/partitioners.py
+def _drop_unread_inputs_of_convolutions(graph: fx.Graph) -> None:
+    """
+    Spare frozen convolutions their inputs: convolution_backward reads only the sizes of
+    its input where it does not compute the gradient of its weight. It gets an
+    uninitialized tensor, made in the backward, so that the input need not be saved.
+    """
+    in_backward: OrderedSet[fx.Node] = OrderedSet()
+    for node in graph.nodes:
+        if _is_tangent(node) or not in_backward.isdisjoint(node.all_input_nodes):
+            in_backward.add(node)
+
+    def reads_input(node: fx.Node) -> bool:
+        if node.target is not torch.ops.aten.convolution_backward.default:
+            return True
+        output_mask: Any = node.args[-1]
+        return output_mask[1] is not False
+
+    for node in graph.find_nodes(
+        op="call_function", target=torch.ops.aten.convolution_backward.default
+    ):
+        grad_output, conv_input, weight, *_ = node.args
+        if conv_input in in_backward or conv_input in (grad_output, weight):
+            continue
+        # If the backward reads it elsewhere, it is saved or recomputed in any case.
+        if any(reads_input(user) for user in conv_input.users if user in in_backward):
+            continue
+        value = conv_input.meta["val"]
+        if free_symbols(value):
+            continue
+        # Kernels choose their layout by the strides of the input.
+        args = (grad_output, [*value.shape], [*value.stride()])
+        with graph.inserting_before(node):
+            stand_in = graph.call_function(
+                torch.ops.aten.new_empty_strided.default, args
+            )
+        with value.fake_mode:
+            stand_in.meta["val"] = grad_output.meta["val"].new_empty_strided(*args[1:])
+        node.update_arg(1, stand_in)
+
+
 def min_cut_rematerialization_partition(
@@ torch/_functorch/partitioners.py min_cut_rematerialization_partition
     joint_graph = joint_module.graph
+    if config.drop_unread_arguments:
+        _drop_unread_inputs_of_convolutions(joint_graph)
'''),
        landed=((PARTITIONERS, "_drop_unread_inputs_of_convolutions("),),
        risks="""\
A kernel that did read the values of its input would give wrong gradients silently. The
test fills all uninitialized memory with NaN and compares bit for bit. A backend that
runs the graph operator by operator may compute the masks of ReLUs only at the end of the
forward, and so keep their inputs until then; inductor fuses them.
""",
    ),
)
