from dataclasses import replace

from ..patch import AUTOGRAD_CACHE, Edit, GRAPH_COMPILE, module_path, Patch


_INDENT = " " * 16


def _stage(indent: str) -> Edit:
    """Where graphs that need gradients are compiled."""
    return Edit(
        GRAPH_COMPILE,
        anchor=f"{indent}return aot_stage2_autograd(",
        replacement=f"{indent}from .._activation_checkpointing.step_graph import for_step\n"
        f"\n{indent}return for_step(aot_stage2_autograd)(",
        inside="aot_stage2_compile",
    )


PATCH = Patch(
    name="step-budget",
    subject="One activation memory budget for a training step",
    why="""\
A budget is set for a graph, but training runs out of memory in a step. Most training
stacks compile each block separately, or break the graph: whatever the calls keep adds
up, and a plan for the peak of one block makes the step's peak worse.

StepBudget is a context manager around a training step. The first step runs by lean
plans and is recorded: the calls of each graph, and what eager code holds between
them. Then one or two plans are chosen for each graph, so that the step's peak stays
within the bound and little is recomputed, and the graphs are partitioned and compiled
again from their joint graphs.
""",
    test="test/functorch/test_ac_step_budget.py",
    sources=(
        module_path("step_budget"),
        module_path("step_graph"),
        module_path("step_plan"),
        module_path("step_recorder"),
        module_path("step_report"),
        module_path("graph_calls"),
    ),
    needs=("compiled-peak", "frozen-layers"),
    edits=(
        replace(_stage(" " * 8), until=(2, 14)),
        replace(_stage(" " * 12), since=(2, 15)),
        Edit(
            AUTOGRAD_CACHE,
            anchor=f"{_INDENT}compiled_fn = "
            "entry.wrap_post_compile(args, aot_config, fx_config)\n",
            after=f"{_INDENT}from torch._functorch._activation_checkpointing import graph_calls\n\n"
            f"{_INDENT}compiled_fn = graph_calls.with_warnings(\n"
            f"{_INDENT}    compiled_fn, args, entry.runtime_metadata\n"
            f"{_INDENT})\n",
            inside="try_load",
        ),
    ),
    since=(2, 13),
    landed=((GRAPH_COMPILE, "for_step(aot_stage2_autograd)"),),
    risks="""\
Opt-in: nothing changes outside a StepBudget. Peaks are exact for graphs that run op
by op and estimates for inductor's kernels. Workspaces and fragmentation are not counted.
""",
)
