# Owner(s): ["module: functorch"]
"""Which elements are read is decided once, whatever is recomputed.

Each net reads by a decision of its own kind; its plans must not repeat the operator
that decides.
"""

import functools
import unittest

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.utils.checkpoint import checkpoint


aten = torch.ops.aten
ROWS, WIDTH, EXPERTS = 32, 8, 4
BUDGETS = (0.01, 0.3, 1)


def by_topk(x, scores, experts):
    weights, chosen = scores.softmax(-1).topk(2)
    return (experts[chosen] * x.unsqueeze(1) * weights.unsqueeze(2)).sum(1)


def by_argmax(x, scores, experts):
    return x * experts[scores.argmax(-1)]


def by_comparison(x, scores, experts):
    return x * experts[(scores[:, 0] > scores[:, 1]).long()]


def by_mask(x, scores, experts):
    return x.masked_scatter((scores[:, :1] > 0).expand_as(x), x.cos()) * x


def select(x, scores, experts):
    # The mask is larger than what it is made of.
    scores = scores.unsqueeze(-1)
    scores = torch.where(scores > torch.linspace(0, 1, 64), scores, scores.cos())
    return x * scores.sum((1, 2)).unsqueeze(1)


def pool(x, scores, experts):
    return F.max_pool2d(x.view(1, 1, ROWS, WIDTH), 2)


# How each decides, and what may run again although it makes a mask or positions.
DECISIONS = {
    by_topk: aten.topk.default,
    by_argmax: aten.argmax.default,
    by_comparison: aten.gt.Tensor,
    by_mask: aten.gt.Scalar,
}
NO_DECISIONS = {
    select: aten.gt.Tensor,
    pool: torch.ops.prims._low_memory_max_pool_with_offsets.default,
}


def net(choose, x, router, experts):
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return choose(x, (x @ router).tanh(), experts).sin().sum()


def gated(x, gate, experts):
    """What each row reads, and what has the gate saved, in bfloat16."""
    gate = (x * gate).sum(-1).sigmoid()
    return experts[(gate > 0.5).long()], gate.square().sum()


class RoutingTest(TestCase):
    def split(self, choose, budget):
        """The operators that forward and backward both run."""
        graphs = []

        def keep(graph_module, inputs):
            graphs.append(graph_module.graph)
            return nop(graph_module, inputs)

        backend = aot_autograd(
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        torch._dynamo.reset()
        torch.manual_seed(0)
        shapes = (ROWS, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH)
        given = [torch.randn(*shape, requires_grad=True) for shape in shapes]
        function = functools.partial(net, choose)
        with functorch_config.patch(
            activation_memory_budget=budget, enable_autograd_cache=False
        ):
            torch.compile(function, backend=backend)(*given).backward()
        forward, backward = graphs
        names = {node.name for node in forward.nodes}
        return {node.target for node in backward.nodes if node.name in names}

    @parametrize("choose", DECISIONS)
    def test_nothing_is_decided_again(self, choose):
        for budget in BUDGETS:
            again = self.split(choose, budget)
            self.assertNotIn(DECISIONS[choose], again, msg=f"budget {budget}")

    def test_checkpoints_keep_decisions(self):
        layer = functools.partial(checkpoint, by_topk, use_reentrant=False)
        for budget in BUDGETS:
            again = self.split(layer, budget)
            self.assertNotIn(aten.topk.default, again, msg=f"budget {budget}")

    @parametrize("choose", NO_DECISIONS)
    def test_what_decides_nothing_may_run_again(self, choose):
        self.assertIn(NO_DECISIONS[choose], self.split(choose, 0.01))

    @unittest.skipIf(not HAS_CPU, "inductor cannot compile for the CPU here")
    def test_inductor(self):
        """The forward routes by a gate with all digits, and stores fewer of them."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        x = torch.randn(4096, 64).bfloat16()
        gate = (torch.randn(64) * 0.02).bfloat16().requires_grad_()
        experts = torch.arange(2.0, requires_grad=True)
        with (
            functorch_config.patch(
                activation_memory_budget=0.5, enable_autograd_cache=False
            ),
            # Plain loops compile fastest.
            inductor_config.patch({"cpp.simdlen": 1}),
        ):
            went, loss = torch.compile(gated)(x, gate, experts)
            (went.sum() + loss).backward()
        expected = torch.bincount(went.long(), minlength=2)
        self.assertEqual(experts.grad, expected.float())


instantiate_parametrized_tests(RoutingTest)

if __name__ == "__main__":
    run_tests()
