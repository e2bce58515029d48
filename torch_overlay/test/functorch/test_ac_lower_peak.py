# Owner(s): ["module: functorch"]
"""Of plans that recompute about as much, the one with the lower peak is taken."""

from unittest import mock

import torch
from torch._functorch import config, partitioners
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils.checkpoint import CheckpointPolicy


BUDGETS = (0.1, 0.2, 0.3, 0.5)
LAYERS, ROWS, WIDTH = 12, 64, 8


def layers(x, *weights):
    """Blocks with a residual, each of which makes much more than it hands on."""
    for up, down in zip(weights[::2], weights[1::2]):
        x = x + (x.sin() @ up).sigmoid() @ down
    return x.sum()


def overwrites(x, state, *weights):
    """The backward may not be planned from an input that gets other values."""
    scale = state[0]
    for _ in range(8):
        scale = scale + 1
    for up, down in zip(weights[::2], weights[1::2]):
        x = x + (x.sin() @ up).sigmoid() @ down * scale
    state.mul_(2)
    return x.sum()


def products(graph):
    return sum(node.target is torch.ops.aten.mm.default for node in graph.nodes)


class Live(torch.fx.Interpreter):
    """Counts the bytes of the values that are live, inputs apart."""

    def run_node(self, node):
        value = super().run_node(node)
        there = {
            each.untyped_storage()._cdata: each.untyped_storage().nbytes()
            for each in [*self.env.values(), value]
            if isinstance(each, torch.Tensor)
        }
        self.peak = max(getattr(self, "peak", 0), sum(there.values()))
        return value


class Plan:
    """A peak of the backward, the products of both halves, and the gradients."""

    def __init__(self, function, inputs, budget, again=()):
        def split(joint, joint_inputs, **options):
            for node in joint.graph.nodes:
                if node.target in again:
                    policy = CheckpointPolicy.MUST_RECOMPUTE
                    node.meta.update(recompute=policy, ac_graph_id=0)
            halves = min_cut_rematerialization_partition(joint, joint_inputs, **options)
            (self.saved,) = halves[0].graph.find_nodes(op="output")
            self.products = sum(products(half.graph) for half in halves)
            return halves

        def watch(module, _):
            def call(arguments):
                live = Live(module)
                result = live.run(*arguments)
                self.peak = live.peak
                return result

            return make_boxed_func(lambda *arguments: call(arguments))

        inputs = [x.clone().detach().requires_grad_(x.requires_grad) for x in inputs]
        compiled = aot_function(
            function,
            fw_compiler=nop,
            bw_compiler=watch,
            partition_fn=split,
            keep_inference_input_mutations=True,
        )
        with config.patch(activation_memory_budget=budget):
            compiled(*inputs).backward()
        self.gradients = [x.grad for x in inputs if x.requires_grad]


class TestLowerPeak(TestCase):
    def plans(self, function, *others, **options):
        """By budget, the smallest first; gradients must not depend on it."""
        torch.manual_seed(0)
        shapes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * LAYERS
        weights = [torch.randn(s).div(s[0]).requires_grad_() for s in shapes]
        inputs = [torch.randn(ROWS, WIDTH, requires_grad=True), *others, *weights]
        fastest = Plan(function, inputs, 1)
        plans = {each: Plan(function, inputs, each, **options) for each in BUDGETS}
        for plan in plans.values():
            self.assertEqual(plan.gradients, fastest.gradients)
        return plans

    def test_a_smaller_budget_has_no_higher_peak(self):
        smaller = None
        for plan in self.plans(layers).values():
            if smaller is not None:
                self.assertLessEqual(smaller.peak, 1.05 * plan.peak)
            smaller = plan

    def test_a_lower_peak_takes_little_time(self):
        lower = self.plans(layers)
        with mock.patch.object(
            partitioners, "with_lower_peak", lambda graph, info, saved, *_: saved
        ):
            knapsacks = self.plans(layers)
        for budget, plan in lower.items():
            own = knapsacks[budget]
            self.assertLessEqual(plan.peak, own.peak)
            self.assertLessEqual(plan.products, 1.05 * own.products)
        self.assertLess(lower[BUDGETS[0]].peak, 0.7 * knapsacks[BUDGETS[0]].peak)

    def test_what_must_be_recomputed_is_not_saved(self):
        add = torch.ops.aten.add.Tensor
        for plan in self.plans(layers, again=(add,)).values():
            saved = [node.target for node in plan.saved.all_input_nodes]
            self.assertNotIn(add, saved)

    def test_nothing_is_made_again_of_an_overwritten_input(self):
        self.plans(overwrites, torch.randn(WIDTH, WIDTH))


if __name__ == "__main__":
    run_tests()
