"""Measures the budget that means peak memory, beside upstream's.

    scripts/benchmark.sh peak                       all nets (an hour)
    scripts/benchmark.sh peak --check               a small one, as CI does
    scripts/benchmark.sh peak --json results/peak.json

Every peak is measured on a running training step: the bytes of live storages, counted
by weak references, without parameters and inputs. Recomputed are the flops of that
step beyond eager mode's. Upstream's steps run on the untouched wheel, by the plans of
all budgets (of fake tensors, but for nets with dropout), ours on the patched checkout.
Planning times are CPU seconds of the partitioner, ours and upstream's algorithm in one
process, medians. The exit status is 1 only if a peak, a prediction or a gradient is off.
"""

from __future__ import annotations

import copy
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Optional
from unittest import mock

import torch
import torch._functorch.config as config
from torch import Tensor
from torch._functorch import partitioners

from benchmarks import fresh, nets, sweep
from benchmarks.bounds import at_no_more_cost, neighbours
from benchmarks.meters import relative_error, Step
from benchmarks.pages import (
    at_most,
    columns,
    good,
    Mark,
    marks_table,
    measured_on,
    megabytes,
    panels,
    Row,
)
from benchmarks.tracing import cpu_attention_counted, Joint, overlay
from benchmarks.upstream import untouched_partitioners
from benchmarks.ways import budgeted, compiled, OPERATORS, swept, Training


NETS = tuple(net.name for net in nets.SMALL)
BUDGETS = (0.0, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0)
PLANNED = ("gpt2", "llama-8", "lstm", "resnet50", "llama-32", "llama3-70b")
PLANNED_BUDGETS = (0.1, 0.5)
# What the partition may take, as a multiple of upstream's.
PLANNING = 1.2
KINDS: dict[str, tuple[Sequence[str], Sequence[float]]] = {
    "ours": (NETS, BUDGETS),
    "upstream": (NETS, sweep.BUDGETS),
    "planning": (PLANNED, PLANNED_BUDGETS),
}
# One with dropout is in test_peak.py.
CHECKED = {"ours": (("vit",), (0.0, 0.2, 0.5, 1.0))}
CHECK = "a small net, no times; as CI does"
REPEATS = 3
FACTS = {"repeats": REPEATS}
KIND, KEY = "kind", ("net", "kind")
LIMITS = fresh.Limits(seconds=3600, gigabytes=12)


def tasks(names: Optional[Sequence[str]], check: bool) -> Iterator[fresh.Task]:
    for kind, (all_nets, budgets) in (CHECKED if check else KINDS).items():
        for net in names or all_nets:
            wheel = fresh.UNTOUCHED if kind == "upstream" else "patched"
            yield {"net": net, "kind": kind, "budgets": budgets, "torch": wheel}


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    by_kind = {
        "ours": measure_ours,
        "upstream": measure_upstream,
        "planning": measure_planning,
    }
    with cpu_attention_counted():
        return by_kind[task["kind"]](nets.find(task["net"]), task["budgets"])


def recomputed(step: Step, eager: Step) -> float:
    """Beyond eager mode's flops, as a share of the forward's."""
    return (step.flops - eager.flops) / eager.forward_flops


def is_random(net: str) -> bool:
    return "dropout" in net


def measure_upstream(net: nets.Net, budgets: Sequence[float]) -> Row:
    """Peak and flops of the plan of every budget; gradients of nets that draw numbers.

    The others run on fake tensors: their bytes and flops are the same.
    """
    fake = not is_random(net.name)
    eager = Training(net, fake=fake).measured()
    first: list[Tensor] = []

    def found(step: Step) -> Row:
        row: Row = {"peak": step.own_peak, "recomputed": recomputed(step, eager)}
        if not fake:
            first.extend(() if first else step.gradients)
            row["off_budget_1"] = relative_error(step.gradients, first)
        return row

    def by(backend: Any) -> Training:
        return Training(net, whole=compiled(backend), fake=fake)

    return {"steps": swept(by, budgets, found)}


