"""By how much the bytes saved exceed the budget: of the exact solver, and before of dp.

The items are those of real joint graphs, from ``test/corpus``.
"""

import importlib.util

from benchmarks.solvers import Instance, instances


BUDGET = 0.05
WHAT = f"bytes saved over the budget of {BUDGET}, %"
MODELS = {
    "clip_l_bf16_b256": "CLIP-L",
    "dit_xl2_bf16_b64": "DiT-XL/2",
    "gpt2xl_bf16_b8s1024": "GPT-2 XL",
    "llama3_8b_bf16_b1s8192_eager": "Llama-3-8B",
    "mamba_hf_4layer_s64": "Mamba, 4 layers",
    "moe_dispatch_8x7b_bf16_b1s4096": "mixture of experts, 8x7B",
    "resnet152_fp32_b64": "ResNet-152",
    "vit_h14_bf16_b64": "ViT-H/14",
}
FOLDER = "torch._functorch._activation_checkpointing"


def excess(net: Instance) -> float:
    if importlib.util.find_spec(f"{FOLDER}.knapsack_search"):
        found = importlib.import_module(f"{FOLDER}.knapsack_search").exact_knapsack
    else:
        found = importlib.import_module(f"{FOLDER}.knapsack").dp_knapsack
    _, saved, _ = found(net.memory, list(map(float, net.runtimes)), BUDGET)
    used: int = sum(net.sizes[i] for i in saved)
    over = 100 * (used / (BUDGET * net.range) - 1)
    return max(0.0, float(over))


def measured() -> dict[str, float]:
    nets = (net for net in instances() if net.name in MODELS)
    return {MODELS[net.name]: excess(net) for net in nets}
