from ..patch import edits, PARTITIONERS, Patch


PATCH = Patch(
    name="draws-on-one-side",
    lines=60,
    subject="Draw a random number that only the backward needs on one side of the cut",
    why="""\
The forward of a custom autograd function may draw random numbers that only its backward
reads: the matrix of a random projection that stands in for an activation, or noise for
a gradient. No forward output needs such an op, so the ban on recomputing random ops does
not hold for it, and the cut may divide its users. If it saves a small value made of the
numbers, and the backward needs the numbers as well, both graphs draw, each its own. The
gradients are wrong at every budget above 0, and with none set.

An op that depends on such numbers now gets an edge to what it depends on, which keeps it
out of the forward unless the numbers are drawn there. So the min cut leaves all of them
on one side.
""",
    repro="""\
import torch

class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w, torch.rand(4, 4))
        return x @ w
    @staticmethod
    def backward(ctx, grad):
        x, w, noise = ctx.saved_tensors
        return grad * ((x @ w).sin() * noise).sum(), grad * noise

x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
torch.compile(Noisy.apply, backend="aot_eager_decomp_partition")(x, w).sum().backward()
print(x.grad[0, 0].item(), "should be", ((x @ w).sin() * w.grad).sum().item())
""",
    beyond="""\
- It does not decide on which side the numbers are drawn, so with the same seed the
  numbers may be others than eager mode's, as they may be today. If they are drawn in the
  backward, a retained backward that runs twice draws twice, where eager mode has one draw.
  To draw in the forward always would mend both, but keep the numbers at every budget.
- Random ops that a forward output needs are as they were: see #190758.
""",
    test="test/functorch/test_ac_draws_on_one_side.py",
    edits=edits("""\
@@ torch/_functorch/partitioners.py
+def keep_on_one_side(
+    is_source: Callable[[fx.Node], bool],
+    joint_graph: fx.Graph,
+    node_info: NodeInfo,
+    nx_graph: Any,
+) -> None:
+    \"""
+    Let no cut divide the users of a source that no forward output needs.
+
+    Such a node runs where the cut puts it. If some of its users are computed in the
+    forward to be saved, and others in the backward, it runs twice. These edges keep
+    whatever depends on it out of the forward, unless it runs there itself.
+    \"""
+    dependent: OrderedSet[fx.Node] = OrderedSet()
+    for node in joint_graph.nodes:
+        if node.op != "call_function" or node_info.is_required_fw(node):
+            continue
+        needed = [arg for arg in node.all_input_nodes if arg in dependent]
+        for arg in needed:
+            nx_graph.add_edge(
+                node.name + "_in",
+                arg.name + "_in",
+                capacity=math.inf,
+                reason="must run on the side of what it depends on",
+            )
+        if needed or is_source(node):
+            dependent.add(node)
+
+
 def cleanup_recompute_tags(
@@ torch/_functorch/partitioners.py solve_min_cut since 2.14
+    keep_on_one_side(is_rng_op, joint_graph, node_info, nx_graph)
+
     # todo(chilli): This is the most questionable of the 3 heuristics for banning recompute.
@@ torch/_functorch/partitioners.py solve_min_cut until 2.13
+    keep_on_one_side(
+        lambda node: torch.Tag.nondeterministic_seeded
+        in getattr(node.target, "tags", ()),
+        joint_graph,
+        node_info,
+        nx_graph,
+    )
+
     # todo(chilli): This is the most questionable of the 3 heuristics for banning recompute.
"""),
    landed=((PARTITIONERS, "keep_on_one_side("),),
    risks="""\
Graphs in which every random op is needed by a forward output are untouched: no edge is
added. Elsewhere more is kept, up to 40 % in the table, as a number that is drawn in the
forward has to be saved for the backward.
""",
)