def planned_peak() -> Any:
    """What the report of the last plan says of its peak; a budget of 1 has none."""
    return getattr(overlay("saved_report").last_plan(), "peak", None)


def measure_ours(net: nets.Net, budgets: Sequence[float]) -> Row:
    """Peaks, flops and gradients at every budget; the largest comes first."""
    eager = Training(net).measured()
    row: Row = {"steps": [], "curve": [], "lower_bound": 0}
    first: list[Tensor] = []
    for budget in sorted(budgets, reverse=True):
        with budgeted(budget, "peak"), curve_noted(row, eager.forward_flops):
            step = Training(net, whole=compiled(OPERATORS)).warmed().measured()
        first = first or step.gradients
        planned = planned_peak()
        row["steps"].append(
            {
                "budget": budget,
                "peak": step.own_peak,
                "recomputed": recomputed(step, eager),
                "predicted": planned and planned.predicted,
                "allowed": planned and planned.allowed,
                "fastest": planned and planned.fastest,
                "off_eager": relative_error(step.gradients, eager.gradients),
                "off_budget_1": relative_error(step.gradients, first),
            }
        )
    return row


@contextmanager
def curve_noted(row: Row, forward_flops: int) -> Iterator[None]:
    """Notes the peaks and costs of the plans that are found meanwhile."""
    module = overlay("peak_budget")
    build_curve = module.build_curve

    @functools.wraps(build_curve)
    def note(*arguments: Any) -> Any:
        model, found = build_curve(*arguments)
        curve = [(plan.peak, plan.cost / forward_flops) for plan in found.plans]
        row.update(curve=curve, lower_bound=overlay("liveness").lower_bound(model))
        return model, found

    with mock.patch.object(module, build_curve.__name__, note):
        yield


def measure_planning(net: nets.Net, budgets: Sequence[float]) -> Row:
    """CPU seconds of the whole partitioner, by upstream's algorithm and by ours."""
    joint = Joint(*net.fake())
    theirs = untouched_partitioners()
    times: dict[str, list[float]] = {}
    nodes = len(joint.graph.graph.nodes)
    for _ in range(REPEATS if nodes < 10_000 else 1):
        for budget in budgets:
            for target, solver, module, more in (
                ("saved", "dp", theirs, {}),
                # As inductor asks.
                ("peak", "exact", partitioners, {"fused": True}),
            ):
                split = functools.partial(
                    module.min_cut_rematerialization_partition,
                    copy.deepcopy(joint.graph),
                    joint.inputs,
                    **joint.options,
                    **more,
                )
                choice = config.patch(activation_memory_budget_solver=solver)
                with budgeted(budget, target), choice:
                    times.setdefault(f"{target} {budget:g}", []).append(timed(split))
    return {"nodes": nodes, **{k: statistics.median(v) for k, v in times.items()}}


