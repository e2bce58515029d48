# Owner(s): ["module: functorch"]
"""What is tagged MUST_SAVE, and what has effects, runs once at budget 0 as well."""

import functools

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


mm = torch.ops.aten.mm.default
runs = []


@torch.library.custom_op("test_ac_must_save_at_zero::tick", mutates_args=())
def tick(x: torch.Tensor) -> torch.Tensor:
    runs.append(1)
    return x.clone()


@tick.register_fake
def _(x):
    return torch.empty_like(x)


tick.register_autograd(lambda ctx, grad: grad)


def layer(x, w):
    return (x @ w).sin().cos().exp()


def choose(context, op, *args, **kwargs):
    is_product = op is mm
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_SAVE


kept = functools.partial(
    checkpoint,
    layer,
    use_reentrant=False,
    context_fn=functools.partial(create_selective_checkpoint_contexts, choose),
)


class MustSaveAtZeroTest(TestCase):
    def run_net(self, function, budget):
        """Forward, backward and their graphs, under one budget."""
        graphs = []

        def keep(graph_module, inputs):
            graphs.append(graph_module.graph)
            return nop(graph_module, inputs)

        torch._dynamo.reset()
        torch.manual_seed(0)
        backend = aot_autograd(
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
        )
        x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        with functorch_config.patch(
            activation_memory_budget=budget, enable_autograd_cache=False
        ):
            torch.compile(function, backend=backend)(x, w).sum().backward()
        forward, backward = graphs
        (output,) = forward.find_nodes(op="output")
        saved = [
            node.target
            for node in output.args[0][1:]
            if node.op != "placeholder" and not getattr(node.target, "is_view", False)
        ]
        return saved, backward, (x.grad, w.grad)

    def test_what_is_tagged_is_saved(self):
        _, _, expected = self.run_net(layer, 1)
        for budget in (0, 0.01):
            saved, backward, grads = self.run_net(kept, budget)
            self.assertEqual(saved, [mm])
            # Those of the gradients, and no third.
            products = backward.find_nodes(op="call_function", target=mm)
            self.assertEqual(len(products), 2)
            self.assertEqual(grads, expected)

    def test_nothing_else_is_saved(self):
        saved, _, _ = self.run_net(layer, 0)
        self.assertEqual(saved, [])

    def test_effects_happen_once(self):
        handle = _register_effectful_op(tick._opoverload, _EffectType.ORDERED)
        self.addCleanup(handle.destroy)
        for budget in (0, 0.01, 1):
            runs.clear()
            self.run_net(lambda x, w: tick((x @ w).sin()).cos() @ w, budget)
            self.assertEqual(len(runs), 1, msg=f"budget {budget}")


if __name__ == "__main__":
    run_tests()
