"""Measures the budget that means peak memory, beside upstream's.

    scripts/benchmark.sh peak                       all nets (hours)
    scripts/benchmark.sh peak --check               a small one, as CI does
    scripts/benchmark.sh peak --json results/peak.json

Each net is one graph. Every peak is measured on a running training step, operator by
operator: the bytes of live storages, counted by weak references, without parameters and
inputs. Upstream's steps run on the untouched wheel, by the plans of all budgets (of fake
tensors, but for nets with dropout), ours on the patched checkout. Planning times are CPU
seconds of the partitioner, ours and upstream's algorithm in one process, medians. The
exit status is 1 only if a peak, a prediction or a gradient is off.
"""

from __future__ import annotations

import copy
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional
from unittest import mock

import torch._functorch.config as config
from torch._functorch import partitioners

from benchmarks import bounds, fresh, nets, plans, sweep
from benchmarks.pages import columns, good, Row
from benchmarks.tracing import Joint, overlay
from benchmarks.upstream import untouched_partitioners
from benchmarks.ways import budgeted


NETS = tuple(net.name for net in nets.SMALL)
BUDGETS = (1.0, 0.8, 0.5, 0.2, 0.1, 0.05, 0.0)
PLANNED = ("gpt2", "llama-8", "lstm", "resnet50", "llama-32", "llama3-70b")
PLANNED_BUDGETS = (0.1, 0.5)
CHECK = "a small net, no times; as CI does"
REPEATS = 3
FACTS = {"repeats": REPEATS}
KIND, KEY = plans.KIND, plans.KEY
LIMITS = fresh.Limits(seconds=7200, gigabytes=12)


def tasks(
    names: Optional[Sequence[str]], check: bool, rows: Sequence[Row]
) -> Iterator[fresh.Task]:
    kinds: dict[str, Sequence[float]] = {"upstream": sweep.BUDGETS, "graph": BUDGETS}
    if check:
        # One with dropout is in test_peak.py.
        kinds = {"graph": (1.0, 0.5, 0.2, 0.0)}
    yield from plans.tasks(names or (("vit",) if check else NETS), kinds, plans.RUN)
    if not check:
        planned = {"planning": PLANNED_BUDGETS}
        yield from plans.tasks(names or PLANNED, planned, plans.RUN)


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    if task["kind"] == "planning":
        return measure_planning(nets.find(task["net"]), task["budgets"])
    found: Row = {}
    with curve_noted(found):
        row = plans.measure(task)
    if found:
        fastest = row["steps"][0]["flops"]
        found["curve"] = [(peak, fastest + cost) for peak, cost in found["curve"]]
    return {**row, **found}


@contextmanager
def curve_noted(row: Row) -> Iterator[None]:
    """Notes the peaks and costs of the plans that are found meanwhile."""
    request = overlay("peak_budget").PeakBytes
    curve = request.curve

    @functools.wraps(curve)
    def note(*arguments: Any) -> Any:
        found = curve(*arguments)
        row["curve"] = [(plan.peak, plan.cost) for plan in found.plans]
        row["lower_bound"] = lower_bound(found.model)
        return found

    with mock.patch.object(request, "curve", note):
        yield


def lower_bound(program: Any) -> int:
    """Bytes that no plan's peak is below, operator by operator.

    Single operators of the backward need as much in any case, and so does a forward
    that keeps nothing.
    """
    nothing = [0] * len(program.nbytes)
    timeline = overlay("liveness").Timeline(program, nothing, is_forward=False)
    for step in reversed(program.steps):
        each = step.operator
        made = {s for s in each.reads if program.producer[s] >= 0}
        beside = program.size(made - program.outputs)
        own = tuple(s for s in each.reads if s not in made)
        timeline.change(1, -beside)
        timeline.run(each._replace(reads=own), 1, 0)
        timeline.change(1, beside)
    timeline.moment(0)
    timeline.change(1, program.size(program.owned))
    ((backward,),) = timeline.peaks(1, program.held_by_caller)
    bound: int = max(backward, *program.forward_peaks(nothing, 1))
    return bound


def measure_planning(net: nets.Net, budgets: Sequence[float]) -> Row:
    """CPU seconds of the whole partitioner, by upstream's algorithm and by ours."""
    joint = Joint(*net.fake())
    nodes = len(joint.graph.graph.nodes)
    # As inductor asks.
    ours: Any = ("peak", "exact", partitioners, {"fused": True})
    theirs: Any = ("saved", "dp", untouched_partitioners(), {})
    steps = []
    for budget in budgets:
        times: dict[str, list[float]] = {}
        for target, solver, module, more in (theirs, ours) * REPEATS:
            split = functools.partial(
                module.min_cut_rematerialization_partition,
                copy.deepcopy(joint.graph),
                joint.inputs,
                **joint.options,
                **more,
            )
            choice = config.patch(activation_memory_budget_solver=solver)
            with budgeted(budget, target), choice:
                times.setdefault(target, []).append(timed(split))
        medians = {target: statistics.median(found) for target, found in times.items()}
        steps.append({"budget": budget, **medians})
    return {"nodes": nodes, "steps": steps}


def timed(call: Callable[[], Any]) -> float:
    """CPU seconds; as in timeit, no collection of all that torch holds is in them."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    call()
    gc.enable()
    return time.process_time() - start


# ------------------------------------------------------------------- report


judged, plot = bounds.judged, bounds.plot


def page(data: dict[str, Any]) -> str:
    text = bounds.page(data)
    planned = good(data["measured"], kind="planning")
    if planned:
        cells: dict[str, Any] = {
            "net": lambda row: row["net"],
            "nodes": lambda row: f"{row['nodes']:,}",
        }
        for at, budget in enumerate(PLANNED_BUDGETS):
            cells[f"budget {budget:g}"] = lambda row, at=at: "{:.2f}".format(
                row["steps"][at]["peak"] / row["steps"][at]["saved"]
            )
        text += (
            "\n### What does planning cost?\n\nCPU time of the whole partition by target "
            '"peak" divided by that of upstream\'s, medians of '
            f"{data['environment']['repeats']} interleaved runs.\n\n"
            + columns(planned, cells)
        )
    return text
