"""Chooses the plans of a step's graphs, and has them compiled until they fit."""

from __future__ import annotations

from typing import NamedTuple, Optional, TYPE_CHECKING

from ..compile.search import Search
from ..report.step_summary import StepSummary, summary_of
from .timeline import peak_under_plans


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..peak.curve import Choice
    from ..peak.menu import Menu
    from .graphs import Graph
    from .step_programs import LearnedPrograms


# The most times that plans are compiled.
_TRIES = 4


class Bound(NamedTuple):
    """The bound that a :class:`.StepBudget` is given; one of the three is set."""

    share: Optional[float] = None
    peak_bytes: Optional[int] = None
    device_bytes: Optional[int] = None

    def counted(self, present: Present) -> int:
        """The bytes live when a step starts that the bound includes."""
        return present.given if self.device_bytes is not None else 0

    def allowed(self, search: Search, present: Present) -> int:
        """The peak that it allows, by what is known of the plans so far."""
        if self.share is not None:
            return search.peak_allowed(self.share)
        if self.peak_bytes is not None:
            return self.peak_bytes
        return (self.device_bytes or 0) - self.counted(present)


class Present(NamedTuple):
    """The bytes live when a step starts, in all and of two kinds among them."""

    given: int = 0
    parameters: int = 0
    optimizer_states: int = 0


class PlannedStep(NamedTuple):
    """The plans of a step.

    Args:
        summary: what they are expected to hold.
        choices: by graph number, the plan of each slot.
        spare: the allowed bytes that are free while no call waits for its backward.
        fits_if_dropped_before: if the peak is above the bound, but would not be if the
            next step dropped the gradients that the last one left, before which kind of
            event it has to, "F" or "B".  Otherwise empty.
    """

    summary: StepSummary
    choices: dict[int, tuple[int, ...]]
    spare: int
    fits_if_dropped_before: str

    @property
    def headline(self) -> str:
        """The summary's, with what it depends on."""
        stay = ", if the last step's gradients stay" * bool(self.fits_if_dropped_before)
        return self.summary.headline + stay


def plan_step(
    graphs: Mapping[int, Graph],
    learned: LearnedPrograms,
    bound: Bound,
    present: Present,
    missed: int,
    growth: Mapping[int, float],
    compile_plans: Callable[[Iterable[Choice], bool], None],
) -> PlannedStep:
    """Choose plans within a bound, by the bytes that compiled plans turn out to hold.

    Args:
        graphs: the step's graphs, by number.
        learned: the programs that recorded steps ran.
        bound: what the user asked for.
        present: the bytes live when a step starts.
        missed: the bytes of the bound to leave free.
        growth: by graph number, the factor by which its calls are expected to grow.
        compile_plans: compiles each graph by some plans, and records in the graphs'
            menus what these hold.  As a last resort, if its second argument is true,
            they are also compiled without fusions that raise the peak.

    Each graph is compiled O(``_TRIES``) times.
    """
    moments = learned.expected_moments(graphs)
    rest = {held: nbytes.total for held, nbytes in moments.items()}
    margins = (
        graph.largest.ask.peak_margin
        for graph in graphs.values()
        if graph.plans.model.is_fused
    )

    def menus() -> dict[int, Menu]:
        return {n: graph.menu(growth.get(n, 1.0)) for n, graph in graphs.items()}

    margin = max(margins, default=0.0)
    search = Search(menus, learned.calls, rest, margin, _TRIES)

    plans = search.plans_to_compile(lambda: bound.allowed(search, present) - missed)
    compile_plans(plans, False)
    asked = bound.allowed(search, present)
    allowed, plan, curve = search.plan_to_keep(asked, bound.share, missed)
    if plan.peak > allowed - missed:
        compile_plans([plan], True)
        asked = bound.allowed(search, present)
        allowed, plan, curve = search.plan_to_keep(asked, bound.share, missed)
    compile_plans([plan], False)
    # Of another trace of a graph, this may have told more.
    allowed, plan, curve = search.plan_to_keep(asked, bound.share, missed)
    idle = moments.get(frozenset())
    spare = allowed - missed - (idle.total if idle is not None else 0)
    facts = moments, learned.calls, graphs, allowed, present, bound.counted(present)
    before = ""
    if plan.peak > allowed:
        before = _fits_if_dropped_before(graphs, learned, plan, allowed)
    summary = summary_of(plan, curve, *facts)
    return PlannedStep(summary, plan.choices, spare, before)


def _fits_if_dropped_before(
    graphs: Mapping[int, Graph], learned: LearnedPrograms, plan: Choice, allowed: int
) -> str:
    """The last kind of event before which old gradients may go for a plan to fit."""
    menus = {number: graph.menu() for number, graph in graphs.items()}
    for before in ("B", "F"):
        moments = learned.expected_moments(graphs, before)
        if peak_under_plans(moments, menus, plan.choices) <= allowed:
            return before
    return ""
