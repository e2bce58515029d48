from __future__ import annotations

from ..patch import (
    CONFIG,
    Edit,
    module_path,
    PARTITIONERS,
    Patch,
    SOLVER_CLASS,
)
from . import random_ops
from .random_ops import CHOOSE
from .solver_by_name import DISPATCH, NEW_IMPORT


_TESTING = '# "testing": Returns 1 for everything\n'
_DOCUMENTED = (
    "    1) The __call__() method contains the implementation of the knapsack solver.\n"
)

IMPORT = "from ._activation_checkpointing import random_ops, rerun_cost\n"
CHOICE_IMPORT = "from ._activation_checkpointing.memory_budget import choose_plan\n"
CHOICE = """\
    plan = choose_plan(joint_graph, node_info, memory_budget, num_fwd_outputs)
"""


def _drop(lines: str) -> Edit:
    return Edit(PARTITIONERS, anchor=lines, replacement="")


PATCH = Patch(
    name="memory-budget",
    subject="Choose what an activation memory budget saves in a module of its own",
    why="""\
choose_saved_values_set does everything in 260 lines, and its plans may be over their
budget (a U-Net keeps .593 at .5), as the min cut after the knapsack saves other values
than the solver chose. It accepts a budget of NaN and does not notice a misspelt solver until a
graph needs one. What has no FLOP formula (a custom operator, a grouped product) is
recomputed first, however long it takes. The Pareto plot bisects with a knapsack and a min cut per point (438
knapsacks for a net of 15 items), and the knee search of dynamic_memory_budget_dp solves
a hundred knapsacks one by one and may exceed small budgets. A custom solver gets the
sizes but not the runtimes, and nothing checks its answer.

The new module works in small steps and returns one value: what to save, what decided
it, the range, the knapsack and what the plan keeps. A model of the graph's storages tells
what each plan keeps and recomputes, and where the cut's is over the budget, or recomputes
more, nothing but the solver's items is saved. Items that a smaller value can be kept for
are one item. A budget is kept to the byte, and what fits to the byte is saved. What no
compiler fuses costs at least the bytes that it moves. Options are checked before the first
cut. Plot and
knee search solve all their budgets in one call, and each set of items is cut once. A
custom solver with a parameter named runtimes gets them, and its lists have to name every
item once. The estimator "roofline" counts the bytes that recomputation moves as well as
its FLOP.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_memory_budget.py",
    sources=(
        module_path("memory_budget"),
        module_path("budget_curve"),
        module_path("budget_options"),
        module_path("liveness"),
        module_path("rerun_cost"),
    ),
    edits=(
        Edit(
            CONFIG,
            anchor="# NOTE: This *cannot* be treated as\n",
            replacement="""\
# What counts are the bytes that the forward leaves alive for the backward: storages,
# whole, without parameters and inputs. They are at most low + budget * (high - low),
# where low and high are what budgets 0 and 1 keep: see
# torch/_functorch/_activation_checkpointing/memory_budget.py.
""",
        ),
        Edit(
            CONFIG,
            anchor=_TESTING,
            replacement='# "roofline": FLOP or the bytes moved, whichever takes longer\n'
            + _TESTING,
        ),
        Edit(
            SOLVER_CLASS,
            anchor=_DOCUMENTED,
            replacement=_DOCUMENTED
            + """\
    Where it has a parameter named ``runtimes``, it gets what recomputing each item
    costs, as well. The lists returned have to name every item once; see
    torch/_functorch/_activation_checkpointing/memory_budget.py.
""",
        ),
        Edit(
            PARTITIONERS,
            anchor="from dataclasses import dataclass, replace\n",
            replacement="from dataclasses import dataclass\n",
        ),
        _drop(
            "from torch._functorch._activation_checkpointing.ac_logging_utils import (\n"
            "    create_structured_trace_for_min_cut_info,\n)\n"
        ),
        Edit(
            PARTITIONERS,
            anchor="from torch._inductor.custom_graph_pass import (\n"
            "    CustomKnapsackSolver,\n    CustomRuntimeEstimator,\n)\n",
            replacement="from torch._inductor.custom_graph_pass import "
            "CustomRuntimeEstimator\n",
        ),
        _drop(
            "from ._activation_checkpointing.graph_info_provider import "
            "GraphInfoProvider\n"
        ),
        _drop(NEW_IMPORT),
        _drop("from ._aot_autograd.logging_utils import get_aot_graph_name\n"),
        Edit(
            PARTITIONERS,
            anchor="from ._activation_checkpointing.knapsack_evaluator import "
            "KnapsackEvaluator\n",
            replacement=CHOICE_IMPORT,
        ),
        Edit(PARTITIONERS, anchor=random_ops.IMPORT, replacement=IMPORT),
        Edit(
            PARTITIONERS,
            anchor="op_types.is_compute_intensive(node)",
            replacement="op_types.is_compute_intensive(node) "
            "or rerun_cost.is_costly(node)",
            inside="should_ban_recomputation",
        ),
        Edit(
            PARTITIONERS,
            anchor=f"def {DISPATCH}(",
            whole=True,
            digests=("af0da039a0fc1a73",),
            replacement="",
            inside=DISPATCH,
        ),
        Edit(
            PARTITIONERS,
            anchor=f"def {CHOOSE}(",
            whole=True,
            digests=(
                "9406093cc54bb9fe",
                "864b26f8cc5d500f",
                "cc082be51f7a97b7",
                "c3e5cfa93d4aad1b",
            ),
            replacement="",
            inside=CHOOSE,
        ),
        Edit(
            PARTITIONERS,
            anchor="    saved_values = choose_saved_values_set(\n",
            through="    )\n",
            digests=("2682dbbcfdd08e77",),
            replacement=f"{CHOICE}    saved_values = plan.saved_values\n",
            inside="min_cut_rematerialization_partition",
        ),
    ),
    since=(2, 11),
    landed=((PARTITIONERS, "memory_budget import choose_plan"),),
    needs=("solver-by-name", "random-ops", "knapsack-exact"),
    evidence=(("kept", "share kept"), ("kept", "forwards"), ("solvers", "99 budgets")),
    risks="""\
Plans change where they were over the budget or recomputed more than they had to; where
no item is left for a knapsack, every release takes the cut that 2.14 takes. A share is
one of the bytes really kept, which differs from the sums of sizes that it was one of.
A budget out of range, a wrong name
and a custom solver's answer that names an index twice or not at all used to pass
unnoticed and now raise. The knee search takes the exact solver's budgets.
""",
    kind="improvements",
)
