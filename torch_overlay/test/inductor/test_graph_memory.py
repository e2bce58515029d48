# Owner(s): ["module: inductor"]
"""What compiled graphs tell of their memory is what their wrappers allocate and drop."""

import json
import logging

import torch
import torch._functorch.config as functorch_config
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch._logging._internal import trace_log
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.common_utils import run_tests, TestCase


ROWS, SIDE = 512, 32
# Bytes of a result.
UNIT = ROWS * SIDE * 4


class Told(logging.Handler):
    """What the structured trace has of each graph."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.graphs = []

    def emit(self, record):
        artifact = getattr(record, "metadata", {}).get("artifact", {})
        if artifact.get("name") == "graph_memory":
            self.graphs.append(json.loads(record.payload))

    def __enter__(self):
        self.level_before = trace_log.level
        trace_log.setLevel(logging.DEBUG)
        trace_log.addHandler(self)
        return self

    def __exit__(self, *error):
        trace_log.removeHandler(self)
        trace_log.setLevel(self.level_before)


def live_at_most(call):
    """The most bytes that are allocated at once while ``call`` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        call()
    events = run.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def given():
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, SIDE), (SIDE, 4 * SIDE)
    return [torch.randn(shape, generator=generator) / SIDE for shape in shapes]


def several(x, w):
    """Views, an operator with two results of which one is unused, what is reused."""
    found, _ = (x @ w).relu().view(-1, SIDE).topk(SIDE)
    return (found.view(ROWS, -1) @ w.t()).sin() @ w, x.t()


def branching(x, w):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


class GraphMemoryTest(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        # Plain loops compile fastest.
        self.enterContext(config.patch({"cpp.simdlen": 1}))
        self.enterContext(fresh_cache())

    def test_what_is_live(self):
        inputs, compiled = given(), torch.compile(several)
        with Told() as told:
            found = compiled(*inputs)
        self.assertEqual(found, several(*inputs))
        (memory,) = told.graphs
        self.assertEqual(max(memory["live"]), live_at_most(lambda: compiled(*inputs)))
        at_peak = memory["at_peak"]
        self.assertEqual(sum(size for _, size, _ in at_peak), max(memory["live"]))
        self.assertTrue(any("topk" in operators for *_, operators in at_peak))
        (_, size), view = memory["results"]
        self.assertEqual([size, view], [4 * UNIT, None])

    def test_a_step(self):
        """The backward drops what the forward saved, as soon as it was read."""

        def function(x, w):
            return ((x @ w).sin() @ w.t()).sin().sum()

        inputs = [value.requires_grad_() for value in given()]
        with Told() as told:
            torch.compile(function)(*inputs).backward()
        forward, backward = told.graphs
        self.assertGreater(len(forward["results"]), 1)
        # What is left at the end is returned: the loss, and what is saved.
        returned = dict(result for result in forward["results"] if result)
        self.assertEqual(sum(returned.values()), forward["live"][-1])
        self.assertGreater(sum(returned.values()), UNIT)
        self.assertLess(min(backward["dropped"]), max(backward["dropped"]))
        self.assertEqual(max(backward["dropped"]), len(backward["live"]))
        self.assertEqual([size for _, size in backward["results"]], [UNIT, UNIT // 4])

    def test_graphs_from_the_cache(self):
        options = {"enable_autograd_cache": True}
        told = []
        for _ in range(2):
            torch._dynamo.reset()
            with Told() as each, functorch_config.patch(options):
                torch.compile(torch.sin)(given()[0])
            told.append(each.graphs)
        self.assertEqual(len(told[0]), 1)
        self.assertEqual(told[0], told[1])

    def test_branches_are_not_told(self):
        with Told() as told:
            torch.compile(branching)(*given())
        self.assertEqual(told.graphs, [])


if __name__ == "__main__":
    run_tests()
