"""How many operators that a checkpoint wants saved are run again at budget 0."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as config
from torch import nn, Tensor
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from benchmarks.architectures import (
    ClassicShape,
    Language,
    MLP,
    Shape,
    Transformer,
    ViT,
)
from benchmarks.nets import Built, features, images, Net, tokens
from benchmarks.tracing import Joint


WHAT = "operators tagged MUST_SAVE that both graphs run at budget 0"
SIZES: dict[str, Any] = {"width": 32, "mlp": 64, "layers": 2, "vocabulary": 64}
CLASSIC = functools.partial(ClassicShape, **SIZES, batch=4, tokens=32)
PRODUCTS = ("mm", "addmm", "bmm")


def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op._opname in PRODUCTS
    policies = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    return policies[is_product]


class KeepsProducts(nn.Module):
    """A block in a selective checkpoint that recomputes all but matrix products."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Any) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, choose)
        found: Tensor = checkpoint(
            self.block, *inputs, use_reentrant=False, context_fn=contexts
        )
        return found


def checkpointed(model: nn.Module, blocks: str, batch: Any) -> Built:
    container: Any = model.get_submodule(blocks)
    for i, block in enumerate(container):
        container[i] = KeepsProducts(block)
    return model, batch


def language(model: nn.Module) -> Built:
    return checkpointed(model, "blocks", tokens(64, 4, 32))


MODELS: dict[str, Callable[[], Built]] = {
    "MLP": lambda: checkpointed(
        MLP([64] * 4, 64, 0.0), "layers", features((128, 64), 64)
    ),
    "Llama-like": lambda: language(
        Transformer(Shape(**SIZES, batch=4, tokens=32, rotary=True))
    ),
    "GPT-2-like": lambda: language(Language(CLASSIC(causal=True, joined=True))),
    "BERT-like": lambda: language(Language(CLASSIC(norm_first=False))),
    "ViT-like": lambda: checkpointed(
        ViT(CLASSIC(tokens=16), 8), "blocks", images(4, 32, 64)
    ),
}


def run_twice(build: Callable[[], Built]) -> int:
    with config.patch(activation_memory_budget=0):
        return Joint(*Net("", build).fake()).run_by_both(
            lambda node: (
                node.op == "call_function"
                and node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
            )
        )


def measured() -> dict[str, float]:
    torch.set_num_threads(1)
    return {name: run_twice(build) for name, build in MODELS.items()}
