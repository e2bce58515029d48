# Owner(s): ["module: functorch"]
"""AOTAutograd's cache serves no plan that another solver or estimator made."""

import threading

import torch
from torch._dynamo.utils import counters
from torch._functorch import config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import (
    CustomKnapsackSolver,
    CustomRuntimeEstimator,
)
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)


# Widths of a chain of products that all cost something else per byte, so that one
# item more or less shows in the shapes that are saved.
ROWS = 50
WIDTHS = (40, 96, 24, 64, 16, 80, 48, 104, 32)

SOLVER = "activation_memory_budget_solver"
ESTIMATOR = "activation_memory_budget_runtime_estimator"


class SaveItems(CustomKnapsackSolver):
    """Save the items at ``places`` (largest first); recompute the others."""

    def __init__(self, *places, uuid):
        self.places, self._uuid = places, uuid
        self.unpicklable = threading.Lock()

    def __call__(self, memory, joint_graph, max_memory, node_info, nodes):
        left = [i for i in range(len(nodes)) if i not in self.places]
        return list(self.places), left

    def uuid(self):
        return self._uuid


class ByWidth(CustomRuntimeEstimator):
    """Runtimes that grow with the width of a product, or shrink."""

    def __init__(self, power, uuid):
        self.power, self._uuid = power, uuid
        self.unpicklable = threading.Lock()

    def __call__(self, node):
        return float(node.meta["val"].shape[-1]) ** self.power

    def uuid(self):
        return self._uuid


def chain(x, *weights):
    for weight in weights:
        x = x @ weight
    return x


@instantiate_parametrized_tests
class TestCacheKey(TestCase):
    def plan(self, **options):
        """Compile as a new process would; return what was saved and the cache's word.

        The cache is the folder that ``fresh_cache`` made; what is in memory goes.
        """
        torch._dynamo.reset()
        counters.clear()
        x = torch.ones(ROWS, WIDTHS[0], requires_grad=True)
        weights = [
            torch.ones(rows, columns, requires_grad=True)
            for rows, columns in zip(WIDTHS, WIDTHS[1:])
        ]
        saved = []

        def pack(tensor):
            if ROWS in tensor.shape:
                saved.append(tensor.numel() // ROWS)
            return tensor

        with (
            config.patch(
                enable_autograd_cache=True, activation_memory_budget=0.3, **options
            ),
            inductor_config.patch(fx_graph_cache=True, fx_graph_remote_cache=False),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            product = torch.compile(chain)(x, *weights)
            product.backward(torch.ones_like(product))
        words = [
            word
            for word in ("hit", "miss", "bypass")
            if counters["aot_autograd"][f"autograd_cache_{word}"]
        ]
        return sorted(saved), words

    @parametrize("option", [SOLVER, ESTIMATOR])
    def test_each_choice_has_its_own_plan(self, option):
        """Every choice misses, makes a plan of its own, and then hits.

        But for the last, which has no uuid: it bypasses the cache.
        """
        choices = {
            SOLVER: (
                "dp",
                "greedy",
                SaveItems(0, uuid="first"),
                SaveItems(1, uuid="second"),
                # A class that is called like a name.
                SaveItems(2, uuid="dp"),
                SaveItems(3, uuid=None),
            ),
            ESTIMATOR: (
                "flops",
                "testing",
                ByWidth(2, uuid="first"),
                ByWidth(-2, uuid="second"),
                ByWidth(1, uuid=None),
            ),
        }[option]
        plans = []
        with fresh_cache():
            for choice in choices:
                saved, words = self.plan(**{option: choice})
                expected = "bypass" if choice is choices[-1] else "miss"
                self.assertEqual(words, [expected], msg=str(choice))
                plans.append(saved)
            for choice, saved in list(zip(choices[:-1], plans))[1::2]:
                self.assertEqual(self.plan(**{option: choice}), (saved, ["hit"]))
        # What is served twice could not be told apart if these were the same.
        for first, second in zip(plans[::2], plans[1::2]):
            self.assertNotEqual(first, second)


if __name__ == "__main__":
    run_tests()
