# Owner(s): ["module: functorch"]
"""Unread arguments of backward operators: the table, the pass, what is saved.

That an argument is unread is never taken from the table: its values are replaced by
NaN, and the results have to stay the same, bit for bit.
"""

import copy
import functools
import itertools
import operator
import unittest
from contextlib import contextmanager
from unittest import mock

import torch
import torch._functorch.config as config
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends import debugging
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._activation_checkpointing import unread_arguments
from torch._functorch._activation_checkpointing.unread_arguments import (
    drop_unread_arguments,
    Rule,
    UNREAD_ARGUMENTS,
)
from torch._functorch.aot_autograd import aot_function
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


aten = torch.ops.aten
NAN = float("nan")
# With it, grid_sampler says that moving the grid changes nothing.
NEAREST = 1
DEVICES = ("cpu", "cuda")
DECOMPOSED = "aot_eager_decomp_partition"

# Backward operators with an output mask that are not in the table, and why.
LEFT_ALONE = {
    "aten::native_layer_norm_backward": "its input's gradient needs the input",
    "aten::native_group_norm_backward": "its input's gradient needs the input",
    "aten::batch_norm_backward": "cudnn's kernel reads the input in any case",
    "aten::_scaled_dot_product_efficient_attention_backward": "one fused kernel",
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": "other devices",
    "aten::_fused_rms_norm_backward": "both gradients read the input",
    "aten::_sparse_mm_reduce_impl_backward": "sparse",
    "aten::convolution_backward_overrideable": "other devices",
    "aten::linear_backward": "nested tensors and other devices",
    "aten::matmul_backward": "nested tensors",
    "aten::miopen_rnn_backward": "not traced by dynamo",
    "aten::_cudnn_rnn_backward": "not traced by dynamo",
    "aten::mkldnn_linear_backward": "mkldnn tensors",
    "aten::mps_convolution_backward": "other devices",
    "aten::mps_convolution_transpose_backward": "other devices",
    "aten::_batch_norm_impl_index_backward": "composite: decomposed while tracing",
    "aten::_convolution_double_backward": "composite: decomposed while tracing",
    "aten::_slow_conv2d_backward": "reached by calling _slow_conv2d_forward only",
    "aten::thnn_conv2d_backward": "its old name",
}


def convolution(function, **options):
    return functools.partial(function, **options)


def batch_norm(x, weight, bias):
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    return F.batch_norm(x, mean.detach(), variance.detach(), weight, bias)


