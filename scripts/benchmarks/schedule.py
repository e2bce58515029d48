"""What inductor's plans hold and take, beside upstream's; no kernel runs.

    scripts/benchmark.sh schedule                       all nets (hours)
    scripts/benchmark.sh schedule --check               a small one, as CI does
    scripts/benchmark.sh schedule --device cpu --net vit --kind upstream graph
    scripts/benchmark.sh schedule --steps               whole steps, for an H100 (hours)
    scripts/benchmark.sh schedule --net my_module:my_function

Forward and backward of fake tensors are compiled up to their kernels, and the generated
wrappers run with kernels that do nothing: what they allocate and free is what a step
would. Bytes are without parameters and inputs; time is that of the GPU's roofline. Nets
are those at real size, on the CPU small ones in float32, and a second set by which nothing
was tuned. No GPU is needed, but for one a torch that was built with CUDA:
TORCH_VERSION=2.15.0 in front of the command takes a wheel that is.

Kinds of plans: upstream (the untouched wheel's, by budgets from 0 to 1), graph (one graph,
target "peak"), blocks and whole (a StepBudget, each block or the net compiled by itself),
bytes (a limit in bytes), and allocator (on the CPU, beside what its allocator notes). The
exit status is 1 if that differs, or a plan is over what is allowed without a warning.

With --steps each block and the loss are compiled by themselves. The last net is trained as
torchtitan trains it: FSDP2 over 8 ranks, of which one is looked at, bf16 where it computes,
AdamW, 2 x 8,192 tokens. Beside the StepBudget's plans stand each block's own budgets,
which are upstream's, and checkpoints around each block: full ones, and selective ones that
save attention and every second product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

import torch
from torch._inductor import config as inductor_config

from benchmarks import bounds, fresh, nets, plans, second_set, sharding, step
from benchmarks.pages import at_most, good, Mark, marks_table, Row
from benchmarks.replay import GPUS
from benchmarks.tracing import cpu_attention_counted
from benchmarks.ways import budgeted, compiled, Training


NETS = tuple(net.name for net in (*nets.AT_SIZE, *nets.SMALL, *second_set.NETS))
BUDGETS = (1.0, 0.5, 0.2, 0.1, 0.0)
SHARES = (1.0, 0.5, 0.2, 0.0)
OURS = {"graph": BUDGETS, "blocks": SHARES, "whole": SHARES, "bytes": (plans.HALF,)}
STEPS: dict[str, Sequence[float]] = {
    "saved": plans.SWEEP,
    **dict.fromkeys(plans.CHECKPOINTS, ()),
    "blocks": step.SHARES,
    "held": (),
}
CHECKED = {"graph": (plans.HALF, 0.0), "blocks": (plans.HALF, 0.0)}
CHECK = "a small net, two budgets; as CI does"
ON_CPU = ("mlp-dropout", "vit")
CPU_BUDGET = 0.2
OPTIONS = {
    "device": {
        "choices": ("cpu", *sorted(GPUS)),
        "default": "h100" if torch.version.cuda else "cpu",
    },
    "steps": {"action": "store_true", "help": "whole steps of all layers"},
}
RANKS = 8
# Scalars, such as the loss, which the allocator rounds up.
SCALARS = 64


def tasks(
    names: Optional[Sequence[str]],
    check: bool,
    rows: Sequence[Row],
    device: str,
    steps: bool,
) -> Iterator[fresh.Task]:
    if steps:
        whole = [net.name for net in nets.WHOLE]
        yield from plans.tasks(names or whole, STEPS, device, rows)
        return
    device = "cpu" if check else device
    project = nets.SMALL if device == "cpu" else nets.AT_SIZE
    by = 32 if device == "cpu" else 16
    swept = sorted({*BUDGETS, *(n / by for n in range(by + 1))}, reverse=True)
    kinds: Mapping[str, Sequence[float]] = {"upstream": swept, **OURS}
    every_net = [net.name for net in (*project, *second_set.NETS)]
    beside_allocator = [*ON_CPU]
    if check:
        kinds = CHECKED
        every_net = beside_allocator = [ON_CPU[0]]
    for net in () if names or device != "cpu" else beside_allocator:
        yield {"set": "project", "net": net, "kind": "allocator", "device": device}
    for task in plans.tasks(names or every_net, kinds, device):
        held_out = nets.find(task["net"]).held_out
        yield {"set": "second" if held_out else "project", **task}


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    if task["kind"] == "allocator":
        return beside_allocator(task)
    if task["net"] != nets.SHARDED.name:
        return plans.measure(task)
    with sharding.fake_ranks(RANKS):
        return plans.measure(task, sharding.sharded)


def beside_allocator(task: fresh.Task) -> Row:
    """The peak of a step by inductor on the CPU, and that which its allocator notes."""
    graph = {**task, "kind": "graph", "budgets": (CPU_BUDGET,)}
    (found,) = plans.measure(graph)["steps"]
    caches = inductor_config.patch(force_disable_caches=True)
    with cpu_attention_counted(), budgeted(CPU_BUDGET, "peak"), caches:
        training = Training(nets.find(task["net"]), whole=compiled("inductor"))
        noted = training.warmed().measured(allocator=True).own_peak
    return {"replayed": found["peak"], "allocated": noted}


# ------------------------------------------------------------------- report


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    yield from judged_replay(rows)
    yield from bounds.judged(rows)


def judged_replay(rows: Sequence[Row]) -> Iterator[Mark]:
    cpu = good(rows, kind="allocator")
    yield from at_most(
        "replay of the CPU's wrapper against its allocator, inductor",
        ((abs(row["allocated"] - row["replayed"]), row["net"]) for row in cpu),
        *(SCALARS, f"{SCALARS} bytes, as scalars"),
        f"{{}} bytes apart at most ({{}}), {len(cpu)} nets",
        enforced=True,
    )


def page(data: dict[str, Any]) -> str:
    own = [mark._asdict() for mark in judged_replay(data["measured"])]
    return (marks_table(own) + "\n" if own else "") + bounds.page(data)
