from __future__ import annotations

from ..patch import (
    CONFIG,
    Edit,
    module_path,
    PARTITIONERS,
    Patch,
    SOLVER_CLASS,
)


_TESTING = '# "testing": Returns 1 for everything\n'
_DOCUMENTED = (
    "    1) The __call__() method contains the implementation of the knapsack solver.\n"
)

_LOGGING_IMPORT = "    create_structured_trace_for_min_cut_info,\n)\n"
_PLACE = "from torch._functorch._activation_checkpointing"
_IMPORTS = (
    f"{_PLACE}.planning import decide, Request\n{_PLACE}.rerun_cost import is_costly\n"
)
_PARTITION = "min_cut_rematerialization_partition"
_COMPILER = '    compiler: str = "inductor",\n    *,\n'
_DECISION = """\
    decision = decide(
        joint_graph, node_info, num_fwd_outputs, memory_budget, request, fused
    )
    saved_values = decision.saved_values
"""


PATCH = Patch(
    name="memory-budget",
    subject="Choose what an activation memory budget saves in a module of its own",
    why="""\
choose_saved_values_set does everything in 260 lines, and its plans may be over their
budget (a U-Net keeps 0.593 at 0.5), as the min cut after the knapsack saves other
values than the solver chose. It accepts a budget of NaN, and notices a misspelt
solver only when a graph needs one. Operators without a FLOP formula (custom ones,
grouped matmuls) are recomputed first, however long they take. The Pareto plot bisects
with a knapsack and a min cut per point (438 knapsacks for a net of 15 items), and the
knee search of dynamic_memory_budget_dp solves a hundred knapsacks one by one and may
exceed small budgets. A custom solver gets the sizes but not the runtimes, and its
answer is not checked.

planning.decide takes a request and returns a decision: what to save, what decided it,
the range, the knapsack and the bytes kept. choose_saved_values_set stays, for graphs
that the new modules cannot model. A model of the graph's storages tells what each
plan keeps and recomputes; if the cut's is over the budget, or recomputes more, only
the solver's items are saved. Values that something smaller can replace are one item.
The budget is filled exactly; ties go to the smaller plan. Operators that no compiler
fuses cost at least the bytes they move. Options are checked before the first cut.
The knee search solves all its budgets in one call, and each set of items is cut once.
A custom solver with a parameter named runtimes gets them, and its lists have to
name every item once. The estimator "roofline" counts the bytes that recomputation
moves as well as its FLOPs.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_memory_budget.py",
    sources=(
        module_path("planning"),
        module_path("decision"),
        module_path("memory_budget"),
        module_path("budget_curve"),
        module_path("budget_solver"),
        module_path("liveness"),
        module_path("rerun_cost"),
    ),
    edits=(
        Edit(
            CONFIG,
            anchor="# NOTE: This *cannot* be treated as\n",
            replacement="""\
# It bounds the bytes that the forward leaves alive for the backward (whole storages,
# without parameters and inputs) by low + budget * (high - low), where low and high are
# what budgets 0 and 1 keep: see
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
    A parameter named ``runtimes``, if there is one, gets the cost of recomputing each
    item. The lists returned have to name every item once; see
    torch/_functorch/_activation_checkpointing/memory_budget.py.
""",
            since=(2, 11),
        ),
        Edit(
            PARTITIONERS,
            anchor=_LOGGING_IMPORT,
            replacement=_LOGGING_IMPORT + _IMPORTS,
        ),
        Edit(
            PARTITIONERS,
            anchor="op_types.is_compute_intensive(node)",
            replacement="op_types.is_compute_intensive(node) or is_costly(node)",
            inside="should_ban_recomputation",
        ),
        Edit(
            PARTITIONERS,
            anchor=_COMPILER,
            replacement=_COMPILER
            + """\
    # What to plan for, if not what the config says.
    request: Request | None = None,
    # Whether inductor compiles the two graphs: then peaks are those of its kernels.
    fused: bool = False,
""",
            inside=_PARTITION,
        ),
        Edit(
            PARTITIONERS,
            anchor="    saved_values = choose_saved_values_set(\n",
            through="    )\n",
            digests=("2682dbbcfdd08e77",),
            replacement=_DECISION,
            inside=_PARTITION,
        ),
    ),
    since=(2, 11),
    landed=((PARTITIONERS, "decision = decide("),),
    needs=("solver-by-name", "random-ops", "knapsack-exact"),
    evidence=(("kept", "share kept"), ("kept", "forwards"), ("solvers", "99 budgets")),
    risks="""\
Plans change where they were over the budget or recomputed more than they had to. If
no item is left for a knapsack, every release takes the cut that 2.14 takes. A budget
is now a share of the bytes really kept, not of a sum of sizes. A budget out of range,
a wrong name, and a custom solver's answer that names an index twice or not at all
used to pass unnoticed and now raise. The knee search takes the exact solver's
budgets.
""",
    kind="improvements",
)
