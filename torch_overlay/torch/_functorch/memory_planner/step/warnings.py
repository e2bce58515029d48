"""What a StepBudget tells while it trains: that its bound may be exceeded, and its plans."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch._dynamo.exc import RestartAnalysis


if TYPE_CHECKING:
    from collections.abc import Iterator


log = logging.getLogger(__name__)

__all__ = ["StepBudgetError", "Warns"]

# The first plans are all told of, and then each tenth.
_TOLD = 3


class StepBudgetError(RuntimeError):
    """A step may exceed its bound, and is to be strict."""


class Warns:
    """A budget of some name that warns, or raises where it is to be ``strict``."""

    def __init__(self, name: str, strict: bool) -> None:
        self._name, self.strict = name, strict
        # Whether there are graphs without a plan, of which a warning has told.
        self.has_unplanned = False
        # The last reason of each kind, and how many plans were told of.
        self._reasons: dict[str, str] = {}
        self._plans = 0

    @property
    def reasons(self) -> list[str]:
        """What was warned of, the last of each kind."""
        return [*self._reasons.values()]

    @contextmanager
    def warn_on_failure(self, what: str, is_risk: bool = True) -> Iterator[None]:
        """Training goes on without what fails within; a warning tells of it once."""
        try:
            yield
        except (RestartAnalysis, StepBudgetError):
            # The first is Dynamo's way to begin anew.
            raise
        except Exception as error:
            log.debug("%s", what, exc_info=error)
            self.has_unplanned = True
            self.warn(f"{what}: {type(error).__name__}: {error}", is_risk=is_risk)

    def warn(self, reason: str, kind: str = "", is_risk: bool = True) -> None:
        """Log a reason, once of its kind; the report has the last one of each.

        Unless it ``is_risk``, the bound is kept all the same.
        """
        risk = " may be exceeded" if is_risk else ""
        if self.strict and is_risk:
            raise StepBudgetError(f"{self._name}{risk}: {reason}")
        if (kind or reason) not in self._reasons:
            log.warning("%s%s: %s", self._name, risk, reason)
        self._reasons[kind or reason] = f"may be exceeded: {reason}" if risk else reason

    def tell(self, headline: str) -> None:
        """A line for the user, by default too, when torch shows warnings only."""
        self._plans += 1
        is_told = self._plans <= _TOLD or self._plans % 10 == 0
        if is_told and log.isEnabledFor(logging.WARNING):
            # What is asked of TORCH_LOGS stays as it is.
            path, line, *_ = log.findCaller()
            words = "%s: %s", (self._name, headline)
            log.handle(log.makeRecord(log.name, logging.INFO, path, line, *words, None))
