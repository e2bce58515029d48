"""The second set: nets that the planner was not developed with, nor tuned on.

    PYTHONPATH=scripts scripts/run_patched.sh python -m benchmarks.second_set [NAMES]

prints whether each can be traced as one graph and trained, and nothing of plans: what
these say is worth something only as long as nobody has looked.

They are libraries' own classes with random weights, from configurations: a few layers at
the widths of a published model, batches of a usual size, in bfloat16. None has a
data-dependent shape, and none wants kernels that have to be built.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import fx, Tensor
from torch._dynamo.backends import debugging
from torch._functorch import partitioners

from benchmarks.nets import BF16, Built, LossOf, Net
from benchmarks.ways import OPERATORS


Batch = dict[str, Tensor]


# ------------------------------------------------------------------- losses


class Denoised(LossOf):
    """The mean square of what a model returns beyond its last input, the noise."""

    def forward(self, *inputs: Tensor) -> Tensor:
        *given, noise = inputs
        found = self.module(**dict(zip(self.names, given)), return_dict=False)[0]
        return F.mse_loss(found.float(), noise.float())


class Spelled(LossOf):
    """Syllables against those of each frame: aligning them is no graph."""

    def forward(self, *inputs: Tensor) -> Tensor:
        sounds, syllables = inputs
        logits = self.module(sounds).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), syllables.flatten())


class Contrasted(LossOf):
    """Whether a model finds the text of each image, and its image of each text."""

    def forward(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.names, inputs))
        loss: Tensor = self.module(**given, return_loss=True).loss
        return loss


class Detected(LossOf):
    """Classes and boxes against those of each query: matching them is no graph."""

    def forward(self, *inputs: Tensor) -> Tensor:
        pixels, classes, boxes = inputs
        found = self.module(pixels)
        loss = F.cross_entropy(found.logits.flatten(0, 1).float(), classes.flatten())
        return loss + F.l1_loss(found.pred_boxes, boxes)


# ------------------------------------------------------------------ batches


def text(batch: int, length: int, vocabulary: int = 1000) -> Callable[[], Batch]:
    """Tokens, and one to find for each of them."""

    def make() -> Batch:
        ids = torch.randint(vocabulary, (batch, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def pictures(batch: int, side: int) -> Callable[[], Batch]:
    def make() -> Batch:
        pixels = torch.randn(batch, 3, side, side)
        return {"pixel_values": pixels, "labels": torch.randint(2, (batch,))}

    return make


def pairs() -> Batch:
    return {
        "input_ids": torch.randint(1000, (64, 77)),
        "pixel_values": torch.randn(64, 3, 224, 224),
    }


def scenes() -> Batch:
    """Pictures with a class and a box for each of a hundred queries."""
    return {
        "pixel_values": torch.randn(4, 3, 640, 640),
        "classes": torch.randint(91, (4, 100)),
        "boxes": torch.rand(4, 100, 4),
    }


def sounds() -> Batch:
    """Sixteen seconds each, by their spectra, and a syllable for each eight of these."""
    return {
        "input_features": torch.randn(16, 1600, 80),
        "syllables": torch.randint(1024, (16, 200)),
    }


def latents_of_classes() -> Batch:
    return {
        "hidden_states": torch.randn(32, 4, 32, 32),
        "timestep": torch.randint(1000, (32,)),
        "class_labels": torch.randint(1000, (32,)),
    }


def latents_and_text() -> Batch:
    return {
        "hidden_states": torch.randn(4, 16, 64, 64),
        "encoder_hidden_states": torch.randn(4, 154, 4096),
        "pooled_projections": torch.randn(4, 2048),
        "timestep": torch.randint(1000, (4,)),
    }


def patches_and_text() -> Batch:
    return {
        "hidden_states": torch.randn(2, 1024, 64),
        "encoder_hidden_states": torch.randn(2, 512, 4096),
        "pooled_projections": torch.randn(2, 768),
        "timestep": torch.rand(2),
        "img_ids": torch.rand(1024, 3),
        "txt_ids": torch.rand(512, 3),
    }


def images_and_text() -> Batch:
    return {
        "sample": torch.randn(4, 4, 64, 64),
        "timestep": torch.randint(1000, (4,)),
        "encoder_hidden_states": torch.randn(4, 77, 2048),
    }


def film_and_text() -> Batch:
    return {
        "hidden_states": torch.randn(8, 4, 4, 8, 8),
        "timestep": torch.randint(1000, (8,)),
        "encoder_hidden_states": torch.randn(8, 20, 64),
    }


# --------------------------------------------------------------------- nets


def transformers(
    name: str,
    kind: str,
    batch: Callable[[], Batch],
    loss: type[LossOf] = LossOf,
    **sizes: Any,
) -> Net:
    """One of that library's."""

    def build() -> Built:
        model = getattr(importlib.import_module("transformers"), kind)
        module = model(model.config_class(**sizes)).train()
        inputs = batch()
        return loss(module, tuple(inputs)), tuple(inputs.values())

    return Net(name, build, BF16, held_out=True)


