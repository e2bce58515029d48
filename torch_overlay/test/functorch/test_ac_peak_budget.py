# Owner(s): ["module: functorch"]
"""A budget that means peak memory: the model of live bytes, and plans made with it.

Peaks are measured on running programs: what torch's allocators tell the profiler.
Gradients are those of eager mode, or, where the forward draws random numbers, are held
against finite differences.
"""

import functools
import gc
import itertools
import logging
import math
import re
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

from test_ac_memory_budget import gradients_after_a_change
from test_ac_random_ops import check_gradients, checkpointed, functional, QUICK

import torch
import torch._inductor.config as inductor_config
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._functorch import config, partitioners
from torch._functorch.memory_planner import decide as planning, last_plan
from torch._functorch.memory_planner.graph.joint import BudgetedGraph
from torch._functorch.memory_planner.report import saved_values as saved_report
from torch._functorch.memory_planner.saved import saved_bytes as memory_budget
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._inductor.utils import fresh_cache
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.utils.checkpoint import CheckpointPolicy


AOT = "aot_eager_decomp_partition"
LOGS = "torch._functorch"

# An operator's numbers are tensors of eight bytes while it runs, which no plan counts.
NUMBERS = 2 * 8
# What options are not, in any plan.
WRONG = {
    "activation_memory_budget_target": ("peek", None, True),
    "activation_memory_peak_bytes": (0, -1, 1.5, "1GB", True, math.nan),
    "activation_memory_peak_margin": (-0.1, math.nan, "5%", None, 1, True, 10**30),
    "activation_memory_graph_calls": ("2", math.nan, 0, -1, 1.5, True, 10**30),
}


@contextmanager
def configured(budget, target="peak", peak_bytes=None, **options):
    with (
        config.patch(
            activation_memory_budget=budget,
            activation_memory_budget_target=target,
            activation_memory_peak_bytes=peak_bytes,
            enable_autograd_cache=False,
            **options,
        ),
        inductor_config.patch(QUICK),
    ):
        yield


def allocated_at_most(call):
    """The most bytes at once beyond those before it, as the allocators tell them.

    What kernels allocate for themselves counts, too.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        call()
    events = sorted(run.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    changes = (event.nbytes() for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(changes, initial=0))


class Case(NamedTuple):
    """A function that returns a scalar, its inputs, and what gets a gradient."""

    function: object
    inputs: tuple
    leaves: tuple


def case(function, *inputs):
    given = list(inputs)
    if isinstance(function, nn.Module):
        given += function.parameters()
    leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
    return Case(function, inputs, tuple(leaves))


class Loss(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).square().mean()


def transformer():
    def layer():
        return nn.TransformerEncoderLayer(16, 2, 64, 0.0, F.gelu, batch_first=True)

    return case(stack(2, layer), torch.randn(4, 32, 16, dtype=torch.double))


def stack(count, *kinds):
    """Layers of each of these kinds, again and again."""
    return Loss(*(kind() for _ in range(count) for kind in kinds)).double()


def convolutions():
    # Of one pixel each: others unfold their input, in memory of their own.
    convolution = functools.partial(nn.Conv2d, 4, 4, 1)
    model = stack(3, convolution, lambda: nn.BatchNorm2d(4), nn.ReLU)
    return case(model, torch.randn(8, 4, 8, 8, dtype=torch.double))


def dropouts():
    model = stack(3, lambda: nn.Linear(24, 24), nn.Tanh, lambda: nn.Dropout(0.3))
    function, inputs = functional(model, torch.randn(64, 24, dtype=torch.double))
    return case(function, *inputs)


NETS = {f.__name__: f for f in (transformer, convolutions, dropouts)}


class Step(NamedTuple):
    loss: torch.Tensor
    gradients: list
    peak: int


def step(function, given):
    """One step on a case's data, measured."""
    for leaf in given.leaves:
        leaf.grad = None
    losses = []

    def run():
        torch.manual_seed(1)
        losses.append(function(*given.inputs))
        losses[0].backward()

    peak = allocated_at_most(run)
    gradients = [leaf.grad.clone() for leaf in given.leaves]
    return Step(losses[0].detach(), gradients, peak)


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


