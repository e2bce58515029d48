# Owner(s): ["module: functorch"]
"""Unread arguments of backward operators: the table, the pass, what is saved.

That an argument is unread is never taken from the table: its values are replaced by
NaN, and every gradient has to stay the same, bit for bit.
"""

import copy
import itertools
import operator
import unittest
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch._functorch.config as config
import torch._inductor.config as inductor_config
import torch.fx as fx
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._activation_checkpointing import frozen_layers
from torch._functorch._activation_checkpointing.frozen_layers import (
    drop_unread_arguments,
    UNREAD_ARGUMENTS,
)
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


aten = torch.ops.aten
NAN = float("nan")
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
DECOMPOSED = "aot_eager_decomp_partition"
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def batch_norm(x, weight, bias, training):
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    return F.batch_norm(x, mean.detach(), variance.detach(), weight, bias, training)


def nll(x):
    target = torch.arange(x.numel() // x.shape[1], device=x.device) % x.shape[1]
    return F.nll_loss(x, target.view(x.shape[0], *x.shape[2:]), reduction="sum")


def convolutions():
    bias = (4,)
    for n in (1, 2, 3):
        for name in (f"conv{n}d", f"conv_transpose{n}d"):
            for options in ({}, {"stride": 2}, {"dilation": 2}, {"groups": 4}):
                weight = (4, 4 // options.get("groups", 1), *n * [3])
                yield name, options, (2, 4, *n * [7]), weight, bias
    # Other kernels: of many channels, of one pixel, of one channel.
    yield "conv2d", {"padding": 1}, (17, 16, 5, 5), (16, 16, 3, 3)
    yield "conv2d", {}, (2, 4, 5, 5), (6, 4, 1, 1)
    yield "conv2d", {}, (2, 1, 5, 5), (1, 1, 3, 3)


def others():
    for training in (False, True):
        yield batch_norm, {"training": training}, (3, 4, 5, 5), (4,), (4,)
    for mode, padding, corners in (
        ("bilinear", "zeros", False),
        ("nearest", "border", True),
        ("bicubic", "reflection", True),
    ):
        options = {"mode": mode, "padding_mode": padding, "align_corners": corners}
        yield "grid_sample", options, (2, 3, 5, 5), (2, 4, 4, 2)
    options = {"align_corners": False}
    yield "grid_sample", options, (2, 3, 4, 4, 4), (2, 3, 3, 3, 3)
    window = {"kernel_size": 3, "stride": 2, "padding": 1}
    for n in (2, 3):
        for name in ("max_pool", "avg_pool"):
            yield f"{name}{n}d", window, (2, 4, *n * [7])
            yield f"adaptive_{name}{n}d", {"output_size": 3}, (2, 4, *n * [7])
    yield "max_pool2d", {"kernel_size": 2, "dilation": 2}, (2, 4, 9, 9)
    for mode in ("reflect", "replicate"):
        yield "pad", {"pad": (1, 2) * 2, "mode": mode}, (2, 4, 5, 5)
    for shape in ((6, 5), (2, 5, 3, 3)):
        yield nll, {}, shape


# Functions of these inputs' shapes.
CALLS = [
    (partial(getattr(F, name) if isinstance(name, str) else name, **options), s)
    for name, options, *s in (*convolutions(), *others())
]


def batch(shape, device="cpu", dtype=torch.float32, channels_last=False):
    generator = torch.Generator().manual_seed(0)
    value = torch.rand(shape, generator=generator).to(device, dtype)
    if channels_last and len(shape) in LAYOUTS:
        value = value.contiguous(memory_format=LAYOUTS[len(shape)])
    return value


class Poisoned(TorchDispatchMode):
    """Fills with NaN what the table says is unread."""

    def __init__(self):
        super().__init__()
        self.reached = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in UNREAD_ARGUMENTS:
            return func(*args, **(kwargs or {}))
        argument, reader, off = UNREAD_ARGUMENTS[func]
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args)), **(kwargs or {})}
        is_unread = reader is None or not given["output_mask"][reader]
        if is_unread and not (off and given[off]):
            given[argument] = torch.full_like(given[argument], NAN)
            self.reached.add(func)
        return func(**given)


class OneThread(TestCase):
    """More threads are slower on tensors as small as these."""

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)


