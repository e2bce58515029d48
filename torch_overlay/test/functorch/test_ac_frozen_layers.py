# Owner(s): ["module: functorch"]
"""Unread arguments of backward operators: the table, the pass, what is saved.

That an argument is unread is never taken from the table: its values are replaced by
NaN, and the results have to stay the same, bit for bit.
"""

import copy
import itertools
import operator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch._functorch.config as config
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends import debugging
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._activation_checkpointing import frozen_layers
from torch._functorch._activation_checkpointing.frozen_layers import (
    drop_unread_arguments,
    Rule,
    UNREAD_ARGUMENTS,
)
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)
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
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
DECOMPOSED = "aot_eager_decomp_partition"
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}

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


def batch_norm(x, weight, bias):
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    return F.batch_norm(x, mean.detach(), variance.detach(), weight, bias)


def nll(x):
    target = torch.arange(x.numel() // x.shape[1], device=x.device) % x.shape[1]
    return F.nll_loss(x, target.view(x.shape[0], *x.shape[2:]), reduction="sum")


# name -> (function, shapes of its inputs, all of which get a gradient)
CONVOLUTIONS = {
    "conv1d": (F.conv1d, (2, 4, 9), (6, 4, 3), (6,)),
    "conv2d": (F.conv2d, (2, 4, 9, 9), (6, 4, 3, 3), (6,)),
    "conv2d large": (partial(F.conv2d, padding=1), (17, 16, 5, 5), (16, 16, 3, 3)),
    "conv2d 1x1": (F.conv2d, (2, 4, 5, 5), (6, 4, 1, 1)),
    "conv2d one channel": (F.conv2d, (2, 1, 5, 5), (1, 1, 3, 3)),
    "conv2d strided": (partial(F.conv2d, stride=2), (2, 4, 9, 9), (6, 4, 3, 3)),
    "conv2d dilated": (partial(F.conv2d, dilation=2), (2, 4, 9, 9), (6, 4, 3, 3)),
    "conv2d grouped": (partial(F.conv2d, groups=2), (2, 4, 9, 9), (6, 2, 3, 3)),
    "conv2d depthwise": (partial(F.conv2d, groups=4), (2, 4, 9, 9), (4, 1, 3, 3)),
    "conv3d": (F.conv3d, (2, 4, 5, 5, 5), (6, 4, 3, 3, 3), (6,)),
    "conv3d dilated": (partial(F.conv3d, dilation=2), (2, 4, 6, 6, 6), (6, 4, 2, 2, 2)),
    "transposed 1d": (F.conv_transpose1d, (2, 4, 9), (4, 6, 3), (6,)),
    "transposed 2d": (F.conv_transpose2d, (2, 4, 5, 5), (4, 6, 3, 3), (6,)),
    "transposed 2d grouped": (
        partial(F.conv_transpose2d, groups=2, stride=2, output_padding=1),
        (2, 4, 5, 5),
        (4, 3, 3, 3),
    ),
    "transposed 3d": (F.conv_transpose3d, (2, 4, 3, 3, 3), (4, 6, 3, 3, 3)),
}
POOLS = {
    "max_pool": {"kernel_size": 3, "stride": 2, "padding": 1},
    "adaptive_max_pool": {"output_size": 3},
    "avg_pool": {"kernel_size": 3, "stride": 2, "padding": 1},
    "adaptive_avg_pool": {"output_size": 3},
}
SAMPLERS = (
    ("bilinear", "zeros", False),
    ("nearest", "border", True),
    ("bicubic", "reflection", True),
)
CALLS = {
    **CONVOLUTIONS,
    "batch norm": (batch_norm, (3, 4, 5, 5), (4,), (4,)),
    **{
        f"grid sample 2d {mode}": (
            partial(F.grid_sample, mode=mode, padding_mode=pad, align_corners=corners),
            (2, 3, 5, 5),
            (2, 4, 4, 2),
        )
        for mode, pad, corners in SAMPLERS
    },
    "grid sample 3d": (
        partial(F.grid_sample, align_corners=False),
        (2, 3, 4, 4, 4),
        (2, 3, 3, 3, 3),
    ),
    **{
        f"{name}{n}d": (partial(getattr(F, f"{name}{n}d"), **options), (2, 4, *n * [7]))
        for name, options in POOLS.items()
        for n in (2, 3)
    },
    "max_pool2d dilated": (
        partial(F.max_pool2d, kernel_size=2, dilation=2),
        (2, 4, 9, 9),
    ),
    **{
        f"{mode} 2d": (partial(F.pad, pad=(1, 2) * 2, mode=mode), (2, 4, 5, 5))
        for mode in ("reflect", "replicate")
    },
    "nll loss": (nll, (6, 5)),
    "nll loss 2d": (nll, (2, 5, 3, 3)),
}


def batch(shape, device="cpu", dtype=torch.float32, channels_last=False):
    generator = torch.Generator().manual_seed(0)
    value = torch.rand(shape, generator=generator).to(device, dtype)
    if channels_last and len(shape) in LAYOUTS:
        value = value.contiguous(memory_format=LAYOUTS[len(shape)])
    return value


class Recorder(TorchDispatchMode):
    """Calls of the table's operators, as autograd makes them: operator, arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in UNREAD_ARGUMENTS:
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append((func, {**dict(zip(names, args)), **(kwargs or {})}))
        return func(*args, **(kwargs or {}))


def backward_calls(name, **options):
    """The calls of the table's operators in the backward of ``CALLS[name]``."""
    function, *shapes = CALLS[name]
    inputs = [batch(shape, **options).requires_grad_() for shape in shapes]
    output = function(*inputs)
    with Recorder() as recorder:
        torch.autograd.grad(output.square().sum(), inputs)
    return recorder.calls


def outputs_for(func, arguments, mask):
    """The outputs that ``mask`` asks for."""
    outputs = func(**arguments)
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


class OneThread(TestCase):
    """More threads are slower on tensors as small as these."""

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)


