# Owner(s): ["module: functorch"]
"""Under a memory budget, random numbers are not drawn again in the backward.

The gradients are checked against finite differences of the compiled forward itself,
under one seed: what they must fit is the randomness that this forward had.
"""

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


# (activation_memory_budget, aggressive_recomputation)
SETTINGS = ((0.01, False), (0.5, False), (1, True))


def dropout(x):
    return F.dropout(x, 0.4)


def noise(x):
    return x * torch.rand(4, 4, dtype=x.dtype)


def bernoulli(x):
    return x * torch.bernoulli(x.detach().sigmoid())


def attention(x):
    heads = x.view(1, 1, 4, 4)
    return F.scaled_dot_product_attention(heads, heads.cos(), heads, dropout_p=0.3)


def attention_without_dropout(x):
    heads = x.view(1, 1, 4, 4)
    return F.scaled_dot_product_attention(heads, heads.cos(), heads)


def net(layer):
    def function(x, first, second):
        y = layer((x @ first).sin()).view(4, 4)
        return (y @ second).cos().sum()

    return function


def configured(budget, aggressive):
    return functorch_config.patch(
        activation_memory_budget=budget,
        aggressive_recomputation=aggressive,
        enable_autograd_cache=False,
        # gradcheck runs a backward twice.
        donated_buffer=False,
    )


class RandomTagsTest(TestCase):
    def given(self):
        torch.manual_seed(0)
        return [torch.randn(4, 4).double().requires_grad_() for _ in range(3)]

    def split(self, layer, budget):
        """The graphs of forward and backward, for one plan."""
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
        with configured(budget, False):
            torch.compile(net(layer), backend=backend)(*self.given()).backward()
        return graphs

    def check(self, layer, backend, settings=SETTINGS):
        for setting in settings:
            with self.subTest(setting=setting), configured(*setting):
                torch._dynamo.reset()
                compiled = torch.compile(net(layer), backend=backend, fullgraph=True)

                def seeded(*values, compiled=compiled):
                    torch.manual_seed(1)
                    return compiled(*values)

                torch.autograd.gradcheck(seeded, self.given(), fast_mode=True)

    @parametrize("layer", (dropout, noise, bernoulli, attention))
    def test_gradients(self, layer):
        self.check(layer, "aot_eager_decomp_partition")

    @unittest.skipIf(not HAS_CPU, "inductor cannot compile for the CPU here")
    def test_inductor(self):
        # Plain loops compile fastest.
        with inductor_config.patch({"cpp.simdlen": 1}):
            self.check(dropout, "inductor", SETTINGS[:1])

    def test_a_mask_is_saved_and_not_the_numbers(self):
        forward, backward = self.split(dropout, 0.01)
        rand = {"op": "call_function", "target": torch.ops.aten.rand.default}
        self.assertEqual(len(forward.find_nodes(**rand)), 1)
        self.assertEqual(len(backward.find_nodes(**rand)), 0)
        (output,) = forward.find_nodes(op="output")
        made = [node for node in output.args[0][1:] if node.op != "placeholder"]
        self.assertEqual([node.meta["val"].dtype for node in made], [torch.bool])

    def test_attention_without_dropout_may_be_recomputed(self):
        graphs = self.split(attention_without_dropout, 0.01)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        for graph in graphs:
            found = graph.find_nodes(op="call_function", target=flash)
            self.assertEqual(len(found), 1)


instantiate_parametrized_tests(RandomTagsTest)

if __name__ == "__main__":
    run_tests()
