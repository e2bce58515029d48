"""Measures what plans keep for the backward and compute again, beside upstream's.

    scripts/benchmark.sh kept                       all nets and models (half an hour)
    scripts/benchmark.sh kept --check               one of them, as CI does
    scripts/benchmark.sh kept --json results/kept.json

Every net is traced once, of fake tensors, as for a GPU, and its joint graph is split
at each budget by the partitioner and by the untouched wheel's, with its own solver.
Kept are the storages that the forward leaves for the backward, whole, without inputs and
parameters; a share is one of the way from what budget 0 keeps to what budget 1 keeps.
Recomputed are the flops in both halves beyond those of the joint graph, as a share of
the forward's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as config
from torch._functorch import partitioners
from torch.utils._pytree import tree_leaves
from upstream import untouched_partitioners

from benchmarks import fresh, nets, options
from benchmarks.marks import failed, Mark, table
from benchmarks.models import MODELS
from benchmarks.results import environment, markdown, measured_on, PLANNED, Row
from benchmarks.tracing import Joint, overlay


NETS = (*(net.name for net in nets.SMALL), *MODELS)
CHECKED = ("hf-lora",)
BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0)
LIMITS = fresh.Limits(seconds=1200, gigabytes=12)


# ------------------------------------------------------------ in a fresh process


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    name = task["net"]
    joint = Joint(*{**nets.NETS, **MODELS}[name].fake(), dynamo=name in MODELS)
    theirs = untouched_partitioners()

    def ours(budget: float) -> tuple[int, float]:
        return split(joint, partitioners, budget)

    (low, _), (high, _) = ours(0.0), ours(1.0)
    steps = []
    for budget in task["budgets"]:
        kept, again = ours(budget)
        their_kept, their_again = split(joint, theirs, budget)
        # What ours recomputes where it may keep as much, beyond what it has to.
        same = ours(min(their_kept / (high - low), 1.0))[1]
        steps.append(
            {
                "budget": budget,
                "share": (kept - low) / (high - low),
                "recomputed": again,
                "upstream_share": (their_kept - low) / (high - low),
                "upstream_recomputed": their_again,
                "recomputed_at_upstreams": same,
            }
        )
    return {"low": low, "high": high, "steps": steps}


def split(joint: Joint, module: Any, budget: float) -> tuple[int, float]:
    """Bytes kept, and the share of the forward that is computed again."""
    solver = "exact" if module is partitioners else "dp"
    with config.patch(
        activation_memory_budget=budget, activation_memory_budget_solver=solver
    ):
        forward, backward = joint.partition(module.min_cut_rematerialization_partition)
    (output,) = forward.graph.find_nodes(op="output")
    inputs = storages(forward.graph.find_nodes(op="placeholder"))
    saved = storages(tree_leaves(output.args)[joint.options["num_fwd_outputs"] :])
    once = counted(joint.graph)
    first, second = counted(forward), counted(backward)
    kept = sum(size for key, size in saved.items() if key not in inputs)
    return kept, (first + second - once) / first


def storages(values: Sequence[Any]) -> dict[int, int]:
    """Sizes of the storages of some nodes' values, each once."""
    found = {}
    for node in values:
        value = node.meta["val"] if isinstance(node, torch.fx.Node) else None
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def counted(module: torch.fx.GraphModule) -> int:
    flops = overlay("rerun_cost").flops
    return sum(flops(n) for n in module.graph.nodes if n.op == "call_function")


# -------------------------------------------------------------------- marks


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    good = [row for row in rows if "error" not in row]
    steps = [(row["net"], step) for row in good for step in row["steps"]]
    if not steps:
        return
    over = max((s["share"] - s["budget"], net, s["budget"]) for net, s in steps)
    rising = max(
        (small["share"] - large["share"], row["net"], small["budget"])
        for row in good
        for large, small in zip(row["steps"], row["steps"][1:])
    )
    compared = [
        (s["recomputed_at_upstreams"] - s["upstream_recomputed"], net, s["budget"])
        for net, s in steps
    ]
    count = f"{len(steps)} plans of {len(good)} nets"
    for what, worst, mark, most in (
        (f"share kept - share asked, {count}", over, "at most 0", 1e-9),
        ("share kept at a budget - at the next larger", rising, "at most 0", 1e-9),
        (
            "forwards recomputed - upstream's, where as much may be kept",
            max(compared),
            "at most 0.001 (for fewer bytes)",
            1e-3,
        ),
    ):
        difference, net, budget = worst
        shown = f"{difference:+.4f} ({net}, budget {budget:g})"
        yield Mark(what, shown, mark, difference <= most)


def by_budget(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    lines = [
        [row["net"], *(cell(step) for step in row["steps"])]
        for row in rows
        if "error" not in row
    ]
    budgets = [f"{step['budget']:g}" for row in rows[:1] for step in row["steps"]]
    return markdown(["net", *budgets], lines)


def shares(step: Row) -> str:
    theirs = f"{step['upstream_share']:.3f}"
    over = step["upstream_share"] > step["budget"] + 1e-3
    return f"{step['share']:.3f} / {f'**{theirs}**' if over else theirs}"


def recomputed(step: Row) -> str:
    ours, theirs = step["recomputed_at_upstreams"], step["upstream_recomputed"]
    return f"{ours:.3f} / {theirs:.3f}"


def page(data: dict[str, Any]) -> str:
    good = [row for row in data["measured"] if "error" not in row]
    return (
        table(data["rows"])
        + "\nShare kept, ours / upstream's, by the share asked (bold: over by more than "
        "0.001):\n\n"
        + by_budget(good, shares)
        + "\nForwards computed again, ours / upstream's, where ours may keep what "
        "upstream's plan of that budget keeps, and dropout's masks besides (upstream's "
        "draws them again, which makes wrong gradients):\n\n"
        + by_budget(good, recomputed)
        + "\nGraphs as for a GPU, one graph. "
        + measured_on(data["environment"], PLANNED)
    )


def main() -> int:
    parser = options.parser(__doc__, check="one model, two budgets, as CI does")
    parser.add_argument("--net", choices=NETS, help="one of them alone")
    arguments = parser.parse_args()
    names = CHECKED if arguments.check else NETS
    names = (arguments.net,) if arguments.net else names
    budgets = (0.5, 0.1) if arguments.check else BUDGETS
    tasks = [{"net": name, "budgets": budgets} for name in names]
    rows = fresh.run(__name__, tasks, LIMITS)
    marks = list(judged(rows))
    data = {
        "environment": environment("transformers", "peft"),
        "measured": rows,
        "rows": [mark._asdict() for mark in marks],
    }
    fresh.finish(arguments.json, data, page)
    return int(failed(marks) or any("error" in row for row in rows))
