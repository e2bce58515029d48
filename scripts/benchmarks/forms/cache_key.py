"""How often the compile cache serves a plan that another solver or estimator made."""

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as config
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from benchmarks.architectures import (
    ClassicShape,
    Language,
    MLP,
    Shape,
    Transformer,
    ViT,
)
from benchmarks.nets import Built, features, images, tokens


SOLVER = "activation_memory_budget_solver"
ESTIMATOR = "activation_memory_budget_runtime_estimator"
# The first fills the cache, and each of the others asks for another plan.
CHOICES = (
    {SOLVER: "dp"},
    {SOLVER: "greedy"},
    {SOLVER: "dp_knapsack_sliding_hirschberg"},
    {SOLVER: "dp", ESTIMATOR: "testing"},
)
WHAT = f"cache hits for other solvers and estimators, of {len(CHOICES) - 1}"
SIZES: dict[str, Any] = {
    "width": 16,
    "mlp": 32,
    "layers": 1,
    "vocabulary": 32,
    "batch": 2,
}


def classic(tokens: int = 8) -> ClassicShape:
    return ClassicShape(**SIZES, tokens=tokens)


MODELS: dict[str, Callable[[], Built]] = {
    "MLP": lambda: (MLP([16] * 3, 16, 0.0), features((8, 16), 16)),
    "MLP, deeper": lambda: (MLP([16] * 6, 16, 0.0), features((8, 16), 16)),
    "Llama-like": lambda: (Transformer(Shape(**SIZES, tokens=8)), tokens(32, 2, 8)),
    "GPT-2-like": lambda: (Language(classic()), tokens(32, 2, 8)),
    "ViT-like": lambda: (ViT(classic(4), 8), images(2, 16, 32)),
}


def wrong_hits(build: Callable[[], Built]) -> int:
    hits = 0
    with (
        fresh_cache(),
        # Plain loops compile fastest.
        inductor_config.patch({"cpp.simdlen": 1, "fx_graph_remote_cache": False}),
    ):
        for choice in CHOICES:
            torch.manual_seed(0)
            torch._dynamo.reset()
            counters.clear()
            model, inputs = build()
            with config.patch(
                activation_memory_budget=0.5, enable_autograd_cache=True, **choice
            ):
                torch.compile(model)(*inputs).backward()
            hits += counters["aot_autograd"]["autograd_cache_hit"]
    return hits


def measured() -> dict[str, float]:
    torch.set_num_threads(1)
    return {name: wrong_hits(build) for name, build in MODELS.items()}
