"""Another address of :mod:`torch._functorch.memory_planner`, for older scripts."""

from ..memory_planner.step.current_step import running


__all__ = ["running"]
