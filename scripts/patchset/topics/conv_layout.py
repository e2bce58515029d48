from ..patch import edits, Patch


PATCH = Patch(
    name="conv-layout",
    lines=60,
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
    repro="""\
import torch
from torch._inductor.utils import run_and_get_code

aten, conv = torch.ops.aten, ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

def repeats(x, w, grad):
    x = torch.relu(x)
    grad = grad * aten.convolution(x, w, None, *conv)
    return aten.convolution_backward(grad, x, w, None, *conv, [True, True, False])[:2]

shapes = (4, 16, 32, 32), (16, 16, 3, 3), (4, 16, 32, 32)
with torch.no_grad():
    inputs = [torch.randn(shape).double() for shape in shapes]
    _, (code,) = run_and_get_code(torch.compile(repeats), *inputs)
print(code.count("= empty_strided_cpu((4, 16, 32, 32),"))  # 2, with this change 1
""",
    beyond="""\
The backward of a net without a budget, or without checkpoints, hardly changes: what its
convolutions read was stored by the forward. The cost of layouts is not compared.
""",
    test="test/inductor/test_conv_layout.py",
    edits=edits("""\
@@ torch/_inductor/graph.py run_node
                         need_fixed_layout = [
-                            torch.ops.aten.convolution_backward.default,
                             torch.ops.aten.mm.default,
@@ torch/_inductor/graph.py run_node
-                            need_fixed_layout.append(torch.ops.aten.convolution.default)
+                            need_fixed_layout.extend(
+                                [
+                                    torch.ops.aten.convolution.default,
+                                    torch.ops.aten.convolution_backward.default,
+                                ]
+                            )
"""),
    since=(2, 13),
    trailers=("See also: #189239",),
    landed=(("torch/_inductor/graph.py", "need_fixed_layout.extend("),),
    risks="""\
Kernels around convolutions may read and write other layouts, which changes the order
of sums.
""",
)
