# Owner(s): ["module: functorch"]
"""A budget for a training step whose parts are compiled by themselves.

Every peak is what torch's allocators tell the profiler while the step runs.
"""

import contextlib
import copy
import functools
import gc
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import shutil
import tempfile
import threading
import unittest
import warnings
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from test_ac_memory_budget import Joint
from test_ac_peak_budget import allocated_at_most

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd as aot_backend
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import counters
from torch._functorch import aot_autograd, config, partitioners
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.memory_planner.compile import told
from torch._functorch.memory_planner.graph.inputs_outputs import (
    live_bytes_model,
    Missing,
)
from torch._functorch.memory_planner.graph.joint import BudgetedGraph
from torch._functorch.memory_planner.peak.plan_search import plan_graph
from torch._functorch.memory_planner.report import saved_values as saved_report
from torch._functorch.memory_planner.step import (
    budget as step_budget,
    compiled_graph,
    messages,
    single_graph_warnings,
)
from torch._functorch.memory_planner.step.budget import StepBudget, StepBudgetError
from torch._functorch.memory_planner.step.current_step import running_step
from torch._functorch.memory_planner.step.recorder import Recorder
from torch._functorch.memory_planner.step.tensors import SeenTensors
from torch._functorch.memory_planner.step.timeline import StepTimeline
from torch._functorch.partitioners import default_partition
from torch._inductor import config as inductor_config
from torch._inductor.deferred_kernels import DeferredKernels
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
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint


AOT = "aot_eager_decomp_partition"
PLACE = "torch._functorch.memory_planner"
LOG = "torch._functorch", "WARNING"
WIDTH, BATCH = 64, 256
HAS_GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()


class Block(nn.Module):
    def __init__(self, width=WIDTH, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x):
        inner = F.gelu(self.up(self.norm(x)))
        return x + self.down(F.dropout(inner, self.dropout, self.training))


class Sliced(Block):
    """Traced into other operators where sizes are symbols, or one is 1."""

    def forward(self, x):
        # A slice of all, with its gradient; and a copy of several rows.
        heads = x.unflatten(1, (4, -1)).transpose(0, 1).reshape(4, -1)
        return super().forward(x[:, :]) + x + heads.sum(0).mean()


class Adapted(Block):
    """Only two thin matrices learn."""

    def __init__(self, **options):
        super().__init__(**options)
        self.requires_grad_(False)
        self.low, self.high = (
            nn.Parameter(torch.randn(*size) / WIDTH)
            for size in ((WIDTH, 4), (4, 4 * WIDTH))
        )

    def forward(self, x):
        inner = self.norm(x)
        return x + self.down(F.gelu(self.up(inner) + inner @ self.low @ self.high))


class Net(nn.Module):
    """Blocks between parts that run in eager mode.

    Args:
        backend: that each block is compiled with by itself; None to compile nothing.
        whole: to compile all of it with ``AOT`` instead.
    """

    def __init__(
        self, blocks=4, backend=AOT, dropout=0.0, block=Block, whole=False, **options
    ):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(dropout=dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 8)
        if whole:
            self.compile(backend=AOT, **options)
        elif backend is not None:
            for block in self.blocks:
                block.compile(backend=backend, **options)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), x.detach()[:, :8].argmax(1))


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def decorated(forward):
    """As transformers has it around those of its models."""

    @functools.wraps(forward)
    def wrapper(self, *args):
        return forward(self, *args)

    return wrapper


class Speller(nn.Module):
    """Returns its loss and, for `both`, the logits."""

    def __init__(self, both=True, compiled=True):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.both = Block(), nn.Linear(WIDTH, 1024), both
        if compiled:
            self.compile(backend=AOT)

    @decorated
    def forward(self, x):
        logits = self.head(self.body(x))
        loss = F.cross_entropy(logits, x.argmax(1))
        return (loss, logits) if self.both else (loss,)


def batch(rows=BATCH, seed=1):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def local(tensor):
    """What this rank has of it."""
    return getattr(tensor, "_local_tensor", tensor)


def train(model, *batches):
    for each in batches:
        model(each).backward()


def train_first_output(model, x):
    model(x)[0].backward()


def evaluate(model, x):
    with torch.no_grad():
        model(x)


def train_and_evaluate(model, x):
    train(model, x)
    evaluate(model, x)


def steps(budget, model, *batches, train=train, count=2):
    """Some steps; returns the gradients of the last one."""
    for _ in range(count):
        model.zero_grad()
        torch.manual_seed(0)
        with budget:
            train(model, *batches)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def measured(budget, model, *batches, train=train):
    """The peak of one more step."""
    model.zero_grad()
    torch.manual_seed(0)

    def step():
        with budget:
            train(model, *batches)

    return allocated_at_most(step)


@contextlib.contextmanager
def recordings():
    """How many steps are recorded."""
    with mock.patch.object(step_budget, "Recorder", wraps=step_budget.Recorder) as made:
        yield lambda: made.call_count


def counting(live=lambda: None, peak=None):
    """A device that counts these; by default nothing."""
    return SimpleNamespace(
        begin=lambda: None,
        given=lambda: 0,
        live=live,
        peak=peak or (lambda: None),
        counts_peak=peak is not None,
    )


def counting_times(factor, budget):
    """A device that counts so many times what was predicted."""
    return counting(
        lambda: 0, lambda: budget.plan and int(factor * budget.plan.predicted_peak)
    )


def unbudgeted(model, *batches, train=train, count=2):
    """The gradients without a budget; what was compiled for them is given up."""
    with config.patch(enable_autograd_cache=False):
        found = steps(
            contextlib.nullcontext(), model, *batches, train=train, count=count
        )
    torch._dynamo.reset()
    return found


@functools.cache
def usual_gradients():
    return unbudgeted(Net(), batch())


class CheckpointedNet(Net):
    def __init__(self, together=1, **options):
        super().__init__(**options)
        self.together = together

    def forward(self, x):
        x = self.embed(x)
        for first in range(0, len(self.blocks), self.together):
            blocks = self.blocks[first : first + self.together]
            x = checkpoint(nn.Sequential(*blocks), x, use_reentrant=False)
        return self.head(x).square().mean()


class CheckpointInside(Block):
    """A random operator that runs twice is inside of a higher-order one."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Sine(Block):
    def forward(self, x):
        return super().forward(x).sin()


def graph_break():
    model = Net(whole=True)
    forward = model.blocks[2].forward

    def broken(x):
        torch._dynamo.graph_break()
        return forward(x)

    model.blocks[2].forward = broken
    return model


class NormBehind(Block):
    """Its tangent is given up before anything is repeated."""

    def forward(self, x):
        with region(0.5):
            return self.norm(x + self.down(self.up(x).relu()))


class Nested(Block):
    def forward(self, x):
        return run_nested(self, x)


run_nested = torch.compiler.nested_compile_region(Block.forward)


def in_flight(model, *batches):
    """As pipelines do it: one forward, one backward, two in flight."""
    waiting = []
    for each in batches:
        waiting.append(model(each))
        if len(waiting) == 2:
            waiting.pop(0).backward()
    waiting.pop().backward()


def two_losses(model, x):
    for block in model.blocks:
        x = block(x)
    model.head(x).square().mean().backward(retain_graph=True)
    x.cos().sum().backward()


def with_patterns(model, x):
    """As inductor traces its own in the first step of a process."""
    joint_fwd_bwd(lambda value: value.sin().cos(), [x.clone().requires_grad_()])
    model(x).backward()


def with_hooks(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = model(x)
    loss.backward()


def by_compiled_autograd(model, x):
    with compiled_autograd._enable(torch.compile(backend=AOT)):
        model(x).backward()


class Way(NamedTuple):
    """A model, a step of training it, and what is known of that.

    ``calls`` are those of each graph; ``close``, by which share the peak may be other
    than said; ``scratch``, what is live at the peak that no plan counts.
    """

    make: object = Net
    batches: int = 1
    train: object = train
    calls: tuple = (4,)
    shares: tuple = (0.2,)
    close: float = 0.001
    scratch: int = 0


STEPS = {
    "blocks": Way(shares=(0.0, 0.4, 1.0)),
    # To draw its bits, MKL makes an int of each.
    "dropout": Way(lambda: Net(dropout=0.2), scratch=4 * BATCH * 4 * WIDTH),
    "in_flight": Way(batches=3, train=in_flight, calls=(12,)),
    # Each checkpoint keeps the state of a generator, which no plan counts.
    "checkpointed": Way(CheckpointedNet, calls=(8,), close=0.02),
    "checkpointed_in_pairs": Way(
        lambda: CheckpointedNet(2), calls=(8,), shares=(0.0,), close=0.02
    ),
    "checkpoints_inside": Way(
        lambda: Net(2, dropout=0.2, block=CheckpointInside),
        calls=(2,),
        close=0.1,
        scratch=4 * BATCH * 4 * WIDTH,
    ),
    "graph_break": Way(graph_break, calls=(4,)),
    "one_graph": Way(lambda: Net(2, whole=True), calls=(1,)),
    "norm_behind": Way(
        lambda: Net(2, block=NormBehind), calls=(2,), shares=(1.0,), close=0
    ),
    "with_patterns": Way(train=with_patterns),
    # No gradient is wanted of what the first block is given.
    "two_losses": Way(train=two_losses, calls=(1, 3), close=1),
}


def hardly_learning(blocks):
    model = Net(blocks, block=Adapted)
    model.embed.requires_grad_(False)
    return model


# Nets and the rows of their batches.
FIRST_STEPS = {
    # So much that the planner's own tensors do not matter.
    "blocks": (Net, [4 * BATCH]),
    "one_graph": (lambda: Net(whole=True), [4 * BATCH]),
    # What calls keep is most of the peak, as gradients are not.
    "few_adapted": (lambda: hardly_learning(4), [BATCH]),
    "many_adapted": (lambda: hardly_learning(16), [BATCH]),
    # The second one keeps its values beside all gradients of the first.
    "small_micro_batches": (lambda: Net(12), [32, 32]),
    "micro_batches": (lambda: Net(12), [128, 128]),
}
UNSEEN = "no backward of a compiled graph was seen"
# A model, how it is trained, and why a StepBudget can do nothing for it.
UNPLANNED = {
    "compiled_autograd": (Net, by_compiled_autograd, UNSEEN),
    "nothing_compiled": (lambda: Net(backend=None), train, UNSEEN),
    "hooks": (Net, with_hooks, "saved-tensor hooks are set around"),
    "nested_regions": (
        lambda: Net(block=Nested, whole=True),
        train,
        "it calls nested compiled regions",
    ),
    "default_partitioner": (
        lambda: Net(backend="aot_eager_default_partitioner"),
        train,
        "its backend does not partition by the budget",
    ),
}


# Of training in two processes.
WAYS = ("replicas", "sharded", "pipeline")


class Stage(nn.Sequential):
    """One of two stages of a pipeline, the second with another graph; see `rank`."""

    def __init__(self, number):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        blocks = Net(3 + number).blocks
        super().__init__(*blocks, *([nn.Linear(WIDTH, 8)] if number else []))
        stage = PipelineStage(self, number, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=F.cross_entropy)
        self.step = functools.partial(self.run, schedule.step, number)

    def run(self, step, number, x):
        step(target=x.argmax(1) % 8) if number else step(x)


def join_ranks(number, place, count=2):
    """Make this process one of so many."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{place}",
        rank=number,
        world_size=count,
        timeout=timedelta(seconds=120),
    )


