"""Measures what plans keep for the backward and compute again, beside upstream's.

    scripts/benchmark.sh saved                       every net at real size
    scripts/benchmark.sh saved --check               one of them, as CI does
    scripts/benchmark.sh saved --json results/saved.json

Every net is traced once, of fake tensors, as for a GPU, and its joint graph is split
at each budget by the partitioner and by the untouched wheel's, with its own solver.
Kept are the storages that the forward leaves for the backward, whole, without inputs and
parameters; a share is one of the way from what budget 0 keeps to what budget 1 keeps.
Recomputed are the flops in both halves beyond those of the joint graph, as a share of
the forward's. The peak is that of both halves, one operator after the other, beyond
parameters and inputs, beside upstream's at the same budget and at budget 1. The time to
split a graph is in CPU seconds, the median of seven at budget 0.5, in turn.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch._functorch.config as config
from torch._functorch import partitioners
from torch._guards import detect_fake_mode

from benchmarks import bounds, catalogue, fresh, pages
from benchmarks.catalogue import AT_SIZE, names
from benchmarks.meters import CountedStorages, cpu_seconds, storages
from benchmarks.pages import good, Mark, Row
from benchmarks.tracing import Joint, overlay, untouched_partitioners


NETS = {**{of: names(AT_SIZE[of]) for of in AT_SIZE}, "check": ("hf-convnext",)}
# Peaks as high as another, but for noise.
SAME = 0.999
BUDGETS = (0.8, 0.5, 0.2, 0.1, 0.0)
# How often each of two partitioners is timed.
TURNS = 7


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    for net in asked.nets:
        budgets = (0.5, 0.1) if asked.check else BUDGETS
        yield {"set": catalogue.set_of(net), "net": net, "budgets": budgets}


def measure(task: fresh.Task) -> Row:
    joint = Joint(*catalogue.find(task["net"]).fake())
    theirs = untouched_partitioners()

    def ours(budget: float) -> Split:
        return split(joint, partitioners, budget)

    (low, *_), (high, *_) = ours(0.0), ours(1.0)
    *_, most = split(joint, theirs, 1.0)
    steps = []
    for budget in task["budgets"]:
        kept, again, peak = ours(budget)
        their_kept, their_again, their_peak = split(joint, theirs, budget)
        # Where ours may keep as much, beyond what it has to.
        same = ours(min(their_kept / (high - low), 1.0))
        steps.append(
            {
                "budget": budget,
                "share": (kept - low) / (high - low),
                "recomputed": again,
                "upstream_share": (their_kept - low) / (high - low),
                "upstream_recomputed": their_again,
                "recomputed_at_upstreams": same.recomputed,
                "peak_at_upstreams": same.peak,
                "peak": peak,
                "upstream_peak": their_peak,
            }
        )
    once = overlay("_activation_checkpointing.random_ops").must_run_once
    return {
        "draws": any(map(once, joint.graph.graph.nodes)),
        "low": low,
        "high": high,
        "unbudgeted_peak": most,
        "time": time_to_split(joint, theirs),
        "steps": steps,
    }


def time_to_split(joint: Joint, theirs: Any) -> float:
    """Of a graph, beside upstream's."""
    by = (partitioners, theirs)
    taken = [[seconds_to_split(joint, module) for module in by] for _ in range(TURNS)]
    ours, upstreams = map(median, zip(*taken))
    return float(ours / upstreams)


def seconds_to_split(joint: Joint, module: Any) -> float:
    def timed(*given: Any, **options: Any) -> float:
        partition = module.min_cut_rematerialization_partition
        return cpu_seconds(partial(partition, *given, **options))

    with planned(module, 0.5):
        return float(joint.partition(timed))


class Split(NamedTuple):
    """Bytes kept, the share of the forward that is computed again, most bytes live."""

    kept: int
    recomputed: float
    peak: int


def planned(module: Any, budget: float) -> AbstractContextManager[None]:
    solver = "exact" if module is partitioners else "dp"
    found: AbstractContextManager[None] = config.patch(
        activation_memory_budget=budget, activation_memory_budget_solver=solver
    )
    return found


def split(joint: Joint, module: Any, budget: float) -> Split:
    with planned(module, budget):
        forward, backward = joint.partition(module.min_cut_rematerialization_partition)
    given, tangents = (
        [node.meta["val"] for node in half.graph.find_nodes(op="placeholder")]
        for half in (forward, backward)
    )
    number = joint.options["num_fwd_outputs"]
    mode: Any = detect_fake_mode(given)
    with mode, CountedStorages(given) as meter:
        found = [*torch.fx.Interpreter(forward).run(*given)]
        outputs, saved = found[:number], found[number:]
        known = {each._cdata for each in storages(given)}
        sizes = {each._cdata: each.nbytes() for each in storages(saved)}
        # What is saved goes when it was last read; the outputs stay.
        arguments = [*saved, *tangents[len(saved) :]]
        del found, saved
        torch.fx.Interpreter(backward).boxed_run(arguments)
        del outputs
    kept = sum(nbytes for each, nbytes in sizes.items() if each not in known)
    once, first, second = map(counted, (joint.graph, forward, backward))
    return Split(kept, (first + second - once) / first, meter.peak)


def counted(module: torch.fx.GraphModule) -> int:
    flops = overlay("memory_planner.graph.recompute_cost").flops
    return sum(flops(n) for n in module.graph.nodes if n.op == "call_function")


