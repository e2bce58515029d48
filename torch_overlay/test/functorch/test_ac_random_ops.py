# Owner(s): ["module: functorch"]
"""Random numbers are drawn once, whatever is recomputed.

What the patches below this one hold is in their own tests: test_ac_random_tags.py,
test_ac_must_save_at_zero.py and test_ac_draws_on_one_side.py.  The gradients are checked
against finite differences of the compiled forward itself, under one seed: what they must
fit is the randomness that this forward had.
"""

import copy
import functools
import unittest
from contextlib import contextmanager

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._activation_checkpointing.random_ops import (
    is_random,
    must_run_once,
)
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


aten = torch.ops.aten
# (memory budget, aggressive recomputation)
SETTINGS = ((0, False), (0.1, False), (1, True))
LOW = ((0, False), (0.01, False))
# No cache between plans of one graph, and plain loops, which compile fastest.
QUICK = {"fx_graph_cache": False, "cpp.simdlen": 1}


@contextmanager
def configured(budget, aggressive):
    with (
        functorch_config.patch(
            activation_memory_budget=budget,
            aggressive_recomputation=aggressive,
            # Plans of one graph differ here, and gradcheck runs a backward twice.
            enable_autograd_cache=False,
            donated_buffer=False,
        ),
        inductor_config.patch(QUICK),
    ):
        yield


class Plan:
    """What one partition came to."""

    def __init__(self, joint, forward, backward, num_fwd_outputs):
        (output,) = forward.graph.find_nodes(op="output")
        self.saved = [
            node.meta["val"]
            for node in output.args[0][num_fwd_outputs:]
            if node.op != "placeholder"
        ]
        first, again = (
            {node.name for node in module.graph.nodes if node.op == "call_function"}
            for module in (forward, backward)
        )
        self.repeated = [node for node in joint if node.name in first & again]

    def saved_bytes(self):
        return sum(value.untyped_storage().nbytes() for value in self.saved)

    def repeats(self, packet):
        targets = [node.target for node in self.repeated]
        return any(getattr(t, "overloadpacket", None) is packet for t in targets)


def plans(function, inputs, settings, partition=min_cut_rematerialization_partition):
    """One plan for each setting, all from one trace of ``function``."""
    found = []

    def watched(joint_module, joint_inputs, **options):
        for setting in settings:
            joint = copy.deepcopy(joint_module)
            with configured(*setting):
                forward, backward = partition(joint, joint_inputs, **options)
            nodes = list(joint.graph.nodes)
            found.append(Plan(nodes, forward, backward, options["num_fwd_outputs"]))
        return forward, backward

    def run_as_it_is(module, _):
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=run_as_it_is,
        bw_compiler=run_as_it_is,
        partition_fn=watched,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    with functorch_config.patch(enable_autograd_cache=False):
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found


def double(*shape, device="cpu"):
    return torch.randn(*shape, dtype=torch.double, device=device, requires_grad=True)


def functional(module, *inputs):
    """A scalar function of the inputs and the module's parameters, and all of them."""
    names, parameters = zip(*module.double().named_parameters())

    def loss(*values):
        given = dict(zip(names, values[len(inputs) :]))
        output = torch.func.functional_call(module, given, values[: len(inputs)])
        return output.sin().sum()

    return loss, (*inputs, *parameters)


def mlp():
    module = nn.Sequential(
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(8, 3),
    )
    return functional(module, double(16, 6))


def inductor_partition(joint_module, joint_inputs, **options):
    """With inductor's passes, which replace random ops by seeds, before the cut."""
    with V.set_fake_mode(detect_fake_mode(joint_inputs)):
        return compile_fx.partition_fn(joint_module, joint_inputs, **options)


PARTITIONS = {
    "aot": min_cut_rematerialization_partition,
    "inductor": inductor_partition,
}


def square(function):
    """A function of two matrices whose product meets random numbers."""
    return lambda: (lambda x, w: function((x @ w).sin()), (double(4, 4), double(4, 4)))


def attention():
    def function(q, k, v):
        q, k, v = q.sin(), k.sin(), v.sin()
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return y.sin().sum()

    return function, tuple(double(1, 2, 8, 4) for _ in range(3))


@torch.library.custom_op(
    "test_ac_random_ops::pair",
    mutates_args=(),
    tags=(torch.Tag.nondeterministic_seeded,),
)
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand_like(x), torch.rand_like(x)


@pair.register_fake
def _(x):
    return torch.empty_like(x), torch.empty_like(x)


def dropped(x, w):
    return F.dropout(torch.tanh(x @ w), 0.3)


@torch.compiler.nested_compile_region
def region(x, w):
    return dropped(x, w)


def two(first, second):
    """Two layers, each with its own way to repeat a dropout."""

    def function(x, v, w):
        return second(first(x, v), w).sin().sum()

    return function, (double(4, 6), double(6, 6), double(6, 6))


