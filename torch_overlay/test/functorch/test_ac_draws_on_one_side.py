# Owner(s): ["module: functorch"]
"""Random numbers that only a backward needs are the same wherever it reads them."""

import torch
import torch._functorch.config as functorch_config
from torch.testing._internal.common_utils import run_tests, TestCase


# (activation_memory_budget, aggressive_recomputation)
SETTINGS = ((0, False), (0.1, False), (1, False), (1, True))


class NoisyGradient(torch.autograd.Function):
    """A linear layer whose gradients both have the noise that the forward drew."""

    @staticmethod
    def forward(ctx, x, w):
        noise = torch.rand(4, 4, dtype=x.dtype)
        ctx.save_for_backward(x, w, noise)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w, noise = ctx.saved_tensors
        return grad * ((x @ w).sin() * noise).sum(), grad * noise


class DrawsOnOneSideTest(TestCase):
    def test_both_gradients_have_the_same_noise(self):
        for budget, aggressive in SETTINGS:
            torch._dynamo.reset()
            torch.manual_seed(0)
            x, w = (torch.randn(4, 4).double().requires_grad_() for _ in range(2))
            with (
                self.subTest(budget=budget, aggressive=aggressive),
                functorch_config.patch(
                    activation_memory_budget=budget,
                    aggressive_recomputation=aggressive,
                    enable_autograd_cache=False,
                ),
            ):
                backend = "aot_eager_decomp_partition"
                torch.compile(NoisyGradient.apply, backend=backend)(
                    x, w
                ).sum().backward()
                # The gradient of a sum is one, so that of w is the noise.
                scale = ((x @ w).sin() * w.grad).sum().item()
                self.assertEqual(x.grad, torch.full_like(x, scale))


if __name__ == "__main__":
    run_tests()
