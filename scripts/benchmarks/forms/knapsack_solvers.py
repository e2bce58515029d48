"""By how much the sliding Hirschberg solver exceeds the capacity that it was given.

The items are those of real joint graphs, from ``test/corpus``. Sizes are counted in the
solver's own steps of 1/10000, so that what its rounding takes is no part of it.
"""

from torch._functorch._activation_checkpointing.knapsack import (
    dp_knapsack_sliding_hirschberg,
)

from benchmarks.solvers import Instance, instances


BUDGET = 0.1
WHAT = f"saved over the capacity at budget {BUDGET}, %"
MODELS = {
    "llama3_70b_bf16_b1s8192": "Llama-3-70B",
    "mamba_hf_4layer_s64": "Mamba, 4 layers",
    "moe_dispatch_8x7b_bf16_b1s4096": "mixture of experts, 8x7B",
    "resnet152_fp32_b64": "ResNet-152",
    "swin_l_fp32_b32": "Swin-L",
}
STEPS = 10000


def excess(net: Instance) -> float:
    _, saved, _ = dp_knapsack_sliding_hirschberg(
        net.memory, list(map(float, net.runtimes)), BUDGET
    )
    used = sum(round(net.memory[i] * STEPS) for i in saved)
    return max(0, 100 * (used / (BUDGET * STEPS) - 1))


def measured() -> dict[str, float]:
    nets = (net for net in instances() if net.name in MODELS)
    return {MODELS[net.name]: excess(net) for net in nets}
