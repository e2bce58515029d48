"""Frozen layers under inductor, and the kernels that run with and without the pass.

The upstream-style test_ac_frozen_layers.py compiles no C++; this one does.
"""

import pytest
import torch
import torch._functorch.config as fconfig
import torch._inductor.config as iconfig
from torch import nn
from torch._functorch._activation_checkpointing import unread_arguments


BACKENDS = ["aot_eager_decomp_partition", "inductor"]


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """One thread, and nothing taken from a cache: it knows nothing of poison."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with (
        fconfig.patch(enable_autograd_cache=False),
        iconfig.patch(fx_graph_cache=False),
    ):
        yield
    torch.set_num_threads(threads)


def frozen_net():
    """A trainable stem before frozen 3x3, 1x1, strided and transposed convolutions
    and a pool whose input's layout nothing else tells."""
    torch.manual_seed(0)
    frozen = (
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 1),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 2, stride=2),
        nn.AdaptiveAvgPool2d(3),
    )
    for layer in frozen:
        layer.requires_grad_(False)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *frozen)


def compiled(module, backend, on):
    """A step of the compiled module that returns the gradients."""
    torch._dynamo.reset()
    call = torch.compile(module, backend=backend, fullgraph=True)

    def step(inputs):
        module.zero_grad()
        with fconfig.patch(drop_unread_arguments=on):
            call(inputs).sin().sum().backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    return step


def poisoned(monkeypatch):
    """Fills every stand-in with NaN; the list tells for what, in channels_last or not."""
    make, made = unread_arguments._make_stand_in, []

    def fill(argument, base, user, channels_last):
        node = make(argument, base, user, channels_last)
        made.append((user.target, channels_last))
        with user.graph.inserting_before(user):
            filled = user.graph.call_function(
                torch.ops.aten.add.Tensor, (node, float("nan"))
            )
        filled.meta = dict(node.meta)
        return filled

    monkeypatch.setattr(unread_arguments, "_make_stand_in", fill)
    return made


def test_poison_reaches_no_gradient_in_inductor(monkeypatch):
    module, inputs = frozen_net(), torch.randn(2, 3, 9, 9)
    expected = compiled(module, "inductor", on=False)(inputs)
    made = poisoned(monkeypatch)
    found = compiled(module, "inductor", on=True)(inputs)
    # Inductor's forward has convolutions in channels_last, whatever the graph says.
    assert [last for _, last in made] == [True] * 4 + [False]
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)


def test_symbolic_sizes_are_left_to_inductor_as_they_were(monkeypatch):
    module = frozen_net()
    made = poisoned(monkeypatch)
    step = compiled(module, "inductor", on=True)
    for size in (9, 11):  # At the second size, dynamo makes them symbolic.
        inputs = torch.randn(2, 3, size, size)
        module.zero_grad()
        module(inputs).sin().sum().backward()
        expected = [p.grad for p in module.parameters() if p.grad is not None]
        for left, right in zip(step(inputs), expected, strict=True):
            torch.testing.assert_close(left, right)
    assert len(made) == 5, "something stands in for a tensor of symbolic sizes"


def test_parameters_stay_in_inductor(monkeypatch):
    module = nn.Conv2d(3, 4, 3).requires_grad_(False)
    module.prompt = nn.Parameter(torch.randn(2, 3, 5, 5))
    made = poisoned(monkeypatch)
    call = torch.compile(lambda: module(module.prompt), fullgraph=True)
    call().sum().backward()
    assert module.prompt.grad is not None and made == []


def kernels(step, inputs, capfd):
    """Each oneDNN convolution of one step: what it is, its kernel and its layouts."""
    step(inputs)
    capfd.readouterr()
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        step(inputs)
    lines = [line.split(",") for line in capfd.readouterr().out.splitlines()]
    # The last field is the time.
    return [
        line[5:-1] for line in lines if "exec" in line and "convolution" in line[5:6]
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kernels_are_the_same(backend, layout, capfd):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    if backend == "inductor" and layout is torch.channels_last:
        pytest.skip("inductor makes everything channels_last by itself")
    module = frozen_net()
    inputs = torch.randn(2, 3, 9, 9).contiguous(memory_format=layout)
    with_pass, without = (
        kernels(compiled(module, backend, on), inputs, capfd) for on in (True, False)
    )
    # Which convolutions oneDNN takes is up to the machine.
    assert any("backward_data" in line for line in without)
    assert with_pass == without
