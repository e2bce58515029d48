from dataclasses import replace

from ..patch import (
    AUTOGRAD_CACHE,
    Edit,
    GRAPH_COMPILE,
    module_path,
    PARTITIONERS,
    Patch,
)


_PLACE = "torch._functorch._activation_checkpointing"


def _kept(split: str, hit: str, split_in: str) -> tuple[Edit, Edit]:
    """The plan goes into what the cache keeps, and comes back; each with its indent."""
    return (
        Edit(
            GRAPH_COMPILE,
            anchor=f"{split}fw_metadata.num_symints_saved_for_bw = "
            "num_symints_saved_for_bw\n",
            after=f"{split}from {_PLACE} import saved_report\n\n"
            f"{split}saved_report.keep_plan(fw_module, fw_metadata)\n",
            inside=split_in,
        ),
        Edit(
            AUTOGRAD_CACHE,
            anchor=f'{hit}log.info("AOTAutograd cache hit for key %s", cache_key)\n',
            after=f"{hit}from {_PLACE} import saved_report\n\n"
            f"{hit}saved_report.recall_plan(entry.runtime_metadata)\n",
            inside="try_load",
        ),
    )


_IN_2_11 = _kept(" " * 12, " " * 20, "_aot_stage2a_partition")
_SINCE_2_12 = _kept(" " * 4, " " * 16, "_categorize_saved_tensors_for_backward")

PATCH = Patch(
    name="saved-report",
    subject="Report what a plan saves for the backward, and why",
    why="""\
After a compile it is hard to find out which activations it saves: the partitioner's
debug log has sizes and names, and the knapsack's choice may differ from the final
min cut. print_saved_values() prints, for the graph compiled last, each kind of
value that is saved or recomputed with its operator, shape, size, runtime and source
line, why it is there, and the budget asked and used; last_plan() and the structured
trace have the same as data. They go into the compile cache with the graph.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_saved_report.py",
    sources=(module_path("saved_report"),),
    edits=(
        Edit(
            PARTITIONERS,
            anchor="    if AOT_PARTITIONER_DEBUG:\n"
            "        # Calculate sorted sizes of saved values\n",
            before="""\
    from ._activation_checkpointing import saved_report

    saved_report.attach_plan(decision, fw_module, bw_module, num_fwd_outputs)

""",
            inside="min_cut_rematerialization_partition",
        ),
        *(replace(edit, until=(2, 11)) for edit in _IN_2_11),
        *(replace(edit, since=(2, 12)) for edit in _SINCE_2_12),
    ),
    since=(2, 11),
    landed=((PARTITIONERS, "saved_report.attach_plan("),),
    risks="""\
Every partitioned graph leaves a record of names and numbers, of the last few graphs
only; no tensor or graph is kept alive. Plans do not change.
""",
    needs=("memory-budget",),
)
