"""Another address of :mod:`torch._functorch.memory_planner`, for older scripts."""

from ..memory_planner import StepBudget, StepBudgetError


__all__ = ["StepBudget", "StepBudgetError"]
