from __future__ import annotations

from ..patch import Edit, module_path, PARTITIONERS, Patch


_IMPORT = "from ._activation_checkpointing.min_cut import minimum_cut\n"
_LOGGING_IMPORT = "from ._aot_autograd.logging_utils import get_aot_graph_name\n"
_DESCRIPTORS_IMPORT = "from ._aot_autograd.descriptors import"

PATCH = Patch(
    name="min-cut",
    subject="Find the partitioner's min cuts on flat lists",
    why="""\
Before 2.15 networkx finds the min cuts, four of them for a memory budget, in a quarter
of the compile time: it keeps its residual graph in dicts of dicts. The new module runs
Dinitz's algorithm on flat lists, which also give Python's garbage collector nothing to
traverse. The cut is the same: the one nearest to the sink, whichever flow leads to it.
""",
    test="test/functorch/test_ac_min_cut.py",
    sources=(module_path("min_cut"),),
    edits=(
        Edit(
            PARTITIONERS,
            anchor=_LOGGING_IMPORT,
            replacement=_IMPORT + _LOGGING_IMPORT,
            until=(2, 6),
        ),
        Edit(
            PARTITIONERS,
            anchor=_DESCRIPTORS_IMPORT,
            replacement=_IMPORT + _DESCRIPTORS_IMPORT,
            since=(2, 11),
            until=(2, 14),
        ),
        Edit(
            PARTITIONERS,
            anchor='= nx.minimum_cut(nx_graph, "source", "sink")\n',
            replacement='= minimum_cut(nx_graph, "source", "sink")\n',
            inside="solve_min_cut",
            until=(2, 14),
        ),
    ),
    since=(2, 6),
    landed=((PARTITIONERS, "min_cut import minimum_cut"),),
    risks="""\
No plan changes: the tests compare cuts with networkx's, on graphs of the partitioner
and on random ones. networkx still builds the graph, and draws one that has no cut.
""",
)
