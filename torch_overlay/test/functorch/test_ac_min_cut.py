# Owner(s): ["module: functorch"]
"""The partitioner's min cuts are those that networkx finds."""

import random
from unittest.mock import patch

import networkx as nx

import torch
from torch._functorch import partitioners
from torch._functorch._activation_checkpointing.min_cut import minimum_cut
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing._internal.common_utils import run_tests, TestCase


def cut_by(function, graph, source, sink):
    try:
        return function(graph, source, sink)
    except nx.NetworkXUnbounded:
        return "unbounded"


class TestMinCut(TestCase):
    def test_cuts_of_the_partitioner(self):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        convolution = torch.nn.Conv2d(3, 4, 3)
        for module, shape in ((layer, (2, 4, 16)), (convolution, (2, 3, 8, 8))):
            parameters = dict(module.named_parameters())

            def step(x, *values, module=module, names=tuple(parameters)):
                state = dict(zip(names, values))
                return torch.func.functional_call(module, state, (x,)).relu().sum()

            for budget, cuts in ((1.0, 1), (0.3, 2)):
                with (
                    torch._functorch.config.patch(activation_memory_budget=budget),
                    patch.object(
                        partitioners, "minimum_cut", side_effect=minimum_cut
                    ) as cut,
                ):
                    aot_function(
                        step,
                        fw_compiler=lambda module, _: module,
                        bw_compiler=lambda module, _: module,
                        partition_fn=min_cut_rematerialization_partition,
                    )(torch.randn(shape), *parameters.values())
                self.assertGreaterEqual(cut.call_count, cuts)
                for asked in cut.call_args_list:
                    self.assertEqual(
                        minimum_cut(*asked.args), nx.minimum_cut(*asked.args)
                    )

    def test_of_equal_cuts_the_one_nearest_to_the_sink(self):
        """Capacities of few values, some infinite, make many cuts of least value."""
        generator = random.Random(0)
        for _ in range(500):
            nodes = generator.randrange(3, 12)
            graph = nx.DiGraph()
            for _ in range(3 * nodes):
                a, b = generator.sample(range(nodes), 2)
                # Most lead onwards, some back; an edge of capacity 0 is none.
                a, b = (a, b) if generator.random() < 0.2 else sorted((a, b))
                capacity = generator.choice([0, 1, 1, 2, 3, 0.5, float("inf")])
                graph.add_edge(a, b, capacity=capacity)
            graph.add_edge(0, nodes - 1, capacity=1)
            graph.add_edge(1, 2)  # Without a capacity: infinite.
            self.assertEqual(
                cut_by(minimum_cut, graph, 0, nodes - 1),
                cut_by(nx.minimum_cut, graph, 0, nodes - 1),
            )


if __name__ == "__main__":
    run_tests()
