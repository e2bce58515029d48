"""Two ranks that train by a StepBudget in torch's parallel ways, by gloo."""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, Tensor
from torch._functorch import config
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import nets
from benchmarks.architectures import ClassicShape
from benchmarks.meters import gradients
from benchmarks.pages import Row
from benchmarks.turns import budget_of, SHARE, summed_up, watched
from benchmarks.ways import compiled, OPERATORS, Training


RANKS, ROWS, LENGTH, STEPS = 2, 8, 128, 12
NET = nets.classic("ranks", ClassicShape(width=128, layers=4, tokens=128), ROWS)


def in_ranks(loop: str, way: str) -> Row:
    """The worst steps of two processes."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, processes.Pool(RANKS) as pool:
        place = f"file://{Path(folder, 'ranks')}"
        ranks = [(number, place, loop, way) for number in range(RANKS)]
        # One may wait forever for the other, if that fails.
        rows = pool.starmap_async(rank, ranks, chunksize=1).get(timeout=300)
    worst = {what: max(row["worst"][what] for row in rows) for what in rows[0]["worst"]}
    warnings = [text for row in rows for text in row["warnings"]]
    return {
        "worst": worst,
        "trace": " ".join(row["trace"] for row in rows),
        "warned": sum(row["warned"] for row in rows),
        "warnings": [*dict.fromkeys(warnings)],
    }


def rank(number: int, place: str, loop: str, way: str) -> Row:
    torch.set_num_threads(1)
    wait = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=place, rank=number, world_size=RANKS, timeout=wait
    )
    training = Training(NET, blocks=compiled(OPERATORS) if way == "blocks" else ())
    step, parameters = PARALLEL[loop](training, number, way)
    budget, found = budget_of(SHARE), []
    there = [*training.module.parameters(), *training.inputs]
    with config.patch(enable_autograd_cache=False):
        for _ in range(STEPS):
            with watched(budget, [*there, *parameters]) as row:
                step()
            gradients(parameters)
            found.append(row)
    dist.barrier()
    dist.destroy_process_group()
    return summed_up(found)


Step = tuple[Callable[[], Any], list[Tensor]]


def replicated(training: Training, _number: int, way: str) -> Step:
    model: Any = nn.parallel.DistributedDataParallel(training.module)
    training.forward = compiled(OPERATORS)(model) if way == "whole" else model
    return lambda: training.loss().backward(), training.parameters


def sharded(training: Training, _number: int, _way: str) -> Step:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (*training.blocks, training.module):
        fully_shard(part, mesh=mesh)
    return lambda: training.loss().backward(), [*training.module.parameters()]


def split_by_columns(training: Training, _number: int, _way: str) -> Step:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        parallelize_module,
        RowwiseParallel,
    )

    mesh = init_device_mesh("cpu", (RANKS,))
    for block in training.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return lambda: training.loss().backward(), [*training.module.parameters()]


def piped(training: Training, number: int, _way: str) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    module: Any = training.module
    half = len(training.blocks) // 2
    mine = training.blocks[half:] if number else training.blocks[:half]
    part = nn.Sequential(*mine, *([module.head] if number else []))
    stage = PipelineStage(part, number, RANKS, torch.device("cpu"))

    def loss(found: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(found.flatten(0, 1), wanted.flatten())

    schedule = Schedule1F1B(stage, 4, loss_fn=loss)
    inputs = torch.randn(ROWS, LENGTH, 128)
    _, wanted = training.inputs
    step = (
        functools.partial(schedule.step, target=wanted)
        if number
        else functools.partial(schedule.step, inputs)
    )
    return step, [*part.parameters()]


PARALLEL: dict[str, Callable[[Training, int, str], Step]] = {
    "ddp": replicated,
    "fsdp2": sharded,
    "tensor parallel": split_by_columns,
    "pipeline": piped,
}
