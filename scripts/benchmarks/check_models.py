"""Trains real models by the Hugging Face Trainer within budgets, and checks what it did.

    scripts/benchmark.sh check_models                       all models (a quarter of an hour)
    scripts/benchmark.sh check_models --model hf-t5         one of them
    scripts/benchmark.sh check_models --json results/check_models.json
    scripts/benchmark.sh check_models --model hf-t5 --json results/check_models.json   anew

Models of the transformers library from small configurations, one with LoRA by peft, are
trained with their dropout, each compiled in several ways, operator by operator. Two
cells each: "saved" is a budget of saved bytes, "peak" one of peak memory, by a
StepBudget where blocks are compiled by themselves. A cell is ok where the gradients are
those of budget 1 at the same seed, bit for bit, and the bytes that were measured are no
more than were allowed. Exit status 1 if one is not.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Optional

import torch
import torch._functorch.config as config
from torch import Tensor

from benchmarks import fresh, models
from benchmarks.meters import CountedStorages
from benchmarks.nets import SEED
from benchmarks.pages import Mark, markdown, measured_on, Row
from benchmarks.tracing import overlay
from benchmarks.ways import budgeted, OPERATORS


BUDGET = 0.3
BATCH = 4
LENGTH = 48
# Steps until nothing is compiled any more.
STEPS = 4
# Live bytes of a step are planned operator by operator, but for a few scalars.
SLACK = {"saved": 1.0, "peak": 1.005}
KIND, KEY = "way", ("model", "way")
PACKAGES = ("transformers", "peft", "accelerate")
LIMITS = fresh.Limits(seconds=600, gigabytes=8)

NARROW = {"length": LENGTH, "vocab_size": 128}
BLOCKS = {
    **NARROW,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**BLOCKS, "num_key_value_heads": 2}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 1, "num_heads": 4}
ENCODER = {"encoder_layers": 1, "encoder_ffn_dim": 160, "encoder_attention_heads": 4}
DECODER = {"decoder_layers": 1, "decoder_ffn_dim": 160, "decoder_attention_heads": 4}
IDS = {"pad_token_id": 0, "decoder_start_token_id": 1}
SIZES: dict[str, dict[str, int]] = {
    "llama": GROUPED,
    "lora": GROUPED,
    "gpt2": {**NARROW, "n_embd": 64, "n_head": 4, "n_layer": 2},
    "bert": BLOCKS,
    "t5": {**NARROW, **T5},
    "whisper": {
        **NARROW,
        **ENCODER,
        **DECODER,
        **IDS,
        "d_model": 64,
        "max_source_positions": 64,
    },
    "mixtral": {**GROUPED, "num_local_experts": 4},
    # Its scan over time is unrolled.
    "mamba": {**NARROW, "length": 16, "hidden_size": 64, "state_size": 8},
}
NETS = tuple(f"hf-{name}" for name in SIZES)

# How each is compiled and trained: the Trainer's arguments.
WHOLE, DYNAMIC = "whole", "regional, bf16, accumulated"
WAYS: dict[str, dict[str, Any]] = {
    WHOLE: {},
    "regional": {},
    DYNAMIC: {"bf16": True, "gradient_accumulation_steps": 2},
    "regional, checkpointed": {"gradient_checkpointing": True},
}


def tasks(names: Optional[Sequence[str]], check: bool) -> Iterator[fresh.Task]:
    for name in names or NETS:
        for way in WAYS:
            yield {"model": name, "way": way}


# ------------------------------------------------------------ in a fresh process


class Trained:
    """A model trained for some steps, each within ``step``; of the last one ``saved``
    are the bytes that its forwards left alive, ``peak`` the most that was alive beyond
    what was there when it began, and ``gradients`` what the optimizer was given."""

    saved: int
    gradients: list[Optional[Tensor]]

    def __init__(
        self,
        task: fresh.Task,
        step: AbstractContextManager[Any] = nullcontext(),  # noqa: B008
    ) -> None:
        from accelerate.utils import compile_regions
        from transformers import TrainingArguments

        torch._dynamo.reset()
        torch.manual_seed(SEED)
        name, way = task["model"].removeprefix("hf-"), WAYS[task["way"]]
        # Of two micro-batches the second is half as large.
        samples = BATCH * 3 // 2 if "gradient_accumulation_steps" in way else BATCH
        model, batch = models.make(name, batch=samples, **SIZES[name])
        self.parameters = list(model.parameters())
        if task["way"] == WHOLE:
            model.compile(backend=OPERATORS)
        else:
            model = compile_regions(model, backend=OPERATORS)
        self.step, self.running = step, ExitStack()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                per_device_train_batch_size=BATCH,
                train_sampling_strategy="sequential",
                max_steps=STEPS,
                # All steps have the same weights.
                learning_rate=0.0,
                optim="sgd",
                max_grad_norm=0.0,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
                **way,
            )
            data = [{k: v[i] for k, v in batch.items()} for i in range(samples)]
            watched(self, model, arguments, data).train()
        self.peak = self.live.peak

    def same(self, other: Trained) -> bool:
        """Whether the gradients are the other's, bit for bit."""
        pairs = zip(self.gradients, other.gradients)
        return all(
            torch.equal(a, b) if a is not None and b is not None else a is b
            for a, b in pairs
        )

    def begin(self) -> None:
        gc.collect()
        torch.manual_seed(SEED)
        self.running.enter_context(self.step)
        self.live = self.running.enter_context(CountedStorages(self.parameters))


