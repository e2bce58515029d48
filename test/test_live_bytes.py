"""Live bytes of running programs, held against programs one can count by hand."""

import functools

import pytest
import torch
import torch._functorch.config as fconfig
from benchmarks.live_bytes import (
    ACTIVATION,
    AllocatedBlocks,
    CountedStorages,
    GIVEN,
    GRADIENT,
    INPUT,
    OPTIMIZER,
    PARAMETER,
    record_step,
    TEMPORARY,
)
from torch.utils.checkpoint import checkpoint


BACKEND = "aot_eager_decomp_partition"
SIDE = 64
MATRIX = SIDE * SIDE * 4
LOSS = 4

both = pytest.mark.parametrize(
    "recorder", [CountedStorages, AllocatedBlocks], ids=["counted", "allocator"]
)
pytestmark = pytest.mark.usefixtures("alone")


def matrices(count):
    torch.manual_seed(0)
    return [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(count)]


def peak_of(timeline, phase, following):
    first, end = timeline.phases[phase], timeline.phases[following]
    return max(timeline.curve()[first:end])


# ---------------------------------------------------------------- recorders


@both
def test_curve_of_a_few_operators(recorder):
    (x,) = matrices(1)
    x = x.detach()
    with recorder() as recording:
        recording.name(INPUT, [x])
        recording.phase("one")
        y = x.neg()
        z = y.exp()
        del y
        recording.phase("two")
        view = z.t()[1:]
        del z
        other = torch.empty(3, dtype=torch.int16)
        del view
        recording.phase("end")
    timeline = recording.timeline
    rises = [b for a, b in zip(timeline.curve(), timeline.curve()[1:]) if a != b]
    assert timeline.curve()[0] == MATRIX
    assert rises == [2 * MATRIX, 3 * MATRIX, 2 * MATRIX, 2 * MATRIX + 6, MATRIX + 6]
    assert timeline.peak() == 3 * MATRIX
    assert timeline.peak(without=[INPUT]) == 2 * MATRIX
    assert peak_of(timeline, "two", "end") == 2 * MATRIX + 6
    assert timeline.curve()[-1] == MATRIX + 6
    assert other.numel() == 3


@both
def test_resized_storage_counts_its_new_size(recorder):
    with recorder() as recording:
        x = torch.empty(100, dtype=torch.uint8)
        recording.name(OPTIMIZER, [x])
        x.resize_(1000)
        recording.phase("end")
    timeline = recording.timeline
    assert timeline.curve()[-1] == 1000
    assert x.untyped_storage().nbytes() == 1000


def test_arguments_that_were_there_before_are_inputs():
    x = torch.ones(10, dtype=torch.uint8)
    with CountedStorages() as recording:
        y = x[2:].clone()
    kinds = sorted((life.kind, life.nbytes) for life in recording.timeline.lifetimes)
    assert kinds == [(INPUT, 10), (TEMPORARY, 8)]
    assert y.numel() == 8


def test_small_tensor_from_python_is_born_when_it_is_made():
    with CountedStorages() as recording:
        x = torch.tensor([1.0, 2.0])
    (life,) = recording.timeline.lifetimes
    assert (life.nbytes, life.kind, life.born > 0) == (8, TEMPORARY, True)
    assert x.numel() == 2


# ------------------------------------------------------------ training step


def chain(x, *weights):
    for weight in weights:
        x = x @ weight
    return x.sum()


@pytest.mark.parametrize(
    ("allocator", "compiled"), [(False, False), (False, True), (True, True)]
)
def test_step_of_a_chain(allocator, compiled):
    """loss = sum(x a b c): a b's and x a's values are saved.

    The first of the backward's products is the gradient of c: then live are both
    saved values, the expanded gradient of the sum (a scalar), and the result. The
    most is live while the gradients of b's product are made: see below.
    """
    x, a, b, c = matrices(4)
    x = x.detach()
    function = torch.compile(chain, backend=BACKEND) if compiled else chain
    step = functools.partial(function, x, a, b, c)
    if compiled:
        step().backward()
        for weight in (a, b, c):
            weight.grad = None
    timeline = record_step(step, [a, b, c], x, allocator=allocator)
    assert timeline.saved_bytes == 2 * MATRIX
    # x, a, b, c before; then in the forward x a, x a b and x a b c, and the sum.
    assert timeline.curve()[0] == 4 * MATRIX
    assert peak_of(timeline, "forward", "backward") == 7 * MATRIX + LOSS
    final = timeline.by_kind(timeline.events - 1)
    assert final == {
        PARAMETER: 3 * MATRIX,
        INPUT: MATRIX,
        GRADIENT: 3 * MATRIX,
        OPTIMIZER: 0,
        ACTIVATION: 0,
        TEMPORARY: LOSS,
    }
    assert sum(timeline.at_peak().values()) == timeline.peak()
    assert timeline.peak(without=GIVEN) == timeline.peak() - 4 * MATRIX


def test_optimizer_states_and_gradients_that_stay():
    """Adam keeps two matrices and a step count for each of two parameters."""
    a, b = matrices(2)
    optimizer = torch.optim.Adam([a, b], foreach=False)
    step = functools.partial(chain, torch.ones(SIDE, SIDE), a, b)
    first = record_step(step, [a, b], optimizer=optimizer)
    final = first.by_kind(first.events - 1)
    assert final[OPTIMIZER] == 2 * (2 * MATRIX + 4)
    assert final[GRADIENT] == 0
    second = record_step(step, [a, b], optimizer=optimizer, set_to_none=False)
    assert second.by_kind(0)[OPTIMIZER] == 2 * (2 * MATRIX + 4)
    assert second.by_kind(second.events - 1)[GRADIENT] == 2 * MATRIX


def test_checkpoint_saves_its_inputs_only():
    weights = matrices(5)
    x = torch.ones(SIDE, SIDE)

    def step():
        # The state of the random generator would be saved as well.
        run = functools.partial(
            checkpoint, products, use_reentrant=False, preserve_rng_state=False
        )
        return run(run(x, *weights[:2]), *weights[2:]).sum()

    def products(x, *weights):
        for weight in weights:
            x = x @ weight
        return x

    plain = record_step(functools.partial(chain, x, *weights), weights)
    for weight in weights:
        weight.grad = None
    timeline = record_step(step, weights, x, allocator=True)
    assert plain.saved_bytes == 4 * MATRIX
    assert timeline.saved_bytes == MATRIX


def test_compiled_step_holds_what_its_plan_saves():
    """Five products are saved at budget 1.0, one at 0.3; all of them the same size."""
    x, *weights = matrices(7)
    for budget, kept in ((1.0, 5), (0.3, 1)):
        torch._dynamo.reset()
        with fconfig.patch(activation_memory_budget=budget):
            step = functools.partial(torch.compile(chain, backend=BACKEND), x, *weights)
            step().backward()
        for tensor in (x, *weights):
            tensor.grad = None
        timeline = record_step(step, [x, *weights], allocator=True)
        assert timeline.saved_bytes == kept * MATRIX
        if budget == 1.0:
            # Seven inputs, five saved products, the last one, and its sum.
            assert peak_of(timeline, "forward", "backward") == 13 * MATRIX + LOSS