def nll(x):
    target = torch.arange(x.numel() // x.shape[1], device=x.device) % x.shape[1]
    return F.nll_loss(x, target.view(x.shape[0], *x.shape[2:]), reduction="sum")


def at_half(pool, size, output):
    """Fractional pooling without its random samples."""

    def call(x):
        samples = torch.full((*x.shape[:2], len(output)), 0.5, dtype=x.dtype)
        return pool(x, size, output, _random_samples=samples.to(x.device))

    return call


# name -> (function, shapes of its inputs, all of which get a gradient)
CALLS = {
    "conv1d": (F.conv1d, (2, 4, 9), (6, 4, 3), (6,)),
    "conv2d": (F.conv2d, (2, 4, 9, 9), (6, 4, 3, 3), (6,)),
    "conv2d large": (convolution(F.conv2d, padding=1), (17, 16, 5, 5), (16, 16, 3, 3)),
    "conv2d 1x1": (F.conv2d, (2, 4, 5, 5), (6, 4, 1, 1)),
    "conv2d one channel": (F.conv2d, (2, 1, 5, 5), (1, 1, 3, 3)),
    "conv2d strided": (convolution(F.conv2d, stride=2), (2, 4, 9, 9), (6, 4, 3, 3)),
    "conv2d dilated": (convolution(F.conv2d, dilation=2), (2, 4, 9, 9), (6, 4, 3, 3)),
    "conv2d grouped": (convolution(F.conv2d, groups=2), (2, 4, 9, 9), (6, 2, 3, 3)),
    "conv2d depthwise": (convolution(F.conv2d, groups=4), (2, 4, 9, 9), (4, 1, 3, 3)),
    "conv3d": (F.conv3d, (2, 4, 5, 5, 5), (6, 4, 3, 3, 3), (6,)),
    "conv3d dilated": (
        convolution(F.conv3d, dilation=2),
        (2, 4, 6, 6, 6),
        (6, 4, 2, 2, 2),
    ),
    "transposed 1d": (F.conv_transpose1d, (2, 4, 9), (4, 6, 3), (6,)),
    "transposed 2d": (F.conv_transpose2d, (2, 4, 5, 5), (4, 6, 3, 3), (6,)),
    "transposed 2d grouped": (
        convolution(F.conv_transpose2d, groups=2, stride=2, output_padding=1),
        (2, 4, 5, 5),
        (4, 3, 3, 3),
    ),
    "transposed 3d": (F.conv_transpose3d, (2, 4, 3, 3, 3), (4, 6, 3, 3, 3)),
    "batch norm": (batch_norm, (3, 4, 5, 5), (4,), (4,)),
    "grid sample 2d": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        (2, 3, 5, 5),
        (2, 4, 4, 2),
    ),
    "grid sample 2d nearest": (
        lambda x, grid: F.grid_sample(x, grid, "nearest", "border", True),
        (2, 3, 5, 5),
        (2, 4, 4, 2),
    ),
    "grid sample 2d bicubic": (
        lambda x, grid: F.grid_sample(x, grid, "bicubic", "reflection", True),
        (2, 3, 5, 5),
        (2, 4, 4, 2),
    ),
    "grid sample 3d": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        (2, 3, 4, 4, 4),
        (2, 3, 3, 3, 3),
    ),
    "max pool 2d": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 4, 9, 9)),
    "max pool 2d dilated": (lambda x: F.max_pool2d(x, 2, 1, 0, 2), (2, 4, 9, 9)),
    "max pool 3d": (lambda x: F.max_pool3d(x, 2), (2, 4, 6, 6, 6)),
    "adaptive max pool 2d": (lambda x: F.adaptive_max_pool2d(x, 3), (2, 4, 7, 7)),
    "adaptive max pool 3d": (lambda x: F.adaptive_max_pool3d(x, 3), (2, 4, 7, 7, 7)),
    "fractional max pool 2d": (
        at_half(F.fractional_max_pool2d, 2, (3, 3)),
        (2, 4, 7, 7),
    ),
    "fractional max pool 3d": (
        at_half(F.fractional_max_pool3d, 2, (3, 3, 3)),
        (2, 4, 7, 7, 7),
    ),
    "average pool 2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), (2, 4, 9, 9)),
    "average pool 3d": (lambda x: F.avg_pool3d(x, 2), (2, 4, 6, 6, 6)),
    "adaptive average pool 2d": (
        lambda x: F.adaptive_avg_pool2d(x, 3),
        (2, 4, 7, 7),
    ),
    "adaptive average pool 3d": (
        lambda x: F.adaptive_avg_pool3d(x, 3),
        (2, 4, 7, 7, 7),
    ),
    "reflection pad 1d": (lambda x: F.pad(x, (1, 2), "reflect"), (2, 4, 7)),
    "reflection pad 2d": (lambda x: F.pad(x, (1, 2) * 2, "reflect"), (2, 4, 7, 7)),
    "reflection pad 3d": (lambda x: F.pad(x, (1, 2) * 3, "reflect"), (2, 4, 5, 5, 5)),
    "replication pad 1d": (lambda x: F.pad(x, (1, 2), "replicate"), (2, 4, 7)),
    "replication pad 2d": (lambda x: F.pad(x, (1, 2) * 2, "replicate"), (2, 4, 7, 7)),
    "replication pad 3d": (
        lambda x: F.pad(x, (1, 2) * 3, "replicate"),
        (2, 4, 5, 5, 5),
    ),
    "nll loss": (nll, (6, 5)),
    "nll loss 2d": (nll, (2, 5, 3, 3)),
}
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Recorder(TorchDispatchMode):
    """Calls of the table's operators, as autograd makes them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in UNREAD_ARGUMENTS:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def backward_calls(name, device="cpu", dtype=torch.float32, channels_last=False):
    """The calls of the table's operators in the backward of ``CALLS[name]``."""
    function, *shapes = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for shape in shapes:
        value = torch.rand(shape, generator=generator).to(device, dtype)
        if channels_last and len(shape) in LAYOUTS:
            value = value.contiguous(memory_format=LAYOUTS[len(shape)])
        inputs.append(value.requires_grad_())
    output = function(*inputs)
    with Recorder() as recorder:
        torch.autograd.grad(output.square().sum(), inputs)
    return recorder.calls


def arguments_of(func, args, kwargs):
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args)) | kwargs


def masks_of(rule, arguments):
    """Every way to want at least one output; without a mask, the only one."""
    if rule.mask is None:
        return [(True,)]
    length = len(arguments[rule.mask])
    return [m for m in itertools.product((False, True), repeat=length) if any(m)]


