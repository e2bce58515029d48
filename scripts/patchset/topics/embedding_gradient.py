from ..patch import edits, Patch


PATCH = Patch(
    name="embedding-gradient",
    lines=60,
    subject="Keep no wider copy of a large embedding's gradient",
    why="""\
In half precision, inductor scatters the gradient of an embedding into a table of fp32
and casts that, while all other gradients are there. With a large vocabulary this is the
peak of a step: 5,948 MB for four layers of a Llama-3-8B, 3,152 of them the two tables.

Where the table has more rows than there are indices, CUDA devices now get ATen's
operator, which sums in fp32 and writes half precision.
""",
    repro="""\
import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

def gradient(indices, grad):
    return torch.ops.aten.embedding_dense_backward(grad, indices, 128256, -1, False)

with FakeTensorMode():
    indices = torch.zeros(4096, dtype=torch.long, device="cuda")
    grad = torch.zeros(4096, 4096, dtype=torch.bfloat16, device="cuda")
    graph = make_fx(gradient, select_decomp_table())(indices, grad).graph
values = [node.meta["val"] for node in graph.nodes if node.op == "call_function"]
print({v.dtype for v in values if v.shape[:1] == (128256,)})  # with bf16 also fp32
""",
    beyond="""\
CPUs, whose kernel sums in the type of the table, dynamic shapes, and tables with no more
rows than there are indices keep the decomposition. So do embedding bags.
""",
    test="test/inductor/test_embedding_gradient.py",
    edits=edits("""\
@@ torch/_inductor/decomposition.py _embedding_dense_backward
     if grad_output.is_xpu:
         return NotImplemented
+    # The table in a wider type is as large as all of its rows, ATen's scratch memory as
+    # the rows that are read.
+    if (
+        grad_output.is_cuda
+        and grad_output.dtype in (torch.half, torch.bfloat16)
+        and statically_known_true(num_weights > indices.numel())
+    ):
+        return NotImplemented
@@ torch/_inductor/lowering.py
         "aten::index_add",
+        "aten::embedding_dense_backward",
"""),
    since=(2, 13),
    landed=(
        (
            "torch/_inductor/decomposition.py",
            "statically_known_true(num_weights > indices.numel())",
        ),
    ),
    risks="""\
Nothing was run on a GPU: neither times nor what the operator takes for itself are known.
Sums have another order than before, that of eager mode.
""",
)
