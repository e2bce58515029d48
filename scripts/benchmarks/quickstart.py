"""Train a small transformer under activation memory budgets and show what they do.

Run it through scripts/quickstart.sh, which assembles and patches a PyTorch
checkout first. A decoder-only transformer (grouped-query attention, gated MLP,
RMSNorm; random weights, nothing downloaded) is trained on the CPU: in eager mode, at
the budget of upstream that has the lowest peak, with the target "peak", and with a
StepBudget. Upstream's steps run on the untouched wheel.

Every row is a training step with AdamW in a fresh process: what it holds at its peak,
all storages counted, what the forward saves for the backward, its CPU time beside eager
mode's (interleaved, medians), and the flops it computes twice. The learning rate is 0,
so that all rows train the same weights. Gradients are compared with eager mode's.

Exit status: 0 all well; 1 gradients differ from eager's, or a peak is not below
upstream's; 2 bad call, or torch without the patches.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
import torch._functorch.config as config

from benchmarks import fresh, nets, sweep
from benchmarks.meters import relative_error, TOLERANCE
from benchmarks.pages import (
    at_most,
    columns,
    good,
    Mark,
    markdown,
    measured_on,
    megabytes,
    Row,
)
from benchmarks.tracing import cpu_attention_counted, overlay
from benchmarks.ways import budgeted, compiled, OPERATORS, swept, Training


NETS = ("llama-4",)
KIND, KEY = "technique", ("technique", "swept", "budget")
LIMITS = fresh.Limits(seconds=3600, gigabytes=12)
REPEATS = 5
FACTS = {"repeats": REPEATS}
EAGER, UPSTREAM, PEAK = "eager", "compile, upstream dp", "compile, peak"
BLOCKS = "compile each block, StepBudget"
# And the budget of each; of a StepBudget it is a share.
TECHNIQUES = ((EAGER, None), (PEAK, 0.2), (PEAK, 0.0), (BLOCKS, 0.0))
# Of upstream, for its lowest peak.
SWEPT = tuple(n / 32 for n in range(32, -1, -1))
# Settings of torch._functorch.config; upstream's runs on the untouched wheel.
SETTINGS: dict[str, dict[str, Any]] = {
    UPSTREAM: {"activation_memory_budget_solver": "dp"},
    PEAK: {"activation_memory_budget_target": "peak"},
}
# A StepBudget makes its plan of the first step, or of the second.
WARM_UP = 3


def tasks(names: Optional[Sequence[str]], check: bool) -> Iterator[fresh.Task]:
    for name in names or NETS:
        eager, *others = (task_of(name, *each) for each in TECHNIQUES)
        yield from (eager, sweep_of_upstream(name, SWEPT), *others)


def task_of(model: str, technique: str, budget: Optional[float]) -> fresh.Task:
    return {
        "technique": technique,
        "budget": budget,
        "model": model,
        "torch": fresh.UNTOUCHED if technique == UPSTREAM else "patched",
    }


def sweep_of_upstream(model: str, budgets: Sequence[float]) -> fresh.Task:
    return {**task_of(model, UPSTREAM, None), "swept": True, "budgets": budgets}


# --------------------------------------------------------- in a fresh process


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    settings = {"enable_autograd_cache": False, **SETTINGS.get(task["technique"], {})}
    # Or budgets would mean another thing on a CPU than on a GPU.
    with config.patch(settings), cpu_attention_counted():
        return lowest_of_all(task) if task.get("swept") else measured(task)


def training(
    task: fresh.Task, backend: Any = OPERATORS, beside: bool = False
) -> Training:
    in_graphs = compiled(backend)
    ways: dict[str, Any] = {EAGER: {}, BLOCKS: {"blocks": in_graphs}}
    result = Training(
        nets.find(task["model"]),
        beside=beside,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.0),
        **ways.get(task["technique"], {"whole": in_graphs}),
    )
    if task["technique"] == BLOCKS:
        result.within = overlay("step_budget").StepBudget(share=task["budget"])
    return result


def lowest_of_all(task: fresh.Task) -> Row:
    """The peaks of all budgets' plans, and the row of the lowest one."""
    plans = swept(
        lambda backend: training(task, backend),
        task["budgets"],
        lambda step: {"peak": step.peak},
    )
    budget = sweep.lowest(plans)["budgets"][0]
    return {"sweep": plans, **measured({**task, "budget": budget})}


