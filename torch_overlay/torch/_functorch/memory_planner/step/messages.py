"""What a StepBudget logs: its plans, and that its bound may be exceeded."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Optional, TYPE_CHECKING

from torch._dynamo.exc import RestartAnalysis


if TYPE_CHECKING:
    from collections.abc import Iterator


log = logging.getLogger(__name__)


# This many plans are logged at first, and then every tenth.
_TOLD = 3
# The factor by which bytes have to grow for a warning of the same kind to be logged.
_MORE = 1.05


class StepBudgetError(RuntimeError):
    """A step of a strict budget may exceed its bound."""


class StepWarnings:
    """A named budget that warns, or raises if it is ``strict``."""

    def __init__(self, name: str, strict: bool) -> None:
        self._name, self.strict = name, strict
        # Whether a warning has told of graphs without a plan.
        self.has_unplanned = False
        # The last reason of each kind, the bytes that were logged with it, and the number
        # of plans so far.
        self._reasons: dict[str, str] = {}
        self._logged: dict[tuple[str, bool, int], int] = {}
        self._plans = 0
        # What a strict budget would raise, where that has to wait.
        self._held_back: Optional[list[StepBudgetError]] = None

    @property
    def reasons(self) -> list[str]:
        """The reasons for warnings, the last of each kind."""
        return [*self._reasons.values()]

    @contextmanager
    def warn_on_failure(self, what: str, is_risk: bool = True) -> Iterator[None]:
        """Turn a failure within into a warning, logged once; training goes on.

        If it ``is_risk`` and the budget is strict, raises StepBudgetError instead.
        """
        try:
            yield
        except (RestartAnalysis, StepBudgetError):
            # Dynamo starts a trace over by a RestartAnalysis.
            raise
        except Exception as error:
            log.debug("%s", what, exc_info=error)
            self.has_unplanned |= is_risk
            self.warn(f"{what}: {type(error).__name__}: {error}", is_risk=is_risk)

    @contextmanager
    def raise_last(self) -> Iterator[None]:
        """Let what follows a risk within be done before a strict budget raises."""
        held_back = self._held_back = []
        try:
            yield
        finally:
            self._held_back = None
        if held_back:
            raise held_back[0]

    def warn_of_other_graphs(self, are_uncounted: bool) -> None:
        """Warn once that compiled graphs ran that are not the budget's."""
        if self.has_unplanned:
            return
        self.has_unplanned = True
        uncounted = ", nor are their kernels counted" * are_uncounted
        self.warn(
            f"compiled graphs ran in the step that have no plan of this budget{uncounted}; "
            "if they were compiled earlier, call torch.compiler.reset() first"
        )

    def warn(
        self,
        reason: str,
        kind: str = "",
        is_risk: bool = True,
        nbytes: int = 0,
        occasion: int = 0,
    ) -> None:
        """Log the first reason of each ``kind``, and keep the last for the report.

        Another one is logged if it is of clearly more bytes than the last one logged, or
        has another number as its ``occasion``.  A reason without a kind is one of its own.
        If it ``is_risk``, the bound may be exceeded, and a strict budget raises
        StepBudgetError instead.
        """
        risk = " may be exceeded" if is_risk else ""
        if self.strict and is_risk:
            error = StepBudgetError(f"{self._name}{risk}: {reason}")
            if self._held_back is None:
                raise error
            self._held_back.append(error)
            return
        kind = kind or reason
        key = kind, is_risk, occasion
        if key not in self._logged or nbytes > _MORE * self._logged[key]:
            log.warning("%s%s: %s", self._name, risk, reason)
            self._logged[key] = nbytes
        self._reasons[kind] = f"may be exceeded: {reason}" if risk else reason

    def tell(self, headline: str) -> None:
        """Log a line that is shown by default, too, when torch shows warnings only."""
        self._plans += 1
        is_told = self._plans <= _TOLD or self._plans % 10 == 0
        if is_told and log.isEnabledFor(logging.WARNING):
            # Handled directly, so that levels set by TORCH_LOGS stay as they are.
            path, line, *_ = log.findCaller()
            words = "%s: %s", (self._name, headline)
            log.handle(log.makeRecord(log.name, logging.INFO, path, line, *words, None))
