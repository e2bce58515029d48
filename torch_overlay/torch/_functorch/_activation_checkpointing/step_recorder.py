"""An old import path of :mod:`torch._functorch.memory_planner`, kept for scripts."""

from ..memory_planner.step.current_step import *  # noqa: F403
from ..memory_planner.step.recorder import *  # noqa: F403
