"""Chooses which plans to compile, given what compiles of other plans have told.

Plans are chosen by what they are believed to hold.  For a compiled plan, that is what
was told, for any other one its estimate, corrected by the error of the nearest compiled
plan.  The chosen plan is compiled.  If it holds more than allowed, so is another one.
"""

from __future__ import annotations

import math
from typing import Any, Optional, TYPE_CHECKING

from ..peak.curve import allowed_peak, Curve
from ..peak.menu import Menu


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ..peak.curve import Choice, Moments


class Search:
    """The plans of a step's graphs, or of a graph by itself.

    Args:
        menus: returns the plans of each graph, by its number, with all told so far.
        calls: how many calls of a step each slot gets, by the graph's number.
        moments: those of the step.
        margin: the share by which a plan may hold more than was estimated.
        tries: the most times that new plans are compiled.
    """

    def __init__(
        self,
        menus: Callable[[], Mapping[int, Menu]],
        calls: Mapping[int, Sequence[int]],
        moments: Moments,
        margin: float,
        tries: int,
    ) -> None:
        self._menus, self._calls, self._moments = menus, calls, moments
        self._margin = margin
        self._curves: dict[Any, Curve] = {}
        # The plans proposed for each graph: compiles of some graphs tell nothing.
        self._tried: dict[int, set[int]] = {n: set() for n in calls}
        self._tries_left = tries

    def compiled_plans(self) -> Curve:
        """The compiled plans, and all plans of graphs of which nothing was told."""
        return self._restricted(())

    def compiled_and_fastest(self) -> Curve:
        """`compiled_plans`, and the fastest plans, corrected by what was told."""
        return self._restricted((0,))

    def all_corrected(self) -> Curve:
        """All plans, corrected by what was told."""
        return self._curve(Menu.corrected, self._untold_margin)

    def peak_allowed(self, share: float) -> int:
        """The bytes that a share allows, by what plans are believed to hold.

        It counts from a floor that is at most the lowest estimate, as plans that are
        not compiled yet may hold less, and at most the lowest peak that was compiled.
        """
        curves = self._curve(lambda menu: menu, self._margin), self.compiled_plans()
        most = min(curve.at_most(curve.plans[0]) for curve in curves)
        return self.all_corrected().peak_allowed(share, most)

    def plan_to_keep(
        self, allowed: int, share: Optional[float], unused: int = 0
    ) -> tuple[int, Choice, Curve]:
        """The bytes that are allowed, the compiled plan to keep, and all to report.

        ``allowed`` is returned as it is unless all plans exceed it and a ``share`` is
        asked for: that counts from the lowest peak that was compiled.
        """
        asked, compiled = allowed, self.compiled_plans()
        curve, known = self.all_corrected(), self.compiled_and_fastest()
        if share is not None and compiled.floor > allowed:
            reached = compiled.floor, known.unbudgeted.peak
            allowed = max(allowed, allowed_peak(share, *reached))
        plan = compiled.within(allowed - unused)
        # Where no plan was low enough, or a compiled one is the lowest, estimates of
        # lower ones are not credible, or not lower.
        if plan.peak > asked - unused or known.floor < curve.floor:
            curve = known
        return allowed, plan, curve

    def _restricted(self, others: tuple[int, ...]) -> Curve:
        def restricted(menu: Menu) -> Menu:
            compiled = menu.compiled
            if not compiled:
                return menu
            return menu.corrected().restricted_to({*others, *compiled})

        return self._curve(restricted, self._untold_margin)

    def plans_to_compile(self, allowed: Callable[[], int]) -> Iterator[Choice]:
        """The plans to compile, one after the other, until one is within a peak.

        ``allowed`` returns the peak, which may depend on what was told.  The caller has
        to compile each plan before it asks for the next.
        """
        is_first = True
        # No compiled plan should have a higher peak than the fastest plan's estimate.
        fastest = self._curve(lambda menu: menu).unbudgeted
        while self._tries_left > 0:
            peak, told = allowed(), self._told_by_graph()
            plan = self.all_corrected().within(peak)
            compiled = self.compiled_plans().within(peak)
            is_above = any(told) and compiled.peak > fastest.peak
            is_last = self._tries_left == 1
            is_over = plan.peak > peak and self._underestimates()
            new: list[Choice] = []
            may_save_more = is_first and any(self._tried.values())
            if is_over and may_save_more and not (is_above and is_last):
                new, is_first = self._propose(self._plan_between(plan.peak)), False
            new = new or self._propose(fastest if is_above and is_last else plan)
            if not new and is_over:
                new = self._propose(self._lowest_untried())
            if not new and is_above:
                new = self._propose(fastest)
            if not new:
                break
            yield from new
            # If nothing new was told, the plans had been compiled before: not a try.
            self._tries_left -= told != self._told_by_graph()
            peak = allowed()
            kept = self.compiled_plans().within(peak)
            if kept.peak <= peak and kept.cost <= plan.cost:
                break

    def count_try(self) -> None:
        """Use up a try for a compile that was not proposed here."""
        self._tries_left -= 1

    def _propose(self, plan: Choice) -> list[Choice]:
        """The plan, if it is new for some graph; it then counts as proposed."""
        is_new = False
        for number, plans in plan.choices.items():
            is_new |= not self._tried[number].issuperset(plans)
            self._tried[number].update(plans)
        return [plan] * is_new

    def _told_by_graph(self) -> list[dict[Any, Any]]:
        return [dict(menu.told) for menu in self._menus().values()]

    @property
    def _untold_margin(self) -> float:
        """The margin, or 0 as soon as some compile has told."""
        return 0.0 if any(self._told_by_graph()) else self._margin

    def _underestimates(self) -> bool:
        """Whether some compile has told more than the estimate with its margin."""
        return any(menu.underestimates(self._margin) for menu in self._menus().values())

    def _plan_between(self, told: int) -> Choice:
        """A plan to compile if the lowest one holds as much as was ``told``.

        The lowest estimates are not credible then, and plans that save more may hold no
        more.  This is the one nearest to the geometric mean of estimate and truth.
        """
        curve = self._curve(lambda menu: menu)
        middle = math.sqrt(curve.floor * told)
        return min(curve.plans, key=lambda plan: abs(plan.peak - middle))

    def _lowest_untried(self) -> Choice:
        """The lowest of the plans not compiled yet, corrected by what was told."""

        def untried(menu: Menu) -> Menu:
            rest = {*range(len(menu.plans))}.difference(menu.compiled)
            is_tried = rest and menu.underestimates(self._margin)
            return (
                menu.corrected().restricted_to(rest) if is_tried else menu.corrected()
            )

        return self._curve(untried).plans[0]

    def _curve(self, of: Callable[[Menu], Menu], margin: float = 0.0) -> Curve:
        menus = {n: of(menu) for n, menu in self._menus().items()}
        plans = ((each.is_corrected, *each.plans) for each in menus.values())
        key = (*plans,)
        if key not in self._curves:
            self._curves[key] = Curve(menus, self._calls, self._moments)
        return self._curves[key].with_margin(margin)
