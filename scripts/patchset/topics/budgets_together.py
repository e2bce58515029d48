from __future__ import annotations

from ..patch import CURVE, Edit, EVALUATOR, PARTITIONERS, Patch
from .solver_by_name import DISPATCH, NEW_IMPORT


_PACKAGE = "torch._functorch._activation_checkpointing"
_CHOOSER = "    def get_saved_values_knapsack("
_CURVE = """\
        write_budget_curve(
            memory_budget,
            memories_banned_nodes,
            runtimes_banned_nodes,
            functools.partial(
                _optimize_runtime_with_given_memory,
                joint_graph,
                node_info=node_info,
                all_recomputable_banned_nodes=all_recomputable_banned_nodes,
            ),
            lambda recomputed: cut_once(
                joint_graph,
                node_info,
                aggressive_options,
                OrderedSet(all_recomputable_banned_nodes[i] for i in recomputed),
            )[0],
            MinCuts(
                node_info.inputs,
                aggressive_recomputation_saved_values,
                more_aggressive_saved_values,
                runtime_optimized_saved_values,
            ),
            estimate_activations_size,
        )
"""
_LAST_LINE_OF_PLOT = (
    '        log.warning("Generated Pareto frontier curve at %s", fig_name)\n'
)

PATCH = Patch(
    name="budgets-together",
    subject="Solve the budgets of a curve together",
    why="""\
The knee search of dynamic_memory_budget_dp solves a hundred knapsacks of one
instance one by one, and below a budget of 0.001 it answers with more than was
asked. The Pareto plot bisects with a knapsack and a min cut per point, and shows
knapsacks where the partitioner would take a cheaper cut.

Both move into a module that hands all their budgets to one call. The knee search
uses the exact solver, keeps the budget asked and logs what it took and why. The
plot makes one min cut for each distinct set of items, the plan's own included, at
most 33 in all; it shows steps as steps, with units and the budget asked, and writes
its points beside it as JSON, also where there is no matplotlib.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    tested="python test/functorch/test_ac_budget_curve.py",
    files=(CURVE, "test/functorch/test_ac_budget_curve.py"),
    edits=(
        Edit(
            EVALUATOR,
            anchor="    GraphInfoProvider,\n)\n",
            replacement="    GraphInfoProvider,\n)\n\n"
            f"from {_PACKAGE}.budget_curve import knee_budget\n",
            since=(2, 7),
        ),
        *(
            Edit(
                EVALUATOR,
                anchor="        results = "
                "self.evaluate_distribution_of_results_for_knapsack_algo(\n",
                through='        return results[knee_index]["memory_budget"]\n',
                digest=digest,
                replacement="""\
        return knee_budget(
            knapsack_algo,
            self._graph_info_provider.get_knapsack_memory_input(),
            self._graph_info_provider.get_knapsack_runtime_input(),
            max_mem_budget,
            min_mem_budget,
            iterations,
        )
""",
                inside="get_knee_point_memory_budget",
                since=since,
                until=until,
            )
            for digest, since, until in (
                ("e011644bc39be658", (2, 7), (2, 7)),
                ("9705a101a061f785", (2, 8), None),
            )
        ),
        Edit(
            PARTITIONERS,
            anchor=NEW_IMPORT,
            replacement="""\
from ._activation_checkpointing.budget_curve import (
    MinCuts,
    remember_cuts,
    write_budget_curve,
)
from ._activation_checkpointing.knapsack import exact_knapsack, KNAPSACK_SOLVERS
""",
            since=(2, 7),
        ),
        Edit(
            PARTITIONERS,
            anchor="        return dp_knapsack(\n",
            replacement="        return exact_knapsack(\n",
            inside=DISPATCH,
            since=(2, 7),
        ),
        Edit(
            PARTITIONERS,
            anchor="                knapsack_algo=dp_knapsack,\n",
            replacement="                knapsack_algo=exact_knapsack,\n",
            inside=DISPATCH,
            since=(2, 7),
        ),
        Edit(
            PARTITIONERS,
            anchor=_CHOOSER,
            replacement=f"    cut_once = remember_cuts(solve_min_cut)\n\n{_CHOOSER}",
            inside="choose_saved_values_set",
            since=(2, 7),
        ),
        Edit(
            PARTITIONERS,
            anchor="        saved_values, _ = solve_min_cut(\n",
            replacement="        saved_values, _ = cut_once(\n",
            inside="get_saved_values_knapsack",
            since=(2, 7),
        ),
        Edit(
            PARTITIONERS,
            anchor="        def estimate_for_budget(b):\n",
            through=_LAST_LINE_OF_PLOT,
            digest="e678fb946fadeb9a",
            replacement=_CURVE,
            inside="choose_saved_values_set",
            since=(2, 7),
            until=(2, 10),
        ),
        Edit(
            PARTITIONERS,
            anchor="        def estimate_for_budget(b: float) "
            "-> tuple[float, float, float]:\n",
            through=_LAST_LINE_OF_PLOT,
            digest="2c4ee9a018c0bc9c",
            replacement=_CURVE,
            inside="choose_saved_values_set",
            since=(2, 11),
        ),
    ),
    landed=(
        (EVALUATOR, "knee_budget("),
        (PARTITIONERS, "write_budget_curve("),
    ),
    needs=("solver-by-name",),
    evidence=(("solvers", "99 budgets"),),
    risks="""\
The plot and the knee search choose among other points than before: those of the exact
solver at whole percents. Plans of plain budgets are untouched.
""",
    kind="improvements",
)
