"""The peak under a small budget, operator by operator."""

from typing import Any

import torch
import torch._functorch.config as config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode

from benchmarks import nets
from benchmarks.forms.memory_budget import small_unet
from benchmarks.meters import CountedStorages
from benchmarks.tracing import Joint


WHAT = "MB at the peak at budget 0.1, beyond parameters and inputs"
NETS = ("llama-8", "gpt2", "bert", "vit")


def measured() -> dict[str, float]:
    named = (nets.NETS[name] for name in NETS)
    return {net.name: peak(net, 0.1) / 1e6 for net in (*named, small_unet(4))}


def peak(net: nets.Net, budget: float) -> int:
    joint = Joint(*net.fake())
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
    return meter.peak
