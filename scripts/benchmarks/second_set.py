"""The second set: nets that the planner was not developed with, nor tuned on.

What these say is worth something only as long as nobody has looked. They are libraries'
own classes with random weights, from configurations: a few layers at the widths of a
published model, batches of a usual size, in bfloat16. None has a data-dependent shape,
and none wants kernels that have to be built.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, Tensor

from benchmarks.libraries import by_class, contrasted, denoised
from benchmarks.nets import (
    BF16,
    Built,
    hugging_face,
    LossOf,
    Net,
    sized,
    WORDS,
)


# -------------------------------------------------------- batches and losses


def numbers(most: int, *shape: int) -> Callable[[], Tensor]:
    return functools.partial(torch.randint, most, shape)


def by_loss(
    name: str, kind: str, loss: Callable[..., Tensor], batch: Any, **sizes: Any
) -> Net:
    """A model whose loss is found of its batch: by name, a shape or what makes it."""

    def build() -> Built:
        module = by_class(kind, **sizes)
        inputs = [
            torch.randn(each) if isinstance(each, tuple) else each()
            for each in batch.values()
        ]
        return LossOf(module, tuple(batch), loss), tuple(inputs)

    return Net(name, build, BF16, held_out=True)


def spelled(model: nn.Module, input_features: Tensor, syllables: Tensor) -> Tensor:
    """Syllables against those of each frame: aligning them is no graph."""
    logits = model(input_features).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), syllables.flatten())


def detected(
    model: nn.Module, pixel_values: Tensor, classes: Tensor, boxes: Tensor
) -> Tensor:
    """Classes and boxes against those of each query: matching them is no graph."""
    found = model(pixel_values)
    loss = F.cross_entropy(found.logits.flatten(0, 1).float(), classes.flatten())
    return loss + F.l1_loss(found.pred_boxes, boxes)


# --------------------------------------------------------------------- nets


held_out = functools.partial(hugging_face, held_out=True)
NETS = (
    # Norms on queries and keys.
    held_out(
        *("qwen3", "Qwen3ForCausalLM", 2, 1024),
        **sized(2048, 6144, 4, 16),
        vocab_size=151936,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    # Norms after the branches.
    held_out(
        *("olmo2", "Olmo2ForCausalLM", 2, 2048),
        **sized(2048, 8192, 4, 16),
        vocab_size=100352,
    ),
    # A large vocabulary, tied; a window in one of two layers.
    held_out(
        *("gemma3", "Gemma3ForCausalLM", 1, 1024),
        **sized(1152, 6912, 2, 4),
        vocab_size=262144,
        num_key_value_heads=1,
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention"],
    ),
    # Attention and MLP side by side.
    held_out(
        *("gpt-neox", "GPTNeoXForCausalLM", 4, 1024),
        **sized(2048, 8192, 4, 16),
        vocab_size=50304,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    ),
    # 64 experts, 8 for each token.
    held_out(
        *("olmoe", "OlmoeForCausalLM", 2, 1024),
        **sized(2048, 1024, 2, 16),
        vocab_size=50304,
        experts_implementation="grouped_mm",
    ),
    # State spaces, without kernels of their own.
    held_out(
        *("mamba2", "Mamba2ForCausalLM", 1, 512),
        vocab_size=50288,
        hidden_size=768,
        num_hidden_layers=2,
        num_heads=24,
        n_groups=1,
        chunk_size=64,
    ),
    held_out(
        *("bart", "BartForConditionalGeneration", 8, 512),
        encoder_layers=2,
        decoder_layers=2,
    ),
    # One bias by distance, learned, for all layers.
    held_out("mpnet", "MPNetForMaskedLM", 16, 256, num_hidden_layers=4),
    # Windows in three of four layers, gated MLPs.
    held_out(
        *("modernbert", "ModernBertForMaskedLM", 8, 512),
        num_hidden_layers=4,
        mlp_dropout=0.1,
        embedding_dropout=0.1,
    ),
    held_out(
        *("convnextv2", "ConvNextV2ForImageClassification", 32),
        hidden_sizes=[128, 256, 512, 1024],
        depths=[1, 1, 2, 1],
        drop_path_rate=0.1,
    ),
    # LayerScale.
    held_out(
        *("dinov2", "Dinov2ForImageClassification", 32),
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=16,
        drop_path_rate=0.1,
    ),
    # A class and a box for each of a hundred queries.
    by_loss(
        *("yolos", "YolosForObjectDetection", detected),
        {
            "pixel_values": (4, 3, 640, 640),
            "classes": numbers(91, 4, 100),
            "boxes": (4, 100, 4),
        },
        num_labels=91,
        num_hidden_layers=4,
        image_size=[640, 640],
    ),
    # Pictures and sentences, each with an encoder.
    by_loss(
        *("clip", "CLIPModel", contrasted),
        {"input_ids": numbers(1000, 64, 77), "pixel_values": (64, 3, 224, 224)},
        text_config={"num_hidden_layers": 2},
        vision_config={"num_hidden_layers": 2, "patch_size": 16},
    ),
    # Convolutions between attention and MLP. Sixteen seconds each, by their spectra, and
    # a syllable for each eight of these.
    by_loss(
        *("conformer", "ParakeetForCTC", spelled),
        {
            "input_features": (16, 1600, 80),
            "syllables": numbers(1024, 16, 200),
        },
        encoder_config={"num_hidden_layers": 4, "layerdrop": 0.0},
    ),
    # Norms whose scales and shifts are computed.
    by_loss(
        *("dit", "DiTTransformer2DModel", denoised),
        {
            "hidden_states": (32, 4, 32, 32),
            "timestep": numbers(1000, 32),
            "class_labels": numbers(1000, 32),
            "noise": (32, 4, 32, 32),
        },
        num_layers=4,
    ),
    # Text and image in one attention, with weights of their own.
    by_loss(
        *("sd3", "SD3Transformer2DModel", denoised),
        {
            "hidden_states": (4, 16, 64, 64),
            "encoder_hidden_states": (4, 154, 4096),
            "pooled_projections": (4, 2048),
            "timestep": numbers(1000, 4),
            "noise": (4, 16, 64, 64),
        },
        num_layers=3,
        num_attention_heads=24,
        caption_projection_dim=1536,
        pos_embed_max_size=192,
    ),
    # The same, and after that both branches of a block side by side.
    by_loss(
        *("flux", "FluxTransformer2DModel", denoised),
        {
            "hidden_states": (2, 1024, 64),
            "encoder_hidden_states": (2, 512, 4096),
            "pooled_projections": (2, 768),
            "timestep": (2,),
            "img_ids": (1024, 3),
            "txt_ids": (512, 3),
            "noise": (2, 1024, 64),
        },
        num_layers=1,
        num_single_layers=2,
    ),
    # The upper two of three levels.
    by_loss(
        *("unet2d", "UNet2DConditionModel", denoised),
        {
            "sample": (4, 4, 64, 64),
            "timestep": numbers(1000, 4),
            "encoder_hidden_states": (4, 77, 2048),
            "noise": (4, 4, 64, 64),
        },
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"],
        block_out_channels=[320, 640],
        layers_per_block=1,
        attention_head_dim=[5, 10],
        use_linear_projection=True,
        cross_attention_dim=2048,
    ),
    # Declared when the planner was as it is.
    # Norms before and after the branches, a large vocabulary.
    held_out(
        *("glm4", "Glm4ForCausalLM", 1, 1024),
        **sized(2048, 6144, 4, 16),
        num_key_value_heads=4,
    ),
    # Squared activations without a gate.
    held_out(
        *("nemotron", "NemotronForCausalLM", 2, 1024),
        **sized(2048, 8192, 4, 16),
        num_key_value_heads=16,
        vocab_size=50304,
    ),
    # A bias by distance for each head.
    held_out(
        *("bloom", "BloomForCausalLM", 2, 1024),
        hidden_size=2048,
        n_layer=4,
        n_head=16,
        vocab_size=50304,
    ),
    # Keys of fewer pixels, and convolutions within the MLP.
    held_out("segformer", "SegformerForImageClassification", 32),
    held_out(
        *("pegasus", "PegasusForConditionalGeneration", 8, 256),
        encoder_layers=2,
        decoder_layers=2,
    ),
)

# Declared for `harm`, when what it had found was mended.
LATER = (
    held_out(
        *("roberta", "RobertaForMaskedLM", 16, 256),
        **sized(1024, 4096, 2, 16),
        vocab_size=50265,
    ),
    held_out(
        *("opt", "OPTForCausalLM", 4, 512),
        **sized(2048, 8192, 2, 32),
        ffn_dim=8192,
        word_embed_proj_dim=2048,
    ),
    held_out(
        *("mbart", "MBartForConditionalGeneration", 4, 256),
        encoder_layers=1,
        decoder_layers=1,
        vocab_size=50265,
    ),
    held_out(
        *("cohere", "CohereForCausalLM", 1, 1024),
        **sized(4096, 11008, 1, 32),
        num_key_value_heads=8,
        vocab_size=64000,
    ),
)

# Declared when heads could run in chunks, and nobody had looked at what that does to
# these: large vocabularies, of one or two layers.
LARGE_HEADS = (
    held_out(
        *("qwen2", "Qwen2ForCausalLM", 2, 4096),
        **sized(1536, 8960, 2, 12),
        vocab_size=151936,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    # Logits are capped.
    held_out(
        *("gemma2", "Gemma2ForCausalLM", 2, 4096),
        **sized(2304, 9216, 2, 8),
        vocab_size=256000,
        num_key_value_heads=4,
        head_dim=256,
    ),
    held_out(
        *("phi3", "Phi3ForCausalLM", 2, 4096),
        **sized(3072, 8192, 1, 24),
        vocab_size=200064,
        num_key_value_heads=8,
        pad_token_id=0,
    ),
    held_out(
        *("smollm3", "SmolLM3ForCausalLM", 2, 4096),
        **sized(2048, 11008, 2, 16),
        vocab_size=128256,
        num_key_value_heads=4,
        pad_token_id=0,
        tie_word_embeddings=True,
    ),
    held_out(
        *("ernie", "Ernie4_5ForCausalLM", 2, 4096),
        **sized(1024, 3072, 2, 16),
        vocab_size=103424,
        num_key_value_heads=2,
    ),
    held_out(
        *("mistral", "MistralForCausalLM", 2, 4096),
        **sized(5120, 14336, 1, 32),
        vocab_size=131072,
        num_key_value_heads=8,
        head_dim=128,
    ),
)

# Small ones, for loops on a CPU.
NARROW = {**sized(128, 512, 4, 4), "vocab_size": 1024}
WORDY = {**sized(128, 512, 2, 4), "vocab_size": WORDS}
SMALL_HEADS = (
    held_out(
        *("opt-words", "OPTForCausalLM", 4, 128),
        **WORDY,
        word_embed_proj_dim=128,
        ffn_dim=512,
    ),
    # In place of Phi, which the untouched wheel cannot compile in bfloat16 for a CPU.
    held_out(
        *("bloom-words", "BloomForCausalLM", 4, 128),
        hidden_size=128,
        n_layer=2,
        n_head=4,
        vocab_size=WORDS,
    ),
    held_out("electra-words", "ElectraForMaskedLM", 4, 128, **WORDY),
)
SMALL = (
    held_out(
        *("opt-small", "OPTForCausalLM", 8, 128),
        **NARROW,
        word_embed_proj_dim=128,
        ffn_dim=512,
    ),
    # Attention and MLP side by side, rotated in part.
    held_out("phi-small", "PhiForCausalLM", 8, 128, **NARROW),
    held_out("electra-small", "ElectraForMaskedLM", 8, 128, **NARROW),
    # A bias by distance in each layer, and what it adds scaled.
    held_out(
        *("beit-small", "BeitForImageClassification", 8),
        **sized(128, 512, 4, 4),
        image_size=96,
        use_relative_position_bias=True,
        drop_path_rate=0.0,
    ),
    # Films, with text in each block.
    by_loss(
        *("wan-small", "WanTransformer3DModel", denoised),
        {
            "hidden_states": (8, 4, 4, 8, 8),
            "timestep": numbers(1000, 8),
            "encoder_hidden_states": (8, 20, 64),
            "noise": (8, 4, 4, 8, 8),
        },
        num_layers=3,
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=64,
        freq_dim=64,
        ffn_dim=512,
        rope_max_seq_len=32,
    ),
)
