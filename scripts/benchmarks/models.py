"""Models of the Hugging Face libraries, from configurations: random weights, no download.

They are in train mode with their own dropout.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn, Tensor


def make(kind: str, **sizes: Any) -> nn.Module:
    """A model of transformers, or one of diffusers, by the name of its class."""
    is_diffusers = "2D" in kind or "3D" in kind
    library = importlib.import_module("diffusers" if is_diffusers else "transformers")
    found = getattr(library, kind)
    model: Any = found(**sizes) if is_diffusers else found(found.config_class(**sizes))
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # Or it warns, which no graph may contain.
    trained: nn.Module = model.train()
    return trained


def with_inputs(
    kind: str, batch: int = 1, length: int = 1024, **sizes: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model by the defaults of its configuration, which ``sizes`` override."""
    defaults = getattr(importlib.import_module("transformers"), kind).config_class()
    cached = {"use_cache": False} if hasattr(defaults, "use_cache") else {}
    model: Any = make(kind, **{**cached, **sizes})
    config, takes = model.config, model.main_input_name
    if takes == "pixel_values":
        side = getattr(config, "image_size", 224)
        pixels = torch.randn(batch, config.num_channels, side, side)
        labels = torch.randint(config.num_labels, (batch,))
        return model, {"pixel_values": pixels, "labels": labels}
    ids = torch.randint(config.get_text_config().vocab_size, (batch, length))
    if takes == "input_ids":
        return model, {"input_ids": ids, "labels": ids.clone()}
    if not hasattr(config, "num_mel_bins") or not hasattr(model, "proj_out"):
        raise ValueError(
            f"{kind} takes {takes}; write a function that returns it with its inputs"
        )
    shape = batch, config.num_mel_bins, 2 * config.max_source_positions
    return model, {"input_features": torch.randn(shape), "labels": ids}


def with_lora(model: nn.Module) -> nn.Module:
    library = importlib.import_module("peft")
    kinds = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = library.LoraConfig(r=16, lora_dropout=0.05, target_modules=kinds)
    adapted: nn.Module = library.get_peft_model(model, config)
    return adapted
