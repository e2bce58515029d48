"""What the plans of a graph keep and hold in calls of one size, as estimated."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

from ..graph.inputs_outputs import backward_inputs, Input, live_bytes_model, Missing
from ..graph.other_sizes import calls_and_storages
from .footprint import Footprint, footprint_bytes


if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.fx as fx
    from ..graph.joint import BudgetedGraph
    from ..graph.liveness import Program
    from ..graph.symbols import Values
    from .footprint import Tell


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
class SizedPlans:
    """The plans of a graph as estimated for calls of one size, in one of its traces.

    Args:
        plans: what each keeps and holds; ``storages`` are numbers of this trace.
        variants: the graph by its number of chunks, 1 for the graph as it is.
        trace: the joint graph, which all sizes of a trace share.
        values: those of the trace's symbols, none for the sizes that were traced.
    """

    plans: list[Footprint]
    variants: dict[int, Variant]
    trace: Optional[fx.Graph]
    values: Values = ()
    # The results of `error_alone`, by its arguments.
    _errors_alone: dict[Any, float] = field(default_factory=dict)

    def model_of(self, plan: Footprint) -> Program:
        return self.variants[plan.chunks].model

    def no_larger_than(self, plan: Footprint, primals: int) -> Footprint:
        """The first plan that costs no more than ``plan`` and never holds more, or it.

        The first ``primals`` inputs of the backward are those of the graph.
        """
        found = [
            each
            for each in self.plans
            if each.cost <= plan.cost and each.holds_no_more(plan)
        ]
        # Often, nobody else holds what a backward is given.
        given = frozenset(i for i in self.variants[1].inputs if i >= primals)
        most, *bytes_given = self.backward_bytes([plan, *found], given, False)
        return next((p for p, held in zip(found, bytes_given) if held <= most), plan)

    def for_trace(self, joint: BudgetedGraph, missing: Optional[Missing]) -> SizedPlans:
        """The same plans for the size that ``joint`` has, which may be another trace.

        Storages without a match in it are not saved.  If it has no variant of as many
        chunks as a plan wants, the plan gets fewer.
        """
        variants = {
            n: Variant.of(each, missing)._replace(rows=own.rows, cost=own.cost)
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
        return SizedPlans(plans, variants, joint.joint, values)

    def errors(self, index: int, tell: Tell) -> list[float]:
        """The errors of a plan's ``kept``, ``forward`` and ``backward``.

        That is the told bytes minus the estimated ones, as shares of the estimated
        ``backward``, so that they also apply to a plan that was not compiled.
        """
        plan, told = self.plans[index], tell(self.values)
        backward = told.backward - self.model_of(plan).held_by_caller
        held = told.kept, told.forward, backward
        return [
            (nbytes - own) / max(plan.backward, 1)
            for nbytes, own in zip(held, plan[:3])
        ]

    def error_alone(self, *key: Any) -> float:
        """The error of :meth:`backward_bytes` for the plan of an index.

        The arguments are the index, what tells of the plan, and those of that method.
        """
        if key not in self._errors_alone:
            self._errors_alone[key] = self._error_alone(*key)
        return self._errors_alone[key]

    def _error_alone(
        self, index: int, tell: Tell, of: frozenset[int], is_retained: bool
    ) -> float:
        plan = self.plans[index]
        inputs = self.variants[plan.chunks].inputs
        alone = [inputs[i] for i in sorted(of) if i in inputs]
        names = tuple((each.name, each.nbytes) for each in alone)
        told = tell(self.values, names, is_retained)
        (estimate,) = self.backward_bytes([plan], of, is_retained)
        error = told.backward - self.model_of(plan).held_by_caller - estimate
        return error / max(plan.backward, 1)

    def backward_bytes(
        self, plans: Sequence[Footprint], of: frozenset[int], is_retained: bool
    ) -> list[int]:
        """The bytes that each plan's backward holds if it alone holds these inputs.

        If its graph is retained, what was kept is live until the backward ends.
        """
        found = [0] * len(plans)
        for chunks, (model, inputs, *_) in self.variants.items():
            here = [at for at, plan in enumerate(plans) if plan.chunks == chunks]
            if not here:
                continue
            alone = [inputs[index] for index in of if index in inputs]
            own = {each.storage: each.nbytes for each in alone}
            releasing = model.releasing(own, is_retained)
            # The bytes of eager code include these inputs, as if held to the end.
            beside = releasing.held_by_caller + sum(own.values())
            returned = own.keys() & model.outputs
            evaluations = releasing.evaluate_all([plans[at].storages for at in here])
            for at, each in zip(here, evaluations):
                found[at] = max(each.step_peaks) - beside
                found[at] += releasing.nbytes_of(returned - each.saved)
        return found
