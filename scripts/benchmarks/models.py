"""Models of the Hugging Face libraries, from configurations: random weights, no download.

They are in train mode with their own dropout, and have few layers, most of them at the
widths of a published model.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import nn, Tensor


class Spec(NamedTuple):
    """The names of its classes, its usual batch and what its configuration says."""

    kind: str
    head: str
    batch: int
    length: int = 0
    sizes: dict[str, Any] = {}  # noqa: RUF012


LAYERS = 4
LLAMA = Spec(
    *("Llama", "ForCausalLM", 2, 1024),
    {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
)
SPECS = {
    "llama": LLAMA,
    "lora": LLAMA,
    "gpt2": Spec("GPT2", "LMHeadModel", 4, 512, {"n_layer": LAYERS}),
    "bert": Spec("Bert", "ForMaskedLM", 8, 256, {"num_hidden_layers": LAYERS}),
    "t5": Spec(
        *("T5", "ForConditionalGeneration", 4, 256),
        {"num_layers": LAYERS // 2, "decoder_start_token_id": 0},
    ),
    "whisper": Spec(
        *("Whisper", "ForConditionalGeneration", 2, 128),
        {"encoder_layers": LAYERS // 2, "decoder_layers": LAYERS // 2},
    ),
    "mixtral": Spec(
        *("Mixtral", "ForCausalLM", 2, 512),
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": LAYERS // 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "experts_implementation": "grouped_mm",
        },
    ),
    "mamba": Spec("Mamba", "ForCausalLM", 2, 16, {"num_hidden_layers": 2}),
    "convnext": Spec("ConvNext", "ForImageClassification", 8),
    "swin": Spec("Swin", "ForImageClassification", 8, sizes={"depths": [2, 2, 2, 2]}),
}


def make(
    name: str, batch: int = 0, length: int = 0, **sizes: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """One of `SPECS`, in other ``sizes`` where they are given, and its inputs."""
    library = importlib.import_module("transformers")
    spec = SPECS[name]
    batch, length = batch or spec.batch, length or spec.length
    wanted = {**spec.sizes, **sizes}
    if length:
        # BERT would warn of what it does not know.
        wanted.update({} if name == "bert" else {"use_cache": False})
    else:
        wanted["num_labels"] = 100
    config = getattr(library, f"{spec.kind}Config")(**wanted)
    model = getattr(library, spec.kind + spec.head)(config)
    if name == "gpt2":
        model.loss_type = "ForCausalLM"  # Or it warns, which no graph may contain.
    if name == "lora":
        model = with_lora(model)
    if not length:
        pixels, labels = torch.randn(batch, 3, 224, 224), torch.randint(100, (batch,))
        return model, {"pixel_values": pixels, "labels": labels}
    ids = torch.randint(config.vocab_size, (batch, length))
    if name != "whisper":
        return model, {"input_ids": ids, "labels": ids.clone()}
    shape = batch, config.num_mel_bins, 2 * config.max_source_positions
    return model, {"input_features": torch.randn(shape), "labels": ids}


def by_class(
    kind: Any, batch: int = 1, length: int = 1024, **sizes: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model by the defaults of its configuration, which ``sizes`` override."""
    config = kind.config_class(**{"use_cache": False, **sizes})
    model: Any = kind(config)
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # Or it warns, which no graph may contain.
    if kind.main_input_name == "input_ids":
        ids = torch.randint(config.get_text_config().vocab_size, (batch, length))
        return model, {"input_ids": ids, "labels": ids.clone()}
    if kind.main_input_name == "pixel_values":
        side = getattr(config, "image_size", 224)
        pixels = torch.randn(batch, config.num_channels, side, side)
        labels = torch.randint(config.num_labels, (batch,))
        return model, {"pixel_values": pixels, "labels": labels}
    raise ValueError(
        f"{kind.__name__} takes {kind.main_input_name}; write a function that returns it "
        "with its inputs"
    )


def with_lora(model: nn.Module) -> nn.Module:
    library = importlib.import_module("peft")
    kinds = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = library.LoraConfig(r=16, lora_dropout=0.05, target_modules=kinds)
    adapted: nn.Module = library.get_peft_model(model, config)
    return adapted
