# Owner(s): ["module: functorch"]
import copy
import importlib.util
import json
import math
import random
import sys
import tempfile
import unittest
from pathlib import Path
from unittest.mock import patch

import torch
from torch._functorch import config, partitioners
from torch._functorch._activation_checkpointing import budget_curve
from torch._functorch._activation_checkpointing.graph_info_provider import (
    GraphInfoProvider,
)
from torch._functorch._activation_checkpointing.knapsack import (
    exact_knapsack,
    greedy_knapsack,
)
from torch._functorch._activation_checkpointing.knapsack_evaluator import (
    KnapsackEvaluator,
)
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


def gated(x, *weights):
    """Blocks of different widths: items of many sizes and runtimes."""
    for up, down in zip(*[iter(weights)] * 2):
        gate, value = (x @ up).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * value) @ down
    return (x * x).mean()


SHAPES = [(32, 40)]
for hidden in (24, 56, 16):
    SHAPES += [(40, 2 * hidden), (hidden, 40)]


class Joint:
    """A joint graph that can be partitioned again and again."""

    def __init__(self, function, shapes):
        def keep(module, joint_inputs, **options):
            self.module = copy.deepcopy(module)
            self.inputs, self.options = joint_inputs, options
            return min_cut_rematerialization_partition(module, joint_inputs, **options)

        aot_function(
            function,
            fw_compiler=lambda module, _: module,
            bw_compiler=lambda module, _: module,
            partition_fn=keep,
            decompositions=select_decomp_table(),
        )(*[torch.randn(shape, requires_grad=True) for shape in shapes])

    def saved_values(self, budget, **settings):
        """What the partitioner chooses, and the sets it let the min cut recompute."""
        chosen, sets = [], []
        choose, cut = partitioners.choose_saved_values_set, partitioners.solve_min_cut

        def watched_choose(*args, **kwargs):
            chosen.append(choose(*args, **kwargs))
            return chosen[-1]

        def watched_cut(graph, info, options, dont_ban=None):
            if dont_ban is not None:
                sets.append(frozenset(node.name for node in dont_ban))
            return cut(graph, info, options, dont_ban)

        with (
            config.patch(activation_memory_budget=budget, **settings),
            patch.multiple(
                partitioners,
                choose_saved_values_set=watched_choose,
                solve_min_cut=watched_cut,
            ),
        ):
            min_cut_rematerialization_partition(
                copy.deepcopy(self.module), self.inputs, **self.options
            )
        return chosen[0], sets


def instance(generator):
    """A random knapsack: sizes and runtimes repeat, as layers do."""
    kinds = [
        (generator.random() / 20, float(generator.randrange(1000)))
        for _ in range(generator.randrange(1, 6))
    ]
    items = [generator.choice(kinds) for _ in range(generator.randrange(1, 40))]
    return [m for m, _ in items], [r for _, r in items]


def on_unit(values):
    """``values``, which differ, moved to [0, 1]."""
    return [(v - min(values)) / (max(values) - min(values)) for v in values]


