from __future__ import annotations

from ..patch import CONFIG, Edit, GRAPH_COMPILE, module_path, Patch


_COMPILERS = "        inference_compiler = fw_compiler\n"
_NEXT_IMPORT = "from .aot_autograd_result import"
_IMPORT = (
    "from .._activation_checkpointing.frozen_layers import without_unread_arguments\n"
)

PATCH = Patch(
    name="frozen-layers",
    subject="Do not save tensors of which the backward only needs the shape",
    why="""\
A frozen convolution needs the gradient of its input, which comes from the weight,
and still saves that input: convolution_backward takes it as an argument, output
mask (True, False, False) or not, and the partitioner sees the argument. The same
holds for batch norm in eval mode, for grid samplers with a fixed grid, and for
pooling and padding, whose backward uses nothing but the sizes.

A pass ahead of the partitioner gives such operators an uninitialized tensor of
the same sizes and strides, made in the backward. A table says for each operator
which outputs depend on the values of which argument; everything else stays.
AOTAutograd runs it on every joint graph before any partitioner; for inductor, with
the layouts that inductor is going to choose.
""",
    test="test/functorch/test_ac_frozen_layers.py",
    sources=(module_path("frozen_layers"),),
    edits=(
        Edit(
            CONFIG,
            anchor="# By default, the partitioner is purely trying to optimize for "
            "runtime (although\n",
            replacement="""\
# Give backward operators a stand-in for an argument of which they only use the shape
# (the input of a frozen convolution, say), so that it need not be saved.
drop_unread_arguments = True

# By default, the partitioner is purely trying to optimize for runtime (although
""",
        ),
        Edit(
            GRAPH_COMPILE,
            anchor=_NEXT_IMPORT,
            replacement=_IMPORT + _NEXT_IMPORT,
        ),
        Edit(
            GRAPH_COMPILE,
            anchor=_COMPILERS,
            replacement=_COMPILERS
            + "    partition_fn = without_unread_arguments(partition_fn)\n",
            inside="aot_stage2_compile",
        ),
    ),
    since=(2, 11),
    landed=((GRAPH_COMPILE, "without_unread_arguments("),),
    risks="""\
A kernel that did read the values of such an argument would give wrong gradients
silently. So the table gives a reason for each operator, and the tests fill the argument
with NaN and compare bit for bit, on CPU and, where there is a GPU, on CUDA. The pass
leaves other devices alone, and config.drop_unread_arguments turns it off.
""",
    evidence=(
        ("frozen", "ResNet-50-like"),
        ("frozen", "U-Net"),
    ),
    kind="improvements",
)
