from __future__ import annotations

from ..patch import COMPILE_FX, CONFIG, Edit, PARTITIONERS, Patch, UNREAD


_DESCRIPTORS = "from ._aot_autograd.descriptors import"
_MIN_CUT = "    fx_g = joint_module.graph\n"
_DEFAULT = (
    "    # Respect the original placement of ops rather than rely on dataflow.\n"
    "    forward_nodes = []\n"
)
_INDUCTOR = "    if config.custom_partitioner_fn is None:\n"
_PARAMETRIZATION = (
    "from torch._functorch._aot_autograd.subclass_parametrization import (\n"
)
_CALL = "    drop_unread_arguments(joint_module, static_lifetime_input_indices)\n"
_SINCE = (2, 10)

PATCH = Patch(
    name="frozen-layers",
    subject="Save no tensor of which the backward only looks at the shape",
    why="""\
A frozen convolution needs the gradient of its input, which comes from the weight,
and still saves that input: convolution_backward takes it as an argument, output
mask (True, False, False) or not, and the partitioner sees the argument. The same
holds for batch norm in eval mode, for grid samplers with a fixed grid, and for
pooling and padding, whose backward uses nothing but the sizes.

A pass ahead of the partitioner gives such operators an uninitialized tensor of
the same sizes and strides, made in the backward. A table says for each operator
which outputs depend on the values of which argument; everything else stays.
Inductor calls the pass itself, with the layouts that it is going to choose.
config.drop_unread_arguments turns the pass off.
""",
    trailers=(),
    tested="python test/functorch/test_ac_frozen_layers.py",
    files=(UNREAD, "test/functorch/test_ac_frozen_layers.py"),
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
            since=_SINCE,
        ),
        Edit(
            PARTITIONERS,
            anchor=_DESCRIPTORS,
            replacement="from ._activation_checkpointing.unread_arguments import "
            f"drop_unread_arguments\n{_DESCRIPTORS}",
            since=_SINCE,
        ),
        Edit(
            PARTITIONERS,
            anchor=_DEFAULT,
            replacement=_CALL + _DEFAULT,
            inside="default_partition",
            since=_SINCE,
        ),
        Edit(
            PARTITIONERS,
            anchor=_MIN_CUT,
            replacement=_CALL + _MIN_CUT,
            inside="min_cut_rematerialization_partition",
            since=_SINCE,
        ),
        Edit(
            COMPILE_FX,
            anchor=_PARAMETRIZATION,
            replacement="""\
from torch._functorch._activation_checkpointing.unread_arguments import (
    drop_unread_arguments,
)
"""
            + _PARAMETRIZATION,
            since=_SINCE,
        ),
        Edit(
            COMPILE_FX,
            anchor=_INDUCTOR,
            replacement="    drop_unread_arguments("
            "gm, static_lifetime_input_indices, for_inductor=True)\n" + _INDUCTOR,
            inside="partition_fn",
            since=_SINCE,
        ),
    ),
    landed=((PARTITIONERS, "drop_unread_arguments("),),
    risks="""\
A kernel that read the values of such an argument after all would give wrong gradients
without a word: the table names each operator with its reason, and the tests fill the
argument with NaN and compare bit for bit, on CPU and, where there is a GPU, on CUDA.
Other devices are left alone, and config.drop_unread_arguments turns the pass off.
""",
    evidence=(
        ("frozen", "convolution, none trainable"),
        ("frozen", "ResNet-50-like"),
        ("frozen", "U-Net"),
    ),
    kind="improvements",
)
