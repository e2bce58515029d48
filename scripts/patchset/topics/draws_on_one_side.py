from ..patch import edits, PARTITIONERS, Patch


PATCH = Patch(
    name="draws-on-one-side",
    subject="Draw a random number that only the backward needs on one side of the cut",
    why="""\
""",
    repro="""\
""",
    beyond="""\
""",
    trailers=("See also: #190717",),
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
 def solve_min_cut(
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
""",
)
