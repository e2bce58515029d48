"""Live bytes of running programs, held against programs one can count by hand."""

import functools

import pytest
import torch
from benchmarks import nets
from benchmarks.architectures import ClassicShape
from benchmarks.meters import (
    allocations,
    CountedStorages,
    random_operators,
    record_step,
)


BACKEND = "aot_eager_decomp_partition"
SIDE = 64
MATRIX = SIDE * SIDE * 4
LOSS = 4

pytestmark = pytest.mark.usefixtures("alone")


def matrices(count):
    torch.manual_seed(0)
    return [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(count)]


def counted(call):
    with CountedStorages() as recorder:
        result = call()
        left = recorder.risen
    return result, recorder.peak, left


# ---------------------------------------------------------------- recorders


@pytest.mark.parametrize("record", [counted, allocations])
def test_bytes_of_a_few_operators(record):
    x = matrices(1)[0].detach()

    def run():
        y = x.neg()
        z = y.exp()
        del y
        view = z.t()[1:]
        del z
        other = torch.empty(3, dtype=torch.int16)
        grown = torch.empty(100, dtype=torch.uint8)
        grown.resize_(1000)
        assert view.numel() > 0
        return other, grown

    _, peak, left = record(run)
    assert peak == 2 * MATRIX
    assert left == 6 + 1000


def test_scratch_of_an_operator():
    x = matrices(1)[0].detach()

    def run():
        # It fills a copy of its argument.
        return x.t().argsort(0)

    found = [allocations(run, scratch)[1:] for scratch in (True, False)]
    (peak, left), without = found
    assert without == (left, left)
    assert peak > left


# ------------------------------------------------------------ training step


def chain(x, *weights):
    return functools.reduce(torch.matmul, weights, x).sum()


@pytest.mark.parametrize("compiled", [False, True])
def test_step_of_a_chain(compiled):
    """loss = sum(x a b c): a b's and x a's values are saved.

    The most is live while the gradients of b's product are made: the gradient of c,
    x a's value, the gradient of x a b, and both results; and the loss. A graph frees
    x a's value before it makes the second result.
    """
    x, a, b, c = matrices(4)
    x = x.detach()
    function = torch.compile(chain, backend=BACKEND) if compiled else chain
    step = functools.partial(function, x, a, b, c)
    if compiled:
        step().backward()
        for weight in (a, b, c):
            weight.grad = None
    found = record_step(step, [a, b, c], x)
    assert found.saved_bytes == 2 * MATRIX
    assert found.given == 4 * MATRIX
    assert found.peak - found.given == found.own_peak
    products = 4 if compiled else 5
    assert found.own_peak == pytest.approx(products * MATRIX + LOSS, abs=2 * LOSS)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_net_says_whether_it_draws_numbers(share):
    """Attention's operator is random by its tag, but draws nothing without dropout."""
    name, shape = "draws", ClassicShape(layers=1, tokens=32, dropout=share)
    found = random_operators(*nets.language(name, shape).fake())
    assert bool(found) == (share > 0)