def outputs_for(func, arguments, rule, mask, **changed):
    """The outputs that ``mask`` asks for."""
    changed = dict(changed)
    if rule.mask is not None:
        changed[rule.mask] = list(mask)
    outputs = func(**{**arguments, **changed})
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [output for output, wanted in zip(outputs, mask) if wanted]


def same(left, right):
    """Bit for bit on the CPU; kernels of CUDA may add in another order every time."""

    def equal(a, b):
        if a.is_cuda:
            return torch.allclose(a, b, rtol=1e-2, atol=1e-2)
        return torch.equal(a, b)

    return all(equal(a, b) and a.stride() == b.stride() for a, b in zip(left, right))


def needs(device):
    if device == "cuda" and not torch.cuda.is_available():
        raise unittest.SkipTest("no GPU here")


class OneThread(TestCase):
    """More threads are slower on tensors as small as these."""

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)


class TestUnreadArguments(OneThread):
    """The table against the kernels."""

    @parametrize("name", CALLS)
    @parametrize("device", DEVICES)
    def test_unread_arguments_may_be_nan(self, name, device):
        needs(device)
        # With float64 and without mkldnn other kernels run on the CPU.
        for dtype, channels_last, mkldnn in (
            (torch.float32, False, True),
            (torch.float32, True, True),
            (torch.bfloat16, False, True),
            (torch.bfloat16, True, True),
            (torch.float64, False, True),
            (torch.float64, True, True),
            (torch.float32, False, False),
        ):
            with torch.backends.mkldnn.flags(enabled=mkldnn):
                try:
                    calls = backward_calls(name, device, dtype, channels_last)
                except (NotImplementedError, RuntimeError) as error:
                    self.assertRegex(
                        str(error), "not implemented for|must be contiguous"
                    )
                    continue
                for func, args, kwargs in calls:
                    rule = UNREAD_ARGUMENTS[func]
                    arguments = arguments_of(func, args, kwargs)
                    for only, value in rule.only_if:
                        self.assertIs(arguments[only], value)
                    for mask in masks_of(rule, arguments):
                        self.check_call(func, arguments, rule, mask)

    def check_call(self, func, arguments, rule, mask):
        wanted = {index for index, flag in enumerate(mask) if flag}
        expected = outputs_for(func, arguments, rule, mask)
        for name, readers in rule.readers.items():
            poisoned = {name: torch.full_like(arguments[name], NAN)}
            found = outputs_for(func, arguments, rule, mask, **poisoned)
            if wanted.isdisjoint(readers):
                self.assertTrue(same(expected, found), (func, name, mask))
            elif arguments.get("interpolation_mode") != NEAREST:
                # A rule that spares less than it could would not be seen otherwise.
                self.assertFalse(same(expected, found), (func, name, mask))

    def test_every_entry_is_called(self):
        called = {name: {func for func, _, _ in backward_calls(name)} for name in CALLS}
        self.assertEqual([name for name, funcs in called.items() if not funcs], [])
        self.assertEqual(set().union(*called.values()), set(UNREAD_ARGUMENTS))

    def test_rules_name_real_arguments(self):
        for target, rule in UNREAD_ARGUMENTS.items():
            names = {argument.name for argument in target._schema.arguments}
            known = {*rule.readers, *dict(rule.only_if), *filter(None, [rule.mask])}
            self.assertLessEqual(known, names, target)

    def test_every_output_mask_was_looked_at(self):
        masked = {
            schema.name
            for schema in torch._C._jit_get_all_schemas()
            if schema.name.startswith("aten::") and "backward" in schema.name
            for argument in schema.arguments
            if "mask" in argument.name and str(argument.type) == "List[bool]"
        }
        table = {t._schema.name for t, rule in UNREAD_ARGUMENTS.items() if rule.mask}
        self.assertLessEqual(table, masked)
        self.assertEqual(masked - table - set(LEFT_ALONE), set())


class Net(nn.Sequential):
    """Layers with eval-mode norms; ``trainable`` tells which get gradients."""

    def __init__(self, *layers, trainable=()):
        super().__init__(*layers)
        self.train()
        for index, layer in enumerate(layers):
            layer.requires_grad_(index in trainable)
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()