def timed(call: Callable[[], Any]) -> float:
    """CPU seconds; as in timeit, no collection of all that torch holds is in them."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    call()
    gc.enable()
    return time.process_time() - start


# -------------------------------------------------------------------- marks


def steps_of(rows: Sequence[Row], kind: str) -> dict[str, list[Row]]:
    return {row["net"]: row["steps"] for row in good(rows, kind=kind)}


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    """What must hold of every step."""
    steps = steps_of(rows, "ours")
    every = [
        (f"{net} at {step['budget']:g}", net, step)
        for net, found in steps.items()
        for step in found
    ]
    fastest = {
        net: next((s["fastest"] for s in found if s["fastest"]), None)
        for net, found in steps.items()
    }
    predicted = [
        (s["predicted"] or fastest[net], s["peak"], at) for at, net, s in every
    ]
    yield from at_most(
        "predicted / measured peak, operator by operator",
        ((abs(said / peak - 1), at) for said, peak, at in predicted if said),
        *(0.005, "0.5 %"),
        f"off by {{:.3%}} at most ({{}}), {len(every)} steps of {len(steps)} nets",
        enforced=True,
    )
    show = "{:+.3%} at most ({})"
    yield from at_most(
        "measured peak / what the budget allows",
        ((s["peak"] / s["allowed"] - 1, at) for at, _, s in every if s["allowed"]),
        *(0.005, "never over (predictions hold to 0.5 %)", show, True),
    )
    yield from at_most(
        "measured peak / that of the next larger budget",
        (
            (low["peak"] / high["peak"] - 1, f"{net} at {low['budget']:g}")
            for net, found in steps.items()
            for high, low in neighbours(found)
        ),
        *(0.0005, "never higher", show, True),
    )
    yield from at_most(
        "gradients against the plan of budget 1, dropout included",
        ((step["off_budget_1"], at) for at, _, step in every),
        *(sweep.SAME, f"{sweep.SAME:.0e}"),
        "off by {:.1e} at most",
        enforced=True,
    )
    yield from judged_beside(rows)
    # Eager mode draws other random numbers than a compiled dropout.
    yield from at_most(
        "gradients against eager mode, beyond those of budget 1, nets without dropout",
        (
            (step["off_eager"] - steps[net][0]["off_eager"], at)
            for at, net, step in every
            if not is_random(net)
        ),
        *(1e-6, "as upstream's plan of budget 1"),
        "{:.1e} at most ({})",
        enforced=True,
    )


def judged_beside(rows: Sequence[Row]) -> Iterator[Mark]:
    """What must hold of ours beside upstream's, if both were measured."""
    found = [*beside_upstream(rows)]
    yield from at_most(
        "our floor / the lowest peak of upstream's budgets",
        ((each.floor / each.lowest["peak"], each.net) for each in found),
        *(0.9999, "below 1"),
        f"{{:.2f}} at most ({{}}), {len(found)} nets",
        enforced=True,
    )
    yield from at_most(
        "ours at no more flops / upstream's peak",
        ((each.worst, f"{each.net} at {each.worst_at}") for each in found),
        *(1.0005, "never higher"),
        f"{{:.2f}} at most ({{}}), {sum(each.plans for each in found)} plans",
    )


class Beside(NamedTuple):
    """Our plans of a net beside upstream's; bytes.

    ``worst`` is the largest of our peaks at no more flops, as a share of upstream's. A
    step of upstream's with wrong gradients has none: a dropout's mask that is drawn again
    costs nothing.
    """

    net: str
    lowest: Row
    matched: float
    floor: float
    bound: float
    worst: float
    worst_at: str
    plans: int
    budgets: int


def beside_upstream(rows: Sequence[Row]) -> Iterator[Beside]:
    upstream = steps_of(rows, "upstream")
    for row in good(rows, kind="ours"):
        if row["net"] not in upstream:
            continue
        right = sweep.right(upstream[row["net"]])
        curve, lowest = row["curve"], sweep.lowest(right)
        found = [
            (
                at_no_more_cost(curve, step["recomputed"]) / step["peak"],
                sweep.told(step["budgets"]),
            )
            for step in right
        ]
        yield Beside(
            row["net"],
            lowest,
            at_no_more_cost(curve, lowest["recomputed"]),
            curve[0][0],
            row["lower_bound"],
            *max(found),
            len(right),
            sweep.count(upstream[row["net"]]),
        )


# ------------------------------------------------------------------- report


def lowest_table(rows: Sequence[Row]) -> str:
    def shared(nbytes: float, found: Beside) -> str:
        return f"{nbytes / 1e6:.1f} ({nbytes / found.lowest['peak']:.2f})"

    return columns(
        ((found,) for found in beside_upstream(rows)),
        {
            "net": lambda b: b.net,
            "upstream's lowest MB": lambda b: megabytes(b.lowest["peak"]),
            "its budget": lambda b: sweep.told(b.lowest["budgets"]),
            "ours at no more flops": lambda b: shared(b.matched, b),
            "our floor": lambda b: shared(b.floor, b),
            "no plan below": lambda b: megabytes(b.bound),
            "ours / upstream's at most": lambda b: f"{b.worst:.2f} ({b.worst_at})",
            "budgets": lambda b: str(b.budgets),
        },
    )


