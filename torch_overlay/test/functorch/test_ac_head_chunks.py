# Owner(s): ["module: functorch"]
"""Heads run in as many chunks as a bound on the peak needs."""

import functools
import logging
import unittest
from contextlib import contextmanager
from unittest import mock

from test_ac_peak_budget import allocated_at_most
from test_ac_step_budget import HAS_GLOO, in_two_ranks, join_ranks

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._functorch import config
from torch._functorch.memory_planner import last_plan, StepBudget
from torch._functorch.memory_planner.compile import compiled_peak
from torch._functorch.memory_planner.decision import Head
from torch._inductor import config as inductor_config, metrics
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.autograd.graph import region_activation_memory_budget as region
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_utils import HAS_CPU


WIDTH, WORDS, BATCH, TOKENS = 32, 4096, 4, 128
MB = 1_000_000


class Model(nn.Module):
    def __init__(self, returns_logits=False):
        super().__init__()
        torch.manual_seed(0)
        self.returns_logits = returns_logits
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words, targets):
        x = self.embedding(words)
        x = x + self.down(F.silu(self.up(x)))
        logits = self.head(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return (loss, logits) if self.returns_logits else loss


class PerToken(Model):
    """Returns the loss of each token."""

    def forward(self, words, targets):
        logits = self.head(self.embedding(words)).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="none")


class Shifted(Model):
    """Predicts the next word, unless that is masked."""

    def forward(self, words, targets):
        logits = self.head(self.embedding(words)).float()[:, :-1]
        targets = targets[:, 1:]
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none"
        )
        mask = targets % 3 > 0
        return (losses.view_as(targets) * mask).sum() / mask.sum()


class CountedPass(CustomGraphPass):
    """Counts the joint graphs that inductor's passes run on."""

    def __init__(self):
        self.number = 0

    def __call__(self, graph):
        placeholders = graph.find_nodes(op="placeholder")
        self.number += any("tangents" in node.name for node in placeholders)

    def uuid(self):
        return None


@contextmanager
def compiling(**options):
    torch._dynamo.reset()
    with (
        config.patch(enable_autograd_cache=False, **options),
        # Plain loops compile fastest.
        inductor_config.patch({"fx_graph_cache": False, "cpp.simdlen": 1}),
    ):
        yield


def batch():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (BATCH, TOKENS + 1), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def gradients(model, run):
    model.zero_grad(set_to_none=True)
    result = run(*batch())
    loss = result[0] if isinstance(result, tuple) else result
    loss.sum().backward()
    return [loss.detach(), *(each.grad for each in model.parameters())]


def planned(model=Model, dtype=torch.float32, **options):
    """What a peak that is asked for makes of a model: its gradients, and its plan."""
    with compiling(**options):
        made = model().to(dtype)
        found = gradients(made, torch.compile(made))
    return found, last_plan()


def within(nbytes):
    return planned(activation_memory_peak_bytes=nbytes)


@functools.cache
def in_eager():
    model = Model()
    return gradients(model, model)


