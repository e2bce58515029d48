# Owner(s): ["module: functorch"]
"""Tags for a peak, on training steps that are traced as one graph.

Peaks are measured on the running graph, as upstream's pass makes it of the tags:
storages are followed by weak references.
"""

import gc
import unittest
import weakref

import torch
import torch.fx as fx
import torch.fx.traceback as fx_traceback
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._activation_checkpointing import (
    remat_using_tags_for_fwd_loss_bwd_graph_pass as remat_pass,
)
from torch._functorch._activation_checkpointing.liveness import CannotPlan
from torch._functorch._activation_checkpointing.memory_policy import tag_for_peak
from torch._functorch._aot_autograd.logging_utils import (
    setup_stacktrace_preservation_hooks,
)
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy


WIDTH, HEADS, ROWS, LENGTH = 32, 4, 4, 32
BUDGETS = (1, 0.3, 0)


class Layer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        inner = F.gelu(self.up(self.norms[1](x)))
        return x + self.down(F.dropout(inner, self.dropout))


class Routed(nn.Module):
    """Each token is scaled by two of eight experts."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)
        self.experts = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x):
        weights, chosen = self.router(self.norm(x)).softmax(-1).topk(2)
        return x + (self.experts[chosen] * weights.unsqueeze(-1)).sum(-2)


def transformer(layers=4, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(dropout) for _ in range(layers)))


def batch():
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(loss, inputs):
    """As Dynamo traces it: whatever is computed in here is marked."""
    with fx_traceback._set_autograd_backward():
        return torch.autograd.grad(loss, inputs)


def gradients_by_hooks(loss, inputs):
    """As tracers without Dynamo do it: hooks mark what autograd's nodes compute."""
    setup_stacktrace_preservation_hooks([loss.grad_fn])
    return torch.autograd.grad(loss, inputs)


def training_step(model, differentiate=gradients, update=False):
    def step(*inputs):
        *params, x = inputs
        named = dict(zip(dict(model.named_parameters()), params))
        loss = torch.func.functional_call(model, named, (x,)).square().mean()
        grads = differentiate(loss, params)
        if update:
            grads = [p.detach() - 0.1 * grad for p, grad in zip(params, grads)]
        return [loss.detach(), *grads]

    return step


def chunked_step(model):
    """The loss is differentiated in chunks, before the model's own backward."""

    def step(*inputs):
        *params, x = inputs
        named = dict(zip(dict(model.named_parameters()), params))
        out = torch.func.functional_call(model, named, (x,))
        chunks = []
        for chunk in out.detach().chunk(ROWS):
            chunk = chunk.requires_grad_()
            loss = (chunk @ chunk.transpose(1, 2)).relu().square().mean()
            chunks += gradients(loss, [chunk])
        whole = torch.cat(chunks)
        with fx_traceback._set_autograd_backward():
            return torch.autograd.grad(out, params, whole)

    return step


def traced(step, inputs):
    with fx_traceback.preserve_node_meta():
        return make_fx(step, tracing_mode="fake")(*inputs)


def copied(gm):
    """The same graph, to be tagged: to trace it again would take longer."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages that were live at once beyond those given."""

    def __init__(self, given):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in given}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.follow(value.untyped_storage())
        return result

    def follow(self, storage):
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.died, key, nbytes)

    def died(self, key, nbytes):
        self.known.remove(key)
        self.live -= nbytes


def run(gm, inputs):
    """What the graph returns, and its peak."""
    gc.collect()
    torch.manual_seed(2)
    with torch.no_grad(), LiveBytes(inputs) as recorder:
        results = gm(*inputs)
    return results, recorder.peak


