from __future__ import annotations

from ..patch import (
    CONFIG,
    Edit,
    module_path,
    Patch,
)


_BUDGET = "activation_memory_budget = 1.0\n"
COMPILE_FX = "torch/_inductor/compile_fx.py"
_KWARGS = """\
                # pyrefly: ignore[bad-argument-type]
                **kwargs,
            )
"""

PATCH = Patch(
    name="peak-budget",
    subject="Let the activation memory budget bound the peak",
    why="""\
The budget bounds what is saved for the backward, not what training runs out of.
Where little is saved, the first step of the backward repeats most of the forward
at once: a small budget has a higher peak than none.

With activation_memory_budget_target = "peak", budget b bounds the peak by
floor + b * (peak at budget 1 - floor), and activation_memory_peak_bytes by a number
of bytes. A model of live bytes, exact for what the two graphs do operator by
operator and an estimate of what inductor's kernels hold where those are made of
them, evaluates some hundred plans: checkpoints by dynamic programming,
expensive operators saved as well where there is room, and the min cuts' own plans.
The cheapest that fits is taken, so a smaller budget never has a higher peak. An
estimate fits if it does with activation_memory_peak_margin added, 5 %.

The default target, "saved", keeps today's meaning. Where no plan can be made, a
warning says why and the graph gets upstream's plan for saved bytes.
""",
    trailers=("Fixes: #197838",),
    test="test/functorch/test_ac_peak_budget.py",
    sources=(
        module_path("fused_peak"),
        module_path("peak_budget"),
    ),
    needs=("saved-report",),
    evidence=(
        ("peak", "predicted / measured"),
        ("peak", "measured peak"),
        ("peak", "gradients"),
    ),
    edits=(
        Edit(
            CONFIG,
            anchor=_BUDGET,
            replacement=_BUDGET
            + """
# What the budget bounds. "saved": the bytes saved for the backward, as a share of
# those between the inputs and the plan that runs fastest. "peak": the peak of live
# bytes, parameters and inputs apart, as a share of the peaks between the lowest that
# can be reached and that of the plan that runs fastest.
activation_memory_budget_target = "saved"

# A peak in bytes to stay below, parameters and inputs apart, whatever the budget and
# its target; a graph that cannot gets the lowest peak found, and a warning.
activation_memory_peak_bytes: int | None = None

# By which share of it a peak of inductor's kernels may be above its estimate: plans are
# kept below what is allowed by as much, unless a schedule judges them.
activation_memory_peak_margin = 0.05

# How many calls of a graph wait for their backward at once, as where each block of a
# model is compiled by itself, for the target "peak" and a peak in bytes; None: one.
activation_memory_graph_calls: int | None = None
""",
        ),
        Edit(
            COMPILE_FX,
            anchor=_KWARGS,
            replacement="                fused=True,\n" + _KWARGS,
            inside="partition_fn",
        ),
    ),
    since=(2, 11),
    landed=((COMPILE_FX, "                fused=True,\n"),),
    risks="""\
Opt-in: with the default target no plan changes, bit for bit. Peaks are exact for graphs
that run operator by operator and estimates for inductor's kernels. A kernel's own
workspace is not counted.
""",
    kind="new features",
)
