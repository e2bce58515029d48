"""The exact knapsack solver against exact oracles, and on the corpus.

Feasible means what it means everywhere in this project: ``math.fsum`` of the saved
sizes is at most the budget. What holds for every solver is in test_solvers.py.
"""

from __future__ import annotations

import math
import os
import random
import sys
from bisect import bisect_right
from fractions import Fraction
from functools import partial

import pytest
from benchmarks import corpus
from benchmarks.solvers import dantzig
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch._functorch._activation_checkpointing import knapsack_exact as exact
from torch._functorch._activation_checkpointing.knapsack import greedy_knapsack


def pareto_optimum(memory, runtime, budget):
    """The best exact value by enumerating Pareto states of exact Fractions.

    The Fractions are put over one denominator each, so that the states are ints.
    """
    unit, sizes = _over_one_denominator(memory)
    value_unit, values = _over_one_denominator(runtime)
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


def _over_one_denominator(numbers):
    fractions = [Fraction(x) for x in numbers]
    denominator = max(f.denominator for f in fractions)
    return Fraction(1, denominator), [int(f * denominator) for f in fractions]


def check(memory, runtime, budget, solution):
    """Everything that must hold of any solution, optimal or not; returns its value."""
    chosen = set(solution.saved)
    assert solution.saved == sorted(chosen)
    everything = set(range(len(memory)))
    assert solution.recomputable == sorted(everything - chosen)
    assert solution.weight == math.fsum(memory[i] for i in solution.saved)
    assert solution.weight <= max(budget, 0)
    value = sum((Fraction(runtime[i]) for i in solution.saved), Fraction(0))
    if all(isinstance(runtime[i], int) for i in solution.saved):
        assert solution.value == value
    else:
        assert solution.value == float(value)
    assert solution.upper_bound >= solution.value
    assert not solution.proven or solution.upper_bound == solution.value
    for i in range(len(memory)):
        assert runtime[i] or i not in chosen
        assert memory[i] or not runtime[i] or i in chosen
    _, greedy, _ = greedy_knapsack(memory, runtime, budget)
    assert value >= sum(Fraction(runtime[i]) for i in greedy)
    return value


def check_optimal(memory, runtime, budget):
    solution = exact.solve_knapsack(memory, runtime, budget)
    value = check(memory, runtime, budget, solution)
    assert solution.proven
    assert value == pareto_optimum(memory, runtime, budget)


# Instances


@st.composite
def instances(draw, most):
    """Instances with ties, scales and repetitions, and a budget where it hurts."""
    seed = draw(st.integers(0, 2**32 - 1))
    count = draw(st.integers(1, most))
    note(f"seed={seed} count={count}")
    return random_instance(random.Random(seed), count)


def random_instance(r, count):
    kinds = r.randint(1, count)
    sizes = [_random_bytes(r) for _ in range(kinds)]
    runtimes = [_random_runtime(r, r.random() < 0.3) for _ in range(kinds)]
    if r.random() < 0.15:
        runtimes = sizes[:]
    elif r.random() < 0.15:
        runtimes = [s + 1000 for s in sizes]
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


def _random_bytes(r):
    return r.choice(
        [
            r.randint(0, 16),
            r.randint(1, 64) * 512,
            r.randint(1, 4) << 30,
            r.randint(1, 2**32),
            1 << r.randint(0, 32),
            r.randint(1, 40),
        ]
    )


def _random_runtime(r, is_float):
    if r.random() < 0.08:
        return 0.0 if is_float else 0
    if is_float:
        return 10 ** r.uniform(-9, 6)
    return r.choice([r.randint(1, 30), r.randint(1, 10**15), 10 ** r.randint(0, 15)])


# Tests


@settings(max_examples=int(os.environ.get("FUZZ", 500)), deadline=None, print_blob=True)
@given(instances(15))
def test_equals_the_oracle(instance):
    check_optimal(*instance)


def test_equals_the_oracle_on_hard_classes():
    for kind in corpus.HARD_CLASSES:
        for seed in range(25):
            r = random.Random(f"{kind}-{seed}")
            memory, runtime = corpus.pisinger(kind, r.randrange(5, 25), 200, r)
            check_optimal(memory, runtime, sum(memory) * r.uniform(0.2, 0.8))


@settings(max_examples=60, deadline=None, print_blob=True)
@given(instances(25), st.lists(st.floats(-0.5, 1.5), min_size=1, max_size=12))
def test_budgets_equal_single_solves(instance, shares):
    memory, runtime, budget = instance
    budgets = [share * math.fsum(memory) for share in shares] + [budget, math.inf]
    many = exact.solve_knapsack_budgets(memory, runtime, budgets)
    assert len(many) == len(budgets)
    for b, solution in zip(budgets, many):
        check(memory, runtime, b, solution)
        one = exact.solve_knapsack(memory, runtime, b)
        assert (solution.value, solution.proven) == (one.value, one.proven)