class TestBudgetCurve(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.joint = Joint(gated, SHAPES)

    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def plot(self, budget, solver="exact", folder=None, **settings):
        """Partition with the plot switched on: the curve, the plan and its cuts."""
        folder = folder or self.folder
        with self.assertLogs(budget_curve.log, "WARNING") as self.logged:
            chosen, sets = self.joint.saved_values(
                budget,
                activation_memory_budget_solver=solver,
                visualize_memory_budget_pareto=True,
                memory_budget_pareto_dir=str(folder),
                **settings,
            )
        (place,) = folder.glob("*.json")
        return json.loads(place.read_text()), chosen, sets

    @parametrize("solver", ["exact", "greedy", "dp"])
    def test_points_are_what_their_budgets_give(self, solver):
        curve, _, _ = self.plot(0.3, solver)
        points = curve["points"]
        self.assertGreater(len(points), 10)
        for point in [*points[::4], points[-2], points[-1]]:
            chosen, _ = self.joint.saved_values(
                point["budget"], activation_memory_budget_solver=solver
            )
            self.assertEqual(
                point["saved_bytes"], sum(map(partitioners._size_of, chosen))
            )

    def test_points_go_from_all_recomputed_to_none(self):
        curve, _, _ = self.plot(0.3)
        points = [budget_curve.CurvePoint(**p) for p in curve["points"]]
        self.assertEqual(points, sorted(points))
        runtimes = [p.recomputed_runtime for p in points]
        self.assertEqual(runtimes, sorted(runtimes, reverse=True))
        self.assertEqual(points[0].ratio, 0)
        self.assertEqual(points[0].saved_items, 0)
        self.assertEqual(points[-1].ratio, 1)
        self.assertEqual(points[-1].recomputed_runtime, 0)
        self.assertEqual(points[-1].saved_items, curve["items"])
        for p, following in zip(points, points[1:]):
            self.assertNotEqual(p[1:], following[1:])
            self.assertLessEqual(p.ratio, p.budget + 1e-9)

    @parametrize("solver", ["exact", "greedy", "dp", "dynamic_memory_budget_dp"])
    def test_budgets_are_solved_together_and_sets_cut_once(self, solver):
        solve, calls = budget_curve.solve_budgets, []

        def watched(algorithm, memory, runtimes, budgets):
            calls.append((algorithm, list(budgets)))
            return solve(algorithm, memory, runtimes, budgets)

        with patch.object(budget_curve, "solve_budgets", watched):
            curve, chosen, sets = self.plot(0.3, solver)
        # The curve's budgets; for the knee search, also those of the plan's knee.
        self.assertEqual(len(calls), 2 if solver == "dynamic_memory_budget_dp" else 1)
        self.assertGreater(len(calls[0][1]), 50)
        self.assertIn(0.3, calls[0][1])
        # Above that, the partitioner takes a cut without asking a solver.
        self.assertLessEqual(max(calls[0][1]), curve["points"][-2]["ratio"])
        self.assertEqual(len(sets), len(set(sets)))
        self.assertLessEqual(len(sets), budget_curve._MAX_CUTS + 2)
        unplotted, _ = self.joint.saved_values(
            0.3, activation_memory_budget_solver=solver
        )
        self.assertEqual([n.name for n in chosen], [n.name for n in unplotted])

    def test_a_long_curve_is_thinned_and_keeps_the_plan(self):
        for budget in (0.117, 0.213, 0.313, 0.427):
            with patch.object(budget_curve, "_MAX_CUTS", 3):
                curve, chosen, sets = self.plot(budget)
            self.assertLessEqual(len(sets), 4)
            size = sum(map(partitioners._size_of, chosen))
            taken = [p for p in curve["points"] if p["budget"] <= budget][-1]
            self.assertEqual(taken["saved_bytes"], size)

    @unittest.skipIf(importlib.util.find_spec("matplotlib") is None, "needs matplotlib")
    def test_files_are_named_announced_and_repeat(self):
        (self.folder / "again").mkdir()
        self.plot(0.3)
        (plot,) = self.folder.glob("*.svg")
        (points,) = self.folder.glob("*.json")
        self.assertRegex(plot.name, r"^memory_budget_pareto_\w+\.svg$")
        self.assertEqual(plot.stem, points.stem)
        (said,) = self.logged.output
        self.assertIn(str(plot), said)
        self.assertIn(str(points), said)
        text = plot.read_text()
        for words in ("asked: 0.3", "FLOP", "kB", "memory budget"):
            self.assertIn(words, text)

        self.plot(0.3, folder=self.folder / "again")
        (again,) = (self.folder / "again").glob("*.svg")
        # Drawn twice in one process, the graphs have different numbers.
        number = text.count(plot.stem)
        self.assertEqual(text.replace(plot.stem, again.stem, number), again.read_text())

    def test_without_matplotlib_the_points_are_written(self):
        with patch.dict(sys.modules, {"matplotlib": None}):
            curve, _, _ = self.plot(0.3)
        self.assertGreater(len(curve["points"]), 10)
        self.assertEqual(list(self.folder.glob("*.svg")), [])
        (said,) = self.logged.output
        self.assertIn("matplotlib", said)
        self.assertIn(".json", said)


class TestKnee(TestCase):
    def knee(self, *args, **kwargs):
        with self.assertLogs(budget_curve.log, "WARNING") as self.logged:
            return budget_curve.knee_budget(*args, **kwargs)

    def test_never_above_the_budget_asked(self):
        generator = random.Random(0)
        for _ in range(200):
            memory, runtimes = instance(generator)
            asked = generator.choice([0.0, 1e-4, 5e-4, 1e-3, generator.random()])
            knee = self.knee(exact_knapsack, memory, runtimes, asked)
            self.assertLessEqual(knee, asked)
            self.assertGreaterEqual(knee, min(asked, 1e-3))

    def test_is_the_solution_nearest_to_the_origin(self):
        generator = random.Random(1)
        found = 0
        for _ in range(50):
            memory, runtimes = instance(generator)
            knee = self.knee(greedy_knapsack, memory, runtimes, 0.5, 0.1, 5)
            budgets = [0.1, 0.2, 0.3, 0.4, 0.5]
            saved, repeated = [], []
            for budget in budgets:
                _, kept, again = greedy_knapsack(memory, runtimes, budget)
                saved.append(sum(memory[i] for i in kept))
                repeated.append(sum(runtimes[i] for i in again))
            if len(set(saved)) == 1 or len(set(repeated)) == 1:
                self.assertEqual(knee, 0.5)
                continue
            distances = [
                math.hypot(x, y) for x, y in zip(on_unit(saved), on_unit(repeated))
            ]
            taken = min(range(5), key=lambda k: abs(budgets[k] - knee))
            self.assertEqual(distances[taken], min(distances))
            found += 1
        self.assertGreater(found, 10)

    def test_the_log_says_what_was_taken_and_why(self):
        memory, runtimes = [0.1] * 4, [100.0, 10.0, 1.0, 1.0]
        self.assertEqual(self.knee(exact_knapsack, memory, runtimes, 0.4, 0.1, 4), 0.2)
        (said,) = self.logged.output
        for words in ("took budget 0.2 of the 0.4 asked", "50.0%", "1.8%", "knee"):
            self.assertIn(words, said)
        self.assertEqual(self.knee(exact_knapsack, [0.3], [1.0], 0.2), 0.2)
        self.assertIn("no knee", self.logged.output[0])

    def test_evaluator_keeps_the_budget(self):
        """0.0005 was answered with 0.001, the smallest budget tried by default."""
        evaluator = KnapsackEvaluator(
            GraphInfoProvider(
                graph_nodes_in_order=["a", "b", "output"],
                graph_edges=[("a", "b"), ("b", "output")],
                all_recomputable_banned_nodes=["a", "b"],
                recorded_knapsack_input_memories=[0.0006, 0.0004],
                recorded_knapsack_input_runtimes=[10.0, 1.0],
            )
        )
        self.assertEqual(
            evaluator.get_knee_point_memory_budget(exact_knapsack, 0.0005), 0.0005
        )

    def test_partitioner_keeps_the_budget(self):
        joint = Joint(gated, SHAPES)
        for budget in (0.0005, 0.2, 0.5):
            bytes_of = []
            for solver in ("dynamic_memory_budget_dp", "exact"):
                chosen, _ = joint.saved_values(
                    budget, activation_memory_budget_solver=solver
                )
                bytes_of.append(sum(map(partitioners._size_of, chosen)))
            self.assertLessEqual(bytes_of[0], bytes_of[1])


instantiate_parametrized_tests(TestBudgetCurve)

if __name__ == "__main__":
    run_tests()