class TestUnreadArguments(OneThread):
    """The table against the kernels of the torch that runs this."""

    # Each of these takes other kernels on the CPU.
    @parametrize(
        "dtype,channels_last,mkldnn",
        [
            (torch.float32, False, True),
            (torch.float32, False, False),
            (torch.float32, True, True),
            (torch.bfloat16, True, True),
            (torch.float64, False, True),
        ],
    )
    @parametrize("device", DEVICES)
    def test_unread_arguments_may_be_nan(self, device, dtype, channels_last, mkldnn):
        """Gradients stay the same bit for bit, whichever inputs get one."""
        # Kernels of CUDA may add in another order every time.
        tolerance = 0 if device == "cpu" else 1e-2
        reached = set()
        for (function, shapes), wanted in itertools.product(CALLS, range(1, 8)):
            if wanted >> len(shapes):
                continue
            given = [batch(shape, device, dtype, channels_last) for shape in shapes]
            leaves = [
                x.requires_grad_() for i, x in enumerate(given) if wanted >> i & 1
            ]
            with (
                self.subTest(function=function, shapes=shapes, wanted=wanted),
                torch.backends.mkldnn.flags(enabled=mkldnn),
            ):
                try:
                    loss = function(*given).square().sum()
                    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
                except (NotImplementedError, RuntimeError) as error:
                    reasons = "not implemented for|must be contiguous"
                    self.assertRegex(str(error), reasons)
                    continue
                with Poisoned() as poisoned:
                    found = torch.autograd.grad(loss, leaves)
                reached |= poisoned.reached
                self.assertEqual(
                    found, expected, rtol=tolerance, atol=tolerance, exact_stride=True
                )
        if dtype is torch.float32 and not channels_last:
            self.assertEqual(reached, set(UNREAD_ARGUMENTS))


class Net(nn.Sequential):
    """Layers with eval-mode norms; ``trainable`` tells which get gradients."""

    def __init__(self, *layers, trainable=(0,)):
        super().__init__(*layers)
        for index, layer in enumerate(layers):
            layer.requires_grad_(index in trainable)
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()


def frozen_convnet(trainable=(0,)):
    """A stem before frozen 3x3, 1x1 and strided convolutions."""

    def block(*convolution, **options):
        frozen = nn.Conv2d(*convolution, bias=False, **options)
        return frozen, nn.BatchNorm2d(convolution[1]), nn.ReLU()

    return Net(
        nn.Conv2d(3, 8, 3, padding=1),
        *block(8, 8, 3, padding=1),
        *block(8, 16, 1),
        *block(16, 8, 3, stride=2),
        trainable=trainable,
    )


def step(function, module, *inputs):
    """Output, gradients of the parameters and inputs, and the saved bytes.

    Storages of the parameters and buffers do not count.
    """
    inputs = [value.detach().requires_grad_(value.requires_grad) for value in inputs]
    kept = {
        t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())
    }
    saved = {}

    def pack(value):
        storage = value.untyped_storage()
        if storage._cdata not in kept:
            saved[storage._cdata] = storage.nbytes()
        return value

    module.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = function(*inputs)
    output.sin().sum().backward()
    tensors = [*module.parameters(), *inputs]
    return output.detach(), [t.grad for t in tensors], sum(saved.values())


def compiled(function, backend=DECOMPOSED, **options):
    torch._dynamo.reset()
    call = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)

    def run(*inputs):
        with config.patch(**options):
            return call(*inputs)

    return run


def frozen_pair(count=2):
    """``count`` frozen convolutions, each of which changes the shape, and their
    inputs."""

    def function(x, weight):
        for _ in range(count):
            x = F.conv2d(x.sin(), weight, padding=1)
        return x

    return function, torch.rand(2, 3, 4, 4, requires_grad=True), torch.rand(3, 3, 1, 1)


@contextmanager
def poisoned():
    """Lists the stand-ins that are made, and fills them with NaN."""
    made = []

    def poisoning(module, *args, **kwargs):
        before = {node: node.args for node in module.graph.nodes}
        drop_unread_arguments(module, *args, **kwargs)
        for user, arguments in before.items():
            for at, argument in enumerate(user.args):
                # Lists are made anew.
                if isinstance(argument, fx.Node) and argument is not arguments[at]:
                    made.append((user.target, argument.meta["val"]))
                    with module.graph.inserting_before(user):
                        filled = module.graph.call_function(
                            aten.add.Tensor, (argument, NAN)
                        )
                    filled.meta = dict(argument.meta)
                    user.update_arg(at, filled)
        module.recompile()

    with mock.patch.object(frozen_layers, "drop_unread_arguments", poisoning):
        yield made


