"""Plans what a compiled forward saves for its backward, within a budget of memory.

People import from here; :func:`.decide.decide` is the partitioner's way in.

What the modules mean by

-   plan: the values that the forward of a graph saves; all others are computed again.
-   item: something that a knapsack saves or not, with its bytes and its runtime.
-   footprint: what a plan keeps and holds at most, in bytes, and what it computes again.
-   menu: the plans of a graph that no other beats, corrected by what compiles told.
-   told: read from what a compile generated, as opposed to estimated.
-   call: one run of a graph's forward, and of its backward.
-   slot: the smallest number that no other call of the graph has that waits for its
    backward.
-   moment: what calls hold at some time in a step, and what eager code holds then.
-   floor: the lowest peak that any plan reaches.
-   lean plan: the plan by which calls run before a step has been recorded.
"""

from __future__ import annotations

import importlib
from typing import Any


# Imported when they are asked for: importing torch is to cost nothing more, and patches
# of their own bring some of the modules.
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
    module = importlib.import_module(f".{_PUBLIC[name]}", __name__)
    return getattr(module, name)
