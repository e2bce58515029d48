from ..patch import edits, module_path, Patch, planner_path


_TIE_BREAK = Patch(
    name="peak-budget",
    lines=120,
    subject="Of plans that recompute about as much, take the one with the lower peak",
    why="""\
Whoever lowers activation_memory_budget to fit a model can get a higher peak for it, as
#197838 reports of a Llama-like net. What is saved goes down with the budget, but where
little is saved, the backward begins by recomputing a long part of the forward, and all of
that is live until the backward has passed it.

This makes such peaks lower. It does not make them monotone: at the smallest budgets the
peak may still rise as the budget falls, by up to a half in the table below.

If tensors are saved where the forward hands on little, such as between layers, the
backward recomputes one stretch at a time. So after the last min cut, twelve more plans
are made. They save what is live at one to 64 such places, and fill the rest of the cut's
bytes with what takes longest to recompute for its size. None may keep more than the cut,
or take a step that is over 5 % longer, by the estimated runtimes of the knapsack's items.
Of the rest, the plan with the least product of peak and time is used, if that is less
than the cut's own. The
peak is that of a backward that runs operator by operator, in the order that
reordering_to_mimic_autograd_engine makes.
KnapsackEvaluator is not used for it: it counts the knapsack's items alone, and walks them
in an order that depends on hashes of names, so ranks could get different plans.
""",
    test="test/functorch/test_ac_lower_peak.py",
    sources=(module_path("lower_peak"),),
    trailers=("See also: #197838",),
    repro="""\
import torch, torch._functorch.config as config

def layers(x, *weights):
    for w in weights:
        x = x + (x.sin() @ w).sigmoid() @ w.t()
    return x.sum()

inputs = [torch.randn(4096, 64, requires_grad=True, device="cuda")]
inputs += [torch.randn(64, 256, requires_grad=True, device="cuda") for _ in range(12)]
for config.activation_memory_budget in (1, 0.5, 0.3, 0.2, 0.1):
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    torch.compile(layers, backend="aot_eager_decomp_partition")(*inputs).backward()
    print(config.activation_memory_budget, torch.cuda.max_memory_allocated() >> 20)
""",
    beyond="""\
It bounds no peak. Budget 0 still saves nothing, and has the highest peak. Plans that are
cuts without a knapsack, and those of CustomKnapsackSolver, stay as they are, and so do
graphs whose backward reads an input that the forward overwrites.

Inductor's kernels hold less than operators do one by one, which the estimate ignores; the
table is operator by operator, too. Nothing was measured on a GPU, and no wall-clock time.
The Pareto plot and the structured trace still show the knapsack's plan.
""",
    risks="""\
There is no option to turn it off: every plan of a knapsack may change, those of
dynamic_memory_budget_dp included, and a step may become up to 5 % longer by the estimates
where that makes the peak lower by more than that. What is random or marked MUST_SAVE is
saved in each of the new plans; what is marked MUST_RECOMPUTE is not saved for being
handed on. The new plans keep all graph inputs, also those that are not parameters.
Partitioning an 8-layer Llama takes half a second longer, a 32-layer one some three seconds.
""",
    edits=edits("""\
@@ torch/_functorch/partitioners.py
 from ._activation_checkpointing.knapsack_evaluator import KnapsackEvaluator
+from ._activation_checkpointing.lower_peak import with_lower_peak
@@ torch/_functorch/partitioners.py choose_saved_values_set since 2.14
-    return get_saved_values_knapsack(
-        memory_budget=memory_budget, node_info=node_info, joint_graph=joint_graph
-    )[0]
+    saved_values, _ = get_saved_values_knapsack(
+        memory_budget=memory_budget, node_info=node_info, joint_graph=joint_graph
+    )
+    if not isinstance(config.activation_memory_budget_solver, str):
+        return saved_values
+    runtimes = dict(zip(all_recomputable_banned_nodes, runtimes_banned_nodes))
+    must_save = must_save_nodes + [i for i in recomputable_banned_nodes if is_rng_op(i)]
+    return with_lower_peak(joint_graph, node_info, saved_values, must_save, runtimes)
@@ torch/_functorch/partitioners.py choose_saved_values_set until 2.13
-    return get_saved_values_knapsack(
-        memory_budget=memory_budget, node_info=node_info, joint_graph=joint_graph
-    )[0]
+    saved_values, _ = get_saved_values_knapsack(
+        memory_budget=memory_budget, node_info=node_info, joint_graph=joint_graph
+    )
+    if not isinstance(config.activation_memory_budget_solver, str):
+        return saved_values
+    runtimes = dict(zip(all_recomputable_banned_nodes, runtimes_banned_nodes))
+    is_random = get_default_op_list().is_random
+    must_save = must_save_nodes + [i for i in recomputable_banned_nodes if is_random(i)]
+    return with_lower_peak(joint_graph, node_info, saved_values, must_save, runtimes)
"""),
)

