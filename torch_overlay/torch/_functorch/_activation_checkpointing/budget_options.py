"""What the options of the activation memory budget may be.

They are checked before a graph is split, whichever way its plan is found, so that none
is ignored by one of them or turns a budget into another.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, Callable, NamedTuple

from torch._functorch import config
from torch._inductor.custom_graph_pass import (
    CustomKnapsackSolver,
    CustomRuntimeEstimator,
)

from .knapsack import KNAPSACK_SOLVERS
from .rerun_cost import RUNTIME_UNITS


__all__ = ["KNEE", "CustomKnapsackSolver", "check_budget_options", "is_number"]

# The name that asks for a lower budget where a lower one is the better trade.
KNEE = "dynamic_memory_budget_dp"

# More calls of one graph, or plans of it, are taken for a mistake.
_MOST = 1_000_000


class _Option(NamedTuple):
    is_valid: Callable[[Any], bool]
    valid: str


def check_budget_options(memory_budget: float) -> None:
    """Check the budget of a graph and all options of the config.

    Raises RuntimeError for the first one that is not valid, with its name, its value, and
    what would be valid.
    """
    if not is_number(memory_budget, 0, 1):
        raise RuntimeError(
            f"The activation memory budget is {memory_budget!r}; it must be a number "
            "from 0 (save the least) to 1 (run fastest)"
        )
    for name, option in _options().items():
        # A patch of its own brings each of them.
        value = getattr(config, name, None)
        if hasattr(config, name) and not option.is_valid(value):
            raise RuntimeError(f"{name} is {value!r}; it must be {option.valid}")


def is_number(value: Any, low: float, high: float) -> bool:
    """Whether a value is a number, and no bool, between two others."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and low <= value <= high


def _is_count(value: Any, low: int, high: float) -> bool:
    return type(value) is int and low <= value <= high


def _one_of(*names: str, custom: Any = None) -> _Option:
    valid = f"one of {', '.join(names)}"
    if custom is not None:
        valid += f", or an instance of {custom.__module__}.{custom.__name__}"
    return _Option(
        lambda value: (
            (isinstance(value, str) and value in names)
            or (custom is not None and isinstance(value, custom))
        ),
        valid,
    )


def _options() -> dict[str, _Option]:
    """All options but the budget itself; a solver may be registered at any time."""
    return {
        "activation_memory_budget_solver": _one_of(
            *KNAPSACK_SOLVERS, KNEE, custom=CustomKnapsackSolver
        ),
        "activation_memory_budget_runtime_estimator": _one_of(
            *RUNTIME_UNITS, custom=CustomRuntimeEstimator
        ),
        "activation_memory_budget_target": _one_of("saved", "peak"),
        "activation_memory_peak_bytes": _Option(
            lambda value: value is None or _is_count(value, 1, float("inf")),
            "a positive number of bytes, or None",
        ),
        "activation_memory_peak_margin": _Option(
            lambda value: is_number(value, 0, 1) and value < 1,
            "a share of the peak, from 0 to less than 1",
        ),
        "activation_memory_graph_calls": _Option(
            lambda value: value is None or _is_count(value, 1, _MOST),
            f"a number of calls from 1 to {_MOST:,}, or None",
        ),
        "drop_unread_arguments": _Option(
            lambda value: isinstance(value, bool), "True or False"
        ),
    }
