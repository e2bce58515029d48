# Owner(s): ["module: inductor"]
"""What compiled graphs tell of the bytes that they hold, and plans that follow from it."""

import functools
import re
import unittest
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from glob import glob
from itertools import chain
from types import SimpleNamespace
from unittest.mock import patch

from test_buffer_reuse import live_at_most

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._functorch import config
from torch._functorch.memory_planner import decision
from torch._functorch.memory_planner.compile import (
    compiled_peak,
    search,
    told as told_module,
)
from torch._functorch.memory_planner.peak import (
    footprint,
    menu,
    peak_bytes as peak_target,
    sized_plans,
)
from torch._functorch.memory_planner.report import saved_values as saved_report
from torch._higher_order_ops.while_loop import while_loop
from torch._inductor import config as inductor_config, output_code, wrapper_memory
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_utils import HAS_CPU


try:
    from torch._functorch.memory_planner.step import (
        budget as step_budget,
        compiled_graph as step_graph,
    )
except ImportError:
    step_budget = step_graph = None


LAYERS, ROWS, SIDE = 3, 512, 32
# The source of a kernel in generated code.
KERNEL = r"cpp_pybinding\(.*?'''(.*?)'''"


def layers(x, *weights):
    for weight in weights:
        # A constant of the graph, which is a real tensor.
        x = F.gelu(x @ weight) @ weight.t() * torch.tensor(0.5)
    # What was returned is saved, too.
    return x.tanh().sum(), x.detach()


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.wide, self.out = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        return x + self.out(F.gelu(self.wide(self.norm(x))))


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = torch.nn.Linear(64, 128), torch.nn.Linear(64, 128)
        self.out = torch.nn.Linear(128, 64)

    def forward(self, x):
        return x + self.out(F.silu(self.gate(x)) * self.up(x)).tanh()


def given():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, SIDE, generator=generator)
    weights = [torch.randn(SIDE, 2 * SIDE, generator=generator) for _ in range(LAYERS)]
    return [x, *(weight.div(SIDE).requires_grad_() for weight in weights)]


@contextmanager
def budgeted(budget, **options):
    torch._dynamo.reset()
    with (
        config.patch(
            activation_memory_budget=budget,
            activation_memory_budget_target="peak",
            enable_autograd_cache=False,
            **options,
        ),
        # Plain loops compile fastest.
        inductor_config.patch({"fx_graph_cache": False, "cpp.simdlen": 1}),
    ):
        yield


def gradients(compiled, inputs):
    # Both that the forward returned stay the caller's meanwhile.
    results = compiled(*inputs)
    return torch.autograd.grad(results[0], inputs[1:])


def told_more(share):
    """Compiles tell peaks that are higher by a share than they are."""

    def more(*args):
        return footprint.Told(
            *(int(nbytes * (1 + share)) for nbytes in told_peaks(*args))
        )

    told_peaks = told_module.told_peaks
    return patch.object(told_module, "told_peaks", side_effect=more)


def tells(nbytes):
    """A compile that tells this many bytes whatever is asked."""

    return lambda *_: footprint.Told(nbytes, nbytes, nbytes)


def menu_of(plans):
    whole = sized_plans.Variant(SimpleNamespace(held_by_caller=0), {})
    return menu.Menu(plans, (sized_plans.SizedPlans(plans, {1: whole}, None),), 0, 0)


def saved(plan):
    return sorted(value.name for value in plan.saved)


@functools.cache
def planned(budget, **options):
    """The plan of a budget, its gradients, and how many plans were compiled."""
    with budgeted(budget, **options), told_more(0) as told:
        found = gradients(torch.compile(layers), given())
    return saved_report.last_plan(), found, told.call_count


