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
does not follow the order in which the scheduler runs them, so a peak that was asked
for can be missed.

With activation_memory_peak_judge = n, n plans between the lowest peak and the fastest
are scheduled, which costs about what compiling the graph does without compiling
kernels, and the cheapest whose true peak is within the budget is kept. The plans that
are tried do not depend on the budget, so a smaller one never has a higher peak. A
StepBudget has those plans scheduled that it is about to choose, and those that its
bound is made of.
""",
    test="test/inductor/test_peak_judge.py",
    sources=("torch/_inductor/peak_judge.py", "torch/_inductor/wrapper_memory.py"),
    needs=("step-budget", "buffer-reuse"),
    edits=(
        Edit(
            CONFIG,
            anchor=_ESTIMATOR,
            replacement="""\
# How many plans inductor schedules to know their true peaks, for the target "peak" and a
# peak in bytes, before it keeps one of them; at least 2, or 0: the estimates decide. For a
# StepBudget, how often it may have plans scheduled before it keeps one for each graph.
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
Opt-in, and only for the target "peak", a peak in bytes or a StepBudget: otherwise graphs
are split as before. Where a schedule cannot be made, a warning says why and the estimates
decide.
""",
    kind="new features",
)
