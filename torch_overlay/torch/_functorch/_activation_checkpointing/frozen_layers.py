"""Spares the backward tensors of which an operator uses only the shape.

A frozen convolution needs only the gradient of its input, computed from
``grad_output`` and the weight, but ``convolution_backward`` takes the input as well,
for its sizes.  The partitioner sees an argument and saves it: a frozen network keeps
as many bytes as a trained one.

So before the joint graph is partitioned, an argument on whose values no wanted output
depends (:data:`UNREAD_ARGUMENTS`) is replaced by a *stand-in*: ``grad_output`` itself
where that looks the same, else an uninitialized tensor that is made in the backward and
alive during one operator.  It has the argument's sizes, strides, dtype and device, by
which kernels choose their algorithm and the layout of their results.

When in doubt the argument stays: the operator is not in the table, its mask is no
constant, a masked-off output is used, the argument is needed in the backward anyway,
or it is no plain tensor (layout, device, subclass, symbolic sizes).
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections import defaultdict
from typing import Any, cast, NamedTuple, Optional, TYPE_CHECKING

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import has_free_symbols


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


log = logging.getLogger(__name__)
aten = torch.ops.aten

# Kernels of other devices have not been checked.
_DEVICES = ("cpu", "cuda")
# The metadata that a stand-in takes over from its user.
_META = ("partitioner_tag", "seq_nr", "stack_trace", "custom")


class Rule(NamedTuple):
    """Which argument of one operator is unread, and when.

    ``reader`` is the index of the one output that depends on the argument's values,
    which ``output_mask`` has to mask off; None where no output does.  The rule holds
    if the argument ``off``, where given, is False.
    """

    argument: str
    reader: Optional[int] = None
    off: Optional[str] = None


# Layer norm and group norm are not here: their input's gradient needs the input.  What
# else they could spare, their decompositions already do.
UNREAD_ARGUMENTS: dict[Any, Rule] = {
    # Gradients of input, weight and bias: grad_output with the weight, grad_output
    # with the input, the sum of grad_output.  The weight stays: it is a parameter.
    aten.convolution_backward.default: Rule("input", reader=1),
    # Gradients of input, weight and bias.  With fixed statistics the first is
    # grad_output, scaled; in training it depends on the normalized input.
    aten.native_batch_norm_backward.default: Rule("input", reader=1, off="train"),
    # Gradients of input and grid.  The grid says where grad_output goes; only its own
    # gradient is made from differences of input values.
    aten.grid_sampler_2d_backward.default: Rule("input", reader=1),
    aten.grid_sampler_3d_backward.default: Rule("input", reader=1),
    # The indices say where grad_output goes.
    aten.max_pool2d_with_indices_backward.default: Rule("self"),
    aten.max_pool3d_with_indices_backward.default: Rule("self"),
    aten.adaptive_max_pool2d_backward.default: Rule("self"),
    aten.adaptive_max_pool3d_backward.default: Rule("self"),
    # Linear with fixed coefficients: only the sizes matter.
    aten.avg_pool2d_backward.default: Rule("self"),
    aten.avg_pool3d_backward.default: Rule("self"),
    aten._adaptive_avg_pool2d_backward.default: Rule("self"),
    aten._adaptive_avg_pool3d_backward.default: Rule("self"),
    aten.reflection_pad2d_backward.default: Rule("self"),
    aten.replication_pad2d_backward.default: Rule("self"),
    aten.nll_loss_backward.default: Rule("self"),
    aten.nll_loss2d_backward.default: Rule("self"),
}


class StandIn(NamedTuple):
    """``user`` gets, in place of ``argument``, a new tensor like ``look``, made from
    ``base``, which is in the backward; or ``base`` itself where ``look`` is None."""

    user: fx.Node
    argument: fx.Node
    base: fx.Node
    look: Optional[torch.Tensor]


def without_unread_arguments(partition_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``partition_fn``, so that joint graphs go through this pass first."""

    @functools.wraps(partition_fn)
    def partition(joint_module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        compile_fx = sys.modules.get("torch._inductor.compile_fx")
        drop_unread_arguments(
            joint_module,
            kwargs.get("static_lifetime_input_indices"),
            for_inductor=partition_fn is getattr(compile_fx, "partition_fn", None),
        )
        return partition_fn(joint_module, *args, **kwargs)

    return partition


def drop_unread_arguments(
    joint_module: fx.GraphModule,
    static_lifetime_input_indices: Optional[Sequence[int]] = None,
    *,
    for_inductor: bool = False,
) -> None:
    """Replaces unread arguments in the backward of ``joint_module``, in place.

    Parameters and buffers (``static_lifetime_input_indices``) are alive anyway, so they
    stay.  With ``for_inductor``, which orders its kernels itself, stand-ins get the
    layouts that inductor is going to choose.  A search that fails only warns.
    """
    if not config.drop_unread_arguments:  # type: ignore[attr-defined]
        return
    try:
        backward = _after_tangents(joint_module.graph)
        static = static_lifetime_input_indices or ()
        stand_ins = _find_stand_ins(joint_module, backward, static, for_inductor)
    except Exception:
        log.warning(
            "Could not look for unread arguments, so some tensors may be saved only "
            "for their shape; set torch._functorch.config.drop_unread_arguments = "
            "False to skip this pass.",
            exc_info=True,
        )
        return
    for stand_in in stand_ins:
        node = _make_stand_in(stand_in)
        stand_in.user.replace_input_with(stand_in.argument, node)
    if not for_inductor:
        dropped = {stand_in.argument for stand_in in stand_ins}
        _compute_early(joint_module.graph, backward, dropped)
    if stand_ins:
        joint_module.recompile()


def _after_tangents(graph: fx.Graph) -> dict[fx.Node, None]:
    """The tangents and all that depends on them, in the graph's order."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(source in found for source in node.all_input_nodes):
            found[node] = None
    return found


def _find_stand_ins(
    joint_module: fx.GraphModule,
    backward: Collection[fx.Node],
    static_indices: Sequence[int],
    for_inductor: bool,
) -> list[StandIn]:
    """All replacements to make; changes nothing."""
    unread = defaultdict(list)
    for node in backward:
        if (argument := _unread_argument(node)) is not None:
            unread[argument].append(node)
    inputs = joint_module.graph.find_nodes(op="placeholder")
    primals = [node for node in inputs if str(node.target).startswith("primals")]
    alive = {primals[index] for index in static_indices if index < len(primals)}
    # Inductor lays out the forward of a convolution in channels_last.  The graph
    # does not say so yet, but the argument would come from there.
    channels_last = False
    if unread and for_inductor:
        from torch._inductor.graph import GraphLowering

        channels_last = GraphLowering.decide_layout_opt(
            joint_module, is_inference=False
        )
    found = []
    for argument, users in unread.items():
        # Where another operator reads it, it is saved or recomputed for that one.
        takers = {user for user in argument.users if user in backward}
        if argument in backward or argument in alive or takers != set(users):
            continue
        value: Any = argument.meta.get("val")
        for user in users:
            base = next(node for node in user.all_input_nodes if node in backward)
            if not (_is_plain(value) and _is_plain(base.meta.get("val"))):
                continue
            is_convolution = user.target is aten.convolution_backward.default
            with value.fake_mode:
                if channels_last and is_convolution and value.dim() == 4:
                    look = torch.empty_like(value, memory_format=torch.channels_last)
                elif look_alike(value, base.meta["val"]):
                    look = None
                else:
                    look = value.new_empty_strided(value.shape, value.stride())
            found.append(StandIn(user, argument, base, look))
    return found


def _unread_argument(node: fx.Node) -> Optional[fx.Node]:
    """The argument that ``node`` certainly takes without reading it, if any."""
    rule = UNREAD_ARGUMENTS.get(node.target)
    if rule is None or (rule.off and _get_argument(node, rule.off) is not False):
        return None
    if rule.reader is not None:
        mask = _get_argument(node, "output_mask")
        if not isinstance(mask, (list, tuple)) or mask[rule.reader] is not False:
            return None
        # An output may be used although it is masked off.
        others = set(range(len(mask))) - {rule.reader}
        for user in node.users:
            if user.target is not operator.getitem or user.args[1] not in others:
                return None
    argument = _get_argument(node, rule.argument)
    taken = pytree.arg_tree_leaves(*node.args, **node.kwargs)
    return argument if taken.count(argument) == 1 else None


def _get_argument(node: fx.Node, name: str) -> Any:
    schema = cast("torch._ops.OpOverload", node.target)._schema
    position = [a.name for a in schema.arguments].index(name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _is_plain(value: Any) -> bool:
    """Whether it is a dense tensor of which everything is known.

    Inductor cannot change the layout of an empty tensor of symbolic sizes.
    """
    return (
        type(value) is FakeTensor
        and value.layout is torch.strided
        and value.device.type in _DEVICES
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and not has_free_symbols(value)
    )


def look_alike(*values: torch.Tensor) -> bool:
    left, right = ((v.dtype, v.device, v.shape, v.stride()) for v in values)
    return left == right


def _make_stand_in(stand_in: StandIn) -> fx.Node:
    """The node that ``user`` gets.  Whatever can fail was done by the search."""
    user, _, base, look = stand_in
    if look is None:
        return base
    given = base, [*look.shape], [*look.stride()]
    options: Any = {"dtype": look.dtype, "device": look.device}
    with user.graph.inserting_before(user):
        node = user.graph.call_function(aten.new_empty_strided.default, given, options)
    node.meta.update({key: user.meta[key] for key in _META if key in user.meta})
    node.meta["val"] = look
    return node


def _compute_early(
    graph: fx.Graph, backward: Collection[fx.Node], dropped: set[fx.Node]
) -> None:
    """Moves what the backward computes from dropped values up to where those are made.

    A forward that saves a ReLU's mask in place of its result would otherwise compute
    all masks at its end, and keep every result alive until then.
    """
    read, in_backward = set(dropped), False
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        in_backward = in_backward or node in backward
        if node in backward or read.isdisjoint(node.all_input_nodes):
            continue
        if not in_backward:
            if getattr(node.target, "is_view", False):
                read.add(node)
        elif not node.is_impure():
            latest = max(node.all_input_nodes)
            if latest.op != "placeholder":
                latest.append(node)
                read.add(node)
