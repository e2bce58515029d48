# Owner(s): ["module: functorch"]
"""Training loops that are not tidy: a StepBudget keeps its bound, or says that it does not.

Every peak is what torch's allocators tell the profiler while the step runs.
"""

import contextlib
import functools
import threading
import unittest
from unittest import mock

from test_ac_peak_budget import allocated_at_most
from test_ac_step_budget import AOT, batch, Block, counting, LOG, WIDTH

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._functorch import config
from torch._functorch.memory_planner.graph import joint
from torch._functorch.memory_planner.report.saved_values import format_bytes
from torch._functorch.memory_planner.step.budget import StepBudget, StepBudgetError
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


class Net(nn.Module):
    def __init__(self, blocks=4, out=8, backend=AOT, block=Block, **options):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, out)
        for each in self.blocks:
            each.compile(backend=backend, **options)

    def forward(self, x):
        for each in self.blocks:
            x = each(x)
        return self.head(x)


class StepLoopsTest(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        # Plain loops compile fastest.
        self.enterContext(inductor_config.patch({"cpp.simdlen": 1}))

    def run_steps(self, budget, step, count=5, first=0):
        """The peaks of so many steps, from the ``first`` one on."""

        def one(at):
            with budget:
                step(at)

        for at in range(first):
            one(at)
        return [
            allocated_at_most(functools.partial(one, at)) for at in range(first, count)
        ]

    def check(self, budget, peak, room=0.005):
        """What a step held is what was predicted, and within what is allowed."""
        plan = budget.plan
        self.assertLessEqual(peak, (1 + room) * plan.allowed)
        self.assertLessEqual(abs(plan.predicted_peak - peak), room * peak)

    def run_dropping(self, budget, place, rows=512, count=4):
        """The peaks of steps that drop gradients at one place."""
        model, x, peaks = Net(2), batch(rows), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def drop(where):
            if place == where:
                optimizer.zero_grad()

        def step(at):
            drop("first")
            if place == "in part":
                model.blocks[0].zero_grad()
            loss = model(x).square().mean()
            drop("between")
            loss.backward()
            optimizer.step()
            drop("last")

        for _ in range(count):
            peaks += self.run_steps(budget, step, 1)
            drop("outside")
        return peaks

    @parametrize("place", ("first", "between", "last", "outside"))
    def test_gradients_go_anywhere(self, place):
        budget = StepBudget(share=0.5, strict=True)
        with self.assertNoLogs(*LOG):
            peaks = self.run_dropping(budget, place)
        self.check(budget, peaks[-1])

    @parametrize("backend", (AOT, "inductor"))
    def test_what_was_saved_stays_while_its_graph_is_retained(self, backend):
        model, x = Net(1, out=256, backend=backend), batch(512)

        def step(at):
            model.zero_grad()
            hidden = model.blocks[0](x)
            hidden.square().mean().backward(retain_graph=True)
            hidden.sin().mean().backward()

        for share in (0.3, 1):
            torch._dynamo.reset()
            budget = StepBudget(share=share, strict=True)
            with self.assertNoLogs(*LOG):
                peaks = self.run_steps(budget, step)
            self.check(budget, peaks[-1])

    @parametrize("place", ("first", "between"))
    def test_gradients_that_a_step_drops_need_no_room(self, place):
        # Of so few rows, gradients hold more than what is saved.
        planned = StepBudget(share=1)
        self.run_dropping(planned, place, rows=16)
        peak_bytes = 1.2 * planned.plan.unbudgeted
        torch._dynamo.reset()
        budget = StepBudget(peak_bytes=peak_bytes, strict=True)
        with self.assertNoLogs(*LOG):
            peaks = self.run_dropping(budget, place, rows=16)
        self.check(budget, peaks[-1])
        # Where some stay, that is said before anything is added to them.
        for stay in ("nowhere", "in part"):
            torch._dynamo.reset()
            budget = StepBudget(peak_bytes=peak_bytes)
            with self.assertLogs(*LOG) as logs:
                peaks = self.run_dropping(budget, stay, rows=16, count=2)
            self.assertIn("the lowest peak found", logs.output[0])
            if stay == "nowhere":
                self.assertGreater(peaks[-1], budget.plan.allowed)
            torch._dynamo.reset()
            budget = StepBudget(peak_bytes=peak_bytes, strict=True)
            with self.assertRaisesRegex(StepBudgetError, "lowest peak found"):
                self.run_dropping(budget, stay, rows=16, count=2)

    def test_gradients_that_stay_later_are_noticed(self):
        model, x = Net(2), batch(16)

        def step(at):
            if at < 3:
                model.zero_grad()
            model(x).square().mean().backward()

        budget = StepBudget(share=1)
        with self.assertLogs(*LOG) as logs:
            self.run_steps(budget, step, 7)
        self.assertIn("a step held", logs.output[0])

    def test_programs_have_sizes_of_their_own(self):
        model, other = Net(out=2048, dynamic=True), Block()
        other.compile(backend=AOT, dynamic=True)
        plan = [("all", 32), ("some", 512), ("all", 32), ("some", 512), ("all", 512)]

        def step(at):
            what, rows = plan[at]
            x = batch(rows)
            y = model(x) if what == "all" else other(model.blocks[0](x))
            y.square().mean().backward()
            model.zero_grad()

        budget = StepBudget(share=0.5)
        peaks = self.run_steps(budget, step, len(plan))
        self.assertLessEqual(peaks[-1], 1.005 * budget.plan.allowed)

    @parametrize("sizes", ((512, 512, 64, 64, 64, 64), (1024, 256, 64, 16)))
    def test_calls_of_several_sizes_count_as_large_as_they_are(self, sizes):
        # As those of crops of an image, and of the levels of a pyramid.
        model, peaks = Net(2), {}

        def step(at):
            sum(model(batch(rows)).square().mean() for rows in sizes).backward()
            model.zero_grad()

        for share in (0.0, 0.4, 1.0):
            torch._dynamo.reset()
            budget = StepBudget(share=share, strict=True)
            with self.assertNoLogs(*LOG):
                *_, peaks[share] = self.run_steps(budget, step)
            self.check(budget, peaks[share])
        self.assertLess(peaks[0.0], 0.87 * peaks[1.0])

    @unittest.skipIf(not HAS_CPU, "needs inductor's CPU backend")
    def test_the_largest_of_several_sizes_tells_most(self):
        model, budget = Net(2, backend="inductor", dynamic=False), StepBudget(share=1)

        def step(at):
            sum(model(batch(rows)).square().mean() for rows in (4096, 64)).backward()
            model.zero_grad()

        with self.assertNoLogs(*LOG):
            peaks = self.run_steps(budget, step, 2)
        self.check(budget, peaks[-1])

    @parametrize("accumulates", (False, True))
    def test_calls_that_outgrow_their_place(self, accumulates):
        model, budget = Net(2, dynamic=True), StepBudget(share=0.5, strict=True)
        of_steps = 3 * [(512, 64)] + [(64, 512), (512, 512)]

        def step(at):
            losses = (model(batch(rows)).square().mean() for rows in of_steps[at])
            if accumulates:
                for loss in losses:
                    loss.backward()
            else:
                sum(losses).backward()
            model.zero_grad()

        with self.assertNoLogs(*LOG):
            for peak in self.run_steps(budget, step, first=3):
                self.assertLessEqual(peak, 1.005 * budget.plan.allowed)
        self.check(budget, peak)

    @parametrize("length", (6, 9))
    def test_eager_code_that_holds_more_from_step_to_step(self, length):
        model, queue = Net(out=WIDTH), []

        def step(at):
            z = F.normalize(model(batch(512, at)))
            keys = torch.cat([z.detach(), *queue])
            F.cross_entropy(z @ keys.T, torch.arange(len(z))).backward()
            model.zero_grad()
            queue.append(z.detach().clone())
            del queue[length:]

        budget = StepBudget(share=0.5)
        # Not what the profiler and the logs take.
        budget.counter = counting(lambda: sum(each.nbytes for each in queue))
        with self.assertLogs(*LOG) as logs:
            peaks = self.run_steps(budget, step, 20)
        self.assertIn("a step held", logs.output[0])
        self.assertLessEqual(peaks[-1], 1.005 * budget.plan.allowed)

    def test_nets_that_grow(self):
        models = [Net(2), *(Net(1) for _ in range(2))]

        def step(at):
            # They have one graph, and more of its calls at once each time.
            losses = [
                model(batch(512)).square().mean() for model in models[: grown(at)]
            ]
            sum(losses).backward()
            for model in models:
                model.zero_grad()

        def grown(at):
            return 1 + (at >= 3) + (at >= 5)

        budget = StepBudget(share=0.1)
        with self.assertLogs(*LOG):
            peaks = self.run_steps(budget, step, 8)
        self.check(budget, peaks[-1])

    def test_eager_code_that_holds_more_out_of_sight(self):
        models, cache = [Net(1), Net(2)], []

        def step(at):
            # Nothing of it is there when a step starts.
            more = 2**20 * (1 + at % 2) * (at > 6)
            cache.append(torch.empty(more, dtype=torch.uint8))
            models[at % 2](batch(512)).square().mean().backward()
            models[at % 2].zero_grad()
            cache.clear()

        budget = StepBudget(share=0.5)
        with self.assertLogs(*LOG) as logs:
            peaks = self.run_steps(budget, step, 70, first=68)
        # The second time, it was more.
        self.assertEqual(len(logs.output), 2)
        for line in logs.output:
            self.assertIn("a step held", line)
        self.check(budget, max(peaks))

    @parametrize("place", ("outside", "inside"))
    def test_inputs_that_get_gradients(self, place):
        model, kept = Net(2), []

        def step(at):
            x = batch(512) if place == "inside" else given[at]
            x.requires_grad_()
            penalty = x.square().mean()
            penalty.backward()
            model(x).square().mean().backward()
            model.zero_grad()
            # As with `loss = ...` in a loop, which keeps the input alive as well.
            kept[:] = [penalty]
            given[at] = None

        given = [batch(512) for _ in range(6)]
        budget = StepBudget(share=0.5, strict=True)
        with self.assertNoLogs(*LOG):
            peaks = self.run_steps(budget, step, 6)
        self.check(budget, peaks[-1])

    def test_gradients_that_are_made_anew_later(self):
        model, kept, peaks = Net(2), [], []

        def step(_):
            model.zero_grad()
            x = batch(16).requires_grad_()
            loss = model(x).square().mean()
            loss.backward()
            # The gradient of this batch is still there in the next step.
            kept[:] = [x, loss]

        budget = StepBudget(share=0.5)
        for at in range(7):
            if at > 3:
                model.zero_grad()
            peaks += self.run_steps(budget, step, 1)
        self.check(budget, peaks[-1])

    def test_parameters_that_are_plain_tensors(self):
        model = Net(2)
        scale = torch.full((512, WIDTH), 2.0, requires_grad=True)

        def step(_):
            scale.square().mean().backward()
            (model(batch(512) * scale)).square().mean().backward()

        budget = StepBudget(share=0.5, strict=True)
        with self.assertNoLogs(*LOG):
            peaks = self.run_steps(budget, step)
        self.check(budget, peaks[-1])

    @parametrize("share_of_peak", (0.3, 1.5))
    def test_plans_are_replaced_only_where_they_hold_more(self, share_of_peak):
        model, x, plans = Net(), batch(), []

        def step(at):
            plans.append(budget.plan)
            model(x).square().mean().backward()
            model.zero_grad()
            if at == 1:
                # While nothing waits for its backward, far from the step's peak.
                torch.ones(
                    int(share_of_peak * budget.plan.predicted_peak), dtype=torch.uint8
                )

        budget = StepBudget(share=0.5)
        self.run_steps(budget, step, 4)
        self.assertEqual(plans[3] is plans[1], share_of_peak < 1)

    def test_states_that_an_optimizer_makes_late(self):
        def train(budget, late):
            torch._dynamo.reset()
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())
            budget.counter = counting(
                lambda: sum(
                    value.nbytes
                    for state in optimizer.state.values()
                    for value in state.values()
                )
            )
            given = sum(p.nbytes for p in model.parameters())

            def step(at):
                model(batch()).square().mean().backward()
                if at >= late:
                    optimizer.step()
                optimizer.zero_grad()

            peaks = self.run_steps(budget, step, 6)
            return given + budget.counter.live() + peaks[-1]

        roomy = StepBudget(share=1.0)
        most = train(roomy, 0)
        budget = StepBudget(device_bytes=int(0.9 * most))
        with self.assertNoLogs(*LOG):
            self.assertLessEqual(train(budget, 4), 1.005 * budget.device_bytes)

    @parametrize("what", ("hidden states", "the batch", "averages"))
    def test_what_a_step_replaces_counts_once(self, what):
        model, budget = Net(2), StepBudget(share=0.5)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        states = {at: batch(64) for at in range(2)}

        def step(at):
            # The last batch is freed in the midst of the step, and nothing reads it.
            states["batch"] = x = batch(256) if what == "the batch" else batch(64)
            if what == "averages":
                old = states.get("averages", [torch.zeros(())] * 8)
                states["averages"] = [
                    0.9 * a + 0.1 * p.detach()
                    for a, p in zip(old, model.blocks.parameters())
                ]
                del old
            for at, each in enumerate(model.blocks):
                if what == "hidden states":
                    x, states[at] = x + 0.1 * states[at], x.detach().clone()
                x = each(x)
            model.head(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        peaks = self.run_steps(budget, step)
        self.check(budget, peaks[-1])

    @parametrize("how", ("first", "by another thread"))
    def test_what_may_be_freed_outside_of_steps_counts_twice(self, how):
        model, budget, states = Net(2), StepBudget(share=0.0), {}

        def step(at):
            with budget:
                if at < 3 and how == "first":
                    states.clear()
                new = batch(1024)
                if at < 3 and how != "first":
                    thread = threading.Thread(target=states.clear)
                    thread.start()
                    thread.join()
                states["batch"] = new
                model(states["batch"]).square().mean().backward()
            model.zero_grad()

        for at in range(3):
            step(at)
        states.clear()
        peak = allocated_at_most(functools.partial(step, 3))
        self.assertLessEqual(peak, 1.005 * budget.plan.allowed)

    def test_what_a_graph_returned_and_stays_grows_with_its_inputs(self):
        model, kept = Net(1, dynamic=True), []

        def step(at):
            y = model.blocks[0](batch(128 if at < 3 else 1024))
            kept[:] = [y.detach()]
            y.square().mean().backward()
            model.zero_grad()

        budget = StepBudget(share=0.5)
        peaks = self.run_steps(budget, step, 4)
        self.assertLessEqual(peaks[-1], 1.005 * budget.plan.predicted_peak)

    def test_graphs_that_grow_one_after_the_other(self):
        # What the first call may keep is not known before those of the other graph.
        def train(budget):
            torch._dynamo.reset()
            model = Net(3, dynamic=True)

            def step(at):
                model(batch(128 if at < 3 else 1024)).square().mean().backward()
                model.zero_grad()

            return self.run_steps(budget, step, 4)[-1]

        most = train(contextlib.nullcontext())
        budget = StepBudget(peak_bytes=0.65 * most)
        with self.assertNoLogs(*LOG):
            self.assertLessEqual(train(budget), 0.65 * most)

    def test_a_step_of_another_program_that_fails(self):
        model, weight = Net(), torch.ones(WIDTH, requires_grad=True)
        other = torch.compile(lambda x: (x * weight).sin(), backend=AOT)
        budget = StepBudget(share=0.5)

        def step(what):
            with budget:
                loss = what(batch()).square().mean()
                if what is other:
                    raise KeyError
                loss.backward()
                model.zero_grad()

        for _ in range(3):
            step(model)
        with self.assertLogs(*LOG), self.assertRaises(KeyError):
            step(other)

    @parametrize("is_first", (False, True))
    def test_a_step_without_gradients(self, is_first):
        # Such as a validation, which holds more than the training may.
        model, budget = Net(), StepBudget(share=0.2)
        wide = nn.Linear(WIDTH, 64 * WIDTH)
        other = torch.compile(lambda x: wide(x).relu(), backend=AOT, dynamic=True)

        def train(at):
            model(batch()).square().mean().backward()
            model.zero_grad()

        def validate(rows, count):
            def step(at):
                with torch.no_grad():
                    other(batch(rows)).sum()

            return self.run_steps(budget, step, count)

        if is_first:
            validate(256, 1)
        self.run_steps(budget, train)
        for rows in (256, 512)[is_first:]:
            with mock.patch.object(budget, "warn", wraps=budget.warn) as warn:
                validate(rows, 1)
            self.assertIn("which has no backward", warn.call_args_list[0].args[0])
            peak = validate(rows, 3)[-1]
            self.assertLessEqual(peak, 1.005 * budget.plan.predicted_peak)

    def test_fewer_calls_than_were_recorded(self):
        model, budget = Net(), StepBudget(share=0.2)
        budget.counter.live = lambda: None

        def step(at):
            if at >= 3:
                # As where Dynamo gives up on a block.
                for each in model.blocks[1:]:
                    each._compiled_call_impl = None
            model(batch()).square().mean().backward()
            model.zero_grad()

        with self.assertLogs(*LOG) as logs:
            peaks = self.run_steps(budget, step, 8)
        self.assertIn("a step held", logs.output[0])
        self.assertLessEqual(peaks[-1], 1.005 * budget.plan.predicted_peak)

    @torch._dynamo.config.patch(recompile_limit=4)
    def test_blocks_that_are_compiled_no_more(self):
        model = Net(dynamic=False)
        rows = (64, 64, 32, 512, 512, 512)

        def step(at):
            model(batch(rows[at])).square().mean().backward()
            model.zero_grad()

        budget = StepBudget(share=0.5)
        with self.assertNoLogs("torch._functorch", "WARNING"):
            self.run_steps(budget, step, 3)
        peaks = []
        with self.assertLogs("torch._functorch", "WARNING") as logs:
            for _ in rows[3:]:
                peaks += self.run_steps(budget, lambda at: step(3), 1)
        self.assertIn("recompile_limit", logs.output[0])
        self.check(budget, peaks[-1])

    def test_buffers_that_the_forward_overwrites(self):
        class Normed(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

            def forward(self, x):
                return F.gelu(self.norm(self.linear(x)))

        model, budget = Net(block=Normed), StepBudget(share=0.3, strict=True)

        def step(at):
            model(batch()).square().mean().backward()
            model.zero_grad()

        with self.assertNoLogs(*LOG):
            peaks = self.run_steps(budget, step)
        self.check(budget, peaks[-1])

    def test_a_step_within_a_step_of_the_same_budget(self):
        model, budget = Net(1), StepBudget(share=0.5)
        with self.assertLogs(*LOG) as logs:
            for _ in range(2):
                with budget, budget:
                    model(batch()).sum().backward()
        self.assertEqual(len(logs.output), 1)
        self.assertIn("before the last one of this budget had ended", logs.output[0])

    def test_each_excess_is_told(self):
        # First too few losses are added up to matter, later more.
        model = Net(1)

        def step(at):
            rows = 32 if at == 5 else 512
            losses = [model(batch(rows)).sum() for _ in range(losses_at.get(at, 1))]
            sum(losses).backward()
            model.zero_grad()

        losses_at = {5: 2, 16: 6, 17: 6, 18: 6}
        usual = max(self.run_steps(contextlib.nullcontext(), step, 4))
        torch._dynamo.reset()
        budget = StepBudget(peak_bytes=1.2 * usual)
        with self.assertLogs(*LOG) as logs:
            peaks = self.run_steps(budget, step, 19)
        first, again, held, lowest = logs.output
        for line in (first, again):
            self.assertIn("more calls of Block at once than 1", line)
        self.assertIn(f"a step held {format_bytes(peaks[17])}", held)
        self.assertIn("the lowest peak found is", lowest)

    def run_with_smaller_batches(self, sizes, more, **options):
        """A budget for batches of 512 rows, and the peak of a step with other batches.

        That step is recorded, and holds ``more`` bytes of eager code as well.
        """
        model = Net(1, **options)

        def step(at):
            beside = torch.empty(more * (at == 64), dtype=torch.uint8)
            batches = sizes if at == 64 else [512]
            sum(model(batch(rows)).sum() for rows in batches).backward()
            model.zero_grad()
            del beside

        budget = StepBudget(share=1)
        return budget, *self.run_steps(budget, step, 65, first=64)

    @parametrize("dynamic", (False, True))
    def test_smaller_calls_hold_less(self, dynamic):
        with self.assertNoLogs(*LOG):
            budget, peak = self.run_with_smaller_batches([32], 2**20, dynamic=dynamic)
        self.assertLess(peak, budget.plan.allowed)
        # In the usual size, it would hold more than is allowed.
        self.assertGreater(2**20, 0.1 * budget.plan.allowed)

    def test_new_calls_beside_smaller_ones(self):
        with self.assertLogs(*LOG) as logs:
            _, peak = self.run_with_smaller_batches([512, 32], 2**18)
        self.assertIn(f"a step held {format_bytes(peak)}", "".join(logs.output))

    def test_a_graph_break_within_functions_of_functions(self):
        def broken(x):
            torch._dynamo.graph_break()
            return x.cos()

        linear = nn.Linear(WIDTH, WIDTH)

        @torch.compile(backend=AOT)
        def loss(x):
            return (lambda y: y.sin() + broken(y))(linear(x)).square().mean()

        def step(at):
            loss(batch()).backward()
            linear.zero_grad()

        budget = StepBudget(share=0.5)
        with self.assertNoLogs(*LOG):
            peaks = self.run_steps(budget, step)
        self.check(budget, peaks[-1])

    def test_what_a_checkpoint_runs_again_for_no_backward(self):
        blocks = Net(2).blocks

        def run(x):
            return blocks[0](x), blocks[1](x)

        def step(at):
            for seed in range(4):
                x = batch(512, seed).requires_grad_()
                y, z = checkpoint(run, x, use_reentrant=False)
                torch.autograd.grad(y.square().mean(), x)
                del y, z

        budget = StepBudget(share=1.0)
        with self.assertNoLogs(*LOG):
            peaks = self.run_steps(budget, step)
        self.check(budget, peaks[-1], 0.02)

    def test_sparse_gradients(self):
        model, words = Net(1), nn.Embedding(4096, WIDTH, sparse=True)
        optimizer = torch.optim.SGD(words.parameters(), lr=0.1)

        def step(at):
            # The gradient has a row for each word that was read.
            for text in torch.arange(2048).repeat_interleave(2).split(512):
                model(words(text)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
            optimizer.zero_grad()

        budget = StepBudget(share=0.0)
        with self.assertNoLogs(*LOG):
            peaks = self.run_steps(budget, step)
        self.check(budget, peaks[-1])

    def test_a_function_that_is_traced_by_jit(self):
        model, budget = Net(1), StepBudget(share=0.5)

        def step(at):
            model(batch()).sum().backward()
            torch.jit.trace(lambda x: x.sin() * 0.5, batch())

        with self.assertNoLogs(*LOG):
            self.run_steps(budget, step)

    def test_budget_within_a_step_of_another(self):
        outer, inner = Net(), Net(2)
        budgets = StepBudget(share=0.3), StepBudget(share=0.3)

        def step(at):
            loss = outer(batch()).square().mean()
            with budgets[1]:
                inner(batch()).square().mean().backward()
            loss.backward()
            outer.zero_grad(), inner.zero_grad()

        with self.assertNoLogs(*LOG):
            peaks = self.run_steps(budgets[0], step)
        self.assertIsNotNone(budgets[1].plan)
        self.assertLessEqual(peaks[-1], budgets[0].plan.allowed)
        # One that is never ended ends with the one around it.
        with budgets[0]:
            budgets[1].__enter__()
        self.assertEqual(
            torch.utils._python_dispatch._get_current_dispatch_mode_stack(), []
        )

    @parametrize("backend", (AOT, *(["inductor"] if HAS_CPU else [])))
    def test_graphs_that_were_compiled_before(self, backend):
        model = Net(2, backend=backend)
        model(batch()).sum().backward()
        loss_of = torch.compile(lambda y: y.square().mean(), backend=AOT)
        budget = StepBudget(share=0.0)
        with self.assertLogs(*LOG) as logs:
            self.run_steps(budget, lambda at: loss_of(model(batch())).backward(), 3)
        self.assertEqual(len(logs.output), 1)
        self.assertIn("have no plan of this budget", logs.output[0])

    @unittest.skipIf(not HAS_CPU, "needs inductor's CPU backend")
    def test_kernels_without_gradients_count(self):
        teacher = torch.compile(lambda x: (x @ x.t()).softmax(-1) @ x)
        model, budget = Net(2), StepBudget(share=0.5)

        def step(at):
            x = batch(768)
            with torch.no_grad():
                target = teacher(x)
            F.mse_loss(model(x), target[:, :8]).backward()
            model.zero_grad()

        with fresh_cache(), self.assertNoLogs(*LOG):
            peaks = self.run_steps(budget, step)
        self.check(budget, peaks[-1], room=0.01)

    @unittest.skipIf(not HAS_CPU, "inductor needs a C++ compiler")
    def test_results_of_kernels_without_gradients_count(self):
        # Its last product is written into a buffer that no operator made.
        frozen = nn.Linear(WIDTH, 16 * WIDTH).requires_grad_(False)
        teacher = torch.compile(frozen)
        model, budget = Net(2, out=16 * WIDTH), StepBudget(share=0.5)

        def step(at):
            x = batch(768)
            wanted = teacher(x)
            F.mse_loss(model(x), wanted).backward()
            model.zero_grad()

        with fresh_cache(), self.assertNoLogs(*LOG):
            peaks = self.run_steps(budget, step)
        self.check(budget, peaks[-1])
        # What it reads was there before.
        weights = (p.nbytes for p in (*model.parameters(), *frozen.parameters()))
        self.assertGreaterEqual(budget.plan.given, sum(weights))

    def jagged(self, length):
        """The values of three texts of about a length."""
        texts = [torch.ones(length + more, WIDTH) for more in range(3)]
        return torch.nested.nested_tensor(texts, layout=torch.jagged)

    def test_texts_that_are_jagged(self):
        """Their length is a size of a tensor within another."""
        model, budget = Net(2), StepBudget(share=0.2)

        def step(at):
            x = self.jagged((40, 40, 44, 160, 160, 160)[at])
            model(x).values().square().mean().backward()
            model.zero_grad()
            with torch.no_grad():
                model(self.jagged(16))

        peaks = self.run_steps(budget, step, 6)
        self.assertGreater(peaks[-1], 2 * peaks[2])
        self.check(budget, peaks[-1])

    def test_one_graph_of_jagged_texts(self):
        model = nn.Sequential(Block(), Block())
        compiled = torch.compile(
            lambda x: model(x).values().square().mean(), backend=AOT
        )
        with config.patch(activation_memory_peak_bytes=2**20):
            compiled(self.jagged(40)).backward()
            compiled(self.jagged(44)).backward()
            with self.assertLogs(*LOG) as logs:
                compiled(self.jagged(800)).backward()
        self.assertIn("for 2403 the peak", logs.output[0])

    def test_a_number_that_is_no_size(self):
        """It differs in each step, and nothing is larger for that."""
        model, budget = Net(2), StepBudget(share=0.2)
        scaled = torch.compile(
            lambda x, number: model.head(x).tanh() * (1 + number / 8), backend=AOT
        )

        def step(at):
            x = model.blocks[0](batch())
            scaled(x, at + 3).square().mean().backward()
            model.zero_grad()

        self.run_steps(budget, step, 3)
        with mock.patch.object(joint.BudgetedGraph, "at_sizes") as evaluate:
            peaks = self.run_steps(budget, lambda at: step(at + 3))
        evaluate.assert_not_called()
        self.check(budget, peaks[-1])

    def test_steps_of_two_precisions(self):
        """They have graphs of their own, and the plan is for both."""
        model, budget = Net(2), StepBudget(share=0.5)

        def step(at):
            with torch.autocast("cpu", torch.bfloat16, enabled=at % 2 == 1):
                loss = model(batch()).square().mean()
            loss.backward()
            model.zero_grad()

        with self.assertNoLogs(*LOG):
            *_, full, cast = self.run_steps(budget, step, 8)
        self.assertEqual(len(budget.plan.graphs), 4)
        self.check(budget, max(full, cast))

    def test_selective_checkpoints_around_compiled_blocks(self):
        def policy(_, operator, *args, **kwargs):
            saves = operator == torch.ops.aten.addmm.default
            return (
                CheckpointPolicy.MUST_SAVE
                if saves
                else CheckpointPolicy.PREFER_RECOMPUTE
            )

        def contexts():
            return create_selective_checkpoint_contexts(policy)

        model, budget = Net(), StepBudget(share=0.3)

        def step(at):
            x = batch().requires_grad_()
            for each in model.blocks:
                x = checkpoint(each, x, use_reentrant=False, context_fn=contexts)
            x.sum().backward()

        with self.assertLogs(*LOG) as logs:
            self.run_steps(budget, step, 2)
        self.assertIn("selective checkpoints are set around", logs.output[0])

    def test_what_a_device_counts_outlives_a_plan(self):
        model, budget, more = Net(dynamic=True), StepBudget(share=0.5), 2**19
        budget.counter = counting(
            lambda: 0, lambda: budget.plan and budget.plan.predicted_peak + more
        )

        def step(at):
            model(batch(256 if at < 4 else 512)).square().mean().backward()
            model.zero_grad()

        with self.assertLogs(*LOG) as logs:
            self.run_steps(budget, step, 7)
        self.assertEqual([text for text in logs.output if "counted" not in text], [])
        self.assertLessEqual(budget.plan.predicted_peak + more, budget.plan.allowed)

    def test_strict_counts_the_second_step(self):
        model, budget = Net(), StepBudget(share=0.2, strict=True)
        head = Block()
        head.compile(backend=AOT)

        def step(at):
            y = model(batch())
            if at == 1:
                y = y.sum() + head(batch()).sum()
            y.sum().backward()

        with self.assertRaises(StepBudgetError):
            self.run_steps(budget, step, 2)
        with contextlib.suppress(StepBudgetError):
            budget.__exit__(None, None, None)

    @torch._dynamo.config.patch(recompile_limit=2)
    def test_a_strict_budget_plans_for_blocks_that_are_compiled_no_more(self):
        model, budget = Net(), StepBudget(share=0.5, strict=True)

        def step(at, rows=512):
            model(batch(rows)).square().mean().backward()
            model.zero_grad()

        self.run_steps(budget, functools.partial(step, rows=64), 3)
        with self.assertRaises(StepBudgetError):
            self.run_steps(budget, functools.partial(step, rows=32), 1)
        with self.assertRaisesRegex(StepBudgetError, "what eager code holds"):
            self.run_steps(budget, step, 1)
        self.check(budget, self.run_steps(budget, step, 3)[-1])


instantiate_parametrized_tests(StepLoopsTest)

if __name__ == "__main__":
    run_tests()
