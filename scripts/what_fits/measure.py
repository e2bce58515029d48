"""What a way to train a model holds and takes with one batch; a process of its own.

A task has a ``batch``, a ``length``, what the command was ``_asked``, and a ``way``:

    upstream    the untouched wheel, by budgets of saved bytes; the first is none at all
    this set    by shares of the way from the lowest peak to that, and by ``memory``
    checkpoint, saving products    around each block, which is compiled

Each step of its row is of a plan: ``given`` bytes are there when a step starts
(parameters, inputs, what the optimizer keeps), and ``peak`` more are live at once while it
runs, gradients and the optimizer's own steps included. Tensors are fakes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from benchmarks import blocks, fresh, nets, plans
from benchmarks.pages import Row
from benchmarks.ways import Training
from torch.utils._python_dispatch import TorchDispatchMode


UPSTREAM, OURS = "upstream", "this set"
# Attention and one of so many products is saved.
CHECKPOINTS = {"checkpoint": 0, "saving products": 1}
BUDGETS = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.0)
SHARES = (1.0, 0.5, 0.2, 0.1, 0.0)


def net_of(task: fresh.Task) -> nets.Net:
    """ValueError says what is wrong with the model, its batch or its blocks."""
    asked = task["_asked"]
    sizes = [task[size] for size in ("batch", "length") if task[size] is not None]
    net = nets.find(asked["model"], *sizes, **dict(asked["config"]))
    dtype = getattr(torch, asked["dtype"])
    return replace(net, dtype=dtype, blocks=asked["blocks"] or net.blocks)


def prepared(asked: Row, training: Training) -> Training:
    """With its optimizer, and sharded, where it is to be."""
    if asked["fsdp"]:
        training = blocks.sharded(training)
    # As torch chooses where parameters are on a GPU.
    options = {"foreach": True} if asked["gpu"] and not asked["fsdp"] else {}
    make = getattr(torch.optim, asked["optimizer"])
    training.optimizer = make(training.parameters, lr=1e-3, **options)
    return training


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    is_random = task["way"] == UPSTREAM and draws(net_of(task))
    return {"steps": steps_of(task), "random": is_random}


class _Draws(TorchDispatchMode):
    """Whether an operator draws random numbers; attention says so even without dropout."""

    seen: bool = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_seeded = torch.Tag.nondeterministic_seeded in func.tags
        self.seen |= is_seeded and "attention" not in func.__name__
        return func(*args, **(kwargs or {}))


def draws(net: nets.Net) -> bool:
    """Whether its forward draws random numbers: upstream's plans may draw them twice."""
    mode, module, inputs = net.fake()
    found = _Draws()  # type: ignore[no-untyped-call]
    with mode, found:
        module(*inputs)
    return found.seen


def steps_of(task: fresh.Task, kind: type[plans.Plans] = plans.Plans) -> list[Row]:
    """Of plans on fake tensors, or of another kind with values."""
    asked = task["_asked"]
    device, in_blocks = asked["gpu"] or plans.RUN, asked["blocks"] is not None
    with ExitStack() as stack:
        if asked["fsdp"]:
            stack.enter_context(blocks.fake_ranks(asked["fsdp"]))
        backend = stack.enter_context(plans.backend_of(device))
        if asked["compile_loss"]:
            stack.enter_context(plans.compiled_loss(backend))
        prepare = functools.partial(prepared, asked)
        is_fake = kind is plans.Plans
        found = kind(net_of(task), device, backend, is_fake, prepare)
        if task["way"] == UPSTREAM:
            return found.upstreams(BUDGETS, in_blocks)
        if task["way"] in CHECKPOINTS:
            return [found.checkpointed(CHECKPOINTS[task["way"]])]
        return [*by_this_set(found, asked["memory"] or 0, in_blocks)]


def by_this_set(found: plans.Plans, memory: int, in_blocks: bool) -> Iterator[Row]:
    shares: list[Row] = [{"share": share} for share in SHARES]
    if in_blocks:
        steps = [*found.of_steps("blocks", shares)]
    else:
        steps = [{**each, **found.by_peak(each["share"])} for each in shares]
    yield from steps
    left = memory - steps[0]["given"]
    if left <= 0:
        return
    if in_blocks:
        steps = [*found.of_steps("blocks", [{"peak_bytes": left}])]
    else:
        steps = [{"peak_bytes": left, **found.within(left)}]
    yield from steps
