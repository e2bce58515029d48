"""Plans what a compiled forward saves for its backward, within a memory budget.

Users import from here; :func:`.decide.decide` is the partitioner's entry point.

Terms used in the modules:

-   plan: the values that a graph's forward saves; the backward recomputes all others.
-   item: what a knapsack saves or recomputes, with its bytes and its runtime.
-   to keep: to leave alive from the forward to the backward.
-   footprint: the bytes that a plan keeps, its peaks, and the cost of recomputing.
-   to beat: to be no worse in any number (bytes and cost); the plans that no other
    beats are the Pareto front.
-   menu: a graph's Pareto front of plans, corrected by what compiles told.
-   told: read from the code that a compile generated, as opposed to estimated.
-   call: one run of a graph's forward, and of its backward.
-   slot: the number of a call: the smallest one that is free, as no call of the graph
    that still waits for its backward has it.
-   moment: a point in a step, with what calls hold then, and what eager code holds.
-   floor: the lowest peak of the plans that were found.
-   head: the matrix product that makes the logits, and everything up to the loss.
-   variant: a joint graph with its head in some number of chunks.
-   lean plan: the plan that calls use before a step has been recorded.
"""

from __future__ import annotations

import importlib
from typing import Any


# Imported lazily: importing torch must not become slower, and separate patches bring
# some of the modules.
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
