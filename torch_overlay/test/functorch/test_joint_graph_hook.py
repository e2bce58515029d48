# Owner(s): ["module: functorch"]
"""A library can compile a joint graph again, saving other values for the backward."""

import unittest

import torch
import torch._functorch.config as config
import torch._inductor.config as inductor_config
from torch._functorch import partitioners
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_utils import HAS_CPU


OPERATORS = "aot_eager_decomp_partition"


def inputs_only(graph, node_info, **options):
    return node_info.inputs


class Library:
    """Runs each graph by what it was first compiled to, or by ``choose``."""

    def __init__(self, choose=inputs_only):
        self.choose, self.again, self.graphs = choose, False, []

    def __call__(self, joint):
        self.graphs.append(joint)
        first, runs = joint.compile(), []

        def run(args):
            if not self.again:
                return first(args)
            if not runs:
                runs.append(joint.compile(self.choose))
            return runs[0](args)

        return run


class JointGraphHookTest(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.enterContext(fresh_cache())
        # Plain loops compile fastest.
        self.enterContext(inductor_config.patch({"cpp.simdlen": 1}))
        layers = [torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)]
        self.net = torch.nn.Sequential(*layers)
        self.x = torch.randn(16, 8, requires_grad=True)

    def step(self, function):
        """What was returned, the gradients, and the bytes saved but for inputs."""
        given = [self.x, *self.net.parameters()]
        there = {value.untyped_storage()._cdata for value in given}
        saved = {}

        def pack(value):
            storage = value.untyped_storage()
            if storage._cdata not in there:
                saved[storage._cdata] = storage.nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            result = function(self.x)
        gradients = torch.autograd.grad(result.sin().sum(), given)
        return [result.detach(), *gradients], sum(saved.values())

    def check(self, backend):
        wanted, _ = self.step(self.net)
        library = Library()
        with config.patch(joint_graph_hook=library):
            compiled = torch.compile(self.net, backend=backend)
            first, some = self.step(compiled)
        # Later, when no option is set any more.
        library.again = True
        second, none = self.step(compiled)
        library.again = False
        third, as_before = self.step(compiled)
        self.assertEqual([first, second, third], [wanted] * 3)
        self.assertEqual(len(library.graphs), 1)
        self.assertGreater(some, 0)
        self.assertEqual([none, as_before], [0, some])

    def test_operators(self):
        self.check(OPERATORS)

    @unittest.skipIf(not HAS_CPU, "inductor cannot compile for the CPU here")
    def test_inductor(self):
        self.check("inductor")

    def test_values_of_its_own(self):
        """As many of the usual ones as a limit allows, by the names in the graph."""

        def half(graph, node_info, memory_budget):
            usual = partitioners.choose_saved_values_set(graph, node_info, 1)
            computed = [node for node in usual if node.op == "call_function"]
            return [*node_info.inputs, *computed[: len(computed) // 2]]

        self.net.extend([torch.nn.GELU(), torch.nn.Linear(8, 8)])
        library = Library(half)
        with config.patch(joint_graph_hook=library):
            compiled = torch.compile(self.net, backend=OPERATORS)
            found, most = self.step(compiled)
            library.again = True
            other, fewer = self.step(compiled)
        self.assertEqual(other, found)
        self.assertLess(0, fewer)
        self.assertLess(fewer, most)

    def test_what_is_cached_does_not_pass_it_by(self):
        for _ in range(2):
            torch._dynamo.reset()
            library = Library()
            with config.patch(joint_graph_hook=library, enable_autograd_cache=True):
                self.step(torch.compile(self.net, backend=OPERATORS))
            self.assertEqual(len(library.graphs), 1)

    def test_inputs_that_are_written_to_or_returned(self):
        def function(x):
            x.add_(1)
            return x, x.view(-1).sin().exp()

        def step(call):
            leaf = torch.ones(4, 4, requires_grad=True)
            whole, view = call(leaf * 2)
            (whole.sum() + view.sum()).backward()
            return whole.detach(), view.detach(), leaf.grad

        library = Library(partitioners.choose_saved_values_set)
        with config.patch(joint_graph_hook=library):
            compiled = torch.compile(function, backend=OPERATORS)
            first = step(compiled)
        library.again = True
        self.assertEqual([first, step(compiled)], [step(function)] * 2)


if __name__ == "__main__":
    run_tests()
