"""What the plans of one graph keep and hold, as estimated or as told by compiles.

A :class:`Footprint` describes a plan by four numbers and the storages that it saves.
The plans of a graph that no other beats are its :class:`Menu`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

from ..graph.inputs_outputs import (
    backward_inputs,
    Input,
    Missing,
    output_bytes,
    storages_returned,
    tensors_given,
    without,
)
from ..graph.other_sizes import calls_in
from ..graph.recompute_cost import flops
from .plan_search import (
    compare_with_no_checkpoints,
    model_of,
    of_knapsacks,
    recompute_costs,
    search,
)
from .plans import Plans, undominated


if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    import torch.fx as fx
    from ..graph.joint import Planner
    from ..graph.liveness import Evaluation, Program


__all__ = [
    "Footprint",
    "Menu",
    "Names",
    "Told",
    "menu_of",
    "plan_graph",
]

# The names of nodes, each with its bytes.
Names = Sequence[tuple[str, int]]

# More bytes than any plan holds, though sums of it are still exact in doubles.
_NEVER = 2**44


class Told(NamedTuple):
    """What the two compiled graphs of a joint graph hold, in bytes.

    Args:
        kept: what the forward leaves alive for the backward, beyond inputs and outputs.
        forward: the most that is live while it runs, beyond the inputs.
        backward: the most that is live while the backward runs, including what was
            kept, the tangents and what the forward returned.
    """

    kept: int
    forward: int
    backward: int


class Footprint(NamedTuple):
    """A plan of one graph: bytes beyond the graph's inputs and outputs, and a cost.

    Args:
        kept: what the forward leaves alive.
        forward: the most that is live while the forward runs, with what it returns.
        backward: the most that is live while the backward runs, with what was kept.
        cost: what is computed again, in the estimator's unit.
        outputs: the indices of those outputs of the forward that are saved too.
        storages: what to save, by the graph's model.
    """

    kept: int
    forward: int
    backward: int
    cost: float
    outputs: frozenset[int]
    storages: frozenset[int]

    def holds_no_more(self, other: Footprint) -> bool:
        """Whether it keeps and holds at most as much as another."""
        is_no_more = all(map(operator.le, self[:3], other[:3]))
        return is_no_more and self.outputs <= other.outputs


@dataclass(frozen=True)
class Menu:
    """The plans of a graph that no other beats, by rising cost, for calls of one size.

    ``primals`` and ``tangents`` count the tensors among the joint graph's inputs.
    ``inputs`` has these in that order, then what the forward returns, as the backward
    may read that; ``outputs`` has the bytes of what it returns.  For each compiled
    plan, ``told`` has by how much ``kept``, ``forward`` and ``backward`` exceed the
    estimates, as shares of the backward's estimate, so that other sizes can use them.
    """

    plans: list[Footprint]
    model: Program
    primals: int
    tangents: int
    inputs: dict[int, Input]
    outputs: dict[int, int]
    # What the graph computes without a budget, in the estimator's unit; 0 if unknown.
    work: float
    # The tangents and outputs that its calls lack, which the model leaves out.
    missing: Optional[Missing] = None
    told: dict[int, tuple[float, ...]] = field(default_factory=dict)
    # The same for the backward, by the inputs that it alone holds.
    told_alone: dict[int, Callable[[frozenset[int]], float]] = field(
        default_factory=dict
    )
    # The plans as estimated, where ``plans`` are corrected.
    estimated: list[Footprint] = field(default_factory=list)
    # The factor by which its calls may still grow.
    growth: float = 1.0

    def sized(self, joint: Planner) -> Menu:
        """The same plans for calls of the size that ``joint`` has.

        That may be another trace: storages that have no match in it are not saved.
        """
        model = _model(joint, self.missing)
        (_, made), (_, there) = calls_in(self.model), calls_in(model)
        same = {s: there[place] for place, s in made.items() if place in there}
        chosen = [
            frozenset(same[s] for s in plan.storages if s in same)
            for plan in self.plans
        ]
        plans = [
            Footprint(*_bytes(model, evaluation), plan.cost, plan.outputs, storages)
            for plan, storages, evaluation in zip(
                self.plans, chosen, model.evaluate_all(chosen)
            )
        ]
        inputs, outputs = backward_inputs(joint, model), output_bytes(joint, model)
        return replace(self, plans=plans, model=model, inputs=inputs, outputs=outputs)

    def hold_no_more(self, other: Menu) -> bool:
        """Whether each plan keeps and holds at most as much as the other menu's."""
        return all(map(Footprint.holds_no_more, self.plans, other.plans))

    def at_least(self, other: Menu) -> Menu:
        """The same plans, each with at least the bytes that it has in another menu."""
        plans = []
        for own, its in zip(self.plans, other.plans):
            kept, forward, backward = map(max, own[:3], its[:3])
            plans.append(own._replace(kept=kept, forward=forward, backward=backward))
        return replace(self, plans=plans)

    def record(
        self,
        index: int,
        told: Told,
        told_alone: Callable[[Names], Told],
        only_if_less: bool = False,
    ) -> bool:
        """Record what a compiled plan keeps and holds.

        ``told_alone`` tells it for a backward that alone holds inputs of some names and
        bytes.  With ``only_if_less``, only a lower peak than the one told before is
        recorded.  Returns whether it was.
        """
        plan, beside = self.plans[index], self.model.held_by_caller
        if only_if_less and index in self.told and max(told[1:]) >= self.peak_of(index):
            return False
        size = max(plan.backward, 1)
        held = told._replace(backward=told.backward - beside)
        self.told[index] = tuple(e / size for e in map(operator.sub, held, plan[:3]))

        def error(of: frozenset[int]) -> float:
            alone = [self.inputs[i] for i in sorted(of) if i in self.inputs]
            named = [(each.name, each.nbytes) for each in alone]
            (estimate,) = self._backwards([plan], of)
            return (told_alone(named).backward - beside - estimate) / size

        self.told_alone[index] = functools.cache(error)
        return True

    def corrected(self) -> Menu:
        """The plans as compiled; the others with the error of the nearest of those.

        Errors are added, not multiplied: a kernel's copy of a parameter, for example,
        has the same size whatever else is kept.
        """
        if not self.told:
            return self
        plans = []
        for index, plan in enumerate(self.plans):
            near = _nearest(self.plans, index, self.told)
            size = max(self.plans[near].backward, 1)
            kept, forward, backward = (
                max(nbytes + round(error * size), 0)
                for nbytes, error in zip(plan[:3], self.told[near])
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

    def errs(self, margin: float) -> bool:
        """Whether a plan exceeds its estimates by more than this share of its peak."""
        return any(error > margin for errors in self.told.values() for error in errors)

    def peak_of(self, index: int) -> int:
        """The peak of a plan by itself, corrected by what compiles told."""
        return self._peak(self.corrected().plans[index])

    def holds_more(self, index: int, margin: float) -> bool:
        """Whether a plan, as compiled, exceeds its estimate by more than ``margin``."""
        most = self._peak(self.plans[index]) * (1 + margin)
        return index in self.told and self.peak_of(index) > most

    def _peak(self, plan: Footprint) -> int:
        return max(plan.forward, plan.backward + self.model.held_by_caller)

    def saved_values(self, index: int) -> list[fx.Node]:
        """The nodes that a plan saves."""
        model = self.model
        return model.saved_values(model.evaluate(self.plans[index].storages).saved)

    def place_of_peak(self, index: int) -> str:
        """Where the backward holds most by a plan, operator by operator.

        It is a module below the compiled one, or a function that this calls; empty if
        unknown.
        """
        peaks = self.model.evaluate(self.plans[index].storages).step_peaks
        _, step = max(zip(peaks, self.model.steps), key=operator.itemgetter(0))
        meta = step.operator.node.meta
        modules = [path for path, _ in (meta.get("fwd_nn_module_stack") or {}).values()]
        functions = [name for name, _ in meta.get("fwd_source_fn_stack", ())]
        # The compiled module is a local variable, as in L['self'].layers.0.
        paths = (path.partition("].")[2] for path in modules[-1:])
        return next(filter(None, (*paths, *functions)), "")

    def live(self, what: str, of: Any) -> list[int]:
        """The bytes that a call of the graph holds by each plan; see :class:`Held`."""
        return [math.ceil(nbytes * self.growth) for nbytes in self._live(what, of)]

    def _live(self, what: str, of: Any) -> list[int]:
        if what == "output":
            nbytes = self.outputs.get(of, 0)
            return [nbytes * (of in plan.outputs) for plan in self.plans]
        if what == "backward" and of:
            found = self._backwards(self.plans, of)
            for index in range(len(self.estimated)):
                near = _nearest(self.estimated, index, self.told)
                size = max(self.estimated[near].backward, 1)
                error = self.told_alone[near](of)
                found[index] = max(found[index] + round(error * size), 0)
            return found
        times = of if what == "kept" and of else 1
        return [times * getattr(plan, what) for plan in self.plans]

    def _backwards(self, plans: Sequence[Footprint], of: frozenset[int]) -> list[int]:
        """What the backward of each plan holds if it alone holds these inputs."""
        alone = [self.inputs[index] for index in of if index in self.inputs]
        own = {each.storage: each.nbytes for each in alone}
        model = self.model.releasing(own)
        # Eager code's bytes still count these, as if they were held to the end.
        beside = model.held_by_caller + sum(own.values())
        evaluations = model.evaluate_all([plan.storages for plan in plans])
        returned = own.keys() & self.model.outputs
        return [
            max(each.step_peaks) - beside + model.nbytes_of(returned - each.saved)
            for each in evaluations
        ]


def _nearest(plans: Sequence[Footprint], index: int, told: Iterable[int]) -> int:
    """The compiled plan nearest to another in kept bytes; itself if it was compiled."""
    kept = plans[index].kept
    _, _, nearest = min((i != index, abs(plans[i].kept - kept), i) for i in told)
    return nearest


def plan_graph(
    joint: Planner,
    saved: Sequence[fx.Node],
    is_only: bool = False,
    missing: Optional[Missing] = None,
) -> Menu:
    """The plans of a joint graph, and its model; ``saved`` is what budget 1 saves.

    If ``is_only``, there is just the plan that saves that.  All are for calls that lack
    what is ``missing``.

    They come from the search for a peak, though where calls wait for each other, what a
    call keeps matters more than its own peak.
    Raises as :func:`.graph.reading.read` does.
    """
    model = _model(joint, missing)
    plans = Plans(model, recompute_costs(model, joint))
    if is_only:
        plans.evaluate([frozenset(model.storages(saved))])
    else:
        search(plans, joint, saved)
        if missing is None:
            compare_with_no_checkpoints(joint, plans)
        if model.is_fused:
            # The search does this only for operators.  A waiting call keeps least if
            # everything is recomputed, as in a checkpoint.
            plans.evaluate([frozenset(), *of_knapsacks(joint.items)])
    return menu_of(joint, plans, missing)


def menu_of(
    joint: Planner,
    plans: Plans,
    missing: Optional[Missing] = None,
    keeps_fastest: bool = False,
) -> Menu:
    """The evaluated plans that no other beats.

    With ``keeps_fastest``, budget 1's comes first, even if another beats it.
    """
    model = plans.graph
    found = _footprints(joint, plans)
    best = [found[i] for i in undominated([plan[:4] for plan in found])]
    fastest = found[0].storages
    # Of equally cheap ones, budget 1's first.
    best.sort(key=lambda plan: (plan.cost, plan.storages != fastest))
    if keeps_fastest:
        best = found[:1] + [plan for plan in best if plan.storages != fastest]
    tangents = len(model.tangents)
    primals = len(tensors_given(joint)) - tangents
    inputs, outputs = backward_inputs(joint, model), output_bytes(joint, model)
    is_known = joint.ask.estimator == "flops"
    work = sum(map(flops, joint.joint.nodes)) if is_known else 0
    return Menu(best, model, primals, tangents, inputs, outputs, work, missing)


def _model(joint: Planner, missing: Optional[Missing]) -> Program:
    """The model of a graph whose calls lack what is ``missing``."""
    if missing is None:
        return model_of(joint)
    return model_of(joint, without(missing, joint.model, joint))


def _bytes(model: Program, evaluation: Evaluation) -> tuple[int, int, int]:
    """What a plan keeps, and the most that is live in its forward and its backward."""
    kept = model.nbytes_of(evaluation.saved - model.outputs)
    backward = max(evaluation.step_peaks) - model.held_by_caller
    return kept, evaluation.forward_peak, backward


def _footprints(joint: Planner, plans: Plans) -> list[Footprint]:
    """The footprints of all evaluated plans."""
    model = plans.graph
    # Of several outputs in one storage, the first.
    returned = dict(reversed([*storages_returned(joint, model)]))
    found = []
    for storages, evaluation in plans.evaluations.items():
        saved = evaluation.saved & returned.keys()
        outputs = frozenset(returned[s] for s in saved)
        kept = *_bytes(model, evaluation), plans.costs[storages]
        found.append(Footprint(*kept, outputs, storages))
    return found
