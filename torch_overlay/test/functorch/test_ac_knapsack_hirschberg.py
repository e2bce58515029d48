# Owner(s): ["module: functorch"]
"""The solver named after Hirschberg keeps its capacity and finds what dp finds.

Sizes and capacity are whole quanta, so that "within the budget" has one meaning.
"""

import random

from torch._functorch._activation_checkpointing.knapsack import (
    dp_knapsack,
    dp_knapsack_sliding_hirschberg,
)
from torch.testing._internal.common_utils import run_tests, TestCase


QUANTUM = 1e-4


def instance(seed, items, largest):
    """Sizes in quanta, runtimes, and a capacity in quanta that not all items fit."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, largest) for _ in range(items)]
    runtimes = [rng.randint(1, 1000) for _ in range(items)]
    return sizes, runtimes, rng.randint(0, max(0, sum(sizes) - 1))


class TestSlidingHirschberg(TestCase):
    def solve(self, sizes, runtimes, capacity):
        """The runtime saved, after checking that the answer is one."""
        value, saved, recomputable = dp_knapsack_sliding_hirschberg(
            [size * QUANTUM for size in sizes],
            [float(runtime) for runtime in runtimes],
            capacity * QUANTUM,
        )
        self.assertEqual(sorted(saved + recomputable), list(range(len(sizes))))
        self.assertEqual(value, float(sum(runtimes[i] for i in saved)))
        self.assertLessEqual(sum(sizes[i] for i in saved), capacity)
        return value

    def test_a_split_hands_out_no_quantum_twice(self):
        # https://github.com/pytorch/pytorch/issues/197871
        self.assertEqual(self.solve([1, 1, 1], [1, 1, 1], 1), 1.0)

    def test_as_much_as_dp(self):
        for seed in range(80):
            sizes, runtimes, capacity = instance(seed, 1 + seed % 40, 60)
            # None, some or all of them.
            for room in (0, capacity, sum(sizes)):
                expected, _, _ = dp_knapsack(
                    [size * QUANTUM for size in sizes],
                    [float(runtime) for runtime in runtimes],
                    room * QUANTUM,
                )
                found = self.solve(sizes, runtimes, room)
                self.assertEqual(found, float(expected))


if __name__ == "__main__":
    run_tests()