def frozen_convnet(channels=8):
    """A trainable stem before frozen 3x3, 1x1 and strided convolutions."""

    def block(*convolution, **options):
        frozen = nn.Conv2d(*convolution, bias=False, **options)
        return frozen, nn.BatchNorm2d(convolution[1]), nn.ReLU()

    return Net(
        nn.Conv2d(3, channels, 3, padding=1),
        *block(channels, channels, 3, padding=1),
        *block(channels, 2 * channels, 1),
        *block(2 * channels, channels, 3, stride=2),
        trainable=(0,),
    )


def nets():
    """Name, net, input shape; the operators with stand-ins, without and with
    decompositions."""
    convolution, norm = {"convolution_backward"}, {"native_batch_norm_backward"}
    yield (
        "convolutions",
        frozen_convnet(),
        (2, 3, 9, 9),
        convolution | norm,
        convolution,
    )
    yield (
        "convolutions of other dimensions",
        Net(
            nn.Conv1d(3, 8, 3),
            nn.Conv1d(8, 8, 3, groups=8),
            nn.Unflatten(1, (4, 2)),
            nn.ConvTranspose2d(4, 4, 3, stride=2, groups=2),
            nn.Unflatten(1, (2, 2)),
            nn.Conv3d(2, 4, 2, dilation=2, padding=1),
            trainable=(0,),
        ),
        (2, 3, 9),
        convolution,
        convolution,
    )
    pools = {
        "avg_pool2d_backward",
        "_adaptive_avg_pool2d_backward",
        "adaptive_max_pool2d_backward",
    }
    yield (
        "pooling and padding",
        Net(
            nn.Conv2d(3, 8, 3),
            nn.ReflectionPad2d(1),
            nn.MaxPool2d(2, 1, dilation=2),
            nn.ReplicationPad2d(2),
            nn.AvgPool2d(6, 1),
            nn.AdaptiveAvgPool2d(4),
            nn.AdaptiveMaxPool2d(3),
            trainable=(0,),
        ),
        (2, 3, 9, 9),
        pools
        | {
            "reflection_pad2d_backward",
            "max_pool2d_with_indices_backward",
            "replication_pad2d_backward",
        },
        pools | {"replication_pad2d_backward"},
    )
    yield (
        "norms",
        Net(
            nn.Conv2d(3, 8, 3),
            nn.GroupNorm(2, 8),
            nn.BatchNorm2d(8),
            nn.LayerNorm(7),
            nn.Linear(7, 5),
            trainable=(0,),
        ),
        (2, 3, 9, 9),
        norm,
        set(),
    )
    in_training = Net(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), trainable=(0,))
    in_training[1].train()
    yield "norm in training", in_training, (2, 3, 9, 9), set(), set()
    everything = Net(*frozen_convnet(), trainable=range(10))
    yield "trainable", everything, (2, 3, 9, 9), set(), set()


NETS = {name: rest for name, *rest in nets()}


def batch(shape, device="cpu", channels_last=False):
    value = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)
    if channels_last and len(shape) in LAYOUTS:
        value = value.contiguous(memory_format=LAYOUTS[len(shape)])
    return value


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


def compiled(function, backend=DECOMPOSED, dynamic=False, **options):
    torch._dynamo.reset()
    call = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)

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


class StandIns:
    """Counts the stand-ins that are made, and may fill them with NaN."""

    def __init__(self, poisoned=False):
        self.poisoned, self.made = poisoned, []
        self.make = unread_arguments._make_stand_in

    def __call__(self, argument, base, user, channels_last):
        node = self.make(argument, base, user, channels_last)
        self.made.append((user.target, node.meta["val"]))
        if self.poisoned:
            with user.graph.inserting_before(user):
                filled = user.graph.call_function(aten.add.Tensor, (node, NAN))
            filled.meta = dict(node.meta)
            return filled
        return node


@contextmanager
def stand_ins(poisoned=False):
    spy = StandIns(poisoned)
    with mock.patch.object(unread_arguments, "_make_stand_in", spy):
        yield spy


