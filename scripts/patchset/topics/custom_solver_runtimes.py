from __future__ import annotations

from ..patch import CUSTOM_SOLVER, Edit, PARTITIONERS, Patch, SOLVER_CLASS
from .solver_by_name import DISPATCH


_IMPORT = (
    "from ._activation_checkpointing.graph_info_provider import GraphInfoProvider\n"
)
_DOCUMENTED = (
    "    1) The __call__() method contains the implementation of the knapsack solver.\n"
)

PATCH = Patch(
    name="custom-solver-runtimes",
    subject="Give custom knapsack solvers the runtimes and check their answers",
    why="""\
A CustomKnapsackSolver is told the sizes but not the runtimes of the items, half of
what a knapsack is made of: solvers outside of PyTorch monkeypatch estimate_runtime
to get at them. One that has a parameter named runtimes now gets them; all others
are called as before.

What it answers was not looked at: an index out of range is swallowed and an item
that is in neither list saved. Now the lists have to name every item once, or the
error names the class and the index. A solver may save more than the budget, as one
that pins some activations has to, but there is a warning with both numbers.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    tested="python test/functorch/test_ac_custom_solver.py",
    files=(CUSTOM_SOLVER, "test/functorch/test_ac_custom_solver.py"),
    edits=(
        Edit(
            PARTITIONERS,
            anchor=_IMPORT,
            replacement="from ._activation_checkpointing.custom_solver import "
            "ask_custom_solver\n" + _IMPORT,
            since=(2, 11),
        ),
        Edit(
            PARTITIONERS,
            anchor="        saved_node_idx, recomp_node_idx = SOLVER(\n",
            through="        return (0.0, saved_node_idx, recomp_node_idx)\n",
            digest="69bdbc84f9d2ce06",
            replacement="""\
        return ask_custom_solver(
            SOLVER,
            memory,
            runtimes,
            max_memory,
            joint_graph,
            node_info,
            all_recomputable_banned_nodes,
        )
""",
            inside=DISPATCH,
            since=(2, 11),
        ),
        Edit(
            SOLVER_CLASS,
            anchor=_DOCUMENTED,
            replacement=_DOCUMENTED
            + """\
    Where it has a parameter named ``runtimes``, it gets what recomputing each item
    costs, as well. The lists returned have to name every item once; see
    torch/_functorch/_activation_checkpointing/custom_solver.py.
""",
            since=(2, 11),
        ),
    ),
    landed=((PARTITIONERS, "ask_custom_solver("),),
    risks="""\
A custom solver that named an index twice, left one out or was out of range used to go
unnoticed and now raises. Its answers are otherwise taken as before.
""",
)
