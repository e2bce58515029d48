"""What the partitioner's plan saves for the backward, what it recomputes, and why.

    >>> torch.compile(model)(batch).sum().backward()
    >>> print_saved_values()

prints the plan of the graph compiled last; :func:`last_plan` returns the same as data,
:func:`plans` those of several graphs, and every plan goes to the structured trace as
the artifact ``activation_memory_plan``.  A plan keeps no graph or tensor alive.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import operator
import os
from collections import Counter, deque
from dataclasses import asdict, dataclass, replace
from typing import Any, Optional, TextIO, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._inductor.fx_utils import get_node_storage
from torch._logging._internal import trace_structured
from torch.fx.graph import _parse_stack_trace

from ..._activation_checkpointing.random_ops import may_differ
from ..graph.recompute_cost import is_view
from ..graph.storages import activation_bytes, device_of


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import GraphModule, Node
    from ..decision import Decision, Head, Knapsack, Peak, SavedRange


log = logging.getLogger(__name__)

__all__ = ["Plan", "PlannedValue", "last_plan", "plans", "print_saved_values"]

# The keys in the meta of a forward's module that hold its plan until it is compiled,
# and what tells the plan's peak at other sizes.
_PLAN = "activation_memory_plan"
_PEAK_AT = "activation_memory_peak_at"

_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class PlannedValue:
    """One node of the forward: saved for the backward, or recomputed there.

    Args:
        name: the node's.
        op: the operator, or "input".
        shape: the sizes; a symbolic one by its name.  Of several results, the first's.
        dtype: that of the first result.
        nbytes: the bytes of all results.
        runtime: the cost of recomputing it, if it is an item of the knapsack.
        source: the innermost line of the user's code.
        why: "input" (or a view of one), "runs once" (running it again may give another
            result), "user" (a checkpoint policy), or what decided about it: "min cut"
            or a graph's ``decided_by``.
    """

    name: str
    op: str
    shape: tuple[int | str, ...]
    dtype: str
    nbytes: int
    runtime: Optional[float]
    source: Optional[str]
    why: str


@dataclass(frozen=True)
class Plan:
    """What was decided about a graph, for people; runtimes are in ``runtime_unit``.

    ``saved`` includes inputs; ``recomputed`` leaves out views, which cost nothing.
    :class:`.Decision` explains the other fields.
    """

    graph: str
    budget: float
    decided_by: str
    activation_bytes: int
    saved: tuple[PlannedValue, ...]
    recomputed: tuple[PlannedValue, ...]
    runtime_unit: str = ""
    limits: Optional[SavedRange] = None
    knapsack: Optional[Knapsack] = None
    peak: Optional[Peak] = None
    head: Optional[Head] = None

    @property
    def saved_bytes(self) -> int:
        """The bytes of all saved values, inputs included; each alias counts."""
        return sum(value.nbytes for value in self.saved)

    @property
    def used(self) -> Optional[float]:
        """The budget that the plan uses up, None if unknown; compare ``budget``."""
        if self.limits is None or self.limits.low == self.limits.high:
            return None
        return self.limits.budget_of_bytes(self.activation_bytes)

    def format(self) -> str:
        """The plan as text; see :func:`print_saved_values`."""
        kept = format_bytes(self.activation_bytes)
        used = f"{kept} of activations" if self.used is None else f"{self.used:.4g}"
        lines = [
            f"graph:      {self.graph}",
            f"budget:     {self.budget:g} asked, {used} used",
            f"chosen by:  {self.decided_by}",
        ]
        if self.limits is not None:
            low, high = map(format_bytes, self.limits)
            lines[1] += f" (0: {low}, 1: {high})"
        if (solved := self.knapsack) is not None:
            count = f"{len(solved.saved)} of {len(solved.memory)}"
            lines[2] += f" by {solved.solver}: {count} items saved"
        if (peak := self.peak) is not None:
            how = "by inductor's kernels" if peak.fused else "operator by operator"
            how = "as compiled" if peak.compiled else how
            allowed, predicted, floor, fastest = map(format_bytes, peak[:4])
            lines.append(
                f"peak:       {predicted} {how}, {allowed} allowed (floor: {floor}, "
                f"budget 1: {fastest})"
            )
        if (head := self.head) is not None:
            lines.append(f"head:       {describe_head(head)}")
        inputs = [value.nbytes for value in self.saved if value.why == "input"]
        lines += [
            f"saved:      {len(self.saved)} values, {format_bytes(self.saved_bytes)} "
            f"(activations: {len(self.saved) - len(inputs)}, {kept} kept; "
            f"inputs and views of them: {len(inputs)}, {format_bytes(sum(inputs))})",
            f"recomputed: {len(self.recomputed)} operators",
        ]
        if runtime := math.fsum(value.runtime or 0 for value in self.recomputed):
            lines[-1] += f", estimated {self._runtime(runtime)}"
        if by_user := self.fixed_by_checkpoints():
            lines.append(f"fixed:      {by_user}, as checkpoints say")
        for title, values in (
            ("saved for the backward", self.saved),
            ("recomputed in the backward", self.recomputed),
        ):
            if values:
                lines += ["", title, *self._table(values)]
        return "\n".join(line.rstrip() for line in lines)

    def fixed_by_checkpoints(self) -> str:
        """What checkpoint policies fix at any budget, as text; empty if nothing."""
        parts = []
        for what, values in (("saved", self.saved), ("recomputed", self.recomputed)):
            fixed = [value.nbytes for value in values if value.why == "user"]
            if fixed:
                parts.append(f"{len(fixed)} values, {format_bytes(sum(fixed))} {what}")
        return "; ".join(parts)

    def _table(self, values: Sequence[PlannedValue]) -> list[str]:
        """A row for all values that differ only in name, the largest rows first."""
        kinds = Counter(replace(value, name="") for value in values)
        table = [["count", "bytes", "op", "value", "runtime", "why", "source"]]
        for kind in sorted(kinds, key=lambda k: k.nbytes * kinds[k], reverse=True):
            size = format_bytes(kind.nbytes * kinds[kind])
            value = f"{kind.dtype}[{', '.join(map(str, kind.shape))}]"
            cost = "-" if kind.runtime is None else self._runtime(kind.runtime)
            row = [f"{kinds[kind]}x", size, kind.op, value, cost, kind.why]
            table.append([*row, kind.source or "-"])
        widths = [max(map(len, column)) for column in zip(*table)]
        return ["  " + "  ".join(map(str.ljust, row, widths)) for row in table]

    def _runtime(self, runtime: float) -> str:
        if self.runtime_unit != "FLOP":
            return f"{runtime:.4g} {self.runtime_unit}".rstrip()
        power = min(int(math.log10(max(runtime, 1))) // 3, 5)
        return f"{runtime / 1000**power:.4g} {' kMGTP'[power].strip()}FLOP"


# Enough for a model with a few graph breaks, not for a whole sweep.
recent_plans: deque[Plan] = deque(maxlen=16)


def plans() -> list[Plan]:
    """The plans of the last graphs compiled or loaded, at most 16, the oldest first."""
    return list(recent_plans)


def last_plan() -> Plan:
    """The plan of the graph that was last compiled or loaded from a compile cache.

    Raises LookupError if there is none.
    """
    if not recent_plans:
        raise LookupError(
            "no plan to show: no graph has been partitioned in this process. Call a "
            "compiled function on inputs that require gradients"
        )
    return recent_plans[-1]


def log_plan(forward: GraphModule, metadata: Any) -> None:
    """Add the plan of a graph that is about to be compiled to :func:`plans`.

    The plans of its nested regions come before it.  Its own is also left with
    ``metadata``, the graph's ViewAndMutationMeta, which compile caches keep.
    """
    for module in reversed([*forward.modules()]):
        plan = getattr(module, "meta", {}).pop(_PLAN, None)
        if plan is not None:
            recent_plans.append(plan)
            if module is forward:
                metadata.activation_memory_plan = plan
                if (peak_at := module.meta.pop(_PEAK_AT, None)) is not None:
                    metadata.activation_memory_peak_at = peak_at


def logged_plan(metadata: Any) -> Optional[Plan]:
    """The plan that `log_plan` or a cache left with a graph's ViewAndMutationMeta."""
    return getattr(metadata, "activation_memory_plan", None)