def rank(number, place):
    """What a StepBudget does in one of two processes, for each way."""
    join_ranks(number, place)
    ways = {way: step_of_rank(number, way) for way in WAYS}
    return {**ways, "file": file_of_rank(number, f"{place}.json")}


def model_of_rank(number, way):
    if way == "pipeline":
        return Stage(number)
    model = Net()
    if way == "replicas":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


def step_of_rank(number, way):
    def train_one(model, x):
        model.step(x) if way == "pipeline" else train(model, x)

    x = batch(4 * BATCH, seed=1 if way == "pipeline" else number)
    torch._dynamo.reset()
    before = unbudgeted(model_of_rank(number, way), x, train=train_one)
    model, budget = model_of_rank(number, way), StepBudget(share=0.2)
    gradients = steps(budget, model, x, train=train_one)
    # Other threads let go of what was sent when they come to it: in most steps soon
    # enough, so the least of several is the program's.
    peak = min(measured(budget, model, x, train=train_one) for _ in range(5))
    is_same = all(torch.equal(local(a), local(b)) for a, b in zip(gradients, before))
    return peak, budget.plan, is_same


def file_of_rank(number, path):
    """What is planned without a file, and with the file that this leaves; warnings."""
    for _ in range(2):
        torch.distributed.barrier()
        model, budget = model_of_rank(number, "replicas"), StepBudget(0.2, plan=path)
        before = budget.plan
        with as_another_process():
            steps(budget, model, batch(4 * BATCH, seed=number), count=5)
    return before, budget.plan, budget.reasons


def in_two_ranks(rank):
    """What ``rank(number, place)`` returns in each of two processes."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, processes.Pool(2) as pool:
        place = os.path.join(folder, "init")
        ranks = [(number, place) for number in range(2)]
        # One may wait forever for the other, if that fails.
        return pool.starmap_async(rank, ranks, chunksize=1).get(timeout=300)


@contextlib.contextmanager
def as_another_process():
    """What is compiled is forgotten, and graphs are numbered from 0."""
    torch._dynamo.reset()
    with mock.patch.object(aot_autograd, "AOT_COUNTER", itertools.count()):
        yield


def in_process(function, *arguments):
    """What a function returns in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, arguments).get(timeout=300)


@inductor_config.patch({"cpp.simdlen": 1})
def steps_by_file(path, backend, blocks=4, dropout=0.1, held=0, more=False):
    """Of each step whether it is recorded, compiles, and its peak; then what is left.

    Eager code has ``held`` bytes meanwhile, and ``more`` is compiled before.
    """

    def train(model, x):
        beside = torch.empty(held, dtype=torch.uint8)
        model(x).backward()
        return beside

    if more:
        train(Net(blocks=1, backend=backend), batch())
    model = Net(blocks=blocks, dropout=dropout, backend=backend)
    budget = StepBudget(share=0.2, plan=path)
    found = []
    with (
        mock.patch.object(partitioners, "decide", wraps=partitioners.decide) as decide,
        recordings() as recorded,
    ):
        for _ in range(5):
            before = recorded(), decide.call_count
            peak = measured(budget, model, batch(), train=train)
            changes = recorded() > before[0], decide.call_count > before[1]
            found.append((*changes, peak))
    gradients = [p.grad.clone() for p in model.parameters()]
    return found, gradients, budget.plan, budget.reasons


