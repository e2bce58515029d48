from ..patch import edits, PARTITIONERS, Patch, planner_path


_TEST = "test/functorch/test_ac_budget_is_kept.py"

_ITEMS_ONLY = Patch(
    name="memory-budget",
    lines=50,
    subject="Save the knapsack's choice alone where the min cut is over the budget",
    why="""\
Whoever lowers activation_memory_budget until a model fits gets plans that keep more than
they asked for: a U-Net keeps 0.593 of its range at budget 0.5, as its last plan is not
the solver's. The solver picks what to save within the budget, and one more min cut then
saves that or something in its place. But the cut weighs a value by more than its bytes:
by 1.1 to the power of its distance from the backward, and by two where it could be fused.
So in place of a small value far from the backward it saves larger ones that are near.

If what the cut adds to the inputs is over the budget, and more than what may not be
recomputed, that is saved alone: the solver's items, and values that are marked MUST_SAVE.
Everything else follows from these and the inputs. A cut within its budget stays as it is.
No min cut is added.
""",
    test=_TEST,
    repro="""\
import torch, torch._functorch.config as config

def layers(x, *weights):
    for w in weights:
        x = torch.cat((x @ w, x @ w), 1)
        for _ in range(24):
            x = x + 1
        x = x.sin()[:, ::2]
    return x.sum()

inputs = [torch.randn(64, 64, requires_grad=True) for _ in range(4)]
config.activation_memory_budget = 0.5  # half of 6 x 64 x 64: three, not three of twice that
noted = lambda x: print("saved", *x.shape) or x
with torch.autograd.graph.saved_tensors_hooks(noted, lambda x: x):
    torch.compile(layers, backend="aot_eager_decomp_partition")(*inputs)
""",
    beyond="""\
Cuts that are within the budget before a solver is asked are compared as before: by a sum
that inputs can lower, so hf-mixtral keeps 0.716 at 0.6. It does not change what a solver counts: dp rounds sizes to 1/10000 of the range, so its
own choice may be that much over. The range stays a sum of sizes, which counts a storage
twice if two views of it are saved. A graph whose backward reads an input that the forward
overwrites keeps its cut.
""",
    risks="""\
Plans that were over their budget save less and recompute more of what is cheap, so a
budget that somebody tuned by trial may have to be raised. What such a plan recomputes of
the solver's items is what the solver said; a cut sometimes spared a few of these.
""",
    edits=edits("""\
@@ torch/_functorch/partitioners.py choose_saved_values_set
     runtimes_banned_nodes = [
         estimate_runtime(node) for node in all_recomputable_banned_nodes
     ]
+
+    def size_beyond_inputs(saved_values: list[fx.Node]) -> float:
+        return estimate_activations_size(
+            [i for i in saved_values if get_node_storage(i) not in input_storages]
+        )
+
+    def is_overwritten(node: fx.Node) -> bool:
+        return node.meta.get("aot_runtime_epilogue_input_mutation", False) or any(
+            user.target is aten.copy_.default and user.args[0] is node
+            for user in node.users
+        )
+
+    # Such a plan recomputes from the inputs, which must still be what they were.
+    can_save_items_only = not any(
+        i.dist_from_bw < int(1e9) and is_overwritten(i)  # type: ignore[attr-defined]
+        for i in node_info.inputs
+    )
@@ torch/_functorch/partitioners.py get_saved_values_knapsack
             aggressive_options,
             dont_ban,
         )
+        # The cut weighs values by more than their sizes, so what it saves in place
+        # of the solver's choice may be larger.
+        allowed = memory_budget * (max_act_size - min_act_size)
+        cut_size = size_beyond_inputs(saved_values)
+        if cut_size > allowed and can_save_items_only:
+            items = [
+                tensor
+                for i in banned_nodes
+                if i.op == "call_function"
+                and i not in dont_ban
+                and i.dist_from_bw < int(1e9)  # type: ignore[attr-defined]
+                for tensor in _tensors_of(i)
+            ]
+            if size_beyond_inputs(items) < cut_size:
+                saved_values = node_info.inputs + items
@@ torch/_functorch/partitioners.py
+def _tensors_of(node: fx.Node) -> list[fx.Node]:
+    if not isinstance(node.meta["val"], (list, tuple)):
+        return [node]
+    parts = [user for user in node.users if user.target is operator.getitem]
+    return [tensor for part in parts for tensor in _tensors_of(part)]
+
+
 def choose_saved_values_set(
"""),
)