PATCH = Patch(
    name="peak-budget",
    subject="Let the activation memory budget bound the peak",
    why="""\
The budget bounds what is saved for the backward, not what training runs out of.
If little is saved, the first step of the backward recomputes most of the forward
at once: a small budget has a higher peak than no budget.

With activation_memory_budget_target = "peak", budget b bounds the peak by
floor + b * (peak at budget 1 - floor), and activation_memory_peak_bytes by a number
of bytes. A model of live bytes evaluates some hundred plans; the cheapest that fits is
used, so a smaller budget never has a higher peak.

With the default target, a plan that peaks above budget 1, or above the plan before this
patch, gives way to another one within the budget of saved bytes.
Where no plan can be made, a warning says why and the plan is that for saved bytes.
""",
    trailers=("Fixes: #197838",),
    test="test/functorch/test_ac_peak_budget.py",
    sources=(
        planner_path("graph/inputs_outputs"),
        planner_path("graph/kernels"),
        planner_path("graph/other_sizes"),
        planner_path("graph/symbols"),
        planner_path("peak/__init__"),
        planner_path("graph/chunking_cost"),
        planner_path("peak/chains"),
        planner_path("peak/curve"),
        planner_path("peak/lower_peak"),
        planner_path("peak/footprint"),
        planner_path("peak/menu"),
        planner_path("peak/sized_plans"),
        planner_path("peak/plan_search"),
        planner_path("peak/plans"),
        planner_path("peak/peak_bytes"),
    ),
    needs=("saved-report",),
    edits=edits("""\
@@ torch/_functorch/config.py
 activation_memory_budget = 1.0
+
+# What the budget bounds. "saved": the bytes saved for the backward, from what must not
+# be recomputed (0) to the plan that runs fastest (1). "peak": the peak of live bytes
+# without parameters and inputs, from the lowest found (0) to the fastest plan's (1).
+activation_memory_budget_target = "saved"
+
+# Bound for the peak in bytes, without parameters and inputs; overrides the budget and
+# its target. A graph that cannot meet it gets the lowest peak found, and a warning.
+activation_memory_peak_bytes: int | None = None
+
+# Safety margin: fraction by which the real peak of inductor's kernels may exceed the
+# estimate. A plan is chosen that much below the bound.
+activation_memory_peak_margin = 0.05
+
+# How many calls of a graph wait for their backward at once, for the target "peak" and a
+# peak in bytes. None: one. Set it if each block of a model is compiled separately.
+activation_memory_graph_calls: int | None = None
@@ torch/_inductor/compile_fx.py partition_fn
+                fused=True,
                 # pyrefly: ignore[bad-argument-type]
                 **kwargs,
             )
"""),
    landed=(("torch/_inductor/compile_fx.py", "                fused=True,\n"),),
    minimal=_TIE_BREAK,
)
