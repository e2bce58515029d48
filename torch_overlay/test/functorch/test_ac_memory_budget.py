# Owner(s): ["module: functorch"]
"""What a memory budget is checked for, what it makes the partitioner save, and its curve."""

import copy
import importlib.util
import json
import math
import random
import re
import sys
import tempfile
import types
import unittest
from pathlib import Path
from unittest.mock import patch

import torch
from torch._functorch import config, partitioners
from torch._functorch._activation_checkpointing import budget_curve, memory_budget
from torch._functorch._activation_checkpointing.budget_curve import (
    CurvePoint,
    knee_budget,
)
from torch._functorch._activation_checkpointing.knapsack import KNAPSACK_SOLVERS
from torch._functorch._activation_checkpointing.knapsack_exact import exact_knapsack
from torch._functorch._activation_checkpointing.rerun_cost import (
    FLOP_PER_BYTE,
    flops,
    is_view,
    roofline,
)
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import custom_graph_pass
from torch._inductor.decomposition import select_decomp_table
from torch._logging._internal import trace_log
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


SOLVER = "activation_memory_budget_solver"
ESTIMATOR = "activation_memory_budget_runtime_estimator"
ROWS = 50
WIDTHS = (40, 96, 24, 64, 16, 80, 48, 104, 32)
CHAIN = [(ROWS, WIDTHS[0]), *zip(WIDTHS, WIDTHS[1:])]
GATED = [(32, 40)]
for hidden in (24, 56, 16):
    GATED += [(40, 2 * hidden), (hidden, 40)]
KNEE = "dynamic_memory_budget_dp"
# Before 2.11, a solver is any callable.
Custom = getattr(custom_graph_pass, "CustomKnapsackSolver", object)


def chain(x, *weights):
    for weight in weights:
        x = x @ weight
    return x.sum()


def gated(x, *weights):
    """Blocks of different widths: items of many sizes and runtimes."""
    for up, down in zip(*[iter(weights)] * 2):
        gate, value = (x @ up).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * value) @ down
    return (x * x).mean()


class Encoder:
    """A module, as a function of an input and its parameters."""

    def __init__(self):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(
            32, 4, dim_feedforward=64, dropout=0.0, batch_first=True
        )
        self.model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.names, parameters = zip(*self.model.named_parameters())
        self.shapes = [p.shape for p in parameters]

    def __call__(self, x, *parameters):
        given = dict(zip(self.names, parameters))
        return torch.func.functional_call(self.model, given, (x,))


def memory_of(nodes):
    """The storages of nodes, and their sizes."""
    storages = [node.meta["val"].untyped_storage() for node in nodes]
    return {storage._cdata: storage.nbytes() for storage in storages}


def inputs_of(plan):
    return plan.saved_values[0].graph.find_nodes(op="placeholder")


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

    def plan(self, budget, solver="exact", **settings):
        """What is chosen; ``self.sets`` has what the min cut was let recompute."""
        plans, self.sets = [], []
        choose, cut = memory_budget.choose_plan, partitioners.solve_min_cut

        def watched_choose(*args):
            plans.append(choose(*args))
            raise StopIteration

        def watched_cut(graph, info, options, dont_ban=None):
            if dont_ban is not None:
                self.sets.append(frozenset(node.name for node in dont_ban))
            return cut(graph, info, options, dont_ban)

        settings.update(activation_memory_budget=budget, **{SOLVER: solver})
        with (
            config.patch(settings),
            # In what the later patches make of the partitioner it is called elsewhere.
            patch.object(memory_budget, "choose_plan", watched_choose),
            patch.object(partitioners, "choose_plan", watched_choose),
            patch.object(partitioners, "solve_min_cut", watched_cut),
            self.assert_stops(),
        ):
            min_cut_rematerialization_partition(
                copy.deepcopy(self.module), self.inputs, **self.options
            )
        return plans[0]

    @staticmethod
    def assert_stops():
        return unittest.TestCase().assertRaises(StopIteration)


