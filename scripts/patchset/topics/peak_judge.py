from __future__ import annotations

from ..patch import CONFIG, Edit, Patch
from .peak_budget import COMPILE_FX


_ESTIMATOR = "# This controls how we estimate the runtime when deciding"
_PARTITION = """\
            return min_cut_rematerialization_partition(
                gm,
                joint_inputs,
"""
_IMPORTS = "from . import config, distributed_autotune, metrics\n"

PATCH = Patch(
    name="peak-judge",
    subject="Let inductor's schedule judge plans for peak memory",
    why="""\
Plans for peak memory are compared by an estimate of what inductor's kernels hold. It
ignores the order in which the scheduler runs them, so the bound can be missed.

With activation_memory_peak_judge = n, n plans between the lowest peak and the fastest
are scheduled, which takes about as long as compiling the graph without its kernels, and
the cheapest whose scheduled peak is within the budget is used. The plans tried do not
depend on the budget, so a smaller one never has a higher peak. A StepBudget schedules
the plans it is about to choose, and those that define its bound.
""",
    test="test/inductor/test_peak_judge.py",
    sources=("torch/_inductor/peak_judge.py",),
    needs=("step-budget", "buffer-reuse"),
    edits=(
        Edit(
            CONFIG,
            anchor=_ESTIMATOR,
            replacement="""\
# How many plans inductor schedules to find their real peaks before one is chosen, for
# the target "peak" and a peak in bytes: at least 2, or 0 to trust the estimates. For a
# StepBudget, the most rounds of plans to schedule.
activation_memory_peak_judge = 0

"""
            + _ESTIMATOR,
        ),
        Edit(
            COMPILE_FX,
            anchor=_IMPORTS,
            replacement=_IMPORTS.replace("metrics", "metrics, peak_judge"),
        ),
        Edit(
            COMPILE_FX,
            anchor=_PARTITION,
            replacement="""\
            return peak_judge.partition(
                min_cut_rematerialization_partition,
                gm,
                joint_inputs,
""",
            inside="partition_fn",
        ),
    ),
    # Before, inductor's estimate leaves out what the forward returned.
    since=(2, 13),
    landed=((COMPILE_FX, "peak_judge.partition("),),
    risks="""\
Opt-in, and only for the target "peak", a peak in bytes or a StepBudget: otherwise
graphs are partitioned as before. If a graph cannot be scheduled, a warning says why
and the estimates decide.
""",
    smallest="""\
A function schedule_peak(gm) in compile_fx: the peak of a graph's schedule, with its
test against the peak of a run. Choosing among plans can stay outside.
""",
    kind="new features",
)