def is_product(op):
    return op is aten.mm.default


def is_drawn(op):
    return torch.Tag.nondeterministic_seeded in op.tags


def checkpointed(layer, policy=None, chosen=is_product):
    """``layer`` under torch.utils.checkpoint, with ``policy`` for what is chosen."""

    def choose(context, op, *args, **kwargs):
        return policy if chosen(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    options = {} if policy is None else {"context_fn": contexts}
    return functools.partial(checkpoint, layer, use_reentrant=False, **options)


REPEATED = checkpointed(dropped, CheckpointPolicy.MUST_RECOMPUTE, is_drawn)
CASES = {
    "dropout": square(lambda y: F.dropout(y, 0.4).cos().sum()),
    "attention": attention,
    "custom": square(lambda y: (y * pair(y.detach())[1]).cos().sum()),
    "checkpoint": lambda: two(checkpointed(dropped), dropped),
    "must_recompute": lambda: two(REPEATED, dropped),
    "subgraph": lambda: two(region, region),
}


def check_gradients(compiled, inputs):
    """They are the finite differences under the same seed."""

    def seeded(*values):
        torch.manual_seed(0)
        return compiled(*values)

    torch.autograd.gradcheck(
        seeded,
        inputs,
        rtol=1e-5,
        atol=1e-7,
        check_undefined_grad=False,
        fast_mode=True,
    )


class RandomOpsTest(TestCase):
    def check(self, case, backend="aot_eager_decomp_partition"):
        for setting in SETTINGS:
            with self.subTest(setting=setting), configured(*setting):
                torch._dynamo.reset()
                torch.manual_seed(7)
                function, inputs = case()
                compiled = torch.compile(function, backend=backend, fullgraph=True)
                check_gradients(compiled, inputs)

    @parametrize("name", CASES)
    def test_gradients(self, name):
        self.check(CASES[name])

    def test_no_more_is_saved_than_was_drawn(self):
        for plan in plans(*mlp(), LOW):
            self.assertEqual([v.dtype for v in plan.saved], [torch.bool] * 2)
            self.assertEqual(plan.saved_bytes(), 2 * 16 * 8)
        # Of inductor's seeds.
        for plan in plans(*mlp(), LOW, inductor_partition):
            self.assertFalse(any(map(is_random, plan.repeated)))
            self.assertEqual({v.dtype for v in plan.saved}, {torch.int64})
            self.assertEqual(plan.saved_bytes(), 2 * 8)

    def test_is_random(self):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")

        def call(op, *args, **kwargs):
            return graph.call_function(op, args, kwargs)

        flash = aten._scaled_dot_product_flash_attention.default
        efficient = aten._scaled_dot_product_efficient_attention.default
        higher_order = torch.ops.higher_order
        # Those of GPUs, and those that inductor makes; the others run above.
        for drawn, node in (
            (True, call(flash, x, x, x, dropout_p=x)),
            (True, call(efficient, x, x, x, None, True, 0.1)),
            (True, call(aten.native_dropout.default, x, 0.5, None)),
            (True, call(torch.ops.prims.inductor_seeds.default, 2, x)),
            (True, call(higher_order.run_and_save_rng_state, aten.rand.default, [4])),
            (False, call(flash, x, x, x)),
            (False, call(efficient, x, x, x, None, True)),
            (False, call(torch.ops.prims.inductor_lookup_seed.default, x, 0)),
            (False, call(torch.ops.rngprims.philox_rand.default, [4], x, x)),
            (False, call(higher_order.run_with_rng_state, x, aten.rand.default, [4])),
        ):
            self.assertEqual(is_random(node), drawn, msg=node.format_node())
            self.assertEqual(must_run_once(node), drawn)
            # A preference lets no random one run again, and what must be saved is.
            policy = "PREFER_SAVE" if drawn else "MUST_SAVE"
            node.meta["recompute"] = CheckpointPolicy[policy]
            self.assertTrue(must_run_once(node))
            # Only single operators can be given the generator's state again.
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            is_whole = node.target is higher_order.run_and_save_rng_state
            self.assertEqual(must_run_once(node), is_whole)

    @unittest.skipIf(not torch.cuda.is_available(), "no GPU here")
    @parametrize("name", ("dropout", "checkpoint", "attention", "subgraph"))
    def test_cuda(self, name):
        def on_cuda():
            function, inputs = CASES[name]()
            return function, [x.detach().cuda().requires_grad_() for x in inputs]

        # With functionalized generators the random ops take a seed and an offset.
        for functionalized in (False, True):
            with functorch_config.patch(functionalize_rng_ops=functionalized):
                self.check(on_cuda)
        if name != "subgraph":
            self.check(on_cuda, "inductor")


instantiate_parametrized_tests(RandomOpsTest)

if __name__ == "__main__":
    run_tests()
