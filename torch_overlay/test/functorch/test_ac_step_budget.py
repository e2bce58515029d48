# Owner(s): ["module: functorch"]
"""A budget for a training step whose parts are compiled by themselves.

Every peak is measured on the running step: storages are followed by weak references,
inside of the graphs too.
"""

import contextlib
import gc
import logging
import math
import os
import re
import subprocess
import sys
import threading
import unittest
import weakref
from datetime import timedelta
from unittest import mock

from test_ac_peak_budget import in_two_ranks, needs_two_ranks

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config, partitioners
from torch._functorch._activation_checkpointing import graph_calls, saved_report
from torch._functorch._activation_checkpointing.step_budget import StepBudget
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor_config
from torch._inductor.pattern_matcher import joint_fwd_bwd
from torch._inductor.utils import fresh_cache
from torch.autograd.graph import region_activation_memory_budget as region
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    TorchDispatchMode,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


aten = torch.ops.aten
AOT = "aot_eager_decomp_partition"
PLACE = "torch._functorch._activation_checkpointing"
WIDTH, BATCH = 64, 256


class Block(nn.Module):
    def __init__(self, width=WIDTH, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x):
        inner = F.gelu(self.up(self.norm(x)))
        return x + self.down(F.dropout(inner, self.dropout, self.training))


class Gated(nn.Module):
    """Four products of one size, and two larger ones."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        inner = self.norms[0](x)
        gate, key, value = (product(inner) for product in self.products[:3])
        mixed = value * torch.sigmoid(gate * key)
        x = self.norms[1](x + self.products[3](mixed))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks, compiled one by one, between parts that run in eager mode."""

    def __init__(self, blocks=4, backend=AOT, dropout=0.0, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 8)
        if backend is not None:
            for block in self.blocks:
                block.compile(backend=backend, **options)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), x.detach()[:, :8].argmax(1))


def batch(rows=BATCH, seed=1):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def gated():
    model = Net(backend=None)
    model.blocks = nn.ModuleList(Gated() for _ in range(4))
    for block in model.blocks:
        block.compile(backend=AOT)
    return model


def local(tensor):
    """What this rank has of it."""
    return getattr(tensor, "_local_tensor", tensor)


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages that were live at once beyond those at the start.

    And what its matrix products take.
    """

    supports_higher_order_operators = True

    def __init__(self, there):
        super().__init__()
        self.live = self.peak = self.flops = 0
        self.known = {}
        for tensor in there:
            self.follow(tensor, given=True)

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def resize_and_follow(storage, size):
            self.follow_storage(storage, given=True)
            resize(storage, size)
            self.follow_storage(storage)
            return storage

        # As sharded parameters do when they are gathered and given up.
        self.resizing = mock.patch.object(
            torch.UntypedStorage, "resize_", resize_and_follow
        )
        self.resizing.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.resizing.stop()
        return super().__exit__(*error)

    def follow(self, tensor, given=False):
        self.follow_storage(local(tensor).untyped_storage(), given)

    def follow_storage(self, storage, given=False):
        key, nbytes = storage._cdata, storage.nbytes()

        def died(_):
            _, given, nbytes = self.known.pop(key)
            self.live -= nbytes - given

        if key not in self.known:
            # What was given, or made out of sight, is no gain when it goes.
            reference = weakref.ref(storage, died)
            self.known[key] = reference, nbytes if given else 0, nbytes if given else 0
        reference, given, before = self.known[key]
        self.known[key] = reference, given, nbytes
        self.live += nbytes - before
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for value in tree_leaves((args, kwargs)):
            # What a function makes of a Python number is new.
            if isinstance(value, torch.Tensor) and "lift_fresh" not in str(func):
                self.follow(value, given=True)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.follow(value)
        if func in (aten.mm.default, aten.addmm.default):
            self.flops += result.numel() * args[-1].shape[0]
        return result


def train(model, *batches):
    for each in batches:
        model(each).backward()


def steps(budget, model, *batches, train=train, count=2):
    """Some steps; returns the gradients of the last one."""
    for _ in range(count):
        model.zero_grad()
        torch.manual_seed(0)
        with budget:
            train(model, *batches)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def recorded(budget, model, *batches, train=train):
    """One more step."""
    model.zero_grad()
    gc.collect()
    torch.manual_seed(0)
    with budget, LiveBytes([*model.parameters(), *batches]) as recorder:
        train(model, *batches)
    return recorder


def measured(*step, **options):
    """The peak of one more step."""
    return recorded(*step, **options).peak


# Of training in two processes.
WAYS = ("replicas", "sharded", "tensors", "pipeline")


class Stage(nn.Sequential):
    """One of two stages of a pipeline, the second with another graph; see `rank`."""

    def __init__(self, number):
        blocks = Net(3 + number).blocks
        super().__init__(*blocks, *([nn.Linear(WIDTH, 8)] if number else []))
        self.number = number
        self.schedule = None

    def train_step(self, x):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        if self.schedule is None:
            stage = PipelineStage(self, self.number, 2, torch.device("cpu"))
            self.schedule = Schedule1F1B(stage, 4, loss_fn=F.cross_entropy)
        if self.number:
            self.schedule.step(target=x.argmax(1) % 8)
        else:
            self.schedule.step(x)


def rank(number, place):
    """What a StepBudget does in one of two processes, for each of three ways."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{place}",
        rank=number,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    try:
        return {way: step_of_rank(number, way) for way in WAYS}
    finally:
        torch.distributed.destroy_process_group()


