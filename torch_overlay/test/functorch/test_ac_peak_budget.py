# Owner(s): ["module: functorch"]
"""A budget that means peak memory: the model of live bytes, and plans made with it.

Peaks are measured on running programs: every storage that an operator returns is
followed by a weak reference.  Gradients are those of eager mode, or, where the forward
draws random numbers, fit finite differences of the compiled forward itself.
"""

import functools
import gc
import inspect
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import types
import unittest
import weakref
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch._inductor.config as inductor_config
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config, partitioners
from torch._functorch._activation_checkpointing import (
    memory_budget,
    peak_budget,
    planning,
    saved_report,
)
from torch._functorch._activation_checkpointing.fused_peak import by_kernels
from torch._functorch._activation_checkpointing.liveness import (
    CannotPlan,
    lower_bound,
    read,
)
from torch._functorch._activation_checkpointing.rerun_cost import rerun_cost
from torch._functorch._activation_checkpointing.saved_report import last_plan, plans
from torch._functorch.compilers import nop
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._inductor.custom_graph_pass import CustomRuntimeEstimator
from torch._inductor.utils import fresh_cache
from torch.distributed._functional_collectives import all_reduce
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


AOT = "aot_eager_decomp_partition"
LOGS = "torch._functorch"
# Leaves an input that is overwritten to the forward's graph, as inductor does.
AOT_KEEPING = aot_autograd(
    fw_compiler=nop,
    partition_fn=partitioners.min_cut_rematerialization_partition,
    keep_inference_input_mutations=True,
)


# What options are not, in any plan.
WRONG = {
    "activation_memory_budget_target": ("peek", None, True),
    "activation_memory_peak_bytes": (0, -1, 1.5, "1GB", True, math.nan),
    "activation_memory_peak_margin": (-0.1, math.nan, "5%", None, 1, True, 10**30),
    "activation_memory_graph_calls": ("2", math.nan, 0, -1, 1.5, True, 10**30),
    "activation_memory_peak_judge": ("2", math.nan, 1, -1, None, True, 10**30),
    "drop_unread_arguments": ("no", None, 1),
}


@contextmanager
def configured(budget, target="peak", peak_bytes=None, **options):
    with (
        config.patch(
            activation_memory_budget=budget,
            activation_memory_budget_target=target,
            activation_memory_peak_bytes=peak_bytes,
            # Every plan is made here, and gradcheck runs a backward twice.
            enable_autograd_cache=False,
            **options,
        ),
        inductor_config.patch(
            {
                "fx_graph_cache": False,
                "cpp_cache_precompile_headers": False,
                # Finding out what this CPU's vectors are takes longer than a kernel.
                "cpp.simdlen": 1,
            }
        ),
    ):
        yield


class LiveBytes(TorchDispatchMode):
    """Most bytes that were live at once, of the storages that operators returned."""

    # What happens in their subgraphs is not seen, only what they return.
    supports_higher_order_operators = True

    def __init__(self, given):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in given}
        self.live = self.peak = 0

    @classmethod
    def ignore_compile_internals(cls):
        # Otherwise torch.compile would run a step in eager mode under this one.
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(
                        storage, self.died, storage._cdata, storage.nbytes()
                    )
        return result

    def died(self, key, nbytes):
        self.known.remove(key)
        self.live -= nbytes


class Case(NamedTuple):
    """A function that returns a scalar, its inputs, and what gets a gradient."""

    function: object
    inputs: tuple
    leaves: tuple
    given: tuple


def case(function, *inputs):
    given = list(inputs)
    if isinstance(function, nn.Module):
        given += [*function.parameters(), *function.buffers()]
    given = [t for t in given if isinstance(t, torch.Tensor)]
    leaves = [t for t in given if t.requires_grad]
    return Case(function, inputs, tuple(leaves), tuple(given))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        y = F.scaled_dot_product_attention(*(p.transpose(1, 2) for p in parts))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Loss(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).square().mean()


def transformer():
    model = Loss(*(Block(16, 2) for _ in range(2))).double()
    return case(model, torch.randn(4, 32, 16, dtype=torch.double))


def stack(count, *kinds):
    """Layers of each of these kinds, again and again."""
    return Loss(*(kind() for _ in range(count) for kind in kinds)).double()


def convolutions():
    convolution = functools.partial(nn.Conv2d, 4, 4, 3, padding=1)
    model = stack(3, convolution, lambda: nn.BatchNorm2d(4), nn.ReLU)
    return case(model, torch.randn(8, 4, 8, 8, dtype=torch.double))


def dropouts():
    model = stack(3, lambda: nn.Linear(24, 24), nn.Tanh, lambda: nn.Dropout(0.3))
    return case(model, torch.randn(64, 24, dtype=torch.double))


NETS = {f.__name__: f for f in (transformer, convolutions, dropouts)}


class Step(NamedTuple):
    loss: torch.Tensor
    gradients: list
    peak: int


def step(function, given):
    """One step on a case's data, measured."""
    for leaf in given.leaves:
        leaf.grad = None
    gc.collect()
    torch.manual_seed(1)
    with LiveBytes(given.given) as recording:
        loss = function(*given.inputs)
        loss.backward()
    return Step(
        loss.detach(), [leaf.grad.clone() for leaf in given.leaves], recording.peak
    )


class Scaled(torch.autograd.Function):
    """Saves a size beside a tensor."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.rows = x.shape[0] * 2 + 1
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos() * ctx.rows


class Sine(torch.autograd.Function):
    """Saves its argument; each backward needs that in another way."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()


