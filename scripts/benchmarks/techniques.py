"""Measures what saves memory in training, and what it costs, on one model.

    scripts/benchmark.sh techniques                          a small Llama, on the CPU
    scripts/benchmark.sh techniques --model gpt2
    scripts/benchmark.sh techniques --model my_models:make   your own
    scripts/benchmark.sh techniques --json results/techniques.json

Your own model is a function without arguments, found from the working folder, that
returns a model and a tuple or dict of its inputs; the model returns its loss (or an
object with a loss, as the Hugging Face library's models do when given labels).

Every row is a training step with AdamW in a fresh process, on CUDA where there is a
GPU: what it holds at its peak, what the forward saves for the backward, its time
beside eager mode's (interleaved, medians; CPU time of one thread, or wall time on
CUDA), and the flops it computes twice. Memory is exact: on the CPU all storages are
counted, on CUDA all that torch's allocators hand out.
The learning rate is 0, so that all rows train the same weights. Gradients are compared
with eager mode's at the same seed. If the model draws random numbers, compiled graphs
draw others at that seed, and are compared with themselves at budget 1.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
import torch._functorch.config as config
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from benchmarks import fresh, nets, sweep
from benchmarks.meters import relative_error
from benchmarks.pages import columns, good, Mark, markdown, measured_on, megabytes, Row
from benchmarks.tracing import cpu_attention_counted, overlay
from benchmarks.ways import (
    autocast,
    budgeted,
    checkpointed,
    compiled,
    MODULES,
    OPERATORS,
    swept,
    Training,
)


BUDGETS = (1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.0)
REPEATS = 5
FACTS = {"repeats": REPEATS}
NETS = ("llama-8",)
OPTIONS = {
    "modules": {
        "default": MODULES,
        "metavar": "REGEX",
        "help": "blocks, by their whole name (default: %(default)s)",
    }
}
KIND, KEY = "technique", ("technique", "swept", "budget")
LIMITS = fresh.Limits(seconds=3600, gigabytes=12)
EAGER, CHECKPOINT = "eager", "checkpoint"
SELECTIVE, AUTOCAST = "selective checkpoint", "autocast bf16"
UPSTREAM, EXACT, PEAK = "compile, upstream dp", "compile, exact", "compile, peak"
BLOCKS = "compile each block, StepBudget"
# And the budgets of each; of a StepBudget they are shares.
TECHNIQUES: dict[str, Sequence[Optional[float]]] = {
    **dict.fromkeys((EAGER, AUTOCAST, CHECKPOINT, SELECTIVE), (None,)),
    **dict.fromkeys((UPSTREAM, EXACT, PEAK), BUDGETS),
    BLOCKS: (0.0,),
}
# Settings of torch._functorch.config; upstream's runs on the untouched wheel.
SETTINGS: dict[str, dict[str, Any]] = {
    UPSTREAM: {"activation_memory_budget_solver": "dp"},
    EXACT: {"activation_memory_budget_solver": "exact"},
    PEAK: {"activation_memory_budget_target": "peak"},
}
# A StepBudget makes its plan of the first step, or of the second.
WARM_UP = 3


def tasks(
    names: Optional[Sequence[str]], check: bool, modules: str
) -> Iterator[fresh.Task]:
    for name in names or NETS:
        for technique, budgets in TECHNIQUES.items():
            for budget in budgets:
                yield {**task_of(name, technique, budget), "modules": modules}
        yield sweep_of_upstream(name)


def task_of(model: str, technique: str, budget: Optional[float]) -> fresh.Task:
    cuda = torch.cuda.is_available()
    return {
        "technique": technique,
        "budget": budget,
        "model": model,
        "device": "cuda" if cuda else "cpu",
        # On a CPU inductor needs a C++ compiler.
        "backend": "inductor" if cuda else OPERATORS,
        "modules": MODULES,
        "torch": fresh.UNTOUCHED if technique == UPSTREAM else "patched",
    }


def sweep_of_upstream(
    model: str, budgets: Sequence[float] = sweep.BUDGETS
) -> fresh.Task:
    return {**task_of(model, UPSTREAM, None), "swept": True, "budgets": budgets}


# --------------------------------------------------------- in a fresh process


def measure(task: fresh.Task) -> Row:
    if task["device"] == "cpu":
        torch.set_num_threads(1)
    settings = {"enable_autograd_cache": False, **SETTINGS.get(task["technique"], {})}
    # Or budgets would mean another thing on a CPU than on a GPU.
    with config.patch(settings), cpu_attention_counted():
        return lowest_of_all(task) if task.get("swept") else measured(task)


def save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Save what has flops to count (products, convolutions, attention)."""
    if getattr(operator, "_overloadpacket", None) in flop_registry:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def training(task: fresh.Task, backend: Any = None, beside: bool = False) -> Training:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    in_graphs = compiled(backend or task["backend"])
    ways: dict[str, Any] = {
        EAGER: {},
        AUTOCAST: {"whole": autocast(task["device"])},
        CHECKPOINT: {"blocks": checkpointed()},
        SELECTIVE: {"blocks": checkpointed(context_fn=contexts)},
        BLOCKS: {"blocks": in_graphs},
    }
    result = Training(
        nets.find(task["model"]),
        modules=task["modules"],
        device=task["device"],
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
        task["backend"],
    )
    budget = sweep.lowest(plans)["budgets"][0]
    return {"sweep": plans, **measured({**task, "budget": budget})}


