"""What was decided about a joint graph, and the figures behind it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.fx as fx

    PeakAt = Callable[[Callable[[Any], int]], int]


log = logging.getLogger(__name__)


class SavedRange(NamedTuple):
    """The bytes of activations that the plans of budgets 0 and 1 keep.

    Storages count whole, and those of inputs do not count, so a budget is a fraction of
    what a plan can change.
    """

    low: int
    high: int

    def as_fraction(self, nbytes: float) -> float:
        """``nbytes`` as a share of this range, which is the unit of a budget."""
        return nbytes / (self.high - self.low)

    def budget_of_bytes(self, nbytes: int) -> float:
        """The budget that is used up by keeping ``nbytes``."""
        return self.as_fraction(nbytes - self.low)

    def bytes_beyond_low(self, budget: float) -> int:
        """The bytes beyond ``low`` that a plan may keep under ``budget``.

        A budget like 0.7 is slightly less as a float, which must not cost a byte.
        """
        return math.floor(budget * (self.high - self.low) * (1 + 2.0**-50))

    def bytes_allowed(self, budget: float) -> int:
        """The bytes that a plan may keep under ``budget``."""
        return self.low + self.bytes_beyond_low(budget)


@dataclass(frozen=True)
class Knapsack:
    """What a solver was asked, and its answer.

    Args:
        solver: its name.
        memory: the bytes of each item.
        runtimes: the cost of recomputing each item, in the estimator's unit.
        saved: the indices of the items to save.
    """

    solver: str
    memory: list[int]
    runtimes: list[float]
    saved: list[int]


class Head(NamedTuple):
    """How a head runs: the product that makes the logits, and all up to the loss.

    Args:
        chunks: the number of chunks.
        rows: the rows of the first chunk.
        gained: the bytes that chunks take off the lowest peak with a head in one piece.
        more_work: what chunks cost beyond a head in one piece, as a share of the
            graph's work.  It is negative if they cost less, and 0 if unknown.
        why_whole: why a head cannot run in chunks, as the end of a sentence that begins
            with "as"; empty if it can.
    """

    chunks: int
    rows: int = 0
    gained: int = 0
    more_work: float = 0.0
    why_whole: str = ""


class Peak(NamedTuple):
    """The peaks that a plan was chosen by, in bytes, without parameters and inputs.

    Args:
        allowed: the peak asked for.
        predicted: the plan's own.
        floor: the lowest that was found.
        fastest: that of budget 1.
        fused: whether these are estimates for inductor's kernels, not for operators.
        compiled: whether ``predicted`` was read from compiled code.
    """

    allowed: int
    predicted: int
    floor: int
    fastest: int
    fused: bool = False
    compiled: bool = False

    def warn_if_over(self, head: Optional[Head] = None) -> None:
        """Warn if no plan was found within the peak asked for."""
        why = head.why_whole if head is not None else ""
        if self.predicted > self.allowed:
            log.warning(
                "%d bytes are allowed by the activation memory budget, but the lowest "
                "peak found is %d bytes (both without parameters and inputs); %s uses "
                "that plan%s",
                self.allowed,
                self.predicted,
                get_aot_graph_name(),
                f", with its large head in one piece, as {why}" if why else "",
            )


@dataclass(frozen=True)
class Decision:
    """What to save for the backward, and how that was decided.

    Args:
        saved_values: the nodes to save, inputs among them.
        budget: the budget asked for.
        decided_by: "budget 0", "min cut", "knapsack", "lower peak", "peak", "step", or
            "upstream" if no plan could be made.
        activation_bytes: the bytes that the saved values keep, without inputs and views
            of them.
        runtime_unit: the unit of the items' runtimes, empty if unknown.
        limits: the bytes that budgets 0 and 1 keep, None if they were not needed.
        knapsack: what a solver was asked, None if none was.
        items: the node of each item of the knapsack.
        peak: the peaks that the plan was chosen by, None if they played no part.
        head: how the head runs; None if in one piece, unless a large one has to.
        peak_at: the plan's peak in bytes, given a function that evaluates symbolic
            sizes; None if the graph has none, or no bytes were asked for.
    """

    saved_values: list[fx.Node]
    budget: float
    decided_by: str
    activation_bytes: int
    runtime_unit: str = ""
    limits: Optional[SavedRange] = None
    knapsack: Optional[Knapsack] = None
    items: Sequence[fx.Node] = ()
    peak: Optional[Peak] = None
    head: Optional[Head] = None
    peak_at: Optional[PeakAt] = None
