"""By how much gradients are off where a net overwrites a buffer that it has read."""

from collections.abc import Callable

import torch
import torch._functorch.config as config
from torch import nn, Tensor


WHAT = "gradients' relative error, inductor, no budget set"
WIDTH, ROWS = 32, 64


def codebook(h: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    codes = buffer.clone()
    nearest = (h - codes[torch.cdist(h, codes).argmin(-1)]).square().mean()
    # The commitment to all codes, by their distance.
    loss = nearest + (h @ codes.t()).softmax(-1).square().mean()
    buffer.lerp_(h.detach()[:WIDTH], 0.1)
    return loss


def queue_of_keys(h: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    scores = h @ buffer.clone().t()
    buffer.copy_(torch.cat([h.detach()[:8], buffer[:-8]]))
    return scores.logsumexp(-1).mean()


def running_mean(h: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    scale = buffer[0].clone()
    y = ((h * scale) @ w).tanh()
    buffer[0].lerp_(h.detach().mean(0), 0.1)
    return y.square().mean()


def power_iteration(h: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    u = buffer[0].clone()
    v = nn.functional.normalize(u @ w.detach(), dim=0)
    loss = (h @ w / (u @ w @ v)).tanh().square().mean()
    buffer[0] = nn.functional.normalize(w.detach() @ v, dim=0)
    return loss


def recurrent_memory(h: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    state = (h[:WIDTH] + buffer.clone() @ w).tanh()
    buffer.copy_(state.detach())
    return (h @ state.t()).square().mean()


def averaged_teacher(h: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    target = h @ buffer.clone()
    buffer.lerp_(w.detach(), 0.1)
    return (h @ w - target).square().mean()


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
    "codebook": codebook,
    "queue of keys": queue_of_keys,
    "running mean": running_mean,
    "power iteration": power_iteration,
    "recurrent memory": recurrent_memory,
    "averaged teacher": averaged_teacher,
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
