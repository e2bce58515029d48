"""The graphs that steps call, and their plans."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from typing import Any, Callable, Optional, TYPE_CHECKING

from ..graph.symbols import has_symbolic_sizes
from ..graph.workspaces import largest_workspace
from ..peak.footprint import hold_no_more


if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..graph.inputs_outputs import Missing
    from ..graph.joint import BudgetedGraph
    from ..peak.menu import Menu
    from .compiled_graph import CompiledGraph


class Graph:
    """A graph that a step calls, and its plans, for the largest calls seen so far.

    It may be compiled several times, for other sizes: ``current`` returns the compiled
    graph of the largest call in the last step.  ``number`` is AOTAutograd's for the
    first of these, ``key`` identifies that one in other processes, and
    ``structural_key`` is what all have in common.  ``scale`` is how many times as large
    as the first call the largest one is, and ``lean`` the index of the plan of calls
    until one is chosen.  Plans in ``guarded`` hold less if they are compiled without
    fusions that raise the peak.
    """

    lean: int

    def __init__(
        self,
        name: str,
        number: int,
        key: str,
        structural_key: Any,
        largest: BudgetedGraph,
        plans: Menu,
    ) -> None:
        self.name, self.number, self.key = name, number, key
        self.structural_key = structural_key
        self.largest, self.plans = largest, plans
        self.guarded: set[int] = set()
        self.scale = 1.0
        # Smaller calls in the same step as the largest, by their share of that: the
        # compiled graph, its sizes, and their scale.
        self.smaller: dict[float, tuple[Any, tuple[int, ...], float]] = {}
        self._menus: dict[float, tuple[Menu, Menu]] = {}
        self.current: Callable[[], Optional[CompiledGraph]] = lambda: None

    @functools.cached_property
    def workspace(self) -> int:
        """The most bytes that one of its kernels takes for itself on a CPU."""
        return largest_workspace(self.largest.joint.nodes)

    @property
    def sizes_vary(self) -> bool:
        """Whether its calls have other sizes than the first, or may have."""
        first, *others = self.plans.sizes
        is_largest = all(hold_no_more(each.plans, first.plans) for each in others)
        are_several = self.scale != 1.0 or bool(self.smaller) or not is_largest
        return are_several or has_symbolic_sizes(self.largest.joint)

    def cover(self, scale: float, joint: BudgetedGraph, plans: Menu) -> bool:
        """Make the plans cover calls of this size, too; return whether they hold more.

        They may do so only as compiled, where this is another trace.
        """
        new, old = plans.corrected().plans, self.plans.corrected().plans
        is_more = not hold_no_more(new, old)
        ((sized,), known) = plans.sizes, self.plans.sizes
        is_new = all(each.trace is not sized.trace for each in known)
        if is_more and scale > self.scale:
            self.scale, self.largest = scale, joint
            self.plans, plans = plans, self.plans
        # Compiles of a new trace may yet tell more.
        if is_more or is_new:
            self.plans = self.plans.with_sizes_of(plans)
        return is_more

    def menu(self, growth: float = 1.0) -> Menu:
        """The plans, for the largest calls and for smaller ones in the same step.

        ``growth`` is the factor by which all may still grow.
        """
        smaller = {}
        for size, (reference, sizes, scale) in self.smaller.items():
            compiled = reference()
            # What is not there any more counts as the largest.
            if compiled is None:
                continue
            compiled.adopt_plans_of_graph()
            plans, menu = self._menus.get(size, (None, self.plans))
            if plans is not compiled.plans:
                menu = compiled.plans_at(sizes)
                self._menus[size] = compiled.plans, menu
            grown = max(size * self.scale / scale, 1.0)
            smaller[size] = replace(menu, growth=growth * grown)
        return replace(self.plans, growth=growth, smaller=smaller)

    def expect_missing(self, missing: Optional[Missing]) -> None:
        """Make plans for calls that miss this, unless they are for those already."""
        compiled = self.current()
        if compiled is not None and missing != self.plans.missing:
            plans, self.lean = compiled.traced.plans_for(missing)
            self.plans, self.guarded = plans.at_sizes_of(self.largest), set()


class Graphs(weakref.WeakValueDictionary[int, Graph]):
    """Graphs by number; they die with the models that they were compiled for."""

    def of_same_structure(self, structural_key: Any) -> Optional[Graph]:
        """The graph with this key, compiled for another size; None if there is none."""
        if structural_key is None:
            return None
        same = (g for g in self.values() if g.structural_key == structural_key)
        return next(same, None)

    def alive(self, numbers: Iterable[int]) -> dict[int, Graph]:
        """Those of the graphs with these numbers that are still there."""
        return {number: self[number] for number in numbers if number in self}