class Loss(nn.Module):
    """A head and its loss, to be compiled beside what comes before."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, x, targets):
        logits = self.head(x).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Parts(Model):
    def __init__(self):
        super().__init__()
        self.loss = torch.compile(Loss(self.head))
        self.body = torch.compile(self.between)

    def between(self, x):
        return x + self.down(F.silu(self.up(x)))

    def forward(self, words, targets):
        return self.loss(self.body(self.embedding(words)), targets)


def of_rank(number, place):
    """How a head runs in one of two processes, and whether gradients are the same."""
    join_ranks(number, place)
    found = {}
    for way in ("replicas", "sharded"):
        model = Model()
        if way == "sharded":
            mesh = torch.distributed.init_device_mesh("cpu", (2,))
            fully_shard(model, mesh=mesh)
        else:
            model = nn.parallel.DistributedDataParallel(model)
        with compiling():
            budget, compiled = StepBudget(share=0), torch.compile(model)
            for _ in range(4):
                with budget:
                    _, *grads = gradients(model, compiled)
        grads = [
            getattr(each, "full_tensor", lambda each=each: each)() for each in grads
        ]
        is_same = all(map(torch.allclose, grads, in_eager()[1:]))
        found[way] = is_same, [head for use in budget.plan.graphs for head in use.heads]
    return found


@unittest.skipUnless(HAS_CPU, "inductor cannot compile for the CPU here")
class HeadChunksTest(TestCase):
    def test_a_peak_below_all_of_one_piece(self):
        options = {"activation_memory_budget_target": "peak"}
        passes = CountedPass()
        with compiling(activation_memory_budget=0.0, **options):
            model = Model()
            step = functools.partial(gradients, model, torch.compile(model))
            with inductor_config.patch(joint_custom_pre_pass=passes):
                self.assertEqual(step(), in_eager())
            measured = allocated_at_most(step)
        # Once in one piece and in each number of chunks, however often it is compiled.
        self.assertEqual(passes.number, len((1, 2, 4, 8, 16)))
        plan = last_plan()
        self.assertGreater(plan.head.chunks, 1)
        self.assertEqual(plan.head.rows * plan.head.chunks, BATCH * TOKENS)
        # Most of the logits, which are as large again as their gradient.
        self.assertGreater(plan.head.gained, 0.75 * BATCH * TOKENS * WORDS * 4)
        self.assertIn(f"in {plan.head.chunks} chunks", plan.format())
        # Beyond the plan's peak are the loss and what its own backward needs.
        self.assertLess(abs(measured - plan.peak.predicted), 0.02 * measured)

    def test_a_masked_loss_of_shifted_logits(self):
        dtype, limit = torch.bfloat16, 2 * MB
        found, plan = planned(Shifted, dtype, activation_memory_peak_bytes=limit)
        model = Shifted().to(dtype)
        self.assertEqual(found, gradients(model, model), rtol=0.05, atol=1e-3)
        self.assertGreater(plan.head.chunks, 1)
        self.assertLessEqual(plan.peak.predicted, limit)

    def test_no_more_chunks_than_needed(self):
        """Of all plans within a bound, none is cheaper, or as cheap in fewer chunks."""
        menus = []
        begin = compiled_peak._Compiles.begin

        def noted(self, graph):
            begin(self, graph)
            menus.append(self.menu)

        chosen = []
        for limit in (20 * MB, 12 * MB, 5 * MB):
            with mock.patch.object(compiled_peak._Compiles, "begin", noted):
                found, plan = within(limit)
            self.assertEqual(found, in_eager())
            self.assertLessEqual(plan.peak.predicted, limit)
            chunks = plan.head.chunks if plan.head else 1
            plans = [*menus.pop().corrected().plans]
            fitting = [p for p in plans if max(p.forward, p.backward) <= limit / 1.05]
            cheapest = min(fitting, key=lambda p: (p.cost, p.chunks))
            self.assertLessEqual(chunks, cheapest.chunks)
            chosen.append(chunks)
        self.assertEqual(chosen, sorted(chosen))
        self.assertEqual(chosen[0], 1)
        self.assertGreater(chosen[-1], chosen[1])

    def test_budget_1_is_in_one_piece(self):
        metrics.reset()
        found, plan = planned(activation_memory_budget_target="peak")
        self.assertEqual((plan.head, metrics.num_auto_chunking), (None, 0))
        self.assertEqual(found, in_eager())

    def test_a_large_bound_changes_nothing(self):
        _, plan = within(1000 * MB)
        self.assertIsNone(plan.head)

    def test_chunks_that_the_user_asks_for(self):
        with inductor_config.patch(
            {"auto_chunker.enable": True, "auto_chunker.num_chunk": 2}
        ):
            found, plan = within(4 * MB)
        self.assertEqual(found, in_eager())
        self.assertIsNone(plan.head)

    def test_why_there_are_none(self):
        returning = functools.partial(Model, returns_logits=True)
        for model, options, why in (
            (returning, {}, "return the loss alone"),
            (PerToken, {}, "more than a scalar loss"),
            (Model, {"dtype": torch.float16}, "use bfloat16"),
        ):
            with self.assertLogs("torch._functorch.memory_planner", "WARNING") as told:
                _, plan = planned(model, activation_memory_peak_bytes=1 * MB, **options)
            self.assertIn(why, "\n".join(told.output))
            self.assertEqual(plan.head.chunks, 1)
            self.assertIn("in one piece, as", plan.format())

    def test_a_chunker_that_fails(self):
        from torch._inductor.fx_passes import auto_chunker

        with (
            mock.patch.object(auto_chunker, "propagate", side_effect=IndexError("oh")),
            self.assertLogs("torch._functorch.memory_planner", logging.INFO) as told,
        ):
            found, plan = within(8 * MB)
        self.assertEqual(found, in_eager())
        self.assertEqual(plan.head, Head(1, why_whole="the chunker says: oh"))
        self.assertIn("runs in one piece", "\n".join(told.output))

    def test_other_backends(self):
        with compiling(activation_memory_peak_bytes=20 * MB):
            model = Model()
            backend = "aot_eager_decomp_partition"
            found = gradients(model, torch.compile(model, backend=backend))
        self.assertEqual((found, last_plan().head), (in_eager(), None))

    def test_a_region_keeps_its_budget(self):
        class Region(Model):
            def forward(self, words, targets):
                with region(0.5):
                    return super().forward(words, targets)

        budget = StepBudget(share=0)
        with compiling():
            model = Region()
            compiled = torch.compile(model)
            for _ in range(3):
                with budget:
                    found = gradients(model, compiled)
        self.assertEqual(found, in_eager())
        self.assertEqual(budget.plan.graphs[0].heads, ())

    def test_sizes_that_vary(self):
        with compiling(activation_memory_peak_bytes=MB):
            model = Model()
            found = gradients(model, torch.compile(model, dynamic=True))
        self.assertEqual(found, in_eager())
        self.assertIn("its sizes vary", last_plan().head.why_whole)

    def test_numbers_that_vary(self):
        with compiling(activation_memory_peak_bytes=1000 * MB):
            model = Model()
            scaled = torch.compile(lambda *given, scale: model(*given) * scale)
            gradients(model, functools.partial(scaled, scale=2))
            with config.patch(activation_memory_peak_bytes=MB):
                gradients(model, functools.partial(scaled, scale=3))
        self.assertIn("its sizes vary", last_plan().head.why_whole)

    def test_sizes_that_vary_are_no_reason_where_the_user_asks_for_chunks(self):
        with (
            compiling(activation_memory_peak_bytes=MB),
            inductor_config.patch({"auto_chunker.enable": True}),
        ):
            gradients(Model(), torch.compile(Model(), dynamic=True))
        self.assertIsNone(last_plan().head)

    def test_other_estimators(self):
        for estimator in ("roofline", "testing"):
            _, plan = planned(
                activation_memory_peak_bytes=7 * MB,
                activation_memory_budget_runtime_estimator=estimator,
            )
            self.assertLessEqual(plan.peak.predicted, 7 * MB)
            self.assertGreater(plan.head.chunks, 1)

    def check_step(self, share, has_chunks, made=Model):
        model, budget = made(), StepBudget(share=share)
        wanted, compiled = gradients(model, model), torch.compile(model)

        def step():
            with budget:
                return gradients(model, compiled)

        warns = self.assertNoLogs("torch._functorch.memory_planner", "WARNING")
        with compiling(), warns:
            for _ in range(4):
                # Kept, as in loops that begin with zero_grad.
                found = step()
                self.assertEqual(found, wanted)
            (use,) = budget.plan.graphs
            self.assertEqual(bool(use.heads), has_chunks)
            self.assertEqual("head of" in str(budget), has_chunks)
            peak = budget.plan.predicted_peak
            self.assertLess(abs(allocated_at_most(step) - peak), 0.02 * peak)

    def test_a_step(self):
        self.check_step(share=0.0, has_chunks=True)

    def test_a_step_of_shifted_logits(self):
        # Compiled again after the first step, rows that the loss leaves out are padded.
        self.check_step(share=0.2, has_chunks=True, made=Shifted)

    def test_a_step_without_a_bound(self):
        self.check_step(share=1.0, has_chunks=False)

    def test_a_step_of_blocks_and_a_head(self):
        budget = StepBudget(share=0)
        with compiling():
            model = Parts()
            for _ in range(4):
                with budget:
                    found = gradients(model, model)
        self.assertEqual(found, in_eager())
        heads = [head for use in budget.plan.graphs for head in use.heads]
        self.assertGreater(heads[0].chunks, 1)

    @unittest.skipUnless(HAS_GLOO, "no gloo here")
    def test_two_ranks(self):
        found = in_two_ranks(of_rank)
        self.assertEqual(found[0], found[1])
        for is_same, heads in found[0].values():
            self.assertTrue(is_same)
            self.assertGreater(heads[0].chunks, 1)


if __name__ == "__main__":
    run_tests()
