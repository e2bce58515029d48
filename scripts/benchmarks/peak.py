"""Measures the budget that means peak memory, beside upstream's.

    scripts/benchmark.sh peak                       all nets (an hour)
    scripts/benchmark.sh peak --check               a small one, as CI does
    scripts/benchmark.sh peak --json results/peak.json

Every peak is measured on a running training step: the bytes of live storages, counted
by weak references, without parameters and inputs. Recomputed are the flops of that
step beyond eager mode's. Upstream's steps run on the untouched wheel, by the plans of
all budgets (of fake tensors, but for nets with dropout), ours on the patched checkout. Planning times are CPU seconds of the partitioner, ours and
upstream's algorithm in one process, medians. The exit status is 1 only if a peak, a
prediction or a gradient is off.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._functorch.config as config
from matplotlib.figure import Figure
from torch import nn, Tensor
from torch._functorch import partitioners
from upstream import untouched_partitioners

from benchmarks import fresh, nets, options, sweep
from benchmarks.live_bytes import record_step
from benchmarks.marks import failed, Mark, table
from benchmarks.results import environment, markdown, measured_on, merged, Row, save
from benchmarks.tracing import CountedFlops, cpu_attention_counted, Joint, overlay
from benchmarks.training import gradients, relative_error


NETS = tuple(net.name for net in nets.SMALL)
BUDGETS = (0.0, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0)
INDUCTOR_BUDGETS = (0.1, 0.5)
# Plans that inductor schedules before it keeps one.
JUDGED = 8
PLANNED = ("gpt2", "llama-8", "lstm", "resnet50", "llama-32", "llama3-70b")
PLANNED_BUDGETS = (0.1, 0.5)
# What the partition may take, as a multiple of upstream's.
PLANNING = 1.2
KINDS: dict[str, tuple[Sequence[str], Sequence[float]]] = {
    "ours": (NETS, BUDGETS),
    "upstream": (NETS, sweep.BUDGETS),
    "inductor": (NETS, INDUCTOR_BUDGETS),
    "planning": (PLANNED, PLANNED_BUDGETS),
}
# One with dropout is in test_peak.py.
CHECKED = ("vit",)
CHECKED_BUDGETS = (0.0, 0.2, 0.5, 1.0)
REPEATS = 3
LIMITS = fresh.Limits(seconds=3600, gigabytes=12)
OPERATORS = "aot_eager_decomp_partition"
BY = ("by estimates", "with the judge")
PREDICTED = "predicted / measured peak, operator by operator"


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    with cpu_attention_counted():
        if task["kind"] == "inductor":
            return measure_inductor(task)
        if task["kind"] == "planning":
            return measure_planning(task)
        if task["kind"] == "upstream":
            return measure_upstream(task)
        return measure_steps(task)


def planned_peak() -> Any:
    """What the report of the last plan says of its peak; a budget of 1 has none."""
    return getattr(overlay("saved_report").last_plan(), "peak", None)


@contextmanager
def budgeted(budget: float, ours: bool) -> Iterator[None]:
    torch._dynamo.reset()
    target = {"activation_memory_budget_target": "peak"} if ours else {}
    with config.patch(activation_memory_budget=budget, **target):
        yield


class Steps:
    """Training steps of a net under the same random numbers, beside eager mode's."""

    def __init__(self, module: nn.Module, inputs: nets.Inputs) -> None:
        self.module, self.inputs = module, inputs
        self.parameters = list(module.parameters())
        with CountedFlops() as counter, torch.no_grad():
            module(*inputs)
        self.forward = counter.flops
        _, self.eager_flops, self.eager = self.recorded(module)

    def recorded(self, step: Callable[..., Tensor]) -> tuple[int, int, list[Tensor]]:
        """Peak, flops and gradients of one step."""
        torch.manual_seed(nets.SEED)
        with CountedFlops() as counter:
            live = record_step(lambda: step(*self.inputs), self.parameters, self.inputs)
        return live.own_peak, counter.flops, gradients(self.parameters)

    def compiled(self, backend: Any) -> Callable[..., Tensor]:
        step = torch.compile(self.module, backend=backend)
        step(*self.inputs).backward()
        self.module.zero_grad()
        return step

    def recomputed(self, flops: int) -> float:
        more: float = (flops - self.eager_flops) / self.forward
        return more


