"""Which plans the graphs of a step should have, by what they keep while others run.

A step is a sequence of events, F(c) and B(c): the forward and the backward of a call c.
At any moment, live are

    what eager code holds + what each call keeps whose backward is still to come
    + what the running graph has beyond that

so a plan of a graph is a :class:`.Footprint`, and a step is a number of moments
(:data:`Moments`).  :class:`Curve` chooses plans so that no moment is above a peak and
little is computed again.  A graph by itself is a step of one call.

Calls of one graph may get two plans.  A call's *slot* is the smallest number that no
other call alive has; those up to some slot get one plan, those above it another.  That
fills the room that one plan for all would leave, and lets the calls whose backward comes
first keep what they need at once anyway.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .plans import undominated


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .menu import Footprint, Menu


__all__ = ["Choice", "Curve", "Held", "Moments", "allowed_peak"]

# Plans of one graph that may be combined, and slots at which they change, at most.
_COMBINED, _SPLITS = 16, 32
# Peaks between the floor and the fastest that are planned for.
_LEVELS = 48
# How often each graph gets its turn, at most, as others choose anew.
_SWEEPS = 8


def allowed_peak(budget: float, floor: int, fastest: int) -> int:
    """The bytes that a budget allows between the lowest peak and that of budget 1."""
    return floor + math.floor(budget * (fastest - floor))


class Held(NamedTuple):
    """What the call in a ``slot`` of a ``graph`` holds at a moment, in the plans' terms.

    ``what`` is "kept", of a call that waits for its backward; "forward" or "backward" of
    the one that runs; or "output", which nobody holds any more unless it is saved.  ``of``
    an output is its index, of a backward the inputs that it alone holds, and of what is
    kept how many such calls there are, if not one.  The graph is its number.
    """

    graph: int
    slot: int
    what: str
    of: Any = None


# For all that calls hold at some moment, the most bytes that eager code has live then.
Moments = dict[frozenset[Held], int]


class Choice(NamedTuple):
    """The plan of each slot of each graph; bytes, and cost in the estimator's unit."""

    peak: int
    cost: float
    choices: dict[int, tuple[int, ...]]

    @property
    def only(self) -> int:
        """The plan of the one slot of the one graph."""
        ((plan,),) = self.choices.values()
        return plan


