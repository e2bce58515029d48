from __future__ import annotations

from ..patch import Edit, Fault, KNAPSACK, Patch


_RISKS = """\
Plans made with this solver change where it used to overspend: they save less, and
keep the budget. Nothing else is touched.
"""

PATCH = Patch(
    name="knapsack-solvers",
    subject="Rewrite the knapsack solvers so that the capacity is kept",
    why="""\
dp_knapsack_sliding_hirschberg increments its capacity for slicing and then
splits the incremented value, so every split hands out one unit too many: three
items of one unit each and a budget of one unit give two saved items, and real
joint graphs end up to 24 % over their budget. In the same module, greedy
divides by zero on items without size, ilp drops items that the solver returns
as 0.9999999, and dp's float32 table absorbs small runtimes beside large ones.

The solvers are written anew under their old names and signatures. Both dynamic
programs are the exact solver on sizes rounded as dp rounds them, and ilp is the exact
solver: no table is left that would have to be split, and no scipy that has to be
there. KNAPSACK_SOLVERS names the solvers that a config string may select.
""",
    trailers=("Fixes: #197871", "Upstream-PR: pytorch/pytorch#160914"),
    test="test/functorch/test_ac_knapsack_solvers.py",
    sources=(
        KNAPSACK,
        "test/functorch/test_ac_knapsack_hirschberg.py",
    ),
    landed=((KNAPSACK, "def dp_knapsack_sliding_hirschberg("),),
    faults=(
        Fault(
            "#197871: every split hands out one unit too many",
            KNAPSACK,
            ("capacity = capacity + 1", "right_capacity = capacity - best_split"),
        ),
        Fault(
            "greedy divides by zero on items without size",
            KNAPSACK,
            ("runtimes[i] / memory[i]",),
        ),
        Fault("ilp drops items returned as 0.9999999", KNAPSACK, ("if i == 1:",)),
        Fault(
            "dp's float32 table absorbs small runtimes",
            KNAPSACK,
            ("dtype=torch.float32",),
        ),
        Fault("no table of solvers by name", KNAPSACK, missing="KNAPSACK_SOLVERS"),
    ),
    needs=("knapsack-exact",),
    evidence=(("solvers", "Hirschberg"),),
    risks=_RISKS,
    minimal=Patch(
        name="knapsack-solvers",
        subject="Keep the capacity when the sliding Hirschberg solver splits it",
        why="""\
Before its arrays are sliced, dp_knapsack_sliding_hirschberg increments the capacity
of a segment, and then it subtracts the left half's share from the incremented value.
Every split hands out one quantum that is not there: three items of one quantum each
and a capacity of one quantum give two saved items, 5,000 equal items end up 20 %
over, real joint graphs up to 24 %.

The right half now gets what the left half leaves of the true capacity. The tests
check feasibility, the optimum by enumeration, and equality with dp.
""",
        trailers=("Fixes: #197871", "Upstream-PR: pytorch/pytorch#160914"),
        test="test/functorch/test_ac_knapsack_hirschberg.py",
        risks=_RISKS,
        edits=(
            Edit(
                KNAPSACK,
                anchor="        right_capacity = capacity - best_split\n",
                replacement="        # The slices hold one cell more than the capacity.\n"
                "        right_capacity = capacity - 1 - best_split\n",
                inside="dp_knapsack_sliding_hirschberg",
                since=(2, 11),
            ),
        ),
    ),
)
