"""The knapsack solvers, against brute force and against upstream's own dp.

They keep one of two capacities: the "dp" solvers that of the rounded problem, all
others that of the true sizes, as `math.fsum` adds them up. Ours come from the patched
checkout that runs the tests, upstream's from the untouched wheel beside it. Edges, bad
input and ties are in test_ac_knapsack_solvers.py, the exact solver in test_exact.py.
"""

import functools
import itertools
import logging
import math
import random
import sys

import pytest
import torch
from benchmarks import corpus
from benchmarks.meters import allocations
from benchmarks.upstream import untouched_knapsack
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._functorch._activation_checkpointing import knapsack as ours


upstream = untouched_knapsack()

ALL = list(ours.KNAPSACK_SOLVERS)
ROUNDED = ["dp", "dp_knapsack_sliding_hirschberg"]

over_all = pytest.mark.parametrize("name", ALL)


def quanta(size):
    return round(min(size * 10_000, sys.float_info.max))


def runtime_of(runtimes, indices):
    return math.fsum(runtimes[i] for i in indices)


def check_true_capacity(memory, saved, max_memory):
    used = math.fsum(memory[i] for i in saved)
    assert used <= max(max_memory, 0), f"over capacity: {used} > {max_memory}"


def check_rounded_capacity(memory, saved, max_memory):
    if math.isinf(max_memory):
        return
    used = sum(quanta(memory[i]) for i in saved)
    room = max(quanta(max_memory), 0)
    assert used <= room, f"over capacity: {used} > {room} quanta"


def solve(name, memory, runtimes, max_memory):
    """The runtime that a solver saves, once all that it promises has been checked."""
    arguments = list(memory), list(runtimes)
    value, saved, recomputable = ours.KNAPSACK_SOLVERS[name](*arguments, max_memory)
    assert arguments == (list(memory), list(runtimes)), "arguments were changed"
    assert saved == sorted(saved) and recomputable == sorted(recomputable)
    assert sorted(saved + recomputable) == list(range(len(memory)))
    assert value == runtime_of(runtimes, saved)
    assert all(runtimes[i] > 0 for i in saved)
    assert all(memory[i] > 0 or runtimes[i] == 0 for i in recomputable)
    check = check_rounded_capacity if name in ROUNDED else check_true_capacity
    check(memory, saved, max_memory)
    return value


def upstream_dp(memory, runtimes, max_memory):
    """What upstream's dp saves; its own sum is in float32."""
    _, saved, _ = upstream.dp_knapsack(memory, runtimes, max_memory)
    check_rounded_capacity(memory, saved, max_memory)
    return runtime_of(runtimes, saved)


def float32_exact(runtimes):
    """Integers in proportion, small enough for sums in float32 without rounding."""
    scale = (2**24 - len(runtimes)) / max(sum(runtimes), 1)
    return [max(1, math.floor(runtime * scale)) for runtime in runtimes]


def brute_force(name, memory, runtimes, max_memory):
    """The most runtime that any set within the solver's capacity saves."""
    best = 0.0
    room = math.inf if math.isinf(max_memory) else max(quanta(max_memory), 0)
    for chosen in itertools.product((False, True), repeat=len(memory)):
        sizes = list(itertools.compress(memory, chosen))
        if name in ROUNDED:
            fits = sum(map(quanta, sizes)) <= room
        else:
            fits = math.fsum(sizes) <= max(max_memory, 0)
        if fits:
            best = max(best, math.fsum(itertools.compress(runtimes, chosen)))
    return best


def check_against_brute_force(name, memory, runtimes, max_memory):
    value = solve(name, memory, runtimes, max_memory)
    best = brute_force(name, memory, runtimes, max_memory)
    assert value <= best
    # Float sums taken in another order may differ in their last bits, and an
    # integer program is solved to a tolerance.
    if name != "greedy":
        assert value >= best * (1 - (1e-6 if name == "ilp" else 1e-12))


def hard_instance(kind, n):
    """Of one of Pisinger's classes, in shares of the whole."""
    rng = random.Random(f"{kind} {n}")
    sizes, runtimes = corpus.pisinger(kind, n, 10**7, rng)
    return [size / sum(sizes) for size in sizes], runtimes, rng.uniform(0.05, 0.95)


# Sizes on and beside the quantum and its half, multiples of a common step, bytes
# beside gigabytes; runtimes from one operation to a GEMM.
sizes = st.sampled_from(
    [0, 0.0, 1e-9, 4e-5, 5e-5, 6e-5, 1e-4, 1.5e-4, 0.1, 0.2, 0.3, 1 / 3, 0.5, 1, 1.0]
) | st.floats(0, 2, allow_subnormal=False)
any_runtimes = st.sampled_from([0, 0.0, 1, 1.0, 3, 10**11, 1e-3]) | st.floats(
    0, 1e12, allow_subnormal=False
)
small_runtimes = st.integers(0, 1000)


@st.composite
def problems(draw, max_items, runtimes=any_runtimes):
    distinct = draw(st.lists(st.tuples(sizes, runtimes), max_size=max_items))
    items = []
    for item in distinct:
        items += [item] * draw(st.integers(1, 3))
    items = items[:max_items]
    memory = [size for size, _ in items]
    subset = draw(st.lists(st.sampled_from(memory), unique=True)) if memory else []
    exact = math.fsum(subset)
    max_memory = draw(
        st.sampled_from(
            [0, 1, exact, math.nextafter(exact, 0), math.nextafter(exact, math.inf)]
        )
        | st.floats(0, 3)
    )
    return memory, [runtime for _, runtime in items], max_memory


# Brute force


@over_all
@settings(max_examples=150, deadline=None, derandomize=True)
@given(problem=problems(max_items=7))
def test_brute_force(name, problem):
    check_against_brute_force(name, *problem)


