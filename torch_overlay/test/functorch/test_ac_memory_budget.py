# Owner(s): ["module: functorch"]
"""What is said of a memory budget that is wrong or that is not kept."""

import math
import re
import unittest

import torch
from torch._functorch import config
from torch._functorch._activation_checkpointing import knapsack
from torch._inductor import custom_graph_pass
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


LOG = "torch._functorch._activation_checkpointing.budget_checks"
SOLVER = "activation_memory_budget_solver"
ESTIMATOR = "activation_memory_budget_runtime_estimator"
ROWS = 50
WIDTHS = (40, 96, 24, 64, 16, 80, 48, 104, 32)


def chain(x, *weights):
    for weight in weights:
        x = x @ weight
    return x


def chain_inputs():
    shapes = [(ROWS, WIDTHS[0]), *zip(WIDTHS, WIDTHS[1:])]
    return [torch.ones(*shape, requires_grad=True) for shape in shapes]


def saved_bytes(function, inputs, parameters=(), **options):
    """Bytes that compiling ``function`` under ``options`` hands to the backward.

    Every storage counts once, and inputs do not count: they are there anyway.
    """
    torch._dynamo.reset()
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        config.patch(**options),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        result = torch.compile(function, backend="aot_eager_decomp_partition")(*inputs)
    for tensor in (*inputs, *parameters):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    del result
    return sum(storages.values())


def encoder(rows):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        32, 4, dim_feedforward=64, dropout=0.0, batch_first=True
    )
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, torch.randn(*rows, 32)


@instantiate_parametrized_tests
class TestBudgetChecks(TestCase):
    def compile_chain(self, **options):
        return saved_bytes(chain, chain_inputs(), **options)

    @parametrize("budget", [-0.1, 1.001, math.nan, math.inf, "0.5", None])
    def test_bad_budget(self, budget):
        message = f"budget is {re.escape(repr(budget))}; .* from 0 .* to 1 "
        with self.assertRaisesRegex(Exception, message):
            self.compile_chain(activation_memory_budget=budget)

    @parametrize("option", [SOLVER, ESTIMATOR])
    @parametrize("budget", [0.0, 0.5, 1.0])
    def test_unknown_name(self, option, budget):
        for choice in ("typo", None, 3):
            with (
                self.subTest(choice=choice),
                self.assertRaisesRegex(Exception, f"Unknown {option} ") as caught,
            ):
                self.compile_chain(activation_memory_budget=budget, **{option: choice})
            message = str(caught.exception)
            self.assertIn(repr(choice), message)
            known = {
                SOLVER: ["dp", "greedy", "ilp", "dynamic_memory_budget_dp"],
                ESTIMATOR: ["flops", "profile", "testing"],
            }[option]
            for name in known:
                self.assertIn(name, message)

    def test_known_names(self):
        known = getattr(knapsack, "KNAPSACK_SOLVERS", ("greedy", "ilp", "dp"))
        for solver in (*known, "dynamic_memory_budget_dp"):
            self.compile_chain(activation_memory_budget=1.0, **{SOLVER: solver})
        for estimator in ("flops", "profile", "testing"):
            self.compile_chain(activation_memory_budget=1.0, **{ESTIMATOR: estimator})

    @unittest.skipIf(
        not hasattr(custom_graph_pass, "CustomKnapsackSolver"), "any callable will do"
    )
    def test_instances_and_other_callables(self):
        class Solver(custom_graph_pass.CustomKnapsackSolver):
            def __call__(self, *args):
                raise AssertionError("a budget of 1 asks no solver")

            def uuid(self):
                return None

        class Estimator(custom_graph_pass.CustomRuntimeEstimator):
            def __call__(self, node):
                return 1.0

            def uuid(self):
                return None

        for option, custom in ((SOLVER, Solver), (ESTIMATOR, Estimator)):
            self.compile_chain(activation_memory_budget=1.0, **{option: custom()})
            for choice in (custom, len):
                with self.assertRaisesRegex(Exception, "an instance of .*Custom"):
                    self.compile_chain(activation_memory_budget=1.0, **{option: choice})

    @parametrize("budget", [0, 0.3, 0.7, 1])
    def test_a_budget_that_is_kept_is_no_news(self, budget):
        with self.assertNoLogs(LOG, "WARNING"):
            self.compile_chain(
                activation_memory_budget=budget,
                activation_memory_budget_solver="greedy",
            )

    # The first plan is of the min cut after the knapsack, which saves more than the
    # knapsack chose.  The others are of cuts that pass for small ones, as they save few
    # of the inputs; the last of them saves two views of one tensor.
    @parametrize("rows,budget", [((8, 32), 0.3), ((2, 8), 0.6), ((2, 8), 0.9)])
    def test_a_plan_over_the_budget_is_told_with_its_bytes(self, rows, budget):
        model, x = encoder(rows)
        with self.assertLogs(LOG, "WARNING") as logs:
            saved = saved_bytes(
                model,
                [x],
                model.parameters(),
                activation_memory_budget=budget,
                activation_memory_budget_solver="greedy",
            )
        (message,) = logs.output
        numbers = re.search(
            r"saves (\d+) bytes .*of (\S+)\), more than the (\d+) .*of (\S+) allows",
            message,
        )
        used, used_ratio, allowed, asked_ratio = map(float, numbers.groups())
        self.assertEqual(used, saved)
        self.assertEqual(asked_ratio, budget)
        self.assertGreater(used, 1.01 * allowed)
        self.assertEqual(used / allowed, used_ratio / asked_ratio, atol=0, rtol=1e-3)


if __name__ == "__main__":
    run_tests()
