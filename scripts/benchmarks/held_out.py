"""The held-out nets: kinds of models that nobody has planned, measured or tuned on.

What they say is worth something only as long as nobody has looked. They are classes of
libraries with random weights: few layers at the widths of a published model, in bfloat16,
and narrow ones for a CPU, in float32. One is replaced only if the untouched torch can
neither compile nor train it, whatever the set does on it.
"""

import functools
from collections.abc import Callable
from typing import Any, Optional

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
    name: str,
    kind: str,
    loss: Optional[Callable[..., Tensor]],
    batch: Any,
    dtype: torch.dtype = BF16,
    **sizes: Any,
) -> Net:
    """A model and its batch: by name, a shape or what makes it.

    The ``loss`` is found of both; None where the model returns it.
    """

    def build() -> Built:
        module = by_class(kind, **sizes)
        inputs = [
            torch.randn(each) if isinstance(each, tuple) else each()
            for each in batch.values()
        ]
        return LossOf(module, tuple(batch), loss), tuple(inputs)

    return Net(name, build, dtype, held_out=True)


def spelled(model: nn.Module, input_features: Tensor, letters: Tensor) -> Tensor:
    """Letters against those of each frame: aligning them is no graph."""
    logits = model(input_features).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), letters.flatten())


def detected(
    model: nn.Module, pixel_values: Tensor, classes: Tensor, boxes: Tensor
) -> Tensor:
    """Classes and boxes against those of each query: matching them is no graph."""
    found = model(pixel_values)
    loss = F.cross_entropy(found.logits.flatten(0, 1).float(), classes.flatten())
    return loss + F.l1_loss(found.pred_boxes, boxes)


def repeated(model: nn.Module, input_values: Tensor) -> Tensor:
    """Sounds against themselves, by way of codes, which pass no gradients on."""
    return F.mse_loss(model(input_values).audio_values, input_values)


# --------------------------------------------------------------------- nets


at_size = functools.partial(hugging_face, held_out=True)
small = functools.partial(at_size, dtype=torch.float32)
small_by_loss = functools.partial(by_loss, dtype=torch.float32)
NARROW = sized(128, 512, 2, 4)
FEW_WORDS = {**NARROW, "vocab_size": 1024}
# Without what leaves out layers, or time, at random: such a graph varies.
HEARD: dict[str, Any] = {"layerdrop": 0.0, "apply_spec_augment": False}
# Without copies of the queries, which are for matching.
SEARCH: dict[str, Any] = {
    "num_labels": 91,
    "group_detr": 1,
    "auxiliary_loss": False,
    "projector_scale_factors": [1.0],
}


def seen(width: int, layers: int, side: int) -> dict[str, Any]:
    """A backbone; its first layer looks at windows."""
    return {
        "model_type": "lw_detr_vit",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "image_size": side,
        "window_block_indices": [0],
        "out_indices": [layers],
    }