def step_of_rank(number, way):
    def make():
        torch._dynamo.reset()
        if way == "pipeline":
            return Stage(number)
        if way == "sharded":
            from torch.distributed.fsdp import fully_shard

            model = Net()
            mesh = torch.distributed.init_device_mesh("cpu", (2,))
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh)
            return model
        if way == "tensors":
            from torch.distributed.tensor.parallel import (
                ColwiseParallel,
                parallelize_module,
                RowwiseParallel,
            )

            model = Net()
            mesh = torch.distributed.init_device_mesh("cpu", (2,))
            for block in model.blocks:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh, plan)
            return model
        return nn.parallel.DistributedDataParallel(Net())

    def train_one(model, x):
        train_step = getattr(model, "train_step", None)
        train_step(x) if train_step else train(model, x)

    is_same = way in ("pipeline", "tensors")
    x = batch(4 * BATCH, seed=1 if is_same else number)
    before = unbudgeted(make(), x, train=train_one)
    model, budget = make(), StepBudget(share=0.2)
    gradients = steps(budget, model, x, train=train_one)
    peak = measured(budget, model, x, train=train_one)
    return {
        "peak": peak,
        "predicted": budget.plan.predicted_peak,
        "allowed": budget.plan.allowed,
        "same": all(torch.equal(local(a), local(b)) for a, b in zip(gradients, before)),
        "budget": str(budget),
    }


def unbudgeted(model, *batches, train=train):
    with config.patch(enable_autograd_cache=False):
        return steps(contextlib.nullcontext(), model, *batches, train=train)


def fork_in_a_step():
    """Both processes train in a budget; exits with 0 if both have a plan."""
    budget = StepBudget(share=0.2)
    with budget:
        child = os.fork()
        if child == 0:
            budget = StepBudget(share=0.2)
    steps(budget, Net(), batch(), count=3)
    status = 0 if child == 0 else os.waitpid(child, 0)[1]
    os._exit(int(status != 0 or budget.plan is None))


