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
    subject="Do not store what the backward of a convolution reads in two layouts",
    why="""\
Where inductor optimizes layouts, the backward of a convolution copies its arguments to
channels last. An argument with other readers has been given the layout it was traced
with by then, which is another one for a contiguous net, so it is stored as it was traced
and once more for each convolution that reads it. The copies are made by the kernel that
makes the argument, long before they are read. A ResNet-50 whose backward repeats most of
the forward (bf16, 64 images, an activation memory budget of .1) peaks at 3,690 MB by
inductor's schedule for an H100, 2,264 without the copies.

The layout is now left open, as it is for the convolution itself, unless layouts are not
optimized. One argument of channels last then serves all.
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
the order of sums in the last digits. Graphs without convolutions are the same.
""",
)
