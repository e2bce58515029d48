# Owner(s): ["module: functorch"]
"""A budget is solved exactly unless the config asks for something else."""

from unittest.mock import patch

from test_ac_solver_by_name import compile_chain

from torch._functorch import config
from torch._functorch._activation_checkpointing.knapsack import KNAPSACK_SOLVERS
from torch.testing._internal.common_utils import run_tests, TestCase


class TestExactByDefault(TestCase):
    def test_the_exact_solver_is_asked(self):
        asked = []
        exact = KNAPSACK_SOLVERS["exact"]

        def spy(*args):
            asked.append("exact")
            return exact(*args)

        with patch.dict(KNAPSACK_SOLVERS, {"exact": spy}):
            compile_chain(config.activation_memory_budget_solver)
        self.assertEqual(asked, ["exact"])
        self.assertEqual(config.activation_memory_budget_solver, "exact")


if __name__ == "__main__":
    run_tests()