class ViewFirst(torch.autograd.Function):
    """Views what may have to be computed again, and needs it later."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

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


def deep(x, w):
    for _ in range(8):
        x = dense(x, w)
    return x


def shaped(x, w):
    return (Scaled.apply((x @ w).tanh().exp()) / x.shape[0]).sin()


def masks():
    """Made at the end of the forward, they keep what they are made of."""

    def function(x, *weights):
        return sum((x @ w).relu().sum() for w in weights)

    return case(function, square(16, 8), *(square(8, 32) for _ in range(4)))


# What makes a case, a budget, and options of the compiler.
CASES = {
    "checkpoint": (lambda: layers(checkpointed(dense)),),
    # What one checkpoint hands to the next is a view.
    "checkpointed_view": (
        lambda: layers(checkpointed(lambda x, w: (x @ w).sin().t().contiguous().t())),
    ),
    "symbolic_shapes": (lambda: layers(shaped), 0, {"dynamic": True}),
    "masks": (masks, 0.4),
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


def view_first(x, w, *buffers):
    return [checkpointed(lambda x, w: ViewFirst.apply(tall(x @ w)))(x, w)]


def returns_large(x, w, *buffers):
    # It stays while what is made of it needs the most.
    large = (x @ w).tanh().exp()
    return [large, dense(dense(large, w), w)]


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
    returns_large,
    view_first,
    writes_back,
    writes_back_at_the_end,
)


def residual(x, w):
    return x + F.gelu(x @ w) @ w.t()


def with_branch(x, w):
    # What it computes on the way is four times as large, on either side.
    wide = lambda x, w: x + torch.cat(4 * [x @ w]).sin().sum()  # noqa: E731
    return torch.cond(x.sum() > 0, wide, lambda x, w: wide(x, w).cos(), (x, w))


def with_scan(x, w):
    def body(carried, row):
        carried = (carried + row) @ w
        return carried.clone(), (carried @ w).tanh() @ w

    rows = x.sin().view(8, -1, x.shape[-1])
    carried, rows = scan(body, rows[0] * 0, rows)
    return rows.view(x.shape) + carried.sum()


def with_map(x, w):
    rows = x.sin().view(8, -1, x.shape[-1])
    return map_rows(lambda row, w: (row @ w).sin() @ w, rows, w).view(x.shape)


def with_loop(x, w):
    step = lambda i, y: (i + 1, torch.cat(3 * [y @ w]).sin()[: len(y)])  # noqa: E731
    with torch.no_grad():
        _, y = while_loop(lambda i, y: i < 3, step, (torch.tensor(0), x.detach()))
    return y * x + w.sum()


def with_region(x, w):
    return widely(widely(x, w), w)


@torch.compiler.nested_compile_region
def widely(x, w):
    return x + torch.cat(4 * [x @ w]).sin().sum()


# By how much more than is live each one may be said to hold.
WITH_BODIES = {
    with_branch: 0.005,
    with_scan: 0.1,
    with_map: 0.005,
    with_loop: 0.005,
    with_region: 0.15,
}


class Rounded(torch.autograd.Function):
    """A product of rounded values, which the backward rounds again from the originals."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return rounded(x) @ rounded(w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return rounded(grad) @ rounded(w).t(), rounded(x).t() @ rounded(grad)


def rounded(x):
    scale = x.abs().amax(-1, keepdim=True)
    return (x / scale).half().double() * scale


