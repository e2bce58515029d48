# Owner(s): ["module: functorch"]
import dataclasses
import gc
import io
import json
import logging
import tempfile
import weakref
from unittest.mock import patch

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch import nn
from torch._dynamo.backends import debugging
from torch._dynamo.utils import counters
from torch._functorch import config, partitioners
from torch._functorch.memory_planner.report import saved_values as saved_report
from torch._functorch.memory_planner.report.saved_values import (
    last_plan,
    plans,
    print_saved_values,
)
from torch._logging._internal import trace_log
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


BACKEND = "aot_eager_decomp_partition"


class Gated(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * value)


def gated():
    torch.manual_seed(0)
    return nn.Sequential(*[Gated(16, h) for h in (24, 40)], nn.Softmax(-1))


def chain(x, *weights):
    for weight in weights:
        x = (x @ weight).sin()
    return x.sum()


def printed(*args):
    out = io.StringIO()
    print_saved_values(*args, file=out)
    return out.getvalue()


class TestSavedReport(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()
        saved_report.recent_plans.clear()

    def compiled(self, function, *inputs, budget, solver=None, **options):
        """Run ``function`` compiled; its output, whose grad_fn holds what is saved."""
        torch._dynamo.reset()
        settings = {"activation_memory_budget": budget}
        if solver is not None:
            settings["activation_memory_budget_solver"] = solver
        with config.patch(settings):
            return torch.compile(function, backend=BACKEND, **options)(*inputs)

    def run_chain(self, budget, **options):
        torch.manual_seed(0)
        inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(5)]
        return self.compiled(chain, *inputs, budget=budget, **options)

    @parametrize("dynamic", [False, True])
    @parametrize("budget", [0.0, 0.4, 1.0])
    def test_reported_is_what_autograd_saves(self, budget, dynamic):
        model, x = gated(), torch.randn(32, 16)
        out = self.compiled(model, x, budget=budget, solver="greedy", dynamic=dynamic)
        tensors, plan = out.grad_fn.saved_tensors, last_plan()
        self.assertEqual(plan.budget, budget)
        self.assertNotEqual(plan.decided_by, "upstream")
        values = [v for v in plan.saved if v.nbytes]
        self.assertEqual(
            [(str(t.dtype), t.nbytes) for t in tensors],
            [(f"torch.{v.dtype}", v.nbytes) for v in values],
        )
        self.assertEqual(plan.saved_bytes, sum(t.nbytes for t in tensors))
        if plan.used is not None:
            self.assertLessEqual(plan.used, budget)
        if dynamic:
            self.assertTrue(any(isinstance(d, str) for v in values for d in v.shape))
        else:
            shapes = [list(v.shape) for v in values]
            self.assertEqual([list(t.shape) for t in tensors], shapes)
        self.check_inputs(tensors, values, (*model.parameters(), x))
        json.dumps(dataclasses.asdict(plan))

    def check_inputs(self, tensors, values, inputs):
        given = {t.untyped_storage().data_ptr() for t in inputs}
        for tensor, value in zip(tensors, values):
            is_given = tensor.untyped_storage().data_ptr() in given
            self.assertEqual(is_given, value.why == "input")

    def test_recomputed_is_what_the_backward_repeats(self):
        graphs = []
        split = partitioners.min_cut_rematerialization_partition

        def watched(*args, **kwargs):
            graphs.append(split(*args, **kwargs))
            return graphs[-1]

        with patch.object(debugging, split.__name__, watched):
            self.run_chain(0.5)
        ((forward, backward),), plan = graphs, last_plan()
        # The backward of a product takes two, and that of sin none.
        for op, own in (
            (torch.ops.aten.mm.default, 2),
            (torch.ops.aten.sin.default, 0),
        ):
            first, second = (
                len(g.graph.find_nodes(op="call_function", target=op))
                for g in (forward, backward)
            )
            repeated = [v for v in plan.recomputed if v.op == str(op)]
            self.assertEqual(len(repeated), second - own * first)
            self.assertGreater(len(repeated), 0)

    def test_what_runs_once_is_no_checkpoints_doing(self):
        def noisy(x, *weights):
            return chain(x * torch.rand_like(x), *weights)

        x, *weights = (torch.randn(8, 8, requires_grad=True) for _ in range(4))
        with config.patch(activation_memory_budget=0.5):
            torch.compile(noisy, backend=BACKEND)(x, *weights).backward()
        plan = last_plan()
        self.assertIn("runs once", [value.why for value in plan.saved])
        self.assertEqual(plan.fixed_by_checkpoints(), "")

    def test_several_graphs_each_have_a_plan(self):
        def broken(x, w):
            y = (x @ w).sin().exp() @ w
            torch._dynamo.graph_break()
            return (y @ w).cos().exp().sum()

        x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        self.compiled(broken, x, w, budget=1.0)
        first, second = plans()
        self.assertNotEqual(first.graph, second.graph)
        self.assertIn("the last of 2 graphs", printed())
        self.assertIn(f"graph:      {second.graph}\n", printed())
        self.assertIn(f"graph:      {first.graph}\n", printed(first))
        ops = [{v.op for v in (*p.saved, *p.recomputed)} for p in (first, second)]
        self.assertNotIn("aten.cos.default", ops[0])
        self.assertNotIn("aten.sin.default", ops[1])

    def test_nothing_is_kept_alive(self):
        alive = []
        attach = saved_report.attach_plan

        def watched(decision, forward, backward, *args):
            alive.extend(weakref.ref(x) for x in (decision, forward, backward))
            for node in forward.graph.nodes:
                if isinstance(node.meta.get("val"), torch.Tensor):
                    alive.append(weakref.ref(node.meta["val"]))
            attach(decision, forward, backward, *args)

        with patch.object(saved_report, attach.__name__, watched):
            self.compiled(gated(), torch.randn(32, 16), budget=0.3, dynamic=True)
        torch._dynamo.reset()
        gc.collect()
        self.assertGreater(len(alive), 50)
        self.assertEqual([r() for r in alive if r() is not None], [])
        self.assertIn("saved for the backward", printed())

    def test_nothing_partitioned_is_said(self):
        self.assertRaisesRegex(LookupError, "no graph has been partitioned", last_plan)
        self.assertIn("no graph has been partitioned", printed())

    def test_the_cache_keeps_the_plan(self):
        torch.manual_seed(0)
        inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]

        def products(x, a, b):
            return x @ a @ b

        with (
            tempfile.TemporaryDirectory() as folder,
            patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": folder}),
            config.patch(enable_autograd_cache=True, activation_memory_budget=1.0),
            inductor_config.patch(fx_graph_cache=True, force_disable_caches=False),
        ):
            torch.compile(products)(*inputs).sum().backward()
            self.assertEqual(last_plan(), plans()[0])
            torch._dynamo.reset()
            torch.compile(products)(*inputs).sum().backward()
            self.assertEqual(counters["aot_autograd"]["autograd_cache_hit"], 1)
            self.assertEqual(len(plans()), 2)
            self.assertEqual(last_plan(), plans()[0])

    def test_the_plan_is_traced(self):
        seen = []

        class Keep(logging.Handler):
            def emit(self, record):
                if record.metadata.get("artifact", {}).get("name") == (
                    "activation_memory_plan"
                ):
                    seen.append(json.loads(record.payload))

        handler = Keep()
        trace_log.addHandler(handler)
        try:
            self.run_chain(0.5)
        finally:
            trace_log.removeHandler(handler)
        (traced,) = seen
        plan = last_plan()
        self.assertEqual(traced["activation_bytes"], plan.activation_bytes)
        self.assertEqual(traced["saved"][0]["name"], plan.saved[0].name)
        self.assertEqual(traced["knapsack"]["saved"], plan.knapsack.saved)


instantiate_parametrized_tests(TestSavedReport)

if __name__ == "__main__":
    run_tests()
