"""One module of ``forms``, by whatever torch runs it; see ``upkeep.forms``."""

import importlib

from benchmarks.fresh import Task
from benchmarks.pages import Row


def measure(task: Task) -> Row:
    form = importlib.import_module(f"benchmarks.forms.{task['form']}")
    return {"what": form.WHAT, "models": form.measured()}
