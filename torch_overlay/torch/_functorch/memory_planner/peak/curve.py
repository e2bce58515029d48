"""Chooses plans for the graphs of a step, by what each keeps while others run.

A step is a sequence of events F(c) and B(c): the forward and the backward of a call c.
The bytes that are live at any moment are

    what eager code holds + what is kept by each call whose backward is still to come
    + what the running graph has beyond that

so a :class:`.Footprint` describes a plan of a graph, and :data:`Moments` a step.
:class:`Curve` chooses plans so that no moment exceeds a peak and little is recomputed.
A graph by itself is a step of one call.

Calls of one graph may get two plans.  A call's *slot* is the smallest number that no
other call waiting for its backward has.  Calls in slots below some number get one plan,
all others the second.  That uses the room that one plan for all would leave, and lets
the calls whose backward comes first keep what they are about to need anyway.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .plans import undominated


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .footprint import Footprint
    from .menu import Menu


# The most plans of one graph to combine in pairs, and about how many slots at which to
# change from one to the other.
_COMBINED, _SPLITS = 16, 32
# How many peaks to plan for, between the floor and the peak of the fastest plans.
_LEVELS = 48
# More bytes than any real peak has, and fewer than those of a plan ruled out.
_REAL = 2**43
# The most rounds in which each graph chooses again, after the others' choices.
_SWEEPS = 8


def allowed_peak(budget: float, floor: int, fastest: int) -> int:
    """The bytes that a budget allows between the lowest peak and that of budget 1."""
    return floor + math.floor(budget * (fastest - floor))


class Held(NamedTuple):
    """What calls in ``slot`` of the graph numbered ``graph`` hold at a moment.

    ``what`` is "kept" for a call that waits for its backward, "forward" or "backward"
    for the one that runs, "retained" for a backward whose graph is retained, and
    "output" for a result that is only live if it is saved.  ``of`` is the index of the
    output; for a backward, those of the inputs that it alone holds.  ``calls`` is how
    many hold it at once, and ``size`` how large they are, as a share of the graph's
    largest call in the step.
    """

    graph: int
    slot: int
    what: str
    of: Any = None
    calls: int = 1
    size: float = 1.0


# A step's moments: what calls hold at each one, with the most bytes that eager code has
# live then.
Moments = dict[frozenset[Held], int]


class Choice(NamedTuple):
    """A plan for each slot of each graph.

    ``peak`` is the step's, in bytes, and ``cost`` what it recomputes, in the
    estimator's unit.  ``choices`` has the indices of plans in the menus, by graph.
    """

    peak: int
    cost: float
    choices: dict[int, tuple[int, ...]]

    @property
    def only(self) -> int:
        """The plan, where there is one graph with one slot."""
        ((plan,),) = self.choices.values()
        return plan


class Curve:
    """The plans for a step that best trade its peak against recomputation.

    Args:
        graphs: the plans of each graph, by its number.
        calls: how many calls of a step each slot gets, by the graph's number.
        moments: those of the step.
        margin: the share by which a peak may turn out higher than planned.

    If a step has only one graph, all choices for it are compared.  With more, the peak
    is lowered level by level, each time by the choices that cost least per byte taken
    off, and the room that this leaves is filled again.  The levels do not depend on the
    request, so asking for a lower peak never yields a higher one.

    A level takes O(choices * moments) for each change of a choice.
    """

    def __init__(
        self,
        graphs: Mapping[int, Menu],
        calls: Mapping[int, Sequence[int]],
        moments: Moments,
        margin: float = 0.0,
    ) -> None:
        self.graphs, self.margin = graphs, margin
        # The choices of all graphs, the bytes that each has live at every moment, and
        # its cost.
        self._choices: list[tuple[int, ...]] = []
        # Each graph's slice of them; the first in it is the fastest plan for all slots.
        self._own: list[slice] = []
        with _disable_current_modes(), torch.device("cpu"), torch.no_grad():
            self._rest = torch.tensor([*moments.values()], dtype=torch.float64)
            found = []
            for graph in graphs:
                choices, *numbers = self._choices_of_graph(graph, calls[graph], moments)
                own = slice(len(self._choices), len(self._choices) + len(choices))
                self._own.append(own)
                self._choices += choices
                found.append(numbers)
            self._vectors, self._costs = map(torch.cat, zip(*found))
            states = self._search()
        self.unbudgeted, self._states = states[0], states
        self.plans = [states[i] for i in undominated([state[:2] for state in states])]

    @property
    def floor(self) -> int:
        return self.plans[0].peak

    def with_margin(self, margin: float) -> Curve:
        """The same plans with another margin, which they do not depend on."""
        other = copy.copy(self)
        other.margin = margin
        return other

    def at_most(self, plan: Choice) -> int:
        """The most bytes that the peak of a plan may turn out to take."""
        return plan.peak + math.ceil(plan.peak * self.margin)

    def peak_allowed(self, share: float, most: float = math.inf) -> int:
        """The peak in bytes that a share allows; at 0, the floor plus its margin.

        That counts as at most ``most``.  If it is no lower than the peak without a
        budget, the margin is added to both.
        """
        floor, top = min(self.at_most(self.plans[0]), most), self.unbudgeted.peak
        if floor >= top:
            top = self.at_most(self.unbudgeted)
        return allowed_peak(share, int(floor), top)

    def within(self, peak: int) -> Choice:
        """The cheapest plan sure to stay within a peak in bytes, or else the lowest."""
        if self.at_most(self.unbudgeted) <= peak:
            return self.unbudgeted
        fitting = [plan for plan in self.plans if self.at_most(plan) <= peak]
        return fitting[-1] if fitting else self.plans[0]

    def of_plan(self, plan: int) -> Choice:
        """The choice with this plan, where a step has one call of one graph."""
        return next(state for state in self._states if state.only == plan)

    def _choices_of_graph(
        self, graph: int, calls: Sequence[int], moments: Moments
    ) -> tuple[list[tuple[int, ...]], torch.Tensor, torch.Tensor]:
        """The choices for a graph, the bytes of each at every moment, and its cost."""
        plans, slots = self.graphs[graph].plans, len(calls)
        live = self._live_by_slots(graph, slots, moments)
        # Two plans, and the slot at which the second begins.
        choices = [(p, p, slots) for p in range(len(plans))]
        if slots > 1:
            lowest = int((live[:, -1] + self._rest).amax(1).argmin())
            choices += [
                (p, q, at)
                for p, q in itertools.permutations(
                    _plans_to_combine(plans, slots, lowest), 2
                )
                for at in _slots_to_change_plan_at(slots)
            ]
        first, second, begin = torch.tensor(choices).unbind(1)
        vectors = live[first, begin] + live[second, -1] - live[second, begin]
        cost = torch.tensor([plan.cost for plan in plans], dtype=torch.float64)
        made = torch.tensor([0, *itertools.accumulate(calls)])
        costs = made[begin] * cost[first] + (made[-1] - made[begin]) * cost[second]
        # Only choices on the Pareto front of cost and one of these are worth trying:
        # the graph's own maximum, also while others run, that with eager code's bytes,
        # and the bytes at the moment of the highest peak of any one plan.
        others_run = torch.tensor([not _runs(graph, moment) for moment in moments])
        measures = (
            vectors.amax(1),
            (vectors * others_run).amax(1),
            (vectors + self._rest).amax(1),
            vectors[:, int((live[:, -1].amax(0) + self._rest).argmax())],
        )
        pairs = [[*zip(m.tolist(), costs.tolist())] for m in measures]
        found = {0}.union(*map(undominated, pairs))
        # With one slot, there are few, and any of them may be best beside other graphs.
        good = sorted(found) if slots > 1 else list(range(len(choices)))
        chosen = (choices[i] for i in good)
        of_slots = [(p,) * at + (q,) * (slots - at) for p, q, at in chosen]
        return of_slots, vectors[good], costs[good]

    def _live_by_slots(self, graph: int, slots: int, moments: Moments) -> torch.Tensor:
        """The bytes of the calls in slots below k, indexed by plan, k and moment."""
        plans = self.graphs[graph]
        shape = (slots + 1, len(moments), len(plans.plans))
        live = torch.zeros(shape, dtype=torch.float64)

        @functools.cache
        def nbytes(what: str, of: Any, size: float) -> torch.Tensor:
            return torch.tensor(plans.bytes_held(what, of, size), dtype=torch.float64)

        for at, moment in enumerate(moments):
            for held in moment:
                if held.graph == graph:
                    own = held.calls * nbytes(held.what, held.of, held.size)
                    live[held.slot + 1, at] += own
        return live.cumsum(0).permute(2, 0, 1)

    def _search(self) -> list[Choice]:
        """Choices for all graphs: the fastest, then others down to the lowest peak.

        A state has, for each graph, the index of a choice.
        """
        state = torch.tensor([own.start for own in self._own])
        states = [self._plan(state)]
        if len(state) == 1:
            one = torch.arange(len(self._choices)).unsqueeze(1)
            return states + [self._plan(state) for state in one]
        floor = self._refilled_up_to(state, 0.0)
        states.append(self._plan(floor))
        low, high = states[1].peak, states[0].peak
        if high > _REAL:
            # The fastest plans are ruled out: begin with the fastest of the others.
            state = self._refilled_up_to(state, _REAL)
            states.append(self._plan(state))
            high = states[-1].peak
        for level in range(_LEVELS - 1, -1, -1):
            peak = low + math.floor((high - low) * (level / _LEVELS) ** 1.5)
            lower = self._lowered_to_peak(state, peak)
            state = self._refilled_up_to(floor if lower is None else lower, peak)
            states.append(self._plan(state))
        return states

    def _plan(self, state: torch.Tensor) -> Choice:
        peak = math.ceil(self._live(state).max().item())
        cost = math.fsum(self._costs[state].tolist())
        choices = (self._choices[i] for i in state.tolist())
        return Choice(peak, cost, dict(zip(self.graphs, choices)))

    def _live(self, state: torch.Tensor) -> torch.Tensor:
        return self._rest + self._vectors[state].sum(0)

    def _lowered_to_peak(self, state: torch.Tensor, peak: float) -> torch.Tensor | None:
        """Switch choices, cheapest per byte first, until the peak is at most ``peak``.

        None if that cannot be reached.
        """
        state = state.clone()
        sizes = torch.tensor([own.stop - own.start for own in self._own])
        owner = torch.arange(len(state)).repeat_interleave(sizes)
        while True:
            live = self._live(state)
            excess = (live - peak).clamp(min=0).sum()
            if not excess:
                return state
            # For each choice, the current one of its graph, which it would replace.
            place = state[owner]
            left = live + self._vectors - self._vectors[place] - peak
            taken = excess - left.clamp(min=0).sum(1)
            more = self._costs - self._costs[place]
            # Gains below a byte are rounding errors, and might alternate forever.
            price, index = torch.where(taken >= 1, more / taken, math.inf).min(0)
            if price.isinf():
                return None
            state[owner[index]] = index

    def _refilled_up_to(self, state: torch.Tensor, peak: float) -> torch.Tensor:
        """Let each graph in turn choose the cheapest within the peak, or the lowest."""
        state = state.clone()
        for _ in range(_SWEEPS):
            before = state.clone()
            for g, own in enumerate(self._own):
                vectors = self._vectors[own]
                peaks = (self._live(state) - self._vectors[state[g]] + vectors).amax(1)
                # Over the peak, prefer a lower maximum of its own, even if only other
                # graphs set the peak.
                over = vectors.amax(1) * (peaks > peak)
                numbers = peaks.clamp(min=peak), over, self._costs[own]
                keys = zip(*(each.tolist() for each in numbers), itertools.count())
                state[g] = own.start + min(keys)[-1]
            if state.equal(before):
                break
        return state


def _slots_to_change_plan_at(slots: int) -> list[int]:
    """Slots at which a second plan may begin, always including the last slot."""
    spread = {round(k * slots / _SPLITS) for k in range(1, _SPLITS)}
    return sorted({slots - 1, *spread} - {0, slots})


def _plans_to_combine(plans: Sequence[Footprint], slots: int, lowest: int) -> list[int]:
    """The indices of the plans that may be combined.

    Candidates are the Pareto fronts of cost and three measures: what a call keeps, what
    it holds while it runs, and something in between that depends on the slots.  So are
    the fastest plan and ``lowest``, which has the lowest peak if all calls have it.
    """
    found = {0, lowest}
    for share in (0, 1 / slots, 1):
        weight = [p.kept + share * max(p.forward, p.backward - p.kept) for p in plans]
        found.update(undominated([(w, plan.cost) for w, plan in zip(weight, plans)]))
    ranked = sorted(found, key=lambda i: (plans[i].kept, plans[i].cost))
    step = max((len(ranked) - 1) / (_COMBINED - 1), 1)
    spread = {round(k * step) for k in range(_COMBINED)}
    return sorted({0, *(i for at, i in enumerate(ranked) if at in spread)})


def _runs(graph: int, moment: frozenset[Held]) -> bool:
    """Whether a call of the graph runs at a moment."""
    waits = "kept", "output"
    return any(each.graph == graph and each.what not in waits for each in moment)