def measure_upstream(task: fresh.Task) -> Row:
    """Peak and flops of the plan of every budget; gradients of nets that draw numbers.

    The others run on fake tensors: their bytes and flops are the same.
    """
    net = nets.find(task["net"])
    if not is_random(net.name):
        mode, module, inputs = net.fake()
        with mode:
            steps = Steps(module, inputs)
            return {"steps": swept(steps, task["budgets"], are_real=False)}
    return {"steps": swept(Steps(*net.make()), task["budgets"], are_real=True)}


def is_random(net: str) -> bool:
    return "dropout" in net


def swept(steps: Steps, budgets: Sequence[float], are_real: bool) -> list[Row]:
    backend = sweep.Sweep()
    step = steps.compiled(backend)
    first: list[Tensor] = []

    def measure(budget: float) -> Row:
        backend.budget = budget
        peak, flops, found = steps.recorded(step)
        row = {"peak": peak, "recomputed": steps.recomputed(flops)}
        if are_real:
            first.extend(() if first else found)
            row["off_budget_1"] = relative_error(found, first)
        return row

    return sweep.measured(backend.graphs, measure, budgets)


def measure_steps(task: fresh.Task) -> Row:
    """Peaks, flops and gradients at every budget of the task; the largest comes first."""
    steps = Steps(*nets.find(task["net"]).make())
    searched: dict[str, Any] = {"curve": [], "lower_bound": 0}

    def noted(*arguments: Any) -> Any:
        model, found = build_curve(*arguments)
        curve = [(plan.peak, plan.cost / steps.forward) for plan in found.plans]
        searched.update(curve=curve, lower_bound=model.lower_bound)
        return model, found

    def measured() -> Iterator[Row]:
        first: list[Tensor] = []
        for budget in sorted(task["budgets"], reverse=True):
            with budgeted(budget, ours=True):
                peak, flops, found = steps.recorded(steps.compiled(OPERATORS))
            first = first or found
            planned = planned_peak()
            yield {
                "budget": budget,
                "peak": peak,
                "recomputed": steps.recomputed(flops),
                "predicted": planned and planned.predicted,
                "allowed": planned and planned.allowed,
                "fastest": planned and planned.fastest,
                "off_eager": relative_error(found, steps.eager),
                "off_budget_1": relative_error(found, first),
            }

    build_curve = overlay("peak_budget").build_curve
    with mock.patch.object(overlay("peak_budget"), build_curve.__name__, noted):
        return {"steps": list(measured()), **searched}


def allocated(module: nn.Module, inputs: nets.Inputs, budget: float) -> int:
    """The peak of a step by inductor on the CPU, as its allocator notes it."""
    from torch._inductor import config as inductor_config

    with (
        budgeted(budget, ours=True),
        inductor_config.patch(force_disable_caches=True),
    ):
        step = torch.compile(module)
        step(*inputs).backward()
        module.zero_grad()
        forward = functools.partial(step, *inputs)
        live = record_step(forward, module.parameters(), inputs, allocator=True)
        module.zero_grad()
    return live.own_peak


@contextmanager
def judge(is_on: bool) -> Iterator[list[float]]:
    """Let schedules judge, each plan's once for all budgets; tells seconds of each."""
    if not is_on:
        yield []
        return
    peak_judge: Any = importlib.import_module("torch._inductor.peak_judge")
    measure = peak_judge.schedule_peak
    known: dict[tuple[str, ...], int] = {}
    seconds: list[float] = []

    def measure_once(forward: Any, backward: Any, outputs: int) -> int:
        saved = tuple(n.name for n in backward.graph.find_nodes(op="placeholder"))
        if saved not in known:
            started = time.perf_counter()
            known[saved] = measure(forward, backward, outputs)
            seconds.append(time.perf_counter() - started)
        return known[saved]

    with (
        mock.patch.object(peak_judge, measure.__name__, measure_once),
        config.patch(activation_memory_peak_judge=JUDGED),
    ):
        yield seconds


def measure_inductor(task: fresh.Task) -> Row:
    """What inductor's own kernels have live, by estimated plans and by a judged one."""
    module, inputs = nets.find(task["net"]).make()
    steps = []
    for is_judged in (False, True):
        with judge(is_judged):
            for budget in task["budgets"]:
                found = allocated(module, inputs, budget)
                peak = planned_peak()
                steps.append(
                    {
                        "budget": budget,
                        "is_judged": is_judged,
                        "peak": found,
                        "predicted": peak.predicted,
                        "allowed": peak.allowed,
                    }
                )
    return {"steps": steps}


