"""What plans hold at their peak and take under inductor, beside upstream's.

    TORCH_VERSION=2.15.0 scripts/benchmark.sh kernels        for an H100, at real size
    scripts/benchmark.sh kernels --check                     a small net, as CI does
    scripts/benchmark.sh kernels --device cpu --net vit --kind upstream graph
    scripts/benchmark.sh kernels --net my_module:my_function

Bytes are without parameters and inputs. For a GPU no kernel runs: forward and backward of
fake tensors are compiled up to their kernels, and the generated wrappers run with kernels
that do nothing: what they allocate and free is what a step would; time is that of the GPU's
roofline. No GPU is needed, but a torch that was built with CUDA. Two small nets are
compiled and run by inductor on the CPU besides: there torch's allocator is asked, times are
medians of several steps, and gradients are compared with those of budget 1.

Kinds of plans: upstream (the untouched wheel's, by budgets from 0 to 1), eager (none), graph
(one graph, target "peak"), blocks (a StepBudget, each block compiled by itself), and bytes
(limits in bytes, at upstream's peaks). The exit status is 1 if a plan is over what is
allowed without a warning.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks import bounds, catalogue, fresh, nets, plans
from benchmarks.catalogue import HELD_OUT, PROJECT
from benchmarks.pages import Row
from benchmarks.plans import RUN, SWEEP


Kinds = Mapping[str, Sequence[float]]
SHARES = (1.0, 0.5, 0.2, 0.0)
SCHEDULED: Kinds = {
    "upstream": sorted({*SHARES, *SWEEP[::2]}, reverse=True),
    "eager": (),
    "graph": SHARES,
    "blocks": (0.2, 0.0),
    "bytes": (),
}
# Kernels that run take a C++ compiler.
COMPILED: Kinds = {"upstream": (1.0, 0.0), "graph": (1.0, 0.0), "blocks": (0.2,)}
CHECKED: Kinds = {"graph": (1.0, 0.5, 0.0), "blocks": (0.5, 0.0)}
# Not all: those of many convolutions take many times as long to compile.
ON_GPU = {
    PROJECT: (*("llama3-8b-2", "gpt2-xl-2", "qwen-moe-2", "vit-l-2", "hf-t5_large"),),
    HELD_OUT: (
        *("seed-oss", "dots", "deberta", "albert", "w2v-bert", "sana", "siglip"),
    ),
}
# Without dropout, which draws other numbers where kernels are others.
ON_CPU = {
    PROJECT: ("bert", "vit"),
    HELD_OUT: ("albert-small", "hiera-small"),
}
NETS = {
    **{of: (*scheduled, *ON_CPU[of]) for of, scheduled in ON_GPU.items()},
    "check": ("llama-4",),
}
# Without CUDA there are no schedules for a GPU.
DEVICE = "h100" if torch.version.cuda else "cpu"
RANKS = 8


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    run = {net for some in ON_CPU.values() for net in some}
    device = asked.device or DEVICE
    for net in asked.nets:
        if asked.check:
            yield from planned(net, CHECKED, "cpu", rows)
        elif net in run and asked.device is None:
            yield from planned(net, COMPILED, "inductor", rows)
        else:
            yield from planned(net, SCHEDULED, device, rows)


def planned(
    net: str, kinds: Kinds, device: str, rows: Sequence[Row]
) -> Iterator[fresh.Task]:
    """All kinds of plans of a net, but for limits in bytes that nothing asks for."""
    for task in plans.tasks(net, kinds, device, rows):
        if task["kind"] == "bytes":
            task["_steps"] = plans.thinned(bounds.cheaper(rows, net=net, device=device))
            if not task["_steps"]:
                continue
        yield {"set": catalogue.set_of(net), **task}


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    if task["net"] == nets.SHARDED.name:
        with plans.fake_ranks(RANKS):
            return plans.measure(task, plans.sharded)
    if (task["kind"], task["device"]) != ("graph", RUN):
        return plans.measure(task)
    with plans.curve_noted() as found:
        row = plans.measure(task)
    if found:
        fastest = row["steps"][0]["flops"]
        found["curve"] = [(peak, fastest + cost) for peak, cost in found["curve"]]
    return {**row, **found}


judged, page = bounds.judged, bounds.page
