from ..patch import edits, KNAPSACK, Patch


PATCH = Patch(
    name="knapsack-solvers",
    subject="Rewrite the knapsack solvers so that the capacity is kept",
    why="""\
dp_knapsack_sliding_hirschberg hands out one unit too many at every split: real joint
graphs end up to 24 % over their budget. In the same module, greedy divides by zero on
items without size, ilp drops items that the solver returns as 0.9999999, and dp's
float32 table absorbs small runtimes beside large ones.

The solvers are written anew under their old names and signatures. Both dynamic
programs are the exact solver on sizes rounded as dp rounds them, and ilp is the exact
solver: no table is left that would have to be split, and no scipy that has to be
there. KNAPSACK_SOLVERS names the solvers that a config string may select.
""",
    trailers=("Fixes: #197871", "Upstream-PR: pytorch/pytorch#160914"),
    test="test/functorch/test_ac_knapsack_solvers.py",
    sources=(KNAPSACK, "test/functorch/test_ac_knapsack_hirschberg.py"),
    since=(2, 6),
    landed=((KNAPSACK, "def dp_knapsack_sliding_hirschberg("),),
    faults=(
        (
            "#197871: every split hands out one unit too many",
            r"right_capacity = capacity - best_split",
        ),
        (
            "greedy divides by zero on items without size",
            r"runtimes\[i\] / memory\[i\]",
        ),
        ("ilp drops items returned as 0.9999999", r"if i == 1:"),
        ("dp's float32 table absorbs small runtimes", r"dtype=torch\.float32"),
        ("no table of solvers by name", r"(?s)\A(?!.*KNAPSACK_SOLVERS)"),
    ),
    needs=("knapsack-exact",),
    minimal=Patch(
        name="knapsack-solvers",
        lines=1,
        subject="Keep the capacity when the sliding Hirschberg solver splits it",
        why="""\
Before its arrays are sliced, dp_knapsack_sliding_hirschberg increments the capacity
of a segment, and then it subtracts the left half's share from the incremented value.
Every split hands out one quantum that is not there: 5,000 equal items end up 23 % over at
budget 0.5, real joint graphs by as much as the table says.

The right half now gets what the left half leaves of the true capacity.
""",
        repro="""\
from torch._functorch._activation_checkpointing.knapsack import (
    dp_knapsack_sliding_hirschberg,
)

# Two items of the three are saved, where one fits.
print(dp_knapsack_sliding_hirschberg([1e-4] * 3, [1.0] * 3, 1e-4))

_, saved, _ = dp_knapsack_sliding_hirschberg([1 / 5000] * 5000, [1.0] * 5000, 0.5)
print(f"{len(saved) / 5000:.0%} of the bytes saved, 50% allowed")  # 62%, then 50%
""",
        beyond="""\
- Sizes are rounded to 1/10000 of the range, as dp rounds them too, so that the true
  sizes of many small items may still add up to more than the budget.
- It is no faster and takes no less memory.
""",
        trailers=("Fixes: #197871", "Upstream-PR: pytorch/pytorch#160914"),
        test="test/functorch/test_ac_knapsack_hirschberg.py",
        risks="""\
Plans made with this solver change where it used to overspend: they save less, and
keep the budget. Nothing else is touched.
""",
        edits=edits("""\
@@ torch/_functorch/_activation_checkpointing/knapsack.py dp_knapsack_sliding_hirschberg
-        right_capacity = capacity - best_split
+        right_capacity = capacity - 1 - best_split  # The slices have a cell more.
"""),
    ),
)
