"""Another address of :mod:`torch._functorch.memory_planner`, for older scripts."""

from ..memory_planner import last_plan, plans, print_saved_values


__all__ = ["last_plan", "plans", "print_saved_values"]
