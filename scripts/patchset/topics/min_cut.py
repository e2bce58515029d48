from __future__ import annotations

from ..patch import Edit, module_path, PARTITIONERS, Patch


_IMPORT = "from ._activation_checkpointing.min_cut import minimum_cut\n"


def _import_before(anchor: str, **releases: tuple[int, int]) -> Edit:
    return Edit(PARTITIONERS, anchor, replacement=_IMPORT + anchor, **releases)


PATCH = Patch(
    name="min-cut",
    subject="Find the partitioner's min cuts on lists, without what cannot be cut",
    why="""\
Before 2.15 networkx finds the min cuts, four of them for a memory budget, and takes a
quarter of a compile for them: it keeps its residual graph in dicts of dicts. The new
module first joins all that infinite edges tie to the source or to the sink, which is
most of these graphs, and runs the algorithm of Dinitz on lists with the rest. It takes a
fifteenth to a twentieth of networkx's time, and half of that of 2.15's own. The cut is
the same: the one nearest to the sink, whichever flow leads to it.
""",
    test="test/functorch/test_ac_min_cut.py",
    sources=(module_path("min_cut"),),
    edits=(
        _import_before(
            "from ._aot_autograd.logging_utils import get_aot_graph_name\n",
            until=(2, 6),
        ),
        _import_before(
            "from ._aot_autograd.descriptors import", since=(2, 10), until=(2, 14)
        ),
        Edit(
            PARTITIONERS,
            anchor='= nx.minimum_cut(nx_graph, "source", "sink")\n',
            replacement='= minimum_cut(nx_graph, "source", "sink")\n',
            inside="solve_min_cut",
            until=(2, 14),
        ),
    ),
    landed=((PARTITIONERS, "min_cut import minimum_cut"),),
    risks="""\
No plan changes: the tests compare cuts with networkx's, on graphs of the partitioner and
on random ones. networkx still makes the graph, and the picture of one without a cut.
""",
    kind="improvements",
)
