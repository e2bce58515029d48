"""Programs that train by a StepBudget in their own loops: trainers and two ranks."""

import functools
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import nets
from benchmarks.architectures import ClassicShape
from benchmarks.libraries import with_inputs
from benchmarks.pages import Row
from benchmarks.watched import budget_of, SHARE, summed_up, trained, watched
from benchmarks.ways import blocks_of, compiled, OPERATORS, Training


# ------------------------------------------------------------------ trainer


ROWS, LENGTH, STEPS = 8, 128, 12
SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
}


class Watched(transformers.TrainerCallback):  # type: ignore[misc]
    """Each step of a Trainer within a budget."""

    def __init__(self) -> None:
        self.budget = budget_of(SHARE)
        self.found: list[Row] = []
        self.step = ExitStack()

    def on_step_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
        states = [v for state in optimizer.state.values() for v in state.values()]
        there = [*model.parameters(), *model.buffers(), *states]
        there += [p.grad for p in model.parameters()]
        self.found.append(self.step.enter_context(watched(self.budget, there)))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.step.close()


def compiled_by_operators() -> Any:
    """Whatever backend the libraries ask for."""
    compile_any = torch.compile

    def compile_this(*args: Any, **options: Any) -> Any:
        return compile_any(*args, **{**options, "backend": OPERATORS})

    return mock.patch.object(torch, "compile", compile_this)


def by_trainer(loop: str, way: str) -> Row:
    """A Trainer's steps, with blocks, regions of accelerate's, or the model compiled."""
    torch.manual_seed(nets.SEED)
    sizes = nets.sized(64, 160, 4, 4)
    model = with_inputs("LlamaForCausalLM", vocab_size=512, **sizes).model
    model = nets.with_lora(model) if loop == "peft" else model
    for layer in blocks_of(model) if way == "blocks" else ():
        layer.compile(backend=OPERATORS)
    count = 4 * ROWS - (3 if loop == "last batch" else 0)
    tokens = torch.randint(512, (count, LENGTH))
    data = [{"input_ids": each, "labels": each} for each in tokens]
    steps, regional = Watched(), {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "1"}
    with (
        tempfile.TemporaryDirectory() as folder,
        compiled_by_operators(),
        mock.patch.dict(os.environ, regional if way == "regional" else {}),
    ):
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            max_steps=STEPS,
            torch_compile=way != "blocks",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **SETTINGS.get(loop, {}),
        )
        transformers.Trainer(
            model,
            arguments,
            train_dataset=data,
            callbacks=[steps],
        ).train()
    return summed_up(steps.found)


# -------------------------------------------------------------------- ranks


RANKS = 2
SHAPE = ClassicShape(width=128, mlp=512, layers=4, tokens=128, batch=ROWS)
NET = nets.language("ranks", SHAPE)


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
    row = trained(PARALLEL[loop](training, number, way), training, SHARE, STEPS)
    dist.barrier()
    dist.destroy_process_group()
    return row


Step = Callable[[], Any]


def replicated(training: Training, _number: int, way: str) -> Step:
    model: Any = nn.parallel.DistributedDataParallel(training.module)
    training.forward = compiled(OPERATORS)(model) if way == "whole" else model
    return lambda: training.loss().backward()


def sharded(training: Training, _number: int, _way: str) -> Step:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (*training.blocks, training.module):
        fully_shard(part, mesh=mesh)
    return lambda: training.loss().backward()


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
    return lambda: training.loss().backward()


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
    if number:
        return functools.partial(schedule.step, target=wanted)
    return functools.partial(schedule.step, inputs)


PARALLEL: dict[str, Callable[[Training, int, str], Step]] = {
    "ddp": replicated,
    "fsdp2": sharded,
    "tensor parallel": split_by_columns,
    "pipeline": piped,
}


MEASURED = {"hf-trainer": by_trainer, "two ranks": in_ranks}