class Fixed(Custom):
    """Gives one answer to every question, and remembers the last one."""

    def __init__(self, *answer):
        self.answer = answer

    def __call__(self, memory, joint_graph, max_memory, node_info, nodes):
        self.asked = memory, max_memory, nodes
        return self.answer

    def uuid(self):
        return None


class WithRuntimes(Fixed):
    def __call__(self, *others, runtimes):
        self.runtimes = runtimes
        return super().__call__(*others)


class SaveDearest(Custom):
    """Saves the item that costs most to recompute, and no other."""

    def __call__(self, memory, joint_graph, max_memory, node_info, nodes, runtimes):
        dearest = runtimes.index(max(runtimes))
        return [dearest], [i for i in range(len(memory)) if i != dearest]

    def uuid(self):
        return None


def ask(solver, memory=(0.25, 0.5, 0.125), runtimes=(1.0, 2.0, 4.0), max_memory=0.5):
    nodes = [object() for _ in memory]
    graph = types.SimpleNamespace(joint=None, info=None)
    with config.patch({SOLVER: solver}):
        return memory_budget.ask_solver(
            graph, nodes, list(memory), list(runtimes), max_memory
        )


@instantiate_parametrized_tests
class TestOptions(TestCase):
    def setUp(self):
        super().setUp()
        self.joint = Joint(chain, CHAIN[:3])

    @parametrize("budget", [-0.1, 1.001, math.nan, math.inf, "0.5", None])
    def test_bad_budget(self, budget):
        message = f"budget is {re.escape(repr(budget))}; .* from 0 .* to 1 "
        with self.assertRaisesRegex(RuntimeError, message):
            self.joint.plan(budget)

    @parametrize("option", [SOLVER, ESTIMATOR])
    def test_unknown_name(self, option):
        known = {
            SOLVER: [*KNAPSACK_SOLVERS, KNEE],
            ESTIMATOR: ["flops", "roofline", "profile", "testing"],
        }[option]
        for budget in (0, 0.5, 1):
            for choice in ("typo", None, 3):
                with (
                    config.patch({option: choice}),
                    self.assertRaisesRegex(
                        RuntimeError, f"Unknown {option} {choice!r}"
                    ) as caught,
                ):
                    memory_budget.check_budget_options(budget)
                for name in known:
                    self.assertIn(name, str(caught.exception))
        for choice in known:
            with config.patch({option: choice}):
                memory_budget.check_budget_options(0.5)

    @unittest.skipIf(Custom is object, "any callable will do")
    def test_instances_and_other_callables(self):
        class Estimator(custom_graph_pass.CustomRuntimeEstimator):
            def __call__(self, node):
                return 1.0

            def uuid(self):
                return None

        for option, custom in ((SOLVER, SaveDearest), (ESTIMATOR, Estimator)):
            with config.patch({option: custom()}):
                memory_budget.check_budget_options(0.5)
            for choice in (custom, len):
                with (
                    config.patch({option: choice}),
                    self.assertRaisesRegex(RuntimeError, "an instance of .*Custom"),
                ):
                    memory_budget.check_budget_options(0.5)


