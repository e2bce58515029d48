"""Tests of the exact knapsack solver.

The oracles are brute force over all subsets, a Pareto enumeration in Fractions,
and the proven optima of the corpus.  Feasible means what it means everywhere in
this project: ``math.fsum`` of the saved sizes is at most the budget.
"""

from __future__ import annotations

import importlib.util
import math
import random
import subprocess
import sys
from fractions import Fraction

import pytest
from benchmarks import corpus
from hypothesis import given, note, settings
from hypothesis import strategies as st
from patchset.patch import EXACT, OVERLAY


MODULE = OVERLAY / EXACT


def _load():
    spec = importlib.util.spec_from_file_location("knapsack_exact_under_test", MODULE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


exact = _load()


# Oracles


def brute_force(memory, runtime, budget):
    """The best exact value over all subsets that fit by fsum."""
    best = Fraction(0)
    for mask in range(1 << len(memory)):
        chosen = [i for i in range(len(memory)) if mask >> i & 1]
        if math.fsum(memory[i] for i in chosen) <= budget:
            best = max(best, sum((Fraction(runtime[i]) for i in chosen), Fraction(0)))
    return best


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


def greedy_value(memory, runtime, budget):
    """What skipping greedy saves in order of efficiency, if that fits by fsum."""
    saved, weight, value = [], 0.0, Fraction(0)
    sized = [i for i in range(len(memory)) if memory[i] > 0]
    for i in sorted(sized, key=lambda i: runtime[i] / memory[i], reverse=True):
        if weight + memory[i] <= budget:
            weight += memory[i]
            saved.append(memory[i])
            value += Fraction(runtime[i])
    return value if math.fsum(saved) <= budget else Fraction(0)


def check(memory, runtime, budget, solution):
    """Everything that must hold of any solution, optimal or not."""
    n = len(memory)
    assert solution.saved == sorted(set(solution.saved))
    assert solution.recomputable == sorted(set(range(n)) - set(solution.saved))
    assert len(solution.saved) + len(solution.recomputable) == n
    assert solution.weight == math.fsum(memory[i] for i in solution.saved)
    assert solution.weight <= max(budget, 0)
    value = sum((Fraction(runtime[i]) for i in solution.saved), Fraction(0))
    if all(isinstance(r, int) for r in runtime):
        assert solution.value == value
    else:
        assert solution.value == float(value)
    assert solution.upper_bound >= solution.value
    assert not solution.proven or solution.upper_bound == solution.value
    for i in range(n):
        if runtime[i] == 0:
            assert i not in solution.saved
        elif memory[i] == 0:
            assert i in solution.saved
    assert value >= greedy_value(memory, runtime, budget)
    return value


# Instances


@st.composite
def instances(draw, most):
    """Instances with ties, scales and repetitions, and a budget where it hurts."""
    seed = draw(st.integers(0, 2**32 - 1))
    count = draw(st.integers(1, most))
    r = random.Random(seed)
    memory, runtime, budget = random_instance(r, count)
    note(f"seed={seed} count={count}")
    return memory, runtime, budget


def random_instance(r, count):
    kinds = r.randint(1, count)
    sizes = [_random_bytes(r) for _ in range(kinds)]
    runtimes = [_random_runtime(r, r.random() < 0.3) for _ in range(kinds)]
    if r.random() < 0.15:
        runtimes = sizes[:]
    elif r.random() < 0.15:
        runtimes = [s + 1000 for s in sizes]
    scale = r.choice(["bytes", "gb", "share"])
    if scale == "gb":
        sizes = [s / 1e9 for s in sizes]
    elif scale == "share":
        gigabytes = r.uniform(0.1, 500)
        sizes = [s / 1e9 / gigabytes for s in sizes]
    which = [r.randrange(kinds) for _ in range(count)]
    memory = [sizes[k] for k in which]
    runtime = [runtimes[k] for k in which]
    subset = [m for m in memory if r.random() < 0.5]
    budget = float(math.fsum(subset))
    where = r.randrange(5)
    if where == 1:
        budget = math.nextafter(budget, math.inf)
    elif where == 2:
        budget = max(0.0, math.nextafter(budget, -math.inf))
    elif where == 3:
        budget = math.fsum(memory) * r.random()
    return memory, runtime, budget


def _random_bytes(r):
    kind = r.randrange(6)
    if kind == 0:
        return r.randint(0, 16)
    if kind == 1:
        return r.randint(1, 64) * 512
    if kind == 2:
        return r.randint(1, 4) << 30
    if kind == 3:
        return r.randint(1, 2**32)
    if kind == 4:
        return 1 << r.randint(0, 32)
    return r.randint(1, 40)


def _random_runtime(r, is_float):
    if r.random() < 0.08:
        return 0.0 if is_float else 0
    if is_float:
        return 10 ** r.uniform(-9, 6)
    return r.choice([r.randint(1, 30), r.randint(1, 10**15), 10 ** r.randint(0, 15)])


def pisinger(kind, n, largest, r):
    """Integer instances of Pisinger's classes, as (memory, runtime)."""
    d = max(1, largest // 10)
    weights = [r.randint(1, largest) for _ in range(n)]
    if kind == "uncorrelated":
        values = [r.randint(1, largest) for _ in weights]
    elif kind == "weak":
        values = [max(1, r.randint(w - d, w + d)) for w in weights]
    elif kind == "strong":
        values = [w + d for w in weights]
    elif kind == "inverse":
        values = weights
        weights = [v + d for v in values]
    elif kind == "subset":
        values = weights
    else:
        kit = [(r.randint(1, largest), r.randint(1, largest)) for _ in range(2)]
        kit = [(-(-2 * w // 10), -(-2 * p // 10)) for w, p in kit]
        drawn = [(r.randint(1, 10), r.choice(kit)) for _ in range(n)]
        weights = [a * w for a, (w, _) in drawn]
        values = [a * p for a, (_, p) in drawn]
    return [float(w) for w in weights], values


CLASSES = ("uncorrelated", "weak", "strong", "inverse", "subset", "spanner")


# Against oracles


@settings(max_examples=300, deadline=None, print_blob=True)
@given(instances(9))
def test_equals_brute_force(instance):
    memory, runtime, budget = instance
    solution = exact.solve_knapsack(memory, runtime, budget)
    value = check(memory, runtime, budget, solution)
    assert solution.proven
    assert value == brute_force(memory, runtime, budget)


@settings(max_examples=200, deadline=None, print_blob=True)
@given(instances(15))
def test_equals_fraction_oracle(instance):
    memory, runtime, budget = instance
    solution = exact.solve_knapsack(memory, runtime, budget)
    value = check(memory, runtime, budget, solution)
    assert solution.proven
    assert value == pareto_optimum(memory, runtime, budget)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("seed", range(4))
def test_pisinger_small(kind, seed):
    r = random.Random(f"{kind}-{seed}")
    memory, runtime = pisinger(kind, 24, 200, r)
    budget = math.floor(sum(memory) * r.uniform(0.2, 0.8))
    solution = exact.solve_knapsack(memory, runtime, budget)
    value = check(memory, runtime, budget, solution)
    assert solution.proven
    assert value == pareto_optimum(memory, runtime, budget)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("n", (100, 1000))
def test_pisinger_hard(kind, n):
    r = random.Random(f"{kind}-{n}")
    memory, runtime = pisinger(kind, n, 10**5, r)
    budget = sum(memory) // 3
    solution = exact.solve_knapsack(memory, runtime, budget)
    check(memory, runtime, budget, solution)
    gap = (solution.upper_bound - solution.value) / solution.value
    assert solution.proven or gap <= 1e-8, f"{kind} n={n}: gap {gap}"


# Properties


@settings(max_examples=150, deadline=None, print_blob=True)
@given(instances(30), st.integers(0, 2**32 - 1))
def test_item_order_does_not_matter(instance, seed):
    memory, runtime, budget = instance
    order = list(range(len(memory)))
    random.Random(seed).shuffle(order)
    one = exact.solve_knapsack(memory, runtime, budget)
    two = exact.solve_knapsack(
        [memory[i] for i in order], [runtime[i] for i in order], budget
    )
    assert (one.value, one.weight, one.proven) == (two.value, two.weight, two.proven)


@settings(max_examples=100, deadline=None, print_blob=True)
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


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("max_states", (0, 1, 50, 2000))
def test_capped_bound_is_valid(kind, max_states):
    r = random.Random(f"{kind}-{max_states}")
    for _ in range(3):
        memory, runtime = pisinger(kind, 40, 300, r)
        budget = sum(memory) // 2
        capped = exact.solve_knapsack(memory, runtime, budget, max_states=max_states)
        check(memory, runtime, budget, capped)
        optimum = pareto_optimum(memory, runtime, budget)
        assert capped.value <= optimum <= capped.upper_bound
        assert not capped.proven or capped.value == optimum


def test_narrowing_agrees_with_the_full_solver(monkeypatch):
    r = random.Random(5)
    memory, runtime = pisinger("uncorrelated", 3000, 10**6, r)
    budgets = [sum(memory) * share // 10 for share in (1, 4, 7)]
    full = [exact.solve_knapsack(memory, runtime, b) for b in budgets]
    narrowed = []
    original = exact._solve_narrowed
    monkeypatch.setattr(exact, "_NARROW_FROM", 1000)
    monkeypatch.setattr(
        exact,
        "_solve_narrowed",
        lambda *args: narrowed.append(original(*args)) or narrowed[-1],
    )
    for b, expected in zip(budgets, full):
        solution = exact.solve_knapsack(memory, runtime, b)
        check(memory, runtime, b, solution)
        assert (solution.value, solution.proven) == (expected.value, True)
    assert any(saved is not None for saved in narrowed)


def test_does_not_depend_on_hash_seed_or_numpy(tmp_path):
    script = tmp_path / "solve.py"
    script.write_text(
        "import sys, random, importlib.util\n"
        "if sys.argv[2] == 'without':\n"
        "    sys.modules['numpy'] = None\n"
        "spec = importlib.util.spec_from_file_location('m', sys.argv[1])\n"
        "m = importlib.util.module_from_spec(spec); sys.modules['m'] = m\n"
        "spec.loader.exec_module(m)\n"
        "r = random.Random(7)\n"
        "for n in (30, 300, 25000):\n"
        "    mem = [r.randint(1, 10**6) / 1e9 for _ in range(n)]\n"
        "    run = [r.randint(1, 10**6) for _ in range(n)]\n"
        "    print(m.solve_knapsack(mem, run, sum(mem) / 3))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, str(script), str(MODULE), numpy],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, numpy in (("1", "with"), ("2", "without"))
    }
    assert len(outputs) == 1


# Input


def test_bad_input_to_many_budgets():
    """That of one budget is tested with all other solvers."""
    for memory, runtime, budgets, match in (
        ([1.0], [1, 2], [0.5], "memory has 1 items but runtimes has 2"),
        ([1.0, math.nan], [1, 2], [0.5], r"memory\[1\] is nan"),
        ([1.0, 2.0], [1, -3], [], r"runtimes\[1\] is -3"),
        ([1.0], [1], [0.5, math.nan], "max_memory is nan"),
    ):
        with pytest.raises(ValueError, match=match):
            exact.solve_knapsack_budgets(memory, runtime, budgets)


@pytest.mark.parametrize(
    "budget, saved",
    [(-1.0, [0]), (0.0, [0]), (math.inf, [0, 2, 3]), (1.0, [0, 2]), (3.0, [0, 2, 3])],
)
def test_edges(budget, saved):
    memory, runtime = [0.0, 0.0, 1.0, 2.0, 1.0], [5, 0, 7, 9, 0]
    value, got, rest = exact.exact_knapsack(memory, runtime, budget)
    assert got == saved
    assert value == sum(runtime[i] for i in saved)
    assert sorted(got + rest) == list(range(5))


def test_empty():
    assert exact.exact_knapsack([], [], 1.0) == (0, [], [])


def test_extreme_floats():
    memory = [5e-324, 8e307, 1.0, 1e-300, 9e307]
    runtime = [1e307, 1e307, 5e-324, 1.0, 3.0]
    for budget in (5e-324, 1e-300, 1.0, 1e308):
        solution = exact.solve_knapsack(memory, runtime, budget)
        check(memory, runtime, budget, solution)
        assert solution.value == float(brute_force(memory, runtime, budget))


def test_a_unit_beside_a_tera_is_kept():
    """A runtime of 1 next to 1e11 counts: float32 sums would lose it."""
    value, saved, _ = exact.exact_knapsack([0.5, 0.25, 0.5], [10**11, 1, 10**11], 0.75)
    assert (value, len(saved)) == (10**11 + 1, 2)


def test_a_lowered_limit_does_not_hide_the_optimum():
    """Here a pass meets a solution that lowers its limit below the loss of a move."""
    memory = [16, 3, 3] + [16896] * 4 + [870193811] * 2
    runtime = [3527034127655355] + [35184372088832] * 2 + [52776558133248] * 4
    runtime += [4064131956305032] * 2
    budget = 870227622.0
    solution = exact.solve_knapsack(memory, runtime, budget)
    value = check(memory, runtime, budget, solution)
    assert value == brute_force(memory, runtime, budget)


# Corpus


@pytest.mark.parametrize("net", corpus.instances(), ids=str)
def test_corpus(net):
    optima = [corpus.optima()[net.name, budget] for budget in corpus.BUDGETS]
    for budget, optimum in zip(corpus.BUDGETS, optima):
        solution = exact.solve_knapsack(net.memory, net.runtimes, budget)
        check(net.memory, net.runtimes, budget, solution)
        assert solution.proven
        assert solution.value == optimum
    many = exact.solve_knapsack_budgets(net.memory, net.runtimes, corpus.BUDGETS)
    assert [s.value for s in many] == optima
