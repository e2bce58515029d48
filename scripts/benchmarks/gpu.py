"""What plans hold and take on the GPU of this machine, beside torch as it is.

    scripts/benchmark.sh gpu
    scripts/benchmark.sh gpu --device inductor --net vit     by kernels on the CPU

The torch is the one that `python3` has, 2.11 or newer, or that of the Python in APPLY_PYTHON:
its Python files are copied into build/ and patched there, and nothing is fetched. Peaks are
the allocator's, times medians of several steps, and gradients are compared with those of
budget 1. For the kinds of plans see kernels --help. The exit status is 1 if a plan is over
what is allowed without a warning.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import fresh, kernels
from benchmarks.kernels import Kinds, planned, SHARES
from benchmarks.pages import Row


# Those that a card of 24 GB has room for, without dropout, which draws other numbers where
# kernels are others.
NETS = ("vit-l-4", "llama3-8b-4", "qwen-moe-4")
KINDS: Kinds = {
    "upstream": (1.0, 0.75, 0.5, 0.25, 0.125, 0.0),
    "graph": SHARES,
    "blocks": (0.2, 0.0),
}


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    if asked.device == "cuda" and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} of {sys.executable} sees no GPU here; name "
            "another Python in APPLY_PYTHON, or try --device inductor",
            file=sys.stderr,
        )
        raise SystemExit(2)
    for net in asked.nets:
        yield from planned(net, KINDS, asked.device, rows)


measure, judged, page = kernels.measure, kernels.judged, kernels.page