class Curve:
    """The plans for a step that trade its peak for recomputation best.

    Args:
        graphs: the plans of each graph, by its number.
        calls: likewise, for each slot how many calls a step makes.
        moments: the step.
        margin: by which share a peak may turn out higher than planned.

    Where a step has one graph, all choices for it are compared.  With more, the
    peak is lowered level by level, each time by the choices that cost least for what
    they take off, and what room is left is filled again.  The levels do not depend on
    what is asked, so a lower peak asked is never answered by a higher one.

    O(levels * choices * moments).
    """

    def __init__(
        self,
        graphs: Mapping[int, Menu],
        calls: Mapping[int, Sequence[int]],
        moments: Moments,
        margin: float = 0.0,
    ) -> None:
        self.graphs, self.margin = graphs, margin
        # The choices of all graphs, what each has live at every moment, and its cost.
        self._choices: list[tuple[int, ...]] = []
        # Of each graph, which are its own; the first of them is the fastest plan for all.
        self._own: list[slice] = []
        with _disable_current_modes(), torch.device("cpu"), torch.no_grad():
            self._rest = torch.tensor([*moments.values()], dtype=torch.float64)
            found = []
            for graph in graphs:
                choices, *numbers = self._options(graph, calls[graph], moments)
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

    def at_most(self, plan: Choice) -> int:
        """What a plan's peak may turn out to be, in bytes."""
        return plan.peak + math.ceil(plan.peak * self.margin)

    def allowed(self, share: float) -> int:
        """The peak in bytes that a share allows: at 0, what the lowest may turn out as.

        Where that is as much as the peak without a budget, both ends have the margin.
        """
        floor, top = self.at_most(self.plans[0]), self.unbudgeted.peak
        if floor >= top:
            top = self.at_most(self.unbudgeted)
        return allowed_peak(share, floor, top)

    def within(self, peak: int) -> Choice:
        """The cheapest plan sure to be below a peak; that of the floor if there is none."""
        if self.at_most(self.unbudgeted) <= peak:
            return self.unbudgeted
        fitting = [plan for plan in self.plans if self.at_most(plan) <= peak]
        return fitting[-1] if fitting else self.plans[0]

    def of_plan(self, plan: int) -> Choice:
        """The choice of this plan, where a step has one call of one graph."""
        return next(state for state in self._states if state.only == plan)

    def _options(
        self, graph: int, calls: Sequence[int], moments: Moments
    ) -> tuple[list[tuple[int, ...]], torch.Tensor, torch.Tensor]:
        """The choices for a graph, what each has live at every moment, and its cost."""
        plans, slots = self.graphs[graph].plans, len(calls)
        live = self._live_by_slots(graph, slots, moments)
        # Two plans, and the slot at which the second begins.
        choices = [(p, p, slots) for p in range(len(plans))]
        if slots > 1:
            lowest = int((live[:, -1] + self._rest).amax(1).argmin())
            choices += [
                (p, q, at)
                for p, q in itertools.permutations(_combined(plans, slots, lowest), 2)
                for at in _splits(slots)
            ]
        first, second, begin = torch.tensor(choices).unbind(1)
        vectors = live[first, begin] + live[second, -1] - live[second, begin]
        cost = torch.tensor([plan.cost for plan in plans], dtype=torch.float64)
        made = torch.tensor([0, *itertools.accumulate(calls)])
        costs = made[begin] * cost[first] + (made[-1] - made[begin]) * cost[second]
        # Whatever the other graphs do, these are the ones that may be of use.
        measures = (
            vectors.amax(1),
            (vectors + self._rest).amax(1),
            vectors[:, int((live[:, -1].amax(0) + self._rest).argmax())],
        )
        pairs = [[*zip(m.tolist(), costs.tolist())] for m in measures]
        found = {0}.union(*map(undominated, pairs))
        # Of one call alone there are few, and others may need any.
        good = sorted(found) if slots > 1 else list(range(len(choices)))
        chosen = (choices[i] for i in good)
        of_slots = [(p,) * at + (q,) * (slots - at) for p, q, at in chosen]
        return of_slots, vectors[good], costs[good]

    def _live_by_slots(self, graph: int, slots: int, moments: Moments) -> torch.Tensor:
        """What calls in slots below k have live: by plan, k and moment."""
        plans = self.graphs[graph]
        shape = (slots + 1, len(moments), len(plans.plans))
        live = torch.zeros(shape, dtype=torch.float64)

        @functools.cache
        def nbytes(what: str, of: Any) -> torch.Tensor:
            return torch.tensor(plans.live(what, of), dtype=torch.float64)

        for at, moment in enumerate(moments):
            for held in moment:
                if held.graph == graph:
                    live[held.slot + 1, at] += nbytes(held.what, held.of)
        return live.cumsum(0).permute(2, 0, 1)

    def _search(self) -> list[Choice]:
        """States on the way from the fastest plans to the lowest peak; that is first."""
        state = torch.tensor([own.start for own in self._own])
        states = [self._plan(state)]
        if len(state) == 1:
            one = torch.arange(len(self._choices)).unsqueeze(1)
            return states + [self._plan(state) for state in one]
        floor = self._settled(state, 0.0)
        states.append(self._plan(floor))
        low, high = states[1].peak, states[0].peak
        for level in range(_LEVELS - 1, -1, -1):
            peak = low + math.floor((high - low) * (level / _LEVELS) ** 1.5)
            lower = self._lowered(state, peak)
            state = self._settled(floor if lower is None else lower, peak)
            states.append(self._plan(state))
        return states

    def _plan(self, state: torch.Tensor) -> Choice:
        peak = math.ceil(self._live(state).max().item())
        cost = math.fsum(self._costs[state].tolist())
        choices = (self._choices[i] for i in state.tolist())
        return Choice(peak, cost, dict(zip(self.graphs, choices)))

    def _live(self, state: torch.Tensor) -> torch.Tensor:
        return self._rest + self._vectors[state].sum(0)

    def _lowered(self, state: torch.Tensor, peak: float) -> torch.Tensor | None:
        """Take off what is above the peak, by what costs least for it."""
        state = state.clone()
        sizes = torch.tensor([own.stop - own.start for own in self._own])
        owner = torch.arange(len(state)).repeat_interleave(sizes)
        while True:
            live = self._live(state)
            excess = (live - peak).clamp(min=0).sum()
            if not excess:
                return state
            # In the place of which choice of the same graph each would come.
            place = state[owner]
            left = live + self._vectors - self._vectors[place] - peak
            taken = excess - left.clamp(min=0).sum(1)
            more = self._costs - self._costs[place]
            # Bytes are whole, and a rounded sum is no gain: it may come back for ever.
            price, index = torch.where(taken >= 1, more / taken, math.inf).min(0)
            if price.isinf():
                return None
            state[owner[index]] = index

    def _settled(self, state: torch.Tensor, peak: float) -> torch.Tensor:
        """Choose for one graph after the other what costs least within the peak.

        Or, where nothing is, what is lowest.
        """
        state = state.clone()
        for _ in range(_SWEEPS):
            before = state.clone()
            for g, own in enumerate(self._own):
                vectors = self._vectors[own]
                peaks = (self._live(state) - self._vectors[state[g]] + vectors).amax(1)
                # Where a moment of others is the peak, its own still has to fall.
                over = vectors.amax(1) * (peaks > peak)
                numbers = peaks.clamp(min=peak), over, self._costs[own]
                keys = zip(*(each.tolist() for each in numbers), itertools.count())
                state[g] = own.start + min(keys)[-1]
            if state.equal(before):
                break
        return state


def _splits(slots: int) -> list[int]:
    """Slots at which another plan may begin; the last runs beside all others."""
    spread = {round(k * slots / _SPLITS) for k in range(1, _SPLITS)}
    return sorted({slots - 1, *spread} - {0, slots})


def _combined(plans: Sequence[Footprint], slots: int, lowest: int) -> list[int]:
    """The plans that may be combined: those that no other beats, by some measure.

    Among them are the fastest, and that of the step's ``lowest`` peak where all calls
    have the same.
    """
    found = {0, lowest}
    for share in (0, 1 / slots, 1):
        weight = [p.kept + share * max(p.forward, p.backward - p.kept) for p in plans]
        found.update(undominated([(w, plan.cost) for w, plan in zip(weight, plans)]))
    ranked = sorted(found, key=lambda i: (plans[i].kept, plans[i].cost))
    step = max((len(ranked) - 1) / (_COMBINED - 1), 1)
    spread = {round(k * step) for k in range(_COMBINED)}
    return sorted({0, *(i for at, i in enumerate(ranked) if at in spread)})