def gradients_at(task: fresh.Task, budget: float) -> list[Tensor]:
    with budgeted(budget):
        asked = {**task, "budget": budget}
        return training(asked).warmed(WARM_UP).measured().gradients


def measured(task: fresh.Task) -> Row:
    in_config = task["technique"] in SETTINGS
    with budgeted(task["budget"] if in_config else 1.0):
        mine = training(task).warmed(WARM_UP)
    step = mine.measured()
    is_on_gpu = task["device"] == "cuda"
    live = mine.measured(allocator=True) if is_on_gpu else step
    plain = training({**task, "technique": EAGER}, beside=True)
    before = torch.get_rng_state(), *torch.cuda.get_rng_state_all()
    plain.loss()
    after = torch.get_rng_state(), *torch.cuda.get_rng_state_all()
    is_random = not all(map(torch.equal, before, after))
    eager = plain.measured()
    plain.step()
    pairs = [(mine.seconds(), plain.seconds()) for _ in range(REPEATS)]
    step_s, eager_s = (statistics.median(each) for each in zip(*pairs))
    wanted = eager.gradients
    if is_random and task["budget"] is not None:
        wanted = gradients_at(task, 1.0)
    return {
        "peak_bytes": live.peak,
        "saved_bytes": live.saved_bytes,
        "forward_flops": eager.forward_flops,
        "recomputed_flops": step.flops - eager.flops,
        "gradient_error": relative_error(step.gradients, wanted),
        "step_s": step_s,
        "eager_step_s": eager_s,
        "step_over_eager": step_s / eager_s,
        **({"random": True} if is_random else {}),
    }


# ------------------------------------------------------------------- report


def judged(rows: Sequence[Row]) -> list[Mark]:
    return []


def told_budget(row: Row) -> str:
    if "sweep" in row:
        return sweep.told(sweep.lowest(row["sweep"])["budgets"])
    return "" if row["budget"] is None else f"{row['budget']:g}"


def page(data: dict[str, Any]) -> str:
    rows, facts = data["measured"], data["environment"]

    def budget(row: Row) -> str:
        count = sweep.count(row["sweep"]) if "sweep" in row else 0
        return told_budget(row) + (f", the lowest of {count}" if count else "")

    def recomputed(row: Row) -> str:
        return f"{row['recomputed_flops'] / row['forward_flops']:.0%}"

    shown = {
        "peak MB": lambda row: megabytes(row["peak_bytes"]),
        "saved MB": lambda row: megabytes(row["saved_bytes"]),
        "step / eager": lambda row: f"{row['step_over_eager']:.2f}",
        "recomputed": recomputed,
        "gradient error": lambda row: f"{row['gradient_error']:.0e}",
    }

    text = columns(
        good(rows),
        {"technique": lambda row: row["technique"], "budget": budget, **shown},
    )
    wrong = [
        f"- {row['technique']} {budget(row)}: `{row['error']}`\n"
        for row in rows
        if "error" in row
    ]
    if wrong:
        text += f"\nWhat could not be measured:\n\n{''.join(wrong)}"
    compared = "relative to eager mode's. "
    if any("random" in row for row in rows):
        compared = (
            "at the same seed; of compiled rows relative to the same at budget 1, of the "
            "others to eager mode's: the model draws random numbers, and compiled graphs "
            "draw others than eager mode does at that seed. "
        )
    return text + (
        f"\nModel {rows[0]['model']}, backend {rows[0]['backend']}, medians of "
        f"{facts['repeats']} interleaved steps. Times on a CPU are CPU times. "
        "saved: what the forward leaves alive for the backward. recomputed: flops beyond "
        "eager mode's, as a share of "
        f"the forward's. gradient error: {compared}{sweep.HOW} {measured_on(facts)}"
    )


def lowest(rows: Sequence[Row], technique: str) -> Row:
    """A technique's row of the lowest peak; of a sweep, that of its lowest plan."""
    mine = []
    for row in rows:
        if row.get("technique") == technique and "error" not in row:
            swept = [step["peak"] for step in row.get("sweep", ())]
            mine.append({**row, "peak_bytes": min(swept, default=row["peak_bytes"])})
    return sweep.lowest(mine, "peak_bytes")


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


def lowest_peaks(data: dict[str, Any]) -> str:
    """What the page says of the lowest peaks."""
    told = []
    for technique, name in (
        (PEAK, 'the target `"peak"`'),
        (UPSTREAM, "upstream's budgets"),
        (CHECKPOINT, "a checkpoint around each block"),
    ):
        row = lowest(data["measured"], technique)
        budget = told_budget(row)
        at = f" at {budget}" if budget else ""
        told.append(f"{name} {row['peak_bytes'] / 1e6:,.0f} MB{at}")
    return f"- peaks: in the table below the lowest of {', of '.join(told)};\n  "
