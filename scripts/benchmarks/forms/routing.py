"""How many tokens the backward sends to another expert than the forward did.

A forward kernel routes by a gate that has all of its digits, and stores that in
bfloat16. If only the gate is saved, the backward routes again, by what was stored.
"""

from collections.abc import Callable

import torch
import torch._functorch.config as config
import torch._inductor.config as inductor_config
from torch import Tensor


BUDGET, TOKENS, WIDTH, EXPERTS = 0.5, 4096, 64, 8
WHAT = f"of {TOKENS} tokens, sent elsewhere by the backward at budget {BUDGET}"
# What the gates of each token become: the number of its expert.
ROUTERS: dict[str, Callable[..., Tensor]] = {
    "threshold": lambda a, b, c: (a > 0.5).long(),
    "the larger of two": lambda a, b, c: (a > b).long(),
    "signs of three": lambda a, b, c: (
        (a > 0.5).long() + 2 * (b > 0.5).long() + 4 * (c > 0.5).long()
    ),
    "ranges": lambda a, b, c: (a * EXPERTS).long(),
    "the next free expert": lambda a, b, c: (a > 0.5).long().cumsum(0) % EXPERTS,
}


def flipped(route: Callable[..., Tensor]) -> float:
    def net(x: Tensor, gates: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        found = [(x * gate).sum(-1).sigmoid() for gate in gates.unbind()]
        return experts[route(*found)], torch.stack(found).square().sum()

    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    gates = (torch.randn(3, WIDTH) * 0.02).bfloat16().requires_grad_()
    # What is read of an expert is its number, and its gradient counts its tokens.
    experts = torch.arange(EXPERTS).float().requires_grad_()
    with (
        config.patch(activation_memory_budget=BUDGET, enable_autograd_cache=False),
        # Plain loops compile fastest.
        inductor_config.patch({"cpp.simdlen": 1}),
    ):
        went, loss = torch.compile(net)(x, gates, experts)
        (went.sum() + loss).backward()
    sent = torch.bincount(went.long(), minlength=EXPERTS)
    assert experts.grad is not None
    return float((experts.grad - sent).abs().sum() / 2)


def measured() -> dict[str, float]:
    torch.set_num_threads(1)
    return {name: flipped(route) for name, route in ROUTERS.items()}
