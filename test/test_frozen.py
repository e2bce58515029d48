"""Frozen layers under inductor: gradients with and without the pass.

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
def uncached(alone):
    """No graph comes from a cache: it would know nothing of poison."""
    with (
        fconfig.patch(enable_autograd_cache=False),
        # Plain loops compile faster than vectors.
        iconfig.patch({"fx_graph_cache": False, "cpp.simdlen": 0}),
    ):
        yield


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


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("aot_eager_decomp_partition", torch.contiguous_format),
        ("aot_eager_decomp_partition", torch.channels_last),
        # Inductor makes everything channels_last by itself.
        ("inductor", torch.contiguous_format),
    ],
)
def test_gradients_are_the_same_whatever_stands_in(backend, layout, monkeypatch):
    module = FrozenNet()
    inputs = torch.randn(2, 8, 10, 10).contiguous(memory_format=layout)
    plain, ours = (compiled(module, backend, on)(inputs) for on in (False, True))
    made = poisoned(monkeypatch)
    filled = compiled(module, backend, on=True)(inputs)
    for gradients in (ours, filled):
        for left, right in zip(gradients, plain, strict=True):
            assert torch.equal(left, right)
    # Inductor's forward has convolutions in channels_last, whatever the graph says;
    # the layout of a pool's input is that of the graph.
    traced = layout is torch.channels_last
    convolution = aten.convolution_backward.default
    pool = aten._adaptive_avg_pool2d_backward.default
    assert made.count((convolution, backend == "inductor" or traced)) == 3
    assert [laid for target, laid in made if target is pool] == [traced]