def read(node, target, *args):
    """Reads ``args`` once more, in the backward."""
    with node.graph.inserting_before(node.graph.output_node()):
        node.graph.call_function(target, args)


def become(node, change):
    node.meta["val"] = change(node.meta["val"])


# What the pass cannot be sure of, and how a convolution, its gradient and its input
# come to it in a graph where it would act.
DOUBTS = {
    "unknown mask": lambda n, g, x: n.update_arg(10, g),
    "wanted": lambda n, g, x: n.update_arg(10, [True, True, False]),
    "used": lambda n, g, x: read(n, operator.getitem, n, 1),
    "used whole": lambda n, g, x: read(n, len, n),
    "read elsewhere": lambda n, g, x: read(n, aten.mul.Tensor, x, g),
    "read twice": lambda n, g, x: n.update_arg(2, x),
    "no meta": lambda n, g, x: x.meta.pop("val"),
    "gradient without meta": lambda n, g, x: g.meta.pop("val"),
    "device": lambda n, g, x: become(x, lambda v: v.to("meta")),
    "conjugate": lambda n, g, x: become(x, lambda v: v.cfloat().conj()),
}


class TestDropUnreadArguments(OneThread):
    """The pass: what it changes, and above all what it does not."""

    def check(self, function, call, *inputs, module=None):
        """Compares two ways to compute a step; returns their saved bytes."""
        module = module or nn.Identity()
        *expected, before = step(function, module, *inputs)
        *found, after = step(call, module, *inputs)
        self.assertEqual(found, expected)
        return before, after

    @parametrize("backend", ("aot_eager", DECOMPOSED))
    @parametrize("device", DEVICES)
    def test_poison_reaches_no_gradient(self, backend, device):
        for trainable in ((0,), range(10)):
            module = frozen_convnet(trainable).to(device)
            inputs = batch((2, 3, 9, 9), device)
            without = compiled(module, backend, drop_unread_arguments=False)
            expected = step(without, module, inputs)[:2]
            with poisoned() as made:
                found = step(compiled(module, backend), module, inputs)[:2]
            tolerance = {"rtol": 0, "atol": 0} if device == "cpu" else {}
            self.assertEqual(found, expected, **tolerance)
            targets = {aten.convolution_backward.default}
            if backend != DECOMPOSED:
                targets.add(aten.native_batch_norm_backward.default)
            wanted = targets if trainable == (0,) else set()
            self.assertEqual({target for target, _ in made}, wanted)

    @unittest.skipIf(not HAS_CPU, "inductor cannot compile for the CPU here")
    def test_inductor(self):
        """It makes convolutions channels_last, though the graph says otherwise."""
        frozen = nn.Conv2d(4, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3)
        module, inputs = Net(nn.Conv2d(3, 4, 3), *frozen), batch((2, 3, 9, 9))
        # A cache would know nothing of poison, and plain loops compile fastest.
        with inductor_config.patch({"fx_graph_cache": False, "cpp.simdlen": 0}):
            options = {"backend": "inductor", "enable_autograd_cache": False}
            without = compiled(module, drop_unread_arguments=False, **options)
            expected = step(without, module, inputs)[:2]
            with poisoned() as made:
                found = step(compiled(module, **options), module, inputs)[:2]
        self.assertEqual(found, expected, rtol=0, atol=0)
        last = [v.is_contiguous(memory_format=torch.channels_last) for _, v in made]
        pool = aten._adaptive_avg_pool2d_backward.default
        self.assertEqual(last, [target is not pool for target, _ in made])
        self.assertEqual(len(set(last)), 2)

    def test_saved_bytes_are_those_that_are_needed(self):
        module, inputs = frozen_convnet(), batch((2, 3, 16, 16))
        call = compiled(module)
        eager, saved = self.check(module, call, inputs, module=module)
        # The stem needs its input.  Three ReLUs need to know where they were positive.
        pixels = 2 * 16 * 16
        self.assertEqual(saved, 4 * 3 * pixels + (8 + 16) * pixels + 2 * 8 * 7 * 7)
        self.assertGreater(eager, 5 * saved)
        # Under a budget too.
        found = []
        for on in (False, True):
            options = {"drop_unread_arguments": on, "activation_memory_budget": 0.5}
            call = compiled(module, **options)
            found.append(self.check(module, call, inputs, module=module)[1])
        without, saved = found
        self.assertLess(saved, without)

    def test_masks_are_made_beside_what_they_are_made_of(self):
        forwards = []

        def watched(*args, **kwargs):
            pair = min_cut_rematerialization_partition(*args, **kwargs)
            forwards.append([node.target for node in pair[0].graph.nodes])
            return pair

        module, inputs = frozen_convnet(), batch((2, 3, 9, 9))
        table = select_decomp_table()
        backend = aot_autograd(
            fw_compiler=nop, partition_fn=watched, decompositions=table
        )
        self.check(module, compiled(module, backend), inputs, module=module)
        (targets,) = forwards
        steps = (aten.convolution.default, aten.relu.default, aten.le.Scalar)
        found = [target for target in targets if target in steps]
        # Else every activation would be alive until the masks are made at the end.
        self.assertEqual(found, [steps[0], *3 * steps])

    def test_layers_in_regions(self):
        """Checkpointed, or compiled once as a graph within the graph."""
        module, inputs = frozen_convnet(), batch((2, 3, 9, 9))
        for function in (
            lambda x: checkpoint(module, x, use_reentrant=False),
            torch.compiler.nested_compile_region(module),
        ):
            with poisoned() as made:
                self.check(function, compiled(function), inputs, module=module)
            self.assertTrue(made)

    def traced(self, function, *inputs, dynamic=False):
        """The joint graph of ``function`` before the pass."""
        found = []

        def keep(module, joint_inputs, **options):
            found.append(copy.deepcopy(module))
            return default_partition(module, joint_inputs, **options)

        with config.patch(drop_unread_arguments=False):
            aot_function(
                function,
                fw_compiler=nop,
                partition_fn=keep,
                dynamic=dynamic,
            )(*inputs)
        return found[0]

    def convolutions(self, module):
        target = aten.convolution_backward.default
        return module.graph.find_nodes(op="call_function", target=target)

    def test_parameters_stay(self):
        """They are alive in any case, and the partitioner is told which they are."""
        prompt, weight = batch((2, 3, 4, 4)).requires_grad_(), batch((3, 3, 1, 1))
        module = self.traced(lambda x, weight: F.conv2d(x, weight), prompt, weight)
        before = str(module.graph)
        drop_unread_arguments(module, [0])
        self.assertEqual(str(module.graph), before)
        drop_unread_arguments(module)
        self.assertNotEqual(str(module.graph), before)

    def test_failure_leaves_the_graph_as_it_was(self):
        function, *inputs = frozen_pair()
        module = self.traced(function, *inputs)
        before = str(module.graph)
        # The last that the search does for its second find.
        alike = mock.Mock(side_effect=(False, RuntimeError("no second stand-in")))
        with (
            mock.patch.object(frozen_layers, "look_alike", alike),
            self.assertLogs(frozen_layers.log, "WARNING") as logs,
        ):
            drop_unread_arguments(module)
        self.assertEqual(before, str(module.graph))
        self.assertIn("no second stand-in", logs.output[0])

    def test_when_in_doubt_the_argument_stays(self):
        function, *inputs = frozen_pair(1)
        (dynamic,) = self.convolutions(self.traced(function, *inputs, dynamic=True))
        symbolic = dynamic.args[1].meta["val"]
        doubts = {
            **DOUBTS,
            "symbolic sizes": lambda n, g, x: become(x, lambda v: symbolic),
        }
        traced = self.traced(function, *inputs)
        for name, change in doubts.items():
            with self.subTest(name):
                module = copy.deepcopy(traced)
                (node,) = self.convolutions(module)
                change(node, *node.args[:2])
                before = str(module.graph)
                # What it cannot be sure of is no failure.
                with self.assertNoLogs(frozen_layers.log, "WARNING"):
                    drop_unread_arguments(module)
                self.assertEqual(before, str(module.graph))


instantiate_parametrized_tests(TestUnreadArguments)
instantiate_parametrized_tests(TestDropUnreadArguments)


if __name__ == "__main__":
    run_tests()
