"""By how much the bytes saved exceed the budget: of the exact solver, and before of dp.

The items are those of real joint graphs, from ``test/corpus``.
"""

import importlib.util

from benchmarks.solvers import Instance, instances


BUDGET = 0.1
WHAT = f"bytes saved over the budget of {BUDGET}, %"
MODELS = {
    "gpt2xl_bf16_b8s1024": "GPT-2 XL",
    "llama3_70b_bf16_b1s8192": "Llama-3-70B",
    "mamba_hf_4layer_s64": "Mamba, 4 layers",
    "moe_dispatch_8x7b_bf16_b1s4096": "mixture of experts, 8x7B",
    "resnet152_fp32_b64": "ResNet-152",
    "swin_l_fp32_b32": "Swin-L",
}
FOLDER = "torch._functorch._activation_checkpointing"


def excess(net: Instance) -> float:
    if importlib.util.find_spec(f"{FOLDER}.knapsack_search"):
        found = importlib.import_module(f"{FOLDER}.knapsack_search").exact_knapsack
    else:
        found = importlib.import_module(f"{FOLDER}.knapsack").dp_knapsack
    _, saved, _ = found(net.memory, list(map(float, net.runtimes)), BUDGET)
    used = sum(net.sizes[i] for i in saved)
    return max(0, 100 * (used / (BUDGET * net.range) - 1))


def measured() -> dict[str, float]:
    nets = (net for net in instances() if net.name in MODELS)
    return {MODELS[net.name]: excess(net) for net in nets}
