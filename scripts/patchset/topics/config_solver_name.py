from ..patch import CONFIG, edits, Patch


PATCH = Patch(
    name="config-solver-name",
    subject="Give the sliding Hirschberg solver a name in the config",
    why="""\
The article on this solver selects it as config.dp_knapsack_sliding_hirschberg,
which raises an AttributeError. The name is now in the config and equals the
plain string, so both spellings select the same solver.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_config_solver_name.py",
    edits=edits("""\
@@ torch/_functorch/config.py
 activation_memory_budget_runtime_estimator = "flops"
+
+# For code that writes config.dp_knapsack_sliding_hirschberg instead of the string.
+dp_knapsack_sliding_hirschberg = "dp_knapsack_sliding_hirschberg"
"""),
    landed=((CONFIG, "\ndp_knapsack_sliding_hirschberg = "),),
    risks="One more entry in the config: the first compile after the upgrade is cold.",
)
