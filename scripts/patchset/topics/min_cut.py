from __future__ import annotations

from ..patch import Edit, PARTITIONERS, Patch


PATCH = Patch(
    name="min-cut",
    subject="Find the partitioner's min cuts by Boykov and Kolmogorov's algorithm",
    why="""\
Before 2.15 networkx finds the min cuts, four of them for a memory budget, and its default
algorithm, preflow-push, takes a quarter of a compile for them. Boykov and Kolmogorov's
was made for graphs like these, sparse and with terminals on most nodes, and makes the
partitioner's cuts up to twice as fast. networkx has it too, and the cut is the same: it
is the one nearest to the sink, whichever flow leads to it.
""",
    test="test/functorch/test_ac_min_cut.py",
    edits=(
        Edit(
            PARTITIONERS,
            anchor='nx.minimum_cut(nx_graph, "source", "sink")\n',
            replacement="""\
nx.minimum_cut(
            nx_graph,
            "source",
            "sink",
            flow_func=nx.algorithms.flow.boykov_kolmogorov,
        )
""",
            inside="solve_min_cut",
            until=(2, 14),
        ),
    ),
    landed=((PARTITIONERS, "min_cut import minimum_cut"),),
    risks="""\
No plan changes. A graph of another kind could take longer; none of those captured does.
""",
    kind="improvements",
)
