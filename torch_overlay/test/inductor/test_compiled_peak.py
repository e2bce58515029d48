# Owner(s): ["module: inductor"]
"""Plans for peak memory that are chosen by the peaks of inductor's schedules."""

import functools
import unittest
from contextlib import contextmanager, ExitStack
from unittest.mock import patch

from test_buffer_reuse import live_at_most

import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._activation_checkpointing import (
    decision,
    saved_report,
    step_budget,
    step_graph,
)
from torch._functorch.compilers import nop
from torch._inductor import compile_fx, config as inductor_config, peak_judge
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_utils import HAS_CPU


LAYERS, ROWS, SIDE = 3, 512, 32
# Inductor's choice of a plan, run operator by operator: no kernel is compiled.
PARTITIONED = aot_autograd(
    fw_compiler=nop,
    partition_fn=compile_fx.partition_fn,
    decompositions=select_decomp_table(),
)


def layers(x, *weights):
    for weight in weights:
        # A constant of the graph, which is a real tensor.
        x = F.gelu(x @ weight) @ weight.t() * torch.tensor(0.5)
    # What was returned is saved, too.
    return x.tanh().sum(), x.detach()


def given():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, SIDE, generator=generator)
    weights = [torch.randn(SIDE, 2 * SIDE, generator=generator) for _ in range(LAYERS)]
    return [x, *(weight.div(SIDE).requires_grad_() for weight in weights)]


@contextmanager
def judged(budget, plans=4, **options):
    torch._dynamo.reset()
    with (
        config.patch(
            activation_memory_budget=budget,
            activation_memory_budget_target="peak",
            activation_memory_peak_judge=plans,
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


def gradients(compiled, inputs):
    # Both that the forward returned stay the caller's meanwhile.
    results = compiled(*inputs)
    return torch.autograd.grad(results[0], inputs[1:])


def saved(plan):
    return sorted(value.name for value in plan.saved)


class PeakJudgeTest(TestCase):
    def planned(self, budget, warning=None, log=peak_judge.log, **options):
        with (
            judged(budget, **options),
            self.assertNoLogs(log, "WARNING")
            if warning is None
            else self.assertLogs(log, "WARNING") as logs,
        ):
            found = gradients(torch.compile(layers, backend=PARTITIONED), given())
        if warning is not None:
            self.assertIn(warning, logs.output[0])
        return saved_report.last_plan(), found

    def test_peaks_are_those_that_run(self):
        with judged(0):
            if not HAS_CPU:
                self.skipTest("inductor cannot compile for the CPU here")
        lower = None
        # By the second, views of the weights are saved.
        for budget in (0, 0.9):
            with judged(budget, plans=3):
                step = functools.partial(gradients, torch.compile(layers), given())
                step()
                measured = live_at_most(step)
            peak = saved_report.last_plan().peak
            self.assertEqual(peak.predicted, measured)
            self.assertLessEqual(peak.predicted, peak.allowed)
            if lower is not None:
                self.assertLess(lower.predicted, peak.predicted)
                self.assertEqual(lower.floor, peak.floor)
            lower = peak

    def test_steps_are_planned_by_schedules(self):
        with judged(1):
            if not HAS_CPU:
                self.skipTest("inductor cannot compile for the CPU here")
        lower = 0
        for share in (0, 0.6):
            with judged(1):
                compiled, inputs = torch.compile(layers), given()
                budget = step_budget.StepBudget(share=share)

                def step(compiled=compiled, inputs=inputs, budget=budget):
                    with budget:
                        gradients(compiled, inputs)

                step()
                step()
                measured = live_at_most(step)
            plan = budget.plan
            self.assertEqual(plan.predicted_peak, measured, rtol=0.005, atol=0)
            self.assertLessEqual(plan.predicted_peak, plan.allowed)
            self.assertLess(lower, measured)
            lower = measured

    @unittest.skipIf(not torch.backends.mkldnn.is_available(), "no channels last here")
    def test_copies_of_inputs_are_saved(self):
        """A convolution wants its arguments with channels last, and so does its backward."""
        peaks = []
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.ones(8, 64, 8, 8).to(memory_format=layout)
            weight = torch.ones(16, 64, 3, 3).to(memory_format=layout).requires_grad_()
            with judged(0.5):
                step = torch.compile(
                    lambda x, weight: (F.conv2d(x, weight).square().sum(),),
                    backend=PARTITIONED,
                )
                gradients(step, [x, weight])
            peaks.append(saved_report.last_plan().peak.predicted)
        self.assertEqual(peaks[0] - peaks[1], x.nbytes + weight.nbytes)

    def test_gradients(self):
        _, found = self.planned(0.5)
        _, wanted = self.planned(1)
        self.assertEqual(found, wanted, rtol=0, atol=0)

    def test_a_number_of_bytes(self):
        fastest, _ = self.planned(1)
        plan, _ = self.planned(0.2, activation_memory_peak_bytes=1 << 40)
        self.assertEqual(saved(plan), saved(fastest))
        self.assertEqual(plan.budget, 0.2)
        floor, _ = self.planned(0)
        plan, _ = self.planned(
            1,
            f"is 1, but the lowest peak found is {floor.peak.floor} bytes",
            decision.log,
            activation_memory_peak_bytes=1,
        )
        self.assertEqual(plan.peak.predicted, floor.peak.floor)

    def test_calls_that_wait(self):
        alone, _ = self.planned(0)
        two, _ = self.planned(0, activation_memory_graph_calls=2)
        more = two.peak.predicted - alone.peak.predicted
        self.assertLessEqual(more, alone.activation_bytes)
        self.assertGreater(more, 0)

    @unittest.skipUnless(
        hasattr(torch.autograd.graph, "region_activation_memory_budget"),
        "this torch has no budget for a region",
    )
    def test_a_budget_for_a_region_is_not_judged(self):
        def inside(*inputs):
            with torch.autograd.graph.region_activation_memory_budget(0.3):
                return layers(*inputs)

        with judged(0.5):
            gradients(torch.compile(inside, backend=PARTITIONED), given())
        self.assertEqual(saved_report.last_plan().budget, 0.3)

    def test_a_schedule_that_fails(self):
        wanted, _ = self.planned(0.5, plans=0)
        with patch.object(peak_judge, "schedule_peak", side_effect=ValueError("odd")):
            plan, _ = self.planned(0.5, "ValueError: odd")
        self.assertEqual(saved(plan), saved(wanted))

    def test_a_schedule_of_a_step_that_fails(self):
        plans = []
        for count in (0, 4):
            budget = step_budget.StepBudget(share=0.5)
            failing = patch.object(
                peak_judge, "schedule_peaks", side_effect=ValueError("odd")
            )
            with failing, judged(1, count), ExitStack() as stack:
                if count:
                    logs = stack.enter_context(
                        self.assertLogs(step_graph.log, "WARNING")
                    )
                compiled, inputs = torch.compile(layers, backend=PARTITIONED), given()
                for _ in range(2):
                    with budget:
                        gradients(compiled, inputs)
            plans.append((budget.plan.predicted_peak, budget.plan.allowed))
        self.assertIn("ValueError: odd", logs.output[0])
        self.assertEqual(plans[0], plans[1])


if __name__ == "__main__":
    run_tests()
