"""Hugging Face's Trainer with each block compiled separately, under a StepBudget.

scripts/run_patched.sh python examples/trainer.py
"""

import tempfile
from typing import Any

import torch
from torch._functorch.memory_planner import StepBudget
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class StepBudgetCallback(TrainerCallback):
    """Runs every step of a Trainer under a StepBudget; ready to be imported.

    A step is all micro-batches of one optimizer step. If it raises, the next one closes
    it, so train() can be called again.
    """

    def __init__(self, budget: StepBudget) -> None:
        self.budget = budget

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.budget.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.budget.__exit__(None, None, None)


def make_trainer(budget: StepBudget, folder: str) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=128,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager_decomp_partition")
    # Easy to learn: eight tokens, over and over.
    tokens = (torch.arange(64) + torch.randint(8, (16, 1))) % 8
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    data = [{"input_ids": each, "labels": each} for each in tokens]
    callbacks = [StepBudgetCallback(budget)]
    return Trainer(model, arguments, train_dataset=data, callbacks=callbacks)


def main() -> None:
    budget = StepBudget(share=0.2)
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(budget, folder).train()
    print(budget)


if __name__ == "__main__":
    main()
