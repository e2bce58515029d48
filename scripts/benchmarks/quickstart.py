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

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
import torch._functorch.config as config

from benchmarks import fresh, nets, plans
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
from benchmarks.ways import budgeted, compiled, OPERATORS, Training


NETS = ("llama-4",)
REPEATS = 5
KINDS = {"eager": (1.0,), "upstream": plans.SWEEP, "graph": (0.2, 0.0)}


def tasks(
    names: Optional[Sequence[str]], check: bool, rows: Sequence[Row]
) -> Iterator[fresh.Task]:
    yield from plans.tasks(names or NETS, {**KINDS, "blocks": (0.0,)}, plans.RUN)


# --------------------------------------------------------- in a fresh process


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    net, kind, budgets = nets.find(task["net"]), task["kind"], task["budgets"]
    # Or budgets would mean another thing on a CPU than on a GPU.
    with config.patch(enable_autograd_cache=False), cpu_attention_counted():
        if kind != "upstream":
            return {"steps": [{"budget": b, **timed(net, kind, b)} for b in budgets]}

        def by_budget(budget: float) -> Row:
            step = training(net, kind, budget).measured()
            return {"peak": step.peak, "flops": step.flops}

        steps = plans.swept(by_budget, budgets)
        least = plans.lowest(steps)
        least.update(timed(net, kind, least["budgets"][0]))
        return {"steps": steps}


def training(net: nets.Net, kind: str, budget: float, beside: bool = False) -> Training:
    """One whose graphs are compiled."""
    in_graphs = compiled(OPERATORS)
    ways: Any = {"eager": {}, "blocks": {"blocks": in_graphs}}
    ways = ways.get(kind, {"whole": in_graphs})
    result = Training(net, beside=beside, **ways)
    result.optimizer = torch.optim.AdamW(result.parameters, lr=0.0)
    if kind == "blocks":
        result.within = overlay("step_budget").StepBudget(share=budget)
        # It makes its plan of the first step, or of the second.
        return result.warmed(3)
    with budgeted(budget, "peak" if kind == "graph" else "saved"):
        return result.warmed()


def timed(net: nets.Net, kind: str, budget: float) -> Row:
    """A step, and what eager mode's takes."""
    mine = training(net, kind, budget)
    step = mine.measured()
    plain = training(net, "eager", 1.0, beside=True)
    eager = plain.measured()
    pairs = [(mine.seconds(), plain.seconds()) for _ in range(REPEATS)]
    step_s, eager_s = (statistics.median(each) for each in zip(*pairs))
    return {
        "peak": step.peak,
        "saved": step.saved_bytes,
        "recomputed": (step.flops - eager.flops) / eager.forward_flops,
        "off_eager": relative_error(step.gradients, eager.gradients),
        "step_over_eager": step_s / eager_s,
    }


# ------------------------------------------------------------------- report


def shown(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """The kinds and steps that were timed."""
    pairs = ((row["kind"], step) for row in good(rows) for step in row["steps"])
    return [pair for pair in pairs if "off_eager" in pair[1]]


def lowest(rows: Sequence[Row], kind: str) -> Row:
    return plans.lowest([step for name, step in shown(rows) if name == kind])


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    """What must hold with the patch set applied."""
    yield from at_most(
        "gradients, off from eager mode's",
        ((step["off_eager"], kind) for kind, step in shown(rows)),
        *(TOLERANCE, f"at most {TOLERANCE:.0e}", "{:.1e} ({})", True),
    )
    if good(rows, kind="graph") and good(rows, kind="upstream"):
        ours, theirs = (lowest(rows, kind)["peak"] for kind in ("graph", "upstream"))
        what = 'lowest peak with the target "peak" / of upstream\'s budgets'
        yield Mark(what, f"{ours / theirs:.2f}", "below 1", ours < theirs)


def budget_of(step: Row) -> str:
    if "budgets" in step:
        return f"{plans.told_budgets(step['budgets'])}, the lowest"
    return f"{step['budget']:g}" if "budget" in step else ""


def page(data: dict[str, Any]) -> str:
    rows = data["measured"]
    text = columns(
        shown(rows),
        {
            "plans": lambda kind, _: kind,
            "budget": lambda _, step: budget_of(step),
            "peak MB": lambda _, step: megabytes(step["peak"]),
            "saved MB": lambda _, step: megabytes(step["saved"]),
            "step / eager": lambda _, step: f"{step['step_over_eager']:.2f}",
            "recomputed": lambda _, step: f"{step['recomputed']:.0%}",
            "gradient error": lambda _, step: f"{step['off_eager']:.0e}",
        },
    )
    return (
        text
        + f"\nNet {rows[0]['net']}, operator by operator; upstream: one graph by its "
        'own budgets, graph: by target "peak", blocks: each compiled, by a StepBudget. '
        f"Medians of {REPEATS} interleaved steps, CPU times. "
        "saved: what the forward leaves alive for the backward. recomputed: flops beyond "
        "eager mode's, as a share of the forward's. gradient error: relative to eager "
        f"mode's. {plans.HOW_SWEPT} {measured_on(data['environment'])}"
    )


def headline(data: dict[str, Any]) -> str:
    """The README's table: eager mode, the lowest peak of upstream's, and of ours."""
    rows = data["measured"]
    names = {
        "eager": "eager mode",
        "upstream": "stock torch.compile, at the budget with the lowest peak ({})",
        "graph": '**torch.compile with this set, target `"peak"`, budget {}**',
    }
    lines = []
    for kind, name in names.items():
        step = lowest(rows, kind)
        bold = "**" * (kind == "graph")
        budget = plans.told_budgets(step.get("budgets") or [step.get("budget", 1)])
        cells = f"{step['peak'] / 1e6:,.0f} MB", f"{step['step_over_eager']:.2f}"
        lines.append([name.format(budget), *(f"{bold}{cell}{bold}" for cell in cells)])
    shape = nets.LLAMA_8
    return markdown(
        ["one training step", "peak memory", "step time, relative to eager mode"], lines
    ) + (
        f"\nLlama-like, {shape.layers} layers of width {shape.width}, batch "
        f"{shape.batch} x {shape.tokens} tokens, fp32, AdamW; one graph, operator by "
        "operator. Peaks count everything live: parameters, optimizer states, gradients "
        f"and activations. {plans.HOW_SWEPT} {measured_on(data['environment'])}"
    )
