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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import torch
import torch._functorch.config as config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from benchmarks import fresh, nets, step
from benchmarks.pages import Row, SIMULATED
from benchmarks.replay import compiled_for, GPUS
from benchmarks.tracing import overlay
from benchmarks.ways import checkpointed, compiled, Training, Ways


NETS = nets.WHOLE
NEEDS_CUDA = True
RANKS = 8
GPU = "h100"
KIND, KEY = "backend", ("net",)
LIMITS = step.LIMITS
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)


def tasks(names: Optional[Sequence[str]], check: bool) -> Iterator[fresh.Task]:
    for name in names or NETS:
        task = {"net": name, "backend": "inductor", "shares": step.SHARES}
        yield {**task, "checkpoints": True, "_saved": step.SAVED}


# ------------------------------------------------------------ in a fresh process


def every_second_product() -> Any:
    """Contexts of a checkpoint that saves attention and every second product."""
    products = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        is_saved = operator in ATTENTION
        if operator in PRODUCTS:
            again = context.is_recompute
            products[again] += 1
            is_saved = products[again] % 2 == 1
        if is_saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def in_compiled_blocks(backend: Any, **options: Any) -> Ways:
    return checkpointed(**options), compiled(backend)


CHECKPOINTS: dict[str, Callable[[Any], Ways]] = {
    "checkpoint": in_compiled_blocks,
    "selective checkpoint": functools.partial(
        in_compiled_blocks, context_fn=every_second_product
    ),
}


@contextmanager
def compiled_loss(backend: Any) -> Iterator[None]:
    """F.cross_entropy is compiled, too."""
    original = F.cross_entropy
    loss = torch.compile(original, backend=backend)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        # Its graph finds what it calls by name.
        with mock.patch.object(F, original.__name__, original):
            found: Tensor = loss(*args, **kwargs)
            return found

    with mock.patch.object(F, original.__name__, call):
        yield


def sharded(training: Training) -> Training:
    """As torchtitan trains it; storages of fakes."""
    dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("cpu", (RANKS,))
    wrap = functools.partial(fully_shard, mesh=mesh, mp_policy=dtypes)
    module: Any = training.module
    with training.mode:
        for block in training.blocks:
            wrap(block)
        wrap([module.norm, module.head], reshard_after_forward=False)
        wrap(module)
        training.parameters = list(module.parameters())
        training.optimizer = torch.optim.AdamW(training.parameters)
    return training


def on_fakes(**asked: Any) -> Any:
    """A StepBudget for fakes, whose storages are no device's."""
    budget = overlay("step_budget").StepBudget(**asked)
    budget.device = torch.device("meta")
    return budget


@contextmanager
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    net = NETS[task["net"]]
    is_upstreams = task.get("torch") == fresh.UNTOUCHED
    saved = [] if is_upstreams else step.upstreams(__name__, task)

    def make(ways: Ways) -> Training:
        training = Training(net, blocks=ways, fake=True)
        return sharded(training) if net is nets.SHARDED else training

    with (
        fake_ranks(),
        compiled_for(GPUS[GPU]) as backend,
        compiled_loss(backend),
        config.patch(enable_autograd_cache=False),
    ):
        if is_upstreams:
            return step.measure_upstream(make, backend, task["_saved"])
        checkpoints = CHECKPOINTS if task.get("checkpoints") else {}
        return step.measure_steps(make, backend, task, saved, checkpoints, on_fakes)


# ------------------------------------------------------------------- report


judged = step.judged
CAPTION = f"Blocks compiled one by one, inductor's schedules for {GPUS[GPU].name}. "


def page(data: dict[str, Any]) -> str:
    return step.page(data, CAPTION, SIMULATED)


def plot(data: dict[str, Any], result: Path) -> None:
    step.plot(data, result, SIMULATED)
