"""The knapsack solvers against an exact oracle, and upstream's own dp on real nets.

Upstream's solvers come from the untouched wheel. Brute force, edges, bad input and ties
are in test_ac_knapsack_solvers.py and test_ac_knapsack_exact.py.
"""

import itertools
import math
import os
import random
from fractions import Fraction

import pytest
import torch
from benchmarks.solvers import instances as captured
from benchmarks.tracing import untouched_knapsack
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch._functorch._activation_checkpointing import knapsack as ours
from torch._functorch._activation_checkpointing import knapsack_exact as exact
from torch._functorch.memory_planner.solver import upstreams_table


upstream = untouched_knapsack()

# ------------------------------------------------------------ the exact solver


def pareto_optimum(memory, runtime, budget):
    """The best exact value by enumerating Pareto states of exact Fractions.

    The Fractions are put over one denominator each, so that the states are ints.
    """
    unit, sizes = over_one_denominator(memory)
    value_unit, values = over_one_denominator(runtime)
    states = {0: 0}
    for m, r in zip(sizes, values):
        merged = dict(states)
        for weight, value in states.items():
            if merged.get(weight + m, -1) < value + r:
                merged[weight + m] = value + r
        states, best = {}, -1
        for weight in sorted(merged):
            # float() of a Fraction rounds correctly, as fsum does.
            if merged[weight] > best and float(weight * unit) <= budget:
                best = states[weight] = merged[weight]
    return max(states.values()) * value_unit


def over_one_denominator(numbers):
    fractions = [Fraction(x) for x in numbers]
    denominator = max(f.denominator for f in fractions)
    return Fraction(1, denominator), [int(f * denominator) for f in fractions]


def check_optimal(memory, runtime, budget):
    solution = exact.solve_knapsack(memory, runtime, budget)
    assert solution.proven
    assert math.fsum(memory[i] for i in solution.saved) <= budget
    value = sum((Fraction(runtime[i]) for i in solution.saved), Fraction(0))
    assert value == pareto_optimum(memory, runtime, budget)


@st.composite
def instances(draw):
    """Instances with ties, scales and repetitions, and a budget where it hurts."""
    seed = draw(st.integers(0, 2**32 - 1))
    count = draw(st.integers(1, 15))
    note(f"seed={seed} count={count}")
    return random_instance(random.Random(seed), count)


def random_instance(r, count):
    kinds = r.randint(1, count)
    sizes = [random_bytes(r) for _ in range(kinds)]
    runtimes = [random_runtime(r, r.random() < 0.3) for _ in range(kinds)]
    if r.random() < 0.3:
        runtimes = [s + r.choice([0, 1000]) for s in sizes]
    gigabytes = r.choice([None, 1, r.uniform(0.1, 500)])
    if gigabytes:
        sizes = [s / 1e9 / gigabytes for s in sizes]
    if r.random() < 0.1:  # Almost on a common step.
        off = 10 ** r.uniform(-16, -1)
        sizes = [s * (1 + r.uniform(-off, off)) for s in sizes]
    which = [r.randrange(kinds) for _ in range(count)]
    memory = [sizes[k] for k in which]
    budget = float(math.fsum(m for m in memory if r.random() < 0.5))
    budgets = [
        budget,
        math.nextafter(budget, math.inf),
        max(0.0, math.nextafter(budget, -math.inf)),
        math.fsum(memory) * r.random(),
    ]
    return memory, [runtimes[k] for k in which], r.choice(budgets)


def random_bytes(r):
    rows = [r.randint(0, 40), r.randint(1, 64) * 512, r.randint(1, 4) << 30]
    return r.choice([*rows, r.randint(1, 2**32), 1 << r.randint(0, 32)])


def random_runtime(r, is_float):
    if r.random() < 0.08:
        return 0.0 if is_float else 0
    if is_float:
        return 10 ** r.uniform(-9, 6)
    return r.choice([r.randint(1, 30), r.randint(1, 10**15), 10 ** r.randint(0, 15)])


@settings(max_examples=int(os.environ.get("FUZZ", 500)), deadline=None, print_blob=True)
@given(instances())
def test_equals_the_oracle(instance):
    check_optimal(*instance)


def test_extreme_floats():
    memory = [5e-324, 8e307, 1.0, 1e-300, 9e307]
    for budget in (5e-324, 1e-300, 1.0, 1e308):
        check_optimal(memory, [1e307, 1e307, 5e-324, 1.0, 3.0], budget)


def test_a_lowered_limit_does_not_hide_the_optimum():
    """A solution lowers the limit below the loss of a class that is still undecided."""
    memory = [16, 3, 3] + [16896] * 4 + [870193811] * 2
    runtime = [3527034127655355] + [35184372088832] * 2 + [52776558133248] * 4
    check_optimal(memory, runtime + [4064131956305032] * 2, 870227622.0)
    # It rules out all that is undecided, and what remains is a state as it is.
    memory = [40, 90, 67, 46, 84, 47, 92, 78]
    check_optimal(memory, [42, 90, 69, 48, 84, 48, 93, 78], 208.0)


# ------------------------------------------------------------ the dynamic program

# What it rounds the sizes to, as shares of the range.
QUANTA = 10_000


def runtime_saved(solver, memory, runtimes, budget):
    _, saved, _ = solver(memory, runtimes, budget)
    assert sum(round(memory[i] * QUANTA) for i in saved) <= round(budget * QUANTA)
    return math.fsum(runtimes[i] for i in saved)


@pytest.mark.parametrize("net", captured(), ids=str)
def test_dp_is_upstreams(net):
    # Which adds up in float32: small integers first, then what it may lose on.
    scale = (2**24 - len(net.runtimes)) / max(sum(net.runtimes), 1)
    small = [max(1, math.floor(runtime * scale)) for runtime in net.runtimes]
    for budget, runtimes in itertools.product((0.05, 0.3, 0.8), (small, net.runtimes)):
        found, theirs = (
            runtime_saved(solver, net.memory, runtimes, budget)
            for solver in (ours.dp_knapsack, upstream.dp_knapsack)
        )
        assert found == theirs if runtimes is small else found >= theirs * (1 - 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [0.0, 0.1, 0.5, 0.9])
def test_ties_as_upstreams_table_has_them(budget, dtype):
    """Of plans worth as much, the one whose peak is to be compared is upstream's own."""
    equal = {
        "equal": [0.03, 0.03, 0.02, 0.02, 0.02, 0.01] * 9,
        "too large and empty": [2.0, 0.0, 0.01] * 9,
    }
    cases = [(memory, [1e9, 1e9, 1, 0.0, 1e9, 7] * 9) for memory in equal.values()]
    cases += [(net.memory, net.runtimes) for net in captured() if len(net.sizes) < 300]
    for memory, runtimes in cases:
        runtimes = runtimes[: len(memory)]
        _, _, recomputed = upstream.dp_knapsack(memory, runtimes, budget)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            assert upstreams_table(memory, runtimes, budget) == recomputed
        finally:
            torch.set_default_dtype(usual)
