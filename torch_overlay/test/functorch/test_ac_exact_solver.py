# Owner(s): ["module: functorch"]
"""The solver that activation_memory_budget_solver = "exact" selects."""

import itertools
import math
import random
from unittest.mock import patch

import torch
from torch._functorch import config
from torch._functorch._activation_checkpointing import knapsack_search
from torch._functorch._activation_checkpointing.knapsack_search import exact_knapsack
from torch.testing._internal.common_utils import run_tests, TestCase


def layers(rng, n):
    """The bytes and flops of ``n`` items in a few repeated shapes."""
    shapes = [
        (rng.choice((8, 4096, 3 << 20, 4 << 30)), rng.randrange(1, 10**12))
        for _ in range(max(2, n // 3))
    ]
    return [rng.choice(shapes) for _ in range(n)]


def distinct(rng, n):
    """Flops that follow the bytes, so that no item is a clear choice."""
    sizes = [rng.randrange(1, 60) for _ in range(n)]
    return [(size, 100 * size + rng.randrange(100)) for size in sizes]


def as_partitioner(sizes):
    """Sizes as the partitioner hands them over: shares of the range, in floats."""
    total_gb = sum(sizes) / 1e9
    return [size / 1e9 / total_gb for size in sizes]


def best_by_table(items, capacity):
    """The most flops that fit, by a table of every sum of bytes."""
    best = {0: 0}
    for size, flops in items:
        for used, value in list(best.items()):
            if used + size <= capacity:
                more = best.get(used + size, 0)
                best[used + size] = max(more, value + flops)
    return max(best.values())


def best_by_enumeration(memory, runtimes, max_memory):
    everything = range(len(memory))
    return max(
        sum(runtimes[i] for i in chosen)
        for size in range(len(memory) + 1)
        for chosen in itertools.combinations(everything, size)
        if math.fsum(memory[i] for i in chosen) <= max_memory
    )


class TestExactSolver(TestCase):
    def check(self, memory, runtimes, max_memory):
        """What holds for every answer; returns its runtime."""
        value, saved, recomputable = exact_knapsack(memory, runtimes, max_memory)
        self.assertLessEqual(math.fsum(memory[i] for i in saved), max_memory)
        self.assertEqual(sorted(saved + recomputable), list(range(len(memory))))
        self.assertEqual((saved, recomputable), (sorted(saved), sorted(recomputable)))
        self.assertTrue(value == sum(runtimes[i] for i in saved))
        return value

    def test_shares_of_the_range(self):
        for seed, make in itertools.product(range(60), (layers, distinct)):
            rng = random.Random(seed)
            sizes, runtimes = zip(*make(rng, rng.randrange(1, 11)))
            memory = as_partitioner(sizes)
            budget = rng.random()
            with self.subTest(seed=seed, make=make.__name__):
                value = self.check(memory, runtimes, budget)
                best = best_by_enumeration(memory, runtimes, budget)
                self.assertTrue(value == best)

    def test_whole_bytes(self):
        for seed in range(10):
            rng = random.Random(seed)
            items = distinct(rng, 40)
            sizes, runtimes = zip(*items)
            capacity = int(rng.uniform(0.1, 0.9) * sum(sizes))
            with self.subTest(seed=seed):
                value = self.check(sizes, runtimes, capacity)
                self.assertEqual(value, best_by_table(items, capacity))

    def test_sizes_below_the_table_of_dp(self):
        # Each is less than half of 1/10000, which dp rounds to nothing.
        memory = as_partitioner([4096] * 30000)
        self.assertEqual(self.check(memory, [1.0] * 30000, 0.1), 3000)

    def test_edges(self):
        for memory, runtimes, max_memory, expected in (
            ([], [], 1.0, []),
            ([0.6, 0.7], [1.0, 2.0], 0.5, []),
            ([0.0, 0.1], [1.0, 1.0], 0.0, [0]),
            ([0.5, 0.5, 0.0], [1.0, 1.0, 0.0], 1.0, [0, 1]),
            # The floats add up to 0.3 and a fraction of its last bit.
            ([0.1, 0.2, 0.3], [1.0, 1.0, 1.0], 0.1 + 0.2, [0, 1]),
        ):
            with self.subTest(memory=memory):
                self.check(memory, runtimes, max_memory)
                saved = exact_knapsack(memory, runtimes, max_memory)[1]
                self.assertEqual(saved, expected)

    def test_ties(self):
        """The order of the items decides only which of the equal ones are saved."""
        for seed in range(20):
            rng = random.Random(seed)
            kinds = [(rng.randrange(1, 5), rng.randrange(1, 5)) for _ in range(6)]
            items = [rng.choice(kinds) for _ in range(30)]
            answers = set()
            for _ in range(5):
                sizes, runtimes = zip(*items)
                saved = exact_knapsack(sizes, runtimes, 20)[1]
                answers.add(tuple(sorted(items[i] for i in saved)))
                for i, j in itertools.combinations(range(len(items)), 2):
                    if items[i] == items[j]:
                        self.assertGreaterEqual(i in saved, j in saved)
                rng.shuffle(items)
            self.assertEqual(len(answers), 1)

    def test_too_many_states(self):
        """It stops, tells how far the optimum can be, and does so truly."""
        items = distinct(random.Random(0), 100)
        sizes, runtimes = zip(*items)
        capacity = sum(sizes) // 2
        best = best_by_table(items, capacity)
        for most in (0, 10, 100):
            saved, gap = knapsack_search.search(sizes, runtimes, capacity, most)
            value = sum(runtimes[i] for i in saved)
            self.assertLessEqual(sum(sizes[i] for i in saved), capacity)
            self.assertTrue(value <= best <= value + gap)
            self.assertGreater(gap, 0)
        limited = patch.object(knapsack_search, "MAX_STATES", 10)
        with limited, self.assertLogs(knapsack_search.log, "WARNING"):
            self.check(sizes, runtimes, capacity)

    def test_selected_by_name(self):
        def chain(x, *weights):
            for weight in weights:
                x = x @ weight
            return x.sum()

        inputs = [torch.ones(8, 8, requires_grad=True) for _ in range(5)]
        with config.patch(
            activation_memory_budget=0.5, activation_memory_budget_solver="exact"
        ):
            compiled = torch.compile(chain, backend="aot_eager_decomp_partition")
            self.assertEqual(compiled(*inputs), chain(*inputs))


if __name__ == "__main__":
    run_tests()
