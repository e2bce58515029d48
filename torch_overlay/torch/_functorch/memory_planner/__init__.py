"""Plans what a compiled forward saves for its backward, within a budget of memory.

Users import from here; :func:`.decide.decide` is the partitioner's entry point.

Terms used in the modules:

-   plan: the values that a graph's forward saves; all others are recomputed.
-   item: what a knapsack saves or recomputes, with its bytes and its runtime.
-   footprint: the bytes that a plan keeps, its peaks, and the cost of recomputing.
-   menu: the plans of a graph that no other plan beats, corrected by what is told.
-   told: read from the code that a compile generated, as opposed to estimated.
-   call: one run of a graph's forward, and of its backward.
-   slot: a call's number, the smallest that no other call of the graph has that still
    waits for its backward.
-   moment: a point in a step, with what calls hold then, and what eager code holds.
-   floor: the lowest peak that any plan reaches.
-   head: the product that makes logits, and all up to the loss.
-   variant: a joint graph with its head in some number of chunks.
-   lean plan: the plan that calls use before a step has been recorded.
"""

from __future__ import annotations

import importlib
from typing import Any


# Imported lazily: importing torch must not cost more, and some of the modules come with
# separate patches.
_PUBLIC = {
    "StepBudget": "step.budget",
    "StepBudgetError": "step.budget",
    "last_plan": "report.saved_values",
    "plans": "report.saved_values",
    "print_saved_values": "report.saved_values",
}

__all__ = [
    "StepBudget",
    "StepBudgetError",
    "last_plan",
    "plans",
    "print_saved_values",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_PUBLIC[name]}", __name__)
    except ModuleNotFoundError as error:
        raise AttributeError(f"{name} is not part of this torch: {error}") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