def plans_of(rows: Sequence[Row]) -> list[tuple[Row, Row, str]]:
    """Each with its net's row, and what it is called."""
    return [
        (row, step, f"{row['net']}, budget {step['budget']:g}")
        for row in rows
        for step in row["steps"]
    ]


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    rows = good(rows)
    plans = plans_of(rows)
    show = "{mean:+.4f} on average, {0:+.4f} at most ({1})"
    yield from pages.at_most(
        f"share saved - share asked, {len(plans)} plans of {len(rows)} nets",
        ((step["share"] - step["budget"], where) for _, step, where in plans),
        *(1e-9, "at most 0", show, True),
        "At {1}, more is saved than was asked, by {0:.1%} of the range.",
    )
    # A plan with a lower peak may keep less, and recompute more.
    yield from pages.at_most(
        "share saved at a budget - at the next larger, where that has no lower peak",
        (
            (low["share"] - high["share"], f"{row['net']}, budget {low['budget']:g}")
            for row in rows
            for high, low in zip(row["steps"], row["steps"][1:])
            if high["peak"] >= SAME * low["peak"]
        ),
        *(1e-9, "at most 0", show, True),
        "A smaller budget can save more, by up to {0:.1%} of the range ({1}).",
    )
    yield from pages.at_most(
        "share of the forward recomputed - stock's, where as much may be kept, at no lower peak",
        (
            (step["recomputed_at_upstreams"] - step["upstream_recomputed"], where)
            for _, step, where in plans
            if step["peak_at_upstreams"] >= SAME * step["upstream_peak"]
        ),
        *(1e-3, "at most 0.001 (for fewer bytes)", show, True),
        "For as many bytes, up to {0:.1%} more of the forward is recomputed than by "
        "stock ({1}).",
    )
    for name, part in pages.by_set(rows).items():
        yield from judged_peaks(part, name)


def judged_peaks(rows: Sequence[Row], nets_of: str) -> Iterator[Mark]:
    peaks = plans_of(rows)
    # Where it draws random numbers, upstream draws others in the backward.
    right = [
        (step["peak"] / step["upstream_peak"], where)
        for row, step, where in peaks
        if not row["draws"]
    ]
    yield from pages.at_most(
        f"{nets_of}: peak / stock's at the same budget, {len(right)} plans without random "
        "numbers",
        *(right, 1.001),
        limit="The peak can be {2:.1%} above stock's at the same budget ({1}).",
    )
    yield from pages.at_most(
        f"{nets_of}: time to split a graph / stock's",
        ((row["time"], row["net"]) for row in rows),
        1.2,
        limit="Splitting a graph takes up to {0:.2f} times as long as stock's ({1}).",
    )
    above = [
        (step["peak"] / row["unbudgeted_peak"], where)
        for row, step, where in peaks
        if step["peak"] > 1.001 * row["unbudgeted_peak"]
    ]
    lower = [
        where
        for row, step, where in peaks
        if step["peak"] > 1.001 * row["unbudgeted_peak"] > 1.01 * step["upstream_peak"]
    ]
    worst, place = max(above, default=(1.0, "none"))
    text = f"{len(above)} of {len(peaks)}, up to {worst:.2f} times it ({place})"
    stock = f"Stock is lower at {', '.join(lower)}." if lower else ""
    yield Mark(
        f"{nets_of}: plans above the peak without a budget, each with a warning",
        *(text, "none", not above),
        enforced=False,
        limit=f"{nets_of}: of {len(peaks)} plans {len(above)} peak above a step without a "
        f"budget, up to {worst:.2f} times as high ({place}); a warning says so. {stock}".strip(),
    )


LEGEND = """Every net is traced once, as for a GPU, and its joint graph is split at each budget by this
set and by stock, whose solver is dp. Columns are budgets. In each cell this set comes first,
then stock. Shares are of the way from what budget 0 saves to what budget 1 saves, in bytes;
in bold where stock saves more than was asked, by more than 0.001. What is recomputed is a
share of the forward's compute, where this set may save what stock's plan saves plus masks of
dropout: stock draws these again, so its gradients are wrong.
"""
CELLS = {"share saved": "share", "share of the forward recomputed": "recomputed"}


def cell(row: Row, step: Row, what: str) -> str:
    if what == "recomputed":
        again = step["recomputed_at_upstreams"], step["upstream_recomputed"]
        return "{:.3f} / {:.3f}".format(*again)
    theirs = f"{step['upstream_share']:.3f}"
    return f"{step['share']:.3f} / " + (f"**{theirs}**" if over(step) else theirs)


def over(step: Row) -> bool:
    """Whether stock saves more than was asked."""
    return bool(step["upstream_share"] > step["budget"] + 1e-3)


def page(data: Row) -> str:
    rows = data["measured"]
    marks = [*judged(rows)]
    over_by = [
        (step["upstream_share"] - step["budget"], f"{row['net']}, {step['budget']:g}")
        for row in good(rows)
        for step in row["steps"]
        if over(step)
    ]
    short = pages.found(marks)
    if over_by:
        short += "\nOf stock's plans {} are over, by {:.1%} of the range at most ({}).\n".format(
            len(over_by), *max(over_by)
        )
    tables = {
        f"{name}: {heading}": bounds.by_budget(part, partial(cell, what=what), BUDGETS)
        for name, part in pages.by_set(rows).items()
        for heading, what in CELLS.items()
    }
    origin = pages.measured_on(data["environment"], pages.PLANNED, rows)
    return pages.page(LEGEND, origin, short, pages.limits(marks, rows), tables)
