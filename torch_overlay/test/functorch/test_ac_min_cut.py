# Owner(s): ["module: functorch"]
"""The partitioner's min cuts: one algorithm's are the other's."""

import random
import unittest
from unittest.mock import patch

import networkx as nx
import torch
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing._internal.common_utils import run_tests, TestCase


def cuts_of(function, *inputs):
    """Every min cut of a partition: its graph, the algorithm and the cut found."""
    found = []
    cut = nx.minimum_cut

    def watched(graph, source, sink, **options):
        value, partition = cut(graph, source, sink, **options)
        found.append((graph, options.get("flow_func"), value, partition))
        return value, partition

    with patch.object(nx, "minimum_cut", watched):
        aot_function(
            function,
            fw_compiler=lambda module, _: module,
            bw_compiler=lambda module, _: module,
            partition_fn=min_cut_rematerialization_partition,
        )(*inputs)
    return found


class TestMinCut(TestCase):
    @unittest.skipIf(
        hasattr(partitioners, "minimum_cut"), "this release has a min cut of its own"
    )
    def test_cuts_are_those_of_the_default_algorithm(self):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        convolution = torch.nn.Conv2d(3, 4, 3)
        for module, shape in ((layer, (2, 4, 16)), (convolution, (2, 3, 8, 8))):
            parameters = dict(module.named_parameters())

            def step(x, *values, module=module, names=tuple(parameters)):
                state = dict(zip(names, values))
                return torch.func.functional_call(module, state, (x,)).relu().sum()

            for budget in (1.0, 0.3):
                with torch._functorch.config.patch(activation_memory_budget=budget):
                    found = cuts_of(step, torch.randn(shape), *parameters.values())
                self.assertGreaterEqual(len(found), 1 if budget == 1 else 2)
                for graph, algorithm, value, partition in found:
                    self.assertIs(algorithm, nx.algorithms.flow.boykov_kolmogorov)
                    known, sides = nx.minimum_cut(graph, "source", "sink")
                    self.assertEqual((value, partition), (known, sides))

    def test_of_equal_cuts_the_same_one_is_found(self):
        """Capacities of few values, some infinite, make many cuts of least value."""
        generator = random.Random(0)
        for _ in range(300):
            nodes = generator.randrange(3, 12)
            graph = nx.DiGraph()
            for _ in range(3 * nodes):
                a, b = sorted(generator.sample(range(nodes), 2))
                capacity = generator.choice([1, 1, 2, 3, float("inf")])
                graph.add_edge(a, b, capacity=capacity)
            graph.add_edge(0, nodes - 1, capacity=1)
            found = []
            for algorithm in (None, nx.algorithms.flow.boykov_kolmogorov):
                try:
                    cut = nx.minimum_cut(graph, 0, nodes - 1, flow_func=algorithm)
                except nx.NetworkXUnbounded:
                    cut = "unbounded"
                found.append(cut)
            self.assertEqual(*found)


if __name__ == "__main__":
    run_tests()
