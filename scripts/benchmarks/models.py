"""Models of the Hugging Face libraries, from configurations: random weights, no download.

`MODELS` has each under its name, in train mode with its own dropout, with a batch. They
have few layers, most of them at the widths of a published model, for fake tensors; a
maker takes other sizes by the names of the model's configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.nets import BF16, Inputs, LossOf, Net


LAYERS = 4
Made = tuple[nn.Module, dict[str, Any]]


def tokens(vocabulary: int, batch: int, length: int, **more: Tensor) -> dict[str, Any]:
    ids = torch.randint(vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids.clone(), **more}


def llama(batch: int = 2, length: int = 1024, **sizes: int) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    published = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    }
    config = LlamaConfig(**{**published, **sizes}, use_cache=False)
    return LlamaForCausalLM(config), tokens(config.vocab_size, batch, length)


def lora(**sizes: int) -> Made:
    from peft import get_peft_model, LoraConfig

    model, inputs = llama(**sizes)
    kinds = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=16, lora_dropout=0.05, target_modules=kinds)
    return get_peft_model(model, config), inputs


def gpt2(batch: int = 4, length: int = 512, **sizes: int) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**{"n_layer": LAYERS, **sizes}, use_cache=False)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # Or it warns, which no graph may contain.
    return model, tokens(config.vocab_size, batch, length)


def bert(batch: int = 8, length: int = 256, **sizes: int) -> Made:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**{"num_hidden_layers": LAYERS, **sizes})
    return BertForMaskedLM(config), tokens(config.vocab_size, batch, length)


def t5(batch: int = 4, length: int = 256, **sizes: int) -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    published = {"num_layers": LAYERS // 2, "decoder_start_token_id": 0}
    config = T5Config(**{**published, **sizes}, use_cache=False)
    return T5ForConditionalGeneration(config), tokens(config.vocab_size, batch, length)


def whisper(batch: int = 2, length: int = 128, **sizes: int) -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    published = {"encoder_layers": LAYERS // 2, "decoder_layers": LAYERS // 2}
    config = WhisperConfig(**{**published, **sizes}, use_cache=False)
    labels = torch.randint(config.vocab_size, (batch, length))
    features = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    return WhisperForConditionalGeneration(config), {
        "input_features": features,
        "labels": labels,
    }


def mixtral(batch: int = 2, length: int = 512, **sizes: int) -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    published = {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": LAYERS // 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    config = MixtralConfig(
        **{**published, **sizes}, use_cache=False, experts_implementation="grouped_mm"
    )
    return MixtralForCausalLM(config), tokens(config.vocab_size, batch, length)


def mamba(batch: int = 2, length: int = 16, **sizes: int) -> Made:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(**{"num_hidden_layers": 2, **sizes}, use_cache=False)
    return MambaForCausalLM(config), tokens(config.vocab_size, batch, length)


def convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(num_labels=100)
    pixels, labels = torch.randn(8, 3, 224, 224), torch.randint(100, (8,))
    return ConvNextForImageClassification(config), {
        "pixel_values": pixels,
        "labels": labels,
    }


def swin() -> Made:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(num_labels=100, depths=[2, 2, 2, 2])
    pixels, labels = torch.randn(8, 3, 224, 224), torch.randint(100, (8,))
    return SwinForImageClassification(config), {
        "pixel_values": pixels,
        "labels": labels,
    }


class Model(Net):
    """A model of these libraries; only a compiler traces what it does to fake tensors."""

    def fake(self) -> tuple[FakeTensorMode, nn.Module, Inputs]:
        # Some build themselves from the values of tensors, which fake ones do not have.
        module, inputs = self.make("meta")
        with FakeTensorMode() as mode:
            fakes: dict[Tensor, Tensor] = {}
            for owner in module.modules():
                for held in (owner._parameters, owner._buffers):
                    for name, old in held.items():
                        if old is not None and old not in fakes:
                            new = torch.empty(old.shape, dtype=old.dtype)
                            if isinstance(old, nn.Parameter):
                                new = nn.Parameter(new, old.requires_grad)
                            fakes[old] = new
                        if old is not None:
                            held[name] = fakes[old]  # type: ignore[assignment]
            return (
                mode,
                module,
                tuple(torch.empty(x.shape, dtype=x.dtype) for x in inputs),
            )


def hugging_face(make: Callable[[], Any], dtype: torch.dtype) -> Model:
    def build() -> tuple[nn.Module, Inputs]:
        module, inputs = make()
        return LossOf(module.train(), tuple(inputs)), tuple(inputs.values())

    return Model(f"hf-{make.__name__}", build, dtype)


MODELS = {
    model.name: model
    for model in (
        hugging_face(llama, BF16),
        hugging_face(lora, BF16),
        hugging_face(gpt2, torch.float32),
        hugging_face(bert, torch.float32),
        hugging_face(t5, torch.float32),
        hugging_face(whisper, torch.float32),
        hugging_face(mixtral, BF16),
        hugging_face(mamba, torch.float32),
        hugging_face(convnext, torch.float32),
        hugging_face(swin, torch.float32),
    )
}
