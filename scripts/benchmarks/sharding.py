"""FSDP2 on one of many ranks, which need not be there."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import nets
from benchmarks.architectures import Transformer
from benchmarks.ways import Training


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
