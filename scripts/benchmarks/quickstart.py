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

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import fresh, nets, pages, plans
from benchmarks.meters import relative_error, TOLERANCE
from benchmarks.pages import good, Mark, Row
from benchmarks.ways import Training


NETS = ("llama-4",)
REPEATS = 5
KINDS = {"eager": (1.0,), "upstream": plans.SWEEP, "graph": (0.2, 0.0)}


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    yield from plans.tasks(asked.nets or NETS, {**KINDS, "blocks": (0.0,)}, plans.RUN)


# --------------------------------------------------------- in a fresh process


def measure(task: fresh.Task) -> Row:
    steps = plans.measure(task, with_optimizer, Timed)["steps"]
    if task["kind"] == "upstream":
        least, told = plans.lowest(steps), ("budgets", "peak", "flops")
        steps = [s if s is least else {e: s[e] for e in told} for s in steps]
    return {"steps": steps}


def with_optimizer(training: Training) -> Training:
    training.optimizer = torch.optim.AdamW(training.parameters, lr=0.0)
    return training


class Timed(plans.Plans):
    """Plans of steps that run, beside a step in eager mode."""

    def found(self, training: Training) -> Row:
        step = training.measured()
        plain = with_optimizer(Training(self.net, beside=True)).warmed()
        eager = plain.measured()
        pairs = [(training.seconds(), plain.seconds()) for _ in range(REPEATS)]
        step_s, eager_s = (statistics.median(each) for each in zip(*pairs))
        return {
            "peak": step.peak,
            "saved": step.saved_bytes,
            "flops": step.flops,
            "recomputed": (step.flops - eager.flops) / eager.forward_flops,
            "off_eager": relative_error(step.gradients, eager.gradients),
            "step_over_eager": step_s / eager_s,
        }


# ------------------------------------------------------------------- report


def shown(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """The kinds and steps to show: of upstream's sweep it is the lowest."""
    pairs = ((row["kind"], step) for row in good(rows) for step in row["steps"])
    return [pair for pair in pairs if "off_eager" in pair[1]]


def lowest(rows: Sequence[Row], kind: str) -> Row:
    return plans.lowest([step for name, step in shown(rows) if name == kind])


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    """What must hold with the patch set applied."""
    yield from pages.at_most(
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
    asked = step.get("budget", step.get("share"))
    return "" if asked is None else f"{asked:g}"


def page(data: dict[str, Any]) -> str:
    rows = data["measured"]
    text = pages.columns(
        shown(rows),
        {
            "plans": lambda kind, _: kind,
            "budget": lambda _, step: budget_of(step),
            "peak MB": lambda _, step: pages.megabytes(step["peak"]),
            "saved MB": lambda _, step: pages.megabytes(step["saved"]),
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
        f"mode's. {plans.HOW_SWEPT} {pages.measured_on(data['environment'])}"
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
    return pages.markdown(
        ["one training step", "peak memory", "step time, relative to eager mode"], lines
    ) + (
        f"\nLlama-like, {shape.layers} layers of width {shape.width}, batch "
        f"{shape.batch} x {shape.tokens} tokens, fp32, AdamW; one graph, operator by "
        "operator. Peaks count everything live: parameters, optimizer states, gradients "
        f"and activations. {plans.HOW_SWEPT} {pages.measured_on(data['environment'])}"
    )
