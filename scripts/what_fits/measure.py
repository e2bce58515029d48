"""What a way to train a model holds and takes with one batch; a process of its own.

A task has a ``batch``, a ``length``, what the command was ``_asked``, and a ``way``:

    upstream    the untouched wheel, by budgets of saved bytes; the first is none at all
    this set    by shares of the way from the lowest peak to that, and by ``memory``

Each step of its row is of a plan: ``given`` bytes are there when a step starts
(parameters, inputs, what the optimizer keeps), and ``peak`` more are live at once while it
runs, gradients and the optimizer's own steps included. Tensors are fakes.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import replace

import torch
from benchmarks import fresh, nets, plans, sharding
from benchmarks.pages import Row
from benchmarks.ways import Training


UPSTREAM, OURS = "upstream", "this set"
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
        training = sharding.sharded(training)
    # As torch chooses where parameters are on a GPU.
    options = {"foreach": True} if asked["gpu"] and not asked["fsdp"] else {}
    make = getattr(torch.optim, asked["optimizer"])
    training.optimizer = make(training.parameters, lr=1e-3, **options)
    return training


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    return {"steps": steps_of(task)}


def steps_of(task: fresh.Task, of: type[plans.Plans] = plans.Plans) -> list[Row]:
    """Of plans on fake tensors, or of another kind with values."""
    asked = task["_asked"]
    device, in_blocks = asked["gpu"] or plans.RUN, asked["blocks"] is not None
    with ExitStack() as stack:
        if asked["fsdp"]:
            stack.enter_context(sharding.fake_ranks(asked["fsdp"]))
        backend = stack.enter_context(plans.backend_of(device))
        if asked["compile_loss"]:
            stack.enter_context(plans.compiled_loss(backend))
        prepare = functools.partial(prepared, asked)
        is_fake = of is plans.Plans
        found = of(net_of(task), device, backend, is_fake, prepare)
        if task["way"] == UPSTREAM:
            return found.upstreams(BUDGETS, in_blocks)
        kind = "blocks" if in_blocks else "graph"
        steps = [*found.asked(kind, [{"share": share} for share in SHARES])]
        left = (asked["memory"] or 0) - steps[0]["given"]
        if left > 0:
            steps += found.asked(kind, [{"peak_bytes": left}])
        return steps