def measure_planning(task: fresh.Task) -> Row:
    """CPU seconds of the whole partitioner, by upstream's algorithm and by ours."""
    joint = Joint(*nets.find(task["net"]).fake())
    theirs = untouched_partitioners()
    times: dict[str, list[float]] = {}
    nodes = len(joint.graph.graph.nodes)
    for _ in range(REPEATS if nodes < 10_000 else 1):
        for budget in task["budgets"]:
            for target, solver, module, more in (
                ("saved", "dp", theirs, {}),
                # As inductor asks.
                ("peak", "exact", partitioners, {"fused": True}),
            ):
                graph = copy.deepcopy(joint.graph)
                with config.patch(
                    activation_memory_budget=budget,
                    activation_memory_budget_target=target,
                    activation_memory_budget_solver=solver,
                ):
                    # As timeit does: a collection of all that torch holds would hit
                    # any of them.
                    gc.collect()
                    gc.disable()
                    start = time.process_time()
                    module.min_cut_rematerialization_partition(
                        graph, joint.inputs, **joint.options, **more
                    )
                    seconds = time.process_time() - start
                    gc.enable()
                times.setdefault(f"{target} {budget:g}", []).append(seconds)
    return {"nodes": nodes, **{k: statistics.median(v) for k, v in times.items()}}


# -------------------------------------------------------------------- marks


def steps_of(rows: Sequence[Row], kind: str) -> dict[str, list[Row]]:
    good = [row for row in rows if row["kind"] == kind and "error" not in row]
    return {row["net"]: row["steps"] for row in good}


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    """What must hold of every step."""
    steps = steps_of(rows, "ours")
    off, over, rising = [], [], []
    for net, found in steps.items():
        fastest = next((s["fastest"] for s in found if s["fastest"]), None)
        for step in found:
            predicted = step["predicted"] or fastest
            if predicted:
                off.append((abs(predicted / step["peak"] - 1), net, step["budget"]))
            if step["allowed"]:
                over.append((step["peak"] / step["allowed"] - 1, net, step["budget"]))
        by_budget = sorted(found, key=lambda s: s["budget"])
        rising += [
            (low["peak"] / high["peak"] - 1, net, low["budget"])
            for low, high in zip(by_budget, by_budget[1:])
        ]
    if not (off and over and rising):
        return
    count = f"{len(off)} steps of {len(steps)} nets"
    for what, worst, sign, mark, most in (
        (PREDICTED, max(off), "", "0.5 %", 0.005),
        (
            "measured peak / what the budget allows",
            max(over),
            "+",
            "never over (predictions hold to 0.5 %)",
            0.005,
        ),
        (
            "measured peak / that of the next larger budget",
            max(rising),
            "+",
            "never higher",
            0.0005,
        ),
    ):
        apart, net, budget = worst
        measured = f"{apart:{sign}.3%} at most ({net} at {budget:g})"
        if what == PREDICTED:
            measured = f"off by {measured}, {count}"
        yield Mark(what, measured, mark, apart <= most)
    apart = max(s["off_budget_1"] for found in steps.values() for s in found)
    yield Mark(
        "gradients against the plan of budget 1, dropout included",
        f"off by {apart:.1e} at most",
        f"{sweep.SAME:.0e}",
        apart <= sweep.SAME,
    )
    yield from judged_beside(rows)
    # Eager mode draws other random numbers than a compiled dropout.
    steady = {n: f for n, f in steps.items() if not is_random(n)}
    if steady:
        apart, net = max((s["off_eager"], n) for n, f in steady.items() for s in f)
        yield Mark(
            "gradients against eager mode, nets without dropout",
            f"off by {apart:.1e} at most ({net}), {steady[net][0]['off_eager']:.1e} "
            "at budget 1",
            "as upstream's plan of budget 1",
            all(
                step["off_eager"] <= found[0]["off_eager"] + 1e-6
                for found in steady.values()
                for step in found
            ),
        )


