"""Another address of :mod:`torch._functorch.memory_planner`, for older scripts."""

from ..memory_planner.report.saved_values import *  # noqa: F403
