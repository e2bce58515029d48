"""Another address of :mod:`torch._functorch.memory_planner`, for older scripts."""

from ..memory_planner.step.current_step import *  # noqa: F403
from ..memory_planner.step.recorder import *  # noqa: F403
