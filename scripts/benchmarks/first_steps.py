"""The first three steps of a net under a StepBudget, at its lowest peak."""

from dataclasses import replace
from typing import Any

import torch

from benchmarks import nets
from benchmarks.architectures import ClassicShape
from benchmarks.pages import Row
from benchmarks.tracing import cpu_attention_counted
from benchmarks.watched import trained
from benchmarks.ways import compiled, OPERATORS, Training


SHAPE = ClassicShape(width=128, mlp=512, layers=4, tokens=128, batch=4)


def of_layers(count: int) -> nets.Net:
    return nets.language(f"{count} layers", replace(SHAPE, layers=count))


def adapted(count: int) -> nets.Net:
    sizes = nets.sized(128, 512, count, 4)
    return nets.hugging_face(
        *(f"LoRA, {count} layers", "LlamaForCausalLM", 4, 128),
        dtype=torch.float32,
        adapted=nets.with_lora,
        vocab_size=512,
        **sizes,
    )


def beside_decoder() -> nets.Net:
    kind, sizes = "T5ForConditionalGeneration", {**nets.T5, "vocab_size": 512}
    return nets.in_float("encoder, decoder", kind, 4, 128, **sizes)


# Each with its micro-batches.
PROGRAMS: dict[str, tuple[nets.Net, int]] = {
    **{f"{count} layers": (of_layers(count), 1) for count in (4, 24)},
    "LoRA, 12 layers": (adapted(12), 1),
    "encoder, decoder": (beside_decoder(), 1),
    "4 micro-batches": (of_layers(8), 4),
}
STEPS = (*((name, "blocks") for name in PROGRAMS), ("4 layers", "one function"))


def measured(program: str, way: str) -> Row:
    net, batches = PROGRAMS[program]
    with cpu_attention_counted():
        ways: Any = {} if way == "one function" else {way: compiled(OPERATORS)}
        training = Training(net, **ways)

        def step() -> None:
            for _ in range(batches):
                training.loss().backward()

        if way == "one function":
            step = compiled(OPERATORS)(step)
        return trained(step, training, share=0.0, count=3)
