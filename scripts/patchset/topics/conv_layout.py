from ..patch import Edit, Patch


_GRAPH = "torch/_inductor/graph.py"
_LIST = "                        need_fixed_layout = [\n"
_NEXT = "                            torch.ops.aten.mm.default,\n"
_NODE = "torch.ops.aten.convolution_backward.default"

PATCH = Patch(
    name="conv-layout",
    subject="Store what the backward of a convolution reads in one layout",
    why="""\
Where inductor optimizes layouts, the backward of a convolution copies its arguments
to channels last. An argument with other readers is stored once as traced and once more
for each convolution that reads it, long before that. A ResNet-50 whose backward
recomputes most of the forward peaks at 3,690 MB by inductor's schedule for an H100,
2,264 without the copies.

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
            anchor="                            "
            "need_fixed_layout.append(torch.ops.aten.convolution.default)\n",
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
Kernels around convolutions may read and write other layouts, which changes the order
of sums.
""",
)
