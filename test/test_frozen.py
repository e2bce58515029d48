"""Frozen layers under inductor, and the kernels that run with and without the pass.

The upstream-style test_ac_frozen_layers.py compiles no C++; this one does.
"""

import pytest
import torch
import torch._functorch.config as fconfig
import torch._inductor.config as iconfig
from torch import nn
from torch._functorch._activation_checkpointing import frozen_layers


aten = torch.ops.aten


@pytest.fixture(autouse=True)
def alone():
    """One thread, and no graph from a cache: it knows nothing of poison."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with (
        fconfig.patch(enable_autograd_cache=False),
        # Plain loops compile faster than vectors.
        iconfig.patch({"fx_graph_cache": False, "cpp.simdlen": 0}),
    ):
        yield
    torch.set_num_threads(threads)


class FrozenNet(nn.Module):
    """A trainable prompt before frozen 3x3, strided 1x1 and transposed convolutions
    and a pool whose input's layout nothing else tells."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.prompt = nn.Parameter(torch.randn(1, 8, 3, 3))
        self.frozen = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 1, stride=2),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 2, stride=2),
            nn.AdaptiveAvgPool2d(3),
        ).requires_grad_(False)

    def forward(self, x):
        # The parameter is alive in any case: nothing stands in for it.
        return self.frozen(x * self.prompt.mean()) + self.frozen[0](self.prompt)


def compiled(module, backend, on, **options):
    """A step of the compiled module that returns the gradients."""
    torch._dynamo.reset()
    call = torch.compile(module, backend=backend, fullgraph=True, **options)

    def step(inputs):
        module.zero_grad()
        with fconfig.patch(drop_unread_arguments=on):
            call(inputs).sin().sum().backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    return step


def poisoned(monkeypatch):
    """Fills every stand-in with NaN; the list tells for what, in channels_last or not."""
    make, made = frozen_layers._make_stand_in, []

    def fill(stand_in):
        node, user = make(stand_in), stand_in.user
        value = node.meta["val"]
        last = value.is_contiguous(memory_format=torch.channels_last)
        made.append((user.target, last))
        with user.graph.inserting_before(user):
            filled = user.graph.call_function(aten.add.Tensor, (node, float("nan")))
        filled.meta = dict(node.meta)
        return filled

    monkeypatch.setattr(frozen_layers, "_make_stand_in", fill)
    return made


def kernels(step, inputs, capfd):
    """Each oneDNN convolution of one step: what it is, its kernel and its layouts."""
    capfd.readouterr()
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        step(inputs)
    lines = [line.split(",") for line in capfd.readouterr().out.splitlines()]
    # The last field is the time.
    return [
        line[5:-1] for line in lines if "exec" in line and "convolution" in line[5:6]
    ]


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("aot_eager_decomp_partition", torch.contiguous_format),
        ("aot_eager_decomp_partition", torch.channels_last),
        # Inductor makes everything channels_last by itself.
        ("inductor", torch.contiguous_format),
    ],
)
def test_kernels_and_gradients_are_the_same(backend, layout, capfd, monkeypatch):
    module = FrozenNet()
    inputs = torch.randn(2, 8, 10, 10).contiguous(memory_format=layout)
    found, seen = [], []
    for on in (False, True):
        step = compiled(module, backend, on)
        found.append(step(inputs))
        seen.append(kernels(step, inputs, capfd))
    made = poisoned(monkeypatch)
    found.append(compiled(module, backend, on=True)(inputs))
    for gradients in found[1:]:
        for left, right in zip(gradients, found[0], strict=True):
            assert torch.equal(left, right)
    if torch.backends.mkldnn.is_available():
        # Which convolutions oneDNN takes is up to the machine.
        assert any("backward_data" in line for line in seen[0])
        assert seen[1] == seen[0]
    # Inductor's forward has convolutions in channels_last, whatever the graph says;
    # the layout of a pool's input is that of the graph.
    last = backend == "inductor" or layout is torch.channels_last
    convolution = aten.convolution_backward.default
    assert [laid for target, laid in made if target is convolution] == 3 * [last]
    pool = aten._adaptive_avg_pool2d_backward.default
    assert [laid for target, laid in made if target is pool] == [
        layout is torch.channels_last
    ]