class Early(Sine):
    """Computes in the backward what needs no gradient, long before it is used."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad = grad * 2
        cosines = torch.cat(4 * [x.cos()])
        largest = torch.cat(4 * [grad]).amax()
        return cosines.unflatten(0, (4, -1)).amax(0) * grad * (1 + largest)


class ConstantFirst(Sine):
    """Makes a constant before it needs what may have to be computed again."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad = grad * 2
        return torch.addcmul(grad, x, torch.ones_like(grad))


class ViewFirst(Sine):
    """Views what may have to be computed again, and needs it later."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad = grad * 2
        x = x.view(-1)
        grad = grad + tall(torch.cat((grad, grad)))[: len(grad)]
        return grad * x.view(grad.shape)


class Variance(torch.autograd.Function):
    """Returns one result of an operator, and saves the other."""

    @staticmethod
    def forward(ctx, x):
        variance, mean = torch.var_mean(x.unflatten(0, (2, -1)), 0)
        ctx.save_for_backward(mean)
        return variance

    @staticmethod
    def backward(ctx, grad):
        (mean,) = ctx.saved_tensors
        return (grad * mean).repeat(2, 1)


def tall(x):
    """Needs much more memory for a moment than before and after it."""
    return torch.cat(8 * [x]).unflatten(0, (8, -1)).amax(0)


def square(*shape):
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


def layers(layer, count=2, side=8):
    """``layer(x, w)`` again and again."""

    def function(x, *weights):
        for w in weights:
            x = layer(x, w)
        return x.square().mean()

    return case(
        function, square(4 * side, side), *(square(side, side) for _ in range(count))
    )


def dense(x, w):
    return (x @ w).tanh().exp().sin()


def checkpointed(layer=dense, policy=None):
    """``layer`` under torch.utils.checkpoint, ``policy`` telling what to do with its mm."""

    def choose(context, op, *args, **kwargs):
        product = op is torch.ops.aten.mm.default
        return policy if product else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    options = {} if policy is None else {"context_fn": contexts}
    return functools.partial(checkpoint, layer, use_reentrant=False, **options)


@torch.compiler.nested_compile_region
def region(x, w):
    return dense(x, w)


def several_results(x, w):
    first, second = (x @ w).tanh().chunk(2, -1)
    top = torch.topk(second.exp(), 4, -1)
    y = torch.cat((first.exp() + top.values, second.sin()), -1)
    normed, *rest = torch.native_layer_norm(y, y.shape[-1:], None, None, 1e-5)
    return (normed * rest[1]).tanh()


def views(x, w):
    y = (x @ w).tanh()
    z = y.view(-1, 2, y.shape[-1] // 2).transpose(0, 1)
    flat = z[1].t().reshape(-1).exp().view(z.shape[-1], -1)
    y = torch.cat((z[0], flat.t()), -1)
    return y.as_strided(y.shape, y.stride()).exp().tanh()


def branch(x, w):
    return torch.cond(x.sum() > 0, dense, lambda x, w: (x @ w).cos(), (x, w))


def shaped(x, w):
    return (Scaled.apply((x @ w).tanh().exp()) / x.shape[0]).sin()


def early(x, w):
    return Early.apply(x @ w)


LAYERS = {
    "dense": dense,
    "checkpoint": checkpointed(),
    "several_results": several_results,
    "views": views,
    "early": early,
    # What one checkpoint hands to the next is a view.
    "checkpointed_view": checkpointed(lambda x, w: (x @ w).sin().t().contiguous().t()),
    # Or one of two results, both of which are made again.
    "checkpointed_part": checkpointed(
        lambda x, w: Variance.apply(torch.cat((x, x.sin())) @ w)
    ),
}


def returns_gaps(x, w, *buffers):
    # Its tangent has gaps as well: what autograd gives is copied.
    return [torch.cat((x @ w, x.sin()), -1)[:, ::2]]


def returns_gaps_of_no_use(x, w, *buffers):
    # As before, but that no gradient needs the copy does not end it.
    return [(x @ w).sin(), torch.cat((x @ w, x), -1).sign()[:, ::2]]


def returns_a_part(x, w, *buffers):
    # Its backward needs the other part, and makes both again.
    y = Variance.apply((x @ w).sin())
    return [y, y.tanh().exp()]


def returns_from_a_checkpoint(x, w, *buffers):
    # Made again although the caller has it.
    y = checkpointed(lambda x, w: (x @ w).sin().t())(x, w)
    return [y, y.exp().sin()]


def returns_early(x, w, *buffers):
    # And held while the forward goes on.
    return [*returns_from_a_checkpoint(x, w), tall(x.detach())]


def constant_first(x, w, *buffers):
    return [checkpointed(lambda x, w: ConstantFirst.apply(tall(x @ w)))(x, w)]


def view_first(x, w, *buffers):
    return [checkpointed(lambda x, w: ViewFirst.apply(tall(x @ w)))(x, w)]


def writes_back(x, w, mean, var):
    # What is copied into the statistics is dropped.
    return [F.batch_norm(x @ w, mean, var, training=True).exp()]


def writes_back_at_the_end(x, w, mean, var):
    # Not before the forward has come to its end.
    mean.add_(1)
    var.mul_(2)
    return [tall(x.detach()), x @ w]


RETURNING = (
    returns_gaps,
    returns_gaps_of_no_use,
    returns_a_part,
    returns_from_a_checkpoint,
    returns_early,
    constant_first,
    view_first,
    writes_back,
    writes_back_at_the_end,
)


ticks = []


@torch.library.custom_op("test_ac_peak_budget::tick", mutates_args=())
def tick(x: torch.Tensor) -> torch.Tensor:
    ticks.append(1)
    return x.clone()


@tick.register_fake
def _(x):
    return torch.empty_like(x)


tick.register_autograd(lambda ctx, grad: grad)


def overwritten_after(x, w, buffer):
    y = (x @ w).sin() * buffer.exp()
    buffer.add_(1)
    return (y.tanh() @ w).tanh().square().mean()


def overwritten_statistics(x, w, buffer):
    # Eager mode needs no statistics for a gradient here, a repeated node would.
    y = F.batch_norm(x.detach().tanh(), buffer, buffer.exp(), training=False)
    buffer.add_(1)
    return ((y * w[0]).sin() @ w * x).tanh().square().mean()


OVERWRITTEN = (overwritten_after, overwritten_statistics)


class ByElements(CustomRuntimeEstimator):
    def __call__(self, node):
        return float(node.meta["val"].numel())

    def uuid(self):
        return "elements"


def rank(number, place):
    """What one of two processes saves, and its peak."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{place}",
        rank=number,
        world_size=2,
        timeout=timedelta(seconds=120),
    )

    def everywhere(x, w):
        y = dense(x, w)
        return y * all_reduce(y.detach(), "sum", torch.distributed.group.WORLD)

    torch.manual_seed(0)
    given = layers(everywhere, 2)
    try:
        with configured(0.2, _sync_decision_cross_ranks=True):
            torch.compile(given.function, backend=AOT)(*given.inputs).backward()
    finally:
        torch.distributed.destroy_process_group()
    return [[value.name for value in last_plan().saved], list(last_plan().peak)]


