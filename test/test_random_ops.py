"""A net without randomness gets the plan of the untouched release, or a better one."""

import pytest
import torch
import torch._functorch.config as fconfig
from benchmarks import kept, nets
from benchmarks.tracing import Joint
from benchmarks.upstream import untouched_partitioners
from torch._functorch import partitioners
from torch._functorch._activation_checkpointing.random_ops import is_random
from torch._subclasses.fake_tensor import FakeTensorMode


UPSTREAM = untouched_partitioners()
BUDGETS = (0.05, 0.1, 0.25, 0.5, 0.7)
RANDOM = torch.Tag.nondeterministic_seeded


def mlp(dropout=0.0):
    return nets.MLP((16, 48, 24, 32, 8), 8, dropout), nets.features((32, 16), 8)


def transformer():
    shape = nets.Shape(width=32, mlp=64, layers=1, vocabulary=64, tokens=16)
    return nets.Transformer(shape), nets.tokens(64, 2, 16)


def resnet():
    return nets.ResNet((1,), 8, 8), nets.images(4, 24, 8)


def joint_graph(net):
    with FakeTensorMode() as mode:
        module, inputs = net()
    return Joint(mode, module, inputs)


def text(module, joint, budget, aggressive=False):
    """The two programs that ``module``'s partitioner makes of a joint graph."""
    with fconfig.patch(
        activation_memory_budget=budget,
        aggressive_recomputation=aggressive,
        # Upstream knows no "exact".
        activation_memory_budget_solver="dp",
        # A pass of another topic, which changes plans where losses are averaged.
        drop_unread_arguments=False,
    ):
        plan = joint.partition(module.min_cut_rematerialization_partition)
    return [module.code for module in plan]


@pytest.mark.parametrize("net", [mlp, transformer, resnet])
def test_plans_without_randomness_are_upstreams(net):
    joint = joint_graph(net)
    assert not any(is_random(node) for node in joint.graph.graph.nodes)
    # Attention carries the tag of random operators, with or without dropout.
    tags = [getattr(node.target, "tags", ()) for node in joint.graph.graph.nodes]
    assert any(RANDOM in each for each in tags) == (net is transformer)
    for budget in (0, 1):
        assert text(partitioners, joint, budget) == text(UPSTREAM, joint, budget)
    (low, _), (high, _) = (kept.split(joint, partitioners, b) for b in (0, 1))
    seen = set()
    for budget in BUDGETS:
        nbytes, again = kept.split(joint, partitioners, budget)
        theirs, their_again = kept.split(joint, UPSTREAM, budget)
        allowed = low + budget * (high - low)
        assert nbytes <= allowed
        if theirs <= allowed:
            assert again <= their_again, budget
        seen.add(nbytes)
    aggressive = text(partitioners, joint, 1, aggressive=True)
    assert aggressive == text(UPSTREAM, joint, 1, aggressive=True)
    assert len(seen) > 3, "one plan for all budgets proves little"


def test_plans_at_budget_one_are_upstreams():
    """There, upstream recomputes no random op either, and at lower budgets it does."""
    joint = joint_graph(lambda: mlp(dropout=0.5))
    assert any(is_random(node) for node in joint.graph.graph.nodes)
    assert text(partitioners, joint, 1) == text(UPSTREAM, joint, 1)
    assert text(partitioners, joint, 0) != text(UPSTREAM, joint, 0)
