"""The config's options that determine a graph's plan.

They are read as an :class:`Ask` when a graph is about to be planned.  The planner then
uses only that, so that an option that changes meanwhile cannot apply to half a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, Optional, TYPE_CHECKING

from torch._functorch import config
from torch._inductor.custom_graph_pass import (
    CustomKnapsackSolver,
    CustomRuntimeEstimator,
)

from .._activation_checkpointing.knapsack import KNAPSACK_SOLVERS
from .byte_sizes import as_bytes
from .graph.recompute_cost import RUNTIME_UNITS


if TYPE_CHECKING:
    from collections.abc import Mapping


# Upstream's solver of this name looks for a better trade-off at a lower budget.  Here,
# the whole budget is used: the name is an alias of "exact".
KNEE = "dynamic_memory_budget_dp"

# What a min cut may be banned from recomputing (fields of ``MinCutOptions``), and the
# config option that sets each ban.
_OPTIONS = {
    "ban_if_used_far_apart": "ban_recompute_used_far_apart",
    "ban_if_long_fusible_chains": "ban_recompute_long_fusible_chains",
    "ban_if_materialized_backward": "ban_recompute_materialized_backward",
    "ban_if_not_in_allowlist": "ban_recompute_not_in_allowlist",
    "ban_if_reduction": "ban_recompute_reductions",
}
BANS = tuple(_OPTIONS)


@dataclass(frozen=True)
class Ask:
    """The options of ``torch._functorch.config`` that determine a plan.

    Args:
        budget: ``activation_memory_budget``; a region of the model may have its own.
        target: "saved" or "peak".
        peak_bytes: the most bytes allowed at the peak, instead of a budget.
        graph_calls: how many calls of a graph hold their saved values at the same time,
            if known.
        peak_margin: the share by which an estimate of a peak may be too low.
        solver: the name of a knapsack solver, or the user's own.
        estimator: the name of a runtime estimator, or the user's own.
        bans: whether each of the ``BANS`` is in force.
        recomputes_all_cheap: whether the bans on cheap values are lifted.
        is_plotted: whether to plot recomputation against the budget.
        plot_folder: where to write the plot, None for the working directory.
    """

    budget: float
    target: str
    peak_bytes: Optional[int]
    graph_calls: Optional[int]
    peak_margin: float
    solver: Any
    estimator: Any
    bans: Mapping[str, bool]
    recomputes_all_cheap: bool
    is_plotted: bool
    plot_folder: Optional[str]

    @classmethod
    def of_config(cls) -> Ask:
        """Read the options.

        Raises RuntimeError for the first invalid one, with its name, its value and what
        would be valid.
        """
        # A separate patch brings the four options that are read with a default.
        asked = cls(
            budget=config.activation_memory_budget,
            target=getattr(config, "activation_memory_budget_target", "saved"),
            peak_bytes=getattr(config, "activation_memory_peak_bytes", None),
            graph_calls=getattr(config, "activation_memory_graph_calls", None),
            peak_margin=getattr(config, "activation_memory_peak_margin", 0),
            solver=config.activation_memory_budget_solver,
            estimator=config.activation_memory_budget_runtime_estimator,
            bans={ban: getattr(config, option) for ban, option in _OPTIONS.items()},
            recomputes_all_cheap=config.aggressive_recomputation,
            is_plotted=config.visualize_memory_budget_pareto,
            plot_folder=config.memory_budget_pareto_dir,
        )
        asked._check()
        return asked

    @property
    def runtime_unit(self) -> str:
        """The unit of the estimator's runtimes; empty for the user's own estimator."""
        return RUNTIME_UNITS.get(str(self.estimator), "")

    def _check(self) -> None:
        check_budget(self.budget)
        custom: Any
        for option, value, names, custom in (
            ("solver", self.solver, [*KNAPSACK_SOLVERS, KNEE], CustomKnapsackSolver),
            (
                "runtime_estimator",
                self.estimator,
                [*RUNTIME_UNITS],
                CustomRuntimeEstimator,
            ),
            ("target", self.target, ["saved", "peak"], ()),
        ):
            valid = f"one of {', '.join(names)}"
            if custom:
                valid += f", or an instance of {custom.__module__}.{custom.__name__}"
            is_valid = isinstance(value, custom) or value in names
            _check_option(f"budget_{option}", value, is_valid, valid)
        for option, value, most in (
            ("peak_bytes", self.peak_bytes, 2**63),
            ("graph_calls", self.graph_calls, 1_000_000),
        ):
            is_count = type(value) is int and 1 <= value <= most
            valid = f"a whole number from 1 to {most:,}, or None"
            _check_option(option, value, value is None or is_count, valid)
        margin = self.peak_margin
        is_share = _is_number(margin, 0, 1) and margin < 1
        _check_option(
            "peak_margin", margin, is_share, "a share of the peak, less than 1"
        )


def check_budget(budget: float) -> None:
    """Raises RuntimeError for an invalid budget, with its value and what is valid."""
    valid = "a number from 0 (save the least) to 1 (run fastest)"
    _check_option("budget", budget, _is_number(budget, 0, 1), valid)


def _check_option(option: str, value: Any, is_valid: bool, valid: str) -> None:
    if not is_valid:
        raise RuntimeError(
            f"activation_memory_{option} is {value!r}; it must be {valid}"
        )


def _is_number(value: Any, low: float, high: float) -> bool:
    """Whether a value is a number (not a bool) from ``low`` to ``high``."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and low <= value <= high


def one_bound(**bounds: Any) -> dict[str, Any]:
    """The one bound of a :class:`.StepBudget` that is not None, by name; empty if none.

    Sizes are converted to bytes.  Raises ValueError for an invalid bound, or for more
    than one.
    """
    asked = {name: value for name, value in bounds.items() if value is not None}
    if len(asked) > 1:
        raise ValueError("pass only one of share, peak_bytes and device_bytes")
    for name, value in asked.items():
        if name != "share":
            try:
                asked[name] = as_bytes(value)
            except ValueError as error:
                raise ValueError(f"{name} is {value!r}; it {error}") from None
        elif not _is_number(value, 0, 1):
            raise ValueError(f"share is {value!r}; it must be a number from 0 to 1")
        elif type(value) is not int:
            # A scalar of numpy or a fraction cannot be stored in a file of plans.
            asked[name] = float(value)
    return asked