class TestPlans(TestCase):
    def test_each_step_decides_where_it_should(self):
        joint = Joint(chain, CHAIN)
        for budget, decided_by in (
            (0, "budget 0"),
            (0.3, "knapsack"),
            (0.7, "knapsack"),
            (1, "min cut"),
        ):
            with self.assertNoLogs(memory_budget.log, "WARNING"):
                plan = joint.plan(budget)
            self.assertEqual(plan.decided_by, decided_by)
            self.assertEqual(plan.knapsack is not None, decided_by == "knapsack")
            saved = memory_of(plan.saved_values)
            for storage in memory_of(inputs_of(plan)):
                saved.pop(storage, None)
            self.assertEqual(plan.activation_bytes, sum(saved.values()))
            if plan.knapsack is not None:
                low, high = plan.limits
                kept = memory_of(plan.items[i] for i in plan.knapsack.saved)
                self.assertEqual(saved, kept)
                self.assertLessEqual(plan.activation_bytes, budget * (high - low))
            self.assertEqual(saved == {}, budget == 0)
        within = Joint(gated, GATED).plan(0.99)
        self.assertEqual(within.decided_by, "min cut")
        self.assertLess(within.activation_bytes, within.limits[1] - within.limits[0])

    # The first plan is of the min cut after the knapsack, which saves more than the
    # knapsack chose.  The other is of a cut that passes for a small one, as it saves few
    # of the inputs.
    def test_a_plan_over_the_budget_is_told_with_its_bytes(self):
        encoder = Encoder()
        for rows, budget in (((8, 32), 0.3), ((2, 8), 0.7)):
            joint = Joint(encoder, [(*rows, 32), *encoder.shapes])
            with self.assertLogs(memory_budget.log, "WARNING") as logs:
                plan = joint.plan(budget, "greedy")
            (message,) = logs.output
            numbers = re.search(
                r"saves (\d+) bytes .*of (\S+)\), more than the (\d+) .*of (\S+) allows",
                message,
            )
            used, used_ratio, allowed, asked_ratio = map(float, numbers.groups())
            saved = memory_of(plan.saved_values)
            for storage in memory_of(inputs_of(plan)):
                saved.pop(storage, None)
            self.assertEqual(used, sum(saved.values()))
            self.assertEqual(used, plan.activation_bytes)
            self.assertEqual(asked_ratio, budget)
            self.assertGreater(used, 1.01 * allowed)
            self.assertEqual(
                used / allowed, used_ratio / asked_ratio, rtol=1e-3, atol=0
            )

    def test_no_item_is_left(self):
        """Where nothing may be recomputed, the cut that recomputes most is taken."""
        joint = Joint(chain, CHAIN)
        with patch.object(memory_budget, "must_run_once", lambda node: True):
            plan = joint.plan(0.3)
        self.assertEqual(plan.decided_by, "min cut")
        self.assertNotEqual(plan.saved_values, inputs_of(plan))

    def test_an_overwritten_input_needs_a_plan_at_budget_zero(self):
        joint = Joint(chain, CHAIN)
        inputs = [n.name for n in joint.plan(0).saved_values]
        x = joint.module.graph.find_nodes(op="placeholder")[0]
        x.meta["aot_runtime_epilogue_input_mutation"] = True
        plan = joint.plan(0)
        self.assertEqual(plan.decided_by, "knapsack")
        self.assertNotEqual([n.name for n in plan.saved_values], inputs)

    def test_the_cut_is_traced_for_tlparse(self):
        seen = []
        with (
            patch.object(partitioners, "AOT_PARTITIONER_DEBUG", True),
            patch.object(trace_log, "handlers", []),
            patch.object(
                memory_budget,
                "create_structured_trace_for_min_cut_info",
                lambda joint_graph, saved_node_idxs, memories_banned_nodes: seen.append(
                    (saved_node_idxs, memories_banned_nodes)
                ),
            ),
        ):
            plan = Joint(chain, CHAIN).plan(0.3)
        sizes = [node.meta["val"].nbytes for node in plan.items]
        self.assertEqual(seen[-1], (plan.knapsack.saved, sizes))

    def test_roofline(self):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(8, 8)

        def cost(op, *args):
            node = graph.call_function(op, args)
            node.meta["val"] = op(*(a.meta["val"] if a is x else a for a in args))
            return roofline(node), flops(node), is_view(node)

        aten = torch.ops.aten
        moved = FLOP_PER_BYTE * 8 * 8 * 4
        self.assertEqual(cost(aten.sin.default, x), (2 * moved, 0, False))
        self.assertEqual(cost(aten.view.default, x, [64]), (1, 0, True))
        self.assertEqual(cost(aten._unsafe_view.default, x, [64]), (1, 0, True))
        self.assertEqual(cost(aten.mm.default, x, x), (2 * moved, 2 * 8**3, False))
        x.meta["val"] = torch.empty(1024, 1024, device="meta")
        self.assertEqual(cost(aten.mm.default, x, x)[0], 2 * 1024**3)
        # A symbolic size counts as its hint.
        graph = make_fx(torch.sin, tracing_mode="symbolic")(torch.empty(8, 8)).graph
        (sine,) = graph.find_nodes(op="call_function", target=aten.sin.default)
        self.assertEqual(roofline(sine), 2 * moved)

    def test_roofline_is_an_estimator(self):
        joint = Joint(chain, CHAIN)
        plan = joint.plan(0.3, **{ESTIMATOR: "roofline"})
        self.assertEqual(plan.knapsack.runtimes, [roofline(n) for n in plan.items])