def test_capped_answers():
    """Never below greedy, with a true bound, and only proven if it is."""
    unproven = 0
    for kind in corpus.HARD_CLASSES:
        memory, runtime = corpus.pisinger(kind, 30, 300, random.Random(kind))
        memory, runtime = memory + [0.0], runtime + [1000]
        budget = sum(memory) // 2
        optimum = pareto_optimum(memory, runtime, budget)
        for max_states in (0, 1, 50, 2000):
            capped = exact.solve_knapsack(
                memory, runtime, budget, max_states=max_states
            )
            check(memory, runtime, budget, capped)
            assert capped.value <= optimum <= capped.upper_bound
            assert capped.upper_bound <= 1.05 * optimum
            assert not capped.proven or capped.value == optimum
            unproven += not capped.proven
    assert unproven > 10


def test_more_kinds_than_are_searched():
    memory, runtime = corpus.pisinger("weak", 150_000, 10**7, random.Random(0))
    memory, runtime = memory + [0.0], runtime + [10**12]
    budget = sum(memory) / 3
    solution = exact.solve_knapsack(memory, runtime, budget)
    check(memory, runtime, budget, solution)
    most = dantzig(memory[:-1], runtime[:-1], budget) + 10**12
    assert not solution.proven
    assert solution.upper_bound == pytest.approx(most, rel=1e-9)
    # What fits by density, and a budget that it fills: nothing is worth more.
    dense = sorted(range(150_000), key=lambda i: memory[i] / runtime[i])[:50_000]
    filled = math.fsum(memory[i] for i in dense)
    optimum = sum(runtime[i] for i in dense) + 10**12
    solution = exact.solve_knapsack(memory, runtime, filled)
    assert solution.value == optimum <= solution.upper_bound


def states_visited(call):
    """What it returns, and how often it looked at a state to bound what follows."""
    visited = 0

    def count(frame, event, function):
        nonlocal visited
        visited += event == "c_call" and function is bisect_right

    sys.setprofile(count)
    try:
        return call(), visited
    finally:
        sys.setprofile(None)


def test_work_is_bounded():
    """Work counts whatever takes time, however many copies or classes there are."""
    r = random.Random(0)
    few = [
        (float(a * 10**6 + 10**7), a * 10**6 + 11 * 10**6 + a % 7) for a in range(30)
    ]
    copies = [r.choice(few) for _ in range(4_000)]
    cases = [corpus.pisinger(k, 4_000, 10**7, r) for k in corpus.HARD_CLASSES]
    cases.append(tuple(map(list, zip(*copies))))
    most = 0
    for memory, runtime in cases:
        budget = sum(memory) // 3
        solve = partial(exact.solve_knapsack, max_states=4_000)
        call = partial(solve, memory, runtime, budget)
        solution, visited = states_visited(call)
        check(memory, runtime, budget, solution)
        most = max(most, visited)
    assert 2_000 < most <= 5_000


def test_extreme_floats():
    memory = [5e-324, 8e307, 1.0, 1e-300, 9e307]
    runtime = [1e307, 1e307, 5e-324, 1.0, 3.0]
    for budget in (5e-324, 1e-300, 1.0, 1e308):
        check_optimal(memory, runtime, budget)


def test_a_lowered_limit_does_not_hide_the_optimum():
    """A solution lowers the limit below the loss of a class that is still undecided."""
    memory = [16, 3, 3] + [16896] * 4 + [870193811] * 2
    runtime = [3527034127655355] + [35184372088832] * 2 + [52776558133248] * 4
    runtime += [4064131956305032] * 2
    check_optimal(memory, runtime, 870227622.0)
    # It rules out all that is undecided, and what remains is a state as it is.
    memory = [40, 90, 67, 46, 84, 47, 92, 78]
    check_optimal(memory, [42, 90, 69, 48, 84, 48, 93, 78], 208.0)


def test_corpus():
    for net in corpus.instances():
        items = net.sizes, net.runtimes
        capacities = list(map(net.capacity, corpus.BUDGETS))
        many = exact.solve_knapsack_budgets(*items, capacities)
        for budget, capacity, solution in zip(corpus.BUDGETS, capacities, many):
            check(*items, capacity, solution)
            optimum = corpus.optima()[net.name, budget]
            assert solution.proven and solution.value == optimum, (net.name, budget)