class StepBudgetTest(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()

    def check(self, make, *batches, train=train, shares=(0.2,), close=0.01):
        """Peaks, gradients and the order of shares; returns the plans."""
        before = unbudgeted(make(), *batches, train=train)
        peaks, plans = [], []
        for share in shares:
            torch._dynamo.reset()
            model, budget = make(), StepBudget(share=share)
            gradients = steps(budget, model, *batches, train=train)
            self.assertEqual(gradients, before, rtol=0, atol=0)
            with self.assertNoLogs("torch._functorch", "WARNING"):
                peaks.append(measured(budget, model, *batches, train=train))
            plan = budget.plan
            self.assertLessEqual(peaks[-1], 1.005 * plan.allowed)
            self.assertLessEqual(
                abs(peaks[-1] - plan.predicted_peak), close * peaks[-1]
            )
            plans.append(plan)
        self.assertEqual(peaks, sorted(peaks))
        self.assertEqual(len({plan.floor for plan in plans}), 1)
        return plans

    def test_blocks(self):
        plans = self.check(Net, batch(), shares=(0.0, 0.4, 1.0))
        self.assertLess(plans[0].floor, 0.9 * plans[0].unbudgeted)
        (use,) = plans[0].graphs
        self.assertEqual((use.calls, len(use.kept)), (4, 4))

    def test_dropout(self):
        self.check(lambda: Net(dropout=0.2), batch())

    def test_accumulation(self):
        self.check(Net, batch(), batch(seed=2))

    def test_micro_batches_in_flight(self):
        def train(model, *batches):
            # As pipelines do it: one forward, one backward, two in flight.
            waiting = []
            for each in batches:
                waiting.append(model(each))
                if len(waiting) == 2:
                    waiting.pop(0).backward()
            waiting.pop().backward()

        plans = self.check(Net, *(batch(seed=s) for s in range(3)), train=train)
        self.assertEqual(len(plans[0].graphs[0].kept), 8)

    def test_checkpointed_blocks(self):
        class Checkpointed(Net):
            def forward(self, x):
                x = self.embed(x)
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
                return self.head(x).square().mean()

        self.check(Checkpointed, batch(), close=0.1)

    def test_checkpoints_inside_of_compiled_blocks(self):
        # A random operator that runs twice is inside of a higher-order one.
        class Checkpointed(Block):
            def forward(self, x):
                return checkpoint(super().forward, x, use_reentrant=False)

        def make():
            model = Net(8, dropout=0.2, backend=None)
            for block in model.blocks:
                # Gradients would be more than what waits for the backward.
                block.requires_grad_(False)
                block.__class__ = Checkpointed
                block.compile(backend=AOT)
            return model

        # Of few rows, the generator's states are a good part of what is kept.
        for rows in (BATCH, 16):
            self.check(make, batch(rows))

    def test_two_kinds_of_graphs(self):
        def make():
            model = Net(3)
            model.blocks.append(Block(4 * WIDTH))
            model.blocks.insert(3, nn.Linear(WIDTH, 4 * WIDTH))
            model.blocks.append(nn.Linear(4 * WIDTH, WIDTH))
            model.blocks[4].compile(backend=AOT)
            return model

        (plan,) = self.check(make, batch())
        self.assertEqual([use.calls for use in plan.graphs], [3, 1])

    def test_graph_break(self):
        def make():
            model = Net(backend=None)
            forward = model.blocks[2].forward

            def broken(x):
                torch._dynamo.graph_break()
                return forward(x)

            model.blocks[2].forward = broken
            model.compile(backend=AOT)
            return model

        self.assertGreater(len(self.check(make, batch())[0].graphs), 1)

    def test_one_graph(self):
        def make():
            model = Net(backend=None)
            model.compile(backend=AOT)
            return model

        self.check(make, batch())

    def test_optimizer_states_are_there_from_the_second_step_on(self):
        model, budget = Net(), StepBudget(share=0.2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)

        def train(model, x):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()

        steps(budget, model, batch(), train=train, count=3)
        states = [v for state in optimizer.state.values() for v in state.values()]
        given = sum(t.nbytes for t in (*model.parameters(), *states))
        # And the batch, and what the learning rate was multiplied by.
        self.assertLessEqual(abs(budget.plan.given - given), batch().nbytes + 4096)

    def test_gradients_that_stay(self):
        model, budget = Net(), StepBudget(share=0.0)
        # The peak is where this layer's new gradient is added to the old one.
        model.head = nn.Linear(WIDTH, 4096)
        small = batch(8)
        for _ in range(3):
            with budget:
                train(model, small)
        grads = [p.grad for p in model.parameters()]
        with budget, LiveBytes([*model.parameters(), *grads, small]) as recorder:
            train(model, small)
        predicted = budget.plan.predicted_peak
        self.assertLessEqual(abs(recorder.peak - predicted), 0.01 * predicted)

    @parametrize("limit", ("peak_bytes", "device_bytes"))
    def test_bytes(self, limit):
        reference = StepBudget(share=0.4)
        steps(reference, Net(), batch())
        asked = reference.plan.allowed
        given = reference.plan.given if limit == "device_bytes" else 0
        torch._dynamo.reset()
        model, budget = Net(), StepBudget(**{limit: asked + given})
        steps(budget, model, batch())
        self.assertEqual(budget.plan.allowed, asked + given)
        self.assertLessEqual(measured(budget, model, batch()), asked)
        self.assertEqual(budget.plan.cost, reference.plan.cost)

    def test_bytes_that_cannot_be(self):
        model, budget = Net(), StepBudget(peak_bytes=1000)
        with self.assertLogs("torch._functorch", "WARNING") as logs:
            steps(budget, model, batch(), count=3)
        self.assertEqual(len(logs.output), 1)
        self.assertIn(
            "StepBudget(peak_bytes=1000) may be exceeded: the lowest", logs.output[0]
        )
        self.assertEqual(budget.plan.predicted_peak, budget.plan.floor)

    def test_repeats_no_more_than_blocks_with_budgets_of_saved_bytes(self):
        model = gated()
        with config.patch(activation_memory_budget=0.3):
            unbudgeted(model, batch())
        by_blocks = recorded(contextlib.nullcontext(), model, batch())
        torch._dynamo.reset()
        model, budget = gated(), StepBudget(peak_bytes=by_blocks.peak)
        steps(budget, model, batch())
        by_step = recorded(budget, model, batch())
        self.assertLessEqual(by_step.peak, by_blocks.peak)
        self.assertLessEqual(by_step.flops, by_blocks.flops)

    def test_compiles_once_and_once_more(self):
        model, budget = Net(), StepBudget(share=0.3)
        counters.clear()
        made = []
        with config.patch(joint_custom_pass=lambda graph, _: made.append(1) or graph):
            steps(budget, model, batch(), count=1)
            self.assertEqual(len(made), 1)
            steps(budget, model, batch(), count=1)
            most = len(made)
            self.assertLessEqual(most, 3)
            steps(budget, model, batch(), count=3)
        self.assertEqual(len(made), most)
        self.assertEqual(counters["stats"]["unique_graphs"], 1)

    def test_first_step_is_lean(self):
        model, budget = Net(), StepBudget(share=1.0)
        first = measured(budget, model, batch())
        steps(budget, model, batch())
        self.assertLessEqual(first, 1.1 * budget.plan.floor)

    @parametrize("dynamic", (False, True))
    def test_larger_batch_is_learned(self, dynamic):
        model, budget = Net(dynamic=dynamic), StepBudget(share=0.2)
        steps(budget, model, batch())
        before = budget.plan
        large = batch(3 * BATCH)
        with self.assertLogs("torch._functorch", "WARNING") as logs:
            steps(budget, model, large, count=1)
        self.assertIn("the next step is recorded", logs.output[0])
        steps(budget, model, large)
        self.assertGreater(budget.plan.allowed, 2 * before.allowed)
        peak = measured(budget, model, large)
        self.assertLessEqual(peak, 1.005 * budget.plan.allowed)
        self.assertLessEqual(abs(budget.plan.predicted_peak - peak), 0.1 * peak)

    def test_more_calls_are_learned(self):
        model, budget = Net(), StepBudget(share=0.2)
        steps(budget, model, batch())
        model.blocks.append(model.blocks[0])
        with self.assertLogs("torch._functorch", "WARNING"):
            steps(budget, model, batch(), count=1)
        steps(budget, model, batch())
        self.assertEqual(budget.plan.graphs[0].calls, 5)

    # The second is what the config has for all graphs.
    @parametrize("own", (0.0, 1.0))
    def test_region_budget(self, own):
        class Region(Block):
            def forward(self, x):
                with region(own):
                    return super().forward(x)

        def make():
            model = Net(backend=None)
            for k, block in enumerate(model.blocks):
                block.__class__ = Region if k % 2 else Block
                block.compile(backend=AOT)
            return model

        uses = self.check(make, batch(), shares=(1.0 - own,))[0].graphs
        self.assertEqual([use.cost > 0 for use in uses], [own == 1, own == 0])

    def test_tangent_given_up_before_anything_is_repeated(self):
        class NormBehind(Block):
            def forward(self, x):
                with region(0.5):
                    return self.norm(x + self.down(self.up(x).relu()))

        def make():
            model = Net(2, backend=None)
            for block in model.blocks:
                block.__class__ = NormBehind
                block.compile(backend=AOT)
            return model

        self.check(make, batch(), shares=(1.0,), close=0)

    @unittest.skipIf(not HAS_CPU, "inductor needs a C++ compiler")
    def test_inductor(self):
        with fresh_cache():
            for hits in (False, True):
                torch._dynamo.reset()
                counters.clear()
                model, budget = Net(2, "inductor", dropout=0.1), StepBudget(share=0.0)
                gradients = steps(budget, model, batch())
                self.assertGreater(budget.plan.graphs[0].cost, 0)
                # What plans of a step leave to inductor's cache, it finds again.
                found = counters["inductor"]
                self.assertEqual(found["fxgraph_cache_miss"] == 0, hits)
                self.assertEqual(found["fxgraph_cache_hit"] > 0, hits)
        torch._dynamo.reset()
        with fresh_cache():
            wanted = unbudgeted(Net(2, "inductor", dropout=0.1), batch())
        self.assertEqual(gradients, wanted, rtol=1e-5, atol=1e-6)

    def test_patterns_of_inductor(self):
        # Traced and run in the first step of a process.
        def train(model, x):
            inner = x.clone().requires_grad_()
            joint_fwd_bwd(lambda value: value.sin().cos(), [inner])
            model(x).backward()

        model, budget = Net(), StepBudget(share=0.2)
        with self.assertNoLogs("torch._functorch", "WARNING"):
            steps(budget, model, batch(), train=train, count=1)
            steps(budget, model, batch())
        self.assertEqual(len(budget.plan.graphs), 1)

    def test_outside_of_a_step(self):
        model, budget = Net(), StepBudget(share=0.5)
        steps(budget, model, batch())
        steps(contextlib.nullcontext(), model, batch())
        with torch.no_grad():
            model(batch())
        with self.assertNoLogs("torch._functorch", "WARNING"):
            steps(budget, model, batch())

    def test_compiled_autograd(self):
        def train(model, x):
            with compiled_autograd._enable(torch.compile(backend=AOT)):
                model(x).backward()

        before = unbudgeted(Net(), batch(), train=train)
        torch._dynamo.reset()
        budget = StepBudget(share=0.5)
        with self.assertLogs("torch._functorch", "WARNING") as logs:
            gradients = steps(budget, Net(), batch(), train=train, count=3)
        self.assertEqual(len(logs.output), 1)
        self.assertIn("compiled autograd ran the backwards", logs.output[0])
        self.assertEqual(gradients, before, rtol=0, atol=0)
        torch._dynamo.reset()
        self.check(Net, batch())

    def test_nested_compiled_regions(self):
        run = torch.compiler.nested_compile_region(Block.forward)

        class Nested(Block):
            def forward(self, x):
                return run(self, x)

        def make():
            model = Net(backend=None)
            for block in model.blocks:
                block.__class__ = Nested
            model.compile(backend=AOT)
            return model

        before = unbudgeted(make(), batch())
        torch._dynamo.reset()
        with self.assertLogs("torch._functorch", "WARNING") as logs:
            gradients = steps(StepBudget(peak_bytes=1000), make(), batch(), count=3)
        self.assertEqual(len(logs.output), 2)
        self.assertIn("nested compiled regions", logs.output[0])
        self.assertIn("the lowest peak found", logs.output[1])
        self.assertEqual(gradients, before, rtol=0, atol=0)

    def test_failed_step(self):
        model, budget = Net(), StepBudget(share=0.5)
        with self.assertRaisesRegex(RuntimeError, "failed"), budget:
            model(batch())
            raise RuntimeError("failed")
        steps(budget, model, batch())
        self.assertIsNotNone(budget.plan)

    def test_step_that_is_never_ended(self):
        # As callbacks of a trainer leave it where the step raises.
        resize = torch.UntypedStorage.resize_
        first, budget = StepBudget(share=0.2), StepBudget(share=0.2)
        for left in (first, budget):
            left.__enter__()
            Net()(batch())
        self.assertIsNot(torch.UntypedStorage.resize_, resize)
        model = Net()
        gradients = steps(budget, model, batch())
        self.assertIs(torch.UntypedStorage.resize_, resize)
        self.assertEqual(_get_current_dispatch_mode_stack(), [])
        self.assertLessEqual(
            measured(budget, model, batch()), 1.005 * budget.plan.allowed
        )
        # Its end comes late, and ends nothing.
        with budget:
            first.__exit__(None, None, None)
            model(batch()).backward()
        self.assertEqual(gradients, unbudgeted(Net(), batch()), rtol=0, atol=0)

    def test_loss_of_an_earlier_step(self):
        model, budget, kept = Net(), StepBudget(share=0.5), []
        steps(budget, model, batch())
        with contextlib.suppress(RuntimeError), budget:
            kept.append(model(batch()))
            raise RuntimeError("skip this batch")

        def train(model, x):
            x = model.embed(x)
            for block in model.blocks:
                x = block(x)
                kept.clear()
            model.head(x).sum().backward()

        with self.assertNoLogs("torch._functorch", "WARNING"):
            steps(budget, model, batch(), train=train)

    def test_saved_tensor_hooks(self):
        def train(model, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                loss = model(x)
            loss.backward()

        before = unbudgeted(Net(), batch(), train=train)
        torch._dynamo.reset()
        model, budget = Net(), StepBudget(share=0.2)
        with self.assertLogs("torch._functorch", "WARNING") as logs:
            gradients = steps(budget, model, batch(), train=train)
        self.assertEqual(gradients, before, rtol=0, atol=0)
        self.assertEqual(len(logs.output), 1)
        self.assertIn("saved-tensor hooks are set around", logs.output[0])
        self.assertIn("saved-tensor hooks are set around", str(budget))
        peak = measured(budget, model, batch(), train=train)
        self.assertLessEqual(peak, 1.005 * budget.plan.allowed)

    @parametrize("loss", ("two", "same"))
    def test_two_backwards(self, loss):
        def train(model, x):
            for block in model.blocks:
                x = block(x)
            first = model.head(x).square().mean()
            second = x.cos().sum() if loss == "two" else first
            first.backward(retain_graph=True)
            second.backward()

        (plan,) = self.check(Net, batch(), train=train, close=1)
        self.assertEqual(sum(use.calls for use in plan.graphs), 4)

    def test_wrapper_subclass(self):
        def make():
            model = Net()
            for block in model.blocks:
                weight = block.up.weight.detach()
                block.up.weight = nn.Parameter(
                    TwoTensor(weight.clone(), weight.clone())
                )
            return model

        before = unbudgeted(make(), batch())
        torch._dynamo.reset()
        model, budget = make(), StepBudget(share=0.2)
        with self.assertNoLogs("torch._functorch", "WARNING"):
            gradients = steps(budget, model, batch(), count=3)
        for found, wanted in zip(gradients, before):
            if isinstance(found, TwoTensor):
                found, wanted = found.a, wanted.a
            self.assertEqual(found, wanted, rtol=0, atol=0)
        self.assertGreater(budget.plan.unbudgeted, budget.plan.floor)

    @parametrize("phase", ("forward", "backward"))
    @parametrize("always", (False, True))
    def test_plan_that_does_not_compile(self, phase, always):
        faults = []

        def compiler(of):
            def compile_graph(graph, _):
                if faults and of == phase:
                    if not always:
                        faults.clear()
                    raise RuntimeError("no kernel for this split")
                return make_boxed_func(graph.forward)

            return compile_graph

        backend = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            partition_fn=partitioners.min_cut_rematerialization_partition,
        )
        before = unbudgeted(Net(backend=backend), batch())
        torch._dynamo.reset()
        model, budget = Net(backend=backend), StepBudget(share=0.5)
        steps(budget, model, batch(), count=1)
        faults.append(True)
        with self.assertLogs("torch._functorch", "WARNING") as logs:
            gradients = steps(budget, model, batch(), count=3)
        self.assertEqual(len(logs.output), 1)
        self.assertIn("RuntimeError: no kernel for this split", logs.output[0])
        self.assertEqual(gradients, before, rtol=0, atol=0)

    @parametrize(
        "stage",
        (
            "step_graph.Graph._compiled",
            "step_graph.Graph._find_plans",
            "step_graph.Graph.decide",
            "step_graph.Graph._await_backward",
            "step_recorder.Recorder.follow",
            "step_recorder._Timeline.begin",
            "step_recorder.Recorder.given_later",
            "step_recorder.Recorder.left_behind",
            "step_graph.Step.begin",
            "step_plan.GraphPlans.corrected",
            "step_budget.StepBudget._allowed",
            "step_plan.StepCurve._options",
            "step_plan.StepCurve.within",
        ),
    )
    def test_error_at_a_stage_of_planning(self, stage):
        before = unbudgeted(Net(), batch())
        torch._dynamo.reset()
        fault = mock.patch(f"{PLACE}.{stage}", side_effect=ValueError("injected"))
        model, budget = Net(), StepBudget(share=0.5)
        with self.assertLogs("torch._functorch", "WARNING") as logs, fault:
            gradients = steps(budget, model, batch(), count=4)
        self.assertEqual(gradients, before, rtol=0, atol=0)
        told = [line for line in logs.output if "ValueError: injected" in line]
        self.assertEqual(
            len(told), len({line.partition(" may not ")[2] for line in told})
        )
        self.assertEqual(told, logs.output)
        self.assertIn("injected", str(budget))

    def test_models_that_go(self):
        def modules():
            torch._dynamo.reset()
            gc.collect()
            return sum(isinstance(o, torch.fx.GraphModule) for o in gc.get_objects())

        budget, before = StepBudget(share=0.5), modules()
        for _ in range(2):
            torch._dynamo.reset()
            steps(budget, Net(), batch(), count=3)
        self.assertEqual(modules(), before)

    def test_threads_side_by_side(self):
        # Of one size, they would take each other's graphs from Dynamo's cache.
        batches = [batch(BATCH * (k + 1)) for k in range(3)]
        models = [Net(dynamic=False) for _ in batches]
        budgets = [StepBudget(share=0.2), StepBudget(share=0.2), None]
        barrier = threading.Barrier(len(batches))
        found = {}

        def run(k):
            def train(model, x):
                barrier.wait(120)
                model(x).backward()
                barrier.wait(120)

            budget = budgets[k] or contextlib.nullcontext()
            found[k] = steps(budget, models[k], batches[k], train=train, count=4)

        threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
        resize = torch.UntypedStorage.resize_
        with self.assertNoLogs("torch._functorch", "WARNING"):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertIs(torch.UntypedStorage.resize_, resize)
        for k, x in enumerate(batches):
            wanted = unbudgeted(Net(dynamic=False), x)
            self.assertEqual(found[k], wanted, rtol=0, atol=0)
        alone = [StepBudget(share=0.2) for _ in range(2)]
        for budget, own, x in zip(budgets, alone, batches):
            torch._dynamo.reset()
            steps(own, Net(dynamic=False), x)
            self.assertEqual(budget.plan.allowed, own.plan.allowed)

    @unittest.skipIf(not hasattr(os, "fork"), "forks")
    def test_forked_child(self):
        # In a process of its own, as no child may follow autograd's threads.
        code = "import test_ac_step_budget as test; test.fork_in_a_step()"
        folder = os.path.dirname(os.path.abspath(__file__))
        ran = subprocess.run([sys.executable, "-c", code], cwd=folder)
        self.assertEqual(ran.returncode, 0)

    def test_what_means_nothing(self):
        for message, options in (
            ("share is 2; it must be a number from 0 to 1", {"share": 2}),
            ("share is 'x'", {"share": "x"}),
            ("share is True", {"share": True}),
            ("share is nan", {"share": math.nan}),
            ("peak_bytes is True", {"peak_bytes": True}),
            ("peak_bytes is 0; it must be a positive", {"peak_bytes": 0}),
            ("device_bytes is 1.5", {"device_bytes": 1.5}),
            ("give one of", {"share": 0.5, "peak_bytes": 1}),
        ):
            with self.assertRaisesRegex(ValueError, message):
                StepBudget(**options)
        if not torch.accelerator.is_available():
            with self.assertRaisesRegex(ValueError, "give share, peak_bytes or"):
                StepBudget()

    @parametrize("calls", (None, 4))
    def test_without_a_step_budget(self, calls):
        graph_calls._warn_of_calls.cache_clear()
        options = {
            "activation_memory_budget_target": "peak",
            "activation_memory_budget": 0.0,
            "activation_memory_graph_calls": calls,
            "enable_autograd_cache": False,
        }
        with (
            self.assertLogs("torch._functorch", "WARNING") as logs,
            config.patch(options),
        ):
            logging.getLogger("torch._functorch").warning("the first")
            model = Net()
            steps(contextlib.nullcontext(), model, batch())
            peak = measured(contextlib.nullcontext(), model, batch())
        self.assertEqual(len(logs.output), 2 if calls is None else 1)
        if calls is None:
            self.assertIn("2 calls of 1 graphs wait", logs.output[1])
        budget = StepBudget(share=0.0)
        torch._dynamo.reset()
        steps(budget, model, batch())
        self.assertEqual(peak > 1.05 * budget.plan.floor, calls is None)

    def test_larger_batch_than_one_graph_was_planned_for(self):
        rows, limit = 2048, 14 << 20
        options = {
            "activation_memory_peak_bytes": limit,
            "enable_autograd_cache": False,
        }
        with config.patch(options):
            model = Net(backend=None)
            model.compile(backend=AOT, dynamic=True)
            with self.assertNoLogs("torch._functorch", "WARNING"):
                for count in (rows, rows, rows // 2):
                    peak = measured(contextlib.nullcontext(), model, batch(count))
                self.assertLessEqual(peak, limit)
            with self.assertLogs("torch._functorch", "WARNING") as logs:
                for count in (2 * rows, 2 * rows, 4 * rows):
                    peak = measured(contextlib.nullcontext(), model, batch(count))
        self.assertGreater(peak, limit)
        told = re.findall(
            "for 2 MiB the peak is about (.*) MiB, and the 14 MiB", logs.output[1]
        )
        self.assertEqual(float(*told) * 2**20, peak, rtol=0.05, atol=0)
        self.assertEqual(len(logs.output), 2)

    @unittest.skipIf(not HAS_CPU, "inductor cannot compile for the CPU here")
    def test_larger_batch_than_a_cached_graph_was_planned_for(self):
        def call(rows):
            x = torch.ones(rows, 8, requires_grad=True)
            compiled(x).sum().backward()

        options = {
            "activation_memory_peak_bytes": 2048,
            "enable_autograd_cache": True,
        }
        caches = {"fx_graph_cache": True, "fx_graph_remote_cache": False}
        with fresh_cache(), config.patch(options), inductor_config.patch(caches):
            for expected in ("miss", "hit"):
                torch._dynamo.reset()
                counters.clear()
                compiled = torch.compile(torch.sin, dynamic=True)
                call(16)
                self.assertEqual(
                    counters["aot_autograd"][f"autograd_cache_{expected}"], 1
                )
                with self.assertLogs("torch._functorch", "WARNING") as logs:
                    call(64)
                self.assertEqual(len(logs.output), 1)
                self.assertIn("planned for 512 B of dynamic inputs", logs.output[0])

    @needs_two_ranks
    def test_two_ranks(self):
        one, other = in_two_ranks("test_ac_step_budget")
        for way in WAYS:
            with self.subTest(way=way):
                for found in (one[way], other[way]):
                    self.assertTrue(found["same"])
                    self.assertLessEqual(found["peak"], 1.005 * found["allowed"])
                    self.assertLessEqual(
                        abs(found["peak"] - found["predicted"]), 0.01 * found["peak"]
                    )
                alike = one[way]["budget"] == other[way]["budget"]
                self.assertEqual(alike, way != "pipeline")

    def test_nothing_compiled(self):
        with self.assertLogs("torch._functorch", "WARNING") as logs:
            steps(StepBudget(share=0.5), Net(backend=None), batch())
        self.assertIn("no graph was compiled", logs.output[0])

    def test_report(self):
        model, budget = Net(), StepBudget(share=0.3)
        self.assertIn("no plan before the second step", str(budget))
        steps(budget, model, batch())
        self.assertIn("StepBudget", str(budget))
        self.assertIn("at once", str(budget))
        self.assertIn("step budget", saved_report.last_plan().chosen_by())


instantiate_parametrized_tests(StepBudgetTest)


if __name__ == "__main__":
    run_tests()
