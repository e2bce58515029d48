from __future__ import annotations

from ..patch import Edit, Patch


_GRAPH = "torch/_inductor/graph.py"
_LIST = "                        need_fixed_layout = [\n"
_NEXT = "                            torch.ops.aten.mm.default,\n"
_NODE = "torch.ops.aten.convolution_backward.default"
_APPEND = (
    "                            "
    "need_fixed_layout.append(torch.ops.aten.convolution.default)\n"
)

PATCH = Patch(
    name="conv-layout",
    subject="Store what the backward of a convolution reads in one layout",
    why="""\
Where inductor optimizes layouts, the backward of a convolution copies its arguments
to channels last. By then an argument with other readers has the layout it was traced
with, contiguous in a contiguous net, so it is stored once as traced and once more for
each convolution that reads it. The copies are made by the kernel that makes the
argument, long before they are read. A ResNet-50 whose backward recomputes most of the
forward (bf16, 64 images, an activation memory budget of 0.1) peaks at 3,690 MB by
inductor's schedule for an H100, 2,264 without the copies.

The layout is now left open, as it is for the convolution itself, unless layouts are not
optimized. One channels-last argument then serves all.
""",
    test="test/inductor/test_conv_layout.py",
    edits=(
        Edit(
            _GRAPH,
            anchor=f"{_LIST}                            {_NODE},\n{_NEXT}",
            replacement=_LIST + _NEXT,
            inside="run_node",
        ),
        Edit(
            _GRAPH,
            anchor=_APPEND,
            replacement=f"""\
                            need_fixed_layout.extend(
                                [
                                    torch.ops.aten.convolution.default,
                                    {_NODE},
                                ]
                            )
""",
            inside="run_node",
        ),
    ),
    since=(2, 13),
    trailers=("See also: #189239",),
    landed=((_GRAPH, "need_fixed_layout.extend("),),
    risks="""\
Kernels around convolutions may read and write other layouts than before, which changes
the order of sums in the last digits. Graphs without convolutions do not change.
""",
)
