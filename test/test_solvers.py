"""The knapsack solvers, against brute force and against upstream's own dp.

Every test is parametrised over the solvers it applies to. They keep one of two
capacities: the "dp" solvers that of the rounded problem, all others that of the true
sizes, as `math.fsum` adds them up. Ours come from the patched checkout that runs the
tests, upstream's from the untouched wheel beside it.
"""

import functools
import itertools
import logging
import math
import random
import statistics
import sys
import time

import pytest
import torch
from benchmarks import corpus
from benchmarks.solvers import tensor_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._functorch._activation_checkpointing import knapsack as ours
from upstream import untouched_knapsack


upstream = untouched_knapsack()

ALL = list(ours.KNAPSACK_SOLVERS)
ROUNDED = ["dp", "dp_knapsack_sliding_hirschberg"]
TRUE_SIZES = [name for name in ALL if name not in ROUNDED]

over_all = pytest.mark.parametrize("name", ALL)
over_rounded = pytest.mark.parametrize("name", ROUNDED)
over_true_sizes = pytest.mark.parametrize("name", TRUE_SIZES)
over_corpus = pytest.mark.parametrize("instance", corpus.instances(), ids=str)


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


def random_instance(rng, n, kind):
    """Sizes around 1 / n; every kind is hard on a solver in another way."""
    if kind == "repeated":
        shapes = [(rng.uniform(0, 2 / n), rng.randrange(1, 1000)) for _ in range(3)]
        items = [rng.choice(shapes) for _ in range(n)]
    elif kind == "correlated":
        sizes = [rng.randrange(1, 10_000) for _ in range(n)]
        items = [(size / 5000 / n, size + 1000) for size in sizes]
    elif kind == "decades":
        items = [
            (10 ** rng.uniform(-9, 0) * 2 / n, int(10 ** rng.uniform(0, 12)))
            for _ in range(n)
        ]
    elif kind == "close":
        items = [
            (rng.randrange(1, 10_000) / 5000 / n, 10**11 + rng.randrange(1000))
            for _ in range(n)
        ]
    else:
        items = [(rng.uniform(0, 2 / n), rng.uniform(0, 10)) for _ in range(n)]
    memory, runtimes = map(list, zip(*items))
    return memory, runtimes, rng.uniform(0.05, 0.95) * sum(memory)


KINDS = ["uniform", "repeated", "correlated", "decades", "close"]

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


# Edges


@over_all
@pytest.mark.parametrize(
    ("memory", "runtimes", "max_memory", "expected"),
    [
        pytest.param([], [], 1.0, [], id="empty"),
        pytest.param([], [], 0.0, [], id="empty, no budget"),
        pytest.param([0.0, 0.0], [1.0, 2.0], 0.0, [0, 1], id="zero sizes"),
        pytest.param([0.1, 0.0], [0.0, 0.0], 1.0, [], id="zero runtimes"),
        pytest.param([0.6, 0.7], [1.0, 2.0], 0.5, [], id="nothing fits"),
        pytest.param([0.25, 0.5], [1.0, 2.0], 0.75, [0, 1], id="everything fits"),
        pytest.param([0.6, 0.5], [2.0, 1.0], 0.5, [1], id="one fits"),
        pytest.param([0.1, 0.0], [1.0, 1.0], 0.0, [1], id="budget 0"),
        pytest.param([0.5, 0.5, 0.0], [1.0, 1.0, 0.0], 1.0, [0, 1], id="budget 1"),
        pytest.param([0.1, 0.0], [1.0, 1.0], -0.5, [1], id="budget below 0"),
        pytest.param([0.1, 0.0], [1.0, 1.0], -math.inf, [1], id="budget -inf"),
        pytest.param([9.0, 9.0], [1.0, 0.0], math.inf, [0], id="budget inf"),
        pytest.param([1.0], [1.0], 1e306, [0], id="budget in quanta overflows"),
        pytest.param([0.1] * 5, [1.0] * 5, 0.3000001, [0, 1, 2], id="equal items"),
        pytest.param([0.1] * 3, [0.0, 1.0, 1.0], 0.1, [1], id="equal sizes"),
        pytest.param([1, 2, 3], [10, 20, 31], 3, [2], id="integers"),
        pytest.param([0.5, 0.4, 0.1], [5, 3.9, 0.9], 0.65, [0, 2], id="a gap to fill"),
    ],
)
def test_edges(name, memory, runtimes, max_memory, expected):
    value = solve(name, memory, runtimes, max_memory)
    assert value == runtime_of(runtimes, expected)
    assert ours.KNAPSACK_SOLVERS[name](memory, runtimes, max_memory)[1] == expected