def replace_plan(old: Optional[Plan], new: Optional[Plan]) -> None:
    """Take a graph's earlier plan off the list, and add its new one, if any."""
    for plan in (old, new):
        # By identity, as other graphs may have equal plans.
        places = (at for at, each in enumerate(recent_plans) if each is plan)
        at = next(places, None)
        if at is not None:
            del recent_plans[at]
    if new is not None:
        recent_plans.append(new)


def log_peak(peak: Peak, metadata: Any) -> None:
    """Replace the peak of the plan that `log_plan` left with ``metadata``."""
    kept: Any = logged_plan(metadata)
    metadata.activation_memory_plan = replace(kept, peak=peak)
    replace_plan(kept, metadata.activation_memory_plan)


def log_cached_plan(metadata: Any) -> None:
    """Add the plan of a graph that was loaded from a compile cache to :func:`plans`."""
    plan = logged_plan(metadata)
    if plan is not None:
        if plan.peak is not None:
            plan.peak.warn_if_over(plan.head)
        recent_plans.append(plan)


def print_saved_values(
    plan: Optional[Plan] = None, *, file: Optional[TextIO] = None
) -> None:
    """Print what a plan saves and recomputes, and why.

    ``plan`` is one of :func:`plans`, by default the last.  If there is none, what is
    printed says so.  Values that differ only in name share a row.  ``file`` is the
    stream to print to, by default stdout.
    """
    try:
        text = (plan or last_plan()).format()
        if plan is None and len(recent_plans) > 1:
            text = f"the last of {len(recent_plans)} graphs; plans() has all\n{text}"
    except LookupError as error:
        text = error.args[0]
    print(text, file=file)


