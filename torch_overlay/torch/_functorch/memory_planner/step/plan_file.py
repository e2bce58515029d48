"""The file of a StepBudget: what it learned and planned, for later processes.

Another process that runs the same program has its first step run on the stored plans,
and so compiles no plans that are replaced after one step.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from ..._activation_checkpointing.random_ops import subgraphs
from ..decision import Head
from ..graph.inputs_outputs import Missing
from ..peak.curve import Held
from ..peak.footprint import Footprint
from ..peak.menu import Menu
from ..peak.sized_plans import SizedPlans, Variant
from ..report.step_summary import GraphUse, Moment, StepSummary
from .calls import State
from .plan_step import Present
from .timeline import Bytes


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..graph.joint import BudgetedGraph
    from .graphs import Graph


_FORMAT = "plan of a StepBudget"
_VERSION = 5


class StoredGraph(NamedTuple):
    """The plans of a graph, and which of them its calls run by.

    Args:
        key: identifies the joint graph, see :func:`key_of`.
        menu: the plans, without what has to be read from the graph.
        heads: by number of chunks, the rows and the cost of the :class:`.Variant`.
        lean: the plan of calls that none was chosen for.
        choice: the plan of each slot.
        guarded: the plans that are compiled without fusions that raise the peak.
    """

    key: str
    menu: Menu
    heads: dict[int, tuple[int, float]]
    lean: int
    choice: tuple[int, ...]
    guarded: frozenset[int]

    @classmethod
    def of(cls, graph: Graph, choice: tuple[int, ...]) -> StoredGraph:
        plans, guarded = graph.plans, frozenset(graph.guarded)
        heads = {n: (each.rows, each.cost) for n, each in plans.variants.items()}
        menu = replace(plans, sizes=(), told={})
        return cls(graph.key, menu, heads, graph.lean, choice, guarded)

    def plans_of(self, joint: BudgetedGraph) -> Menu:
        """The plans for the joint graph with this key."""
        missing = self.menu.missing
        variants = {
            n: Variant.of(joint.variants[n], missing)._replace(rows=rows, cost=cost)
            for n, (rows, cost) in self.heads.items()
        }
        sized = SizedPlans(self.menu.plans, variants, joint.joint)
        return replace(self.menu, sizes=(sized,))


@dataclass
class StoredStep:
    """What a StepBudget learned and planned; ``graphs`` by number.

    ``programs`` are the figures of each :class:`.StepProgram`.
    """

    programs: list[tuple[Any, ...]]
    present: Present
    summary: StepSummary
    spare: int
    graphs: dict[int, StoredGraph]

    def is_whole(self) -> bool:
        """Whether each field has what it is to have, and each called graph has plans.

        Raises TypeError or IndexError for some that have not.
        """
        kinds = list, Present, StepSummary, int, dict
        are_right = all(map(isinstance, vars(self).values(), kinds))
        return are_right and all({*each[2]} <= {*self.graphs} for each in self.programs)


class PlanFile:
    """A file for the plans that a StepBudget makes for this ``bound``.

    Raises FileNotFoundError if its folder does not exist, and ValueError if the file
    has other content, which is never overwritten.
    """

    def __init__(self, path: str, bound: Mapping[str, Any]) -> None:
        self.path = Path(path).resolve()
        self._origin = {
            "version": _VERSION,
            "bound": {**bound},
            "torch": torch.__version__,
        }
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"no such folder: {self.path.parent}")
        if self.path.exists() and self._content() is None:
            raise ValueError(f"{self.path} exists and is not the file of a StepBudget")

    def read(self) -> tuple[Optional[StoredStep], str]:
        """The stored step and "", or None and why there is none: "" without a file."""
        content = self._content() if self.path.exists() else None
        if content is None:
            return None, ""
        for what, value in self._origin.items():
            if content.get(what) != value:
                made = content.get(what)
                return None, f"it was made with {what} {made}, not {value}"
        try:
            step = _decoded(content["step"])
            is_whole = isinstance(step, StoredStep) and step.is_whole()
        except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
            return None, f"it is damaged: {type(error).__name__}: {error}"
        return (step, "") if is_whole else (None, "it is damaged: it has no step")

    def store(
        self,
        known: tuple[list[tuple[Any, ...]], Present, StepSummary, int],
        graphs: Mapping[int, Graph],
        choices: Mapping[int, tuple[int, ...]],
    ) -> None:
        """Store what is ``known`` and planned of a step, unless its sizes vary."""
        if not any(graph.sizes_vary for graph in graphs.values()):
            stored = {n: StoredGraph.of(each, choices[n]) for n, each in graphs.items()}
            self._write(StoredStep(*known, stored))

    def _write(self, step: StoredStep) -> None:
        """Replace the file atomically, as several ranks may share it."""
        content = {"format": _FORMAT, **self._origin, "step": _encoded(step)}
        # Unlike those of tempfile, it may be read by other users.
        new = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        try:
            new.write_text(json.dumps(content))
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)

    def _content(self) -> Optional[dict[str, Any]]:
        try:
            found = json.loads(self.path.read_text())
        except (ValueError, IsADirectoryError, RecursionError):
            return None
        is_ours = isinstance(found, dict) and found.get("format") == _FORMAT
        return found if is_ours else None


def key_of(joint: BudgetedGraph) -> str:
    """A digest of what a joint graph computes, on which sizes, and how it is planned.

    It is the same in every process.  O(nodes).
    """
    digest = hashlib.sha256()
    for chunks, each in joint.variants.items():
        told = chunks, each.fused, each.budget, each.num_fwd_outputs, each.ask.estimator
        digest.update(repr(told).encode())
        for node in _nodes_with_bodies(each.joint):
            digest.update(
                f"{node.format_node()} {[*_tensors_of_node(node)]}\n".encode()
            )
    return digest.hexdigest()


def _nodes_with_bodies(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """The graph's nodes, each followed by those of the graphs that it runs."""
    for node in graph.nodes:
        yield node
        for body in subgraphs(node):
            yield from _nodes_with_bodies(body)


def _tensors_of_node(node: torch.fx.Node) -> Iterator[str]:
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            yield f"{value.dtype} {value.device} {tuple(value.shape)}"


# ------------------------------------------------------------------------- JSON

_CLASSES: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(Bytes, Footprint, GraphUse, Head, Held, Menu, Missing, Moment, Present),
        *(State, StepSummary, StoredGraph, StoredStep),
    )
}
_CONTAINERS: dict[str, Any] = {
    each.__name__: each for each in (list, tuple, set, frozenset)
}


def _encoded(value: Any) -> Any:
    """As JSON: numbers, text and None as they are, all else as [type name, items]."""
    kind: Any = type(value)
    if kind.__name__ in _CLASSES:
        items = [getattr(value, name) for name in kind.__match_args__]
    elif kind is dict:
        items = [*value.items()]
    elif kind in (set, frozenset):
        items = sorted(value, key=repr)
    elif kind in (list, tuple):
        items = value
    else:
        return value
    return [kind.__name__, [*map(_encoded, items)]]


def _decoded(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    name, items = value[0], [*map(_decoded, value[1])]
    if name in _CLASSES:
        return _CLASSES[name](*items)
    return dict(items) if name == "dict" else _CONTAINERS[name](items)
