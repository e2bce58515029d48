"""An old import path of :mod:`torch._functorch.memory_planner`, kept for scripts."""

from ..memory_planner.report.saved_values import *  # noqa: F403
