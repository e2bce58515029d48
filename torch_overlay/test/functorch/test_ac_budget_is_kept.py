# Owner(s): ["module: functorch"]
"""A plan keeps no more than its activation memory budget where its items fit."""

import torch
from torch._functorch import config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


BUDGETS = (0.3, 0.4, 0.5)
# The solver rounds each size to 1/10000 of the range.
ROUNDING = 1e-3


@torch.library.custom_op("ac_budget_is_kept::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = x.chunk(2, 1)
    return left.clone(), right.clone()


@halves.register_fake
def fake_halves(x):
    return tuple(x.new_empty(x.shape[0], x.shape[1] // 2) for _ in range(2))


def backward_of_halves(ctx, *grads):
    return torch.cat(grads, 1)


halves.register_autograd(backward_of_halves)


def spread(x):
    """Needs nothing for its backward but what is twice as large, and near that."""
    x = torch.cat((x, x), 1)
    for _ in range(24):
        x = x + 1
    return x.sin().view(x.shape[0], -1, 2).sum(2)


def products(x, *weights):
    for weight in weights:
        x = spread(x @ weight)
    return x.sum()


def pairs(x):
    """What is saved is taken out of a tuple."""
    for _ in range(3):
        x = spread(torch.cat(halves(x), 1))
    return x.sum()


def counts(x, mean, *weights):
    """Only the forward needs the input that is overwritten."""
    for weight in weights:
        x = spread(x @ weight)
    mean.mul_(0.9).add_(x.detach().mean(0))
    return x.sum()


def scales(x, buffer, *weights):
    """The backward needs what is made of an input that has other values by then."""
    scale = buffer[0]
    for _ in range(8):
        scale = scale + 1
    for weight in weights:
        x = spread(x @ weight) * scale
    buffer.mul_(2)
    return x.sum()


class Plan:
    """What is kept for the backward at a budget, and the gradients."""

    def __init__(self, function, inputs, budget):
        def split(joint, joint_inputs, *, num_fwd_outputs, **options):
            halves = min_cut_rematerialization_partition(
                joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options
            )
            graph = halves[0].graph
            (output,) = graph.find_nodes(op="output")
            kept = self.storages(output.args[0][num_fwd_outputs:])
            given = self.storages(graph.find_nodes(op="placeholder"))
            self.kept = sum(size for key, size in kept.items() if key not in given)
            return halves

        inputs = [x.clone().detach().requires_grad_(x.requires_grad) for x in inputs]
        compiled = aot_function(
            function,
            fw_compiler=nop,
            partition_fn=split,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        with config.patch(
            activation_memory_budget=budget,
            activation_memory_budget_solver="dp",
            is_non_builtin_to_include=True,
        ):
            compiled(*inputs).backward()
        self.gradients = [x.grad for x in inputs if x.requires_grad]

    @staticmethod
    def storages(nodes):
        found = [node.meta["val"].untyped_storage() for node in nodes]
        return {storage._cdata: storage.nbytes() for storage in found}


class TestBudgetIsKept(TestCase):
    @parametrize(
        "function", [products, pairs, counts], name_fn=lambda each: each.__name__
    )
    def test_no_more_is_kept(self, function):
        for budget, share in self.shares(function).items():
            self.assertLessEqual(share, budget + ROUNDING)

    def test_nothing_is_made_again_of_an_overwritten_input(self):
        self.shares(scales)

    def shares(self, function):
        """By budget, of what budget 1 keeps; gradients must not depend on it."""
        torch.manual_seed(0)
        x, *weights = (torch.randn(16, 16, requires_grad=True) for _ in range(4))
        inputs = {
            products: [x, *weights],
            pairs: [x],
            counts: [x, torch.randn(16), *weights],
            scales: [x, torch.randn(16, 16), *weights],
        }[function]
        fastest = Plan(function, inputs, 1)
        plans = {budget: Plan(function, inputs, budget) for budget in BUDGETS}
        for plan in plans.values():
            self.assertEqual(plan.gradients, fastest.gradients)
        return {budget: plan.kept / fastest.kept for budget, plan in plans.items()}


instantiate_parametrized_tests(TestBudgetIsKept)


if __name__ == "__main__":
    run_tests()
