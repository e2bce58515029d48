"""A net without randomness gets the plan of the untouched release, at every budget."""

import copy

import pytest
import torch
import torch._functorch.config as fconfig
import torch.nn.functional as F
from benchmarks.nets import Shape, Transformer
from torch import nn
from torch._functorch import partitioners
from torch._functorch._activation_checkpointing.random_ops import is_random
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from upstream import untouched_partitioners


UPSTREAM = untouched_partitioners()
BUDGETS = (0, 0.1, 0.2, 0.35, 0.5, 0.7, 1)


def functional(module, *batch):
    names, parameters = zip(*module.named_parameters())

    def loss(*values):
        given = dict(zip(names, values[len(batch) :]))
        output = torch.func.functional_call(module, given, values[: len(batch)])
        return output.square().mean()

    return loss, (*batch, *(p.detach().requires_grad_() for p in parameters))


def mlp(p=0.0):
    widths = (16, 48, 24, 32, 8)
    layers = [
        layer
        for before, after in zip(widths, widths[1:])
        for layer in (nn.Linear(before, after), nn.GELU(), nn.Dropout(p))
    ]
    return functional(nn.Sequential(*layers), torch.randn(32, 16))


def transformer():
    shape = Shape(width=32, heads=4, mlp=64, layers=1, vocabulary=64, tokens=16)
    batch = torch.randint(64, (2, 2, 16))
    return functional(Transformer(shape), *batch)


class Residual(nn.Module):
    def __init__(self, training):
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.noisy = training

    def forward(self, x):
        y = F.rrelu(self.norm(self.first(x)), training=self.noisy)
        return F.rrelu(x + self.second(y), training=self.noisy)


def resnet(training=False):
    module = nn.Sequential(nn.Conv2d(3, 8, 3), Residual(training), Residual(training))
    return functional(module, torch.randn(4, 3, 12, 12))


def attention(dropout_p=0.0):
    def loss(q, k, v, w):
        for _ in range(3):
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
            q = (mixed @ w).tanh()
        return q.sum()

    shapes = [(2, 4, 16, 8)] * 3 + [(8, 8)]
    return loss, tuple(torch.randn(s, requires_grad=True) for s in shapes)


STEADY = {"mlp": mlp, "transformer": transformer, "resnet": resnet}
STEADY["attention"] = attention


def trace(function, inputs, decompositions):
    """The joint graph of ``function`` and how to partition it."""
    kept = []

    def keep(module, joint_inputs, **options):
        kept.append((copy.deepcopy(module), joint_inputs, options))
        return partitioners.min_cut_rematerialization_partition(
            module, joint_inputs, **options
        )

    aot_function(
        function,
        fw_compiler=lambda module, _: module,
        bw_compiler=lambda module, _: module,
        partition_fn=keep,
        decompositions=decompositions,
    )(*inputs)
    return kept[0]


def text(module, joint, joint_inputs, options, budget, aggressive=False):
    """The two programs that ``module``'s partitioner makes of a joint graph."""
    with fconfig.patch(
        activation_memory_budget=budget,
        aggressive_recomputation=aggressive,
        # Upstream knows no "exact"; both modules get the same function for this.
        activation_memory_budget_solver="dp",
        # A pass of another topic, which changes plans where losses are averaged.
        drop_unread_arguments=False,
    ):
        forward, backward = module.min_cut_rematerialization_partition(
            copy.deepcopy(joint), joint_inputs, **options
        )
    return forward.code, backward.code


# Attention without dropout carries the tag of random ops when it is not decomposed.
@pytest.mark.parametrize(
    "name, decomposed", [*((name, True) for name in STEADY), ("attention", False)]
)
def test_plans_without_randomness_are_upstreams(name, decomposed):
    table = select_decomp_table() if decomposed else {}
    joint = trace(*STEADY[name](), table)
    assert not any(is_random(node) for node in joint[0].graph.nodes)
    seen = set()
    for budget in BUDGETS:
        plan = text(partitioners, *joint, budget)
        assert plan == text(UPSTREAM, *joint, budget), budget
        seen.add(plan)
    aggressive = text(partitioners, *joint, 1, aggressive=True)
    assert aggressive == text(UPSTREAM, *joint, 1, aggressive=True)
    assert len(seen) > 3, "one plan for all budgets proves little"


@pytest.mark.parametrize("case", [lambda: mlp(0.5), lambda: resnet(training=True)])
def test_plans_at_budget_one_are_upstreams(case):
    """There, upstream recomputes no random op either, and at lower budgets it does."""
    joint = trace(*case(), select_decomp_table())
    assert any(is_random(node) for node in joint[0].graph.nodes)
    assert text(partitioners, *joint, 1) == text(UPSTREAM, *joint, 1)
    assert text(partitioners, *joint, 0) != text(UPSTREAM, *joint, 0)