def judged_beside(rows: Sequence[Row]) -> Iterator[Mark]:
    """What must hold of ours beside upstream's, if both were measured."""
    nets = [*beside_upstream(rows)]
    if not nets:
        return
    worst, net = max((each.floor / each.lowest["peak"], each.net) for each in nets)
    yield Mark(
        "our floor / the lowest peak of upstream's budgets",
        f"{worst:.2f} at most ({net}), {len(nets)} nets",
        "below 1",
        worst < 1,
    )
    worst, where = max((e.worst, f"{e.net} at {e.worst_at}") for e in nets)
    yield Mark(
        "ours at no more flops / upstream's peak",
        f"{worst:.2f} at most ({where}), {sum(e.plans for e in nets)} plans",
        "never higher",
        worst <= 1.0005,
        enforced=False,
    )


def at_no_more_flops(curve: Sequence[Any], theirs: Row) -> float:
    """Our lowest peak of plans that recompute no more than a step of upstream's."""
    # Reductions count one flop each on the curve.
    allowed = theirs["recomputed"] + 1e-5
    found: float = min(p for p, recomputed in curve if recomputed <= allowed)
    return found


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
    for row in rows:
        if row["kind"] != "ours" or "error" in row or row["net"] not in upstream:
            continue
        right = sweep.right(upstream[row["net"]])
        curve, lowest = row["curve"], sweep.lowest(right)
        found = [
            (at_no_more_flops(curve, step) / step["peak"], sweep.told(step["budgets"]))
            for step in right
        ]
        yield Beside(
            row["net"],
            lowest,
            at_no_more_flops(curve, lowest),
            curve[0][0],
            row["lower_bound"],
            *max(found),
            len(right),
            sweep.count(upstream[row["net"]]),
        )


# ------------------------------------------------------------------- report


def lowest_table(rows: Sequence[Row]) -> str:
    lines = []
    for found in beside_upstream(rows):
        peak = found.lowest["peak"]
        sizes = (peak, found.matched, found.floor, found.bound)
        least, matched, floor, bound = (f"{size / 1e6:.1f}" for size in sizes)
        lines.append(
            [
                *(found.net, least, sweep.told(found.lowest["budgets"])),
                f"{matched} ({found.matched / peak:.2f})",
                f"{floor} ({found.floor / peak:.2f})",
                bound,
                f"{found.worst:.2f} ({found.worst_at})",
                str(found.budgets),
            ]
        )
    heading = ["net", "upstream's lowest MB", "its budget", "ours at no more flops"]
    heading += ["our floor", "no plan below", "ours / upstream's at most", "budgets"]
    return markdown(heading, lines)


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


def by_inductor(rows: Sequence[Row]) -> str:
    lines = []
    is_close: dict[bool, list[bool]] = {False: [], True: []}
    for net, steps in steps_of(rows, "inductor").items():
        line = [net]
        for step in steps:
            off = step["predicted"] / step["peak"] - 1
            is_near = abs(off) <= 0.05
            is_close[step["is_judged"]].append(is_near)
            text = f"{off:+.1%}" if is_near else f"**{off:+.1%}**"
            line.append(f"{step['peak'] / 1e6:.1f} ({text})")
        lines.append(line)
    found = " and ".join(
        f"{sum(each)} of {len(each)} {by}" for each, by in zip(is_close.values(), BY)
    )
    return f"Within 5 % are {found}.\n\n" + markdown(
        ["net", *(f"{by}, at {b:g}" for by in BY for b in INDUCTOR_BUDGETS)], lines
    )


