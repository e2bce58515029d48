"""One training step in eager mode, by stock torch.compile and with this set, side by side.

    scripts/quickstart.sh                                     two small nets (minutes)
    scripts/quickstart.sh --full --json results/compare.json  the README's (half an hour)

Every row is a training step with AdamW in a fresh process, on the CPU: what it holds at
its peak (parameters, optimizer states, gradients and activations), what the forward saves
for the backward, its CPU time beside eager mode's (interleaved, medians), and the flops it
computes twice. Stock's steps run on the untouched wheel. The learning rate is 0, so all
rows train the same weights. Gradients are compared with eager mode's: random operators
draw what they draw there.

    eager         no torch.compile
    autocast      eager mode, in bfloat16
    checkpoint    eager mode, around each block; a selective one saves attention and every
                  second product
    upstream      stock, one graph: at some budgets, and at the one with the lowest peak
    exact         with this set, target "saved"
    graph         with this set, target "peak"
    blocks        with this set, each block compiled, by a StepBudget

Graphs run operator by operator, and every storage is counted. The net with the large
vocabulary runs by inductor's kernels, since its head is run in chunks by nothing else; there
the allocator is asked.

Exit status: 0 all well; 1 gradients with the set differ from eager mode's, a peak is not
below stock's, or a row failed; 2 bad call.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.config as inductor_config

from benchmarks import bounds, catalogue, fresh, pages, plans
from benchmarks.meters import (
    device_peak,
    relative_error,
    storages,
    TOLERANCE,
)
from benchmarks.pages import good, Mark, Row
from benchmarks.ways import checkpointed, compiled, Training


WORDS = "llama-words"
QUICK = ("llama-4", "gpt2-dropout")
FULL = ("llama-8", "gpt2-dropout", WORDS)
NETS = {"quick": QUICK, "full": FULL, "check": QUICK[:1]}
REPEATS = 5
KINDS = {"eager": (), "upstream": (1.0, 0.0), "graph": (0.2, 0.0)}
# Of the first net, for docs/evidence.md.
MORE = {
    "eager": (),
    "autocast": (),
    "checkpoint": (),
    "selective checkpoint": (),
    "upstream": (1.0, 0.5, 0.2, 0.0),
    "exact": (0.2, 0.1, 0.0),
    "graph": (0.5, 0.2, 0.0),
    "blocks": (0.0,),
}
# Stock's budgets are in so many parts, then in more around the lowest peak.
FINER = (8, 32, 128)
WITH_THE_SET = ("exact", "graph", "blocks")


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    is_full = asked.set == "full"
    for net in asked.nets:
        kinds = {**KINDS, "checkpoint": ()} if is_full else KINDS
        kinds = MORE if is_full and net == FULL[0] else kinds
        device = "inductor" if net == WORDS else plans.RUN
        for task in plans.tasks(net, kinds, device):
            yield {"set": asked.set, **task}


# --------------------------------------------------------- in a fresh process


def measure(task: fresh.Task) -> Row:
    with inductor_config.patch(fallback_random=True):
        if task["kind"] != "upstream":
            return {"steps": [*timed(task)]}
        swept = sweep(task)
        least = min(swept, key=lambda step: step["peak"])
        budgets = [*task["budgets"], least["budgets"][0]]
        *steps, lowest = timed({**task, "budgets": budgets})
        lowest["budgets"] = least["budgets"]
        return {"steps": [*steps, lowest], "swept": swept}


def sweep(task: fresh.Task) -> list[Row]:
    """Peaks by budgets from 0 to 1, each time finer around the lowest so far."""
    found: list[Row] = []
    least, most = 0.0, 1.0
    # Each budget is a compile; kernels take their time.
    is_fine = task["set"] == "full" and task["net"] != WORDS
    for parts in FINER if is_fine else FINER[:1]:
        known = {budget for step in found for budget in step["budgets"]}
        asked = (n / parts for n in range(parts, -1, -1))
        budgets = [b for b in asked if least <= b <= most and b not in known]
        for step in plans.measure({**task, "budgets": budgets})["steps"]:
            found.append({name: step[name] for name in ("budgets", "peak")})
        lowest = min(found, key=lambda step: step["peak"])["budgets"]
        least, most = min(lowest) - 1 / parts, max(lowest) + 1 / parts
    return found


def timed(task: fresh.Task) -> Iterator[Row]:
    kind, device, budgets = task["kind"], task["device"], task["budgets"]
    net = replace(catalogue.find(task["net"]), dtype=torch.float32)
    with plans.backend_of(device) as backend:
        made = Timed(net, device, backend, False, with_optimizer)
        if kind in plans.CHECKPOINTS:
            saving = {"context_fn": plans.saving_products} if " " in kind else {}
            yield made.measured(made.training(blocks=checkpointed(**saving)))
        elif kind in ("eager", "autocast"):
            training = made.training()
            if kind == "autocast":
                training.within = torch.autocast("cpu", torch.bfloat16)
            yield made.measured(training)
        elif kind == "blocks":
            yield from made.asked(kind, [{"share": share} for share in budgets])
        elif kind == "graph":
            yield from map(made.by_peak, budgets)
        else:
            whole = compiled(backend, fullgraph=True)
            for budget in budgets:
                yield made.by_budget(budget, whole=whole)


def with_optimizer(training: Training) -> Training:
    training.optimizer = torch.optim.AdamW(training.parameters, lr=0.0)
    return training


class Timed(plans.Plans):
    """Plans of steps that run, beside a step in eager mode."""

    def found(self, training: Training) -> Row:
        plain = with_optimizer(Training(self.net, beside=True)).warmed()
        is_run = self.device == plans.RUN
        row = (self.by_operators if is_run else self.by_kernels)(training, plain)
        pairs = [(training.seconds(), plain.seconds()) for _ in range(REPEATS)]
        step_s, eager_s = (statistics.median(each) for each in zip(*pairs))
        return {**row, "step_over_eager": step_s / eager_s}

    def by_operators(self, training: Training, plain: Training) -> Row:
        step, eager = training.measured(), plain.measured()
        return {
            "peak": step.peak,
            "saved": step.saved_bytes,
            "flops": step.flops,
            "recomputed": (step.flops - eager.flops) / eager.forward_flops,
            "off_eager": relative_error(step.gradients, eager.gradients),
        }

    def by_kernels(self, training: Training, plain: Training) -> Row:
        module, optimizer = training.module, training.optimizer
        assert optimizer is not None
        states = [each for state in optimizer.state.values() for each in state.values()]
        there = [*training.parameters, *module.buffers(), *training.inputs, *states]
        given = {each.data_ptr(): each.nbytes() for each in storages(there)}
        peak = sum(given.values()) + device_peak(training.step, "cpu")
        off = relative_error(*map(plans.gradients_of, (training, plain)))
        return {"peak": peak, "off_eager": off}


# ------------------------------------------------------------------- report


def shown(rows: Sequence[Row], **wanted: Any) -> list[tuple[Row, Row]]:
    return [(row, step) for row in good(rows, **wanted) for step in row["steps"]]


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    """What must hold with the patch set applied."""
    errors = [
        (step["off_eager"], f"{row['net']}, {row['kind']}")
        for row, step in shown(rows)
        if row["kind"] in WITH_THE_SET
    ]
    yield from pages.at_most(
        "gradients with the set, off from eager mode's",
        *(errors, TOLERANCE, f"at most {TOLERANCE:.0e}", "{:.1e} ({})", True),
    )
    for ratio, net in bounds.lowest_peaks(rows, "upstream", "graph"):
        what = f"{net}: lowest peak with right gradients, this set / stock"
        yield Mark(what, f"{ratio:.2f}", "below 1", ratio < 1)


def budget_of(step: Row) -> str:
    if "budgets" in step:
        return f"{plans.told_budgets(step['budgets'])}, the lowest peak"
    asked = step.get("budget", step.get("share"))
    return "" if asked is None else f"{asked:g}"


def error_of(step: Row) -> str:
    text = f"{step['off_eager']:.0e}" if step["off_eager"] else "0"
    return text if plans.right([step]) else f"**{text}**"


def table(rows: Sequence[Row]) -> str:
    def megabytes(name: str) -> Any:
        return lambda _, step: pages.megabytes(step[name]) if name in step else "-"

    return pages.columns(
        shown(rows),
        {
            "net": lambda row, _: row["net"],
            "plans": lambda row, _: row["kind"],
            "budget": lambda _, step: budget_of(step),
            "peak MB": megabytes("peak"),
            "saved MB": megabytes("saved"),
            "step / eager": lambda _, step: f"{step['step_over_eager']:.2f}",
            "recomputed": lambda _, step: (
                f"{step['recomputed']:.0%}" if "recomputed" in step else "-"
            ),
            "gradient error": lambda _, step: error_of(step),
        },
    )


def page(data: dict[str, Any]) -> str:
    rows = data["measured"]
    return (
        f"{table(rows)}\nupstream: stock torch.compile, untouched wheel, one graph; exact "
        'and graph: with this set, by the targets "saved" and "peak"; blocks: each compiled, '
        f"by a StepBudget. {measured_how(rows)} saved: what the forward leaves alive for "
        "the backward. recomputed: flops beyond eager mode's, as a share of the forward's. "
        f"{pages.measured_on(data['environment'])}{seen(data)}"
    )


def measured_how(rows: Sequence[Row]) -> str:
    words = "; of `llama-words` inductor's kernels, by the allocator"
    swept = {
        row["net"]: sum(len(step["budgets"]) for step in row["swept"])
        for row in good(rows, kind="upstream")
    }
    numbers = ", ".join(f"{number} for `{net}`" for net, number in swept.items())
    return (
        "Peaks count parameters, optimizer states, gradients and activations: operator by "
        f"operator, every storage counted{words * bool(good(rows, net=WORDS))}. "
        f"Step: CPU time, medians of {REPEATS} beside eager steps. Lowest peak of stock: "
        f"of budgets from 0 to 1, evenly or, if more than 9, finer around it: {numbers}. "
        "Gradient error: of the worst "
        "parameter, relative to eager mode's with the same random numbers; in bold above "
        f"{TOLERANCE:.0e}."
    )


def seen(data: dict[str, Any]) -> str:
    """What a quickstart ends with: what was seen, and what comes next."""
    rows, (llama, dropout) = data["measured"], QUICK
    kinds = ("graph", "upstream")
    if not all(good(rows, net=net, kind=kind) for net in QUICK for kind in kinds):
        return ""
    ours, theirs = (
        pages.megabytes(plans.lowest(row["steps"])["peak"])
        for kind in kinds
        for row in good(rows, net=llama, kind=kind)
    )
    worst = {
        kind: max(s["off_eager"] for _, s in shown(rows, net=dropout, kind=kind))
        for kind in kinds
    }
    return (
        f"\nSeen: the lowest peak of {llama} is {ours} MB with this set and {theirs} MB "
        f"with stock torch.compile, and with dropout stock's gradients are off by up to "
        f"{worst['upstream']:.0%}, this set's by {worst['graph']:.0e}. Next: "
        "`scripts/apply_patch.sh --installed` puts the set onto your torch, and "
        "`scripts/apply_patch.sh --reverse --installed` takes it off.\n"
    )


HEADINGS = {
    FULL[0]: "Llama-like: peak MB",
    FULL[1]: "with dropout: peak MB",
    FULL[2]: "large vocabulary: peak MB",
}


def headline(data: dict[str, Any]) -> str:
    """The README's table: a line for each way, peak and time of each net."""
    rows = data["measured"]
    lines = [
        ("eager mode", "eager", 0),
        ("eager mode, a checkpoint around each block", "checkpoint", 0),
        ("stock torch.compile, budget 1", "upstream", 1.0),
        ("stock, budget 0", "upstream", 0.0),
        ("stock, at its lowest peak", "upstream", None),
        ('**this set**, target `"peak"`, budget 0.2', "graph", 0.2),
        ('**this set**, target `"peak"`, budget 0', "graph", 0.0),
    ]

    def step_of(net: str, kind: str, budget: object) -> Row:
        steps = [step for _, step in shown(rows, net=net, kind=kind)]
        if budget is None:
            return next((step for step in steps if "budgets" in step), {})
        return next((step for step in steps if step.get("budget", 0) == budget), {})

    heading = ["one training step"]
    for net, words in HEADINGS.items():
        heading += [words, "step"] + ["gradient error"] * (net == FULL[1])
    found = []
    for name, kind, budget in lines:
        cells = [name]
        for net in HEADINGS:
            step = step_of(net, kind, budget)
            told = ["-", "-", "-"]
            if step:
                ratio = f"{step['step_over_eager']:.2f}"
                told = [pages.megabytes(step["peak"]), ratio, error_of(step)]
            cells += told[: 3 if net == FULL[1] else 2]
        found.append(cells)
    return (
        f"{pages.markdown(heading, found)}\nStep: time relative to eager mode. fp32, AdamW; "
        f"nets {', '.join(f'`{net}`' for net in FULL)}. {measured_how(rows)} "
        f"{pages.measured_on(data['environment'])}"
    )


def techniques(data: dict[str, Any]) -> str:
    """Of the first net, every way."""
    rows = good(data["measured"], net=FULL[0])
    return page({**data, "measured": rows})
