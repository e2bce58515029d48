from __future__ import annotations

from ..patch import BUDGET_CHECKS, Edit, PARTITIONERS, Patch


_IMPORT = "    create_structured_trace_for_min_cut_info,\n)\n"
_OPTIONS = "    more_aggressive_options = replace(\n"


def _told(saved: str) -> Edit:
    """The plan that fits without a knapsack is looked at before it is returned."""
    anchor = f"memory_budget:\n        return {saved}\n"
    return Edit(
        PARTITIONERS,
        anchor=anchor,
        replacement=anchor.replace(saved, f"watched({saved})"),
        inside="choose_saved_values_set",
        since=(2, 10),
    )


PATCH = Patch(
    name="budget-errors",
    subject="Say what is wrong with an activation memory budget",
    why="""\
A budget of NaN passes every comparison and gives some plan; a misspelt solver or
estimator is found when a graph needs it, which may be the last of many, and the
error does not tell which names there are. All three are now checked before the
first min cut of a graph, at any budget.

A plan may also save more than was asked for: it is credited with inputs that it does
not save, and the min cut after the knapsack does not minimise bytes. A transformer
encoder of two layers on 16 tokens saves 0.998 of the range at a budget of 0.5. Where
the activations saved weigh more than the budget allows, there is now a warning for
the graph with both numbers.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    tested="python test/functorch/test_ac_budget_checks.py",
    files=(BUDGET_CHECKS, "test/functorch/test_ac_budget_checks.py"),
    edits=(
        Edit(
            PARTITIONERS,
            anchor=_IMPORT,
            replacement=_IMPORT
            + """\
from torch._functorch._activation_checkpointing.budget_checks import (
    check_budget_options,
    warn_if_over_budget,
)
""",
            since=(2, 10),
        ),
        Edit(
            PARTITIONERS,
            anchor="    if memory_budget > 1 or memory_budget < 0:\n",
            through="        )\n",
            digest="0c87efd46d84d9d4",
            replacement="    check_budget_options(memory_budget)\n",
            inside="choose_saved_values_set",
            since=(2, 10),
        ),
        Edit(
            PARTITIONERS,
            anchor=_OPTIONS,
            replacement="""\
    watched = functools.partial(
        warn_if_over_budget,
        memory_budget,
        max_act_size - min_act_size,
        node_info.inputs,
        _size_of,
    )
"""
            + _OPTIONS,
            inside="choose_saved_values_set",
            since=(2, 10),
        ),
        _told("more_aggressive_saved_values"),
        _told("aggressive_recomputation_saved_values"),
        Edit(
            PARTITIONERS,
            anchor="    return get_saved_values_knapsack(\n",
            through="    )[0]\n",
            digest="4525ad6d20419561",
            replacement="""\
    saved_values, _ = get_saved_values_knapsack(
        memory_budget=memory_budget, node_info=node_info, joint_graph=joint_graph
    )
    return watched(saved_values)
""",
            inside="choose_saved_values_set",
            since=(2, 10),
        ),
    ),
    landed=((PARTITIONERS, "check_budget_options("),),
    risks="""\
A budget out of range and a wrong name used to pass unnoticed on graphs that never asked a
solver; they stop such a compile now. The warning is new and plans are not changed.
""",
    kind="improvements",
)