class TestUnreadArguments(OneThread):
    """The table against the kernels."""

    @parametrize("device", DEVICES)
    def test_unread_arguments_may_be_nan(self, device):
        # Each of these takes other kernels on the CPU.
        for dtype, channels_last, mkldnn in (
            (torch.float32, False, True),
            (torch.float32, False, False),
            (torch.float32, True, True),
            (torch.bfloat16, True, True),
            (torch.float64, False, True),
        ):
            called = set()
            for name in CALLS:
                options = {"dtype": dtype, "channels_last": channels_last}
                with (
                    self.subTest(name=name, mkldnn=mkldnn, **options),
                    torch.backends.mkldnn.flags(enabled=mkldnn),
                ):
                    try:
                        calls = backward_calls(name, device=device, **options)
                    except (NotImplementedError, RuntimeError) as error:
                        reasons = "not implemented for|must be contiguous"
                        self.assertRegex(str(error), reasons)
                        continue
                    self.assertGreater(len(calls), 0)
                    for func, arguments in calls:
                        self.check_call(func, arguments)
                        called.add(func)
            if dtype is torch.float32 and not channels_last:
                self.assertEqual(called, set(UNREAD_ARGUMENTS))

    def check_call(self, func, arguments):
        """Every way to do without the reader, and all outputs; without a mask, one."""
        name, reader, off = UNREAD_ARGUMENTS[func]
        if off is not None:
            self.assertIs(arguments[off], False)
        masks = [(True,)]
        if reader is not None:
            length = len(arguments["output_mask"])
            every = itertools.product((False, True), repeat=length)
            masks = [m for m in every if all(m) or (any(m) and not m[reader])]
        for mask in masks:
            if reader is not None:
                arguments = {**arguments, "output_mask": mask}
            poisoned = {**arguments, name: torch.full_like(arguments[name], NAN)}
            expected = outputs_for(func, arguments, mask)
            found = outputs_for(func, poisoned, mask)
            if reader is None or not mask[reader]:
                self.assertTrue(same(expected, found), (func, mask))
            elif arguments.get("interpolation_mode") != NEAREST:
                # A rule that spares less than it could would not be seen otherwise.
                self.assertFalse(same(expected, found), (func, mask))

    def test_every_output_mask_was_looked_at(self):
        masked = {
            schema.name
            for schema in torch._C._jit_get_all_schemas()
            if schema.name.startswith("aten::") and "backward" in schema.name
            for argument in schema.arguments
            if "mask" in argument.name and str(argument.type) == "List[bool]"
        }
        table = {
            target._schema.name
            for target, rule in UNREAD_ARGUMENTS.items()
            if rule.reader is not None
        }
        self.assertLessEqual(table, masked)
        self.assertEqual(masked - table - set(LEFT_ALONE), set())


