"""The peak under small budgets, operator by operator, and what a step computes.

The nets of #197838 are like the Llamas here.
"""

from dataclasses import replace
from typing import Any

import torch
import torch._functorch.config as config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode

from benchmarks import nets
from benchmarks.forms.memory_budget import small_unet
from benchmarks.meters import CountedStorages
from benchmarks.tracing import Joint


WHAT = (
    "the peak beyond parameters and inputs by budget, and a step's flops; operator by "
    "operator, float32, no GPU"
)
BUDGETS = (0.3, 0.2, 0.1, 0.05)
NETS = ("llama-8", "gpt2", "bert", "vit")
LLAMA_32 = nets.language("llama-32", replace(nets.LLAMA_8, layers=32))


def measured() -> dict[str, float]:
    found: dict[str, float] = {}
    for net in (LLAMA_32, *(nets.NETS[name] for name in NETS), small_unet(4)):
        joint = Joint(*net.fake())
        for budget in BUDGETS:
            meter = of_step(joint, budget)
            found[f"{net.name}: MB at {budget}"] = meter.peak / 1e6
            found[f"{net.name}: GFLOP at {budget}"] = meter.flops / 1e9
    return found


def of_step(joint: Joint, budget: float) -> CountedStorages:
    """What a step has live and computes by the plan of a budget."""
    with config.patch(
        activation_memory_budget=budget, activation_memory_budget_solver="dp"
    ):
        forward, backward = joint.partition(min_cut_rematerialization_partition)
    given, tangents = (
        [node.meta["val"] for node in half.graph.find_nodes(op="placeholder")]
        for half in (forward, backward)
    )
    mode: Any = detect_fake_mode(given)
    with mode, CountedStorages(given) as meter:
        found = [*torch.fx.Interpreter(forward).run(*given)]
        outputs = found[: joint.options["num_fwd_outputs"]]
        # What is saved goes when it was last read; the outputs stay.
        saved = found[len(outputs) :]
        arguments = [*saved, *tangents[len(saved) :]]
        del found, saved
        torch.fx.Interpreter(backward).boxed_run(arguments)
    return meter
