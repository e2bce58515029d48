"""The budget that means peak memory, operator by operator, beside upstream's.

    scripts/benchmark.sh operators
    scripts/benchmark.sh operators --check          a small net, as CI does
    scripts/benchmark.sh operators --net my_module:my_function

Small nets in float32, each as one graph: by target "peak", and by the untouched wheel's
budgets from 0 to 1; beside them eager mode, and a checkpoint around each block. Steps run
on a CPU, and the bytes of live storages are counted by weak references, without parameters
and inputs; upstream's are those of fake tensors, but for nets with dropout. The exit status
is 1 if a plan is over what is allowed without a warning, or gradients are not those of
budget 1.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import fresh, kernels
from benchmarks.catalogue import HELD_OUT, PROJECT
from benchmarks.kernels import CHECKED, Kinds, planned, SHARES
from benchmarks.pages import Row
from benchmarks.plans import CHECKPOINTS, RUN, SWEEP


# A part of each set: every net takes minutes.
NETS = {
    PROJECT: ("llama-8", "bert", "unet"),
    HELD_OUT: (
        *("albert-small", "falcon-h1-small", "hiera-small", "lw-detr-small"),
        *("m2m100-small", "w2v-bert-small"),
    ),
    "check": ("llama-4",),
}
KINDS: Kinds = {
    "upstream": SWEEP,
    "eager": (),
    CHECKPOINTS[0]: (),
    "graph": SHARES,
}


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    for net in asked.nets:
        yield from planned(net, CHECKED if asked.check else KINDS, RUN, rows)


measure, judged, page = kernels.measure, kernels.judged, kernels.page
