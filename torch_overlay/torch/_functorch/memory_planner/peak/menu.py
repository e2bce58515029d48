"""What the plans of one graph keep and hold, as estimated or as told by compiles.

A :class:`.Footprint` describes a plan.  The plans of a graph that no other beats are its
:class:`Menu`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

from ..decision import Head
from .footprint import Footprint, hold_no_more


if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    import torch.fx as fx
    from ..graph.inputs_outputs import Missing
    from ..graph.joint import BudgetedGraph
    from ..graph.liveness import Program
    from .footprint import Tell
    from .sized_plans import SizedPlans, Variant


# More bytes than any plan holds, yet few enough for sums to be exact in doubles.
_NEVER = 2**44


class _CompiledPlan(NamedTuple):
    """A plan that was compiled, at one of the sizes of its trace."""

    at: SizedPlans
    plan: int
    tell: Tell


@dataclass(frozen=True, eq=False)
class Menu:
    """The plans of a graph that no other beats, by rising cost, for calls of any size.

    ``plans`` has the most that each keeps and holds at any of the ``sizes``, which begin
    with the largest; its ``storages`` are those of that one.  ``primals`` counts the
    tensors among the forward's inputs.
    """

    plans: list[Footprint]
    sizes: tuple[SizedPlans, ...]
    primals: int
    # What the graph computes without a budget, in FLOP; 0 with estimators other than
    # "flops".
    work: float
    # The tangents and outputs that its calls lack, which the model leaves out.
    missing: Optional[Missing] = None
    # By trace and plan, what tells the bytes of the compiled graphs.
    told: dict[tuple[Any, int], Tell] = field(default_factory=dict)
    # Whether ``plans`` are as told, and not as estimated.
    is_corrected: bool = False
    # Why a large head cannot run in chunks.
    why_whole: str = ""
    # The factor by which the bytes of calls may still grow.
    growth: float = 1.0
    # The same plans for smaller calls in the same step, by their share of the largest.
    smaller: Mapping[float, Menu] = field(default_factory=dict)

    @property
    def variants(self) -> dict[int, Variant]:
        """The graph by its number of chunks, at its largest size."""
        return self.sizes[0].variants

    @property
    def model(self) -> Program:
        """The graph as it is, with its head in one piece."""
        return self.variants[1].model

    @property
    def compiled(self) -> set[int]:
        """The plans of which a compile told."""
        return {each.plan for each in self._compiled()}

    def at_sizes_of(self, joint: BudgetedGraph) -> Menu:
        """The same plans for calls of the size that ``joint`` has."""
        sized = self.sizes[0].for_trace(joint, self.missing)
        return replace(self, plans=sized.plans, sizes=(sized,))

    def with_sizes_of(self, other: Menu) -> Menu:
        """The same plans, for the sizes of another menu as well."""
        sizes = [*self.sizes]
        for new in other.sizes:
            same = (each.plans for each in sizes if each.trace is new.trace)
            # What compiles tell of other traces may differ more than estimates do.
            if not any(hold_no_more(new.plans, each) for each in same):
                sizes.append(new)
        plans = _largest([self.plans, other.plans])
        return replace(self, plans=plans, sizes=(*sizes,))

    def record_told(self, index: int, tell: Tell, only_if_less: bool = False) -> bool:
        """Record what a compiled plan keeps and holds; returns whether it did so.

        The menu has to be that of the trace.  With ``only_if_less``, a plan that was
        told of before, in this trace, is recorded again only if its peak is lower now.
        """
        most, (sized,) = max(tell()[1:]), self.sizes
        if only_if_less and index in self.compiled and most >= self.peak_of(index):
            return False
        self.told[sized.trace, index] = tell
        return True

    def _compiled(self) -> list[_CompiledPlan]:
        return [
            _CompiledPlan(at, plan, tell)
            for at in self.sizes
            for (trace, plan), tell in self.told.items()
            if trace is at.trace
        ]

    def corrected(self) -> Menu:
        """The plans as told; others with the error of the nearest compiled plan.

        Errors are added, not multiplied, as some have the same size whatever is kept: a
        kernel's copy of a parameter, for example.
        """
        compiled = self._compiled()
        smaller = {size: each.corrected() for size, each in self.smaller.items()}
        if not compiled:
            return replace(self, smaller=smaller)
        errors = {each: each.at.errors(each.plan, each.tell) for each in compiled}
        corrected = []
        for at in self.sizes:
            plans = []
            for index, plan in enumerate(at.plans):
                near = _nearest(compiled, at, index)
                size = max(at.plans[near.plan].backward, 1)
                kept, forward, backward = (
                    max(nbytes + round(error * size), 0)
                    for nbytes, error in zip(plan[:3], errors[near])
                )
                plan = plan._replace(kept=kept, forward=forward, backward=backward)
                plans.append(plan)
            corrected.append(plans)
        most = _largest(corrected)
        return replace(self, plans=most, is_corrected=True, smaller=smaller)

    def restricted_to(self, wanted: Container[int]) -> Menu:
        """The same, with all but the ``wanted`` plans too large to choose."""
        plans = [
            plan if i in wanted else plan._replace(kept=_NEVER, forward=_NEVER)
            for i, plan in enumerate(self.plans)
        ]
        menus = self.smaller.items()
        smaller = {size: each.restricted_to(wanted) for size, each in menus}
        return replace(self, plans=plans, smaller=smaller)

    def underestimates(self, margin: float) -> bool:
        """Whether some compile told more than the estimate by more than this share."""
        return any(
            error > margin
            for each in self._compiled()
            for error in each.at.errors(each.plan, each.tell)
        )

    def peak_of(self, index: int) -> int:
        """The peak in bytes of a plan by itself, corrected by what compiles told."""
        return self._peak_of_plan(self.corrected().plans[index])

    def holds_more(self, index: int, margin: float) -> bool:
        """Whether a plan, as compiled, exceeds its estimate by more than ``margin``."""
        most = self._peak_of_plan(self.plans[index]) * (1 + margin)
        return index in self.compiled and self.peak_of(index) > most

    def _peak_of_plan(self, plan: Footprint) -> int:
        beside = self.sizes[0].model_of(plan).held_by_caller
        return max(plan.forward, plan.backward + beside)

    def saved_values(self, index: int) -> list[fx.Node]:
        """The nodes that a plan saves."""
        plan = self.plans[index]
        model = self.sizes[0].model_of(plan)
        return model.saved_values(model.evaluate(plan.storages).saved)

    def head(self, index: int) -> Optional[Head]:
        """How the head runs; None if in one piece, unless a large one has to."""
        chunks, menu = self.plans[index].chunks, self.corrected()
        if chunks == 1:
            return Head(1, why_whole=self.why_whole) if self.why_whole else None
        in_one = min(
            menu._peak_of_plan(plan) for plan in menu.plans if plan.chunks == 1
        )
        of = self.variants[chunks]
        more_work = of.cost / self.work if self.work else 0.0
        return Head(
            chunks, of.rows, in_one - menu._peak_of_plan(menu.plans[index]), more_work
        )

    def bytes_held(self, what: str, of: Any, size: float = 1.0) -> list[int]:
        """The bytes that a call of the graph holds by each plan; see :class:`.Held`."""
        menu = self.smaller.get(size, self)
        held = menu._bytes_held(what, of)
        return [math.ceil(nbytes * menu.growth) for nbytes in held]

    def _bytes_held(self, what: str, of: Any) -> list[int]:
        if what == "output":
            output = self.variants[1].inputs.get(
                self.primals + len(self.model.tangents) + of
            )
            nbytes = output.nbytes if output is not None else 0
            return [nbytes * (of in plan.outputs) for plan in self.plans]
        if what == "retained" or of:
            found = self._backward_alone(of, is_retained=what == "retained")
            return [*map(max, zip(*found))]
        return [getattr(plan, what) for plan in self.plans]

    def _backward_alone(self, of: frozenset[int], is_retained: bool) -> list[list[int]]:
        """By size and plan, the bytes of a backward that alone holds these inputs."""
        compiled = self._compiled() if self.is_corrected else []
        found, largest = [], self.sizes[0]
        for at in self.sizes:
            # These inputs are smaller there, but eager code's bytes include the largest.
            if at is not largest and hold_no_more(at.plans, largest.plans):
                continue
            held = at.backward_bytes(at.plans, of, is_retained)
            for index in range(len(held) if compiled else 0):
                near = _nearest(compiled, at, index)
                size = max(at.plans[near.plan].backward, 1)
                error = near.at.error_alone(near.plan, near.tell, of, is_retained)
                held[index] = max(held[index] + round(error * size), 0)
            found.append(held)
        return found


def _nearest(
    compiled: Sequence[_CompiledPlan], at: SizedPlans, index: int
) -> _CompiledPlan:
    """The compiled plan nearest to another one, which is itself if it was compiled.

    Those with as many chunks come first, then those that keep about as many bytes; of
    a plan's compiles, that of the same size, or of its trace.
    """
    plan = at.plans[index]

    def distance(other: _CompiledPlan) -> tuple[Any, ...]:
        own = at.plans[other.plan]
        is_other = own.chunks != plan.chunks
        near = other.plan != index, is_other, abs(own.kept - plan.kept), other.plan
        return *near, other.at is not at, other.at.trace is not at.trace

    return min(compiled, key=distance)


def _largest(menus: Sequence[Sequence[Footprint]]) -> list[Footprint]:
    """The plans of the first of some lists, each with the most bytes that any has."""
    found = []
    for plans in zip(*menus):
        kept, forward, backward = map(max, zip(*(plan[:3] for plan in plans)))
        most = plans[0]._replace(kept=kept, forward=forward, backward=backward)
        found.append(most)
    return found
