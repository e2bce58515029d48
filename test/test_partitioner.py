"""The partitioner's plans beside those of the untouched wheel, from one trace."""

import pytest
import torch._functorch.config as fconfig
from benchmarks import nets
from benchmarks.nets import Shape, tokens, Transformer
from benchmarks.tracing import Joint, untouched_partitioners
from torch._functorch import partitioners
from torch._subclasses.fake_tensor import FakeTensorMode


SHAPE = Shape(width=48, mlp=128, layers=2, vocabulary=64, tokens=32)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("net", [Transformer(SHAPE), nets.MLP((16, 48, 24, 8), 8, 0.5)])
def test_plans_at_the_ends_are_upstreams(net):
    """But at budget 0 with dropout, which upstream draws again there."""
    is_random = isinstance(net, nets.MLP)
    batch = nets.features((32, 16), 8) if is_random else tokens(64, 4, 32)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        joint = Joint(mode, net, batch)

    def plan(module, budget, aggressive=False):
        choice = {
            "activation_memory_budget": budget,
            # drop_unread_arguments is another topic's; upstream knows no "exact".
            "activation_memory_budget_solver": "dp",
            "drop_unread_arguments": False,
            "aggressive_recomputation": aggressive,
        }
        with fconfig.patch(choice):
            split = joint.partition(module.min_cut_rematerialization_partition)
        return [half.code for half in split]

    upstream = untouched_partitioners()
    assert plan(partitioners, 1) == plan(upstream, 1)
    assert (plan(partitioners, 0) == plan(upstream, 0)) != is_random
    if not is_random:
        assert plan(partitioners, 1, True) == plan(upstream, 1, True)
