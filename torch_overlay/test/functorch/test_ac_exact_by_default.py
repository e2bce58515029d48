# Owner(s): ["module: functorch"]
"""A budget is solved exactly unless the config asks for something else."""

from unittest.mock import patch

import torch
from torch._functorch import config
from torch._functorch._activation_checkpointing.knapsack import KNAPSACK_SOLVERS
from torch.testing._internal.common_utils import run_tests, TestCase


def chain(x, *weights):
    for weight in weights:
        x = x @ weight
    return x.sum()


class TestExactByDefault(TestCase):
    def test_the_exact_solver_is_asked(self):
        asked = []
        exact = KNAPSACK_SOLVERS["exact"]

        def spy(*args):
            asked.append("exact")
            return exact(*args)

        inputs = [torch.ones(8, 8, requires_grad=True) for _ in range(5)]
        with (
            patch.dict(KNAPSACK_SOLVERS, {"exact": spy}),
            config.patch(activation_memory_budget=0.5),
        ):
            torch.compile(chain, backend="aot_eager_decomp_partition")(*inputs)
        self.assertEqual(asked, ["exact"])
        self.assertEqual(config.activation_memory_budget_solver, "exact")


if __name__ == "__main__":
    run_tests()