@over_rounded
def test_rounded_sizes_are_what_counts(name):
    # 4e-5 rounds to nothing; 0.5 and 2.5 quanta round to the even 0 and 2.
    assert solve(name, [4e-5] * 9, [1] * 9, 0.0) == 9
    assert solve(name, [5e-5, 2.5e-4], [1, 1], 2e-4) == 2
    assert solve(name, [5e-5, 2.5e-4], [1, 1], 1e-4) == 1
    assert solve(name, [0.50004], [1], 0.5) == 1


@over_all
@pytest.mark.parametrize(
    ("memory", "runtimes", "max_memory", "says"),
    [
        ([0.1], [1.0, 2.0], 1.0, "memory has 1 items but runtimes has 2"),
        ([0.1, 0.2], [], 1.0, "memory has 2 items but runtimes has 0"),
        ([0.1, math.nan], [1.0, 1.0], 1.0, r"memory\[1\] is nan"),
        ([math.nan, 0.1], [1.0, 1.0], 1.0, r"memory\[0\] is nan"),
        ([0.1, 0.1, -0.5], [1.0] * 3, 1.0, r"memory\[2\] is -0\.5"),
        ([math.inf, 0.1], [1.0, 1.0], 1.0, r"memory\[0\] is inf"),
        ([0.1, -math.inf], [1.0, 1.0], math.inf, r"memory\[1\] is -inf"),
        ([0.1, 0.1], [1.0, math.nan], 1.0, r"runtimes\[1\] is nan"),
        ([0.1, 0.1], [-1, 1], 1.0, r"runtimes\[0\] is -1"),
        ([0.1, 0.1], [1.0, math.inf], 0.0, r"runtimes\[1\] is inf"),
        ([0.1, 0.1], [10**400, 1], 0.0, r"runtimes\[0\] is 10+:"),
        ([1e308, 1e308], [1.0, 1.0], 1.0, "the sum of memory exceeds"),
        ([0.1], [1.0], math.nan, "max_memory is nan"),
        ([], [], math.nan, "max_memory is nan"),
    ],
)
def test_bad_input(name, memory, runtimes, max_memory, says):
    with pytest.raises(ValueError, match=says):
        ours.KNAPSACK_SOLVERS[name](memory, runtimes, max_memory)


# Brute force


@over_all
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12])
def test_brute_force(name, kind, n):
    rng = random.Random(f"{kind} {n}")
    for _ in range(2 if n == 12 else 10):
        check_against_brute_force(name, *random_instance(rng, n, kind))


@over_all
@settings(max_examples=150, deadline=None, derandomize=True)
@given(problem=problems(max_items=7))
def test_brute_force_on_edges(name, problem):
    check_against_brute_force(name, *problem)


# Upstream's dp


@over_rounded
@settings(max_examples=250, deadline=None, derandomize=True)
@given(problem=problems(max_items=20, runtimes=small_runtimes))
def test_equals_upstream_dp_on_edges(name, problem):
    assert solve(name, *problem) == upstream_dp(*problem)


