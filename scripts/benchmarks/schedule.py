"""What plans hold at their peak and what they take, beside upstream's.

    scripts/benchmark.sh peak                   one graph, operator by operator (hours)
    scripts/benchmark.sh step                   whole steps, operator by operator (hours)
    scripts/benchmark.sh schedule               by inductor's schedule for a GPU (hours)
    scripts/benchmark.sh schedule --steps       whole steps, likewise (hours)
    scripts/benchmark.sh gpu                    by inductor on the GPU of this machine
    scripts/benchmark.sh schedule --check       a small net, as CI does; each has that
    scripts/benchmark.sh schedule --device cpu --net vit --kind upstream graph
    scripts/benchmark.sh schedule --net my_module:my_function

Bytes are without parameters and inputs. Operator by operator steps run on a CPU, and the
bytes of live storages are counted by weak references; upstream's are those of fake tensors,
but for nets with dropout. By the schedule no kernel runs: forward and backward of fake
tensors are compiled up to their kernels, and the generated wrappers run with kernels that
do nothing: what they allocate and free is what a step would; time is that of the GPU's
roofline. No GPU is needed, but for one a torch that was built with CUDA:
TORCH_VERSION=2.15.0 in front of the command takes a wheel that is. Nets are those at real
size, on a CPU small ones in float32, and a second set by which nothing was tuned.

On the GPU the torch runs that `python3` has, 2.11 or newer, or that of the Python in
APPLY_PYTHON: its Python files are copied into build/ and patched there, and nothing is
fetched. Peaks are the allocator's, times medians of several steps, and gradients are
compared with those of budget 1.

Kinds of plans: upstream (the untouched wheel's, by budgets from 0 to 1), graph (one graph,
target "peak"), blocks (a StepBudget, each block compiled by itself), and bytes (limits in
bytes, at upstream's peaks). The exit status is 1 if a plan is over what is allowed without a
warning.

Of whole steps each block is compiled by itself, at real size also the loss. Beside the
StepBudget's plans stand each block's own budgets, which are upstream's; checkpoints around
each block, full ones, and selective ones that save attention and every second product. The
last net at real size is trained as torchtitan trains it: FSDP2 over 8 ranks, of which one is
looked at, bf16 where it computes, AdamW, 2 x 8,192 tokens.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks import bounds, catalogue, fresh, nets, plans, second_set
from benchmarks.pages import Row
from benchmarks.plans import CHECKPOINTS, RUN, SWEEP
from benchmarks.replay import GPUS


NETS = tuple(net.name for net in (*nets.AT_SIZE, *nets.SMALL, *second_set.NETS))
ON_CPU = ("mlp-dropout", "vit")
CHECKED_NET = "llama-4"
# Those that a card of 24 GB has room for, without dropout, which draws other numbers where
# kernels are others.
ON_GPU = ("vit-l-4", "llama3-8b-4", "qwen-moe-4")
# No plan was ever tuned on the last one.
STEPPED = ("llama-8", "gpt2", "bert", "vit", "moe", "hf-t5_small")
Kinds = Mapping[str, Sequence[float]]
BUDGETS = (1.0, 0.5, 0.2, 0.1, 0.0)
SHARES = (1.0, 0.5, 0.2, 0.0)
FINE = (1.0, 0.5, 0.2, 0.1, 0.05, 0.0)
GRAPHS: Kinds = {"upstream": SWEEP, "graph": (*FINE[:1], 0.8, *FINE[1:])}
SCHEDULED: Kinds = {
    "upstream": sorted({*BUDGETS, *SWEEP[::2]}, reverse=True),
    "graph": BUDGETS,
    "blocks": SHARES,
    "bytes": (),
}
IN_STEPS: Kinds = {"saved": SWEEP, CHECKPOINTS[0]: (), "blocks": FINE, "held": ()}
ON_DEVICE: Kinds = {
    "upstream": (1.0, 0.75, 0.5, 0.25, 0.125, 0.0),
    "graph": SHARES,
    "blocks": (0.2, 0.0),
}
CHECKED: Kinds = {"graph": (1.0, 0.5, 0.0), "blocks": (0.5, 0.0)}
CHECKED_STEPS: Kinds = {"saved": (0.5,), "blocks": (1.0, 0.0), "held": ()}
OPTIONS = {
    "device": {
        "choices": (RUN, *plans.DEVICES, "cpu", *sorted(GPUS)),
        "default": "h100" if torch.version.cuda else "cpu",
        "help": "by its schedule; operators, inductor and cuda run",
    },
    "steps": {"action": "store_true", "help": "whole steps of all layers"},
}
RANKS = 8


def planned(device: str, steps: bool) -> tuple[Sequence[str], Kinds]:
    """The nets for a device, and the kinds of their plans."""
    if device in plans.DEVICES:
        return ON_GPU if device == "cuda" else ON_CPU, ON_DEVICE
    if steps and device == RUN:
        return STEPPED, IN_STEPS
    if steps:
        whole = [net.name for net in nets.WHOLE]
        return whole, {**IN_STEPS, CHECKPOINTS[1]: ()}
    small = [net.name for net in nets.SMALL]
    if device == RUN:
        return small, GRAPHS
    project = small if device == "cpu" else [net.name for net in nets.AT_SIZE]
    return [*project, *(net.name for net in second_set.NETS)], SCHEDULED


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    device = asked.device
    if device == "cuda" and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} of {sys.executable} sees no GPU here; name "
            "another Python in APPLY_PYTHON, or try --device inductor",
            file=sys.stderr,
        )
        raise SystemExit(2)
    device = "cpu" if asked.check and device in GPUS else device
    every_net, kinds = planned(device, asked.steps)
    if asked.check:
        every_net, kinds = (CHECKED_NET,), CHECKED_STEPS if asked.steps else CHECKED
    for task in plans.tasks(asked.nets or every_net, kinds, device, rows):
        held_out = catalogue.find(task["net"]).held_out
        if task["kind"] == "bytes":
            task["_steps"] = bounds.cheaper(rows, net=task["net"], device=device)
            if not task["_steps"]:
                continue
        yield {"set": "second" if held_out else "project", **task}


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
