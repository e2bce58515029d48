from __future__ import annotations

from ..patch import Edit, PARTITIONERS, Patch, REPORT
from . import memory_budget


_SPLIT = (
    "    if AOT_PARTITIONER_DEBUG:\n        # Calculate sorted sizes of saved values\n"
)
_PARTITION = "min_cut_rematerialization_partition"
IMPORT = "from ._activation_checkpointing import random_ops, rerun_cost, saved_report\n"
RECORD = "saved_report.record_plan("

PATCH = Patch(
    name="saved-report",
    subject="Report what a plan saves for the backward, and why",
    why="""\
After a compile it is hard to find out which activations it saves: the partitioner's
debug log has sizes and names, and the knapsack's choice may differ from the final
min cut. print_saved_values() prints, for the graph compiled last, each kind of
value that is saved or recomputed with its operator, shape, size, runtime and source
line, why it is there, the budget asked and used, and how good the solver's answer
is; last_plan() and the structured trace have the same as data. Only names and
numbers are kept, and a graph that came from the compile cache is marked as such.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_saved_report.py",
    sources=(REPORT,),
    edits=(
        Edit(
            PARTITIONERS,
            anchor=memory_budget.IMPORT,
            replacement=IMPORT,
        ),
        Edit(
            PARTITIONERS,
            anchor=_SPLIT,
            replacement=f"    {RECORD}plan, fw_module, bw_module, num_fwd_outputs)\n\n"
            f"{_SPLIT}",
            inside=_PARTITION,
        ),
    ),
    since=(2, 10),
    landed=((PARTITIONERS, RECORD),),
    risks="""\
Every partitioned graph leaves a record of names and numbers, of the last few graphs only;
no tensor or graph is kept alive. Plans are not changed.
""",
    needs=("memory-budget",),
    kind="new features",
)