@unittest.skipUnless(HAS_CPU, "inductor cannot compile for the CPU here")
class CompiledPeakTest(TestCase):
    def test_peaks_are_those_that_run(self):
        lower = 0
        # By the second, views of the weights are saved.
        for budget in (0, 0.9):
            with budgeted(budget):
                step = functools.partial(gradients, torch.compile(layers), given())
                step()
                measured = live_at_most(step)
            peak = saved_report.last_plan().peak
            self.assertTrue(peak.compiled)
            self.assertEqual(peak.predicted, measured)
            self.assertLessEqual(peak.predicted, peak.allowed)
            self.assertLess(lower, measured)
            lower = measured

    def estimated_and_told(self, columns, depth, *batch):
        """The peak of a chain of operators on a product, at budget 0."""

        def chain(x, weight, other):
            value = x.view(*batch, -1, SIDE) @ weight
            for _ in range(depth):
                value = value.sin() * other
            return value.sum(), x

        estimates = []

        def decision(asked, graph, curve, plan):
            estimates.append(plan.peak)
            return decide(asked, graph, curve, plan)

        decide = peak_target.PeakBytes.decision
        x, *_ = given()
        weight = torch.randn(SIDE, columns, requires_grad=True)
        with budgeted(0), patch.object(peak_target.PeakBytes, "decision", decision):
            result, _ = torch.compile(chain)(x, weight, torch.ones(columns))
            torch.autograd.grad(result, weight)
        (estimate,) = estimates
        return estimate, saved_report.last_plan().peak.predicted

    def test_what_is_too_long_is_not_written_over_its_argument(self):
        # Five operators for each link: the longer one is more than inductor's fifty.
        (estimate, told), longer = (
            self.estimated_and_told(2 * SIDE, depth, 2) for depth in (4, 14)
        )
        self.assertEqual([estimate, longer[0]], [told, longer[1]])
        self.assertLess(told, longer[1])

    def test_a_graph_without_a_model(self):
        def function(x, w):
            step = lambda i, y: (i + 1, (y @ w).sin())  # noqa: E731
            _, y = while_loop(lambda i, y: i < 3, step, (torch.tensor(0), x))
            return y.sum()

        x, w = (torch.randn(rows, 8, requires_grad=True) for rows in (32, 8))
        scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
        with (
            budgeted(0.5),
            scalars,
            self.assertLogs("torch._functorch", "WARNING") as logs,
        ):
            torch.compile(function)(x, w).backward()
        (said,) = logs.output
        self.assertIn("cannot be planned: CannotPlan: it is not known", said)

    def test_a_plan_that_is_over_is_replaced(self):
        plan, wanted, compiled = planned(0.5)
        self.assertEqual(compiled, 1)
        idle = property(lambda peaks: False, lambda peaks, value: None)
        with (
            budgeted(0.5),
            told_more(0.23) as told,
            # What a guard takes off, and so whether it is enough, differs by release.
            patch.object(told_module.CompiledPeaks, "guarded", idle, create=True),
            self.assertNoLogs(decision.log, "WARNING"),
        ):
            found = gradients(torch.compile(layers), given())
        other = saved_report.last_plan()
        self.assertEqual(told.call_count, 3)
        self.assertNotEqual(saved(other), saved(plan))
        self.assertLessEqual(other.peak.predicted, other.peak.allowed)
        self.assertEqual(other.peak.allowed, plan.peak.allowed)
        self.assertEqual(found, wanted)
        # Of the tries, only what is kept is reported.
        self.assertNotEqual(saved(saved_report.plans()[-2]), saved(other))

    def test_only_kernels_of_the_plan_that_is_kept_are_compiled(self):
        wanted = planned(0.5)[1]
        # The second time, what was kept is loaded from the cache.
        for threads, times in ((1, 1), (2, 2)):
            codes, options = [], {"compile_threads": threads, "fx_graph_cache": True}
            with (
                fresh_cache(),
                budgeted(0.5),
                inductor_config.patch(options),
                patch.object(GraphLowering, "save_output_code", codes.append),
                told_more(9),
            ):
                for _ in range(times):
                    torch._dynamo.reset()
                    found = gradients(torch.compile(layers), given())
                    self.assertEqual(found, wanted)
                compiled = glob(f"{cache_dir()}/**/*.main.so", recursive=True)
            asked = [re.findall(KERNEL, code, re.DOTALL) for code in codes]
            # A forward and a backward of each plan; none is generated twice.
            plans = [*zip(codes[::2], codes[1::2])]
            self.assertEqual(times * len({*plans}), len(plans))
            of_plans = [len({*a, *b}) for a, b in zip(asked[::2], asked[1::2])]
            self.assertIn(len(compiled), of_plans)
            self.assertGreater(len({*chain.from_iterable(asked)}), len(compiled))

    def test_plans_of_other_threads_stay(self):
        plan, *_ = planned(0.5)
        other = replace(plan, graph="another", peak=None)

        def between(*args):
            saved_report.recent_plans.append(other)
            return told_peaks(*args)

        told_peaks = told_module.told_peaks
        with budgeted(0.5), patch.object(told_module, "told_peaks", between):
            gradients(torch.compile(layers), given())
        last, own = saved_report.plans()[-2:]
        self.assertEqual([replace(own, graph=plan.graph), last], [plan, other])

    def step(self, share, *factors):
        """A step's plan and its peak, where compiles tell so much more, one by one.

        And how many there were.
        """

        def more(*args):
            factor = factors[min(told.call_count, len(factors)) - 1]
            return footprint.Told(
                *(int(nbytes * factor) for nbytes in told_peaks(*args))
            )

        told_peaks = told_module.told_peaks
        with (
            budgeted(1),
            patch.object(told_module, "told_peaks", side_effect=more) as told,
            patch.object(step_graph, "can_guard", return_value=False),
        ):
            compiled = torch.compile(layers)
            budget = step_budget.StepBudget(share=share)
            inputs = given()

            def step():
                with budget:
                    gradients(compiled, inputs)

            step()
            step()
            return budget.plan, live_at_most(step), told.call_count

    @unittest.skipUnless(step_budget, "a patch of its own brings the step's budget")
    def test_a_step_is_planned_by_what_compiles_tell(self):
        # The lean plan, which comes first, holds much more than was estimated.
        plan, measured, compiled = self.step(0.0, 3, 1)
        self.assertLessEqual(plan.predicted_peak, plan.allowed)
        self.assertLess(plan.predicted_peak, 0.8 * plan.unbudgeted)
        self.assertLessEqual(compiled, 5)
        self.assertEqual(plan.predicted_peak, measured)
        # Nothing is repeated at share 1, whatever it holds.
        plan, _, _ = self.step(1.0, 1, 1.05)
        self.assertEqual(plan.cost, 0)
        self.assertEqual(plan.predicted_peak, plan.allowed)

    @unittest.skipUnless(step_budget, "a patch of its own brings the step's budget")
    def test_a_share_between_the_ends_of_two_graphs(self):
        torch.manual_seed(0)
        blocks = [Wide(), Wide(), Gated(), Gated()]
        budget = step_budget.StepBudget(share=0.4)
        with budgeted(1):
            for block in blocks:
                block.compile()
            for _ in range(2):
                with budget:
                    torch.nn.Sequential(*blocks)(torch.randn(1024, 64)).sum().backward()
        plan = budget.plan
        # By the lowest plans of both graphs it would be the floor.
        self.assertLessEqual(plan.predicted_peak, plan.allowed)
        self.assertGreater(plan.predicted_peak, (plan.floor + plan.allowed) / 2)

    def test_where_nothing_fits_fusions_are_guarded_last(self):
        # The estimate counts what they hold, so no plan holds more than estimated.
        def step(budget, **options):
            torch.manual_seed(0)
            blocks = [Wide() for _ in range(LAYERS)]
            model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 8))
            x = torch.randn(512, 64)
            with budgeted(0, **options):
                compiled = torch.compile(
                    lambda x: F.cross_entropy(model(x), x[:, :8].argmax(1))
                )
                for _ in range(2):
                    with budget or nullcontext():
                        compiled(x).backward()
                    model.zero_grad()

        step(None)
        most = int(0.92 * saved_report.last_plan().peak.predicted)
        with self.assertNoLogs("torch._functorch", "WARNING"):
            step(None, activation_memory_peak_bytes=most)
            self.assertLessEqual(saved_report.last_plan().peak.predicted, most)
            if step_budget is not None:
                budget = step_budget.StepBudget(peak_bytes=most)
                step(budget)
                self.assertLessEqual(budget.plan.predicted_peak, most)

    @unittest.skipUnless(step_budget, "a patch of its own brings the step's budget")
    def test_guarded_fusions_of_another_size(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(Wide(), Wide(), torch.nn.Linear(64, 8))
        compiled = torch.compile(
            lambda x: F.cross_entropy(model(x), x[:, :8].argmax(1))
        )
        budget = step_budget.StepBudget(share=0.2)

        def peak(rows):
            def step():
                with budget:
                    compiled(x).backward()
                model.zero_grad()

            x = torch.randn(rows, 64)
            return live_at_most(step)

        with budgeted(1), self.assertNoLogs("torch._functorch", "WARNING"):
            *_, measured = map(peak, (512, 384, 512))
        plan = budget.plan
        (graph,) = budget.graphs.values()
        self.assertTrue(graph.guarded)
        self.assertLess(abs(measured - plan.predicted_peak), 0.02 * measured)
        self.assertLessEqual(measured, plan.allowed)

    @unittest.skipUnless(step_budget, "a patch of its own brings the step's budget")
    def test_each_size_has_what_its_own_compiles_tell(self):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        compiled = torch.compile(lambda x: model(x).tanh().sum(), dynamic=False)
        budget, more = step_budget.StepBudget(share=0.2), 0

        def step(rows):
            with budget:
                compiled(torch.randn(rows, 64)).backward()
            model.zero_grad()

        def constant(*args):
            return footprint.Told(*(nbytes + more for nbytes in told_peaks(*args)))

        told_peaks = told_module.told_peaks
        with (
            budgeted(1),
            patch.object(told_module, "told_peaks", constant),
            patch.object(step_graph, "can_guard", return_value=False),
        ):
            more = 40_000
            for _ in range(3):
                step(512)
            (graph,) = budget.graphs.values()
            before, plan = graph.plans.corrected().plans, budget.plan
            # As a share of the peak, that is much more at this size.
            step(64)
            self.assertEqual(graph.plans.corrected().plans, before)
            self.assertIs(budget.plan, plan)
            more = 2 * plan.predicted_peak
            for _ in range(2):
                step(128)
            # It held so much unforeseen, which is planned for now.
            self.assertGreater(budget.plan.predicted_peak, more)

    def test_fusions_are_guarded_first(self):
        (name, value), limits = *told_module.GUARD.items(), []
        usual = getattr(inductor_config, name)

        def peaks_by_fusions(*args):
            # Half as much again, unless fusions are guarded.
            share = 1.5 if limits[-1] == usual else 1
            return footprint.Told(
                *(int(nbytes * share) for nbytes in told_peaks(*args))
            )

        def note(*args):
            limits.append(getattr(inductor_config, name))
            return wrapper_memory.wrapper_memory(*args)

        told_peaks = told_module.told_peaks
        plan, wanted, _ = planned(0.5)
        with (
            budgeted(0.5),
            patch.object(told_module, "told_peaks", peaks_by_fusions),
            patch.object(output_code, "wrapper_memory", note),
            self.assertNoLogs(decision.log, "WARNING"),
        ):
            found = gradients(torch.compile(layers), given())
        self.assertEqual(limits, [usual, usual, value, value])
        self.assertEqual(saved(saved_report.last_plan()), saved(plan))
        self.assertEqual(found, wanted)

    def test_no_plan_is_within(self):
        peaks = []
        for budget in (0, 0.5):
            with (
                budgeted(budget),
                told_more(9) as told,
                self.assertNoLogs(decision.log, "WARNING"),
            ):
                gradients(torch.compile(layers), given())
            # What is kept is compiled again, unless it was the last.
            self.assertGreater(told.call_count, 2)
            self.assertLessEqual(told.call_count, compiled_peak.TRIES + 2)
            peaks.append(saved_report.last_plan().peak)
        # A share is of what compiles told, and so allows what budget 0 holds.
        lowest, half = peaks
        self.assertEqual([lowest.predicted, lowest.floor], [lowest.allowed] * 2)
        self.assertLessEqual(half.predicted, half.allowed)
        self.assertEqual(half.allowed, (half.floor + half.fastest) // 2)
        self.assertLess(lowest.predicted, half.allowed)

    def test_where_none_is_within_the_lowest_to_expect_is_tried(self):
        # What saves least holds almost twice what was estimated, all else a tenth more.
        plans = [
            footprint.Footprint(
                peak, peak, peak, 20 - peak / 10, frozenset(), frozenset()
            )
            for peak in range(200, 99, -10)
        ]
        own = menu_of(plans)
        moments = peak_target.PeakBytes(0.0).moments(own)
        found = search.Search(lambda: {0: own}, peak_target.CALLS, moments, 0.05, 4)
        tried = []
        for plan in found.plans_to_compile(lambda: 105):
            peak = plans[plan.only].kept
            told = 190 if peak == 100 else peak * 11 // 10
            own.record_told(plan.only, tells(told))
            tried.append(peak)
        self.assertEqual(tried, [100, 140, 120, 110])
        self.assertEqual(found.compiled_and_fastest().floor, 121)

    def test_what_was_not_compiled_is_not_kept(self):
        # By what the other holds less than estimated, the fastest would be within too.
        plans = [
            footprint.Footprint(peak, peak, peak, cost, frozenset(), frozenset())
            for peak, cost in ((1000, 0), (900, 10))
        ]
        own = menu_of(plans)
        moments = peak_target.PeakBytes(1.0).moments(own)
        found = search.Search(lambda: {0: own}, peak_target.CALLS, moments, 0.05, 4)
        for plan in found.plans_to_compile(lambda: 1020):
            self.assertEqual(plan.only, 1)
            own.record_told(1, tells(890))
        self.assertEqual(found.compiled_plans().within(1020).only, 1)
        self.assertEqual(found.compiled_and_fastest().unbudgeted.peak, 990)

    def test_a_number_of_bytes(self):
        floor, found, _ = planned(0)
        with self.assertLogs(decision.log, "WARNING") as logs:
            plan, others, _ = planned(1, activation_memory_peak_bytes=1)
        self.assertEqual(len(logs.output), 1)
        self.assertIn("1 bytes are allowed", logs.output[0])
        self.assertIn(f"found is {plan.peak.predicted} bytes", logs.output[0])
        self.assertLessEqual(plan.peak.predicted, floor.peak.predicted)
        with budgeted(1):
            wanted = gradients(torch.compile(layers), given())
        self.assertEqual([found, others], [wanted, wanted])

    def test_calls_that_wait(self):
        alone, _, _ = planned(0)
        two, _, _ = planned(0, activation_memory_graph_calls=2)
        more = two.peak.predicted - alone.peak.predicted
        self.assertLessEqual(more, alone.activation_bytes)
        self.assertGreater(more, 0)

    @unittest.skipIf(not torch.backends.mkldnn.is_available(), "no channels last here")
    def test_copies_of_inputs_are_saved(self):
        """A convolution wants its arguments with channels last, and so does its backward."""
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.ones(8, 64, 8, 8).to(memory_format=layout)
            weight = torch.ones(16, 64, 3, 3).to(memory_format=layout).requires_grad_()
            with budgeted(0.5):
                compiled = torch.compile(
                    lambda x, weight: (F.conv2d(x, weight).square().sum(),)
                )
                step = functools.partial(gradients, compiled, [x, weight])
                step()
                measured = live_at_most(step)
            peak = saved_report.last_plan().peak
            # A convolution's own workspace is not in the wrapper.
            self.assertLessEqual(peak.predicted, measured)
            self.assertGreater(peak.predicted, measured - x.nbytes)

    def test_a_pattern_of_inductor_is_matched(self):
        # To replace what it matches, inductor traces a joint graph meanwhile.
        def attention(query, key, value):
            scores = query @ key.transpose(-2, -1) / SIDE**0.5
            return (scores.softmax(dim=-1) @ value).square().sum()

        inputs = [torch.randn(2, 4, 8, SIDE, requires_grad=True) for _ in range(3)]
        wanted = torch.autograd.grad(attention(*inputs), inputs)
        counters.clear()
        with budgeted(0.5):
            found = torch.autograd.grad(torch.compile(attention)(*inputs), inputs)
        self.assertEqual(found, wanted)
        self.assertGreater(counters["inductor"]["fuse_attention"], 0)

    @unittest.skipUnless(
        hasattr(torch.autograd.graph, "region_activation_memory_budget"),
        "this torch has no budget for a region",
    )
    def test_a_backward_may_run_again(self):
        inputs = given()
        with budgeted(0):
            compiled = torch.compile(layers)
            expected = gradients(compiled, inputs)
            loss, _ = compiled(*inputs)
            for is_retained in (True, True, False):
                # It writes over what was saved, which the next one reads.
                found = torch.autograd.grad(loss, inputs[1:], retain_graph=is_retained)
                self.assertEqual(found, expected, rtol=0, atol=0)

    def test_a_region_keeps_its_budget(self):
        def inside(*inputs):
            with torch.autograd.graph.region_activation_memory_budget(0.3):
                return layers(*inputs)

        with budgeted(0.5):
            gradients(torch.compile(inside), given())
        self.assertEqual(saved_report.last_plan().budget, 0.3)

    def test_a_backward_that_fails_to_compile_is_left_until_it_runs(self):
        wanted, found, _ = planned(0.5)
        failing = patch.object(
            told_module.CompiledPeaks, "backward", side_effect=ValueError("odd")
        )
        told = self.assertLogs(compiled_peak.log, "WARNING")
        before = saved_report.plans()
        with budgeted(0.5), failing, told as logs:
            others = gradients(torch.compile(layers), given())
        plan = saved_report.last_plan()
        new = [p for p in saved_report.plans() if all(p is not old for old in before)]
        self.assertEqual(len(new), 1)
        self.assertIn("a plan failed to compile: ValueError: odd", logs.output[0])
        self.assertFalse(plan.peak.compiled)
        self.assertEqual(saved(plan), saved(wanted))
        self.assertEqual(found, others)

    def test_branches_loops_and_regions_are_told(self):
        """Of a branch, the side that holds more is told.

        Here both hold the same, but a wrapper drops the condition on one of them alone.
        """

        def double(x, weight):
            return (x @ weight).sin() @ weight.t()

        region = torch.compiler.nested_compile_region(double)

        def branch(x, weight):
            args = torch.cond(
                x.sum() > 0, double, lambda *a: double(*a).cos(), (x, weight)
            )
            return (args.sin().sum(),)

        def loop(x, weight):
            step = lambda i, x: (i + 1, double(x, weight))  # noqa: E731
            _, found = while_loop(lambda i, _: i < 3, step, (torch.tensor(0), x))
            return (found.sum(),)

        def nested(x, weight):
            return (region(region(x, weight), weight).sum(),)

        x, weight, *_ = (each.detach() for each in given())
        for function in (branch, loop, nested):
            compiled, memory = self.compiled_and_told(function, x, weight)
            calls = (functools.partial(compiled, each, weight) for each in (x, -x))
            measured = max(map(live_at_most, calls))
            self.assertEqual(memory.peak(), measured, function.__name__)

    def test_results_that_operators_make_are_told(self):
        # Inductor calls other operators for all that is complex, views as well.
        def product(x, weight):
            value = torch.complex(x, x.sin()) @ weight
            return value, value.t().conj()

        x, weight, *_ = (each.detach() for each in given())
        weight = weight.to(torch.cfloat)
        compiled, memory = self.compiled_and_told(product, x, weight)
        measured = live_at_most(functools.partial(compiled, x, weight))
        self.assertEqual(memory.peak(), measured)
        value, view = memory.results
        self.assertEqual(value[1], len(x) * weight[0].nbytes)
        self.assertEqual(value, view)

    def compiled_and_told(self, function, *args):
        """A function that is compiled without a backward, and what it is told to hold."""
        found = []

        def note(*args):
            found.append(wrapper_memory.wrapper_memory(*args))
            return found[-1]

        torch._dynamo.reset()
        options = {"fx_graph_cache": False, "cpp.simdlen": 1, "live_bytes_of": "cpu"}
        noted = patch.object(output_code, "wrapper_memory", note)
        with inductor_config.patch(options), noted:
            compiled = torch.compile(function, fullgraph=True)
            compiled(*args)
        (memory,) = found
        return compiled, memory

    def test_what_cannot_be_read_is_not_told(self):
        """And fails no compile; where no peak is asked for, nothing is read."""
        odd = patch.object(wrapper_memory, "_Walk", side_effect=KeyError("odd"))
        x, *weights = given()
        plain = {"fx_graph_cache": False, "cpp.simdlen": 1}
        torch._dynamo.reset()
        with odd as walk, inductor_config.patch(plain):
            gradients(torch.compile(layers), [x, *weights])
        self.assertFalse(walk.called)
        with odd as walk, budgeted(0.5):
            gradients(torch.compile(layers), [x, *weights])
        self.assertTrue(walk.called)
        self.assertFalse(saved_report.last_plan().peak.compiled)

    def test_statements_that_no_wrapper_has_today(self):
        """Chained assignments, unknown variables that are cleared, both sides of a branch."""
        source = """
def call(args):
    x, = args
    args.clear()
    unknown.clear()
    a = b = empty_strided_cpu((4,), (1,), torch.float32)
    del a
    if x.item():
        c = empty_strided_cpu((8,), (1,), torch.float32)
    else:
        c = empty_strided_cpu((2,), (1,), torch.float32)
        d = empty_strided_cuda((99,), (1,), torch.float32)
    del b
    return (c,)
"""
        graph = SimpleNamespace(graph_inputs=["x"], name_to_buffer={})
        with inductor_config.patch(live_bytes_of="cpu"):
            memory = wrapper_memory.wrapper_memory(graph, source)
            self.assertEqual(memory.live, (16, 48, 24, 24))
            self.assertEqual(memory.results, ((3, 8),))
            stacked = source.replace("del b", "b.append(c)")
            self.assertIsNone(wrapper_memory.wrapper_memory(graph, stacked))


if __name__ == "__main__":
    run_tests()