def watched(training: Trained, model: Any, arguments: Any, data: Any) -> Any:
    """The Trainer, which lets ``training`` see each step."""
    from transformers import Trainer, TrainerCallback

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            training.begin()

        def on_pre_optimizer_step(
            self, _: Any, state: Any, *__: Any, **___: Any
        ) -> None:
            if state.global_step == STEPS - 1:
                training.gradients = [p.grad for p in training.parameters]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            training.running.close()

    class Watched(Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            before = training.live.risen
            loss = super().compute_loss(*args, **kwargs)
            # Of the last micro-batch: graphs of any size are planned for its size.
            training.saved = training.live.risen - before
            return loss

    return Watched(model, arguments, train_dataset=data, callbacks=[Watch()])


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    with config.patch(enable_autograd_cache=False):
        fastest = Trained(task)
        with budgeted(0.0):
            least = Trained(task)
        with budgeted(BUDGET):
            some = Trained(task)
        if task["way"] == WHOLE:
            with budgeted(BUDGET, "peak"):
                low = Trained(task)
            allowed = overlay("saved_report").last_plan().peak.allowed
        else:
            budget = overlay("step_budget").StepBudget(share=BUDGET)
            low = Trained(task, budget)
            allowed = budget.plan.allowed
    room = fastest.saved - least.saved
    return {
        "saved": {
            "budget 1": fastest.saved,
            "allowed": least.saved + int(BUDGET * room),
            "measured": some.saved,
            "same gradients": some.same(fastest) and least.same(fastest),
        },
        "peak": {
            "budget 1": fastest.peak,
            "allowed": allowed,
            "measured": low.peak,
            "same gradients": low.same(fastest),
        },
    }


# ------------------------------------------------------------------- report


def fault(row: Row, target: str) -> str:
    """What is wrong with a cell, if anything."""
    if "error" in row:
        return str(row["error"])
    cell = row[target]
    if not cell["same gradients"]:
        return "other gradients"
    return "" if cell["measured"] <= SLACK[target] * cell["allowed"] else "over"


def judged(rows: Sequence[Row]) -> list[Mark]:
    wrong = [
        f"{row['model']}, {row['way']}, {target}: {fault(row, target)}"
        for row in rows
        for target in SLACK
        if fault(row, target)
    ]
    shown = "; ".join(wrong) or "none"
    return [Mark("cells with other gradients, or over", shown, "none", not wrong)]


def page(data: dict[str, Any]) -> str:
    def shown(row: Row) -> str:
        if "error" in row:
            return f"**{row['error']}**"
        shares = []
        for target in SLACK:
            share = f"{row[target]['measured'] / row[target]['allowed']:.3f}"
            wrong = fault(row, target)
            shares.append(f"**{share}, {wrong}**" if wrong else share)
        return " / ".join(shares)

    lines: dict[str, list[str]] = {}
    for row in data["measured"]:
        lines.setdefault(row["model"], [row["model"]]).append(shown(row))
    return (
        markdown(["model", *WAYS], [*lines.values()])
        + (
            "\nBytes measured / allowed, saved / peak, at budget "
            f"{BUDGET:g}. Gradients are those of budget 1 at the same seed, bit for bit, "
            "unless a cell says otherwise. "
        )
        + measured_on(data["environment"])
    )
