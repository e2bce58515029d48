# Owner(s): ["module: functorch"]
"""The partitioner finds every solver of the knapsack module by its name."""

from unittest.mock import patch

import torch
from torch._functorch import config, partitioners
from torch._functorch._activation_checkpointing.knapsack import KNAPSACK_SOLVERS
from torch.testing._internal.common_utils import run_tests, TestCase


def chain(x, *weights):
    for weight in weights:
        x = x @ weight
    return x.sum()


def compile_chain(solver):
    torch._dynamo.reset()
    inputs = [torch.ones(8, 8, requires_grad=True) for _ in range(5)]
    with config.patch(
        activation_memory_budget=0.5, activation_memory_budget_solver=solver
    ):
        torch.compile(chain, backend="aot_eager_decomp_partition")(*inputs)


class TestSolverByName(TestCase):
    def test_a_name_reaches_its_solver(self):
        for name in list(KNAPSACK_SOLVERS):
            asked = []

            def spy(memory, *_, name=name, asked=asked):
                asked.append(name)
                return 0.0, [], list(range(len(memory)))

            with patch.dict(KNAPSACK_SOLVERS, {name: spy}):
                compile_chain(name)
            self.assertEqual({*asked}, {name})

    def test_an_unknown_name_is_told_the_known_ones(self):
        with self.assertRaisesRegex(Exception, "no_such_solver") as caught:
            compile_chain("no_such_solver")
        for name in KNAPSACK_SOLVERS:
            self.assertIn(name, str(caught.exception))
        self.assertIs(partitioners.config, config)


if __name__ == "__main__":
    run_tests()
