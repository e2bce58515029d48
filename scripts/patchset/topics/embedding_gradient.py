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
operator: it sorts the indices, sums in fp32, and writes half precision.
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
Times were not measured on a GPU. Sums have another order than before, that of eager
mode. Dynamic shapes keep the decomposition.
""",
)