@over_rounded
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 5, 10, 20, 50, 100, 400])
def test_equals_upstream_dp(name, kind, n):
    rng = random.Random(f"{kind} {n}")
    for _ in range(3):
        memory, runtimes, max_memory = random_instance(rng, n, kind)
        small = float32_exact(runtimes)
        expected = upstream_dp(memory, small, max_memory)
        assert solve(name, memory, small, max_memory) == expected
        at_least = upstream_dp(memory, runtimes, max_memory)
        assert solve(name, memory, runtimes, max_memory) >= at_least * (1 - 1e-12)


@over_rounded
@pytest.mark.parametrize("n", [1, 5, 10, 20])
def test_equals_upstream_dp_on_unnormalised_sizes(name, n):
    rng = random.Random(n)
    for _ in range(5):
        memory = [rng.uniform(0.1, 10) for _ in range(n)]
        runtimes = [rng.randrange(1, 1000) for _ in range(n)]
        max_memory = rng.uniform(0.1, 0.9) * sum(memory)
        expected = upstream_dp(memory, runtimes, max_memory)
        assert solve(name, memory, runtimes, max_memory) == expected


@over_corpus
def test_equals_upstream_dp_on_the_corpus(instance):
    memory, runtimes = instance.memory, instance.runtimes
    small = float32_exact(runtimes)
    for budget in corpus.BUDGETS:
        expected = upstream_dp(memory, small, budget)
        at_least = upstream_dp(memory, runtimes, budget)
        values = {solve(name, memory, runtimes, budget) for name in ROUNDED}
        assert len(values) == 1, budget
        assert values.pop() >= at_least, budget
        for name in ROUNDED:
            assert solve(name, memory, small, budget) == expected, (name, budget)


@over_rounded
def test_small_runtimes_are_not_absorbed(name):
    memory, runtimes = [0.1, 0.1, 0.3], [1, 10**11, 10**11]
    assert solve(name, memory, runtimes, 0.25) == 10**11 + 1
    # As its float32 cannot tell the two sums apart, upstream leaves an item out.
    assert upstream_dp(memory[1::-1], runtimes[1::-1], 0.25) == 10**11


# The other solvers on the corpus


@over_true_sizes
@over_corpus
def test_true_sizes_on_the_corpus(name, instance):
    for budget in corpus.BUDGETS:
        optimum = corpus.optima()[instance.name, budget]
        value = solve(name, instance.memory, instance.runtimes, budget)
        greedy = solve("greedy", instance.memory, instance.runtimes, budget)
        assert greedy <= value <= optimum, budget
        if name != "greedy":
            assert value >= optimum * (1 - 1e-6), budget


def test_ilp_reads_its_answer_with_a_tolerance():
    rng = random.Random(0)
    upstream_lost = 0
    for _ in range(250):
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


def test_ilp_says_when_it_stops_early(monkeypatch, caplog):
    monkeypatch.setattr(ours, "_ILP_MAX_NODES", 1)
    memory, runtimes, max_memory = random_instance(random.Random(4), 200, "correlated")
    with caplog.at_level(logging.WARNING):
        solve("ilp", memory, runtimes, max_memory)
    assert "stopped after" in caplog.text


def test_ilp_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(RuntimeError, match="install scipy or choose another solver"):
        ours.ilp_knapsack([0.1], [1.0], 1.0)


def test_greedy_takes_ties_by_index():
    memory, runtimes = [0.2, 0.1, 0.2, 0.1], [2.0, 1.0, 2.0, 1.0]
    assert ours.greedy_knapsack(memory, runtimes, 0.301)[1] == [0, 1]


def test_sums_are_exact():
    # Ten tenths are 1 by fsum, and less than that when added one by one.
    for name in TRUE_SIZES:
        assert solve(name, [0.1] * 10, [1] * 10, 1.0) == 10
        assert solve(name, [0.1] * 10, [1] * 10, math.nextafter(1.0, 0)) == 9


# What the answer must not depend on