def planning(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row["kind"] == "planning" and "error" not in row:
            line = [row["net"], f"{row['nodes']:,}"]
            for budget in PLANNED_BUDGETS:
                ratio = row[f"peak {budget:g}"] / row[f"saved {budget:g}"]
                text = f"{ratio:.2f}"
                line.append(f"**{text}**" if ratio > PLANNING else text)
            lines.append(line)
    budgets = [f"by peak / by saved bytes, {budget:g}" for budget in PLANNED_BUDGETS]
    return markdown(["net", "nodes", *budgets], lines)


def summary(data: dict[str, Any]) -> str:
    return table([mark._asdict() for mark in judged(data["measured"])])


def page(data: dict[str, Any]) -> str:
    rows, facts = data["measured"], data["environment"]
    kinds = {row["kind"] for row in rows}
    text = "### Is the bound kept?\n\nRun operator by operator.\n\n"
    text += summary(data)
    if "upstream" in kinds:
        text += (
            "\n### How much lower is the peak than upstream's?\n\nOperator by operator, in MB: "
            "our floors are of steps that were run, upstream's peaks of steps on fake tensors "
            "(run for nets with dropout), plans at no more flops are predictions. In brackets as a share of upstream's lowest peak. ours at no more flops: the "
            "lowest peak of ours that recomputes no more than that plan of upstream's. our "
            "floor: at budget 0. no plan below: what single steps of the backward need "
            "anyway, mostly for parameter gradients. ours / upstream's at most: the worst "
            "of upstream's plans (its budget) against ours at no more flops. "
            f"budgets: how many of upstream's were tried. {sweep.HOW}\n\n"
            + lowest_table(rows)
        )
    if "inductor" in kinds:
        text += (
            "\n### What do inductor's kernels make of it?\n\nRun on a CPU, by its allocator: "
            "the peak in MB of the plan that the estimates choose, and of the one that the "
            f"judge keeps of {JUDGED}; in brackets how far what they said is off (bold: by "
            "more than 5 %).\n\n" + by_inductor(rows)
        )
    if "planning" in kinds:
        text += (
            "\n### What does planning cost?\n\nCPU time of the whole partition divided by "
            "that of upstream's at the same budget (bold: above the mark of "
            f"{PLANNING:g}).\n\n" + planning(rows)
        )
    repeats = f"\nTimes are medians of {facts['repeats']} interleaved runs. "
    return text + repeats + measured_on(facts)


def largest_budget(step: Row) -> float:
    budget: float = max(step["budgets"]) if "budgets" in step else step["budget"]
    return budget


def plot(data: dict[str, Any], result: Path) -> None:
    """Peak against recomputation, a panel for each net; written beside ``result``."""
    good = [row for row in data["measured"] if "error" not in row]
    names = list(steps_of(good, "ours"))
    if not names:
        return
    figure = Figure(figsize=(11, 2.3 * -(-len(names) // 4) + 0.6), dpi=110)
    axes = figure.subplots(-(-len(names) // 4), min(4, len(names)), squeeze=False)
    for axis, name in zip(axes.flat, names):
        for row in good:
            if row["net"] != name or row["kind"] not in ("ours", "upstream"):
                continue
            ours = row["kind"] == "ours"
            steps = sorted(row["steps"], key=largest_budget)
            points = [(s["recomputed"], s["peak"] / 1e6) for s in steps]
            line, color = points, "C1"
            if ours:
                line, color = [(cost, p / 1e6) for p, cost in row["curve"]], "C0"
            axis.plot(*zip(*line), color, linewidth=1)
            label = 'target "peak"' if ours else "upstream"
            axis.plot(*zip(*points), "o" if ours else "s", c=color, ms=3, label=label)
        axis.set_title(name, fontsize=9)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    axes.flat[0].legend(fontsize=7)
    figure.supxlabel("recomputed flops / forward flops", fontsize=8)
    figure.supylabel("peak, MB", fontsize=8)
    save(figure, result, data["environment"])


def main() -> int:
    parser = options.parser(__doc__, check="a small net, no times; as CI does")
    parser.add_argument(
        "--kind", nargs="+", choices=KINDS, help="these alone, the others stay in FILE"
    )
    arguments = parser.parse_args()
    plan = {"ours": (CHECKED, CHECKED_BUDGETS)} if arguments.check else KINDS
    tasks = [
        {
            "net": net,
            "kind": kind,
            "budgets": budgets,
            "torch": fresh.UNTOUCHED if kind == "upstream" else "patched",
        }
        for kind, (nets, budgets) in plan.items()
        if kind in (arguments.kind or plan)
        for net in nets
    ]
    rows = fresh.run(__name__, tasks, LIMITS)
    if arguments.kind:
        rows = merged(arguments.json, rows, "net", "kind")
    facts = {**environment(), "repeats": REPEATS}
    marks = list(judged(rows))
    # The rows are what a pull request quotes.
    quoted = [mark._asdict() for mark in marks]
    data = {"environment": facts, "measured": rows, "rows": quoted}
    fresh.finish(arguments.json, data, page)
    if arguments.json:
        plot(data, arguments.json)
    return int(failed(marks) or any("error" in row for row in rows))
