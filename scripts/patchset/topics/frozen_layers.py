from ..patch import edits, GRAPH_COMPILE, module_path, Patch


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
    sources=(module_path("frozen_layers"),),
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
    risks="""\
A kernel that did read the values of such an argument would give wrong gradients
silently. The tests fill the argument with NaN and compare bit for bit, on CPU and
CUDA. Other devices are left alone, and config.drop_unread_arguments turns it off.
""",
)
