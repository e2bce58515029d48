# Owner(s): ["module: functorch"]
"""The sliding Hirschberg solver is selected by config.NAME and by the string."""

from torch._functorch import config
from torch._functorch._activation_checkpointing import knapsack
from torch.testing._internal.common_utils import run_tests, TestCase


class TestConfigSolverName(TestCase):
    def test_the_name_is_the_string(self):
        name = "dp_knapsack_sliding_hirschberg"
        self.assertEqual(config.dp_knapsack_sliding_hirschberg, name)
        self.assertTrue(hasattr(knapsack, name))
        with config.patch(
            activation_memory_budget_solver=config.dp_knapsack_sliding_hirschberg
        ):
            self.assertEqual(config.activation_memory_budget_solver, name)


if __name__ == "__main__":
    run_tests()
