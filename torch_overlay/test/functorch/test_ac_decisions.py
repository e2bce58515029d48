# Owner(s): ["module: functorch"]
"""What is read is decided once, whatever is recomputed.

Each net reads elements by a decision of its own kind.  Its plans must not repeat the
operator that decides, and must keep no more than what was decided.  More kinds are in
test_ac_routing.py, the test of a patch that this one builds on.
"""

import itertools

from test_ac_random_ops import checkpointed, PARTITIONS, plans

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.utils.checkpoint import CheckpointPolicy


aten = torch.ops.aten
ROWS, WIDTH, EXPERTS = 32, 8, 4
BUDGETS = (0, 0.1, 0.5, 1)
SETTINGS = [(budget, False) for budget in BUDGETS] + [(1, True)]
TARGETS = ["saved"]
if hasattr(functorch_config, "activation_memory_budget_target"):
    TARGETS.append("peak")


def target(name):
    return (
        functorch_config.patch(activation_memory_budget_target=name)
        if len(TARGETS) > 1
        else functorch_config.patch({})
    )


def by_topk(x, scores, experts):
    weights, chosen = scores.softmax(-1).topk(2)
    return (experts[chosen] * x.unsqueeze(1) * weights.unsqueeze(2)).sum(1)


def by_argmax(x, scores, experts):
    return x * experts[scores.argmax(-1)]


def by_rounding(x, scores, experts):
    place = scores[:, :1].sigmoid() * (EXPERTS - 1)
    lower = place.floor().clamp(0, EXPERTS - 2)
    weight = place - lower
    index = lower.squeeze(1).long()
    return x * (experts[index] * (1 - weight) + experts[index + 1] * weight)


def by_queue(x, scores, experts):
    """Each expert takes so many tokens; the places are counted in floats."""
    room = ROWS // EXPERTS
    expert = scores.argmax(-1)
    counted = F.one_hot(expert, EXPERTS).float().cumsum(0)
    place = counted.gather(1, expert.unsqueeze(1)).squeeze(1).long() - 1
    slot = torch.where(place < room, expert * room + place, EXPERTS * room)
    queue = x.new_zeros(EXPERTS * room + 1, WIDTH).index_copy(0, slot, x)
    done = queue[:-1].view(EXPERTS, room, WIDTH) * experts.unsqueeze(1)
    return F.pad(done.flatten(0, 1), (0, 0, 0, 1))[slot]


# How each decides, and what is kept for it: bytes of a row.
NETS = {
    "topk": (by_topk, aten.topk, 2 * (8 + 4)),
    "rounding": (by_rounding, aten.floor, 4),
    "queue": (by_queue, aten.argmax, 8),
    "mask": (
        lambda x, scores, experts: (
            x.masked_scatter((scores[:, :1] > 0).expand_as(x), x.cos()) * x
        ),
        aten.gt,
        1,
    ),
}


def net(choose):
    """A scalar function of tokens, and its inputs."""

    def function(x, router, experts):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return choose(x, (x @ router).tanh(), experts).sin().sum()

    shapes = ((ROWS, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH))
    torch.manual_seed(0)
    return function, tuple(torch.randn(*shape, requires_grad=True) for shape in shapes)


@torch.compiler.nested_compile_region
def in_region(x, scores, experts):
    return by_argmax(x, scores, experts)


def by_branch(x, scores, experts):
    given = (x, scores, experts)
    return torch.cond(scores.sum() > 0, by_argmax, lambda x, *_: x.cos(), given)


def attention(x, scores, experts):
    heads = x.view(1, 1, ROWS, WIDTH)
    return F.scaled_dot_product_attention(heads, heads, heads)


UNDECIDED = {
    "relu": lambda x, scores, experts: x * scores.relu().sum(1, keepdim=True),
    "quantized": lambda x, scores, experts: (
        x * ((scores * 100).round().to(torch.int8) * scores).sum(1, keepdim=True)
    ),
    "attention": attention,
}


def is_topk(op):
    return op is aten.topk.default


class DecisionsTest(TestCase):
    @parametrize("name", NETS)
    def test_nothing_is_decided_again(self, name):
        if name == "queue" and torch.__version__ < (2, 13):
            self.skipTest("before 2.13, no graph with one_hot's asserts can be split")
        choose, decides, row = NETS[name]
        for bounded, partition in itertools.product(TARGETS, PARTITIONS):
            if partition == "aot" and name not in ("topk", "queue"):
                continue
            with target(bounded):
                made = plans(*net(choose), SETTINGS, PARTITIONS[partition])
            for setting, plan in zip(SETTINGS, made):
                with self.subTest(target=bounded, setting=setting):
                    self.assertFalse(plan.repeats(decides))
        # Nor is more kept than what was decided.
        (plan,) = plans(*net(choose), SETTINGS[:1])
        self.assertLessEqual(plan.saved_bytes(), ROWS * row)

    def test_checkpoints_keep_decisions(self):
        selective = checkpointed(by_topk, CheckpointPolicy.PREFER_RECOMPUTE)
        for plan in plans(*net(selective), SETTINGS):
            self.assertFalse(plan.repeats(aten.topk))
            self.assertTrue(plan.repeats(aten.tanh) or plan.saved_bytes() > 0)
        # Unless somebody insists.
        insisting = checkpointed(by_topk, CheckpointPolicy.MUST_RECOMPUTE, is_topk)
        for plan in plans(*net(insisting), SETTINGS):
            self.assertTrue(plan.repeats(aten.topk))

    def test_in_subgraphs(self):
        if torch.__version__ < (2, 12):
            self.skipTest("before 2.12, AOTAutograd cannot trace it")
        for choose in (in_region, by_branch):
            for plan in plans(*net(choose), SETTINGS[:4]):
                repeated = {node.target for node in plan.repeated}
                deciding = {
                    aten.argmax.default,
                    aten.gt.Scalar,
                    torch.ops.higher_order.cond,
                }
                self.assertEqual(repeated & deciding, set())

    @parametrize("name", UNDECIDED)
    def test_what_decides_nothing_is_not_kept(self, name):
        (plan,) = plans(*net(UNDECIDED[name]), SETTINGS[:1])
        self.assertEqual(plan.saved_bytes(), 0)


instantiate_parametrized_tests(DecisionsTest)

if __name__ == "__main__":
    run_tests()
