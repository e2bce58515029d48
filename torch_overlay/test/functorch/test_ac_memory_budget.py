# Owner(s): ["module: functorch"]
"""What a memory budget is checked for, what it makes the partitioner save, and its curve."""

import contextlib
import importlib.util
import itertools
import math
import re
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from test_ac_must_save_at_zero import tick
from test_ac_random_ops import functional

import torch
from torch._functorch import config, partitioners
from torch._functorch._activation_checkpointing.knapsack import KNAPSACK_SOLVERS
from torch._functorch._activation_checkpointing.random_ops import must_run_once
from torch._functorch.aot_autograd import aot_function
from torch._functorch.memory_planner import decide as planning
from torch._functorch.memory_planner.ask import Ask
from torch._functorch.memory_planner.decision import SavedRange
from torch._functorch.memory_planner.graph import joint as joint_graph
from torch._functorch.memory_planner.graph.joint import BudgetedGraph, Item
from torch._functorch.memory_planner.graph.reading import read_joint
from torch._functorch.memory_planner.graph.recompute_cost import (
    FLOP_PER_BYTE,
    flops,
    is_costly,
    recompute_cost,
)
from torch._functorch.memory_planner.saved import (
    pareto_plot as budget_curve,
    saved_bytes as memory_budget,
)
from torch._functorch.memory_planner.solver import (
    ask_solver,
    lightest_items,
    WrongAnswer,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import (
    CustomKnapsackSolver,
    CustomRuntimeEstimator,
)
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry


SOLVER = "activation_memory_budget_solver"
ESTIMATOR = "activation_memory_budget_runtime_estimator"
SQUARE = 16
ROWS = 50
WIDTHS = (40, 96, 24, 64, 16, 80, 48, 104, 32)
CHAIN = [(ROWS, WIDTHS[0]), *zip(WIDTHS, WIDTHS[1:])]
GATED = [(32, 40)]
for hidden in (24, 56, 16):
    GATED += [(40, 2 * hidden), (hidden, 40)]
DROPPING = [(512, 64)] + [(64, 64)] * 6
KNEE = "dynamic_memory_budget_dp"


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


def encoder(x):
    """As a function of an input and its parameters, and all of them."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    return functional(
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), x
    )


def cell(x, *weights):
    """A sum of two products at each step, of which only the sum is needed again."""
    state = x
    for first, second in zip(*[iter(weights)] * 2):
        state = torch.tanh(x @ first + state @ second)
    return state.sum()


def forked(x, *weights):
    """Products that are read twice, and one of which only a small sum is needed."""
    first, second, third = weights
    left = (x @ first).sin()
    right = (left @ second).cos() * left
    return ((right @ third).sum(1).exp() * right.sum(1)).sum()


def dropping(x, *weights):
    """Each layer's mask must not be drawn twice."""
    for weight in weights:
        x = torch.nn.functional.dropout(torch.tanh(x @ weight), 0.1)
    return x.sum()


def memory_of(nodes):
    """The storages of nodes, and their sizes."""
    storages = [node.meta["val"].untyped_storage() for node in nodes]
    return {storage._cdata: storage.nbytes() for storage in storages}


def kept(plan):
    """The storages that a plan saves, inputs apart, and their sizes."""
    inputs = plan.saved_values[0].graph.find_nodes(op="placeholder")
    given = memory_of(inputs)
    return {s: n for s, n in memory_of(plan.saved_values).items() if s not in given}


class Joint:
    """A joint graph, for which plans can be made again and again."""

    def __init__(self, function, shapes, decomposes=True):
        decide = partitioners.decide

        def keep(*asked):
            self.graph, self.info, self.outputs, *_ = asked
            return decide(*asked)

        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        with patch.object(partitioners, "decide", keep):
            split(function, inputs, decomposes)

    def plan(self, budget, solver="exact", **settings):
        with config.patch({SOLVER: solver, **settings}):
            return planning.decide(self.graph, self.info, self.outputs, budget)


def split(function, inputs, decomposes=True):
    """Call a function that is split as for inductor; returns what it returns."""
    return aot_function(
        function,
        fw_compiler=lambda module, _: module,
        bw_compiler=lambda module, _: module,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table() if decomposes else None,
    )(*inputs)


def solved():
    """Let the plans be those of the solver, whatever their peaks are."""
    try:
        from torch._functorch.memory_planner.peak import lower_peak
    except ImportError:
        # A patch of its own brings it.
        return contextlib.nullcontext()
    return patch.object(
        lower_peak, "lowered_if_too_high", lambda graph, plan, allowed: plan
    )


class Fixed(CustomKnapsackSolver):
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


def ask(solver, memory=(250, 500, 125), capacity=500, limits=(0, 1000)):
    """What is saved of items of so many bytes, which all take as long."""
    limits = SavedRange(*limits)
    items = [Item(object(), {size: 1.0}, frozenset(), size) for size in memory]
    graph = SimpleNamespace(joint=None, info=None, limits=limits, items=items)
    return ask_solver(solver, graph, capacity)


@instantiate_parametrized_tests
class TestOptions(TestCase):
    def setUp(self):
        super().setUp()
        self.joint = Joint(chain, CHAIN[:3])

    def test_bad_budget(self):
        for budget in (-0.1, 1.001, math.nan, math.inf, "0.5", None, True):
            message = f"budget is {re.escape(repr(budget))}; .* from 0 .* to 1 "
            with self.assertRaisesRegex(RuntimeError, message):
                self.joint.plan(budget)

    @parametrize("option", [SOLVER, ESTIMATOR])
    def test_bad_choice(self, option):
        """A name that is none, or what is no instance of the class for it."""
        known = {
            SOLVER: [*KNAPSACK_SOLVERS, KNEE],
            ESTIMATOR: ["flops", "roofline", "profile", "testing"],
        }[option]
        custom = {SOLVER: Fixed, ESTIMATOR: CustomRuntimeEstimator}[option]
        for choice in ("typo", None, 3, custom, len):
            message = f"{option} is {re.escape(repr(choice))}; it must be"
            for budget in (0, 0.5, 1):
                with self.assertRaisesRegex(RuntimeError, message) as caught:
                    self.joint.plan(budget, **{option: choice})
            for words in (*known, "an instance of "):
                self.assertIn(words, str(caught.exception))
        for choice in (*known, *([Fixed()] if option == SOLVER else [])):
            with config.patch({option: choice}):
                Ask.of_config()


@instantiate_parametrized_tests
class TestPlans(TestCase):
    def test_each_step_decides_where_it_should(self):
        for function, shapes, budget, decided_by in (
            (chain, CHAIN, 0, "budget 0"),
            (chain, CHAIN, 0.3, "knapsack"),
            (chain, CHAIN, 1, "min cut"),
            (gated, GATED, 0.99, "min cut"),
        ):
            plan = Joint(function, shapes).plan(budget)
            self.assertEqual(plan.decided_by, decided_by)
            saved = kept(plan)
            self.assertEqual(plan.activation_bytes, sum(saved.values()))
            self.assertEqual(saved == {}, budget == 0)
            self.assertEqual(plan.knapsack is not None, decided_by == "knapsack")
            if plan.knapsack is not None:
                items = memory_of(plan.items[i] for i in plan.knapsack.saved)
                self.assertEqual(saved, items)
        low, high = plan.limits
        self.assertLess(plan.activation_bytes, high - low)

    @parametrize("solver", ["exact", "greedy"])
    def test_a_budget_is_kept_where_the_cut_would_not_keep_it(self, solver):
        over = []
        function, inputs = encoder(torch.randn(8, 32, 32, dtype=torch.double))
        joint = Joint(function, [x.shape for x in inputs])
        before = 0
        for budget in (0.1, 0.3, 0.4, 0.5, 0.8):
            with self.assertNoLogs(memory_budget.log, "WARNING"):
                plan = joint.plan(budget, solver)
            low, high = plan.limits
            size = sum(kept(plan).values())
            self.assertEqual(size, plan.activation_bytes)
            self.assertLessEqual(size - low, budget * (high - low) + 1)
            self.assertLessEqual(before, size)
            before = size
            asked = joint.graph, joint.info, joint.outputs, budget
            with config.patch({SOLVER: solver}):
                cut = BudgetedGraph(*asked).upstreams_decision()
            over.append(cut.activation_bytes - low > budget * (high - low))
        self.assertIn(True, over)

    def test_without_a_model_the_plan_is_upstreams(self):
        joint = Joint(gated, GATED)
        inputs = [torch.full(shape, 0.01, requires_grad=True) for shape in GATED]
        wanted = torch.autograd.grad(gated(*inputs), inputs)
        broken = patch.object(joint_graph, "read_joint", side_effect=ValueError("odd"))
        with config.patch(activation_memory_budget=0.2), broken:
            saved = partitioners.choose_saved_values_set(joint.graph, joint.info, 0.2)
            with self.assertLogs("torch._functorch", "WARNING") as logs:
                plan = joint.plan(0.2)
                found = torch.autograd.grad(split(gated, inputs), inputs)
        self.assertEqual(plan.saved_values, saved)
        self.assertEqual(plan.activation_bytes, sum(kept(plan).values()))
        self.assertEqual(found, wanted)
        self.assertEqual(len(logs.output), 2)
        for said in logs.output:
            self.assertIn(f":{planning.log.name}:", said)
            self.assertIn("upstream's plan", said)
            asked = "SavedBytes(budget=0.2)"
            self.assertIn(f"{asked} cannot be planned: ValueError: odd", said)

    @parametrize("net", [cell, forked])
    def test_no_plan_within_the_budget_recomputes_less(self, net):
        """Beside every set of values that could be saved, all at once."""
        shapes = {
            cell: [(24, 24)] * 9,
            forked: [(20, 24), (24, 48), (48, 48), (48, 24)],
        }[net]
        joint = Joint(net, shapes)
        fastest = joint.plan(1)
        model = read_joint(joint.graph, joint.info, joint.outputs)
        costs = [
            recompute_cost(node, "flops") if is_costly(node) else 0
            for node in model.nodes
        ]
        values = [
            s
            for s, node in enumerate(model.saved_as)
            if node is not None and model.first_use[s] >= 0 and model.nbytes[s] > 64
        ]
        self.assertLess(len(values), 19)
        plans = [
            subset
            for count in range(len(values) + 1)
            for subset in itertools.combinations(values, count)
        ]

        def kept_and_repeated(plans):
            saved = model.masks_of_saving_plans(plans)
            needed, repeated = model.find_recomputed(saved, (1 << len(plans)) - 1)
            masks = [(saved[s] & needed[s], model.nbytes[s], 0) for s in values]
            masks += [(by, 0, cost) for by, cost in zip(repeated, costs) if cost]
            totals = torch.zeros(len(plans), 2, dtype=torch.int64)
            for mask, size, cost in masks:
                bits = f"{mask:b}"[::-1].encode()
                at = torch.frombuffer(bytearray(bits), dtype=torch.uint8) == ord("1")
                totals[: len(bits)][at] += torch.tensor([size, int(cost)])
            return totals

        kept, again = kept_and_repeated(plans).unbind(1)
        for percent in range(5, 100, 5):
            with solved():
                plan = joint.plan(percent / 100)
            allowed = percent * fastest.activation_bytes / 100
            best = again[kept <= allowed].min()
            ((_, found),) = kept_and_repeated([model.storages(plan.saved_values)])
            self.assertLessEqual(found, 1.01 * best, f"budget {percent} %")

    def test_upstreams_plan_where_random_operators_alone_would_run_again(self):
        """They may not, but nothing else has to."""
        joint = Joint(dropping, DROPPING, decomposes=False)
        graph = BudgetedGraph(joint.graph, joint.info, joint.outputs, 0.98)
        found = graph.kept_bytes(graph.upstreams_choice(0.98))
        self.assertGreater(found, 1.5 * graph.kept_bytes(graph.saved_at_budget_0()))

    def test_what_budget_0_keeps_is_known_without_a_min_cut(self):
        joint = Joint(dropping, DROPPING, decomposes=False)
        least, cut = joint.plan(0), partitioners.solve_min_cut
        with patch.object(partitioners, "solve_min_cut", wraps=cut) as cuts:
            plan = joint.plan(0.3)
        self.assertGreater(least.activation_bytes, 0)
        self.assertEqual(plan.limits.low, least.activation_bytes)
        self.assertLessEqual(cuts.call_count, 4)

    def test_bytes_of_calls_of_another_size(self):
        joint = Joint(chain, CHAIN)
        graph = BudgetedGraph(joint.graph, joint.info, joint.outputs, 1)
        larger = graph.at_sizes(lambda size: 2 * size)
        self.assertEqual(
            larger.limits, SavedRange(*(2 * each for each in graph.limits))
        )

    def test_no_item_is_left(self):
        """No cast is an item; where the cut saves them, budget 0's plan is left."""

        def function(x, weight):
            return torch.nn.functional.conv1d(x.bfloat16(), weight.bfloat16()).sum()

        joint = Joint(function, [(4, 80, 128), (64, 80, 3)])
        plan = joint.plan(0.3)
        self.assertEqual(plan.decided_by, "min cut")
        self.assertGreater(plan.limits.high, 0)
        self.assertEqual(plan.activation_bytes, 0)

    def test_roofline(self):
        """A product moves more than it computes, unless it is large."""
        joint = Joint(chain, CHAIN)
        plan = joint.plan(0.3, **{ESTIMATOR: "roofline"})
        costs = []
        for node in plan.items:
            values = [n.meta["val"] for n in (*node.all_input_nodes, node)]
            moved = FLOP_PER_BYTE * sum(v.nbytes for v in values)
            costs.append(max(moved, flops(node)))
        self.assertEqual(plan.knapsack.runtimes, costs)


def rounded(x, key, value):
    found = (x @ key).bfloat16()
    return found, found.to(x.dtype).exp() @ value


def gradients_after_a_change(function, inputs):
    """Where the caller changes what a function returned first, in place."""
    first, second = function(*inputs)
    first.clamp_(-1, 1)
    return torch.autograd.grad(first.sum() + second.square().sum(), inputs)


class TestOutputs(TestCase):
    def test_they_may_be_changed_in_place(self):
        """No plan saves one that budget 1 does not, as a min cut would."""
        asked = {"dtype": torch.double, "requires_grad": True}
        inputs = [torch.randn(48, 48, **asked) for _ in range(3)]
        wanted = gradients_after_a_change(rounded, inputs)
        for budget in (0, 0.1, 0.3, 0.5, 0.7, 0.9, 1):
            torch._dynamo.reset()
            with config.patch(activation_memory_budget=budget):
                compiled = torch.compile(rounded, backend="aot_eager_decomp_partition")
                found = gradients_after_a_change(compiled, inputs)
            self.assertEqual(found, wanted)


class TestWhatFits(TestCase):
    """What fits into a budget to the byte is saved."""

    def test_products_of_many_sizes_fill_the_budget(self):
        def function(x, *weights):
            return sum((x @ weight).cos().sum() for weight in weights)

        for widths, fillable in (
            ((11, 3, 4, 2), (18, 17, 16, 15, 14, 13, 11, 7, 6, 5)),
            ((3, 5, 11, 17, 14), (42, 30, 19, 8, 3)),
            ((3,) * 7, range(3, 21, 3)),
        ):
            shapes = [(SQUARE, SQUARE), *((SQUARE, SQUARE * width) for width in widths)]
            joint = Joint(function, shapes)
            for squares in fillable:
                plan = joint.plan(squares / sum(widths))
                self.assertEqual(sum(kept(plan).values()), squares * 4 * SQUARE**2)


class TestCosts(TestCase):
    """What the estimator "flops" takes an operator for, and which are recomputed freely."""

    def test_a_custom_operator_costs_the_bytes_that_it_moves(self):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        node = graph.call_function(tick._opoverload, (x,))
        for each in (x, node):
            each.meta["val"] = torch.empty(8, 16)
        self.assertEqual(recompute_cost(node, "flops"), 2 * 8 * 16 * 4)
        # Or what its formula says.
        formulas = {tick._opoverload.overloadpacket: lambda *args, **kwargs: 12345}
        with patch.dict(flop_registry, formulas):
            self.assertEqual(recompute_cost(node, "flops"), 12345)

    @unittest.skipIf(not hasattr(torch.ops.aten, "_grouped_mm"), "not in this release")
    def test_a_grouped_product_costs_what_its_groups_do(self):
        for first, second, flop in (
            ((64, 32), (3, 32, 16), 2 * 64 * 32 * 16),
            ((3, 8, 32), (32, 64), 2 * 8 * 32 * 64),
            ((3, 8, 32), (3, 32, 16), 3 * 2 * 8 * 32 * 16),
        ):
            graph = torch.fx.Graph()
            nodes = [graph.placeholder("x"), graph.placeholder("y")]
            node = graph.call_function(torch.ops.aten._grouped_mm.default, (*nodes,))
            for each, shape in zip((*nodes, node), (first, second, (1,))):
                each.meta["val"] = torch.empty(shape)
            self.assertTrue(is_costly(node))
            self.assertEqual(flops(node), flop)

    def test_collectives_run_once(self):
        wait = torch.ops._c10d_functional.wait_tensor.default
        graph = torch.fx.Graph()
        node = graph.call_function(wait, (graph.placeholder("x"),))
        self.assertTrue(must_run_once(node))
        with config.patch(unsafe_allow_optimization_of_collectives=True):
            self.assertFalse(must_run_once(node))
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        self.assertFalse(must_run_once(node))

    def test_of_plans_as_fast_the_lightest_is_taken(self):
        """Ten FLOP of two hundred million do not decide for an eighth of the bytes."""
        memory, runtimes = [0.5, 0.375, 0.25], [1e8 + 10, 1e8, 1e7]
        self.assertEqual(lightest_items(memory, runtimes, [0, 2]), [1, 2])
        # A hundredth is no noise.
        runtimes[0] = 1.02e8
        self.assertEqual(lightest_items(memory, runtimes, [0]), [0])


class TestCustomSolver(TestCase):
    def test_it_gets_the_items_and_its_answer_is_the_plan(self):
        joint = Joint(chain, CHAIN)
        exact = joint.plan(0.3)
        for solver in (Fixed([0], range(1, 7)), WithRuntimes([0], range(1, 7))):
            plan = joint.plan(0.3, solver)
            memory, budget, nodes = solver.asked
            self.assertEqual(budget, 0.3, atol=1e-4, rtol=0)
            self.assertEqual(
                memory, [*map(plan.limits.as_fraction, exact.knapsack.memory)]
            )
            self.assertEqual(nodes, plan.items)
            self.assertEqual(plan.knapsack.solver, type(solver).__name__)
            saved = set(memory_of(plan.saved_values))
            self.assertLessEqual(set(memory_of(plan.items[:1])), saved)
            self.assertTrue(saved.isdisjoint(memory_of(plan.items[1:])))
        self.assertEqual(solver.runtimes, exact.knapsack.runtimes)
        # Nor does a wrong one become upstream's plan.
        with self.assertRaisesRegex(WrongAnswer, "Fixed must return two lists"):
            joint.plan(0.3, Fixed([7], range(7)))

    def test_answers_are_checked(self):
        self.assertEqual(ask(Fixed((2, 0), {1})), [0, 2])
        self.assertEqual(ask(Fixed([], torch.tensor([1, 0, 2]))), [])
        for answer in (
            ([0, 3], [1, 2]),
            ([0, 1, 2], [-1]),
            ([0, 1], [2, 1]),
            ([0], [2]),
            ([0.0], [1, 2]),
            ([0], [1], [2]),
        ):
            message = "^Fixed must return two lists of indices.* each of 3 items once"
            with self.assertRaisesRegex(WrongAnswer, message):
                ask(Fixed(*answer))

    def test_more_than_the_budget_is_told(self):
        with self.assertLogs(memory_budget.log, "WARNING") as logs:
            plan = Joint(chain, CHAIN).plan(0.3, Fixed(range(7), []))
        _, high = plan.limits
        self.assertRegex(
            logs.output[-1],
            rf"saves {high} bytes .*budget 1\), over the {int(0.3 * high)} that",
        )


@instantiate_parametrized_tests
class TestCurve(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.joint = Joint(gated, GATED)

    def setUp(self):
        super().setUp()
        context = contextlib.ExitStack()
        context.enter_context(solved())
        self.addCleanup(context.close)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def plot(self, budget):
        """Partition with the plot switched on: the plan, and what is logged."""
        with self.assertLogs(budget_curve.log, "WARNING") as logs:
            plan = self.joint.plan(
                budget,
                visualize_memory_budget_pareto=True,
                memory_budget_pareto_dir=str(self.folder),
            )
        return plan, logs.output[0]

    def test_points_are_what_their_budgets_give(self):
        asked = self.joint.plan(0.3)
        runtimes = asked.knapsack.runtimes
        points = budget_curve.pareto_points(asked, self.joint.plan)
        again = [runtime for _, runtime in points]
        self.assertGreater(len(set(again)), 10)
        self.assertEqual(again, sorted(again, reverse=True))
        self.assertEqual((again[0], again[-1]), (sum(runtimes), 0))
        saved = sum(runtimes[i] for i in asked.knapsack.saved)
        self.assertIn((0.3, sum(runtimes) - saved), points)

    @unittest.skipIf(importlib.util.find_spec("matplotlib") is None, "needs matplotlib")
    def test_the_plot_is_named_and_announced(self):
        with patch.dict(sys.modules, {"matplotlib.figure": None}):
            _, said = self.plot(0.3)
        self.assertEqual(list(self.folder.iterdir()), [])
        self.assertIn("matplotlib is missing", said)
        plan, said = self.plot(0.3)
        self.assertEqual(plan.saved_values, self.joint.plan(0.3, KNEE).saved_values)
        (plot,) = self.folder.glob("memory_budget_pareto_*.svg")
        self.assertIn(str(plot), said)
        self.assertIn("asked: 0.3", plot.read_text())


if __name__ == "__main__":
    run_tests()
