"""Reads a joint graph into the :class:`.Program` that plans are evaluated on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional, TYPE_CHECKING

import torch
import torch.fx as fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils._pytree import tree_leaves

from ..._activation_checkpointing.random_ops import is_kept, must_run_once
from .liveness import BackwardStep, Program
from .recompute_cost import size_or_hint
from .storages import device_of, nodes_among, Operator, Storages


if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from torch._functorch.partitioners import NodeInfo


def read_joint(
    graph: fx.Graph,
    node_info: NodeInfo | SimpleNamespace,
    num_fwd_outputs: int,
    as_int: Callable[[Any], int] = size_or_hint,
    device: Optional[torch.device] = None,
) -> Program:
    """The program of a joint graph; its first ``num_fwd_outputs`` are the forward's.

    ``as_int`` evaluates a symbolic size.  Only bytes on ``device`` count, by default
    the graph's.  Raises CannotPlan for a value without a storage.  O(nodes + edges).
    """
    (output,) = graph.find_nodes(op="output")
    results = tree_leaves(output.args)
    closure = node_info.tangents_closure
    required = _with_sizes_to_return(graph, set(node_info.required_fw_nodes), closure)
    backward = {node for node in graph.nodes if node in closure} - required
    tangents = {node for node in backward if node.op == "placeholder"}
    device = device_of(graph) if device is None else device
    storages = Storages(graph, required, tangents, as_int, device)
    nbytes = storages.nbytes
    gradients = nodes_among(results[num_fwd_outputs:])
    forward = [each for each in storages.calls if each.node not in backward]
    operators = [each for each in forward if each.writes]
    producer = _producers_of_storages(operators, len(nbytes))
    first_use, last_use = _live_ranges(forward, len(nbytes))
    end = Operator(output, storages.storages_read_via(gradients), (), 0, False)
    calls = [*storages.calls, end]
    owned = storages.copied.intersection(s for each in calls for s in each.reads)
    # A copy that nothing reads stays live to the end.
    unread = sum(nbytes[s] for s in storages.copied - owned)
    saved_as, always_saved = _choose_what_to_save(storages, backward, producer)
    outputs, written_back = (
        {s for s in storages.storages_read_via(nodes) if first_use[s] >= 0}
        for nodes in _returned_and_written_back(output, results[:num_fwd_outputs])
    )
    program = Program(
        storages.values,
        nbytes,
        producer,
        first_use,
        last_use,
        saved_as,
        always_saved,
        operators,
        [not (each.is_required and _must_not_repeat(each.node)) for each in operators],
        forward,
        _steps_of_backward(calls, backward),
        outputs,
        written_back - outputs,
        tangents,
        storages.tangent_bytes + unread,
        frozenset(owned),
        required,
        results[:num_fwd_outputs],
        gradients,
        unsized=storages.unsized,
    )
    _save_smaller_users_of_run_once(program)
    return program


def read_forward(graph: fx.Graph) -> Program:
    """The program of a graph that has no backward, such as a nested region's."""
    (output,) = graph.find_nodes(op="output")
    every_node = SimpleNamespace(required_fw_nodes=[*graph.nodes], tangents_closure=())
    return read_joint(graph, every_node, len(tree_leaves(output.args)))