# Upstream's dp


def solve_rounded(*problem):
    """What either of the two solvers saves."""
    dp, hirschberg = (solve(name, *problem) for name in ROUNDED)
    assert dp == hirschberg
    return dp


@settings(max_examples=250, deadline=None, derandomize=True)
@given(problem=problems(max_items=20, runtimes=small_runtimes))
def test_equals_upstream_dp_on_edges(problem):
    assert solve_rounded(*problem) == upstream_dp(*problem)


def check_against_upstream_dp(memory, runtimes, max_memory):
    # Upstream's adds up in float32: small integers first, then what it may lose on.
    small = float32_exact(runtimes)
    expected = upstream_dp(memory, small, max_memory)
    assert solve_rounded(memory, small, max_memory) == expected
    at_least = upstream_dp(memory, runtimes, max_memory)
    assert solve_rounded(memory, runtimes, max_memory) >= at_least * (1 - 1e-12)


def test_equals_upstream_dp():
    for kind, n in itertools.product(corpus.HARD_CLASSES, [1, 5, 20, 100, 400]):
        check_against_upstream_dp(*hard_instance(kind, n))
    for n in (1, 5, 10, 20):
        check_against_upstream_dp(*corpus.unnormalised(n, seed=n))


def test_equals_upstream_dp_on_the_corpus():
    for instance, budget in itertools.product(corpus.instances(), (0.05, 0.3, 0.8)):
        check_against_upstream_dp(instance.memory, instance.runtimes, budget)


def test_small_runtimes_are_not_absorbed():
    memory, runtimes = [0.1, 0.1, 0.3], [1, 10**11, 10**11]
    assert solve_rounded(memory, runtimes, 0.25) == 10**11 + 1
    # As its float32 cannot tell the two sums apart, upstream leaves an item out.
    assert upstream_dp(memory[1::-1], runtimes[1::-1], 0.25) == 10**11


# The other solvers on the corpus


def test_greedy_and_ilp_on_the_corpus():
    for instance, budget in itertools.product(corpus.instances(), (0.05, 0.3, 0.8)):
        optimum = corpus.optima()[instance.name, budget]
        problem = instance.memory, instance.runtimes, budget
        greedy, ilp = solve("greedy", *problem), solve("ilp", *problem)
        assert greedy <= ilp <= optimum, (instance, budget)
        assert ilp >= optimum * (1 - 1e-6), (instance, budget)


def test_ilp_reads_its_answer_with_a_tolerance():
    rng = random.Random(0)
    upstream_lost = 0
    for _ in range(100):
        n = rng.randrange(5, 9)
        memory = [rng.uniform(0.01, 0.5) for _ in range(n)]
        runtimes = [rng.randrange(1, 10**11) for _ in range(n)]
        max_memory = rng.uniform(0.1, 0.9) * sum(memory)
        check_against_brute_force("ilp", memory, runtimes, max_memory)
        _, saved, _ = upstream.ilp_knapsack(memory, runtimes, max_memory)
        value = solve("ilp", memory, runtimes, max_memory)
        upstream_lost += runtime_of(runtimes, saved) < 0.999 * value
    # It takes 0.9999999 for "recompute".
    assert upstream_lost


def test_ilp_on_runtimes_in_flops():
    # Unscaled objectives of this size keep milp busy for minutes.
    rng = random.Random(0)
    memory = [rng.uniform(0, 0.002) for _ in range(1000)]
    runtimes = [rng.uniform(1, 1e12) for _ in range(1000)]
    assert solve("ilp", memory, runtimes, 0.3) > solve("greedy", memory, runtimes, 0.3)


def test_ilp_says_when_it_stops_early(caplog):
    memory, runtimes = corpus.pisinger("strong", 200, 10**7, random.Random(1))
    with caplog.at_level(logging.WARNING):
        solve("ilp", memory, runtimes, sum(memory) / 3)
    assert "stopped after" in caplog.text


def test_defaults_of_torch():
    problem = hard_instance("strong", 60)
    expected = ours.dp_knapsack(*problem)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"), torch.inference_mode():
            found = ours.dp_knapsack(*problem)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


# The tests of the tests: what upstream's solvers do to the checks above


def test_upstream_hirschberg_is_over_capacity():
    solver = upstream.dp_knapsack_sliding_hirschberg
    _, saved, _ = solver([1e-4] * 3, [1, 1, 1], 1e-4)
    with pytest.raises(AssertionError, match="over capacity: 2 > 1 quanta"):
        check_rounded_capacity([1e-4] * 3, saved, 1e-4)


def test_upstream_dp_is_over_true_capacity():
    memory = [4e-5] * 5
    _, saved, _ = upstream.dp_knapsack(memory, [1] * 5, 1e-4)
    with pytest.raises(AssertionError, match="over capacity"):
        check_true_capacity(memory, saved, 1e-4)


# Memory


def tensor_bytes(solver, *arguments):
    """The most that a solver's tensors occupy at once."""
    return allocations(functools.partial(solver, *arguments)).peak


def test_tensors_take_a_twentieth_of_upstream_dp():
    for instance in corpus.instances():
        if len(instance.memory) < 400:
            continue
        arguments = instance.memory, instance.runtimes, 0.1
        theirs = tensor_bytes(upstream.dp_knapsack, *arguments)
        # The table alone, so that a profiler that sees nothing fails the test.
        assert theirs > 4 * len(instance.memory) * quanta(0.1)
        assert tensor_bytes(ours.dp_knapsack, *arguments) < theirs / 20, instance


def test_a_few_rows_are_kept():
    problem = hard_instance("strong", 2000)
    row = 8 * (quanta(problem[2]) + 1)
    assert row < tensor_bytes(ours.dp_knapsack, *problem) < 6 * row