def needs_two_ranks(test):
    no_gloo = not (
        torch.distributed.is_available() and torch.distributed.is_gloo_available()
    )
    no_gpu = torch.version.cuda is not None and not torch.cuda.is_available()
    return unittest.skipIf(no_gloo, "no gloo here")(
        # Both would wait for each other forever.
        unittest.skipIf(no_gpu, "a CUDA build without a GPU")(test)
    )


def in_two_ranks(module):
    """What ``rank`` of a test's module returns in each of two processes."""
    with tempfile.TemporaryDirectory() as folder:
        place = os.path.join(folder, "init")
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import json, os, {module} as t; "
                    f"found = t.rank({number}, {place!r}); "
                    "print(json.dumps(found), flush=True); "
                    # Where DDP ran, an interpreter may never come to its end.
                    "os._exit(0)",
                ],
                env={**os.environ, "PYTHONHASHSEED": str(number)},
                cwd=os.path.dirname(os.path.abspath(__file__)),
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        try:
            # One may wait forever for the other, if that fails.
            outputs = [process.communicate(timeout=150)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


class PeakBudgetTest(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()
        saved_report._plans.clear()
        torch.manual_seed(0)

    def compiled(self, given, backend=AOT, **options):
        torch._dynamo.reset()
        saved_report._plans.clear()
        return torch.compile(given.function, backend=backend, **options)

    def check(self, given, budgets=(0,), measure=True, **options):
        """Gradients are eager's at every budget, and peaks what they are said to be."""
        expected = step(given.function, given)
        for budget in budgets:
            with self.subTest(budget=budget), configured(budget):
                compiled = self.compiled(given, **options)
                step(compiled, given)
                found = step(compiled, given)
                self.assertEqual(found.loss, expected.loss)
                self.assertEqual(found.gradients, expected.gradients)
                if measure:
                    self.check_peak(found.peak)

    def check_peak(self, measured):
        peak = last_plan().peak
        self.assertLessEqual(abs(peak.predicted - measured), 0.005 * measured)
        self.assertLessEqual(peak.predicted, peak.allowed)
        self.assertLessEqual(measured, peak.allowed)

    def watched(self, given, ask):
        """The compiled function, and what ``ask`` says of the search's arguments.

        What fails inside of the planner is a warning: asserted is outside.
        """
        answers = []
        original = peak_budget.find_plans

        def watch(*args):
            answers.append(ask(*args))
            return original(*args)

        with patch.object(peak_budget, "find_plans", watch), configured(0.3):
            compiled = self.compiled(given)
            step(compiled, given)
        (answer,) = answers
        return compiled, answer

    def joint(self, given):
        """The joint graph, as a planner has it."""
        made = []
        decide = partitioners.decide

        def watch(joint, info, outputs, budget, *more):
            made.append(memory_budget.Planner(joint, info, outputs, budget))
            return decide(joint, info, outputs, budget, *more)

        with patch.object(partitioners, "decide", watch), configured(0.3):
            self.compiled(given)(*given.inputs)
        (joint,) = made
        return joint

    @staticmethod
    def plan(joint, budget, fused=False, **options):
        with configured(budget, **options):
            asked = joint.joint, joint.info, joint.num_fwd_outputs
            return planning.decide(*asked, budget, fused=fused)

    # ------------------------------------------------------- model and planner

    def check_gradients_of_this_forward(self, given, compiled):
        """Along one direction they are the finite differences under the same seed."""
        direction = [torch.randn_like(leaf) for leaf in given.leaves]
        found = step(compiled, given)
        slope = sum((g * d).sum() for g, d in zip(found.gradients, direction))
        losses = []
        for shift in (1e-6, -2e-6):
            with torch.no_grad():
                for leaf, d in zip(given.leaves, direction):
                    leaf += shift * d
            losses.append(step(compiled, given).loss)
        self.assertEqual(slope, (losses[0] - losses[1]) / 2e-6, rtol=1e-6, atol=1e-9)
        self.assertNotEqual(slope, 0)

    @parametrize("net", NETS)
    def test_nets(self, net):
        draw = random.Random(0)

        def ask(graph, *args):
            # As one by one, and more of them than an integer has bits.
            plans = [
                {s for s in range(len(graph.nbytes)) if draw.random() < k / 70}
                for k in range(70)
            ]
            for alone, together in zip(
                map(graph.evaluate, plans), graph.evaluate_all(plans), strict=True
            ):
                for name in ("forward_peak", "step_peaks", "repeated_by_step", "saved"):
                    self.assertEqual(getattr(together, name), getattr(alone, name))
            return graph, *(find_plans(graph, *args).curve() for _ in range(2))

        find_plans = peak_budget.find_plans
        given = NETS[net]()
        expected = step(given.function, given)
        with self.assertNoLogs(LOGS, "WARNING"):
            compiled, (graph, curve, again) = self.watched(given, ask)
        found = step(compiled, given)
        self.check_peak(found.peak)
        if net == "dropouts":
            self.check_gradients_of_this_forward(given, compiled)
        else:
            self.assertEqual(found.gradients, expected.gradients)
        # No plan does better, and the best of these is not far from it.
        self.assertLessEqual(lower_bound(graph), curve.floor)
        self.assertGreater(lower_bound(graph), curve.floor / 2)
        self.assertEqual(curve.plans, again.plans)
        chosen = [curve.within(curve.allowed(k / 40)) for k in range(41)]
        for k, plan in enumerate(chosen):
            self.assertLessEqual(plan.peak, curve.allowed(k / 40))
        for low, high in zip(chosen, chosen[1:]):
            self.assertLessEqual(low.peak, high.peak)
            self.assertGreaterEqual(low.cost, high.cost)
        self.assertEqual(chosen[0].peak, curve.floor)
        self.assertEqual(chosen[-1], curve.fastest)
        self.assertGreater(len({plan.peak for plan in chosen}), 2)
        # One byte less than a plan's peak excludes it.
        for low, high in zip(curve.plans, curve.plans[1:]):
            self.assertEqual(curve.within(high.peak - 1), low)
            if high.peak < curve.fastest.peak:
                self.assertEqual(curve.within(high.peak), high)

    def test_items_join_by_density_where_there_is_room(self):
        def ask(graph, cheapest, expensive, *_):
            plans = peak_budget.Plans(graph, peak_budget.rerun_costs(graph, expensive))
            nothing = frozenset()
            evaluation = plans.evaluate([nothing])[nothing]
            # All is repeated for one step, so the forward's peak is all that grows.
            low = evaluation.forward_peak
            targets = range(low, 3 * low, low // 20)
            found = list(plans.with_items(nothing, evaluation, targets))
            return [
                (target, graph.evaluate(more).forward_peak, graph.nbytes, more)
                for target, more in zip(targets, found)
            ]

        # The narrow results of these cost more per byte than the wide ones.
        weights = [square(*shape) for shape in 3 * [(8, 64), (64, 8)]]
        given = case(layers(dense).function, square(32, 8), *weights)
        _, found = self.watched(given, ask)
        for target, peak, nbytes, more in found:
            self.assertLessEqual(peak, target)
            sizes = sorted(nbytes[s] for s in more)
            expected = 3 * [8 * 32 * 8] + 3 * [8 * 32 * 64]
            self.assertEqual(sizes, expected[: len(sizes)])
        self.assertEqual(len(found[-1][-1]), 6)

    # ------------------------------------------------------------ the setting

    def test_other_targets_are_left_alone(self):
        joint = self.joint(layers(dense))
        for budget, target in ((0, "saved"), (0.5, "saved"), (1, "peak")):
            self.assertEqual(
                self.plan(joint, budget, target=target),
                memory_budget.decide(joint, budget),
            )
        self.assertEqual(self.plan(joint, 0.3).decided_by, "peak")

    def test_a_number_of_bytes(self):
        joint = self.joint(layers(dense, 6))
        lowest = self.plan(joint, 0)
        floor, fastest = lowest.peak.floor, lowest.peak.fastest
        self.assertEqual(lowest.peak.allowed, floor)
        limit = (floor + fastest) // 2
        with self.assertNoLogs(LOGS, "WARNING"):
            for target in ("saved", "peak"):
                found = self.plan(joint, 1, target=target, peak_bytes=limit)
                self.assertEqual(found.peak.allowed, limit)
                self.assertLessEqual(found.peak.predicted, limit)
            self.plan(joint, 1, peak_bytes=floor)
        with self.assertLogs(LOGS, "WARNING") as said:
            found = self.plan(joint, 1, peak_bytes=floor - 1)
        self.assertEqual(len(said.output), 1)
        self.assertIn(f" {floor - 1},", said.output[0])
        self.assertIn(f" {floor} bytes", said.output[0])
        self.assertEqual(found.saved_values, lowest.saved_values)
        # With room for it, kernels get the plan of budget 1 as it is.
        found = self.plan(joint, 0, fused=True, peak_bytes=2 * fastest)
        self.assertEqual(
            found.saved_values, memory_budget.decide(joint, 1).saved_values
        )

    def test_wrong_settings(self):
        joint = self.joint(layers(dense, 1))
        short = {
            "activation_memory_budget_target": "target",
            "activation_memory_peak_bytes": "peak_bytes",
        }
        for option, values in WRONG.items():
            if not hasattr(config, option):
                continue
            for value, target in itertools.product(values, ("saved", "peak")):
                given = {"target": target, short.get(option, option): value}
                message = re.escape(f"{option} is {value!r}; it must be")
                with self.assertRaisesRegex(RuntimeError, message):
                    self.plan(joint, 0.5, **given)
        for budget in (1.5, True, "0.5", torch.tensor(0.5)):
            message = re.escape(f"budget is {budget!r}; it must be")
            with self.assertRaisesRegex(RuntimeError, message):
                self.plan(joint, budget)

    @unittest.skipUnless(
        hasattr(torch.autograd.graph, "region_activation_memory_budget"),
        "this torch has no budget for a region",
    )
    def test_a_budget_for_a_region(self):
        given = layers(dense)

        def inside(*inputs):
            with torch.autograd.graph.region_activation_memory_budget(0.3):
                return given.function(*inputs)

        with configured(1):
            self.compiled(given._replace(function=inside))(*given.inputs)
        self.assertEqual(last_plan().decided_by, "peak")
        self.assertEqual(last_plan().budget, 0.3)

    def test_estimators(self):
        option = "activation_memory_budget_runtime_estimator"

        def searched(graph, cheapest, expensive, *more):
            by_name.append(peak_budget.rerun_costs(graph, expensive))
            return find_plans(graph, cheapest, expensive, *more)

        by_name = []
        find_plans = peak_budget.find_plans
        joint = self.joint(layers(dense, 2))
        with (
            self.assertNoLogs(LOGS, "WARNING"),
            patch.object(peak_budget, "find_plans", searched),
        ):
            for estimator in ("flops", "roofline", "testing", ByElements()):
                self.plan(joint, 0.3, **{option: estimator})
        flops, roofline, testing, elements = by_name
        # Two products and a reduction have a cost, unless bytes count as well.  These
        # products are so small that they move more bytes than they take FLOP.
        product = 8 * (32 * 8 + 8 * 8 + 32 * 8)
        self.assertEqual([c for c in flops if c], [product, product, 1])
        self.assertGreater(min(roofline), 0)
        self.assertEqual([c for c in testing if c], [1, 1, 1])
        self.assertEqual([c for c in elements if c], [32 * 8, 32 * 8, 1])

    def test_custom_operators_have_the_price_that_they_have_elsewhere(self):
        def ask(graph, cheapest, expensive, *_):
            costs = dict(zip(graph.nodes, peak_budget.rerun_costs(graph, expensive)))
            (node,) = (node for node in costs if "tick" in str(node.target))
            return costs[node], rerun_cost(node)

        def function(x, w):
            return (tick(x @ w).sin() @ w).exp().sum()

        given = case(function, *(square(*shape) for shape in ((32, 8), (8, 8))))
        _, (price, elsewhere) = self.watched(given, ask)
        self.assertEqual(price, elsewhere)
        self.assertEqual(price, 2 * 8 * 32 * 8)

    def test_the_cache_tells_plans_apart(self):
        given = layers(torch.matmul, 1)

        def word(**options):
            torch._dynamo.reset()
            counters.clear()
            with (
                configured(0.2, **options),
                config.patch(enable_autograd_cache=True),
                inductor_config.patch(fx_graph_cache=True, fx_graph_remote_cache=False),
            ):
                torch.compile(torch.matmul)(*given.inputs).sum().backward()
            cache = counters["aot_autograd"]
            return [w for w in ("hit", "miss") if cache[f"autograd_cache_{w}"]]

        with fresh_cache():
            for options in ({"target": "saved"}, {}, {"peak_bytes": 10**7}):
                self.assertEqual(word(**options), ["miss"])
            # What cannot be reached is said of a plan from the cache as well.
            for expected in ("miss", "hit"):
                with self.assertLogs(LOGS, "WARNING") as said:
                    self.assertEqual(word(peak_bytes=1), [expected])
                self.assertEqual(len(said.output), 1)
                self.assertIn("activation_memory_peak_bytes is 1,", said.output[0])

    # --------------------------------------------------------------- edges

    @parametrize("name", LAYERS)
    def test_layers(self, name):
        with self.assertNoLogs(LOGS, "WARNING"):
            self.check(layers(LAYERS[name]), (0.4,) if name == "dense" else (0,))

    @parametrize("function", RETURNING)
    def test_what_the_caller_holds(self, function):
        buffers = [torch.zeros(8, dtype=torch.double) for _ in range(2)]
        given = case(function, square(32, 8), square(8, 8), *buffers)
        with configured(0):
            compiled = self.compiled(given)
            for _ in range(2):
                gc.collect()
                with LiveBytes(given.given) as recording:
                    outputs = compiled(*given.inputs)
                    roots = [output for output in outputs if output.requires_grad]
                    tangents = [torch.ones_like(root) for root in roots]
                    torch.autograd.grad(roots, given.leaves, tangents)
                del outputs, roots, tangents
        self.assertEqual(recording.peak, last_plan().peak.predicted)

    # The bytes that live only within their subgraphs are unknown.
    @parametrize("layer", [branch, region])
    def test_higher_order_operators(self, layer):
        with self.assertNoLogs(LOGS, "WARNING"):
            self.check(layers(layer, 2), measure=False)

    def test_symbolic_shapes(self):
        with self.assertNoLogs(LOGS, "WARNING"):
            self.check(layers(shaped), dynamic=True)
        self.assertIn("input", {v.why for v in last_plan().saved if not v.nbytes})

    def test_policies_hold(self):
        def kept(policy):
            self.check(layers(checkpointed(policy=policy)), (0.5,))
            return [v.op for v in last_plan().saved if v.why != "input"]

        self.assertEqual(kept(CheckpointPolicy.MUST_SAVE), ["aten.mm.default"] * 2)
        self.assertNotIn("aten.mm.default", kept(CheckpointPolicy.MUST_RECOMPUTE))

    @parametrize("function", OVERWRITTEN)
    @parametrize("backend", [AOT, AOT_KEEPING])
    def test_overwritten_inputs(self, function, backend):
        x, w = square(8, 8), square(8, 8)

        def run(function):
            x.grad = w.grad = None
            buffer = torch.linspace(0, 1, 8, dtype=torch.double)
            function(x, w, buffer).backward()
            return x.grad, w.grad, buffer

        expected = run(function)
        with configured(0):
            self.assertEqual(run(torch.compile(function, backend=backend)), expected)

    def test_effects_happen_once(self):
        handle = _register_effectful_op(tick._opoverload, _EffectType.ORDERED)
        try:
            given = layers(lambda x, w: tick(dense(x, w)).tanh())
            expected = step(given.function, given)
            with configured(0), self.assertNoLogs(LOGS, "WARNING"):
                compiled = self.compiled(given)
                ticks.clear()
                self.assertEqual(step(compiled, given).gradients, expected.gradients)
                self.assertEqual(len(ticks), 2)
        finally:
            handle.destroy()

    def test_graph_breaks(self):
        def broken(x, *weights):
            x = dense(x, weights[0])
            torch._dynamo.graph_break()
            return dense(x, weights[1]).square().mean()

        self.check(layers(dense, 2)._replace(function=broken), (0.2,), measure=False)
        self.assertEqual([plan.decided_by for plan in plans()], ["peak", "peak"])

    def test_frozen_convolutions(self):
        class Normed(nn.Module):
            def forward(self, x):
                return x / torch.cat(4 * [x.detach()]).amax()

        # The peak is in the forward, while the masks of the wide layers are kept.
        widths = (3, 16, 16, 16, 16, 2, 2)
        pairs = zip(widths, widths[1:])
        layers = [(nn.Conv2d(i, o, 3, padding=1), nn.ReLU()) for i, o in pairs]
        layers.insert(4, (Normed(),))
        model = Loss(*(part for some in layers for part in some)).requires_grad_(False)
        model.layers[0].requires_grad_(True)
        self.check(case(model.double(), torch.randn(2, 3, 8, 8).double()))

    def test_masks_keep_what_they_are_made_of(self):
        # They are made at the end of the forward.
        def function(x, *weights):
            return sum((x @ w).relu().sum() for w in weights)

        weights = [square(8, 32) for _ in range(4)]
        self.check(case(function, square(16, 8), *weights), (0.4,))

    def test_nothing_to_plan(self):
        w = square(4)
        for function in (torch.sum, lambda w: (w.detach().exp() + w).sum()):
            with self.assertNoLogs(LOGS, "WARNING"):
                self.check(case(function, w), measure=False)

    def test_outputs_stay_live(self):
        def function(x, w):
            large = (x @ w).tanh().exp()
            return large, dense(dense(large, w), w).square().mean()

        given = case(function, square(32, 8), square(8, 8))

        def run(function):
            kept = []

            def last(*inputs):
                kept.extend(function(*inputs))
                return kept[-1]

            return step(last, given)

        expected = run(function)
        with configured(0):
            compiled = self.compiled(given)
            run(compiled)
            found = run(compiled)
        self.assertEqual(found.gradients, expected.gradients)
        self.check_peak(found.peak)

    @parametrize("place", ("find_plans", "read"))
    def test_where_none_can_be_made_the_plan_is_upstreams(self, place):
        given = layers(dense)
        joint, expected = self.joint(given), step(given.function, given)
        with (
            patch.object(peak_budget, place, side_effect=ValueError("out of ideas")),
            self.assertLogs(LOGS, "WARNING") as said,
        ):
            found = self.plan(joint, 0.3)
            with configured(0.3):
                gradients = step(self.compiled(given), given).gradients
        saved = partitioners.choose_saved_values_set(joint.joint, joint.info, 0.3)
        self.assertEqual(found.saved_values, saved)
        self.assertEqual(gradients, expected.gradients)
        self.assertEqual(last_plan().decided_by, "upstream")
        self.assertEqual(len(said.output), 2)
        for line in said.output:
            self.assertIn("upstream's plan", line)
            self.assertRegex(line, r"for PeakBytes\(.*\): ValueError: out of ideas")

    def test_values_without_storage(self):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.eye(2).to_sparse()
        graph.output((x, x))
        info = types.SimpleNamespace(required_fw_nodes={x}, tangents_closure=set())
        with self.assertRaisesRegex(CannotPlan, "x has no storage to count"):
            read(graph, info, 1)

    def fused(self, joint, size=64):
        """A joint graph of square inputs with its kernels; the first result is returned."""
        names = inspect.signature(joint).parameters
        squares = [torch.randn(size, size) for _ in names]
        module = make_fx(joint, tracing_mode="fake")(*squares)
        info = partitioners.classify_nodes(module, [], 1)
        return by_kernels(read(module.graph, info, 1))

    def fused_peak(self, joint, size=64):
        """The peak with kernels if nothing is saved, in units of an input's size."""
        return round(self.fused(joint, size).evaluate(()).peak / (4 * size**2), 2)

    def test_kernels_store_what_others_read(self):
        def inside(x, w):
            h = x @ w
            return ((h.sigmoid() * h).exp() @ w,)

        # The product, and what takes its place, beside the result.
        self.assertEqual(self.fused_peak(inside), 2)

        def two_readers(x, w):
            h = x @ w
            return ((h.sin() @ w).sum() + (h @ w).sum(),)

        self.assertEqual(self.fused_peak(two_readers), 3)

        def added(x, w):
            h = x @ w
            return (h @ w + h,)

        self.assertEqual(self.fused_peak(added), 2)

        def normed(x, w):
            h = x @ w
            return ((h - h.amax(1, keepdim=True)) @ w,)

        # The difference is computed in the product's kernel, the maxima before it.
        self.assertLess(self.fused_peak(normed), 2.1)

    def test_results_are_written_over_arguments(self):
        def chain(length):
            return lambda x, w: (
                functools.reduce(lambda h, _: h.sin(), range(length), x @ w),
            )

        self.assertEqual(self.fused_peak(chain(2)), 1)
        # Too long for one kernel, whose two halves hold what is between them.
        self.assertEqual(self.fused_peak(chain(40)), 2)

        def scattered(x, w):
            rows = torch.arange(len(x))
            return (torch.zeros_like(x).index_put((rows,), x @ w),)

        # The zeros are made where they are written to.
        self.assertLess(self.fused_peak(scattered), 2.1)

    def test_parts_are_computed_within_a_concatenation(self):
        def joined(x, w):
            part, other = (x @ w).sin(), (w @ x).sin()
            whole = torch.cat([part, other]) @ w
            return (whole.sum() + (part @ w).sum(),)

        # A product beside its argument, both of two units, and no part besides.
        self.assertEqual(self.fused_peak(joined), 4)

        def joint(primals_x, primals_w, tangents_y):
            part, other = (primals_x @ primals_w).sin(), primals_x.cos()
            whole = torch.cat([part, other]) @ primals_w
            return whole, tangents_y * part

        graph = self.fused(joint)
        (part,) = (s for s, n in enumerate(graph.saved_as) if n and n.name == "sin")
        # Where it is saved, it is apart.
        peaks = [graph.evaluate(saved).forward_peak for saved in ((), (part,))]
        self.assertEqual([peak // (4 * 64**2) for peak in peaks], [4, 5])

    def test_masks_are_made_with_what_they_are_made_of(self):
        def joint(primals_x, primals_w, tangents_y):
            hidden = primals_x @ primals_w
            return hidden.relu() @ primals_w, tangents_y * (hidden > 0)

        graph = self.fused(joint)
        (mask,) = (s for s, n in enumerate(graph.saved_as) if n and n.name == "gt")
        # The mask has a byte for each element. The positive values take the product's
        # place, which a mask that is made at the end of the forward would still read.
        peak = graph.evaluate([mask]).forward_peak
        self.assertEqual(peak / (4 * 64**2), 2.25)

    def test_what_takes_many_reads_is_stored_for_later_readers(self):
        def two_readers(terms):
            def forward(x, w):
                parts = [x @ w for _ in range(terms)]
                total = functools.reduce(torch.mul, parts)
                return ((total.cos() @ w) * total.sin(),)

            return forward

        # The factors are read again behind the product, which is beside its argument.
        self.assertEqual(self.fused_peak(two_readers(3)), 5)
        # There are as many when their product takes the place of one.
        self.assertEqual(self.fused_peak(two_readers(5)), 5)

        def two_terms(*shape):
            def forward(x, w):
                parts = [x @ w for _ in range(2)]
                if shape:
                    parts = [part.view(shape) for part in parts]
                total = torch.add(*parts).view(x.shape)
                return ((total.cos() @ w) * total.sin(),)

            return forward

        # What adds to a product is stored, unless that has another shape.
        self.assertEqual(self.fused_peak(two_terms()), 3)
        self.assertEqual(self.fused_peak(two_terms(-1)), 4)

    def test_kernels_of_the_backward(self):
        def pointwise(primals_x, primals_w, tangents_y):
            h = primals_x @ primals_w
            return h.sin(), tangents_y * h.cos()

        # Result and tangent, and the product, which the gradient is written over.
        self.assertEqual(self.fused_peak(pointwise), 3)

        def product(primals_x, primals_w, tangents_y):
            y, gradient = pointwise(primals_x, primals_w, tangents_y)
            return y, gradient @ primals_w

        self.assertEqual(self.fused_peak(product), 4)

        def square(primals_x, primals_w, tangents_y):
            a = primals_x.sin()
            return a * a, tangents_y * a

        graph = self.fused(square)
        unit = max(graph.nbytes)
        nothing, sine = (
            graph.evaluate([s for s in values if graph.saved_as[s].name == "sin"])
            for values in ([], graph.saveable(graph.nodes))
        )
        # The sine is stored beside the result if it is saved, and written over then.
        self.assertEqual(nothing.forward_peak, unit)
        self.assertEqual(sine.forward_peak, 2 * unit)
        self.assertEqual(max(nothing.step_peaks), 3 * unit)
        self.assertEqual(max(sine.step_peaks), 3 * unit)

    def test_arguments_of_others_are_not_written_over(self):
        def sine(primals_x, tangents_y):
            return primals_x.sin(), tangents_y * primals_x.cos()

        graph = self.fused(sine)
        unit = max(graph.nbytes)
        primals = [n for n in graph.values if n.name.startswith("primals")]
        (argument,) = graph.storages(primals)
        released = graph.releasing({argument: unit})
        held, freed = (max(each.evaluate(()).step_peaks) for each in (graph, released))
        # It counts, and the gradient is beside it.
        self.assertEqual(freed - held, unit)

    def test_kernels_take_in_what_norms_need_later(self):
        def joint(factors, statistic):
            def graph(primals_x, primals_w, tangents_y):
                parts = [primals_x @ primals_w for _ in range(factors)]
                total = functools.reduce(torch.mul, parts)
                mean = total.mean(1, keepdim=True)
                normed = total - statistic(total)
                gradient = (tangents_y * mean) @ primals_w
                return normed.exp(), gradient * normed + normed.sin()

            return graph

        for statistic in (
            lambda total: total.mean(1, keepdim=True),
            lambda total: total.amax(1, keepdim=True),  # which joins the mean's kernel
        ):
            # Result, tangent, four factors; one of these becomes the normed values.
            peak = self.fused_peak(joint(4, statistic), 512)
            self.assertAlmostEqual(peak, 6, delta=0.1)
            # Of fewer reads: result, tangent, factors, and a product with its argument.
            peak = self.fused_peak(joint(3, statistic), 512)
            self.assertAlmostEqual(peak, 7, delta=0.1)

    def test_kernels_of_streams_that_begin_alike(self):
        def joint(has_other_start):
            def graph(primals_x, primals_w, tangents_y):
                starts = [primals_x, primals_w if has_other_start else primals_x]
                gradient = tangents_y
                for start in starts:
                    parts = [primals_x @ primals_w for _ in range(4)]
                    stream = functools.reduce(torch.mul, parts, start.sin())
                    gradient = (gradient * stream.cos()) @ primals_w
                    gradient = (gradient * stream.sin()) @ primals_w
                return primals_x.cos(), gradient

            return graph

        # Result, tangent, the factors of one and the stream itself; or of both at once.
        self.assertEqual(self.fused_peak(joint(has_other_start=True), 512), 7)
        self.assertEqual(self.fused_peak(joint(has_other_start=False), 512), 10)

    def test_estimates_have_a_margin(self):
        plans = [
            peak_budget.PlannedPeak(peak, cost, frozenset())
            for peak, cost in ((100, 3.0), (140, 2.0), (190, 1.0), (200, 0.0))
        ]
        curve = peak_budget.Curve(plans, plans[-1], 0.1)
        # From 110, which the plan of the floor may have, to 200.
        self.assertEqual([curve.allowed(b) for b in (0, 0.5)], [110, 155])
        chosen = {109: 100, 153: 100, 154: 140, 208: 140, 209: 190, 220: 200}
        for asked, planned in chosen.items():
            self.assertEqual(curve.within(asked).peak, planned)
        # Where nothing is sure to be lower than budget 1, estimates are compared.
        curve = peak_budget.Curve(plans, plans[-1], 1.0)
        chosen = [curve.within(curve.allowed(k / 4)).peak for k in range(5)]
        self.assertEqual(chosen, [100, 100, 140, 140, 200])

        options = {
            "activation_memory_peak_margin": 0.25,
            "activation_memory_graph_calls": 3,
        }
        with configured(0.5, **options):
            asked = planning.requested(0.5)
        self.assertEqual(asked, peak_budget.PeakBytes(0.5, None, 3, 0.25))

    def test_budget_zero_is_the_lowest_peak_whatever_the_margin(self):
        def function(x, head, *weights):
            for w in weights:
                x = dense(x, w)
            return (x @ head).exp().sum()

        # The head's logits are most of what is live, in any plan.
        shapes = (32, 8), (8, 512), (8, 8), (8, 8)
        joint = self.joint(case(function, *(square(*shape) for shape in shapes)))
        found = [self.plan(joint, k / 10, fused=True).peak for k in range(10)]
        low = found[0]
        self.assertLess(low.floor, low.fastest)
        self.assertGreater(1.05 * low.floor, low.fastest)
        self.assertEqual(low.predicted, low.floor)
        peaks = [peak.predicted for peak in found]
        self.assertEqual(peaks, sorted(peaks))
        for peak in found:
            self.assertLessEqual(1.05 * peak.predicted, peak.allowed + 1)

    def test_kernels_of_many_plans(self):
        def chain(primals_x, primals_w, tangents_y):
            a = primals_x.sin()
            b = (a @ primals_w).sin()
            return (b @ primals_w).sin(), tangents_y * a.cos() * b.cos()

        graph = self.fused(chain)
        values = [s for s, node in enumerate(graph.saved_as) if node is not None]
        plans = [{s for s in values if k >> s & 1} for k in range(1 << len(values))]
        together = graph.evaluate_all(plans)
        for plan, evaluation in zip(plans, together, strict=True):
            alone = graph.evaluate(plan)
            for name in ("forward_peak", "step_peaks", "repeated_by_step", "saved"):
                self.assertEqual(getattr(evaluation, name), getattr(alone, name))

    def test_inductor(self):
        # One kernel each way: compiling them takes longer than all else.
        given = layers(lambda x, w: F.dropout((x @ w).tanh(), 0.2), 1)
        with configured(0.2):
            # Finds out by a compile, which other tests need not wait for.
            if not HAS_CPU:
                self.skipTest("inductor cannot compile for the CPU here")
            self.check_gradients_of_this_forward(
                given, self.compiled(given, "inductor")
            )
            kernels = last_plan().peak
            self.compiled(given)(*given.inputs)
        operators = last_plan().peak
        self.assertTrue(kernels.fused)
        self.assertFalse(operators.fused)
        self.assertLess(kernels.predicted, operators.predicted)

    @needs_two_ranks
    def test_two_ranks_choose_alike(self):
        one, other = in_two_ranks("test_ac_peak_budget")
        self.assertEqual(one, other)
        self.assertGreater(len(one[0]), 0)


instantiate_parametrized_tests(PeakBudgetTest)

if __name__ == "__main__":
    run_tests()
