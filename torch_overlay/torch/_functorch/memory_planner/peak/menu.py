"""What the plans of one graph keep and hold, as estimated or as told by compiles.

A :class:`.Footprint` describes a plan.  The plans of a graph that no other beats are its :class:`Menu`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

from ..decision import Head
from ..graph.inputs_outputs import backward_inputs, Input, live_bytes_model, Missing
from ..graph.other_sizes import calls_and_storages
from .footprint import Footprint, footprint_bytes


if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    import torch.fx as fx
    from ..graph.joint import BudgetedGraph
    from ..graph.liveness import Program
    from ..graph.symbols import Values
    from .footprint import Tell


# More bytes than any plan holds, yet few enough for sums to be exact in doubles.
_NEVER = 2**44


class Variant(NamedTuple):
    """A graph with its head in some number of chunks.

    ``inputs`` has what the backward may read, by index: the tensors among the joint
    graph's inputs, then what the forward returns.  ``rows`` are those of the first
    chunk, and ``cost`` is what chunks cost beyond a head in one piece, in the unit of
    the estimator; both are 0 for one piece.
    """

    model: Program
    inputs: dict[int, Input]
    rows: int = 0
    cost: float = 0

    @classmethod
    def of(cls, joint: BudgetedGraph, missing: Optional[Missing]) -> Variant:
        """The variant for calls that lack what is ``missing``."""
        model = live_bytes_model(joint, missing)
        return cls(model, backward_inputs(joint, model))


@dataclass(frozen=True, eq=False)
class Menu:
    """The plans of a graph that no other beats, by rising cost, for calls of one size.

    ``variants`` has the graph by its number of chunks, 1 for the graph as it is.
    ``primals`` counts the tensors among the forward's inputs.  For each compiled plan,
    ``told`` has what tells the bytes of its compiled graphs, and the menu of the trace
    that was compiled.
    """

    plans: list[Footprint]
    variants: dict[int, Variant]
    primals: int
    # What the graph computes without a budget, in FLOP; 0 with estimators other than
    # "flops".
    work: float
    # The tangents and outputs that its calls lack, which the model leaves out.
    missing: Optional[Missing] = None
    told: dict[int, tuple[Tell, Menu]] = field(default_factory=dict)
    # The errors of backwards that alone hold some inputs, once they were needed.
    errors_alone: dict[Any, float] = field(default_factory=dict)
    # The values that the plans are for, with the model's bytes beside a plan's; its own
    # come first.  Empty for those that were traced.
    sizes: tuple[tuple[Values, int], ...] = ()
    # The plans as estimated, if ``plans`` are corrected.
    estimated: list[Footprint] = field(default_factory=list)
    # Why a large head cannot run in chunks.
    why_whole: str = ""
    # The factor by which the bytes of calls may still grow.
    growth: float = 1.0
    # The same plans for other sizes, or in other traces, where some hold more.
    covered: tuple[Menu, ...] = ()

    @property
    def model(self) -> Program:
        """The graph as it is, with its head in one piece."""
        return self.variants[1].model

    def no_larger_than(self, plan: Footprint) -> Footprint:
        """The first plan that costs no more than ``plan`` and never holds more, or it."""
        found = [
            each
            for each in self.plans
            if each.cost <= plan.cost and each.holds_no_more(plan)
        ]
        # Often, nobody else holds what a backward is given.
        given = frozenset(i for i in self.variants[1].inputs if i >= self.primals)
        most, *bytes_given = self._backward_bytes([plan, *found], given)
        return next((p for p, held in zip(found, bytes_given) if held <= most), plan)

    def at_sizes_of(self, joint: BudgetedGraph) -> Menu:
        """The same plans for calls of the size that ``joint`` has.

        ``joint`` may be another trace.  Storages without a match in it are not saved.
        If it has no variant of as many chunks as a plan wants, the plan gets fewer.
        """
        variants = {
            n: Variant.of(each, self.missing)._replace(rows=own.rows, cost=own.cost)
            for n, each in joint.variants.items()
            if (own := self.variants.get(n))
        }
        there = {n: calls_and_storages(each.model)[1] for n, each in variants.items()}
        made = {
            n: calls_and_storages(each.model)[1] for n, each in self.variants.items()
        }

        @functools.cache
        def same(chunks: int, as_chunks: int) -> dict[int, int]:
            """For storages of a variant here, those that the same calls make there."""
            places = there[as_chunks]
            calls = made[chunks].items()
            return {s: places[place] for place, s in calls if place in places}

        plans = [*self.plans]
        for chunks, (model, *_) in variants.items():
            here = {
                at: frozenset(match[s] for s in plan.storages if s in match)
                for at, plan in enumerate(self.plans)
                if chunks == max(n for n in variants if n <= plan.chunks)
                for match in [same(plan.chunks, chunks)]
            }
            evaluated = model.evaluate_all([*here.values()]) if here else []
            for (at, storages), each in zip(here.items(), evaluated):
                plan = plans[at]
                kept = (*footprint_bytes(model, each), plan.cost, plan.outputs)
                plans[at] = Footprint(*kept, storages, chunks)
        values = getattr(joint.as_int, "values", ())
        sizes = ((values, variants[1].model.held_by_caller),) if values else ()
        return replace(self, plans=plans, variants=variants, sizes=sizes, covered=())

    def plans_hold_no_more(self, other: Menu) -> bool:
        """Whether each plan keeps and holds at most as much as in another menu."""
        return all(map(Footprint.holds_no_more, self.plans, other.plans))

    def with_larger_footprints(self, other: Menu) -> Menu:
        """The same plans, each with at least the bytes that it has in another menu."""
        sizes = tuple(dict.fromkeys(self.sizes + other.sizes))
        plans = []
        for own, its in zip(self.plans, other.plans):
            kept, forward, backward = map(max, own[:3], its[:3])
            plans.append(own._replace(kept=kept, forward=forward, backward=backward))
        more = () if other.plans_hold_no_more(self) else (other,)
        return replace(self, plans=plans, sizes=sizes, covered=self.covered + more)

    def record_told(self, index: int, tell: Tell, only_if_less: bool = False) -> bool:
        """Record what a compiled plan keeps and holds; returns whether it did so.

        With ``only_if_less``, a plan that was told before is recorded again only if its
        peak is lower now.
        """
        most = max(tell()[1:])
        if only_if_less and index in self.told and most >= self.peak_of(index):
            return False
        self.told[index] = tell, self
        return True

    def _told_at(self, index: int) -> tuple[Tell, Menu]:
        """What a plan's compile tells, and the menu whose sizes it can tell of.

        That is this one if its sizes are values of the symbols in what was compiled,
        else that of the trace.
        """
        tell, recorded = self.told[index]
        symbols = tell.symbols
        known = (symbols <= dict(values).keys() for values, _ in self.sizes)
        return tell, self if symbols and self.sizes and all(known) else recorded

    def _errors(self, index: int) -> list[float]:
        """The errors of a compiled plan's ``kept``, ``forward`` and ``backward``.

        That is the told bytes minus the estimated ones, as shares of the estimated
        ``backward``, so that they also apply to a trace that was not compiled.
        """
        tell, at = self._told_at(index)
        plan = (at.estimated or at.plans)[index]
        held = [
            told._replace(backward=told.backward - beside)
            for values, beside in at._sizes_of(plan)
            for told in [tell(values)]
        ]
        most = map(max, zip(*held))
        return [
            (nbytes - own) / max(plan.backward, 1) for nbytes, own in zip(most, plan)
        ]

    def _error_alone(self, index: int, of: frozenset[int]) -> float:
        """The error of ``backward`` if it alone holds these inputs."""
        tell, at = self._told_at(index)
        key = at.sizes, index, tell, of
        if key not in self.errors_alone:
            plan = (at.estimated or at.plans)[index]
            inputs = at.variants[plan.chunks].inputs
            values, beside = at._sizes_of(plan)[0]
            alone = [inputs[i] for i in sorted(of) if i in inputs]
            told = tell(values, tuple((each.name, each.nbytes) for each in alone))
            (estimate,) = at._backward_bytes([plan], of)
            error = told.backward - beside - estimate
            self.errors_alone[key] = error / max(plan.backward, 1)
        return self.errors_alone[key]

    def _sizes_of(self, plan: Footprint) -> tuple[tuple[Values, int], ...]:
        return self.sizes or (((), self._model_of(plan).held_by_caller),)

    def corrected(self) -> Menu:
        """The plans as told; others with the error of the nearest compiled plan.

        Errors are added, not multiplied, as some have the same size whatever is kept: a
        kernel's copy of a parameter, for example.
        """
        if not self.told:
            return self
        plans, errors = [], {index: self._errors(index) for index in self.told}
        for index, plan in enumerate(self.plans):
            near = _most_similar_compiled(self.plans, index, self.told)
            size = max(self.plans[near].backward, 1)
            kept, forward, backward = (
                max(nbytes + round(error * size), 0)
                for nbytes, error in zip(plan[:3], errors[near])
            )
            plan = plan._replace(kept=kept, forward=forward, backward=backward)
            plans.append(plan)
        return replace(self, plans=plans, estimated=self.plans)

    def restricted_to(self, wanted: Container[int]) -> Menu:
        """The same, with all but the ``wanted`` plans too large to choose."""
        plans = [
            plan if i in wanted else plan._replace(kept=_NEVER, forward=_NEVER)
            for i, plan in enumerate(self.plans)
        ]
        return replace(self, plans=plans)

    def underestimates(self, margin: float) -> bool:
        """Whether any error in ``told`` is above this share."""
        return any(
            error > margin for index in self.told for error in self._errors(index)
        )

    def peak_of(self, index: int) -> int:
        """The peak in bytes of a plan by itself, corrected by what compiles told."""
        return self._peak_of_plan(self.corrected().plans[index])

    def holds_more(self, index: int, margin: float) -> bool:
        """Whether a plan, as compiled, exceeds its estimate by more than ``margin``."""
        most = self._peak_of_plan(self.plans[index]) * (1 + margin)
        return index in self.told and self.peak_of(index) > most

    def _peak_of_plan(self, plan: Footprint) -> int:
        return max(plan.forward, plan.backward + self._model_of(plan).held_by_caller)

    def _model_of(self, plan: Footprint) -> Program:
        return self.variants[plan.chunks].model

    def saved_values(self, index: int) -> list[fx.Node]:
        """The nodes that a plan saves."""
        plan = self.plans[index]
        model = self._model_of(plan)
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

    def bytes_held(self, what: str, of: Any) -> list[int]:
        """The bytes that a call of the graph holds by each plan; see :class:`.Held`."""
        return [
            math.ceil(nbytes * self.growth) for nbytes in self._bytes_held(what, of)
        ]

    def _bytes_held(self, what: str, of: Any) -> list[int]:
        if what == "output":
            output = self.variants[1].inputs.get(
                self.primals + len(self.model.tangents) + of
            )
            nbytes = output.nbytes if output is not None else 0
            return [nbytes * (of in plan.outputs) for plan in self.plans]
        if what == "backward" and of:
            found = self._backward_alone(of)
            for index in range(len(self.estimated)):
                near = _most_similar_compiled(self.estimated, index, self.told)
                size = max(self.estimated[near].backward, 1)
                error = self._error_alone(near, of)
                found[index] = max(found[index] + round(error * size), 0)
            return found
        times = of if what == "kept" and of else 1
        return [times * getattr(plan, what) for plan in self.plans]

    def _backward_alone(self, of: frozenset[int]) -> list[int]:
        """The most bytes that each plan's backward holds, of all sizes covered."""
        found = self._backward_bytes(self.plans, of)
        for other in self.covered:
            found = [*map(max, found, other._backward_alone(of))]
        return found

    def _backward_bytes(
        self, plans: Sequence[Footprint], of: frozenset[int]
    ) -> list[int]:
        """The bytes that each plan's backward holds if it alone holds these inputs."""
        found = [0] * len(plans)
        for chunks, (model, inputs, *_) in self.variants.items():
            here = [at for at, plan in enumerate(plans) if plan.chunks == chunks]
            if not here:
                continue
            alone = [inputs[index] for index in of if index in inputs]
            own = {each.storage: each.nbytes for each in alone}
            releasing = model.releasing(own)
            # The bytes of eager code include these inputs, as if held to the end.
            beside = releasing.held_by_caller + sum(own.values())
            returned = own.keys() & model.outputs
            evaluations = releasing.evaluate_all([plans[at].storages for at in here])
            for at, each in zip(here, evaluations):
                found[at] = max(each.step_peaks) - beside
                found[at] += releasing.nbytes_of(returned - each.saved)
        return found


def _most_similar_compiled(
    plans: Sequence[Footprint], index: int, told: Iterable[int]
) -> int:
    """The compiled plan nearest to another one, which is itself if it was compiled.

    Those with as many chunks come first, then those that keep about as many bytes.
    """
    plan = plans[index]

    def distance(i: int) -> tuple[bool, bool, int, int]:
        other = plans[i]
        is_other = other.chunks != plan.chunks
        return i != index, is_other, abs(other.kept - plan.kept), i

    return min(told, key=distance)
