"""By how much gradients are off where a net overwrites a buffer that it has read."""

from collections.abc import Callable

import torch
import torch._functorch.config as config
from torch import nn, Tensor


WHAT = "gradients' relative error, inductor, no budget set"
WIDTH, ROWS = 32, 64


def running_mean(h: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    scale = buffer[0].clone()
    y = ((h * scale) @ w).tanh()
    buffer[0].lerp_(h.detach().mean(0), 0.1)
    return y.square().mean()


def whitening(h: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    scale, mean = buffer[0].clone(), buffer[1].clone()
    y = ((h - mean) * scale.abs()) @ w
    buffer[0].lerp_(h.detach().var(0), 0.1)
    buffer[1].lerp_(h.detach().mean(0), 0.1)
    return y.tanh().square().mean()


def gates(h: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    y = (h * buffer[:1].clone()) @ w
    buffer.mul_(0.9).add_(h.detach()[:WIDTH], alpha=0.1)
    return y.tanh().square().mean()


def centred_teacher(h: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    found = h @ w
    shares = (found * buffer[0].clone()).softmax(-1)
    buffer[0].lerp_(found.detach().mean(0), 0.1)
    return (shares * (shares + 1e-6).log()).sum(-1).mean()


def queue_of_scales(h: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    y = (h * buffer[2].clone()).tanh() * buffer[3].clone()
    buffer.copy_(buffer.roll(1, 0))
    return (y @ w).square().mean()


class Net(nn.Module):
    """A layer, and a head that reads a buffer and then overwrites it."""

    buffer: Tensor

    def __init__(self, head: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), head
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("buffer", torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).tanh(), self.weight, self.buffer)


MODELS = {
    "running mean": running_mean,
    "whitening": whitening,
    "gates": gates,
    "centred teacher": centred_teacher,
    "queue of scales": queue_of_scales,
}


def gradients(head: Callable[..., Tensor], backend: str) -> Tensor:
    torch.manual_seed(0)
    torch._dynamo.reset()
    net, x = Net(head), torch.randn(ROWS, WIDTH)
    with config.patch(enable_autograd_cache=False):
        torch.compile(net, backend=backend)(x).backward()
    found = [p.grad for p in net.parameters() if p.grad is not None]
    return torch.cat([each.flatten() for each in found])


def error(head: Callable[..., Tensor]) -> float:
    expected = gradients(head, "eager")
    return float((gradients(head, "inductor") - expected).norm() / expected.norm())


def measured() -> dict[str, float]:
    torch.set_num_threads(1)
    return {name: error(head) for name, head in MODELS.items()}