@over_all
@pytest.mark.parametrize("kind", ["uniform", "decades"])
def test_order_of_items(name, kind):
    rng = random.Random(kind)
    for n in (5, 20, 200):
        memory, runtimes, max_memory = random_instance(rng, n, kind)
        value = solve(name, memory, runtimes, max_memory)
        for _ in range(3):
            order = rng.sample(range(n), n)
            memory, runtimes = [memory[i] for i in order], [runtimes[i] for i in order]
            shuffled = solve(name, memory, runtimes, max_memory)
            assert shuffled == pytest.approx(value, rel=1e-12), (n, order)


@over_rounded
@over_corpus
def test_order_of_items_on_the_corpus(name, instance):
    order = random.Random(0).sample(range(len(instance.memory)), len(instance.memory))
    memory = [instance.memory[i] for i in order]
    runtimes = [instance.runtimes[i] for i in order]
    for budget in (0.1, 0.5):
        value = solve(name, instance.memory, instance.runtimes, budget)
        assert solve(name, memory, runtimes, budget) == value, budget


@over_rounded
def test_defaults_of_torch(name):
    memory, runtimes, max_memory = random_instance(random.Random(5), 60, "correlated")
    expected = ours.KNAPSACK_SOLVERS[name](memory, runtimes, max_memory)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"), torch.inference_mode():
            found = ours.KNAPSACK_SOLVERS[name](memory, runtimes, max_memory)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


def chunks_of(rng, n, largest):
    """Chunks with ties, none of which stems from a group."""
    sizes = [rng.randrange(1, largest) for _ in range(n)]
    return [ours._Chunk(size, float(rng.randrange(1, 9)), 1, 0) for size in sizes]


def total(chunks, field):
    return sum(getattr(chunk, field) for chunk in chunks)


def test_cells_in_dictionaries_or_rows():
    rng = random.Random(6)
    for n in range(1, 12):
        for _ in range(20):
            chunks = chunks_of(rng, n, 50)
            capacity = rng.randrange(1, total(chunks, "size") + 1)
            rows = ours._from_decisions(chunks, capacity)
            assert ours._from_reachable_cells(chunks, capacity) == rows


@pytest.mark.parametrize("leaf_chunks", [1, 2, 3, 7])
def test_split_or_not(leaf_chunks):
    rng = random.Random(leaf_chunks)
    for n in range(1, 40):
        chunks = chunks_of(rng, n, 50)
        capacity = rng.randrange(1, total(chunks, "size") + 1)
        whole = ours._from_decisions(chunks, capacity)
        split = ours._best_subset(chunks, capacity, leaf_chunks)
        assert total(split, "size") <= capacity
        assert total(split, "runtime") == total(whole, "runtime")


@pytest.mark.parametrize("block", [1, 7, 64])
def test_rows_in_blocks(monkeypatch, block):
    chunks = chunks_of(random.Random(7), 40, 50)
    expected = ours._from_decisions(chunks, 500)
    monkeypatch.setattr(ours, "_BLOCK_CELLS", block)
    assert ours._from_decisions(chunks, 500) == expected


def test_hirschberg_splits_a_large_core(monkeypatch):
    memory, runtimes, max_memory = random_instance(random.Random(8), 999, "correlated")
    splits = []
    best_split = ours._best_split

    def counted(left, right, capacity):
        splits.append(best_split(left, right, capacity))
        return splits[-1]

    monkeypatch.setattr(ours, "_best_split", counted)
    value = solve("dp", memory, runtimes, max_memory)
    assert not splits
    assert (
        solve("dp_knapsack_sliding_hirschberg", memory, runtimes, max_memory) == value
    )
    assert splits
    assert upstream_dp(memory, runtimes, max_memory) == value


# The tests of the tests: what upstream's solvers do to the checks above


