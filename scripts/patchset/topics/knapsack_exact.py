from ..patch import edits, module_path, Patch


# The search by itself, with a branch of the dispatch.
_BY_ITSELF = Patch(
    name="knapsack-exact",
    lines=250,
    subject="Add an exact knapsack solver for the activation memory budget",
    why="""\
Whoever sets activation_memory_budget can get more bytes saved than it allows, or more
recomputed than it needs, whichever solver is chosen. dp and
dp_knapsack_sliding_hirschberg (#160914) round every size to 1/10000 of the range, so
that activations below half of that are free. On 18 captured joint graphs of real models
the items of dp add up to as much as 7.5 % over the budget, and on one built with 6,000
small activations to four times the budget. greedy keeps it, but stops at the first set that it
finds. ilp needs scipy, and drops items that it returns as 0.9999999.

Where it matters: in graphs with many small activations, with a tight budget, and in
whatever compares plans, as a curve over budgets does. Where it does not: the time of a
compile, of which upstream's dp takes about 0.1 %, and tracing and min cuts the rest. Nor
do most nets recompute less for it: greedy lost nothing on ten of those graphs, and
0.53 % at most, at budgets from 0.02 to 0.5.

Layers repeat, so that hundreds of activations are copies of 5 to 60 distinct ones, and
the problem on the true sizes is small.

"exact" enumerates Pareto states of size and runtime by class of equal activations,
and prunes them by a bound on every completion. What it saves never weighs more than
the budget and is the proven optimum. A limit on states bounds the work, not a clock,
so every rank gets the same plan; at the limit the best set found is used, and a
warning says how much runtime it may be short of the optimum.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_exact_solver.py",
    sources=(module_path("knapsack_search"),),
    since=(2, 6),
    landed=((module_path("knapsack_search"), "def exact_knapsack("),),
    repro="""\
from torch._functorch._activation_checkpointing import knapsack

# 30,000 equal activations, of which a tenth may be saved: dp saves all.
n = 30_000
_, saved, _ = knapsack.dp_knapsack([1 / n] * n, [1.0] * n, 0.1)
print(f"{len(saved) / n:.0%} of the bytes saved, 10% allowed")

# Two halves fit, and are worth 2.0: greedy saves the one that is worth 1.2.
print(knapsack.greedy_knapsack([0.51, 0.5, 0.5], [1.2, 1.0, 1.0], 1.0))
""",
    beyond="""\
- The default stays "dp", and no other solver changes.
- The min cut after the solver decides what is saved in the end, and need not save
  exactly the solver's items.
- On different items without structure it is slower than greedy: 0.1 s for 10,000, where
  greedy takes 3 ms and dp 0.4 s.
""",
    risks="""\
Used only where the config asks for "exact". Instances made to be hard can reach the limit
on states, after about two seconds. Real joint graphs need some thousands of the million.
""",
    edits=edits("""\
@@ torch/_functorch/partitioners.py until 2.6
     ilp_knapsack,
 )
+from ._activation_checkpointing.knapsack_search import exact_knapsack
@@ torch/_functorch/partitioners.py since 2.11
 from ._activation_checkpointing.knapsack_evaluator import KnapsackEvaluator
+from ._activation_checkpointing.knapsack_search import exact_knapsack
@@ torch/_functorch/partitioners.py _optimize_runtime_with_given_memory
         return dp_knapsack(memory, runtimes, max_memory)
+    elif SOLVER == "exact":
+        return exact_knapsack(memory, runtimes, max_memory)
@@ torch/_functorch/config.py
+# "exact" is optimal on the true sizes and never over the budget.
 activation_memory_budget_solver = "dp"
"""),
)

PATCH = Patch(
    name="knapsack-exact",
    subject="Add an exact knapsack solver for the activation memory budget",
    why="""\
Every existing solver either overspends the budget or loses runtime: dp rounds
sizes to 1/10000 of the range, so that on real joint graphs it ends up to 19 %
over, and greedy has no bound. Real graphs repeat their layers, so their hundreds of
items are copies of 5 to 60 distinct ones, and the problem on the true sizes is small.

The new module solves it by Pareto states, pruned by a bound on every completion. The
answer never weighs more than the budget, is the proven optimum (or says how far it can
be from it), and depends on nothing but the arguments. Sizes, runtimes and budgets that
make no sense raise errors, and many budgets are solved at once.
""",
    trailers=_BY_ITSELF.trailers,
    test="test/functorch/test_ac_knapsack_exact.py",
    sources=(
        module_path("knapsack_search"),
        module_path("knapsack_exact"),
    ),
    since=(2, 6),
    landed=((module_path("knapsack_exact"), "def solve_knapsack("),),
    minimal=_BY_ITSELF,
)
