"""How many tokens the backward sends to another expert than the forward did.

Inductor stores a value in bfloat16 where another kernel reads it, and keeps its digits
where one kernel makes and reads it. A recomputed router may see the one or the other.
"""

from collections.abc import Callable

import torch
import torch._functorch.config as config
import torch._inductor.config as inductor_config
from torch import Tensor


BUDGET, TOKENS, WIDTH, EXPERTS = 0.5, 4096, 64, 8
WHAT = f"of {TOKENS} tokens, sent elsewhere by the backward at budget {BUDGET}"
# What the router's scores become: for each token, the number of an expert.
ROUTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "top 1": lambda scores: scores.topk(1).indices.squeeze(1),
    "second choice": lambda scores: scores.topk(2).indices[:, 1],
    "argmax": lambda scores: scores.argmax(-1),
    "bits of comparisons": lambda scores: (
        (scores[:, 0] > scores[:, 1]).long() + 2 * (scores[:, 2] > scores[:, 3]).long()
    ),
    "the experts' ranking": lambda scores: scores.argsort(-1)[:, 0],
}


def flipped(route: Callable[[Tensor], Tensor]) -> float:
    def net(
        x: Tensor, first: Tensor, router: Tensor, second: Tensor, experts: Tensor
    ) -> tuple[Tensor, Tensor]:
        y = x @ first
        x = torch.tanh(y) * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)
        scores = (x.unsqueeze(-1) * router).sum(1).softmax(-1)
        return experts[route(scores)], (torch.sigmoid(x @ second) * x).sum()

    torch.manual_seed(0)
    torch._dynamo.reset()
    shapes = (TOKENS, WIDTH), (WIDTH, WIDTH), (WIDTH, EXPERTS), (WIDTH, WIDTH)
    x, *weights = (
        (torch.randn(*shape) * scale).bfloat16()
        for shape, scale in zip(shapes, (1, 0.2, 1, 0.1))
    )
    for weight in weights:
        weight.requires_grad_()
    # What is read of an expert is its number, and its gradient counts its tokens.
    experts = torch.arange(EXPERTS).float().requires_grad_()
    with (
        config.patch(activation_memory_budget=BUDGET, enable_autograd_cache=False),
        # Plain loops compile fastest.
        inductor_config.patch({"cpp.simdlen": 1}),
    ):
        went, loss = torch.compile(net)(x, *weights, experts)
        (went.sum() + loss).backward()
    sent = torch.bincount(went.long(), minlength=EXPERTS)
    assert experts.grad is not None
    return float((experts.grad - sent).abs().sum() / 2)


def measured() -> dict[str, float]:
    torch.set_num_threads(1)
    return {name: flipped(route) for name, route in ROUTERS.items()}