class TestCustomSolver(TestCase):
    def test_it_gets_the_items_and_its_answer_is_the_plan(self):
        joint = Joint(chain, CHAIN)
        exact = joint.plan(0.3)
        for solver in (Fixed([0], range(1, 7)), WithRuntimes([0], range(1, 7))):
            plan = joint.plan(0.3, solver)
            memory, budget, nodes = solver.asked
            self.assertEqual(budget, 0.3)
            self.assertEqual(memory, exact.knapsack.memory)
            self.assertEqual(nodes, plan.items)
            self.assertEqual(plan.knapsack.solver, type(solver).__name__)
            saved = set(memory_of(plan.saved_values))
            self.assertLessEqual(set(memory_of(plan.items[:1])), saved)
            self.assertTrue(saved.isdisjoint(memory_of(plan.items[1:])))
        self.assertEqual(solver.runtimes, exact.knapsack.runtimes)
        # Items come largest first, and the widest is the dearest: 48 x 104 per row.
        self.assertEqual(joint.plan(0.3, SaveDearest()).knapsack.saved, [0])
        with self.assertRaisesRegex(ValueError, "Fixed names item 7 1 times"):
            joint.plan(0.3, Fixed([7], range(7)))

    def test_lists_are_sorted_and_the_runtime_is_summed(self):
        self.assertEqual(ask(Fixed((2, 0), {1})), (5.0, [0, 2], [1]))
        self.assertEqual(ask(WithRuntimes([], [2, 1, 0])), (0.0, [], [0, 1, 2]))
        self.assertEqual(ask(Fixed([], []), (), ()), (0.0, [], []))
        places = torch.tensor([1, 0, 2])
        self.assertEqual(ask(Fixed(places[:0], places)), (0.0, [], [0, 1, 2]))

    def test_bad_answers(self):
        for error, message, answer in (
            (ValueError, "names item 3 1 times: each of the 3 items", ([0, 3], [1, 2])),
            (ValueError, "names item -1 1 times", ([0, 1, 2], [-1])),
            (ValueError, "names item 0 2 times", ([0, 1, 0], [2])),
            (ValueError, "names item 1 2 times", ([0, 1], [2, 1])),
            (ValueError, "names item 1 0 times", ([0], [2])),
            (ValueError, "names item 0 0 times", ([True] * 3, [])),
            (TypeError, "must return two lists of indices", ([0.0], [1, 2])),
            (TypeError, "must return two lists of indices", ([0, 1, 2], None)),
            (TypeError, "must return two lists of indices", ([0], [1], [2])),
        ):
            with (
                self.subTest(message),
                self.assertRaisesRegex(error, f"^Fixed {message}"),
            ):
                ask(Fixed(*answer))

    def test_more_than_the_budget_is_told(self):
        log = memory_budget.log
        with self.assertLogs(log, "WARNING") as logs:
            self.assertEqual(ask(Fixed([0, 1], [2])), (3.0, [0, 1], [2]))
        (message,) = logs.output
        self.assertIn("Fixed saves 0.75 of the activations", message)
        self.assertIn("the budget of 0.5", message)
        # Ten tenths are 1, but a solver that adds them one by one gets less.
        with self.assertNoLogs(log, "WARNING"):
            ask(Fixed(range(10), []), [0.1] * 10, [1.0] * 10, sum([0.1] * 10))