PATCH = Patch(
    name="memory-budget",
    subject="Choose what an activation memory budget saves in a module of its own",
    why="""\
Plans of choose_saved_values_set may be over their budget (a U-Net keeps 0.593 at 0.5),
as the min cut after the knapsack saves other values than the solver chose. A budget of
NaN is accepted, a custom solver's answer is not checked, and operators without a FLOP
formula are recomputed first, however long they take.

memory_planner.decide takes a request and returns a decision: what to save, what decided it,
the range, the knapsack and the bytes kept. A model of the graph's storages tells what
each plan keeps and recomputes; if the cut's is over the budget, or recomputes more,
only the solver's items are saved. Options are checked before the first cut.
choose_saved_values_set stays, for graphs that cannot be modelled.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_memory_budget.py",
    sources=(
        _TEST,
        planner_path("__init__"),
        planner_path("ask"),
        planner_path("byte_sizes"),
        planner_path("decide"),
        planner_path("decision"),
        planner_path("graph/__init__"),
        planner_path("graph/joint"),
        planner_path("graph/live_bytes"),
        planner_path("graph/liveness"),
        planner_path("graph/reading"),
        planner_path("graph/recompute_cost"),
        planner_path("graph/storages"),
        planner_path("saved/__init__"),
        planner_path("saved/pareto_plot"),
        planner_path("saved/saved_bytes"),
        planner_path("solver"),
    ),
    edits=edits("""\
@@ torch/_functorch/config.py
-# NOTE: This *cannot* be treated as
+# It bounds the bytes that the forward leaves alive for the backward (whole storages,
+# without parameters and inputs) by low + budget * (high - low), where low and high are
+# what budgets 0 and 1 keep: see
+# torch/_functorch/memory_planner/saved/saved_bytes.py.
@@ torch/_functorch/config.py
+# "roofline": FLOP or the bytes moved, whichever takes longer
 # "testing": Returns 1 for everything
@@ torch/_inductor/custom_graph_pass.py
     1) The __call__() method contains the implementation of the knapsack solver.
+    A parameter named ``runtimes``, if there is one, gets the cost of recomputing each
+    item. The lists returned have to name every item once; see
+    torch/_functorch/memory_planner/saved/saved_bytes.py.
@@ torch/_functorch/partitioners.py
 from torch._functorch._aot_autograd.utils import is_with_effects
+from torch._functorch.memory_planner.decide import decide, Request
+from torch._functorch.memory_planner.graph.recompute_cost import is_costly
@@ torch/_functorch/partitioners.py should_ban_recomputation
-            if op_types.is_compute_intensive(node):
+            if op_types.is_compute_intensive(node) or is_costly(node):
@@ torch/_functorch/partitioners.py min_cut_rematerialization_partition
     compiler: str = "inductor",
     *,
+    # What to plan for, if not what the config says.
+    request: Request | None = None,
+    # Whether inductor compiles the two graphs: then peaks are those of its kernels.
+    fused: bool = False,
@@ torch/_functorch/partitioners.py min_cut_rematerialization_partition
-    saved_values = choose_saved_values_set(
~2682dbbcfdd08e77
-    )
+    decision = decide(
+        joint_graph, node_info, num_fwd_outputs, memory_budget, request, fused
+    )
+    saved_values = decision.saved_values
"""),
    landed=((PARTITIONERS, "decision = decide("),),
    needs=("solver-by-name", "overwritten-inputs", "random-ops", "knapsack-exact"),
    minimal=_ITEMS_ONLY,
)