class Net(nn.Sequential):
    """Layers with eval-mode norms; ``trainable`` tells which get gradients."""

    def __init__(self, *layers, trainable=()):
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


def nets():
    """Name, net, input shape; the operators with stand-ins, without and with
    decompositions."""
    convolution, norm = {"convolution_backward"}, {"native_batch_norm_backward"}
    image = (2, 3, 9, 9)
    yield "convolutions", frozen_convnet(), image, convolution | norm, convolution
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
        "replication_pad2d_backward",
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
        image,
        pools | {"max_pool2d_with_indices_backward", "reflection_pad2d_backward"},
        pools,
    )
    norms = (nn.GroupNorm(2, 8), nn.BatchNorm2d(8), nn.LayerNorm(7), nn.Linear(7, 5))
    yield "norms", Net(nn.Conv2d(3, 8, 3), *norms, trainable=(0,)), image, norm, set()
    in_training = Net(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), trainable=(0,))
    in_training[1].train()
    yield "norm in training", in_training, image, set(), set()
    yield "trainable", frozen_convnet(trainable=range(10)), image, set(), set()


NETS = {name: rest for name, *rest in nets()}


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


def by_aot(function, partition_fn=min_cut_rematerialization_partition, **options):
    """``function``, traced by AOTAutograd and run operator by operator."""
    return aot_function(
        function,
        fw_compiler=lambda module, _: module,
        bw_compiler=lambda module, _: module,
        partition_fn=partition_fn,
        **options,
    )


def frozen_pair(count=2):
    """``count`` frozen convolutions, each of which changes the shape, and their
    inputs."""

    def function(x, weight):
        for _ in range(count):
            x = F.conv2d(x.sin(), weight, padding=1)
        return x

    return function, torch.rand(2, 3, 4, 4, requires_grad=True), torch.rand(3, 3, 1, 1)


@contextmanager
def stand_ins(poisoned=False):
    """Lists the stand-ins that are made, and may fill them with NaN."""
    make, made = frozen_layers._make_stand_in, []

    def spy(stand_in):
        node, user = make(stand_in), stand_in.user
        made.append((user.target, node.meta["val"]))
        if not poisoned:
            return node
        with user.graph.inserting_before(user):
            filled = user.graph.call_function(aten.add.Tensor, (node, NAN))
        filled.meta = dict(node.meta)
        return filled

    with mock.patch.object(frozen_layers, "_make_stand_in", spy):
        yield made


