"""Another address of :mod:`torch._functorch.memory_planner`, for older scripts."""

from ..memory_planner.step.budget import *  # noqa: F403
