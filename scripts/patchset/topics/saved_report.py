from __future__ import annotations

from typing import Optional

from ..patch import AUTOGRAD_CACHE, Edit, GRAPH_COMPILE, PARTITIONERS, Patch, REPORT


_SPLIT = (
    "    if AOT_PARTITIONER_DEBUG:\n        # Calculate sorted sizes of saved values\n"
)
_PARTITION = "min_cut_rematerialization_partition"
_ATTACH = """\
    from ._activation_checkpointing import saved_report

    saved_report.attach_plan(decision, fw_module, bw_module, num_fwd_outputs)

"""

_HIT = 'log.info("AOTAutograd cache hit for key %s", cache_key)\n'
_SYMINTS = "fw_metadata.num_symints_saved_for_bw = num_symints_saved_for_bw\n"


def _kept(
    split: str,
    hit: str,
    split_in: str,
    since: tuple[int, int] = (2, 11),
    until: Optional[tuple[int, int]] = None,
) -> tuple[Edit, Edit]:
    """The plan goes into what the cache keeps, and comes back; each with its indent."""

    def call(indent: str, words: str) -> str:
        place = "torch._functorch._activation_checkpointing"
        return (
            f"{indent}from {place} import saved_report\n\n"
            f"{indent}saved_report.{words}\n"
        )

    return (
        Edit(
            GRAPH_COMPILE,
            anchor=f"{split}{_SYMINTS}",
            replacement=f"{split}{_SYMINTS}"
            + call(split, "keep_plan(fw_module, fw_metadata)"),
            inside=split_in,
            since=since,
            until=until,
        ),
        Edit(
            AUTOGRAD_CACHE,
            anchor=f"{hit}{_HIT}",
            replacement=f"{hit}{_HIT}"
            + call(hit, "recall_plan(entry.runtime_metadata)"),
            inside="try_load",
            since=since,
            until=until,
        ),
    )


PATCH = Patch(
    name="saved-report",
    subject="Report what a plan saves for the backward, and why",
    why="""\
After a compile it is hard to find out which activations it saves: the partitioner's
debug log has sizes and names, and the knapsack's choice may differ from the final
min cut. print_saved_values() prints, for the graph compiled last, each kind of
value that is saved or recomputed with its operator, shape, size, runtime and source
line, why it is there, and the budget asked and used; last_plan() and the structured
trace have the same as data. Only names and numbers are kept, and they go into the
compile cache with the graph.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_saved_report.py",
    sources=(REPORT,),
    edits=(
        Edit(
            PARTITIONERS,
            anchor=_SPLIT,
            replacement=f"{_ATTACH}{_SPLIT}",
            inside=_PARTITION,
        ),
        *_kept(" " * 12, " " * 20, "_aot_stage2a_partition", until=(2, 11)),
        *_kept(
            " " * 4,
            " " * 16,
            "_categorize_saved_tensors_for_backward",
            since=(2, 12),
        ),
    ),
    since=(2, 11),
    landed=((PARTITIONERS, "saved_report.attach_plan("),),
    risks="""\
Every partitioned graph leaves a record of names and numbers, of the last few graphs
only; no tensor or graph is kept alive. Plans do not change.
""",
    needs=("memory-budget",),
    kind="new features",
)