class TestDropUnreadArguments(OneThread):
    """The pass: what it changes, and above all what it does not."""

    def check(self, function, call, *inputs, module=None):
        """Compares two ways to compute a step; returns their saved bytes."""
        module = module or nn.Identity()
        output, gradients, before = step(function, module, *inputs)
        found, found_gradients, after = step(call, module, *inputs)
        self.assertEqual(found, output)
        self.assertEqual(found_gradients, gradients)
        return before, after

    def check_against_eager(self, module, *inputs, function=None, **options):
        function = function or module
        call = compiled(function, **options)
        return self.check(function, call, *inputs, module=module)

    @parametrize("net", NETS)
    @parametrize("backend", ("aot_eager", DECOMPOSED))
    @parametrize("device", DEVICES)
    def test_poison_reaches_no_gradient(self, net, backend, device):
        module, shape, eager, decomposed = NETS[net]
        module, inputs = copy.deepcopy(module).to(device), batch(shape, device)
        without = compiled(module, backend, drop_unread_arguments=False)
        expected = step(without, module, inputs)[:2]
        with stand_ins(poisoned=True) as made:
            found = step(compiled(module, backend), module, inputs)[:2]
        tolerance = {"rtol": 0, "atol": 0} if device == "cpu" else {}
        self.assertEqual(found, expected, **tolerance)
        names = {str(target).split(".")[1] for target, _ in made}
        self.assertEqual(names, decomposed if backend == DECOMPOSED else eager)

    def test_poison_would_be_seen(self):
        wrong = {aten.convolution_backward.default: Rule("input")}
        module = Net(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), trainable=(0, 1))
        with mock.patch.dict(UNREAD_ARGUMENTS, wrong), stand_ins(poisoned=True):
            _, found, _ = step(compiled(module), module, batch((2, 3, 9, 9)))
        self.assertTrue(found[2].isnan().all())

    def test_a_gradient_that_looks_the_same_stands_in(self):
        def function(x, weight):
            return F.conv2d(x.sin(), weight)

        _, *inputs = frozen_pair()
        module = self.traced(function, *inputs)
        drop_unread_arguments(module)
        (node,) = self.convolutions(module)
        self.assertIs(node.args[0], node.args[1])
        self.assertEqual(node.args[0].op, "placeholder")
        with stand_ins(poisoned=True):
            self.check(function, by_aot(function), *inputs)
        # An operator may take a gradient of another dtype, and another size then.
        module = self.traced(function, *inputs)
        (node,) = self.convolutions(module)
        gradient = node.args[0]
        gradient.meta["val"] = gradient.meta["val"].bfloat16()
        drop_unread_arguments(module)
        self.assertIs(node.args[0], gradient)
        self.assertEqual(node.args[1].target, aten.new_empty_strided.default)
        self.assertEqual(node.args[1].kwargs["dtype"], torch.float32)

    def test_a_gradient_without_dimensions_does_not(self):
        def function(x, target):
            return F.nll_loss(x.sin(), target, reduction="sum")

        inputs = batch((6, 5)).requires_grad_(), torch.arange(6) % 5
        with stand_ins(poisoned=True) as made:
            self.check(function, by_aot(function), *inputs)
        self.assertEqual([value.shape for _, value in made], [(6, 5)])

    @parametrize("layout", ("contiguous", "channels_last", "strided", "bfloat16"))
    def test_stand_ins_have_the_arguments_look(self, layout):
        def function(x, weight):
            x = x.sin()
            if layout == "channels_last":
                x = x.contiguous(memory_format=torch.channels_last)
            if layout == "strided":
                x = x.repeat(1, 1, 1, 2)[..., ::2]
            if layout == "bfloat16":
                x = x.bfloat16()
            seen.append((x.shape, x.stride(), x.dtype))
            return F.conv2d(x, weight.to(x.dtype))

        seen, inputs = [], batch((2, 3, 5, 5)).requires_grad_()
        with stand_ins(poisoned=True) as made:
            self.check(function, by_aot(function), inputs, batch((4, 3, 1, 1)))
        ((_, value),) = made
        self.assertEqual((value.shape, value.stride(), value.dtype), seen[0])

    def test_stand_ins_for_inductor_have_its_layout(self):
        """Inductor makes convolutions channels_last, though the graph says otherwise."""
        function, *inputs = frozen_pair()
        module = self.traced(function, *inputs)
        with stand_ins() as made:
            drop_unread_arguments(module, for_inductor=True)
        self.assertEqual(len(made), 2)
        for _, value in made:
            self.assertTrue(value.is_contiguous(memory_format=torch.channels_last))
            self.assertFalse(value.is_contiguous())

    def test_inductor_lays_out_nothing_else(self):
        def function(x, weight):
            x = F.conv2d(x.sin(), weight, padding=1)
            x = F.avg_pool2d(x.sin(), 2)
            return F.conv1d(x.flatten(2).sin(), weight[..., 0], padding=1)

        _, *inputs = frozen_pair()
        module = self.traced(function, *inputs)
        with stand_ins() as made:
            drop_unread_arguments(module, for_inductor=True)
        self.assertEqual([v.is_contiguous() for _, v in made], [True, True, False])

    def test_saved_bytes_are_those_that_are_needed(self):
        module, inputs = frozen_convnet(), batch((2, 3, 16, 16))
        eager, saved = self.check_against_eager(module, inputs)
        # The stem needs its input.  Three ReLUs need to know where they were positive.
        pixels = 2 * 16 * 16
        self.assertEqual(saved, 4 * 3 * pixels + (8 + 16) * pixels + 2 * 8 * 7 * 7)
        self.assertGreater(eager, 5 * saved)

    def test_every_budget(self):
        module, inputs = frozen_convnet(), batch((2, 3, 16, 16))
        # At budget 0 only inputs are saved, with and without the pass.
        for budget, compare in ((0.0, self.assertEqual), (0.5, self.assertLess)):
            options = {"activation_memory_budget": budget}
            without, saved = (
                self.check_against_eager(
                    module, inputs, drop_unread_arguments=on, **options
                )[1]
                for on in (False, True)
            )
            compare(saved, without)

    def test_masks_are_made_beside_what_they_are_made_of(self):
        forwards = []

        def watched(*args, **kwargs):
            pair = min_cut_rematerialization_partition(*args, **kwargs)
            forwards.append([node.target for node in pair[0].graph.nodes])
            return pair

        module, inputs = frozen_convnet(), batch((2, 3, 9, 9))
        name = min_cut_rematerialization_partition.__name__
        with mock.patch.object(debugging, name, watched):
            self.check_against_eager(module, inputs)
        (targets,) = forwards
        steps = (aten.relu.default, aten.le.Scalar, aten.convolution.default)
        relu, mask, convolution = steps
        found = [target for target in targets if target in steps]
        # Else every activation would be alive until the masks are made at the end.
        self.assertEqual(found, [convolution, *3 * [convolution, relu, mask]])

    def test_layers_in_regions(self):
        """Checkpointed, or compiled once as a graph within the graph."""
        module = frozen_convnet()
        for function in (
            lambda x: checkpoint(module, x, use_reentrant=False),
            torch.compiler.nested_compile_region(module),
        ):
            with stand_ins(poisoned=True) as made:
                inputs = batch((2, 3, 9, 9))
                self.check_against_eager(module, inputs, function=function)
            self.assertTrue(made)

    def test_backward_of_a_backward(self):
        def penalty(x, weight):
            loss = F.conv2d(x.sin(), weight).square().sum()
            (inner,) = torch.autograd.grad(loss, x, create_graph=True)
            return inner.square()

        _, *inputs = frozen_pair()
        with stand_ins(poisoned=True):
            self.check(penalty, by_aot(penalty, default_partition), *inputs)

    def test_the_same_argument_twice(self):
        def function(x):
            x = x.sin()
            return F.conv2d(x, x)

        with stand_ins() as made:
            inputs = batch((3, 3, 3, 3)).requires_grad_()
            self.check(function, by_aot(function), inputs)
        self.assertEqual(made, [])

    # ---------------------------------------------------------- the partitioners

    def test_any_partitioner(self):
        function, *inputs = frozen_pair()

        def own(module, joint_inputs, **options):
            return default_partition(module, joint_inputs, **options)

        for partition in (default_partition, own):
            without = by_aot(function, partition)
            with config.patch(drop_unread_arguments=False):
                _, gradients, before = step(without, nn.Identity(), *inputs)
            with stand_ins(poisoned=True):
                call = by_aot(function, partition)
                _, found, after = step(call, nn.Identity(), *inputs)
            self.assertEqual(found, gradients)
            # Both sines, of which only the shape is used; what the cosines need stays.
            self.assertEqual(before - after, 4 * 2 * 3 * (4 * 4 + 6 * 6))

    def test_parameters_stay(self):
        """They are alive in any case, and the partitioner is told which they are."""

        class Prompted(nn.Module):
            def __init__(self):
                super().__init__()
                self.prompt = nn.Parameter(batch((2, 3, 5, 5)))
                self.frozen = nn.Conv2d(3, 4, 3).requires_grad_(False)

            def forward(self, x):
                return self.frozen(self.prompt) + x

        for partition in (default_partition, min_cut_rematerialization_partition):
            backend = aot_autograd(
                fw_compiler=debugging.boxed_nop, partition_fn=partition
            )
            with stand_ins() as made:
                self.check_against_eager(Prompted(), batch((1,)), backend=backend)
            self.assertEqual(made, [])

    # ------------------------------------------------- on the joint graph itself

    def traced(self, function, *inputs, dynamic=False):
        """The joint graph of ``function`` before the pass."""
        found = []

        def keep(module, joint_inputs, **options):
            found.append(copy.deepcopy(module))
            return default_partition(module, joint_inputs, **options)

        with config.patch(drop_unread_arguments=False):
            by_aot(function, keep, dynamic=dynamic)(*inputs)
        return found[0]

    def convolutions(self, module):
        target = aten.convolution_backward.default
        return module.graph.find_nodes(op="call_function", target=target)

    def test_the_graph_is_the_same_every_time(self):
        function, *inputs = frozen_pair()
        modules = [self.traced(function, *inputs) for _ in range(2)]
        before = str(modules[0].graph)
        for module in modules:
            drop_unread_arguments(module)
        first, second = (str(module.graph) for module in modules)
        self.assertEqual(first, second)
        self.assertEqual(first.count("new_empty_strided.default"), 2)
        self.assertNotIn("new_empty_strided.default", before)
        drop_unread_arguments(modules[0])
        self.assertEqual(str(modules[0].graph), first)

    def test_switched_off(self):
        function, *inputs = frozen_pair()
        module = self.traced(function, *inputs)
        before = str(module.graph)
        keys = [str(config.save_config_portable())]
        with config.patch(drop_unread_arguments=False):
            drop_unread_arguments(module)
            keys.append(str(config.save_config_portable()))
        self.assertEqual(before, str(module.graph))
        # The compile cache tells both apart.
        self.assertNotEqual(*keys)

    def test_failure_leaves_the_graph_as_it_was(self):
        function, *inputs = frozen_pair()
        module = self.traced(function, *inputs)
        before = str(module.graph)
        # The last that the search does for its second find.
        alike = mock.Mock(side_effect=(False, RuntimeError("no second stand-in")))
        with (
            mock.patch.object(frozen_layers, "_look_alike", alike),
            self.assertLogs(frozen_layers.log, "WARNING") as logs,
        ):
            drop_unread_arguments(module)
        self.assertEqual(before, str(module.graph))
        self.assertIn("no second stand-in", logs.output[0])

    def test_when_in_doubt_the_argument_stays(self):
        """What the pass cannot be sure of, put into a graph where it would act."""

        def read(node, target, *args):
            """Reads ``args`` once more, in the backward."""
            with node.graph.inserting_before(node.graph.output_node()):
                node.graph.call_function(target, args)

        def become(node, change):
            node.meta["val"] = change(node.meta["val"])

        function, *inputs = frozen_pair(1)
        (dynamic,) = self.convolutions(self.traced(function, *inputs, dynamic=True))
        symbolic = dynamic.args[1].meta["val"]
        # What is changed, given the convolution, its gradient, its input.
        doubts = {
            "unknown mask": lambda n, g, x: n.update_arg(10, g),
            "wanted": lambda n, g, x: n.update_arg(10, [True, True, False]),
            "used": lambda n, g, x: read(n, operator.getitem, n, 1),
            "used from behind": lambda n, g, x: read(n, operator.getitem, n, -2),
            "used whole": lambda n, g, x: read(n, len, n),
            "read elsewhere": lambda n, g, x: read(n, aten.mul.Tensor, x, g),
            "read twice": lambda n, g, x: n.update_arg(2, x),
            "no meta": lambda n, g, x: x.meta.pop("val"),
            "gradient without meta": lambda n, g, x: g.meta.pop("val"),
            "device": lambda n, g, x: become(x, lambda v: v.to("meta")),
            "conjugate": lambda n, g, x: become(x, lambda v: v.cfloat().conj()),
            "negative": lambda n, g, x: become(x, lambda v: v.cfloat().conj().imag),
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
