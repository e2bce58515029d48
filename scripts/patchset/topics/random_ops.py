from ..patch import Edit, module_path, PARTITIONERS, Patch


CHOOSE = "choose_saved_values_set"
_NO_INPUTS_YET = """\
            ban_if_not_in_allowlist=False,
        )
"""

PATCH = Patch(
    name="random-ops",
    subject="Never recompute random ops or routing decisions",
    why="""\
At any budget below 1, and with aggressive_recomputation at every budget, the
backward draws new random numbers: the gradients of a net with dropout are off by
more than their own norm, and nothing says so. Where inductor rounds a recomputed value
differently, a top-k, a sort or a comparison that becomes an index reads other elements
than the forward did: a recomputed router sends some tokens to other experts.

Random operators are now known by their tag, in subgraphs of higher-order operators
too, and no cut may recompute them; it saves dropout's mask, or inductor's seed, not the
noise. Effectful ops and MUST_SAVE tags, which budget 0 ignored, are kept in the same
way. A decision is recognized by what the graph does with the integers and masks that it
makes of floats. The integers are saved; a mask that only selects between two values of
an element, such as a ReLU's, may still be recomputed.
""",
    trailers=("Fixes: #190758", "Fixes: #190717", "See also: #186572"),
    test="test/functorch/test_ac_random_ops.py",
    sources=(
        module_path("random_ops"),
        "test/functorch/test_ac_decisions.py",
    ),
    edits=(
        Edit(
            PARTITIONERS,
            anchor="\nfrom . import config\n",
            after="from ._activation_checkpointing import random_ops\n",
        ),
        Edit(
            PARTITIONERS,
            anchor='    return node.meta.get("recompute", None) in [\n',
            through="    ]\n",
            digests=("21f58ef922ca0f88",),
            replacement="    return random_ops.is_replayed(node)\n",
            inside="must_recompute",
        ),
        Edit(
            PARTITIONERS,
            anchor='        if node.meta.get("recompute", None) == '
            "CheckpointPolicy.MUST_SAVE:\n",
            replacement="        if random_ops.must_run_once(node):\n",
            inside="should_ban_recomputation",
        ),
        Edit(
            PARTITIONERS,
            anchor='            return "marked MUST_SAVE"\n',
            replacement='            return "must not run twice"\n',
            inside="should_ban_recomputation",
        ),
        Edit(
            PARTITIONERS,
            anchor="    # networkx blows up on graphs with no required backward nodes\n",
            before="    random_ops.mark_decisions(joint_graph, "
            "node_info.tangents_closure)\n\n",
            inside="min_cut_rematerialization_partition",
        ),
        Edit(
            PARTITIONERS,
            anchor="    if min_cut_options.ban_if_used_far_apart:\n",
            before="    random_ops.draw_on_one_side(joint_graph, node_info, nx_graph)\n\n",
            inside="solve_min_cut",
        ),
        Edit(
            PARTITIONERS,
            anchor=f"{_NO_INPUTS_YET}    if memory_budget == 0",
            replacement=f"""\
{_NO_INPUTS_YET}    if memory_budget == 0:
        dont_ban = random_ops.recomputable_nodes(joint_graph)
        if dont_ban is not None:
            return solve_min_cut(joint_graph, node_info, min_cut_options, dont_ban)[0]
    if memory_budget == 0""",
            inside=CHOOSE,
        ),
        Edit(
            PARTITIONERS,
            anchor="        i\n        for i in recomputable_banned_nodes\n"
            '        if i.meta.get("recompute", False) == '
            "CheckpointPolicy.MUST_SAVE\n",
            replacement="        i for i in recomputable_banned_nodes "
            "if random_ops.must_run_once(i)\n",
            inside=CHOOSE,
        ),
        Edit(
            PARTITIONERS,
            anchor="        return node_info.inputs + must_save_nodes\n",
            replacement="""\
        if must_save_nodes:
            return aggressive_recomputation_saved_values
        return node_info.inputs
""",
            inside=CHOOSE,
            until=(2, 13),
        ),
    ),
    since=(2, 11),
    landed=((PARTITIONERS, "random_ops.must_run_once("),),
    lacking="below budget 1, dropout gets wrong gradients there, as without the set "
    "(pytorch/pytorch#190758)",
    risks="""\
Plans of nets with random ops save a mask or a seed where numbers used to be drawn
again. Plans of nets that route or sort save the positions, at every budget and under
checkpoints, unless a MUST_RECOMPUTE tag insists. Other plans do not change.
""",
)
