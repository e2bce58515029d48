"""A budget for the whole training step, where each block is compiled by itself.

    TORCH_VERSION=2.15.0 scripts/benchmark.sh steps
    scripts/benchmark.sh steps --check              a small net, as CI does
    scripts/benchmark.sh steps --net my_module:my_function --device operators

Small nets step on a CPU, operator by operator; the plans of upstream's budgets are those of
fake tensors, but for nets with dropout. Others, at real size and with all their layers, are
compiled by inductor's schedule for an H100, and so is the loss (see kernels --help). Beside
the StepBudget's plans (blocks, and held: at the peaks of the others) stand eager mode, a
budget of upstream's for each block (saved), and checkpoints around each block: full ones,
and at real size selective ones that save attention and every second product. The last of the
project's nets is trained as torchtitan trains it: FSDP2 over 8 ranks, of which one is looked
at, bf16 where it computes, AdamW, 2 x 8,192 tokens. The exit status is 1 if a plan is over
what is allowed without a warning.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import fresh, kernels, nets
from benchmarks.catalogue import HELD_OUT, names, PROJECT
from benchmarks.kernels import Kinds, planned, SHARES
from benchmarks.pages import Row
from benchmarks.plans import CHECKPOINTS, RUN, SWEEP


# Those whose blocks repeat.
SMALL = {
    PROJECT: ("llama-8", "bert", "moe", "hf-t5_small"),
    HELD_OUT: ("seed-oss-small", "deberta-small", "m2m100-small", "w2v-bert-small"),
}
AT_SIZE = {
    PROJECT: names(nets.WHOLE),
    HELD_OUT: ("deberta", "w2v-bert", "siglip"),
}
NETS = {
    **{of: (*SMALL[of], *AT_SIZE[of]) for of in SMALL},
    "check": ("llama-4",),
}
BY_OPERATORS: Kinds = {
    "saved": SWEEP,
    "eager": (),
    CHECKPOINTS[0]: (),
    "blocks": SHARES,
    "held": (),
}
SCHEDULED: Kinds = {
    "saved": SWEEP[::4],
    "eager": (),
    CHECKPOINTS[0]: (),
    CHECKPOINTS[1]: (),
    "blocks": SHARES,
    "held": (),
}
CHECKED: Kinds = {"saved": (0.5,), "blocks": (1.0, 0.0), "held": ()}


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    at_size = {net for some in AT_SIZE.values() for net in some}
    for net in asked.nets:
        if asked.check:
            yield from planned(net, CHECKED, RUN, rows)
            continue
        device = asked.device or ("h100" if net in at_size else RUN)
        if device == RUN:
            yield from planned(net, BY_OPERATORS, RUN, rows)
        elif torch.version.cuda is not None:
            yield from planned(net, SCHEDULED, device, rows)


measure, judged, page = kernels.measure, kernels.judged, kernels.page