@unittest.skipIf(
    not hasattr(fx_traceback, "_set_autograd_backward"),
    "before 2.12, the pass knows the backward by a mark of its own",
)
class MemoryPolicyTest(TestCase):
    def check(self, untagged, inputs, tag=None):
        """Peaks and results at some budgets; returns the graphs with what is repeated."""
        expected, most = run(untagged, inputs)
        peaks, graphs = [], []
        for budget in BUDGETS:
            gm = copied(untagged)
            if tag is not None:
                tag(gm)
            peak = tag_for_peak(gm, budget=budget)
            gm = remat_pass.remat_using_tags_for_fwd_loss_bwd_graph(gm)
            results, measured = run(gm, inputs)
            self.assertEqual(results, expected, rtol=0, atol=0)
            self.assertLessEqual(measured, peak.predicted)
            self.assertGreater(measured, 0.99 * peak.predicted)
            self.assertLessEqual(peak.predicted, peak.allowed)
            peaks.append(measured)
            graphs.append(gm)
        self.assertLessEqual(peaks[0], most)
        self.assertEqual(peaks, sorted(peaks, reverse=True))
        self.assertLess(peaks[-1], 0.8 * peaks[0])
        return graphs

    def check_model(self, model, **options):
        inputs = [*model.parameters(), batch()]
        return self.check(traced(training_step(model, **options), inputs), inputs)

    def test_transformer(self):
        self.check_model(transformer())

    def test_marks_of_hooks(self):
        self.check_model(transformer(), differentiate=gradients_by_hooks)

    def test_traced_by_dynamo(self):
        model = transformer()
        seen = []

        def compiler(gm, _):
            return make_boxed_func(
                lambda *given: seen.append((gm, given)) or gm(*given)
            )

        @torch.compile(backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
        def step(x):
            loss = model(x).square().mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            return [loss.detach(), *grads]

        with torch._dynamo.config.patch(trace_autograd_ops=True):
            step(batch())
        self.check(*seen[0])

    def test_dropout_in_place(self):
        # The mask is drawn and scaled in place: to scale it twice is wrong.
        self.check_model(transformer(dropout=0.2))

    def test_activations_in_place(self):
        model = nn.Sequential()
        for _ in range(6):
            model += nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
            model += nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.check_model(model)

    def test_routing_is_decided_once(self):
        model = nn.Sequential()
        for layer in transformer():
            model += nn.Sequential(layer, Routed())
        for gm in self.check_model(model):
            routers = gm.graph.find_nodes(
                op="call_function", target=torch.ops.aten.topk.default
            )
            self.assertEqual(len(routers), 4)

    def test_optimizer_in_the_graph(self):
        self.check_model(transformer(layers=6), update=True)

    @unittest.skipUnless(
        hasattr(remat_pass, "_collect_backward_regions"),
        "in 2.12, the pass takes one backward region",
    )
    def test_loss_in_chunks(self):
        model = transformer()
        inputs = [*model.parameters(), batch()]
        self.check(traced(chunked_step(model), inputs), inputs)

    def test_peak_bytes(self):
        model = transformer()
        inputs = [*model.parameters(), batch()]
        untagged = traced(training_step(model), inputs)
        plain = tag_for_peak(copied(untagged), budget=0)
        for allowed in (1, (plain.floor + plain.fastest) // 2):
            gm = copied(untagged)
            peak = tag_for_peak(gm, peak_bytes=allowed)
            _, measured = run(
                remat_pass.remat_using_tags_for_fwd_loss_bwd_graph(gm), inputs
            )
            self.assertEqual(peak.allowed, allowed)
            self.assertLessEqual(measured, peak.predicted)
            self.assertLessEqual(peak.predicted, max(allowed, plain.floor))

    def test_tags_that_are_there(self):
        def products(gm):
            target = torch.ops.aten.addmm.default
            return gm.graph.find_nodes(op="call_function", target=target)

        def tag(gm):
            products(gm)[2].meta["recompute"] = CheckpointPolicy.MUST_SAVE
            products(gm)[6].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

        model = transformer()
        inputs = [*model.parameters(), batch()]
        for gm in self.check(traced(training_step(model), inputs), inputs, tag):
            names = {node.name for node in products(gm)}
            self.assertNotIn("addmm_2_recomputed", names)
            self.assertIn("addmm_6_recomputed", names)

    def test_what_it_refuses(self):
        model = transformer(1)
        gm = traced(training_step(model), [*model.parameters(), batch()])
        for wrong in ({}, {"budget": 0.5, "peak_bytes": 1}, {"budget": 1.5}):
            with self.assertRaises(ValueError):
                tag_for_peak(gm, **wrong)
        with self.assertRaises(ValueError):
            tag_for_peak(gm, peak_bytes=0)
        forward = traced(torch.sin, [batch()])
        with self.assertRaisesRegex(CannotPlan, "no node is marked"):
            tag_for_peak(forward, budget=0.5)
        for graph in (gm, forward):
            self.assertFalse(any("recompute" in n.meta for n in graph.graph.nodes))


if __name__ == "__main__":
    run_tests()