class TestDropUnreadArguments(OneThread):
    """The pass: what it changes, and above all what it does not."""

    def check_against_eager(self, module, *inputs, function=None, **options):
        """Compares a compiled step with eager's; returns their saved bytes."""
        function = function or module
        return self.check(
            function, compiled(function, **options), *inputs, module=module
        )

    def check(self, function, call, *inputs, module=None):
        """Compares two ways to compute a step; returns their saved bytes."""
        module = module or nn.Identity()
        output, gradients, eager_bytes = step(function, module, *inputs)
        found, found_gradients, saved = step(call, module, *inputs)
        self.assertEqual(found, output)
        self.assertEqual(found_gradients, gradients)
        return eager_bytes, saved

    @parametrize("net", NETS)
    @parametrize("backend", ("aot_eager", DECOMPOSED))
    @parametrize("device", DEVICES)
    def test_poison_reaches_no_gradient(self, net, backend, device):
        needs(device)
        module, shape, eager, decomposed = NETS[net]
        module, inputs = copy.deepcopy(module).to(device), batch(shape, device)
        call = compiled(module, backend, drop_unread_arguments=False)
        expected, gradients, _ = step(call, module, inputs)
        with stand_ins(poisoned=True) as spy:
            found, found_gradients, _ = step(compiled(module, backend), module, inputs)
        names = {str(target).split(".")[1] for target, _ in spy.made}
        self.assertEqual(names, decomposed if backend == DECOMPOSED else eager)
        tolerance = {"rtol": 0, "atol": 0} if device == "cpu" else {}
        self.assertEqual(found, expected, **tolerance)
        self.assertEqual(found_gradients, gradients, **tolerance)

    def test_poison_reaches_no_gradient_in_channels_last(self):
        module = frozen_convnet()
        with stand_ins(poisoned=True) as spy:
            self.check_against_eager(module, batch((2, 3, 9, 9), channels_last=True))
        self.assertEqual(len(spy.made), 3)

    def test_a_gradient_that_looks_the_same_stands_in(self):
        def function(x, weight):
            return F.conv2d(x.sin(), weight)

        _, *inputs = frozen_pair()
        before, after = self.joint(function, *inputs)
        self.assertNotEqual(before, after)
        self.assertNotIn("new_empty_strided", after)
        self.assertIn(
            "convolution_backward.default](args = (%tangents_1, %tangents_1", after
        )
        with stand_ins(poisoned=True):
            self.check_against_eager(
                nn.Conv2d(3, 3, 1).requires_grad_(False), inputs[0]
            )

    @parametrize("dynamic", (False, True))
    def test_stand_ins_for_inductor_have_its_layout(self, dynamic):
        """Inductor makes convolutions channels_last, though the graph says otherwise."""
        graphs = []

        def partition(module, joint_inputs, **options):
            drop_unread_arguments(module, for_inductor=True)
            graphs.append(module.graph)
            return min_cut_rematerialization_partition(module, joint_inputs, **options)

        function, *inputs = frozen_pair()
        with stand_ins(poisoned=True) as spy:
            call = aot_function(
                function,
                fw_compiler=lambda module, _: module,
                bw_compiler=lambda module, _: module,
                partition_fn=partition,
                dynamic=dynamic,
            )
            self.check(function, call, *inputs)
        # Symbolic sizes are left alone: it cannot lay them out anew.
        self.assertEqual(len(spy.made), 0 if dynamic else 2)
        for _, value in spy.made:
            self.assertTrue(value.is_contiguous(memory_format=torch.channels_last))

    def test_poison_would_be_seen(self):
        wrong = {aten.convolution_backward.default: Rule({"input": ()}, "output_mask")}
        module = Net(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), trainable=(0, 1))
        with mock.patch.dict(UNREAD_ARGUMENTS, wrong), stand_ins(poisoned=True):
            _, found, _ = step(compiled(module), module, batch((2, 3, 9, 9)))
        self.assertTrue(found[2].isnan().all())

    @parametrize("budget", (0.0, 0.5))
    def test_every_budget(self, budget):
        module, inputs = frozen_convnet(), batch((2, 3, 16, 16))
        without, saved = (
            self.check_against_eager(
                module,
                inputs,
                drop_unread_arguments=on,
                activation_memory_budget=budget,
            )[1]
            for on in (False, True)
        )
        # At budget 0 only inputs are saved, with and without the pass.
        (self.assertLess if budget else self.assertEqual)(saved, without)

    def test_default_partitioner(self):
        function, *inputs = frozen_pair()

        def saved(on):
            with config.patch(drop_unread_arguments=on):
                call = aot_function(
                    function,
                    fw_compiler=lambda module, _: module,
                    bw_compiler=lambda module, _: module,
                    partition_fn=default_partition,
                )
                return step(call, nn.Identity(), *inputs)

        _, gradients, without = saved(False)
        with stand_ins(poisoned=True):
            _, found, with_pass = saved(True)
        self.assertEqual(found, gradients)
        # Both sines, of which only the shape is used; what the cosines need stays.
        self.assertEqual(without - with_pass, 4 * 2 * 3 * (4 * 4 + 6 * 6))

    def test_saved_bytes_are_those_that_are_needed(self):
        module, inputs = frozen_convnet(), batch((2, 3, 16, 16))
        eager, saved = self.check_against_eager(module, inputs)
        # The stem needs its input.  Three ReLUs need to know where they were positive.
        pixels = 2 * 16 * 16
        self.assertEqual(saved, 4 * 3 * pixels + (8 + 16) * pixels + 2 * 8 * 7 * 7)
        self.assertGreater(eager, 5 * saved)

    def test_masks_are_made_beside_what_they_are_made_of(self):
        forwards = []
        split = debugging.min_cut_rematerialization_partition

        def watched(*args, **kwargs):
            pair = split(*args, **kwargs)
            forwards.append([node.target for node in pair[0].graph.nodes])
            return pair

        module, inputs = frozen_convnet(), batch((2, 3, 9, 9))
        with mock.patch.object(debugging, split.__name__, watched):
            self.check_against_eager(module, inputs)
        (targets,) = forwards
        steps = (aten.relu.default, aten.le.Scalar, aten.convolution.default)
        relu, mask, convolution = steps
        found = [target for target in targets if target in steps]
        # Else every activation would be alive until the masks are made at the end.
        self.assertEqual(found, [convolution, *3 * [convolution, relu, mask]])

    @parametrize("train_linears", (False, True))
    def test_adapters_of_frozen_linears_gain_nothing(self, train_linears):
        class Adapted(nn.Module):
            def __init__(self):
                super().__init__()
                self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(
                    train_linears
                )
                self.down = nn.Linear(16, 2, bias=False)
                self.up = nn.Linear(2, 16, bias=False)

            def forward(self, x):
                return self.frozen(x) + self.up(self.down(x))

        module, inputs = nn.Sequential(*(Adapted() for _ in range(3))), batch((32, 16))
        with stand_ins() as spy:
            _, saved = self.check_against_eager(module, inputs)
        self.assertEqual(spy.made, [])
        # Each layer's input and its narrow projection, for the adapters' gradients.
        self.assertEqual(saved, 3 * 4 * 32 * (16 + 2))

    @parametrize("kind", ("batch norm", "layer norm", "group norm", "dropout", "relu"))
    def test_decomposed_layers_are_left_alone(self, kind):
        layers = {
            "batch norm": lambda: nn.BatchNorm2d(4),
            "layer norm": lambda: nn.LayerNorm(5),
            "group norm": lambda: nn.GroupNorm(2, 4),
            "dropout": nn.Dropout,
            "relu": nn.ReLU,
        }
        module = Net(*(layers[kind]() for _ in range(3)))
        if kind != "dropout" and kind != "relu":
            list(module.parameters())[-1].requires_grad_()  # The last bias.
        inputs = batch((2, 4, 5, 5)).requires_grad_()
        saved = []
        for on in (False, True):
            with stand_ins() as spy:
                torch.manual_seed(0)
                call = compiled(module, drop_unread_arguments=on)
                saved.append(step(call, module, inputs)[2])
            self.assertEqual(spy.made, [])
        self.assertEqual(saved[0], saved[1])
        if kind == "batch norm":
            self.assertEqual(saved[1], 0)

    @parametrize("layout", ("contiguous", "channels_last", "strided"))
    def test_stand_ins_have_the_arguments_layout(self, layout):
        def function(x):
            x = x.sin()
            if layout == "channels_last":
                x = x.contiguous(memory_format=torch.channels_last)
            if layout == "strided":
                x = x.repeat(1, 1, 1, 2)[..., ::2]
            seen.append((x.shape, x.stride(), x.dtype))
            return frozen(x)

        frozen, seen = nn.Conv2d(3, 4, 1).requires_grad_(False), []
        inputs = batch((2, 3, 5, 5)).requires_grad_()
        function(inputs)
        with stand_ins() as spy:
            self.check_against_eager(frozen, inputs, function=function)
        ((_, value),) = spy.made
        self.assertEqual((value.shape, value.stride(), value.dtype), seen[0])

    def test_dynamic_shapes(self):
        module = frozen_convnet()
        call = compiled(module, dynamic=True)
        with stand_ins(poisoned=True) as spy:
            for size in (9, 12):
                inputs = batch((2, 3, size, size), channels_last=True)
                eager, saved = self.check(module, call, inputs, module=module)
                self.assertGreater(eager, 5 * saved)
        self.assertEqual(len(spy.made), 3)

    def test_mixed_precision(self):
        def function(x):
            with torch.autocast("cpu", torch.bfloat16):
                return module(x)

        module = frozen_convnet()
        with stand_ins(poisoned=True) as spy:
            self.check_against_eager(module, batch((2, 3, 9, 9)), function=function)
        self.assertEqual({value.dtype for _, value in spy.made}, {torch.bfloat16})

    def test_deterministic_algorithms(self):
        # Uninitialized memory is filled with NaN then, by torch itself.
        module = frozen_convnet()
        with torch.testing._internal.common_utils.DeterministicGuard(True):
            self.check_against_eager(module, batch((2, 3, 9, 9)))

    def test_checkpointed_layers(self):
        module = frozen_convnet()

        def function(x):
            return checkpoint(module, x, use_reentrant=False)

        with stand_ins(poisoned=True) as spy:
            self.check_against_eager(module, batch((2, 3, 9, 9)), function=function)
        self.assertTrue(spy.made)

    def test_regions_compiled_once(self):
        module = frozen_convnet()
        region = torch.compiler.nested_compile_region(module)
        with stand_ins(poisoned=True):
            self.check_against_eager(module, batch((2, 3, 9, 9)), function=region)

    def test_backward_of_a_backward(self):
        def penalty(x, weight):
            loss = F.conv2d(x.sin(), weight).square().sum()
            (inner,) = torch.autograd.grad(loss, x, create_graph=True)
            return inner.square()

        _, *inputs = frozen_pair()
        call = aot_function(penalty, fw_compiler=lambda module, _: module)
        with stand_ins(poisoned=True):
            self.check(penalty, call, *inputs)

    def test_other_readers_keep_the_argument(self):
        frozen = nn.Conv2d(3, 3, 1).requires_grad_(False)

        def function(x):
            x = x.sin()
            return frozen(x) * x

        with stand_ins() as spy:
            self.check_against_eager(
                frozen, batch((2, 3, 5, 5)).requires_grad_(), function=function
            )
        self.assertEqual(spy.made, [])

    def test_the_same_argument_twice(self):
        def function(x):
            x = x.sin()
            return F.conv2d(x, x)

        with stand_ins() as spy:
            self.check_against_eager(
                nn.Identity(), batch((3, 3, 3, 3)).requires_grad_(), function=function
            )
        self.assertEqual(spy.made, [])

    def test_custom_operators_keep_their_arguments(self):
        with torch.library._scoped_library("test_frozen", "DEF") as library:
            library.define("scale(Tensor x) -> Tensor")
            library.define("scale_backward(Tensor g, Tensor self) -> Tensor")
            library.impl("scale", lambda x: 2 * x, "CompositeExplicitAutograd")
            library.impl(
                "scale_backward",
                lambda g, x: 2 * g + 0 * x,
                "CompositeExplicitAutograd",
            )
            ops = torch.ops.test_frozen
            torch.library.register_autograd(
                "test_frozen::scale",
                lambda ctx, g: ops.scale_backward(g, ctx.saved_tensors[0]),
                setup_context=lambda ctx, inputs, output: ctx.save_for_backward(
                    *inputs
                ),
            )
            with stand_ins() as spy:
                self.check_against_eager(
                    nn.Identity(),
                    batch((2, 3)).requires_grad_(),
                    function=lambda x: ops.scale(x.sin()),
                )
        self.assertEqual(spy.made, [])

    # ------------------------------------------------- on the joint graph itself

    def joint(self, function, *inputs, change=None):
        """The joint graph after ``change`` and the pass, and as it was before it."""
        graphs = []

        def partition(module, joint_inputs, **options):
            if change is not None:
                change(module.graph)
            graphs.append(str(module.graph))
            drop_unread_arguments(module, options.get("static_lifetime_input_indices"))
            graphs.append(str(module.graph))
            return min_cut_rematerialization_partition(module, joint_inputs, **options)

        aot_function(
            function,
            fw_compiler=lambda module, _: module,
            bw_compiler=lambda module, _: module,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )(*inputs).sum().backward()
        return graphs

    def test_the_graph_is_the_same_every_time(self):
        function, *inputs = frozen_pair()
        first, second = (self.joint(function, *inputs) for _ in range(2))
        self.assertEqual(first, second)
        self.assertNotEqual(*first)
        self.assertEqual(first[1].count("new_empty_strided.default"), 2)

    def test_a_second_run_changes_nothing(self):
        function, *inputs = frozen_pair()
        before, after = self.joint(
            function,
            *inputs,
            change=lambda graph: drop_unread_arguments(graph.owning_module),
        )
        self.assertEqual(before, after)

    def test_switched_off(self):
        function, *inputs = frozen_pair()
        with config.patch(drop_unread_arguments=False):
            before, after = self.joint(function, *inputs)
        self.assertEqual(before, after)

    def test_failure_leaves_the_graph_as_it_was(self):
        function, *inputs = frozen_pair()
        make, calls = unread_arguments._make_stand_in, itertools.count()

        def fail(*args):
            if next(calls) == 1:
                raise RuntimeError("no second stand-in")
            return make(*args)

        with (
            mock.patch.object(unread_arguments, "_make_stand_in", fail),
            self.assertLogs(unread_arguments.log, "WARNING") as logs,
        ):
            before, after = self.joint(function, *inputs)
        self.assertEqual(before, after)
        self.assertIn("no second stand-in", logs.output[0])

    @parametrize(
        "value",
        (
            "unknown",
            "used",
            "used whole",
            "training",
            "read elsewhere",
            "no meta",
            "device",
            "gradient without meta",
        ),
    )
    def test_when_in_doubt_the_argument_stays(self, value):
        """What the pass cannot be sure of, put into a graph where it would act."""

        def change(graph):
            target = aten.convolution_backward.default
            for node in graph.find_nodes(op="call_function", target=target):
                source = node.args[1]
                if value == "unknown":
                    node.update_arg(10, node.args[0])
                elif value == "used":
                    with graph.inserting_after(node):
                        extra = graph.call_function(operator.getitem, (node, 1))
                    output = graph.output_node()
                    with graph.inserting_before(output):
                        graph.call_function(aten._assert_async.default, (extra,))
                elif value == "used whole":
                    with graph.inserting_before(graph.output_node()):
                        graph.call_function(len, (node,))
                elif value == "training":
                    node.update_arg(10, [True, True, False])
                elif value == "read elsewhere":
                    node.update_arg(2, source)
                elif value == "no meta":
                    del source.meta["val"]
                elif value == "gradient without meta":
                    del node.args[0].meta["val"]
                else:
                    source.meta["val"] = source.meta["val"].to("meta")

        function, *inputs = frozen_pair(1)
        module, before = self.traced(function, *inputs)
        change(module.graph)
        before = str(module.graph)
        # What it cannot be sure of is no failure.
        with self.assertNoLogs(unread_arguments.log, "WARNING"):
            drop_unread_arguments(module)
        self.assertEqual(before, str(module.graph))

    def traced(self, function, *inputs):
        found = []

        def keep(module, joint_inputs, **options):
            found.append(copy.deepcopy(module))
            return min_cut_rematerialization_partition(module, joint_inputs, **options)

        aot_function(
            function,
            fw_compiler=lambda module, _: module,
            bw_compiler=lambda module, _: module,
            partition_fn=keep,
        )(*inputs)
        return found[0], str(found[0].graph)

    def test_static_inputs_stay(self):
        _, *inputs = frozen_pair()
        module, before = self.traced(F.conv2d, *inputs)
        static = copy.deepcopy(module)
        drop_unread_arguments(static, [0])
        self.assertEqual(before, str(static.graph))
        drop_unread_arguments(module, [])
        self.assertNotEqual(before, str(module.graph))

    @parametrize("partition", (default_partition, min_cut_rematerialization_partition))
    def test_parameters_stay(self, partition):
        """They are alive in any case, and the partitioner is told which they are."""

        class Prompted(nn.Module):
            def __init__(self):
                super().__init__()
                self.prompt = nn.Parameter(batch((2, 3, 5, 5)))
                self.frozen = nn.Conv2d(3, 4, 3).requires_grad_(False)

            def forward(self, x):
                return self.frozen(self.prompt) + x

        backend = aot_autograd(fw_compiler=debugging.boxed_nop, partition_fn=partition)
        with stand_ins() as spy:
            self.check_against_eager(Prompted(), batch((1,)), backend=backend)
        self.assertEqual(spy.made, [])

    def test_the_compile_cache_knows_the_switch(self):
        keys = set()
        for on in (False, True):
            with config.patch(drop_unread_arguments=on):
                keys.add(str(config.save_config_portable()))
        self.assertEqual(len(keys), 2)


instantiate_parametrized_tests(TestUnreadArguments)
instantiate_parametrized_tests(TestDropUnreadArguments)


if __name__ == "__main__":
    run_tests()