def rising(data: dict[str, Any]) -> str:
    """The RFC's sentence on what upstream's budgets do to a net's peak."""
    steps = steps_of(data["measured"], "upstream")["llama-8"]
    peaks = {budget: step["peak"] for step in steps for budget in step["budgets"]}
    lowest = sweep.lowest(steps)
    first, least, last = (
        f"{peak / 1e6:,.0f} MB" for peak in (peaks[1], lowest["peak"], peaks[0])
    )
    return (
        f"  Our Llama-like net of 8 layers peaks at {first} at budget 1, at {least} at "
        f"{sweep.told(lowest['budgets'])}, the lowest of {sweep.count(steps)} budgets, and "
        f"at {last} at 0 (fake tensors, operator by operator).\n  "
    )


def planning(rows: Sequence[Row]) -> str:
    def cell(row: Row, budget: float) -> str:
        ratio = row[f"peak {budget:g}"] / row[f"saved {budget:g}"]
        return f"**{ratio:.2f}**" if ratio > PLANNING else f"{ratio:.2f}"

    return columns(
        good(rows, kind="planning"),
        {
            "net": lambda row: row["net"],
            "nodes": lambda row: f"{row['nodes']:,}",
            **{
                f"by peak / by saved bytes, {b:g}": functools.partial(cell, budget=b)
                for b in PLANNED_BUDGETS
            },
        },
    )


def summary(data: dict[str, Any]) -> str:
    return marks_table(mark._asdict() for mark in judged(data["measured"]))


def page(data: dict[str, Any]) -> str:
    rows, facts = data["measured"], data["environment"]
    kinds = {row["kind"] for row in rows}
    text = "### Is the bound kept?\n\nRun operator by operator.\n\n"
    text += summary(data)
    if "upstream" in kinds:
        text += (
            "\n### How much lower is the peak than upstream's?\n\nOperator by operator, in MB: "
            "our floors were run; upstream's peaks are from fake tensors (run for nets with "
            "dropout); plans at no more flops are predicted. In brackets as a share of "
            "upstream's lowest peak. ours at no more flops: the lowest peak of ours that "
            "recomputes no more than that plan of upstream's. our floor: at budget 0. no "
            "plan below: a lower bound, what single backward steps need under any plan, "
            "mostly for parameter gradients. ours / upstream's at most: the worst "
            "of upstream's plans (its budget) against ours at no more flops. "
            f"budgets: how many of upstream's were tried. {sweep.HOW}\n\n"
            + lowest_table(rows)
        )
    if "planning" in kinds:
        text += (
            "\n### What does planning cost?\n\nCPU time of the whole partition divided by "
            "that of upstream's at the same budget (bold: above the mark of "
            f"{PLANNING:g}).\n\n" + planning(rows)
        )
    repeats = f"\nTimes are medians of {facts['repeats']} interleaved runs. "
    return text + repeats + measured_on(facts)


def plot(data: dict[str, Any], result: Path) -> None:
    """Peak against recomputation, a panel for each net; written beside ``result``."""
    upstream = steps_of(data["measured"], "upstream")
    lines = {}
    for row in good(data["measured"], kind="ours"):
        ours = [(cost, peak / 1e6) for peak, cost in row["curve"]]
        theirs = upstream.get(row["net"], ())
        points = [(step["recomputed"], step["peak"] / 1e6) for step in theirs]
        lines[row["net"]] = [('target "peak"', "C0-", ours)]
        if points:
            lines[row["net"]].append(("upstream", "C1s-", points))
    if lines:
        x = "recomputed flops / forward flops"
        panels(result, data["environment"], lines, x, "peak, MB")
