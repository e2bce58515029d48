# Owner(s): ["module: inductor"]
"""A product does not keep its arguments until what it is added to is there."""

import torch
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import run_tests, TestCase


SIDE, LONG = 16, 256


def tied(logits, hidden, grad):
    """The gradient of a weight that is read at the start and at the end of a net."""
    by_head = logits.exp().t() @ hidden
    for _ in range(2):
        grad = grad @ grad
    return by_head + grad.cos()


def compiled(function, *inputs):
    with torch.no_grad():
        found, (code,) = run_and_get_code(torch.compile(function), *inputs)
    return found, code


class LateAddendTest(TestCase):
    def given(self, rows):
        generator = torch.Generator().manual_seed(0)
        shapes = (rows, SIDE), (rows, SIDE), (SIDE, SIDE)
        return [torch.randn(shape, generator=generator) / SIDE for shape in shapes]

    def test_the_product_is_computed_at_once(self):
        given = self.given(LONG)
        found, code = compiled(tied, *given)
        self.assertEqual(found, tied(*given))
        self.assertNotIn("addmm", code)

    def test_small_arguments_may_wait(self):
        given = self.given(SIDE // 4)
        found, code = compiled(tied, *given)
        self.assertEqual(found, tied(*given))
        self.assertIn("addmm", code)

    def test_an_addend_that_is_there(self):
        logits, hidden, grad = self.given(LONG)

        def biased(logits, hidden, grad):
            return grad.cos() + logits.exp().t() @ hidden

        found, code = compiled(biased, logits, hidden, grad)
        self.assertEqual(found, biased(logits, hidden, grad))
        self.assertIn("addmm", code)


if __name__ == "__main__":
    run_tests()