def skipping(depth=6):
    """Layers of which one reads the input again, beside the result of the one before."""

    def function(x, *weights):
        h = x.exp().sin()
        first = h
        for at, w in enumerate(weights):
            h = torch.cat((first, h), 1) if at == depth // 2 else h
            h = (h @ w).relu()
        return h.square().mean()

    sides = [(16 if at == depth // 2 else 8, 8) for at in range(depth)]
    return case(function, square(64, 8), *(square(*shape) for shape in sides))


def filled(make):
    """Products with a matrix that is made of no input."""

    def function(x, *weights):
        mixed = make(len(x)) * 0.5
        for w in weights:
            x = (mixed @ (x @ w).sin()).tanh()
        return x.square().mean()

    return case(function, square(32, 16), *(square(16, 16) for _ in range(4)))


class PeakBudgetTest(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()
        saved_report.recent_plans.clear()
        torch.manual_seed(0)

    def compiled(self, given, backend=AOT, **options):
        torch._dynamo.reset()
        saved_report.recent_plans.clear()
        return torch.compile(given.function, backend=backend, **options)

    def check(self, given, budget=0, options=None, measure=True, warns=False):
        """Gradients are eager's, and the peak what it is said to be."""
        expected = step(given.function, given)
        logs = self.assertLogs if warns else self.assertNoLogs
        with configured(budget), logs(LOGS, "WARNING"):
            compiled = self.compiled(given, **(options or {}))
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
        self.assertLessEqual(measured, peak.allowed + NUMBERS)

    def joint(self, given):
        """The joint graph, as a planner has it."""
        made = []
        decide = partitioners.decide

        def watch(joint, info, outputs, budget, *more):
            made.append(BudgetedGraph(joint, info, outputs, budget))
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

    @parametrize("layer", WITH_BODIES)
    def test_bodies_count(self, layer):
        given = layers(layer, count=1, side=32)
        expected = step(given.function, given)
        # Lengths of loops are sizes that a body reads.
        with (
            torch._dynamo.config.patch(capture_scalar_outputs=True),
            configured(0.3),
            self.assertNoLogs(LOGS, "WARNING"),
        ):
            compiled = self.compiled(given, fullgraph=True)
            step(compiled, given)
        found, peak = step(compiled, given), last_plan().peak
        self.assertEqual(found.gradients, expected.gradients)
        measured = found.peak
        self.assertLessEqual(measured, peak.predicted + NUMBERS)
        self.assertLessEqual(peak.predicted, (1 + WITH_BODIES[layer]) * measured)

    def test_a_loop_of_unknown_length_is_not_planned(self):
        def function(x, w):
            step = lambda i, y: (i + 1, (y @ w).sin())  # noqa: E731
            _, y = while_loop(lambda i, y: i < 3, step, (torch.tensor(0), x))
            return y.sum()

        given = case(function, square(32, 8), square(8, 8))
        scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
        for budget in (0, 0.5):
            told = self.assertLogs(LOGS, "WARNING")
            with configured(budget), scalars, told as logs:
                step(self.compiled(given), given)
            (said,) = logs.output
            self.assertIn("cannot be planned: CannotPlan: it is not known", said)
            self.assertIsNone(last_plan().peak)

    @parametrize("target", ("peak", "saved"))
    def test_sizes_that_depend_on_data_are_not_guessed(self, target):
        def function(x, w):
            return (x[x[:, 0] > 0] @ w).sin().sum()

        given = case(function, square(32, 8), square(8, 8))
        with (
            configured(0.5, target),
            torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
            self.assertLogs(LOGS, "WARNING") as logs,
        ):
            step(self.compiled(given), given)
        self.assertIn("depends on data", logs.output[0])
        self.assertIsNone(last_plan().peak)

    def test_other_devices_do_not_count(self):
        def function(x, w, other):
            # As values that are offloaded.
            return dense(x, w).square().mean(), other.sin().exp().sin()

        x, w = square(32, 8), square(8, 8)
        peaks = []
        for device, rows in (("meta", 1), ("meta", 4096)):
            other = torch.empty(rows, 8, device=device, requires_grad=True)
            with configured(0.5):
                torch._dynamo.reset()
                loss, _ = torch.compile(function, backend=AOT)(x, w, other)
                loss.backward()
            plan = last_plan()
            peaks.append((plan.peak, plan.activation_bytes))
        self.assertEqual(*peaks)
        self.assertGreater(peaks[0][1], 0)

    @parametrize("net", NETS)
    def test_nets(self, net):
        given = NETS[net]()
        expected = step(given.function, given)
        with self.assertNoLogs(LOGS, "WARNING"), configured(0.3):
            compiled = self.compiled(given)
            step(compiled, given)
        found = step(compiled, given)
        self.check_peak(found.peak)
        if net == "dropouts":
            # Which runs the backward twice.
            with configured(0.3, donated_buffer=False):
                check_gradients(self.compiled(given), given.inputs)
        else:
            self.assertEqual(found.gradients, expected.gradients)
        joint = self.joint(given)
        peaks = [self.plan(joint, k / 20).peak for k in range(20)]
        for low, high in zip(peaks, peaks[1:]):
            self.assertLessEqual(low.predicted, high.predicted)
        for peak in peaks:
            self.assertLessEqual(peak.predicted, peak.allowed)
        self.assertEqual(peaks[0].predicted, peaks[0].floor)
        self.assertLess(peaks[0].floor, 0.9 * peaks[0].fastest)
        self.assertGreater(len({peak.predicted for peak in peaks}), 1)
        # One byte less than a plan's peak excludes it.
        floor, limit = peaks[0].floor, peaks[-1].predicted - 1
        found = self.plan(joint, 1, peak_bytes=limit).peak.predicted
        self.assertTrue(floor <= found <= limit)

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
        self.assertIn(f"{floor - 1} bytes are allowed", said.output[0])
        self.assertIn(f" {floor} bytes", said.output[0])
        self.assertEqual(found.saved_values, lowest.saved_values)
        # With room for it, kernels get the plan of budget 1 as it is.
        found = self.plan(joint, 0, fused=True, peak_bytes=2 * fastest)
        self.assertEqual(
            found.saved_values, memory_budget.plan_within(joint, 1).saved_values
        )

    @parametrize("is_random", [False, True])
    def test_outputs_may_be_changed_in_place(self, is_random):
        """No plan saves one that budget 1 does not, though it is there anyway."""

        def scores(x, key, value):
            found = (x @ key).sin()
            return found, found.softmax(-1) @ value

        def dropped(x, key, value):
            # Is not drawn again, and what is made of it is wanted.
            found = F.dropout(x @ key)
            total = found.sum(1, keepdim=True) * key
            return found, (total.sin() @ key).exp().sum() + value

        asked = {"dtype": torch.double, "requires_grad": True}
        inputs = [torch.randn(48, 48, **asked) for _ in range(3)]
        wanted = None
        for budget in (1, 0.5, 0.2, 0):
            torch._dynamo.reset()
            torch.manual_seed(0)
            with configured(budget):
                function = dropped if is_random else scores
                compiled = torch.compile(function, backend="aot_eager")
                found = gradients_after_a_change(compiled, inputs)
            wanted = found if wanted is None else wanted
            self.assertEqual(found, wanted)

    def test_saved_needs_no_more_than_upstream_nor_than_without_a_budget(self):
        """If any plan within the budget does; and then it recomputes no more for that."""
        told = []
        for given in (
            layers(lambda x, w: F.silu(Rounded.apply(x, w)) + x, 4),
            transformer(),
        ):
            joint = self.joint(given)
            self.assertEqual(
                self.plan(joint, 1, target="saved").activation_bytes, joint.limits.high
            )
            for budget in (0, 0.1, 0.3, 0.5, 0.7, 0.9):
                with self.assertLogs(LOGS, "WARNING") as said:
                    logging.getLogger(LOGS).warning("one at least")
                    plan = self.plan(joint, budget, target="saved")
                choices = (
                    plan.saved_values,
                    joint.saved_at_budget_1(),
                    joint.upstreams_choice(budget),
                )
                evaluations = joint.model.evaluate_all(
                    [*map(joint.model.storages, choices)]
                )
                own, fastest, upstreams = (each.peak for each in evaluations)
                self.assertLessEqual(
                    plan.activation_bytes, joint.limits.bytes_allowed(budget)
                )
                self.assertEqual(own > 1.01 * fastest, len(said.output) > 1)
                if own > 1.01 * fastest:
                    told.append(budget)
                    self.assertIn(f"needs {own} bytes", said.output[1])
                    self.assertIn(f"the {fastest} without", said.output[1])
                else:
                    self.assertLessEqual(own, min(fastest, upstreams))
        self.assertEqual({*told}, {0})

    def test_saved_where_upstream_cannot_tell_what_a_branch_costs(self):
        joint = self.joint(layers(with_branch, 4))
        plan = self.plan(joint, 0.5, target="saved")
        self.assertLessEqual(plan.activation_bytes, joint.limits.bytes_allowed(0.5))

    def test_checkpoints_that_raise_the_floor_are_told(self):
        floors, told = [], []
        for layer in (deep, checkpointed(deep)):
            joint = self.joint(layers(layer, 1))
            with self.assertLogs(LOGS, "WARNING") as said:
                logging.getLogger(LOGS).warning("one at least")
                floors.append(self.plan(joint, 0).peak.floor)
            told.append(said.output[1:])
        without, (line,) = told
        self.assertEqual(without, [])
        self.assertIn(f"less than {floors[1]} bytes", line)
        self.assertIn(f"one needs {floors[0]} (", line)

    def test_the_floor_is_near_the_lowest_of_all_small_plans(self):
        """Beside all that save at most four values, which need not cross one place."""
        joint = self.joint(skipping())
        model = joint.model
        values = [
            s
            for s, node in enumerate(model.saved_as)
            if node is not None and model.first_use[s] >= 0 and model.nbytes[s] > 64
        ]
        subsets = itertools.chain.from_iterable(
            itertools.combinations(values, count) for count in range(5)
        )
        lowest = min(each.peak for each in model.evaluate_all([*subsets]))
        self.assertLessEqual(self.plan(joint, 0).peak.floor, 1.1 * lowest)

    def test_evaluating_plans_takes_little_of_what_they_hold(self):
        model = self.joint(transformer()).model
        plans = [frozenset([s]) for s in range(len(model.nbytes))]
        taken = allocated_at_most(lambda: model.evaluate_all(plans))
        self.assertLess(taken, sum(model.nbytes) / 8)

    def test_constants_are_filled_again(self):
        def saved(make, **options):
            joint = self.joint(filled(make))
            return [
                str(node.target)
                for budget in (0.2, 0.5, 0.8)
                for node in self.plan(joint, budget, **options).saved_values
                if node.meta["val"].shape == (32, 32)
            ]

        def full(n):
            return torch.full((n, n), 0.1, dtype=torch.double)

        def random(n):
            return torch.rand(n, n, dtype=torch.double)

        for target in ("peak", "saved"):
            self.assertEqual(saved(full, target=target), [])
            self.assertEqual(len(saved(random, target=target)), 3)

    def test_sizes_are_saved_where_what_has_them_is_not(self):
        conv = torch.nn.Conv1d(4, 4, 3, padding=2)

        def part(x):
            # Its gradient is filled up to the size of what it is a part of.
            y = conv(x)
            return y[..., : y.shape[-1] - 2]

        with configured(0.9):
            compiled = torch.compile(part, backend=AOT, dynamic=True)
            compiled(torch.randn(2, 4, 32)).sum().backward()
        self.assertNotIn("convolution", [each.name for each in last_plan().recomputed])

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

    def test_the_cache_keeps_the_plan_and_its_warning(self):
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
            return counters["aot_autograd"]["autograd_cache_hit"]

        with fresh_cache():
            # Each has a plan of its own.
            for options in ({"target": "saved"}, {}, {"peak_bytes": 10**7}):
                self.assertEqual(word(**options), 0)
            for hits in (0, 1):
                with self.assertLogs(LOGS, "WARNING") as said:
                    self.assertEqual(word(peak_bytes=1), hits)
                self.assertEqual(len(said.output), 1)
                self.assertIn("1 bytes are allowed", said.output[0])

    @parametrize("name", CASES)
    def test_peaks_and_gradients(self, name):
        make, *options = CASES[name]
        # One of each layer still raises the floor of layers as small as these.
        self.check(make(), *options, warns=name == "checkpoint")
        if name == "symbolic_shapes":
            whys = {v.why for v in last_plan().saved if not v.nbytes}
            self.assertIn("input", whys)

    @parametrize("function", RETURNING)
    def test_what_the_caller_holds(self, function):
        buffers = [torch.zeros(8, dtype=torch.double) for _ in range(2)]
        given = case(function, square(32, 8), square(8, 8), *buffers)

        def run():
            outputs = compiled(*given.inputs)
            roots = [output for output in outputs if output.requires_grad]
            tangents = [torch.ones_like(root) for root in roots]
            torch.autograd.grad(roots, given.leaves, tangents)

        # Or a tangent is copied whose output is transposed.
        with configured(0, guess_tangent_strides_as_outputs=True):
            compiled = self.compiled(given)
            run()
            measured = allocated_at_most(run)
        predicted = last_plan().peak.predicted
        self.assertLessEqual(predicted, measured)
        self.assertLessEqual(measured, predicted + NUMBERS)

    def test_policies_hold(self):
        def kept(policy):
            self.check(layers(checkpointed(dense, policy)), 0.5, warns=True)
            return {v.op: v.why for v in last_plan().saved if v.why != "input"}

        self.assertEqual(kept(CheckpointPolicy.MUST_SAVE), {"aten.mm.default": "user"})
        self.assertIn("fixed:      2 values, ", last_plan().format())
        self.assertNotIn("aten.mm.default", kept(CheckpointPolicy.MUST_RECOMPUTE))

    def test_nothing_to_plan(self):
        w = square(4)
        for function in (torch.sum, lambda w: (w.detach().exp() + w).sum()):
            self.check(case(function, w), measure=False)

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

    def test_inductor(self):
        """The peak that kernels really have is about what is said, and less than else."""
        given = layers(residual, 2, side=32)
        expected = step(given.function, given)
        with configured(0.5):
            # Finds out by a compile, which other tests need not wait for.
            if not HAS_CPU:
                self.skipTest("inductor cannot compile for the CPU here")
            compiled = self.compiled(given, "inductor")
            self.assertEqual(step(compiled, given).gradients, expected.gradients)
            measured = step(compiled, given).peak
            kernels = last_plan().peak
            self.compiled(given)(*given.inputs)
        operators = last_plan().peak
        self.assertTrue(kernels.fused)
        self.assertFalse(operators.fused)
        self.assertLess(kernels.predicted, operators.predicted)
        self.assertLessEqual(measured, kernels.allowed)
        self.assertEqual(kernels.predicted, measured, rtol=0.05, atol=0)


instantiate_parametrized_tests(PeakBudgetTest)

if __name__ == "__main__":
    run_tests()
