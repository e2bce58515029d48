"""A StepBudget at real size: blocks compiled one by one by inductor, for a GPU.

    TORCH_VERSION=2.15.0 scripts/benchmark.sh blocks
    TORCH_VERSION=2.15.0 scripts/benchmark.sh blocks --net llama3-8b-fsdp

Whole training steps run on fake tensors, without a GPU: each block and the loss are
compiled for it up to their kernels, and what inductor's wrappers allocate is followed
together with what runs in eager mode, as `scripts/benchmark.sh schedule` does for one graph.
The last net is trained as torchtitan trains it: FSDP2 over 8 ranks, of which one is
looked at, bf16 where it computes, AdamW, 2 x 8,192 tokens. Beside the budget for the step
stand each block's own budgets of saved bytes, which are upstream's, swept on the untouched
wheel, and checkpoints around each block: full ones, and selective ones that save attention
and every second product.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import bounds, fresh, nets, plans, step, sweep
from benchmarks.architectures import Transformer
from benchmarks.pages import Row
from benchmarks.ways import Training


NETS = tuple(net.name for net in nets.WHOLE)
NEEDS_CUDA = True
RANKS = 8
KIND, KEY, LIMITS = plans.KIND, plans.KEY, step.LIMITS


def tasks(
    names: Optional[Sequence[str]], check: bool, rows: Sequence[Row]
) -> Iterator[fresh.Task]:
    kinds: dict[str, Sequence[float]] = {"saved": sweep.BUDGETS}
    kinds.update(dict.fromkeys(plans.CHECKPOINTS, ()))
    kinds.update({"blocks": step.SHARES, "held": ()})
    yield from plans.tasks(names or NETS, kinds, "h100", rows)


def measure(task: fresh.Task) -> Row:
    prepare = sharded if task["net"] == nets.SHARDED.name else plans.as_it_is
    with fake_ranks(RANKS):
        return plans.measure(task, prepare)


def sharded(training: Training) -> Training:
    """As torchtitan trains it, over all ranks; storages of fakes."""
    dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrap = functools.partial(fully_shard, mesh=mesh, mp_policy=dtypes)
    module: Any = training.module
    with training.mode:
        for block in training.blocks:
            wrap(block)
        inner = module.module if isinstance(module, nets.LossOf) else module
        if isinstance(inner, Transformer):
            wrap([inner.norm, inner.head], reshard_after_forward=False)
        wrap(module)
        training.parameters = list(module.parameters())
        training.optimizer = torch.optim.AdamW(training.parameters)
    return training


@contextmanager
def fake_ranks(number: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


judged, page, plot = bounds.judged, bounds.page, bounds.plot
