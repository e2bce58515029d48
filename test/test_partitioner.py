"""The solvers at work: in min_cut_rematerialization_partition and in torch.compile.

Graphs are traced once and partitioned as often as a test needs. The rules checked here
are the solvers' promises (`keeps_promise`).
"""

import importlib.util
import itertools
import math

import pytest
import torch
import torch._functorch.config as fconfig
from benchmarks import nets
from benchmarks.corpus import keeps_promise
from benchmarks.meters import record_step, relative_error, TOLERANCE
from benchmarks.nets import Shape, tokens, Transformer
from benchmarks.tracing import Joint, observed
from benchmarks.upstream import untouched_partitioners
from torch import nn
from torch._functorch import partitioners
from torch._functorch._activation_checkpointing.knapsack import KNAPSACK_SOLVERS
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode


SOLVERS = list(KNAPSACK_SOLVERS)
if importlib.util.find_spec("scipy") is None:
    SOLVERS.remove("ilp")
BACKEND = "aot_eager_decomp_partition"
MM = torch.ops.aten.mm.default
requires_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
pytestmark = pytest.mark.usefixtures("alone")


# ------------------------------------------------------------------- graphs


class Chain(nn.Sequential):
    """Products, one behind the other."""

    def __init__(self, *widths):
        pairs = itertools.pairwise(widths)
        super().__init__(*(nn.Linear(a, b, bias=False) for a, b in pairs))

    def forward(self, x):
        return super().forward(x).sum()


# What a product costs per byte is the width before it.
ROWS, WIDTHS = 50, (40, 96, 24, 64, 16, 80, 48, 104, 32)
SHAPE = Shape(width=48, mlp=128, layers=2, vocabulary=64, tokens=32)


def configured(budget, solver):
    return fconfig.patch(
        activation_memory_budget=budget, activation_memory_budget_solver=solver
    )


def partition(joint, budget, solver):
    """Forward and backward, and the instance that the solver was asked."""
    with configured(budget, solver), observed() as asked:
        plan = joint.partition(min_cut_rematerialization_partition)
    return plan, asked[-1] if asked else None


def products(module):
    return len(module.graph.find_nodes(op="call_function", target=MM))


def saved_bytes(joint, forward):
    """Bytes of the activations handed to the backward: no inputs, no views of them."""
    (output,) = forward.graph.find_nodes(op="output")
    saved = output.args[0][joint.options["num_fwd_outputs"] :]
    storages = {storage(node)._cdata: storage(node).nbytes() for node in saved}
    for node in forward.graph.find_nodes(op="placeholder"):
        storages.pop(storage(node)._cdata, None)
    return sum(storages.values())


def storage(node):
    return node.meta["val"].untyped_storage()


@pytest.fixture(scope="module")
def uneven():
    with FakeTensorMode() as mode:
        return Joint(mode, Chain(*WIDTHS), (torch.randn(ROWS, WIDTHS[0]),))


@pytest.fixture(scope="module")
def transformer():
    with FakeTensorMode() as mode:
        return Joint(mode, Transformer(SHAPE), tokens(64, 4, 32))


# ------------------------------------------------- what is kept and repeated


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_a_solver_leaves_is_repeated(uneven, solver):
    """All but the last product, whose value is not needed, are items."""
    (forward, backward), instance = partition(uneven, 0.5, solver)
    memory, saved = instance.memory, instance.saved
    assert len(memory) == len(WIDTHS) - 2
    repeated = products(forward) + products(backward) - products(uneven.graph)
    assert 0 < repeated == len(memory) - len(saved)
    kept = sum(memory[i] for i in saved) / sum(memory)
    whole = ROWS * sum(WIDTHS[1:-1]) * 4
    assert saved_bytes(uneven, forward) == pytest.approx(kept * whole)


@pytest.mark.parametrize("budget", [0.1, 0.4])
@pytest.mark.parametrize("solver", SOLVERS)
def test_saved_bytes_stay_within_the_budget(transformer, solver, budget):
    (forward, _), instance = partition(transformer, budget, solver)
    memory = instance.memory
    assert len(memory) > 12
    assert sum(memory) > budget, "everything fits: nothing is tested"
    assert keeps_promise(solver, memory, budget, instance.saved)
    # The cut that follows may save less than the solver chose, never more.
    one_byte = memory[0] / storage(instance.nodes[0]).nbytes()
    chosen = math.fsum(memory[i] for i in instance.saved)
    saved = saved_bytes(transformer, forward)
    assert 0 < saved * one_byte <= chosen * (1 + 1e-9)


# --------------------------------------------------- beside the untouched wheel


@pytest.mark.parametrize("net", [Transformer(SHAPE), nets.MLP((16, 48, 24, 8), 8, 0.5)])
def test_plans_at_the_ends_are_upstreams(net):
    """But at budget 0 with dropout, which upstream draws again there."""
    is_random = isinstance(net, nets.MLP)
    batch = nets.features((32, 16), 8) if is_random else tokens(64, 4, 32)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        joint = Joint(mode, net, batch)

    def plan(module, budget, aggressive=False):
        # drop_unread_arguments is another topic's; upstream knows no "exact".
        choice = {
            "drop_unread_arguments": False,
            "aggressive_recomputation": aggressive,
        }
        with configured(budget, "dp"), fconfig.patch(choice):
            split = joint.partition(module.min_cut_rematerialization_partition)
        return [half.code for half in split]

    upstream = untouched_partitioners()
    assert plan(partitioners, 1) == plan(upstream, 1)
    assert (plan(partitioners, 0) == plan(upstream, 0)) != is_random
    if not is_random:
        assert plan(partitioners, 1, True) == plan(upstream, 1, True)


# ------------------------------------------------------------ torch.compile


@pytest.mark.parametrize(
    "solver, budget, device",
    [
        ("exact", 0.5, "cpu"),
        ("exact", 0.2, "cpu"),
        ("dp", 0.2, "cpu"),
        ("greedy", 0.5, "cpu"),
        pytest.param("exact", 0.3, "cuda", marks=requires_cuda),
    ],
)
def test_compiled_training_equals_eager_within_the_budget(solver, budget, device):
    torch.manual_seed(1)
    model = Transformer(SHAPE).to(device)
    batch = [each.to(device) for each in tokens(64, 4, 32)]
    parameters = list(model.parameters())
    eager = record_step(lambda: model(*batch), parameters)
    compiled = torch.compile(model, backend=BACKEND)
    with configured(budget, solver), observed() as asked:
        step = record_step(lambda: compiled(*batch), parameters)
    assert asked, "the knapsack was not reached"
    assert keeps_promise(solver, asked[-1].memory, budget, asked[-1].saved)
    assert relative_error(step.gradients, eager.gradients) <= TOLERANCE