class StepBudgetTest(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        # Plain loops compile fastest.
        self.enterContext(inductor_config.patch({"cpp.simdlen": 1}))

    def check(self, way):
        """Peaks, gradients and the order of shares; returns the plans."""
        batches = [batch(seed=k + 1) for k in range(way.batches)]
        before = unbudgeted(way.make(), *batches, train=way.train)
        peaks, plans = [], []
        for share in way.shares:
            torch._dynamo.reset()
            model, budget = way.make(), StepBudget(share=share)
            gradients = steps(budget, model, *batches, train=way.train)
            self.assertEqual(gradients, before, rtol=0, atol=0)
            with self.assertNoLogs(*LOG):
                peak = measured(budget, model, *batches, train=way.train) - way.scratch
            plan = budget.plan
            self.assertLessEqual(peak, 1.005 * plan.allowed)
            self.assertLessEqual(abs(peak - plan.predicted_peak), way.close * peak)
            peaks.append(peak)
            plans.append(plan)
        self.assertEqual(peaks, sorted(peaks))
        self.assertEqual(len({plan.floor for plan in plans}), 1)
        self.assertEqual(tuple(use.calls for use in plans[0].graphs), way.calls)
        return plans

    def trained(self, budget, make, train=train, said=(), count=3):
        """A model with the gradients that it has without a budget, and these warnings."""
        before = unbudgeted(make(), batch(), train=train)
        model = make()
        with contextlib.ExitStack() as stack:
            watch = self.assertLogs if said else self.assertNoLogs
            logs = stack.enter_context(watch(*LOG))
            found = steps(budget, model, batch(), train=train, count=count)
        for each, wanted in zip(found, before, strict=True):
            self.assertEqual(each, wanted, rtol=0, atol=0)
        if said:
            self.assertEqual(len(logs.output), len(said))
            for line, words in zip(logs.output, said):
                self.assertIn(words, line)
        return model

    @parametrize("way", STEPS)
    def test_peaks_and_gradients(self, way):
        plans = self.check(STEPS[way])
        (use, *_) = plans[0].graphs
        # What is waiting at once.
        if way == "blocks":
            self.assertLess(plans[0].floor, 0.9 * plans[0].unbudgeted)
            self.assertEqual(len(use.kept), 4)
        if way == "in_flight":
            self.assertEqual(len(use.kept), 8)

    def test_optimizer_states_are_there_from_the_second_step_on(self):
        model, budget = Net(), StepBudget(share=0.2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)

        def train(model, x):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()

        steps(budget, model, batch(), train=train, count=3)
        states = [v for state in optimizer.state.values() for v in state.values()]
        self.assertEqual(budget.plan.optimizer_states, sum(t.nbytes for t in states))
        given = sum(t.nbytes for t in (*model.parameters(), *states))
        # And the batch, and what the learning rate was multiplied by.
        self.assertLessEqual(abs(budget.plan.given - given), batch().nbytes + 4096)

    @parametrize("fits", (False, True))
    def test_optimizer_states_that_are_made_late(self, fits):
        model = Net(3)
        optimizer = torch.optim.AdamW(model.parameters())
        figures = []

        def step(at):
            with budget:
                model(batch(512)).square().mean().backward()
                # As where a GradScaler skips the first steps.
                if at > 2:
                    optimizer.step()
                optimizer.zero_grad()

        def given():
            states = [v for state in optimizer.state.values() for v in state.values()]
            return sum(t.nbytes for t in (*model.parameters(), *states))

        # The smaller one fits until there are states.
        budget = StepBudget(device_bytes=2**24 if fits else 4_600_000)
        # The allocation of the states is seen as if the process had grown by less.
        budget.counter = counting(lambda: given() // 2)
        with (self.assertNoLogs if fits else self.assertLogs)(*LOG) as logs:
            for at in range(7):
                before = given()
                figures.append(before + allocated_at_most(lambda at=at: step(at)))
        held, plan = figures[-1], budget.plan
        self.assertLessEqual(abs(held - plan.predicted_peak), 0.005 * held)
        if not fits:
            said = "".join(logs.output)
            # The first step that begins with them is recorded.
            held = saved_report.format_bytes(figures[4])
            self.assertIn(f"a step held {held}", said)
            self.assertIn("the lowest peak found", said)

    def test_gradients_that_stay(self):
        model, budget = Net(), StepBudget(share=0.0)
        # The peak is where this layer's new gradient is added to the old one.
        model.head = nn.Linear(WIDTH, 4096)

        def step():
            with budget:
                train(model, batch(8))

        for _ in range(3):
            step()
        predicted, peak = budget.plan.predicted_peak, allocated_at_most(step)
        self.assertLessEqual(abs(peak - predicted), 0.01 * predicted)

    def test_what_is_counted_at_a_start_need_not_be_guessed(self):
        for counted, given in ((0, 64), (16, 16)):
            recorder = Recorder(torch.device("cpu"), counted)
            self.assertEqual(recorder.bytes_at_start(64), given)

    def test_gradients_that_change_their_size(self):
        leaf = torch.ones(8, requires_grad=True)
        for size in (64, 0):
            leaf.grad = torch.ones(8)
            seen = SeenTensors()
            seen.leaves[id(leaf)] = leaf
            recorder = Recorder(torch.device("cpu"), 0, seen)
            leaf.grad.untyped_storage().resize_(size)
            recorder.storage_numbers(leaf.grad)
            leaf.grad = None
            # They leave as much less as they had when the step began.
            self.assertEqual(StepTimeline(recorder).live, -32)

    def test_bytes(self):
        reference = StepBudget(share=0.4)
        steps(reference, Net(2), batch())
        asked = reference.plan.allowed
        for limit, given in (("peak_bytes", 0), ("device_bytes", reference.plan.given)):
            torch._dynamo.reset()
            model, budget = Net(2), StepBudget(**{limit: asked + given})
            steps(budget, model, batch())
            self.assertEqual(budget.plan.allowed, asked + given)
            self.assertLessEqual(measured(budget, model, batch()), asked)
            self.assertEqual(budget.plan.cost, reference.plan.cost)

    def test_bytes_that_cannot_be(self):
        budget = StepBudget(peak_bytes=1000)
        said = "StepBudget(peak_bytes=1000) may be exceeded: the lowest"
        self.trained(budget, Net, said=[said])
        self.assertEqual(budget.plan.predicted_peak, budget.plan.floor)

    def test_compiles_once_and_once_more(self):
        model, budget = Net(), StepBudget(share=0.3)
        self.assertIn("no plan before the second step", str(budget))
        counters.clear()
        made, before = [], saved_report.plans()
        with config.patch(joint_custom_pass=lambda graph, _: made.append(1) or graph):
            steps(budget, model, batch(), count=1)
            self.assertEqual(len(made), 1)
            steps(budget, model, batch(), count=1)
            most = len(made)
            self.assertLessEqual(most, 3)
            steps(budget, model, batch(), count=3)
        self.assertEqual(len(made), most)
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        self.assertIn("at once", str(budget))
        self.assertEqual(saved_report.last_plan().decided_by, "step")
        (listed,) = (p for p in saved_report.plans() if p not in before)
        self.assertIs(listed, saved_report.last_plan())

    def test_nothing_deprecated_is_used(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps(StepBudget(share=0.3), Net(2), batch())
        kinds = [FutureWarning, DeprecationWarning]
        self.assertEqual([w for w in caught if w.category in kinds], [])

    @parametrize("name", FIRST_STEPS)
    def test_first_step_is_lean(self, name):
        make, rows = FIRST_STEPS[name]
        model, budget = make(), StepBudget(share=1.0)
        batches = [batch(n, seed=at) for at, n in enumerate(rows)]
        first = measured(budget, model, *batches)
        steps(budget, model, *batches)
        self.assertLessEqual(first, 1.05 * budget.plan.floor)

    # Two graphs, as Dynamo finds that sizes vary, or one for each.
    @parametrize("dynamic", (None, False))
    def test_sizes_that_vary(self, dynamic):
        block = Sliced if dynamic is None else Block
        model, budget = Net(block=block, dynamic=dynamic), StepBudget(share=0.5)
        rows = [BATCH, BATCH // 2, 2 * BATCH, BATCH, 3 * BATCH // 2, 2 * BATCH]
        with recordings() as count, self.assertNoLogs(*LOG):
            peaks = [measured(budget, model, batch(n)) for n in rows]
            allowed = budget.plan.allowed
            self.assertLessEqual(max(peaks), 1.005 * allowed)
            # Plans for the largest were there when it came first.
            self.assertEqual(peaks[2], peaks[-1])
            if dynamic is False:
                # What eager code holds is as much larger.
                self.assertEqual([g.scale for g in budget.graphs.values()], [2])
            self.assertLessEqual(abs(budget.plan.predicted_peak / peaks[-1] - 1), 0.01)
            # A last batch that is smaller.
            peaks = [measured(budget, model, batch(n)) for n in (BATCH // 4, 2 * BATCH)]
        self.assertEqual(count(), 2)
        self.assertEqual(budget.plan.allowed, allowed)
        self.assertLessEqual(max(peaks), 1.005 * allowed)

    def test_a_smaller_size_runs_by_what_was_compiled(self):
        large, reference = batch(8 * BATCH), StepBudget(share=0.5)
        steps(reference, Net(whole=True), large)
        torch._dynamo.reset()
        model = Net(whole=True, dynamic=False)
        budget = StepBudget(peak_bytes=reference.plan.allowed)
        for rows in (BATCH, BATCH, BATCH // 2):
            steps(budget, model, batch(rows), count=1)
        self.assertEqual(budget.plan.cost, 0)
        steps(budget, model, large)
        self.assertGreater(budget.plan.cost, 0)
        decide = mock.Mock(wraps=partitioners.decide)
        with mock.patch.object(partitioners, "decide", decide):
            peak = measured(budget, model, batch())
        decide.assert_not_called()
        self.assertLessEqual(peak, budget.plan.allowed)

    @parametrize("rows", (BATCH // 4, 1))
    def test_sizes_that_are_traced_into_other_operators(self, rows):
        model, budget = Net(block=Sliced), StepBudget(share=0.5)
        # Not those of the profiler, nor of logs.
        budget.counter = counting()
        sizes = [BATCH, BATCH, BATCH, rows, BATCH, rows, BATCH]
        before = unbudgeted(Net(block=Sliced), batch(rows), count=1)
        operators = set()

        def seen(graph, _):
            operators.add(tuple(str(n.target) for n in graph.graph.nodes))
            return graph

        with (
            recordings() as count,
            self.assertNoLogs(*LOG),
            config.patch(joint_custom_pass=seen),
        ):
            peaks = [measured(budget, model, batch(n)) for n in sizes]
            self.assertLessEqual(max(peaks[1:]), 1.005 * budget.plan.allowed)
            gradients = steps(budget, model, batch(rows), count=1)
        self.assertEqual(count(), 2)
        self.assertEqual(len(operators), 2)
        self.assertEqual(gradients, before, rtol=0, atol=0)

    def test_two_graphs_of_one_module(self):
        class Either(Block):
            def forward(self, x, squares=False):
                x = super().forward(x)
                return x.square().tanh() if squares else x.sin()

        def train(model, x):
            block = model.blocks[0]
            block(block(model.embed(x)), squares=True).sum().backward()

        model, budget = Net(1, block=Either), StepBudget(share=0.5)
        with self.assertNoLogs(*LOG):
            steps(budget, model, batch(), train=train)
            for rows in (BATCH // 2, 1):
                steps(budget, model, batch(rows), train=train)
        self.assertEqual([use.calls for use in budget.plan.graphs], [1, 1])

    def test_steps_with_fewer_calls(self):
        model, budget = Net(dynamic=True), StepBudget(share=0.2)
        # Not those of the profiler, nor of logs.
        budget.counter = counting()

        def forward_only(model, x):
            model(x)

        small, large = batch(BATCH // 2), batch()
        with recordings() as count, self.assertNoLogs(*LOG):
            steps(budget, model, large, large)
            before = budget.plan
            for given in ([large], [large] * 4, [small, large, small]):
                peak = measured(budget, model, *given)
                self.assertLessEqual(peak, 1.005 * before.allowed)
            for other in (forward_only, train_and_evaluate, train):
                steps(budget, model, large, train=other)
        self.assertEqual(count(), 2)
        self.assertIs(budget.plan, before)

    def test_an_evaluation_in_a_recorded_step(self):
        model, budget = Net(), StepBudget(share=0.2)
        budget.counter = counting()
        with self.assertNoLogs(*LOG):
            for each in 3 * (train, train_and_evaluate):
                steps(budget, model, batch(), train=each, count=1)

    @parametrize("how", ["earlier", "kept"])
    def test_an_evaluation_other_than_the_recorded_ones(self, how):
        model, wide = Net(), Net(blocks=2)
        budget, kept = StepBudget(share=0.0), []
        budget.counter = counting()

        def evaluate(count=1):
            with torch.no_grad():
                for _ in range(count):
                    kept.append(wide.blocks[0](batch(2 * BATCH)))

        def last(model, x):
            train(model, x)
            evaluate()
            kept.clear()

        def earlier(model, x):
            loss = model(x)
            evaluate()
            loss.backward()
            kept.clear()

        def many(model, x):
            evaluate(16)
            train(model, x)
            kept.clear()

        with self.assertNoLogs(*LOG):
            steps(budget, model, batch(), train=last, count=4)
        with self.assertLogs(f"{PLACE}.step.messages", "WARNING"):
            other = earlier if how == "earlier" else many
            steps(budget, model, batch(), train=other, count=1)

    def test_an_evaluation_that_holds_more(self):
        kept = []

        def of_a_large_batch(model, x):
            with torch.no_grad():
                model(x.repeat(64, 1))
            train(model, x)

        def that_is_kept(model, x):
            with torch.no_grad():
                kept[:] = [model.blocks[0](x)]
            train(model, x)

        for other in (of_a_large_batch, that_is_kept):
            torch._dynamo.reset()
            model, budget = Net(), StepBudget(share=0.2)
            budget.counter = counting()
            steps(budget, model, batch())
            with self.assertLogs(f"{PLACE}.step.messages", "WARNING") as logs:
                steps(budget, model, batch(), train=other)
            self.assertIn("a call of Block, which has no backward", logs.output[0])
            peak = measured(budget, model, batch(), train=other)
            self.assertLessEqual(peak, 1.005 * budget.plan.allowed)

    def test_a_batch_that_a_step_makes_for_an_evaluation(self):
        made = []

        def with_a_batch(model, x):
            train(model, x)
            with torch.no_grad():
                # Without the batches, there is room for each call.
                made[:] = [batch(3 * BATCH // 2) for _ in range(16)]
                for each in made:
                    model.blocks[0](each)
                made.clear()

        model, budget = Net(blocks=2), StepBudget(share=1)
        budget.counter = counting(lambda: sum(each.nbytes for each in made))
        with self.assertNoLogs(*LOG):
            steps(budget, model, batch(), count=4)
            # What was compiled within the step leaves bytes behind, too.
            steps(budget, model, batch(), train=with_a_batch, count=1)
            steps(budget, model, batch())
        with self.assertLogs(f"{PLACE}.step.messages", "WARNING") as logs:
            steps(budget, model, batch(), train=with_a_batch, count=1)
        self.assertIn("a call of Block, which has no backward", logs.output[0])

    def test_a_call_is_as_large_as_what_it_computes(self):
        class Scores(nn.Linear):
            def forward(self, x):
                x = super().forward(x)
                return ((x @ x.transpose(1, 2)).softmax(-1).exp().tanh() @ x).sum()

        # Fewer inputs, but more scores of each pair: more in all, or just of these.
        for dynamic, sizes in ((True, (3, 256)), (None, (6, 64))):
            torch._dynamo.reset()
            module = Scores(WIDTH, WIDTH)
            model = torch.compile(module, backend=AOT, dynamic=dynamic)
            budget = StepBudget(share=0.5)
            steps(budget, model, torch.randn(48, 16, WIDTH))
            with self.assertNoLogs(*LOG):
                long = torch.randn(*sizes, WIDTH)
                peaks = [measured(budget, model, long) for _ in range(2)]
                peaks.append(measured(budget, model, torch.randn(48, 16, WIDTH)))
            self.assertLessEqual(max(peaks), 1.005 * budget.plan.allowed)

    @unittest.skipIf(not HAS_CPU, "inductor cannot compile for the CPU here")
    def test_compiled_code_tells_of_other_sizes(self):
        # Kernels hold another share of what operators do where there are more scores.
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.heads = nn.Linear(WIDTH, 3 * WIDTH)
                self.out = nn.Linear(WIDTH, WIDTH)

            def forward(self, x):
                heads = self.heads(x).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
                q, k, v = heads.unbind()
                scores = (q @ k.mT / 4).softmax(-1)
                x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
                return x.square().mean()

        model = torch.compile(Attention(), dynamic=True)
        budget = StepBudget(share=0.2)
        with self.assertNoLogs(*LOG):
            for length in (32, 96, 64):
                x = torch.randn(8, length, WIDTH)
                steps(budget, model, x)
                peak, plan = measured(budget, model, x), budget.plan
                self.assertLessEqual(peak, 1.005 * plan.allowed)
                self.assertLessEqual(peak, 1.005 * plan.predicted_peak)
                if length == 96:
                    self.assertGreater(peak, 0.995 * plan.predicted_peak)

    def test_checkpoints_in_a_step_that_was_not_planned_for(self):
        # Once the second head runs, plans are lean, but not for what runs again.
        heads = [Block(), NormBehind()]
        for head in heads:
            head.compile(backend=AOT)
        model, budget = CheckpointedNet(), StepBudget(share=1.0)
        for head in (0, 0, 0, 1, 0, 1, 1):
            model.head = nn.Sequential(heads[head])
            gradients = steps(budget, model, batch(), count=1)
            self.assertEqual(len(gradients), len([*model.parameters()]))

    @parametrize("function", [torch.tanh, functools.partial(torch.softmax, dim=-1)])
    def test_outputs_that_the_backward_alone_holds(self, function):
        class Squashed(nn.Linear):
            def forward(self, x):
                return function(super().forward(x))

        def train(model, x):
            model(x).square().mean().backward()

        torch.manual_seed(0)
        model = nn.Sequential(Squashed(WIDTH, WIDTH), nn.Linear(WIDTH, 8))
        model[0].compile(backend=AOT)
        budget = StepBudget(share=0.0)
        steps(budget, model, batch(), train=train)
        peak = measured(budget, model, batch(), train=train)
        self.assertEqual(budget.plan.predicted_peak, peak, rtol=0.02, atol=0)

    def test_outputs_that_the_caller_drops(self):
        def train_both(model, x):
            loss, logits = model(x)
            (loss + logits.mean()).backward()

        found = []
        for both in (False, True):
            torch._dynamo.reset()
            model, budget = Speller(both), StepBudget(share=0.0)
            gradients = steps(budget, model, batch(), train=train_first_output)
            with self.assertNoLogs(*LOG):
                peak = measured(budget, model, batch(), train=train_first_output)
            self.assertLessEqual(abs(peak - budget.plan.predicted_peak), 0.01 * peak)
            self.assertEqual(budget.plan.graphs[0].name, "Speller")
            found.append((peak, gradients))
        (alone, gradients), (peak, same) = found
        self.assertLessEqual(peak, 1.01 * alone)
        self.assertEqual(same, gradients, rtol=0, atol=0)
        # With a gradient that no recorded step had.
        with self.assertLogs(f"{PLACE}.step.messages", "WARNING"):
            gradients = steps(budget, model, batch(), train=train_both, count=1)
        eager = Speller(compiled=False)
        train_both(eager, batch())
        self.assertEqual(gradients, [p.grad for p in eager.parameters()])

    def test_a_dropped_output_whose_tangent_nothing_reads(self):
        def function(x):
            # The second is a slice, so that its tangent is copied.
            return x.sin().sum(), torch.sign(2 * x)[:, :3], x[:, :5].cos()

        joint = Joint(function, [(8, 16)])
        graph = BudgetedGraph(joint.graph, joint.info, joint.outputs, 1)
        loss, cosines = 4, 4 * 8 * 5
        missing = Missing(frozenset([1]), frozenset())
        self.assertEqual(live_bytes_model(graph, missing).tangent_bytes, loss + cosines)

    def test_an_input_that_the_backward_alone_holds_in_several_sizes(self):
        # Where no size holds most in every way, plans are for all of them.
        def function(x, weight):
            q, k, v = (x @ weight).chunk(3, -1)
            return x + (q @ k.mT).softmax(-1) @ v

        graphs = []
        for shape in ((16, 32, 8), (3, 96, 8)):
            joint = Joint(function, [shape, (8, 24)])
            graphs.append(BudgetedGraph(joint.graph, joint.info, joint.outputs, 1))
        short, long = graphs
        menu = plan_graph(short)
        other = menu.at_sizes_of(long)
        held = [each.bytes_held("backward", frozenset([0])) for each in (menu, other)]
        both = menu.with_sizes_of(other)
        found = both.bytes_held("backward", frozenset([0]))
        self.assertEqual(found, [*map(max, *held)])
        self.assertGreater(found, held[0])

    def test_a_dropped_output_that_views_an_input(self):
        class Same(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, grad):
                return 2 * grad

        def function(x):
            return Same.apply(x), x.sin()

        def compiled(module, _):
            return make_boxed_func(module)

        peaks = told.CompiledPeaks(compiled, compiled)
        peaks.missing = Missing(frozenset([0]), frozenset())
        compilers = {"fw_compiler": peaks.forward, "bw_compiler": peaks.backward}
        run = aot_function(function, partition_fn=default_partition, **compilers)
        counted = mock.Mock(wraps=told.activation_bytes)
        with mock.patch.object(told, "activation_bytes", counted):
            _, y = run(torch.ones(8, 16, requires_grad=True))
            y.sum().backward()
        ((_, held, *_), _) = counted.call_args
        self.assertEqual([node.name for node in held], ["tangents_2"])

    def test_dropped_outputs_whose_sizes_are_expressions(self):
        class Several(Net):
            def forward(self, x):
                z = self.head(self.embed(x).tanh())
                flat = z.flatten(0, 1)
                others = flat, torch.cat([z, z]), z.flatten().unflatten(0, (2, -1))
                return z.square().mean(), *others

        def trained(budget):
            torch._dynamo.reset()
            model = Several(1, whole=True, dynamic=True)
            for n in (8, 6, 10):
                x = batch(4 * n).unflatten(0, (n, 4))
                gradients = steps(budget, model, x, train=train_first_output, count=1)
            return gradients

        wanted, budget = trained(contextlib.nullcontext()), StepBudget(share=0.3)
        with self.assertNoLogs(*LOG):
            self.assertEqual(trained(budget), wanted, rtol=0, atol=0)
        (missing,) = (graph.plans.missing for graph in budget.graphs.values())
        # Two of them are views of one another.
        self.assertEqual(len(missing.tangents), 2)

    def test_backward_that_does_not_compile_without_what_is_dropped(self):
        before = unbudgeted(Speller(), batch(), train=train_first_output)
        fault = mock.patch(
            f"{PLACE}.step.partial_backward.constant_fold_uniform_value",
            side_effect=RuntimeError("injected"),
        )
        model, budget = Speller(), StepBudget(share=0.3)
        with fault, self.assertNoLogs(*LOG):
            gradients = steps(budget, model, batch(), train=train_first_output, count=3)
            peak = measured(budget, model, batch(), train=train_first_output)
        self.assertEqual(gradients, before, rtol=0, atol=0)
        # The zeros are planned for.
        self.assertLessEqual(peak, 1.005 * budget.plan.allowed)

    def test_strict(self):
        model, budget = Net(dynamic=True), StepBudget(share=0.2, strict=True)
        steps(budget, model, batch(), count=3)
        model.blocks.append(model.blocks[0])
        ran = []
        model.blocks[0].register_forward_hook(lambda *_: ran.append(1))
        with self.assertRaisesRegex(StepBudgetError, "more calls of Block"):
            steps(budget, model, batch(), count=1)
        self.assertEqual(len(ran), 1)
        # Nor is what cannot be kept begun.
        model, tight = Net(), StepBudget(peak_bytes=1000, strict=True)
        steps(tight, model, batch(), count=1)
        with self.assertRaisesRegex(StepBudgetError, "lowest peak found .* 1,000 B"):
            steps(tight, model, batch(), count=1)
        # If it is begun nevertheless, then by the plans that hold least.
        self.assertEqual(tight.plan.predicted_peak, tight.plan.floor)
        steps(tight, model, batch(), count=1)
        steps(contextlib.nullcontext(), model, batch(), count=1)

    def test_report_and_plot(self):
        model, budget = Net(2, whole=True), StepBudget(share=0.5)
        with self.assertRaisesRegex(RuntimeError, "no plan before the second step"):
            budget.plot("step.svg")
        with self.assertLogs("torch._functorch", "INFO") as logs:
            steps(budget, model, batch())
        self.assertRegex(logs.output[0], r"[\d.]+ \w+ of [\d.]+ \w+, [\d.]+% more work")
        plan = budget.plan
        self.assertEqual(plan.peak.total, plan.predicted_peak)
        self.assertEqual(plan.at_floor.total, plan.floor)
        self.assertRegex(plan.peak.what, r"^backward of Net at blocks\.[01]")
        self.assertIn(f"at the peak: {plan.peak.what}", str(budget))
        self.assertEqual(plan.graphs[0].name, "Net")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "step.svg")
            budget.plot(path)
            with open(path) as file:
                self.assertIn("</svg>", file.read())
        with self.assertRaises(torch.OutOfMemoryError) as caught, budget:
            raise torch.OutOfMemoryError("full")
        notes = getattr(caught.exception, "__notes__", [str(budget)])
        self.assertEqual(notes, [str(budget)])

    def test_lines_that_tell_of_plans(self):
        budget = StepBudget(share=0.5)
        plan = SimpleNamespace(headline="4 of 5 MiB")
        torch_log, seen = logging.getLogger("torch"), []
        handler = logging.Handler()
        handler.emit = seen.append
        torch_log.addHandler(handler)
        try:
            for _ in range(30):
                budget.tell(plan.headline)
            self.assertEqual(len(seen), 6)
            self.assertEqual({each.levelname for each in seen}, {"INFO"})
            self.assertEqual(seen[0].getMessage(), "StepBudget(share=0.5): 4 of 5 MiB")
            # Nothing overrides what TORCH_LOGS asks for.
            self.assertEqual(messages.log.level, logging.NOTSET)
        finally:
            torch_log.removeHandler(handler)

    def test_programs_in_turn(self):
        models = [Net(2), Net(2, block=NormBehind)]
        budget, plans = StepBudget(share=0.2), []
        with recordings() as count, self.assertNoLogs(*LOG):
            for each in models:
                steps(budget, each, batch(), count=1)
            for each in models * 3:
                peak = measured(budget, each, batch())
                self.assertLessEqual(peak, 1.005 * budget.plan.allowed)
                plans.append(budget.plan)
        self.assertEqual(count(), 2)
        self.assertEqual(plans[0].graphs, plans[-1].graphs)
        # A third that comes later.
        other = Net(2, block=Sliced)
        with self.assertLogs(*LOG) as logs:
            steps(budget, other, batch(), count=1)
        self.assertEqual(len(logs.output), 1)
        self.assertIn("a graph of its own, Sliced", logs.output[0])
        with self.assertNoLogs(*LOG):
            for each in (*models, other):
                steps(budget, each, batch(), count=1)
            for each in (*models, other):
                peak = measured(budget, each, batch())
                self.assertLessEqual(peak, 1.005 * budget.plan.allowed)
        # And a fourth.
        with self.assertLogs(*LOG) as logs:
            steps(budget, Net(1, block=Sine), batch(), count=1)
        self.assertIn("a graph of its own, Sine", logs.output[0])

    # The second is what the config has for all graphs.
    @parametrize("own", (0.0, 1.0))
    def test_region_budget(self, own):
        class Region(Block):
            def forward(self, x):
                with region(own):
                    return super().forward(x)

        kinds = itertools.cycle((Block, Region))
        make = functools.partial(Net, block=lambda **options: next(kinds)(**options))
        (plan,) = self.check(Way(make, calls=(2, 2), shares=(1.0 - own,)))
        uses = [use.cost > 0 for use in plan.graphs]
        self.assertEqual(uses, [own == 1, own == 0])

    @unittest.skipIf(not HAS_CPU, "inductor needs a C++ compiler")
    def test_inductor(self):
        make = functools.partial(Net, 2, "inductor", dropout=0.1)
        lower, gradients = 0, []
        with fresh_cache():
            for share, hits in ((0.0, False), (0.0, True), (1.0, True)):
                torch._dynamo.reset()
                counters.clear()
                model, budget = make(), StepBudget(share=share)
                gradients.append(steps(budget, model, batch()))
                # What plans of a step leave to inductor's cache, it finds again.
                found = counters["inductor"]
                if share == 0:
                    self.assertEqual(found["fxgraph_cache_miss"] == 0, hits)
                self.assertEqual(found["fxgraph_cache_hit"] > 0, hits)
                plan, peak = budget.plan, measured(budget, model, batch())
                self.assertEqual(plan.graphs[0].cost > 0, share == 0)
                self.assertEqual(plan.predicted_peak, peak, rtol=0.005, atol=0)
                self.assertLessEqual(plan.predicted_peak, plan.allowed)
                self.assertLessEqual(lower, peak)
                lower = peak
            torch._dynamo.reset()
            wanted = unbudgeted(make(), batch())
        for each in gradients:
            self.assertEqual(each, wanted, rtol=1e-5, atol=1e-6)

    @unittest.skipIf(not HAS_CPU, "inductor needs a C++ compiler")
    @unittest.skipIf(not torch.backends.mkldnn.is_available(), "no channels last here")
    def test_calls_that_wait_keep_copies_of_weights(self):
        class Convolution(nn.Conv2d):
            def forward(self, x):
                return x + super().forward(x)

        def train(model, x):
            model(x).sum().backward()

        model = nn.Sequential(*(Convolution(64, 64, 3, padding=1) for _ in range(8)))
        for each in model:
            each.forward = torch.compile(each.forward)
        x, budget = torch.ones(1, 64, 4, 4, requires_grad=True), StepBudget(share=0.5)
        steps(budget, model, x, train=train)
        peak = measured(budget, model, x, train=train)
        weight = model[0].weight.nbytes
        self.assertGreater(peak, 8 * weight)
        # A convolution's backward has two more for itself.
        self.assertLessEqual(abs(peak - budget.plan.predicted_peak), 2.5 * weight)

    @unittest.skipIf(
        not torch.ops.mkldnn._is_mkldnn_bf16_supported(), "no library's products here"
    )
    def test_what_products_in_half_precision_take_is_told(self):
        model, x = Net().bfloat16(), batch().bfloat16()
        budget = StepBudget(share=0.0)
        steps(budget, model, x)
        excess = measured(budget, model, x) - budget.plan.predicted_peak
        most = max(graph.workspace for graph in budget.choices)
        self.assertGreater(excess, 0)
        self.assertLessEqual(excess, most)
        self.assertIn(
            f"takes up to {saved_report.format_bytes(most)} for itself", str(budget)
        )

    def test_what_a_device_counts(self):
        """No such device is here: a tenth more than was predicted."""
        model, budget = Net(), StepBudget(share=0.5)
        budget.counter = counting_times(1.1, budget)
        with self.assertLogs(*LOG) as logs:
            steps(budget, model, batch(), count=3)
        self.assertEqual(len(logs.output), 1)
        self.assertRegex(
            logs.output[0], "may be exceeded: the device counted .* were predicted"
        )
        self.assertIn(" measured), ", str(budget))
        # What was counted more is left free by the next plan.
        missed = budget.measured_peak - budget.plan.predicted_peak
        steps(budget, model, batch(), batch(), count=3)
        self.assertLessEqual(budget.plan.predicted_peak, budget.plan.allowed - missed)

    def test_what_cannot_exceed_the_bound_ends_no_training(self):
        model, budget = Net(), StepBudget(share=0.5, strict=True)
        budget.counter = counting_times(0.9, budget)
        with self.assertLogs(*LOG) as logs:
            steps(budget, model, batch(), count=3)
        self.assertEqual(len(logs.output), 1)
        self.assertNotIn("may be exceeded", logs.output[0] + str(budget))

    def test_kernels_that_fail_to_compile(self):
        def make():
            return Net(1, backend="inductor")

        wanted = unbudgeted(make(), batch())
        model, budget = make(), StepBudget(share=1.0)
        broken = mock.patch.object(
            DeferredKernels, "compile", side_effect=RuntimeError("no compiler")
        )
        with broken, self.assertLogs(*LOG) as logs:
            found = steps(budget, model, batch(), count=3)
        self.assertIn("keeps its first plan, as another failed", logs.output[0])
        self.assertEqual(found, wanted)

    def test_graphs_that_a_gpu_replays(self):
        def make():
            options = {"triton.cudagraphs": True}
            return Net(
                1, "inductor", block=lambda **_: Called(torch.sin), options=options
            )

        wanted = unbudgeted(make(), batch())
        for device, said in (("cpu", []), ("cuda", ["it is replayed as a CUDA graph"])):
            budget = StepBudget(share=0.2)
            budget.device = torch.device(device)
            torch._dynamo.reset()
            with contextlib.ExitStack() as stack:
                watch = self.assertLogs if said else self.assertNoLogs
                logs = stack.enter_context(watch(*LOG))
                found = steps(budget, make(), batch())
            self.assertEqual(found, wanted)
            for text in said:
                self.assertIn(text, logs.output[0])

    @parametrize("why", UNPLANNED)
    def test_what_cannot_be_planned_is_said_once(self, why):
        make, train, said = UNPLANNED[why]
        budget = StepBudget(share=0.2)
        model = self.trained(budget, make, train, [said])
        self.assertIn(said, str(budget))
        if train is with_hooks:
            peak = measured(budget, model, batch(), train=train)
            self.assertLessEqual(peak, 1.005 * budget.plan.allowed)
        # What comes then is not disturbed.
        torch._dynamo.reset()
        self.check(Way(lambda: Net(2), calls=(2,)))

    def test_nothing_is_compiled_and_a_step_skips_its_backward(self):
        # As a loop does that catches the error of a batch.
        model, budget = Net(backend=None), StepBudget(share=0.2)
        with self.assertLogs(*LOG) as logs:
            for at in range(6):
                with budget:
                    model.zero_grad()
                    loss = model(batch()).mean()
                    if at != 3:
                        loss.backward()
        (said,) = logs.output
        self.assertIn(UNSEEN, said)

    def test_step_that_is_never_ended(self):
        # As callbacks of a trainer leave it where the step raises.
        resize = torch.UntypedStorage.resize_
        first, budget = StepBudget(share=0.2), StepBudget(share=0.2)
        for left in (budget, first):
            left.__enter__()
            Net()(batch())
        self.assertIsNot(torch.UntypedStorage.resize_, resize)
        model = Net()
        steps(budget, model, batch())
        self.assertIs(torch.UntypedStorage.resize_, resize)
        self.assertEqual(_get_current_dispatch_mode_stack(), [])
        peak = measured(budget, model, batch())
        self.assertLessEqual(peak, 1.005 * budget.plan.allowed)
        # Its end comes late, and ends nothing.
        with budget:
            first.__exit__(None, None, None)
            model(batch()).backward()

    @parametrize("is_callback", (False, True))
    @parametrize("is_recorded", (False, True))
    def test_exception_in_a_loop_that_is_called_back(self, is_callback, is_recorded):
        model, budget = Net(1), StepBudget(share=0.2)
        if not is_recorded:
            steps(budget, model, batch(), count=3)

        def begin():
            budget.__enter__()
            batch().sum()

        def fit():
            begin() if is_callback else budget.__enter__()
            model(batch()).sum().backward()
            self.assertIsNotNone(running_step())
            raise ValueError("a bad batch")

        with config.patch(enable_autograd_cache=True):
            with self.assertRaisesRegex(ValueError, "a bad batch"):
                fit()
            for _ in range(2):
                # What was there at first is kept.
                x = batch() + 1
                del x
            self.assertIsNone(running_step())
            self.assertTrue(config.enable_autograd_cache)
        self.assertEqual(_get_current_dispatch_mode_stack(), [])
        steps(budget, model, batch(), count=3)
        self.assertIsNotNone(budget.plan)

    @unittest.skipIf(not hasattr(os, "fork"), "no processes are forked here")
    def test_process_that_is_forked_in_a_step(self):
        with StepBudget(share=0.2):
            child = os.fork()
            if not child:
                is_free = not _get_current_dispatch_mode_stack()
                os._exit(0 if is_free and running_step() is None else 1)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.assertIsNotNone(running_step())

    def test_first_step_without_a_backward(self):
        model, budget = Net(2), StepBudget(share=0.3, strict=True)
        with self.assertNoLogs(*LOG):
            steps(budget, model, batch(), train=evaluate, count=1)
            steps(budget, model, batch(), count=3)
        self.assertIsNotNone(budget.plan)

    def test_names_of_functions(self):
        def loss(x):
            return F.gelu(x).square().sum()

        x, budget = batch().requires_grad_(), StepBudget(share=0.2)
        for function in (loss, lambda x: F.silu(x).square().sum()):
            compiled = torch.compile(function, backend=AOT)
            for _ in range(2):
                with budget:
                    compiled(x).backward()
        line = function.__code__.co_firstlineno
        place = f"{os.path.basename(__file__)}:{line}"
        names = [graph.name for graph in budget.graphs.values()]
        self.assertEqual(names, ["loss", place])

    def test_loss_of_an_earlier_step(self):
        model, budget, kept = Net(), StepBudget(share=0.5), []
        steps(budget, model, batch())
        with self.assertRaisesRegex(RuntimeError, "skip this batch"), budget:
            kept.append(model(batch()))
            raise RuntimeError("skip this batch")

        def train(model, x):
            x = model.embed(x)
            for block in model.blocks:
                x = block(x)
                kept.clear()
            model.head(x).sum().backward()

        allowed = budget.plan.allowed
        peak = measured(budget, model, batch(), train=train)
        # What is still there of the other step is no part of the plan. Of what goes, the
        # profiler tells only where it saw that made, as by chance in another test.
        self.assertTrue(peak <= 1.005 * allowed or "a step held" in str(budget))

    @parametrize("phase", ("fw_compiler", "bw_compiler"))
    def test_plan_that_does_not_compile(self, phase):
        faults = []

        def sound(graph, _):
            return make_boxed_func(graph.forward)

        def faulty(graph, _):
            if faults:
                raise RuntimeError("no kernel for this split")
            return sound(graph, _)

        compilers = {"fw_compiler": sound, "bw_compiler": sound, phase: faulty}
        partition = partitioners.min_cut_rematerialization_partition
        backend = aot_backend(**compilers, partition_fn=partition)
        before = unbudgeted(Net(backend=backend), batch())
        model, budget = Net(backend=backend), StepBudget(share=0.5)
        steps(budget, model, batch(), count=1)
        faults.append(True)
        with self.assertLogs(*LOG) as logs:
            gradients = steps(budget, model, batch(), count=3)
        self.assertEqual(len(logs.output), 1)
        self.assertIn("RuntimeError: no kernel for this split", logs.output[0])
        self.assertEqual(gradients, before, rtol=0, atol=0)
        # Which outputs only its forward holds, a call knows by the plan that it ran by.
        (graph,) = budget.graphs.values()
        plans, first = graph.plans.plans, graph.current().first
        plans[:] = [plan._replace(outputs=frozenset([0])) for plan in plans]
        plans[first] = plans[first]._replace(outputs=frozenset())
        with budget:
            loss = model(batch())
            for call in running_step()._waiting:
                # The next block holds its storage.
                call.tensors[0] = lambda: None
            dropped = {call.dropped_outputs() for call in running_step()._waiting}
            loss.backward()
        self.assertEqual(dropped, {frozenset()})

    @parametrize(
        "stage",
        (
            "step.compiled_graph.fresh_copy",
            "step.plan_request.PlanRequest.decide",
            "step.call.node_of_backward",
            "step.recorder.Recorder.follow_storage",
            "step.recorder.Recorder.bytes_at_next_start",
            "step.calls.Step.begin",
            "peak.curve.Curve.peak_allowed",
            "peak.curve.Curve.within",
        ),
    )
    def test_error_at_a_stage_of_planning(self, stage):
        fault = mock.patch(f"{PLACE}.{stage}", side_effect=ValueError("injected"))
        before = usual_gradients()
        model, budget = Net(), StepBudget(share=0.5)
        with self.assertLogs(*LOG) as logs, fault:
            gradients = steps(budget, model, batch(), count=4)
        self.assertEqual(gradients, before, rtol=0, atol=0)
        for line in logs.output:
            self.assertIn("ValueError: injected", line)
        self.assertEqual(len(logs.output), len({*logs.output}))
        self.assertIn("injected", str(budget))

    # After one step, there is a recording of it, which has what was traced.
    @parametrize(
        "count, kind", ((1, compiled_graph.CompiledGraph), (3, torch.fx.GraphModule))
    )
    def test_models_that_go(self, count, kind):
        def count_alive():
            torch._dynamo.reset()
            gc.collect()
            return sum(isinstance(each, kind) for each in gc.get_objects())

        budget, before = StepBudget(share=0.5), count_alive()
        for _ in range(2):
            torch._dynamo.reset()
            steps(budget, Net(), batch(), count=count)
        self.assertEqual(count_alive(), before)

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
        with self.assertNoLogs(*LOG):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertIs(torch.UntypedStorage.resize_, resize)
        for k, x in enumerate(batches):
            wanted = unbudgeted(Net(dynamic=False), x)
            self.assertEqual(found[k], wanted, rtol=0, atol=0)

    def test_one_thread_compiles_at_a_time(self):
        compiled = []

        def note(module, inputs):
            compiled.append(compile_lock._is_owned())
            return make_boxed_func(module)

        partition = partitioners.min_cut_rematerialization_partition
        backend = aot_backend(fw_compiler=note, partition_fn=partition)
        model, budget = Net(backend=backend), StepBudget(share=0.5)
        steps(budget, model, batch(), count=1)
        compiled.clear()
        steps(budget, model, batch(), count=1)
        self.assertTrue(compiled)
        self.assertTrue(all(compiled))

    def test_invalid_values(self):
        for message, options in (
            ("share is 2; it must be a number from 0 to 1", {"share": 2}),
            ("share is 'x'", {"share": "x"}),
            ("share is True", {"share": True}),
            ("share is nan", {"share": math.nan}),
            ("peak_bytes is True", {"peak_bytes": True}),
            ("peak_bytes is 0; it must be a positive", {"peak_bytes": 0}),
            ("peak_bytes is -1.5; it must be a positive", {"peak_bytes": -1.5}),
            ("device_bytes is nan; .* whole number", {"device_bytes": math.nan}),
            ("device_bytes is inf", {"device_bytes": math.inf}),
            (
                "device_bytes is '24 apples'; .* as '24GiB'",
                {"device_bytes": "24 apples"},
            ),
            ("peak_bytes is '5i'", {"peak_bytes": "5i"}),
            ("peak_bytes is tensor", {"peak_bytes": torch.ones(2)}),
            ("pass only one of", {"share": 0.5, "peak_bytes": 1}),
        ):
            with self.assertRaisesRegex(ValueError, message):
                StepBudget(**options)
        if not torch.accelerator.is_available():
            with self.assertRaisesRegex(ValueError, "pass share, peak_bytes or"):
                StepBudget()

    def test_bytes_in_other_forms(self):
        for given, nbytes in (
            (0.9 * 2**30, int(0.9 * 2**30)),
            (torch.tensor(7), 7),
            (torch.tensor(7.9), 7),
            ("24GiB", 24 * 2**30),
            ("24 gib", 24 * 2**30),
            ("24GB", 24 * 10**9),
            ("24G", 24 * 10**9),
            ("1.5 GiB", 3 * 2**29),
            (".5KiB", 512),
            ("1.5m", 1_500_000),
            ("512", 512),
        ):
            self.assertEqual(StepBudget(device_bytes=given).device_bytes, nbytes)
        self.assertIs(type(StepBudget(share=Fraction(1, 2)).share), float)

    def test_sizes_that_depend_on_data(self):
        weight = torch.randn(WIDTH, 4 * WIDTH, requires_grad=True)

        @torch.compile(backend=AOT)
        def loss_of_positive_rows(x):
            rows = (x[:, 0] > 0).nonzero().squeeze(1)
            return (x[rows] @ weight).square().mean()

        capture = {"capture_dynamic_output_shape_ops": True}
        with (
            torch._dynamo.config.patch(capture),
            self.assertLogs(*LOG) as logs,
            StepBudget(share=0.5),
        ):
            loss_of_positive_rows(batch()).backward()
        self.assertIn("the size of nonzero depends on data", logs.output[0])

    def test_a_copy_is_a_new_budget(self):
        budget = StepBudget(device_bytes="1KiB", strict=True)
        self.assertEqual(repr(budget), "StepBudget(device_bytes=1024, strict=True)")
        model, budget = Net(1), StepBudget(share=0.3)
        steps(budget, model, batch())
        for copied in (copy.deepcopy(budget), pickle.loads(pickle.dumps(budget))):
            self.assertEqual(repr(copied), repr(budget))
            self.assertIsNone(copied.plan)
            self.assertIsNot(copied.graphs, budget.graphs)

    @parametrize("calls", (None, 4))
    def test_without_a_step_budget(self, calls):
        single_graph_warnings.warn_of_several_calls.cache_clear()
        options = {
            "activation_memory_budget_target": "peak",
            "activation_memory_budget": 0.0,
            "activation_memory_graph_calls": calls,
            "enable_autograd_cache": False,
        }
        with self.assertLogs(*LOG) as logs, config.patch(options):
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

    def test_graphs_of_a_break_wait_for_each_other(self):
        def broken(x, first, second):
            x = (x @ first).sin()
            torch._dynamo.graph_break()
            return (x @ second).sin().sum()

        single_graph_warnings.warn_of_several_calls.cache_clear()
        matrices = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
        options = {
            "activation_memory_budget_target": "peak",
            "activation_memory_budget": 0.2,
            "enable_autograd_cache": False,
        }
        wanted = torch.autograd.grad(broken(*matrices), matrices)
        compiled = torch.compile(broken, backend=AOT)
        with self.assertLogs(*LOG) as logs, config.patch(options):
            found = torch.autograd.grad(compiled(*matrices), matrices)
        self.assertEqual(found, wanted)
        (said,) = logs.output
        self.assertIn("2 calls of 2 graphs wait", said)
        self.assertIn("each graph was planned alone", said)

    @unittest.skipIf(not HAS_CPU, "inductor cannot compile for the CPU here")
    def test_larger_batch_than_one_graph_was_planned_for(self):
        def call(rows):
            x = torch.ones(rows, 8, requires_grad=True)
            compiled(x).sum().backward()

        options = {
            "activation_memory_peak_bytes": 2048,
            "enable_autograd_cache": True,
        }
        caches = {"fx_graph_cache": True, "fx_graph_remote_cache": False}
        with fresh_cache(), config.patch(options), inductor_config.patch(caches):
            for _ in range(2):
                torch._dynamo.reset()
                compiled = torch.compile(torch.sin, dynamic=True)
                with self.assertNoLogs(*LOG):
                    call(16)
                    call(8)
                with self.assertLogs(*LOG) as logs:
                    call(64)
                    call(64)
                self.assertEqual(len(logs.output), 1)
                self.assertIn("planned for the sizes 16, ", logs.output[0])

    def test_longer_inputs_than_one_graph_was_planned_for(self):
        def call(batch, length):
            x = torch.ones(batch, length, 8, requires_grad=True)
            return allocated_at_most(lambda: compiled(x).backward())

        def attend(x):
            return ((x @ x.mT).softmax(-1) @ x).sin().sum()

        limit = 300_000
        with config.patch(activation_memory_peak_bytes=limit):
            compiled = torch.compile(attend, backend=AOT, dynamic=True)
            with self.assertNoLogs(*LOG):
                for sizes in ((16, 32), (20, 16), (12, 30)):
                    self.assertLessEqual(call(*sizes), limit)
            with self.assertLogs(*LOG) as logs:
                # As many bytes of input, but twice as many of scores.
                peak = call(8, 64)
                call(8, 64)
        (said,) = logs.output
        self.assertIn("planned for the sizes 16, 32", said)
        expected = saved_report.format_bytes(peak)
        self.assertIn(f"for 8, 64, 8 the peak is about {expected},", said)

    def test_bodies_are_counted_and_never_exact(self):
        wide = lambda x: x + torch.cat(8 * [x]).sin().sum()  # noqa: E731

        def branch(x):
            return torch.cond(x.sum() > 0, wide, lambda x: wide(x).cos(), (x,))

        net = Net(2, backend=None)
        branch = torch.compile(branch, backend=AOT)
        net.blocks.append(Called(branch))
        budget = StepBudget(share=0.3)
        steps(budget, net, batch(), count=3)
        peak = measured(budget, net, batch())
        self.assertLessEqual(peak, 1.005 * budget.plan.predicted_peak)
        self.assertLessEqual(budget.plan.predicted_peak, 1.02 * peak)
        self.assertNotIn("exact", str(budget))

    def test_another_process_begins_with_the_plan_of_a_file(self):
        with tempfile.TemporaryDirectory() as folder:
            program = f"{folder}/run.json", "inductor" if HAS_CPU else AOT, 2
            with as_another_process():
                first, wanted, plan, _ = steps_by_file(*program)
            again, gradients, plan_again, reasons = in_process(steps_by_file, *program)
        self.assertEqual(first[0][:2], (True, True))
        # Recorded is the first step alone, which compiles by the plan.
        self.assertEqual(again[0][:2], (True, True))
        self.assertTrue(all(step[:2] == (False, False) for step in again[1:]))
        peaks = {peak for *_, peak in (*first[2:], *again[1:])}
        self.assertEqual(len(peaks), 1)
        self.assertLessEqual(again[0][2], 1.005 * max(peaks))
        self.assertEqual(gradients, wanted, rtol=0, atol=0)
        self.assertEqual((plan_again, reasons), (plan, []))

    def test_a_file_of_another_program_is_not_used(self):
        def run(path, **changed):
            with as_another_process():
                return steps_by_file(path, AOT, **changed)

        with tempfile.TemporaryDirectory() as folder:
            first, path, new = (Path(folder, name) for name in ("first", "run", "new"))
            run(first)
            for changed, said in (
                ({"dropout": 0.0}, "differs from the graph that it has plans for"),
                ({"blocks": 2}, "other calls, or eager code held more"),
                ({"held": 2**21}, "other calls, or eager code held more"),
                ({"more": True}, "other calls, or eager code held more"),
            ):
                with self.subTest(**changed):
                    shutil.copy(first, path)
                    found, _, plan, reasons = run(path, **changed)
                    self.assertIn(said, " ".join(reasons))
                    # Planned for anew, as without a file, and stored.
                    new.unlink(missing_ok=True)
                    self.assertEqual(plan, run(new, **changed)[2])
                    self.assertEqual(found[-1][:2], (False, False))
                    self.assertEqual(path.read_text(), new.read_text())

    def test_a_damaged_file_is_not_used(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run.json")
            steps(StepBudget(share=0.2, plan=path), Net(), batch(), count=3)
            self.assertEqual(os.listdir(folder), ["run.json"])
            # Others may read it like any new file.
            other = Path(folder, "other")
            other.touch()
            self.assertEqual(path.stat().st_mode, other.stat().st_mode)
            stored = json.loads(path.read_text())
            for entry, value in (
                ("step", None),
                ("step", ["StoredStep", []]),
                ("step", ["Unknown", []]),
                ("step", ["StoredStep", [None, *stored["step"][1][1:]]]),
                ("step", ["StoredStep", [*stored["step"][1][:-1], ["dict", []]]]),
                ("version", 1),
            ):
                path.write_text(json.dumps({**stored, entry: value}))
                with self.assertLogs(*LOG) as logs:
                    StepBudget(share=0.2, plan=path)
                self.assertIn("run.json is not used: it ", logs.output[0])

    def test_a_file_is_used_where_first_steps_make_what_stays(self):
        def run(path, held=0):
            model, budget = Net(), StepBudget(share=0.2, plan=path, strict=not held)
            optimizer = torch.optim.Adam(model.parameters())
            with as_another_process():
                for _ in range(1 if held else 4):
                    with budget:
                        optimizer.zero_grad()
                        beside = torch.empty(held, dtype=torch.uint8)
                        train(model, batch())
                        del beside
                        optimizer.step()
            return budget

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "run.json")
            plan = run(path).plan
            with self.assertNoLogs(*LOG):
                again = run(path)
            # All else that such a step holds counts.
            with self.assertLogs(*LOG) as logs:
                run(path, held=2 * plan.allowed)
        self.assertEqual((again.plan, again.reasons), (plan, []))
        self.assertIn("a step held", logs.output[0])

    def test_a_file_that_is_no_plan_is_not_overwritten(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "train.py")
            with open(path, "w") as file:
                file.write("import torch\n")
            with self.assertRaisesRegex(ValueError, "train.py exists and is not the"):
                StepBudget(share=0.2, plan=path)
            with self.assertRaisesRegex(FileNotFoundError, "no such folder: .*runs"):
                StepBudget(share=0.2, plan=os.path.join(folder, "runs", "run.json"))

    def test_a_file_for_other_memory_is_not_used(self):
        memory = mock.patch.object(step_budget, "memory_of", side_effect=[2**30, 2**31])
        with tempfile.TemporaryDirectory() as folder, memory:
            path = os.path.join(folder, "run.json")
            steps(StepBudget(plan=path), Net(), batch(), count=3)
            with self.assertLogs(*LOG) as logs:
                StepBudget(plan=path)
        self.assertIn("it was made with bound {'device_bytes': 1073", logs.output[0])

    def test_a_plan_that_is_not_stored_hides_no_warning(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "run.json")
            budget, model = StepBudget(share=0.2, plan=path), Net()
        steps(budget, model, batch(), count=3)
        self.assertIn("the plan could not be stored", " ".join(budget.reasons))
        self.assertFalse(budget.has_unplanned)

    def test_no_file_where_sizes_vary(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "run.json")
            budget, model = StepBudget(share=0.2, plan=path), Net(dynamic=True)
            steps(budget, model, batch(), count=3)
            self.assertFalse(os.path.exists(path))

    def test_no_file_where_a_smaller_call_holds_more(self):
        class Attention(nn.Linear):
            def forward(self, x):
                q, k, v = super().forward(x).chunk(3, -1)
                return ((q @ k.mT).softmax(-1) @ v).square().mean()

        model = Attention(WIDTH, 3 * WIDTH)
        model.compile(backend=AOT, dynamic=False)
        sizes = (16, 32, WIDTH), (3, 96, WIDTH)
        with tempfile.TemporaryDirectory() as folder, self.assertNoLogs(*LOG):
            path = os.path.join(folder, "run.json")
            budget = StepBudget(share=0.2, plan=path)
            steps(budget, model, *map(torch.ones, sizes), count=4)
            (graph,) = budget.graphs.values()
            self.assertEqual((graph.scale, graph.sizes_vary), (1.0, True))
            self.assertFalse(os.path.exists(path))

    @unittest.skipIf(not HAS_GLOO, "no gloo here")
    def test_what_is_traced_while_a_step_runs_does_not_count(self):
        # DDP compiles the parts of a model in their first call, in any recorded step.
        with tempfile.TemporaryDirectory() as folder:
            join_ranks(0, os.path.join(folder, "init"), count=1)
            try:
                replicas = nn.parallel.DistributedDataParallel(Net(backend=None))
                model = torch.compile(replicas, backend=AOT, dynamic=False)
                budget = StepBudget(share=0.2)
                for rows in (BATCH // 4, BATCH // 2, BATCH, BATCH):
                    steps(budget, model, batch(rows), count=1)
                peak = measured(budget, model, batch())
            finally:
                torch.distributed.destroy_process_group()
        self.assertLessEqual(abs(budget.plan.predicted_peak - peak), 0.005 * peak)

    @unittest.skipIf(not HAS_GLOO, "no gloo here")
    # Both would wait for each other forever.
    @unittest.skipIf(
        torch.version.cuda is not None and not torch.cuda.is_available(),
        "a CUDA build without a GPU",
    )
    def test_two_ranks(self):
        one, other = in_two_ranks(rank)
        for way in WAYS:
            with self.subTest(way=way):
                for peak, plan, is_same in (one[way], other[way]):
                    self.assertTrue(is_same)
                    self.assertLessEqual(peak, plan.allowed + 0.05 * peak)
                    self.assertLessEqual(abs(peak - plan.predicted_peak), 0.05 * peak)
                # As long as they train by the same program.
                self.assertEqual(one[way][1] == other[way][1], way != "pipeline")
        with self.subTest(way="file"):
            # DDP makes its buckets again in the second step.
            for before, plan, reasons in (one["file"], other["file"]):
                self.assertEqual(before, plan)
                self.assertIsNotNone(plan)
                self.assertNotIn("not used", " ".join(reasons))


instantiate_parametrized_tests(StepBudgetTest)


if __name__ == "__main__":
    run_tests()