def measured(task: fresh.Task) -> Row:
    in_config = task["technique"] in SETTINGS
    with budgeted(task["budget"] if in_config else 1.0):
        mine = training(task).warmed(WARM_UP)
    step = mine.measured()
    plain = training({**task, "technique": EAGER}, beside=True).warmed()
    eager = plain.measured()
    pairs = [(mine.seconds(), plain.seconds()) for _ in range(REPEATS)]
    step_s, eager_s = (statistics.median(each) for each in zip(*pairs))
    return {
        "peak_bytes": step.peak,
        "saved_bytes": step.saved_bytes,
        "forward_flops": eager.forward_flops,
        "recomputed_flops": step.flops - eager.flops,
        "gradient_error": relative_error(step.gradients, eager.gradients),
        "step_s": step_s,
        "eager_step_s": eager_s,
        "step_over_eager": step_s / eager_s,
    }


# ------------------------------------------------------------------- report


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    """What must hold with the patch set applied."""
    steps = good(rows)
    yield from at_most(
        "gradients, off from eager mode's",
        ((row["gradient_error"], row["technique"]) for row in steps),
        *(TOLERANCE, f"at most {TOLERANCE:.0e}", "{:.1e} ({})", True),
    )
    if {PEAK, UPSTREAM} <= {row["technique"] for row in steps}:
        ours, theirs = (lowest(steps, each)["peak_bytes"] for each in (PEAK, UPSTREAM))
        what = 'lowest peak with the target "peak" / of upstream\'s budgets'
        yield Mark(what, f"{ours / theirs:.2f}", "below 1", ours < theirs)


def lowest(rows: Sequence[Row], technique: str) -> Row:
    """A technique's row of the lowest peak; of a sweep, that of its lowest plan."""
    mine = []
    for row in good(rows, technique=technique):
        peaks = [step["peak"] for step in row.get("sweep", ())]
        mine.append({**row, "peak_bytes": min(peaks, default=row["peak_bytes"])})
    return sweep.lowest(mine, "peak_bytes")


def told_budget(row: Row) -> str:
    if "sweep" in row:
        return sweep.told(sweep.lowest(row["sweep"])["budgets"])
    return "" if row["budget"] is None else f"{row['budget']:g}"


def page(data: dict[str, Any]) -> str:
    rows, facts = data["measured"], data["environment"]

    def budget(row: Row) -> str:
        count = sweep.count(row["sweep"]) if "sweep" in row else 0
        return told_budget(row) + (f", the lowest of {count}" if count else "")

    text = columns(
        good(rows),
        {
            "technique": lambda row: row["technique"],
            "budget": budget,
            "peak MB": lambda row: megabytes(row["peak_bytes"]),
            "saved MB": lambda row: megabytes(row["saved_bytes"]),
            "step / eager": lambda row: f"{row['step_over_eager']:.2f}",
            "recomputed": lambda row: (
                f"{row['recomputed_flops'] / row['forward_flops']:.0%}"
            ),
            "gradient error": lambda row: f"{row['gradient_error']:.0e}",
        },
    )
    wrong = (
        f"\nNot measured: {row['technique']}: `{row['error']}`\n"
        for row in rows
        if "error" in row
    )
    return (
        text
        + "".join(wrong)
        + f"\nModel {rows[0]['model']}, backend {OPERATORS}, medians of "
        f"{facts['repeats']} interleaved steps. Times on a CPU are CPU times. "
        "saved: what the forward leaves alive for the backward. recomputed: flops beyond "
        "eager mode's, as a share of the forward's. gradient error: relative to eager "
        f"mode's. {sweep.HOW} {measured_on(facts)}"
    )


def headline(data: dict[str, Any]) -> str:
    """The README's table: eager mode, the lowest peak of upstream's, and of ours."""
    eager, upstream, ours = (
        lowest(data["measured"], each) for each in (EAGER, UPSTREAM, PEAK)
    )
    names = (
        "eager mode",
        "stock torch.compile, at the budget with the lowest peak "
        f"({told_budget(upstream)})",
        f'torch.compile with this set, target `"peak"`, budget {ours["budget"]:g}',
    )
    lines = []
    for name, row in zip(names, (eager, upstream, ours)):
        bold = "**" if row is ours else ""
        peak = f"{row['peak_bytes'] / 1e6:,.0f} MB"
        line = (name, peak, f"{row['step_over_eager']:.2f}")
        lines.append([f"{bold}{cell}{bold}" for cell in line])
    shape = nets.LLAMA_8
    return markdown(
        ["one training step", "peak memory", "step time, relative to eager mode"], lines
    ) + (
        f"\nLlama-like, {shape.layers} layers of width {shape.width}, batch "
        f"{shape.batch} x {shape.tokens} tokens, fp32, AdamW; one graph, operator by "
        "operator. Peaks count everything live: parameters, optimizer states, gradients "
        f"and activations. {sweep.HOW} {measured_on(data['environment'])}"
    )
