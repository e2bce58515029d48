# Owner(s): ["module: functorch"]
"""The exact solver of the activation memory budget: optimal, feasible, proven.

What holds for every solver is in test_ac_knapsack_solvers.py.
"""

import itertools
import math
import random
from fractions import Fraction

from torch._functorch._activation_checkpointing.knapsack import greedy_knapsack
from torch._functorch._activation_checkpointing.knapsack_exact import (
    solve_knapsack,
    solve_knapsack_budgets,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


def as_partitioner(sizes):
    """Bytes as the partitioner hands them over: shares of the range, in floats."""
    total_gb = sum(sizes) / 1e9
    return [size / 1e9 / total_gb for size in sizes]


def layers(rng, n):
    """Activations of ``n`` items in a few repeated shapes, from 8 bytes to 4 GB."""
    shapes = [
        (rng.choice((8, 4096, 3 << 20, 1 << 25, 4 << 30)), rng.randrange(1, 10**12))
        for _ in range(max(2, n // 3))
    ]
    items = [rng.choice(shapes) for _ in range(n)]
    return as_partitioner([size for size, _ in items]), [flops for _, flops in items]


def distinct(rng, n):
    """Floats without a common step, runtimes over fifteen decades."""
    memory = [10 ** rng.uniform(-9, 0) for _ in range(n)]
    return memory, [10 ** rng.uniform(-3, 12) for _ in range(n)]


def subset_sum(rng, n):
    """Runtime equal to size: only the weight tells sets apart."""
    sizes = [rng.randrange(1, 1000) for _ in range(n)]
    return [float(size) for size in sizes], sizes


FAMILIES = [layers, distinct, subset_sum]


all_families = parametrize("family", FAMILIES, name_fn=lambda family: family.__name__)


class TestExactKnapsack(TestCase):
    def solve(self, memory, runtimes, budget, **options):
        solution = solve_knapsack(memory, runtimes, budget, **options)
        self.check(memory, runtimes, budget, solution)
        return solution

    def check(self, memory, runtimes, budget, solution):
        """Feasible, complete, and what it says of itself is true."""
        self.assertLessEqual(math.fsum(memory[i] for i in solution.saved), budget)
        everything = sorted(solution.saved + solution.recomputable)
        self.assertEqual(everything, list(range(len(memory))))
        exact = sum((Fraction(runtimes[i]) for i in solution.saved), Fraction(0))
        self.assertTrue(solution.value == float(exact))
        self.assertTrue(solution.weight == math.fsum(memory[i] for i in solution.saved))
        self.assertGreaterEqual(solution.upper_bound, solution.value)
        if solution.proven:
            self.assertTrue(solution.upper_bound == solution.value)

    @all_families
    def test_against_brute_force(self, family):
        for seed in range(40):
            rng = random.Random(seed)
            memory, runtimes = family(rng, rng.randrange(1, 11))
            budget = rng.random() * math.fsum(memory)
            best = max(
                sum((Fraction(runtimes[i]) for i in chosen), Fraction(0))
                for size in range(len(memory) + 1)
                for chosen in itertools.combinations(range(len(memory)), size)
                if math.fsum(memory[i] for i in chosen) <= budget
            )
            with self.subTest(seed=seed):
                solution = self.solve(memory, runtimes, budget)
                self.assertTrue(solution.proven)
                self.assertTrue(solution.value == float(best))

    @all_families
    def test_many_budgets_answer_as_one(self, family):
        memory, runtimes = family(random.Random(1), 40)
        total = math.fsum(memory)
        budgets = [total * share / 20 for share in (3, 19, 0, 7, 7, 12, 25)]
        together = solve_knapsack_budgets(memory, runtimes, budgets)
        self.assertEqual(len(together), len(budgets))
        for budget, solution in zip(budgets, together):
            self.check(memory, runtimes, budget, solution)
            alone = self.solve(memory, runtimes, budget)
            self.assertTrue(alone.proven and solution.proven)
            self.assertTrue(alone.value == solution.value)

    def test_state_cap(self):
        # Sizes and runtimes that all but agree: nothing is decided by a bound.
        rng = random.Random(0)
        memory = [float(rng.randrange(1, 10**6)) for _ in range(200)]
        runtimes = [size + 10**5 for size in memory]
        budget = 0.5 * sum(memory)
        best = solve_knapsack(memory, runtimes, budget)
        greedy = greedy_knapsack(memory, runtimes, budget)[0]
        for max_states in (0, 1, 10, 1000):
            capped = self.solve(memory, runtimes, budget, max_states=max_states)
            self.assertGreaterEqual(capped.value, greedy)
            self.assertGreaterEqual(capped.upper_bound, best.value)


instantiate_parametrized_tests(TestExactKnapsack)


if __name__ == "__main__":
    run_tests()