def attach_plan(
    decision: Decision,
    forward: GraphModule,
    backward: GraphModule,
    num_fwd_outputs: int,
) -> None:
    """Describe how a joint graph was split, for `log_plan` and the trace.  O(nodes)."""
    placeholders = forward.graph.find_nodes(op="placeholder")
    inputs = set(map(get_node_storage, placeholders)) - {None}
    solved, names = decision.knapsack, [node.name for node in decision.items]
    runtimes = dict(zip(names, solved.runtimes)) if solved else {}
    kept = {names[i] for i in solved.saved} if solved else set()
    # How the names of checkpoint policies end: those to recompute, those to save.
    asks = "_RECOMPUTE", "_SAVE"

    def describe(node: Node, is_saved: bool) -> PlannedValue:
        why = decision.decided_by
        if node.op == "placeholder" or get_node_storage(node) in inputs:
            why = "input"
        elif is_saved and may_differ(node):
            # The partitioner tags these itself.
            why = "runs once"
        elif str(node.meta.get("recompute")).endswith(asks[is_saved]):
            why = "user"
        elif solved and (node.name not in runtimes or (node.name in kept) != is_saved):
            # What the knapsack did not decide, a min cut did.
            why = "min cut"
        return _describe_value(node, why, runtimes.get(node.name))

    (output,) = forward.graph.find_nodes(op="output")
    saved = [node for node in output.args[0][num_fwd_outputs:] if node is not None]
    again = {node.name for node in backward.graph.nodes if node.op == "call_function"}
    computed = [
        node
        for node in forward.graph.nodes
        if node.op == "call_function" and node.name in again
        if not is_view(node) and node.target is not operator.getitem
    ]
    plan = Plan(
        graph=get_aot_graph_name(),
        budget=decision.budget,
        decided_by=decision.decided_by,
        activation_bytes=activation_bytes(
            placeholders, saved, device_of(forward.graph)
        ),
        saved=tuple(describe(node, True) for node in saved),
        recomputed=tuple(describe(node, False) for node in computed),
        runtime_unit=decision.runtime_unit,
        limits=decision.limits,
        knapsack=decision.knapsack,
        peak=decision.peak,
        head=decision.head,
    )
    forward.meta[_PLAN], forward.meta[_PEAK_AT] = plan, decision.peak_at
    _log(plan)


def _log(plan: Plan) -> None:
    """Log what checkpoints fix, and write the plan to the structured trace."""
    if plan.budget < 1 and (fixed := plan.fixed_by_checkpoints()):
        log.info(
            "activation memory budget %g of %s does not change what checkpoints fix: "
            "%s",
            plan.budget,
            plan.graph,
            fixed,
        )
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "activation_memory_plan", "encoding": "json"},
        payload_fn=lambda: json.dumps(asdict(plan)),
    )


def _describe_value(node: Node, why: str, runtime: Optional[float]) -> PlannedValue:
    from torch._functorch.partitioners import _size_of

    value: Any = node.meta.get("val")
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    is_tensor = isinstance(value, torch.Tensor)
    shape = value.shape if is_tensor else ()
    dtype = str(value.dtype) if is_tensor else type(value).__name__
    return PlannedValue(
        name=node.name,
        op="input" if node.op == "placeholder" else str(node.target),
        shape=tuple(d if isinstance(d, int) else str(d) for d in shape),
        dtype=dtype.removeprefix("torch."),
        nbytes=_size_of(node) if is_tensor else 0,
        runtime=runtime,
        source=_users_frame(node.meta.get("stack_trace")),
        why=why,
    )


# Cached, as thousands of nodes may have the same trace.
@functools.lru_cache(maxsize=4096)
def _users_frame(trace: Optional[str]) -> Optional[str]:
    """The innermost frame of a stack trace that is not torch's own, in one line."""
    frame = _parse_stack_trace(
        trace or "", lambda file, *_: not file.startswith(_TORCH)
    )
    if frame is None:
        return None
    return f"{os.path.basename(frame.file)}:{frame.lineno}, {frame.code}"


def describe_head(head: Head) -> str:
    """How a head runs in chunks, and what that gains and costs, or why it cannot."""
    if head.why_whole:
        return f"in one piece, as {head.why_whole}"
    gained = f"-{format_bytes(head.gained)}" if head.gained > 0 else "no lower peak"
    work = f", +{head.more_work:.1%} work" if head.more_work > 0 else ""
    return f"in {head.chunks} chunks of {head.rows} rows: {gained}{work}"


def format_bytes(count: int) -> str:
    """``count`` bytes as text, with a binary unit, to four digits."""
    power = min(int(math.log2(max(abs(count), 1))) // 10, 3)
    amount = count / 1024**power
    digits = f"{amount:.4g}" if abs(amount) < 1000 else f"{amount:,.0f}"
    return f"{digits} {('B', 'KiB', 'MiB', 'GiB')[power]}"