def test_upstream_hirschberg_is_over_capacity():
    solver = upstream.dp_knapsack_sliding_hirschberg
    over = 0
    for instance in corpus.instances():
        for budget in (0.1, 0.3):
            _, saved, _ = solver(instance.memory, instance.runtimes, budget)
            try:
                check_rounded_capacity(instance.memory, saved, budget)
            except AssertionError:
                over += 1
    assert over > 10
    _, saved, _ = solver([1e-4] * 3, [1, 1, 1], 1e-4)
    with pytest.raises(AssertionError, match="over capacity: 2 > 1 quanta"):
        check_rounded_capacity([1e-4] * 3, saved, 1e-4)


def test_upstream_dp_is_over_true_capacity():
    memory = [4e-5] * 5
    _, saved, _ = upstream.dp_knapsack(memory, [1] * 5, 1e-4)
    with pytest.raises(AssertionError, match="over capacity"):
        check_true_capacity(memory, saved, 1e-4)


# Cost: counts, and ratios with room


def test_bounds_settle_most_copies(monkeypatch):
    settle = ours._settle_by_bound
    copies, undecided = [], []

    def counted(groups, capacity):
        result = settle(groups, capacity)
        copies.append(sum(group.copies for group in groups))
        undecided.append(sum(result[1]))
        return result

    monkeypatch.setattr(ours, "_settle_by_bound", counted)
    for instance in corpus.instances():
        for budget in corpus.BUDGETS:
            ours.dp_knapsack(instance.memory, instance.runtimes, budget)
    assert len(copies) > 100
    assert sum(undecided) < sum(copies) / 4


def peak_bytes(solver, *arguments):
    """The most that a solver's tensors occupy at once."""
    return tensor_bytes(functools.partial(solver, *arguments))


LARGE = [instance for instance in corpus.instances() if len(instance.memory) >= 400]


@over_rounded
@pytest.mark.parametrize("instance", LARGE, ids=str)
def test_tensors_take_a_twentieth_of_upstream_dp(name, instance):
    arguments = instance.memory, instance.runtimes, 0.3
    theirs = peak_bytes(upstream.dp_knapsack, *arguments)
    # The table alone, so that a profiler that sees nothing fails the test.
    assert theirs > 4 * len(instance.memory) * quanta(0.3)
    assert peak_bytes(ours.KNAPSACK_SOLVERS[name], *arguments) < theirs / 20


def test_hirschberg_keeps_a_few_rows():
    memory, runtimes, max_memory = random_instance(random.Random(9), 2000, "correlated")
    row = 8 * (quanta(max_memory) + 1)
    arguments = memory, runtimes, max_memory
    table = peak_bytes(ours.dp_knapsack, *arguments)
    rows = peak_bytes(ours.dp_knapsack_sliding_hirschberg, *arguments)
    assert row < rows < 6 * row < table
    assert table < (len(memory) / 64 + 6) * row  # one bit per item, 64 to a float


def median_seconds(solver, problems):
    seconds = []
    for problem in problems:
        start = time.perf_counter()
        solver(*problem)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@over_rounded
@pytest.mark.parametrize("n", [1, 5, 10, 20])
@pytest.mark.usefixtures("one_thread")
def test_faster_than_upstream_dp_on_unnormalised_sizes(name, n):
    rng = random.Random(n)
    problems = []
    for _ in range(20):
        memory = [rng.uniform(0.1, 10) for _ in range(n)]
        runtimes = [rng.uniform(0.1, 10) for _ in range(n)]
        problems.append((memory, runtimes, rng.uniform(0.2, 0.8) * sum(memory)))
    theirs = median_seconds(upstream.dp_knapsack, problems)
    assert median_seconds(ours.KNAPSACK_SOLVERS[name], problems) < 0.6275 * theirs


@over_rounded
@pytest.mark.parametrize("instance", LARGE, ids=str)
@pytest.mark.usefixtures("one_thread")
def test_faster_than_upstream_dp_on_the_corpus(name, instance):
    problems = [(instance.memory, instance.runtimes, 0.5)] * 5
    theirs = median_seconds(upstream.dp_knapsack, problems)
    assert median_seconds(ours.KNAPSACK_SOLVERS[name], problems) < theirs / 5
