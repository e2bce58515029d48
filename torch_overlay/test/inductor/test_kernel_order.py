# Owner(s): ["module: inductor"]
"""No kernel runs so early that its arguments or its results raise the peak."""

from unittest import mock

import torch
from torch._inductor import config, memory
from torch.testing._internal.common_utils import run_tests, TestCase


ROWS, SIDE, LAYERS = 512, 64, 6
# Bytes of what a layer makes again.
UNIT = ROWS * 4 * SIDE * 4


def backward_like(x, condition, *weights):
    """Gradients of layers; each makes two units again, which only it needs."""
    early = condition.sin()
    first = early @ condition
    grad = x
    for wide, back in zip(weights[::2], weights[1::2]):
        again = torch.relu(x @ wide)
        grad = ((grad @ wide) * again) @ back
    return first, early * grad[:SIDE]


def step_like(x, head, *weights):
    """A step whose head is tied: the product for its gradient is read at the end."""
    layers = list(zip(weights[::2], weights[1::2]))
    hidden = [x]
    for wide, _ in layers:
        hidden.append(torch.relu(hidden[-1][:, :SIDE] @ wide))
    logits = torch.relu(hidden[-1][:, :SIDE] @ head)
    grad = logits @ head.t()
    by_head = logits.t() @ x
    gradients = []
    for wide, back in layers:
        grad = (grad @ wide) * hidden.pop()
        gradients.append(grad[:, :8].t() @ x)
        grad = grad @ back
    return *gradients, by_head * grad.sum()


class KernelOrderTest(TestCase):
    def estimated(self, function, *shapes):
        """The peaks of all orders that are compared, by their names."""
        generator = torch.Generator().manual_seed(0)
        weights = (SIDE, 4 * SIDE), (4 * SIDE, SIDE)
        given = [
            torch.randn(shape, generator=generator) / SIDE
            for shape in (*shapes, *(weights * LAYERS))
        ]
        estimates = {}

        def result(order, peak, method):
            estimates[method] = peak
            return inner(order, peak, method)

        inner = memory.PeakMemoryResult
        torch._dynamo.reset()
        with (
            torch.no_grad(),
            # A backward's nodes are not moved next to what reads them.
            config.patch(reorder_for_locality=False),
            mock.patch.object(memory, inner.__name__, result),
        ):
            found = torch.compile(function)(*given)
        self.assertEqual(found, function(*given))
        return estimates

    def test_what_is_fused_over_a_long_way(self):
        estimates = self.estimated(backward_like, (ROWS, SIDE), (SIDE, SIDE))
        # A layer's two beside what comes in or goes out, not those of all layers.
        ours = {
            estimates.pop("topological_sort_last"),
            estimates.pop("topological_sort_lazy"),
        }
        self.assertLess(max(ours), 3.5 * UNIT)
        self.assertGreater(min(estimates.values()), LAYERS * UNIT)

    def test_what_is_read_at_the_end(self):
        rows, words = 96, 16 * SIDE
        estimates = self.estimated(step_like, (rows, SIDE), (SIDE, words))
        # The product is not there while all that the layers keep is.
        product = words * SIDE * 4
        early, late = (
            estimates[f"topological_sort_{name}"] for name in ("last", "lazy")
        )
        self.assertLess(late, early - product / 2)


if __name__ == "__main__":
    run_tests()
