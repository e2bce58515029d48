# Owner(s): ["module: inductor"]
"""A large embedding's gradient in half precision has no copy in fp32."""

import unittest

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase


aten = torch.ops.aten
WIDTH, ROWS = 8, 64


def gradient(indices, grad):
    return aten.embedding_dense_backward(grad, indices, ROWS, -1, False)


def widest(device, dtype, tokens, **options):
    """The widest type of a whole table in the graph that inductor is given."""
    with FakeTensorMode():
        indices = torch.zeros(tokens, dtype=torch.long, device=device)
        grad = torch.zeros(tokens, WIDTH, dtype=dtype, device=device)
        traced = make_fx(gradient, select_decomp_table(), **options)(indices, grad)
    values = (node.meta.get("val") for node in traced.graph.nodes)
    tables = [value for value in values if getattr(value, "shape", ())[:1] == (ROWS,)]
    return max((table.dtype for table in tables), key=lambda dtype: dtype.itemsize)


class EmbeddingGradientTest(TestCase):
    def test_no_wider_table(self):
        for dtype in (torch.half, torch.bfloat16):
            self.assertEqual(widest("cuda", dtype, ROWS - 1), dtype)

    def test_decomposed_on_a_cpu(self):
        # It sums in the type of the table.
        self.assertEqual(widest("cpu", torch.bfloat16, ROWS - 1), torch.float)

    @unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
    def test_decomposed_where_the_table_is_small(self):
        bf16 = torch.bfloat16
        self.assertEqual(widest("cuda", bf16, ROWS), torch.float)
        options = {"tracing_mode": "symbolic"}
        self.assertEqual(widest("cuda", bf16, ROWS - 1, **options), torch.float)

    @unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
    def test_the_gradient_is_that_of_eager_mode(self):
        generator = torch.Generator("cuda").manual_seed(0)
        options = {"device": "cuda", "generator": generator}
        indices = torch.randint(ROWS // 8, (ROWS - 1,), **options)
        grad = torch.randn(ROWS - 1, WIDTH, dtype=torch.bfloat16, **options)
        self.assertEqual(
            torch.compile(gradient)(indices, grad), gradient(indices, grad)
        )


if __name__ == "__main__":
    run_tests()
