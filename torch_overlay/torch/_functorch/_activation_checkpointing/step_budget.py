"""An old import path of :mod:`torch._functorch.memory_planner`, kept for scripts."""

from ..memory_planner.step.budget import *  # noqa: F403
