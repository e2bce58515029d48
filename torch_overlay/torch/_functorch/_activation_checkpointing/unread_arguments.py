"""Frees the backward from tensors of which an operator only looks at the shape.

A backward operator takes all that its formula may need, and an output mask says
which gradients are wanted.  A frozen convolution wants the gradient of its input
alone, computed from ``grad_output`` and the weight, but ``convolution_backward``
takes the input as well, for its sizes.  The partitioner sees an argument and saves
it: a frozen network keeps as many bytes as a trained one.

:func:`drop_unread_arguments` runs on the joint graph before it is partitioned, and
so holds for every partitioner and every memory budget.  Where :data:`UNREAD_ARGUMENTS`
says that no wanted output depends on the values of an argument, another tensor takes
its place, the *stand-in*: ``grad_output`` itself where that looks the same, else an
uninitialized tensor that is made in the backward.

The stand-in has the argument's sizes, strides, dtype and device, because kernels
choose their algorithm and the layout of their results by them.  One element, expanded,
would need no memory, but its strides of zero change both (a 1x1 convolution
takes its memory format from its input alone, batch norm has a kernel for contiguous
input), and some kernels do not look at strides at all.  An uninitialized tensor is
alive during one operator, in which the argument would have been alive as well, and
nothing is written to it.

What the backward itself makes of such an argument, a ReLU's mask say, is then saved in
its place, and computed beside it.  Inductor is left to order its kernels itself.

When in doubt the argument stays: the operator is not in the table, its mask is no
constant, a masked-off output is used, the argument is needed in the backward anyway,
or it is no plain tensor (layout, device, subclass, unbacked sizes).
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from typing import Any, Callable, NamedTuple, Optional, TYPE_CHECKING, Union

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols,
    statically_known_true,
)


if TYPE_CHECKING:
    from collections.abc import Sequence


log = logging.getLogger(__name__)
aten = torch.ops.aten
# A size or a stride: a node where it is symbolic.
Number = Union[int, fx.Node]

# Kernels of other devices were not looked at.
_DEVICES = ("cpu", "cuda")
# Says in a joint module's meta that inductor has called the pass on it.
_DONE = "unread_arguments_dropped"
# What the stand-in's nodes take over from the operator that they are for.
_META = ("partitioner_tag", "seq_nr", "stack_trace", "custom")


class Rule(NamedTuple):
    """Which arguments of one operator are unread, and when.

    ``readers`` maps an argument's name to the indices of the outputs that depend on
    its values; with none it is only looked at for its shape.  ``mask`` names the
    argument that says which outputs are wanted, None where there is one output.
    The rule holds if every argument in ``only_if`` has the constant given there.
    """

    readers: dict[str, tuple[int, ...]]
    mask: Optional[str] = None
    only_if: tuple[tuple[str, Any], ...] = ()


def _masked(only_if: tuple[tuple[str, Any], ...] = (), **readers: Any) -> Rule:
    return Rule(readers, "output_mask", only_if)


def _shape_only(*names: str) -> Rule:
    return Rule(dict.fromkeys(names, ()))


# A layer norm and a group norm are not here: their input's gradient needs the input.
# What else they could spare, their decompositions do.
UNREAD_ARGUMENTS: dict[torch._ops.OpOverload, Rule] = {
    # Gradients of input, weight and bias: grad_output with the weight, grad_output
    # with the input, the sum of grad_output.  The weight stays: it is a parameter.
    aten.convolution_backward.default: _masked(input=(1,)),
    # Gradients of input, weight and bias.  With fixed statistics the first is
    # grad_output, scaled; in training it depends on the normalized input.
    aten.native_batch_norm_backward.default: _masked((("train", False),), input=(1,)),
    # Gradients of input and grid.  The grid says where grad_output goes; only its own
    # gradient is made from differences of input values.
    aten.grid_sampler_2d_backward.default: _masked(input=(1,)),
    aten.grid_sampler_3d_backward.default: _masked(input=(1,)),
    # The indices say where grad_output goes.
    aten.max_pool2d_with_indices_backward.default: _shape_only("self"),
    aten.max_pool3d_with_indices_backward.default: _shape_only("self"),
    aten.adaptive_max_pool2d_backward.default: _shape_only("self"),
    aten.adaptive_max_pool3d_backward.default: _shape_only("self"),
    aten.fractional_max_pool2d_backward.default: _shape_only("self"),
    aten.fractional_max_pool3d_backward.default: _shape_only("self"),
    # Linear with fixed coefficients: sizes say all.
    aten.avg_pool2d_backward.default: _shape_only("self"),
    aten.avg_pool3d_backward.default: _shape_only("self"),
    aten._adaptive_avg_pool2d_backward.default: _shape_only("self"),
    aten._adaptive_avg_pool3d_backward.default: _shape_only("self"),
    aten.reflection_pad1d_backward.default: _shape_only("self"),
    aten.reflection_pad2d_backward.default: _shape_only("self"),
    aten.reflection_pad3d_backward.default: _shape_only("self"),
    aten.replication_pad1d_backward.default: _shape_only("self"),
    aten.replication_pad2d_backward.default: _shape_only("self"),
    aten.replication_pad3d_backward.default: _shape_only("self"),
    aten.nll_loss_backward.default: _shape_only("self"),
    aten.nll_loss2d_backward.default: _shape_only("self"),
}


def drop_unread_arguments(
    joint_module: fx.GraphModule,
    static_lifetime_input_indices: Optional[Sequence[int]] = None,
    *,
    for_inductor: bool = False,
) -> None:
    """Replaces unread arguments in the backward of ``joint_module``, in place.

    Inputs whose indices are in ``static_lifetime_input_indices`` (parameters and
    buffers) are alive anyway and stay.  With ``for_inductor`` the stand-ins get the
    layouts that inductor is going to choose.  Time is linear in the size of the
    graph.  A failure leaves the graph as it was and logs a warning.
    """
    if not config.drop_unread_arguments:  # type: ignore[attr-defined]
        return
    # The partitioner calls again after inductor, which knows better.
    if joint_module.meta.get(_DONE):
        return
    joint_module.meta[_DONE] = for_inductor
    graph = joint_module.graph
    replaced: list[tuple[fx.Node, str, fx.Node]] = []
    try:
        backward = _after_tangents(graph)
        static = _static_inputs(graph, static_lifetime_input_indices or ())
        unread = _unread_values(graph, backward)
        # Inductor lays out the forward of a convolution in channels_last.  The graph
        # does not say so yet, but the argument would come from there.
        channels_last = (
            bool(unread) and for_inductor and _optimizes_layout(joint_module)
        )
        for argument, uses in unread.items():
            # Where another operator reads it, it is saved or recomputed for that one.
            takers = backward.intersection(argument.users)
            if argument in static or takers != {node for node, _ in uses}:
                continue
            if not _is_plain(argument):
                continue
            # Inductor cannot lay out an empty tensor of symbolic sizes anew.
            if for_inductor and not _is_static(argument):
                continue
            for node, name in uses:
                base = next(n for n in node.all_input_nodes if n in backward)
                if not _is_plain(base):
                    continue
                stand_in = _make_stand_in(
                    argument, base, node, channels_last and _is_convolution_2d(node)
                )
                _set_argument(node, name, stand_in)
                replaced.append((node, name, argument))
        # Inductor orders its kernels itself.
        if not for_inductor:
            _compute_early(graph, backward, {argument for _, _, argument in replaced})
    except Exception:
        for node, name, argument in replaced:
            _set_argument(node, name, argument)
        graph.eliminate_dead_code()
        log.warning(
            "The pass that drops unread arguments failed on this joint graph. The "
            "graph is as it was, so the backward may keep tensors of which only the "
            "shape is used; torch._functorch.config.drop_unread_arguments = False "
            "turns the pass off.",
            exc_info=True,
        )
        return
    if replaced:
        joint_module.recompile()
    log.debug("%d unread arguments dropped", len(replaced))


def _optimizes_layout(joint_module: fx.GraphModule) -> bool:
    from torch._inductor.graph import GraphLowering

    return GraphLowering.decide_layout_opt(joint_module, is_inference=False)


def _is_convolution_2d(node: fx.Node) -> bool:
    return (
        node.target is aten.convolution_backward.default
        and _get_argument(node, "input").meta["val"].dim() == 4
    )


def _after_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The tangents and all that depends on them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if "tangents" in str(node.target):
                found.add(node)
        elif not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _compute_early(
    graph: fx.Graph, backward: set[fx.Node], dropped: set[fx.Node]
) -> None:
    """Moves what the backward makes of dropped values up to where these are made.

    A forward that saves a ReLU's mask in place of its result would otherwise compute
    all masks at its end, and keep every result alive until then.
    """
    read = set(dropped)
    in_backward = False
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        in_backward |= node in backward
        if node in backward or read.isdisjoint(node.all_input_nodes):
            continue
        if not in_backward:
            if getattr(node.target, "is_view", False):
                read.add(node)
            continue
        if not isinstance(node.target, torch._ops.OpOverload) or node.is_impure():
            continue
        latest = max(node.all_input_nodes)
        if latest.op != "placeholder":
            latest.append(node)
            read.add(node)


def _static_inputs(graph: fx.Graph, indices: Sequence[int]) -> set[fx.Node]:
    primals = [
        node
        for node in graph.find_nodes(op="placeholder")
        if str(node.target).startswith("primals")
    ]
    return {primals[index] for index in indices if index < len(primals)}


def _unread_values(
    graph: fx.Graph, backward: set[fx.Node]
) -> dict[fx.Node, list[tuple[fx.Node, str]]]:
    """Values of the forward with the nodes that take them unread, and the argument's
    name there; in the order of the table and of the graph."""
    found: dict[fx.Node, list[tuple[fx.Node, str]]] = defaultdict(list)
    for target, rule in UNREAD_ARGUMENTS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            wanted = _wanted_outputs(node, rule)
            if wanted is None:
                continue
            taken = pytree.arg_tree_leaves(*node.args, **node.kwargs)
            for name, readers in rule.readers.items():
                argument = _get_argument(node, name)
                if (
                    isinstance(argument, fx.Node)
                    and argument not in backward
                    and wanted.isdisjoint(readers)
                    and taken.count(argument) == 1
                ):
                    found[argument].append((node, name))
    return found


def _wanted_outputs(node: fx.Node, rule: Rule) -> Optional[set[int]]:
    """Indices of the outputs that the mask asks for or that are used all the same;
    None where the rule does not hold or where that cannot be told."""
    if any(_get_argument(node, name) is not value for name, value in rule.only_if):
        return None
    if rule.mask is None:
        return {0}
    mask = _get_argument(node, rule.mask)
    if not isinstance(mask, (list, tuple)) or not all(type(m) is bool for m in mask):
        return None
    wanted = {index for index, flag in enumerate(mask) if flag}
    for user in node.users:
        index = user.args[1] if user.target is operator.getitem else None
        if not isinstance(index, int):
            return None
        wanted.add(index)
    return wanted


def _is_static(node: fx.Node) -> bool:
    value = node.meta["val"]
    return all(type(n) is int for n in (*value.shape, *value.stride()))


def _is_plain(node: fx.Node) -> bool:
    """Whether the value is a dense tensor of which everything is known."""
    value = node.meta.get("val")
    return (
        type(value) is FakeTensor
        and value.layout is torch.strided
        and value.device.type in _DEVICES
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and not free_unbacked_symbols(value)
    )


def _look_alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype is right.dtype
        and left.device == right.device
        and left.dim() == right.dim()
        and all(
            statically_known_true(a == b)
            for a, b in zip(
                (*left.shape, *left.stride()), (*right.shape, *right.stride())
            )
        )
    )


def _make_stand_in(
    argument: fx.Node, base: fx.Node, user: fx.Node, channels_last: bool
) -> fx.Node:
    """A tensor like ``argument``, of arbitrary values, for the operator ``user``.

    It depends on ``base``, a value of the backward that ``user`` takes, and so belongs
    to the backward.  With ``channels_last`` it has that layout and not the argument's.
    """
    value = argument.meta["val"]
    if not channels_last and _look_alike(value, base.meta["val"]):
        return base

    def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = user.graph.call_function(target, args, kwargs)
        node.meta.update({key: user.meta[key] for key in _META if key in user.meta})
        with value.fake_mode:
            node.meta["val"] = target(
                *fx.node.map_arg(args, lambda source: source.meta["val"]), **kwargs
            )
        return node

    def times(left: Number, right: Number) -> Number:
        if isinstance(left, int) and isinstance(right, int):
            return left * right
        return call(operator.mul, left, right)

    with user.graph.inserting_before(user):
        size: list[Number] = [
            number if isinstance(number, int) else call(aten.sym_size.int, argument, i)
            for i, number in enumerate(value.shape)
        ]
        if channels_last:
            _, channels, height, width = size
            row = times(width, channels)
            stride: list[Number] = [times(height, row), 1, row, channels]
        else:
            stride = [
                number
                if isinstance(number, int)
                else call(aten.sym_stride.int, argument, i)
                for i, number in enumerate(value.stride())
            ]
        return call(
            aten.new_empty_strided.default,
            base,
            size,
            stride,
            dtype=value.dtype,
            device=value.device,
        )


def _position(node: fx.Node, name: str) -> int:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return names.index(name)


def _get_argument(node: fx.Node, name: str) -> Any:
    position = _position(node, name)
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name)


def _set_argument(node: fx.Node, name: str, value: fx.Node) -> None:
    position = _position(node, name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)
