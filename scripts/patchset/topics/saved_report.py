from __future__ import annotations

from ..patch import Edit, PARTITIONERS, Patch, REPORT


_LIMITS = (
    "    max_act_size = estimate_activations_size(runtime_optimized_saved_values)\n"
)
_CHOSEN = "        dont_ban: OrderedSet[fx.Node] = OrderedSet()\n"
_SPLIT = (
    "    if AOT_PARTITIONER_DEBUG:\n        # Calculate sorted sizes of saved values\n"
)
_IMPORTED = (
    "from ._activation_checkpointing.knapsack_evaluator import KnapsackEvaluator\n"
)

PATCH = Patch(
    name="saved-report",
    subject="Tell what a plan saves for the backward, and why",
    why="""\
After a compile nobody can say which activations it saves: the partitioner's debug
log has sizes and names, and the knapsack's choice is not yet what the min cut
makes of it. print_saved_values() prints, for the graph compiled last, each kind of
value that is saved or recomputed with its operator, shape, size, runtime and source
line, why it is there, the budget asked and used, and how good the solver's answer
is; last_plan() and the structured trace have the same as data. Nothing is kept but
names and numbers, and a graph from the compile cache is said to be one.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    tested="python test/functorch/test_ac_saved_report.py",
    files=(REPORT, "test/functorch/test_ac_saved_report.py"),
    edits=(
        Edit(
            PARTITIONERS,
            anchor=_IMPORTED,
            replacement=f"{_IMPORTED}"
            "from ._activation_checkpointing.saved_report import (\n"
            "    note_knapsack,\n    note_limits,\n    record_plan,\n)\n",
            since=(2, 10),
        ),
        Edit(
            PARTITIONERS,
            anchor=_LIMITS,
            replacement=f"{_LIMITS}"
            "    note_limits(joint_graph, min_act_size, max_act_size)\n",
            inside="choose_saved_values_set",
            since=(2, 10),
        ),
        Edit(
            PARTITIONERS,
            anchor=_CHOSEN,
            replacement=f"""\
        note_knapsack(
            joint_graph,
            memory_budget,
            all_recomputable_banned_nodes,
            memories_banned_nodes,
            runtimes_banned_nodes,
            saved_node_idxs,
        )
{_CHOSEN}""",
            inside="get_saved_values_knapsack",
            since=(2, 10),
        ),
        Edit(
            PARTITIONERS,
            anchor=_SPLIT,
            replacement=f"""\
    record_plan(
        joint_graph, fw_module, bw_module, num_fwd_outputs, memory_budget, _size_of
    )
{_SPLIT}""",
            inside="min_cut_rematerialization_partition",
            since=(2, 10),
        ),
    ),
    landed=((PARTITIONERS, "record_plan("),),
    risks="""\
Every partitioned graph leaves a record of names and numbers, of the last few graphs only;
no tensor or graph is kept alive. Plans are not changed.
""",
    kind="new features",
)
