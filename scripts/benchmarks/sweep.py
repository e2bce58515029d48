"""What upstream's budgets reach at best: all of them, each plan measured once.

backend = Sweep()
step = torch.compile(model, backend=backend)
step(*inputs)                                # traced once
steps = measured(backend.graphs, lambda budget: {"peak": peak(step, budget)})
told(lowest(steps)["budgets"])               # "0.125 to 0.156"
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, ExitStack
from functools import cache, wraps
from itertools import groupby
from typing import Any
from unittest import mock

import torch._functorch.config as config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import partitioners
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import unset_fake_temporarily

from benchmarks.pages import Row
from benchmarks.tracing import BACKENDS


BUDGETS = tuple(n / 100 for n in range(100, -1, -1))
# Gradients of the same operators differ by less.
SAME = 1e-5
# Forward and backward of a graph, by budget.
Split = Callable[[float], tuple[fx.GraphModule, fx.GraphModule]]


class Sweep:
    """A backend that traces graphs once, and runs them by the plan of any ``budget``.

    Operator by operator, as `aot_eager_decomp_partition` does.
    """

    def __init__(self) -> None:
        self.budget = 1.0
        self.graphs: list[Split] = []

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Any:
        at = len(self.graphs)

        def compiler(part: int) -> Callable[..., Any]:
            def run(args: list[Any]) -> Any:
                module = self.graphs[at](self.budget)[part]
                return boxed_nop(module, [])(args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return lambda *_: run

        def split(joint: fx.GraphModule, *args: Any, **options: Any) -> Any:
            partition = partitioners.min_cut_rematerialization_partition
            options["compiler"] = "inductor"
            self.graphs.append(splits(partition, joint, *args, **options))
            return self.graphs[at](self.budget)

        return aot_autograd(
            fw_compiler=compiler(0),
            bw_compiler=compiler(1),
            # What needs no gradient has no plan.
            inference_compiler=boxed_nop,
            decompositions=select_decomp_table,
            partition_fn=split,
        )(graph, inputs)


def measured(
    graphs: Sequence[Split],
    measure: Callable[[float], Row],
    budgets: Sequence[float] = BUDGETS,
) -> list[Row]:
    """What ``measure`` finds of each plan, once, with all ``budgets`` that give it.

    Costs a partition for each budget and graph.
    """
    plans = distinct(budgets, graphs)
    return [{"budgets": plan, **measure(plan[0])} for plan in plans]


def splits(
    partition: Callable[..., Any], joint: fx.GraphModule, *args: Any, **options: Any
) -> Split:
    """A graph's ``partition`` by any budget."""
    joint = copy.deepcopy(joint)

    @cache
    def split(budget: float) -> tuple[fx.GraphModule, fx.GraphModule]:
        # A graph has a mode of its own for its fakes.
        with (
            unset_fake_temporarily(),
            config.patch(activation_memory_budget=budget),
        ):
            found: tuple[fx.GraphModule, fx.GraphModule] = partition(
                copy.deepcopy(joint), *args, **options
            )
        return found

    return split


def distinct(budgets: Sequence[float], graphs: Sequence[Split]) -> list[list[float]]:
    """Neighbouring budgets by which each graph's backward is given the same, together."""

    def given(budget: float) -> list[frozenset[str]]:
        backwards = (split(budget)[1].graph for split in graphs)
        found = (graph.find_nodes(op="placeholder") for graph in backwards)
        return [frozenset(node.name for node in nodes) for nodes in found]

    return [list(plan) for _, plan in groupby(budgets, given)]


@contextmanager
def noted(graphs: list[Split]) -> Iterator[None]:
    """Notes the graphs that any backend partitions meanwhile, equal ones once."""
    partition = partitioners.min_cut_rematerialization_partition
    seen: set[str] = set()

    @wraps(partition)
    def note(joint: fx.GraphModule, *args: Any, **options: Any) -> Any:
        values = (
            (node.format_node(), node.meta.get("val")) for node in joint.graph.nodes
        )
        written = repr([*values])
        if written not in seen:
            seen.add(written)
            graphs.append(splits(partition, joint, *args, **options))
        return partition(joint, *args, **options)

    with ExitStack() as stack:
        for module in BACKENDS:
            stack.enter_context(mock.patch.object(module, partition.__name__, note))
        yield


def right(steps: Sequence[Row]) -> list[Row]:
    """Those without wrong gradients: a dropout's mask drawn again costs nothing."""
    return [step for step in steps if step.get("off_budget_1", 0) <= SAME]


def lowest(steps: Sequence[Row], of: str = "peak") -> Row:
    """The right one of the lowest peak."""
    return min(right(steps), key=lambda step: step[of])


def told(budgets: Sequence[float]) -> str:
    """The budgets of one plan, as text."""
    least, most = min(budgets), max(budgets)
    return f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"


def count(steps: Sequence[Row]) -> int:
    """How many budgets were tried."""
    return sum(len(step["budgets"]) for step in steps)


HOW = (
    "Upstream's lowest: over budgets from 0 to 1 in steps of 1/32 or finer, without plans "
    "that give wrong gradients."
)