def _returned_and_written_back(
    output: fx.Node, results: list[Any]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """What the forward returns, and what its caller copies into inputs instead."""
    descriptions = enumerate(output.meta.get("desc") or ())
    copied = {at for at, d in descriptions if isinstance(d, InputMutationAOTOutput)}
    places = [*enumerate(results)]
    return (
        nodes_among(node for at, node in places if at not in copied),
        nodes_among(node for at, node in places if at in copied),
    )


def _with_sizes_to_return(
    graph: fx.Graph, required: set[fx.Node], closure: Container[fx.Node]
) -> set[fx.Node]:
    """``required``, with the sizes that the forward can return though it needs none.

    To compute them in the backward, what they are the sizes of would have to be there.
    """
    for node in graph.nodes:
        is_size = isinstance(node.meta.get("val"), py_sym_types)
        if (
            is_size
            and node not in closure
            and required.issuperset(node.all_input_nodes)
        ):
            required.add(node)
    return required


def _producers_of_storages(operators: list[Operator], count: int) -> list[int]:
    """For each storage, the operator that allocates it, or -1."""
    producer = [-1] * count
    for op, each in enumerate(operators):
        for s in each.writes:
            producer[s] = op
    return producer


def _live_ranges(forward: list[Operator], count: int) -> tuple[list[int], list[int]]:
    """Where the forward of every plan allocates and last uses each storage, or -1."""
    first, last = [-1] * count, [-1] * count
    for at, each in enumerate(forward):
        if each.is_required:
            for s in each.writes:
                first[s] = at
            for s in (*each.reads, *each.writes):
                last[s] = at
    return first, last


def _steps_of_backward(
    calls: list[Operator], backward: set[fx.Node]
) -> list[BackwardStep]:
    """The steps of a backward; the last of ``calls`` is the output."""
    steps: list[BackwardStep] = []
    traced: list[tuple[int, ...]] = []
    started = False
    for each in calls:
        node = each.node
        started = started or any(
            read.op == "placeholder" and read in backward
            for read in node.all_input_nodes
        )
        if node in backward or node.op == "output":
            steps.append(BackwardStep(each, tuple(traced)))
            traced.clear()
        elif started and not each.is_required:
            # A view stands for what it views, which has to be made before it.
            traced.append(each.writes or each.reads)
    return steps


def _choose_what_to_save(
    storages: Storages, backward: set[fx.Node], producer: list[int]
) -> tuple[list[Optional[fx.Node]], set[int]]:
    """The node to save for each storage, and the storages that checkpoints keep."""
    from torch._functorch.partitioners import must_recompute

    saved_as: list[Optional[fx.Node]] = [None] * len(producer)
    always_saved: set[int] = set()
    replayed: set[int] = set()
    for each in storages.calls:
        node = each.node
        if must_recompute(node):
            # Neither this nor a view of it may be saved.
            replayed.update(each.writes)
        elif node not in backward and isinstance(node.meta.get("val"), torch.Tensor):
            (s,) = storages.values[node]
            # The exception is a value that one checkpoint hands to the next.
            is_always_saved = is_kept(node)
            if is_always_saved:
                always_saved.add(s)
            # An input is live anyway.
            if producer[s] >= 0 and (is_always_saved or s not in replayed):
                saved_as[s] = saved_as[s] or node
    return saved_as, always_saved


def _save_smaller_users_of_run_once(program: Program) -> None:
    """Where an operator must run once, keep what is made of its result, if no larger.

    For dropout, that is the mask, provided that nothing else uses the random numbers.
    """
    needed = {s for step in program.steps for s in step.operator.reads}
    readers: list[set[int]] = [set() for _ in program.nbytes]
    for op, each in enumerate(program.operators):
        for s in each.reads:
            readers[s].add(op)
    for op, each in enumerate(program.operators):
        users = {user for s in each.writes for user in readers[s]}
        if (
            program.recomputable[op]
            or is_kept(each.node)
            or not needed.isdisjoint(each.writes)
            or len(users) != 1
        ):
            continue
        (user,) = users
        made = program.operators[user]
        saveable = all(program.saved_as[s] is not None for s in made.writes)
        if saveable and made.nbytes <= each.nbytes:
            program.recomputable[user] = False


def _must_not_repeat(node: fx.Node) -> bool:
    """Whether the backward must not run a node that the forward runs."""
    target = node.target
    return (
        must_run_once(node)
        # The partitioner leaves these in the phase in which they were traced.
        or node.meta.get("partitioner_tag") == "must_be_in_forward"
        or (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable)
    )
