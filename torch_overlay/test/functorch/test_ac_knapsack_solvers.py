# Owner(s): ["module: functorch"]
"""Properties that hold for every solver of the activation memory budget.

The exact solver's proofs are in test_ac_knapsack_exact.py.
"""

import itertools
import math
import random
import sys

from torch._functorch._activation_checkpointing.knapsack import KNAPSACK_SOLVERS
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)


# These round sizes and capacity to 1/10000; the others take them as they are.
ROUNDED = ("dp", "dp_knapsack_sliding_hirschberg")


def over(names):
    """Run a test once per solver."""
    return parametrize("name", [subtest(name, name=name) for name in names])


all_solvers = over(KNAPSACK_SOLVERS)
rounded_solvers = over(ROUNDED)
true_size_solvers = over(name for name in KNAPSACK_SOLVERS if name not in ROUNDED)


def quanta(size):
    return round(min(size * 10_000, sys.float_info.max))


def size_of(name, sizes):
    return sum(map(quanta, sizes)) if name in ROUNDED else math.fsum(sizes)


def capacity_of(name, max_memory):
    return quanta(max_memory) if name in ROUNDED else max_memory


def random_instance(seed, n):
    """Sizes of about 1 / n.  Odd seeds repeat a few items, as layers do."""
    rng = random.Random(seed)
    shapes = [
        (rng.uniform(0, 2 / n), rng.choice((0, 1, rng.randrange(1, 10**9))))
        for _ in range(4 if seed % 2 else n)
    ]
    items = [rng.choice(shapes) for _ in range(n)] if seed % 2 else shapes
    memory = [size for size, _ in items]
    runtimes = [runtime for _, runtime in items]
    return memory, runtimes, rng.uniform(0, 0.9) * sum(memory)


def close_instance(seed, n):
    """Runtimes that are all the same in float32."""
    rng = random.Random(seed)
    memory = [rng.randrange(1, 1000) / 1000 / n for _ in range(n)]
    return memory, [10**11 + rng.randrange(1000) for _ in range(n)], 0.25


class TestKnapsackSolvers(TestCase):
    def solve(self, name, memory, runtimes, max_memory):
        """Check what every answer has to fulfil and return the runtime saved."""
        value, saved, recomputable = KNAPSACK_SOLVERS[name](
            memory, runtimes, max_memory
        )
        self.assertEqual(saved, sorted(saved))
        self.assertEqual(recomputable, sorted(recomputable))
        self.assertEqual(sorted(saved + recomputable), list(range(len(memory))))
        self.assertTrue(value == math.fsum(runtimes[i] for i in saved))
        self.assertTrue(all(runtimes[i] > 0 for i in saved))
        self.assertTrue(all(memory[i] > 0 or not runtimes[i] for i in recomputable))
        used = size_of(name, [memory[i] for i in saved])
        self.assertLessEqual(used, capacity_of(name, max(max_memory, 0)))
        return value

    @all_solvers
    def test_brute_force(self, name):
        for seed, make in itertools.product(
            range(30), (random_instance, close_instance)
        ):
            n = 1 + seed % 10
            memory, runtimes, max_memory = make(seed, n)
            best = max(
                math.fsum(runtimes[i] for i in chosen)
                for size in range(n + 1)
                for chosen in itertools.combinations(range(n), size)
                if size_of(name, [memory[i] for i in chosen])
                <= capacity_of(name, max_memory)
            )
            with self.subTest(seed=seed, make=make.__name__):
                value = self.solve(name, memory, runtimes, max_memory)
                self.assertLessEqual(value, best)
                if name != "greedy":
                    self.assertGreaterEqual(value, best)

    @all_solvers
    def test_edge_cases(self, name):
        for memory, runtimes, max_memory, expected in (
            ([], [], 1.0, []),
            ([0.6, 0.7], [1.0, 2.0], 0.5, []),
            ([0.5, 0.5, 0.0], [1.0, 1.0, 0.0], 1.0, [0, 1]),
            ([0.1, 0.0], [1.0, 1.0], -math.inf, [1]),
            ([9.0, 9.0], [1.0, 0.0], math.inf, [0]),
            ([1, 2, 3], [10, 20, 31], 3, [2]),
            # Ties go by index.
            ([0.2, 0.1, 0.2, 0.1], [2.0, 1.0, 2.0, 1.0], 0.301, [0, 1]),
            ([0.5, 0.4, 0.1], [5.0, 3.9, 0.9], 0.65, [0, 2]),
        ):
            with self.subTest(memory=memory, runtimes=runtimes, max_memory=max_memory):
                self.solve(name, memory, runtimes, max_memory)
                saved = KNAPSACK_SOLVERS[name](memory, runtimes, max_memory)[1]
                self.assertEqual(saved, expected)

    @all_solvers
    def test_bad_input(self, name):
        solver = KNAPSACK_SOLVERS[name]
        for memory, runtimes, max_memory, message in (
            ([0.1], [1.0, 2.0], 1.0, "memory has 1 items but runtimes has 2"),
            ([0.1, math.nan], [1.0, 1.0], 1.0, r"memory\[1\] is nan"),
            ([math.inf], [1.0], 1.0, r"memory\[0\] is inf"),
            ([0.1], [-1.0], 1.0, r"runtimes\[0\] is -1.0"),
            ([0.1, 0.1], [10**400, 1], 0.0, r"runtimes\[0\] is 10+:"),
            ([0.1], [1.0], math.nan, "max_memory is nan"),
        ):
            with self.subTest(message), self.assertRaisesRegex(ValueError, message):
                solver(memory, runtimes, max_memory)

    @rounded_solvers
    def test_sizes_are_rounded_to_the_nearest_quantum(self, name):
        # 0.4, 0.5 and 2.5 quanta; ties go to the even one.
        self.assertEqual(self.solve(name, [4e-5] * 9, [1] * 9, 0.0), 9)
        self.assertEqual(self.solve(name, [5e-5, 2.5e-4], [1, 1], 2e-4), 2)
        self.assertEqual(self.solve(name, [5e-5, 2.5e-4], [1, 1], 1e-4), 1)

    @true_size_solvers
    def test_sizes_are_summed_exactly(self, name):
        # Added one by one, ten tenths come out below 1.
        self.assertEqual(self.solve(name, [0.1] * 10, [1] * 10, 1.0), 10)
        below = math.nextafter(1.0, 0.0)
        self.assertEqual(self.solve(name, [0.1] * 10, [1] * 10, below), 9)


instantiate_parametrized_tests(TestKnapsackSolvers)


if __name__ == "__main__":
    run_tests()