AT_SIZE = (
    # A large vocabulary, and few keys.
    at_size(
        "seed-oss",
        "SeedOssForCausalLM",
        1,
        2048,
        **sized(5120, 27648, 1, 80),
        vocab_size=155136,
        num_key_value_heads=8,
        head_dim=128,
    ),
    # The first layer has a plain MLP, the second one experts.
    at_size(
        "dots",
        "Dots1ForCausalLM",
        1,
        2048,
        **sized(4096, 10944, 2, 32),
        first_k_dense_replace=1,
        experts_implementation="grouped_mm",
        vocab_size=50304,
        num_key_value_heads=32,
        moe_intermediate_size=1408,
        n_routed_experts=32,
        num_experts_per_tok=6,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
    ),
    # Attention by contents and by positions, apart.
    at_size(
        "deberta",
        "DebertaV2ForMaskedLM",
        8,
        512,
        **sized(1024, 4096, 2, 16),
        vocab_size=128100,
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
    ),
    # One block, run four times.
    at_size("albert", "AlbertForMaskedLM", 16, 512, **sized(2048, 8192, 4, 16)),
    at_size(
        "m2m100",
        "M2M100ForConditionalGeneration",
        8,
        256,
        encoder_layers=1,
        decoder_layers=1,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    ),
    # Convolutions between attention and MLP: ten seconds each, by their spectra, and a
    # letter for each frame.
    by_loss(
        "w2v-bert",
        "Wav2Vec2BertForCTC",
        spelled,
        {"input_features": (16, 499, 160), "letters": numbers(32, 16, 499)},
        **sized(1024, 4096, 2, 16),
        **HEARD,
        vocab_size=32,
    ),
    # Convolutions of single channels, and BatchNorm; the schedule for a GPU has no
    # dropout in place.
    at_size(
        "mobilenet",
        "MobileNetV1ForImageClassification",
        64,
        classifier_dropout_prob=0.0,
    ),
    # Windows that grow.
    by_loss(
        "hiera",
        "HieraForImageClassification",
        None,
        {"pixel_values": (32, 3, 224, 224), "labels": numbers(100, 32)},
        num_labels=100,
        depths=[1, 1, 2, 1],
    ),
    # Linear attention, and convolutions within the MLP.
    by_loss(
        "sana",
        "SanaTransformer2DModel",
        denoised,
        {
            "hidden_states": (8, 32, 32, 32),
            "encoder_hidden_states": (8, 300, 2304),
            "timestep": numbers(1000, 8),
            "noise": (8, 32, 32, 32),
        },
        num_layers=2,
    ),
    # A state space beside attention.
    at_size(
        "falcon-h1",
        "FalconH1ForCausalLM",
        2,
        512,
        **sized(2048, 4096, 2, 8),
        vocab_size=65537,
        num_key_value_heads=2,
        mamba_d_ssm=3072,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=256,
        mamba_chunk_size=128,
    ),
    # Pictures and sentences, each pair by itself.
    by_loss(
        "siglip",
        "SiglipModel",
        contrasted,
        {"input_ids": numbers(1000, 32, 64), "pixel_values": (32, 3, 224, 224)},
        text_config={"num_hidden_layers": 2},
        vision_config={"num_hidden_layers": 2},
    ),
    # A class and a box for each of a hundred queries, which look at a few points.
    by_loss(
        "lw-detr",
        "LwDetrForObjectDetection",
        detected,
        {
            "pixel_values": (4, 3, 640, 640),
            "classes": numbers(91, 4, 100),
            "boxes": (4, 100, 4),
        },
        backbone_config=seen(384, 2, 640),
        **SEARCH,
        num_queries=100,
        decoder_layers=2,
    ),
)
# One or two layers and a large head, for what runs that in chunks.
HEADS = (
    # Its head has a layer of its own.
    at_size(
        *("xlm-roberta", "XLMRobertaForMaskedLM", 16, 512),
        **sized(1024, 4096, 2, 16),
        vocab_size=250002,
        max_position_embeddings=514,
    ),
    # Two stacks; what the head reads is scaled or not, as the configuration says.
    at_size(
        *("mt5", "MT5ForConditionalGeneration", 16, 512),
        d_model=1024,
        d_ff=2816,
        d_kv=64,
        num_heads=16,
        num_layers=1,
        decoder_start_token_id=0,
    ),
    # Attention and MLP side by side, and logits that are scaled.
    at_size(
        *("cohere2", "Cohere2ForCausalLM", 2, 4096),
        **sized(4096, 14336, 1, 32),
        num_key_value_heads=8,
    ),
)
# Such at sizes that a CPU can run, without dropout.
SMALL_HEADS = (
    small(
        *("xlm-roberta-words", "XLMRobertaForMaskedLM", 4, 128),
        **{**NARROW, "vocab_size": WORDS},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    small(
        *("mt5-words", "MT5ForConditionalGeneration", 4, 128),
        vocab_size=WORDS,
        d_model=128,
        d_ff=512,
        d_kv=32,
        num_heads=4,
        num_layers=1,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    small(
        *("cohere2-words", "Cohere2ForCausalLM", 4, 128),
        **{**NARROW, "vocab_size": WORDS},
        num_key_value_heads=2,
    ),
    # Its MLP squares, and its norm adds one to its weights.
    small(
        *("nemotron-words", "NemotronForCausalLM", 4, 128),
        **{**NARROW, "vocab_size": WORDS},
        num_key_value_heads=2,
    ),
)
SMALL = (
    small(
        "seed-oss-small",
        "SeedOssForCausalLM",
        4,
        128,
        **{**NARROW, "vocab_size": WORDS},
        num_key_value_heads=2,
        head_dim=32,
    ),
    small(
        "deberta-small",
        "DebertaV2ForMaskedLM",
        4,
        128,
        **FEW_WORDS,
        relative_attention=True,
        position_buckets=32,
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
    ),
    small(
        "albert-small",
        "AlbertForMaskedLM",
        8,
        128,
        **{**FEW_WORDS, "num_hidden_layers": 4},
        embedding_size=64,
    ),
    small(
        "m2m100-small",
        "M2M100ForConditionalGeneration",
        4,
        128,
        d_model=128,
        vocab_size=WORDS,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    ),
    small_by_loss(
        "w2v-bert-small",
        "Wav2Vec2BertForCTC",
        spelled,
        {"input_features": (4, 100, 160), "letters": numbers(32, 4, 100)},
        **NARROW,
        **HEARD,
        vocab_size=32,
    ),
    small(
        "mobilenet-small",
        "MobileNetV1ForImageClassification",
        8,
        image_size=64,
        depth_multiplier=0.5,
    ),
    small_by_loss(
        "hiera-small",
        "HieraForImageClassification",
        None,
        {"pixel_values": (4, 3, 64, 64), "labels": numbers(100, 4)},
        num_labels=100,
        image_size=[64, 64],
        embed_dim=32,
        depths=[1, 1, 1],
        num_heads=[1, 2, 4],
        num_query_pool=2,
    ),
    small(
        "falcon-h1-small",
        "FalconH1ForCausalLM",
        4,
        64,
        **FEW_WORDS,
        num_key_value_heads=2,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_chunk_size=32,
    ),
    small_by_loss(
        "lw-detr-small",
        "LwDetrForObjectDetection",
        detected,
        {
            "pixel_values": (1, 3, 128, 128),
            "classes": numbers(91, 1, 20),
            "boxes": (1, 20, 4),
        },
        backbone_config={**seen(128, 2, 128), "num_attention_heads": 4},
        **SEARCH,
        d_model=64,
        num_queries=20,
        decoder_layers=2,
        decoder_ffn_dim=128,
        decoder_self_attention_heads=4,
        decoder_cross_attention_heads=4,
    ),
    # An LSTM, which no graph holds, and codebooks.
    small_by_loss(
        "encodec-small",
        "EncodecModel",
        repeated,
        {"input_values": (8, 1, 3200)},
        num_filters=8,
        hidden_size=32,
        upsampling_ratios=[8, 5, 4],
        target_bandwidths=[6.0],
    ),
)
NETS: dict[str, Net] = {
    net.name: net for net in (*AT_SIZE, *HEADS, *SMALL_HEADS, *SMALL)
}