@instantiate_parametrized_tests
class TestCurve(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.joint = Joint(gated, GATED)

    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def plot(self, budget, solver="exact"):
        """Partition with the plot switched on: the curve and the plan."""
        with self.assertLogs(budget_curve.log, "WARNING") as self.logged:
            plan = self.joint.plan(
                budget,
                solver,
                visualize_memory_budget_pareto=True,
                memory_budget_pareto_dir=str(self.folder),
            )
        (place,) = self.folder.glob("*.json")
        return json.loads(place.read_text()), plan

    @parametrize("solver", ["exact", "dp"])
    def test_points_are_what_their_budgets_give(self, solver):
        curve, _ = self.plot(0.3, solver)
        points = [CurvePoint(**p) for p in curve["points"]]
        self.assertGreater(len(points), 10)
        for p in [*points[::12], points[-2], points[-1]]:
            plan = self.joint.plan(p.budget, solver)
            size = sum(map(partitioners._size_of, plan.saved_values))
            self.assertEqual(p.saved_bytes, size)
        self.assertEqual(points, sorted(points))
        runtimes = [p.recomputed_runtime for p in points]
        self.assertEqual(runtimes, sorted(runtimes, reverse=True))
        self.assertEqual((points[0].ratio, points[0].saved_items), (0, 0))
        self.assertEqual((points[-1].ratio, runtimes[-1]), (1, 0))
        self.assertEqual(points[-1].saved_items, curve["items"])
        for p, following in zip(points, points[1:]):
            self.assertNotEqual(p[1:], following[1:])

    @parametrize("solver", ["exact", "greedy", KNEE])
    def test_budgets_are_solved_together_and_sets_cut_once(self, solver):
        solve, calls = budget_curve.solve_budgets, []

        def watched(algorithm, memory, runtimes, budgets):
            calls.append(list(budgets))
            return solve(algorithm, memory, runtimes, budgets)

        with patch.object(budget_curve, "solve_budgets", watched):
            curve, plan = self.plot(0.3, solver)
        # The curve's budgets; for the knee search, those of the plan's knee before.
        self.assertEqual(len(calls), 2 if solver == KNEE else 1)
        self.assertGreater(len(calls[-1]), 16)
        self.assertIn(0.3, calls[-1])
        # Above that, the partitioner takes a cut without asking a solver.
        self.assertLessEqual(max(calls[-1]), curve["points"][-2]["ratio"])
        self.assertEqual(len(self.joint.sets), len(set(self.joint.sets)))
        self.assertLessEqual(len(self.joint.sets), budget_curve._CURVE_STEPS)
        names = [n.name for n in plan.saved_values]
        unplotted = self.joint.plan(0.3, solver)
        self.assertEqual(names, [n.name for n in unplotted.saved_values])

    @unittest.skipIf(importlib.util.find_spec("matplotlib") is None, "needs matplotlib")
    def test_files_are_named_and_announced(self):
        curve, _ = self.plot(0.3)
        (plot,) = self.folder.glob("*.svg")
        (points,) = self.folder.glob("*.json")
        self.assertRegex(plot.name, r"^memory_budget_pareto_\w+\.svg$")
        self.assertEqual(plot.stem, points.stem)
        (said,) = self.logged.output
        self.assertIn(str(plot), said)
        self.assertIn(str(points), said)
        text = plot.read_text()
        for words in ("asked: 0.3", "FLOP", "memory budget"):
            self.assertIn(words, text)
        points = [CurvePoint(**p) for p in curve["points"]]
        budget_curve._draw(points, 0.3, curve, str(self.folder / "again.svg"))
        self.assertEqual(text, (self.folder / "again.svg").read_text())

    def test_without_matplotlib_the_points_are_written(self):
        with patch.dict(sys.modules, {"matplotlib": None}):
            curve, _ = self.plot(0.3)
        self.assertGreater(len(curve["points"]), 10)
        self.assertEqual(list(self.folder.glob("*.svg")), [])
        self.assertIn("matplotlib", self.logged.output[0])


class TestKnee(TestCase):
    def knee(self, *args):
        with self.assertLogs(budget_curve.log, "WARNING") as self.logged:
            return knee_budget(*args)

    def instance(self, generator):
        """A random knapsack: sizes and runtimes repeat, as layers do."""
        kinds = [
            (generator.random() / 20, float(generator.randrange(1000)))
            for _ in range(generator.randrange(1, 6))
        ]
        items = [generator.choice(kinds) for _ in range(generator.randrange(1, 40))]
        return [m for m, _ in items], [r for _, r in items]

    def test_never_above_the_budget_asked(self):
        generator = random.Random(0)
        for _ in range(50):
            memory, runtimes = self.instance(generator)
            asked = generator.choice([0.0, 1e-4, 5e-4, 1e-3, generator.random()])
            knee = self.knee(memory, runtimes, asked)
            self.assertLessEqual(knee, asked)
            self.assertGreaterEqual(knee, min(asked, 1e-3))

    def test_is_the_solution_nearest_to_the_origin(self):
        def on_unit(values):
            low, high = min(values), max(values)
            return [(v - low) / (high - low) for v in values]

        generator = random.Random(1)
        found = 0
        for _ in range(50):
            memory, runtimes = self.instance(generator)
            with patch.multiple(budget_curve, _SMALLEST_KNEE=0.1, _KNEE_STEPS=4):
                knee = self.knee(memory, runtimes, 0.5)
            budgets = [0.1, 0.2, 0.3, 0.4, 0.5]
            saved, repeated = [], []
            for budget in budgets:
                _, kept, again = exact_knapsack(memory, runtimes, budget)
                saved.append(sum(memory[i] for i in kept))
                repeated.append(sum(runtimes[i] for i in again))
            if len(set(saved)) == 1 or len(set(repeated)) == 1:
                self.assertEqual(knee, 0.5)
                continue
            distances = list(map(math.hypot, on_unit(saved), on_unit(repeated)))
            taken = min(range(5), key=lambda k: abs(budgets[k] - knee))
            self.assertEqual(distances[taken], min(distances))
            found += 1
        self.assertGreater(found, 10)

    def test_the_log_says_what_was_taken_and_why(self):
        memory, runtimes = [0.1] * 4, [100.0, 10.0, 1.0, 1.0]
        with patch.multiple(budget_curve, _SMALLEST_KNEE=0.1, _KNEE_STEPS=3):
            self.assertEqual(self.knee(memory, runtimes, 0.4), 0.2)
        (said,) = self.logged.output
        for words in ("took budget 0.2 of the 0.4 asked", "50.0%", "1.8%", "knee"):
            self.assertIn(words, said)
        self.assertEqual(self.knee([0.3], [1.0], 0.2), 0.2)
        self.assertIn("no knee", self.logged.output[0])

    def test_the_partitioner_keeps_the_budget(self):
        joint = Joint(gated, GATED)
        for budget in (0.0005, 0.2, 0.5):
            with self.assertLogs(budget_curve.log, "WARNING"):
                plan = joint.plan(budget, KNEE)
            kept = math.fsum(plan.knapsack.memory[i] for i in plan.knapsack.saved)
            self.assertLessEqual(kept, budget)


if __name__ == "__main__":
    run_tests()
