"""The time of CPU kernels that store or load bools, as inductor compiles them."""

import timeit
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


WHAT = "time of a CPU kernel, one thread, ms"
SHAPE = 64, 128, 28, 28


def dropout(x: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    kept = drawn > 0.1
    return torch.where(kept, x / 0.9, 0), kept


MODELS: dict[str, Callable[..., object]] = {
    "ReLU that saves a mask": lambda x, _: (F.relu(x), x > 0),
    "backward of ReLU by a mask": lambda x, mask: torch.where(mask, x, 0),
    "dropout that saves a mask": dropout,
    "masked fill by bools": lambda x, mask: x.masked_fill(mask, -1e9),
    "comparison of two tensors": lambda x, other: x < other,
}
BY_BOOLS = ("backward of ReLU by a mask", "masked fill by bools")


def measured() -> dict[str, float]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    found = {}
    for name, function in MODELS.items():
        torch._dynamo.reset()
        given = x, other > 0 if name in BY_BOOLS else other
        compiled = torch.compile(function)
        call = timeit.Timer(lambda: compiled(*given))  # noqa: B023
        call.timeit(3)
        found[name] = 1e3 * min(call.repeat(7, 1))
    return found