def diffusers(name: str, kind: str, batch: Callable[[], Batch], **sizes: Any) -> Net:
    """One of that library's, which is to return noise in the shape of its first input."""

    def build() -> Built:
        module = getattr(importlib.import_module("diffusers"), kind)(**sizes).train()
        inputs = batch()
        values = *inputs.values(), torch.randn_like(next(iter(inputs.values())))
        return Denoised(module, tuple(inputs)), values

    return Net(name, build, BF16, held_out=True)


TEXT: dict[str, Any] = {"use_cache": False, "vocab_size": 50304}
LANGUAGE = (
    # Norms on queries and keys.
    transformers(
        *("qwen3", "Qwen3ForCausalLM", text(2, 1024)),
        **(TEXT | {"vocab_size": 151936}),
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    # Norms after the branches.
    transformers(
        *("olmo2", "Olmo2ForCausalLM", text(2, 2048)),
        **(TEXT | {"vocab_size": 100352}),
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=16,
    ),
    # A large vocabulary, tied; a window in one of two layers.
    transformers(
        *("gemma3", "Gemma3ForCausalLM", text(1, 1024)),
        **(TEXT | {"vocab_size": 262144}),
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention"],
    ),
    # Attention and MLP side by side.
    transformers(
        *("gpt-neox", "GPTNeoXForCausalLM", text(4, 1024)),
        **TEXT,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=16,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    ),
    # 64 experts, 8 for each token.
    transformers(
        *("olmoe", "OlmoeForCausalLM", text(2, 1024)),
        **TEXT,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=16,
        experts_implementation="grouped_mm",
    ),
    # State spaces, without kernels of their own.
    transformers(
        *("mamba2", "Mamba2ForCausalLM", text(1, 512)),
        **(TEXT | {"vocab_size": 50288}),
        hidden_size=768,
        num_hidden_layers=2,
        num_heads=24,
        n_groups=1,
        chunk_size=64,
    ),
    transformers(
        *("bart", "BartForConditionalGeneration", text(8, 512)),
        use_cache=False,
        encoder_layers=2,
        decoder_layers=2,
    ),
    # One bias by distance, learned, for all layers.
    transformers(
        *("mpnet", "MPNetForMaskedLM", text(16, 256)),
        num_hidden_layers=4,
    ),
    # Windows in three of four layers, gated MLPs.
    transformers(
        *("modernbert", "ModernBertForMaskedLM", text(8, 512)),
        num_hidden_layers=4,
        mlp_dropout=0.1,
        embedding_dropout=0.1,
    ),
)
VISION = (
    transformers(
        *("convnextv2", "ConvNextV2ForImageClassification", pictures(32, 224)),
        hidden_sizes=[128, 256, 512, 1024],
        depths=[1, 1, 2, 1],
        drop_path_rate=0.1,
    ),
    # LayerScale.
    transformers(
        *("dinov2", "Dinov2ForImageClassification", pictures(32, 224)),
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=16,
        drop_path_rate=0.1,
    ),
    transformers(
        *("yolos", "YolosForObjectDetection", scenes),
        loss=Detected,
        num_labels=91,
        num_hidden_layers=4,
        image_size=[640, 640],
    ),
    # Pictures and sentences, each with an encoder.
    transformers(
        *("clip", "CLIPModel", pairs),
        loss=Contrasted,
        text_config={"num_hidden_layers": 2},
        vision_config={"num_hidden_layers": 2, "patch_size": 16},
    ),
)
SOUND = (
    # Convolutions between attention and MLP.
    transformers(
        *("conformer", "ParakeetForCTC", sounds),
        loss=Spelled,
        encoder_config={"num_hidden_layers": 4, "layerdrop": 0.0},
    ),
)
DIFFUSION = (
    # Norms whose scales and shifts are computed.
    diffusers("dit", "DiTTransformer2DModel", latents_of_classes, num_layers=4),
    # Text and image in one attention, with weights of their own.
    diffusers(
        *("sd3", "SD3Transformer2DModel", latents_and_text),
        num_layers=3,
        num_attention_heads=24,
        caption_projection_dim=1536,
        pos_embed_max_size=192,
    ),
    # The same, and after that both branches of a block side by side.
    diffusers(
        *("flux", "FluxTransformer2DModel", patches_and_text),
        num_layers=1,
        num_single_layers=2,
    ),
    # The upper two of three levels.
    diffusers(
        *("unet2d", "UNet2DConditionModel", images_and_text),
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"],
        block_out_channels=[320, 640],
        layers_per_block=1,
        attention_head_dim=[5, 10],
        use_linear_projection=True,
        cross_attention_dim=2048,
    ),
)
NETS = (*LANGUAGE, *VISION, *SOUND, *DIFFUSION)
# Of a size that runs on a CPU, for training loops.
NARROW: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 4}
SMALL = (
    transformers(
        *("opt-small", "OPTForCausalLM", text(8, 128)),
        **NARROW,
        use_cache=False,
        vocab_size=1024,
        word_embed_proj_dim=128,
        ffn_dim=512,
        num_attention_heads=4,
    ),
    # Attention and MLP side by side, rotated in part.
    transformers(
        *("phi-small", "PhiForCausalLM", text(8, 128)),
        **NARROW,
        use_cache=False,
        vocab_size=1024,
        intermediate_size=512,
        num_attention_heads=4,
    ),
    transformers(
        *("electra-small", "ElectraForMaskedLM", text(8, 128)),
        **NARROW,
        vocab_size=1024,
        embedding_size=64,
        intermediate_size=512,
        num_attention_heads=4,
    ),
    # A bias by distance in each layer, and what it adds scaled.
    transformers(
        *("beit-small", "BeitForImageClassification", pictures(8, 96)),
        **NARROW,
        image_size=96,
        patch_size=16,
        intermediate_size=512,
        num_attention_heads=4,
        use_relative_position_bias=True,
        drop_path_rate=0.0,
    ),
    # Films, with text in each block.
    diffusers(
        *("wan-small", "WanTransformer3DModel", film_and_text),
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


# -------------------------------------------------------------------- check


def traced(net: Net) -> int:
    """Nodes of the joint graph, after a step of fakes. One graph, or this fails."""
    counts: list[int] = []
    split = partitioners.min_cut_rematerialization_partition

    def counted(joint: fx.GraphModule, *args: Any, **options: Any) -> Any:
        counts.append(len(joint.graph.nodes))
        return split(joint, *args, **options)

    mode, module, inputs = net.fake()
    torch._dynamo.reset()
    with mock.patch.object(debugging, split.__name__, counted), mode:
        step = torch.compile(module, backend=OPERATORS, fullgraph=True)
        step(*inputs).backward()
    (count,) = counts
    return count


def main(names: Sequence[str]) -> int:
    """A line for each, by both types; how many cannot be traced."""
    failed = 0
    for net in NETS:
        if names and net.name not in names:
            continue
        for dtype in (torch.bfloat16, torch.float32):
            start = time.monotonic()
            try:
                found = f"{traced(replace(net, dtype=dtype)):,} nodes"
            except Exception as error:
                failed += 1
                found = f"{type(error).__name__}: {error}"
            took = time.monotonic() - start
            print(f"{net.name:16}{str(dtype)[6:]:10}{took:4.0f} s  {found}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
