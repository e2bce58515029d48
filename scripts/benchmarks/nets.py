"""The nets that are measured: models with random weights, and a batch for each.

`NETS` has those that the planner was developed with, each by its name; those held out
are in `held_out`. `SMALL` and `AT_SIZE` are the same eight kinds: small ones run on a CPU
in seconds, those at real size are for fake tensors (`Net.fake`), which have sizes but no
memory.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import nn, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.architectures import (
    ClassicShape,
    Language,
    LSTM,
    MLP,
    ResNet,
    Shape,
    Towers,
    Transformer,
    UNet,
    ViT,
)
from benchmarks.libraries import with_inputs


SEED = 0
# The blocks that most models repeat, by the names they commonly have.
BLOCKS = r"(.*\.)?(blocks?|layers?|h|stages?|down|merge|cells)\.\d+"
BF16 = torch.bfloat16
Inputs = tuple[Tensor, ...]
Built = tuple[nn.Module, Inputs]


@dataclass(frozen=True)
class Net:
    """A model and a batch to train it on; what is floating-point has ``dtype``.

    ``blocks`` matches the whole names of the submodules that may be compiled one by one.
    """

    name: str
    build: Callable[[], Built]
    dtype: torch.dtype = torch.float32
    # Whether the planner was developed without a look at what it does to this one.
    held_out: bool = False
    blocks: str = BLOCKS

    def make(self, device: str = "cpu") -> Built:
        """The module, in training mode, and its inputs, the same ones every time."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.random.fork_rng(), torch.device(device):
                torch.manual_seed(SEED)
                return self.build()
        finally:
            torch.set_default_dtype(before)

    def fake(self) -> tuple[FakeTensorMode, nn.Module, Inputs]:
        """The same as fake CPU tensors, and the mode that they belong to.

        Modules are built on the meta device: under the mode of fake tensors many that
        compile well can neither be built nor converted. Those that need values even to
        be built are built for real, which takes their memory for a while.
        """
        try:
            module, inputs = self.make("meta")
        except RuntimeError:
            module, inputs = self.make()
        fakes: dict[Tensor, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            return fakes.setdefault(tensor, as_fake(tensor))

        with FakeTensorMode() as mode:
            for owner in module.modules():
                places: list[Any] = [owner._parameters, owner._buffers, vars(owner)]
                for values in places:
                    for name, value in values.items():
                        if isinstance(value, Tensor):
                            values[name] = fake(value)
            return mode, module, tuple(map(fake, inputs))


def as_fake(tensor: Tensor) -> Tensor:
    """The like of it, by a mode of fake tensors, on the CPU."""
    shape, stride = tensor.shape, tensor.stride()
    new = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, tensor.requires_grad)
    return new.requires_grad_(tensor.requires_grad)


class LossOf(nn.Module):
    """Wraps a model that takes its inputs by name, or returns more than its loss.

    The loss is what ``find`` makes of the model and its inputs; without that, what
    `loss_of` finds in what ``module`` returns.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        find: Optional[Callable[..., Tensor]] = None,
    ) -> None:
        super().__init__()
        self.module, self.names, self.find = module, names, find

    def forward(self, *inputs: Tensor) -> Tensor:
        named = dict(zip(self.names, inputs))
        if self.find is not None:
            return self.find(self.module, **named)
        result = self.module(**named) if named else self.module(*inputs)
        return loss_of(result, type(self.module).__name__)


def loss_of(result: Any, owner: str) -> Tensor:
    """The entry or the attribute ``loss`` of what a model returned, as the models of the
    Hugging Face library have it, else its first element, else all of it."""
    loss = result
    if isinstance(result, Mapping):
        loss = result.get("loss")
    elif hasattr(result, "loss"):
        loss = result.loss
    elif isinstance(result, (tuple, list)) and result:
        loss = result[0]
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss
    raise ValueError(
        f"{owner} returned {told(result)} where its loss is needed: a floating-point "
        'tensor of one element, alone, first in a tuple, or as "loss" in a dict or an '
        "attribute"
    )


def told(result: Any) -> str:
    """What a model returned, in words."""
    if isinstance(result, Tensor):
        kind = str(result.dtype).removeprefix("torch.")
        return f"a tensor of shape {list(result.shape)}, {kind}"
    name = type(result).__name__
    if isinstance(result, Mapping):
        if result.get("loss") is not None:
            return f"a {name} whose loss is {told(result['loss'])}"
        return f"a {name} of {', '.join(map(str, result)) or 'nothing'}"
    if isinstance(result, (tuple, list)) and result:
        return f"a {name} that begins with {told(result[0])}"
    return "None" if result is None else f"a {name}"


# ----------------------------------------------------------------- registry


def tokens(vocabulary: int, batch: int, length: int) -> Inputs:
    """Token ids and their successors."""
    ids = torch.randint(vocabulary, (batch, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def images(batch: int, side: int, classes: int, target: tuple[int, ...] = ()) -> Inputs:
    """Images and a class for each, or for each of its pixels."""
    return torch.randn(batch, 3, side, side), torch.randint(classes, (batch, *target))


def features(shape: tuple[int, ...], classes: int) -> Inputs:
    """Features, and a class for each row of the batch, the last but one dimension."""
    return torch.randn(shape), torch.randint(classes, shape[-2:-1])


def language(name: str, shape: Shape, dtype: torch.dtype = torch.float32) -> Net:
    kind: Any = Language if isinstance(shape, ClassicShape) else Transformer

    def build() -> Built:
        batch = tokens(shape.vocabulary, shape.batch, shape.tokens)
        return kind(shape), batch

    return Net(name, build, dtype)


# Of the Hugging Face libraries: random weights, no download, and their own dropout.


def with_lora(model: nn.Module) -> nn.Module:
    library = importlib.import_module("peft")
    kinds = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = library.LoraConfig(r=16, lora_dropout=0.05, target_modules=kinds)
    adapted: nn.Module = library.get_peft_model(model, config)
    return adapted


def hugging_face(
    name: str,
    kind: str,
    *batch: int,
    dtype: torch.dtype = BF16,
    adapted: Callable[[nn.Module], nn.Module] = lambda model: model,
    held_out: bool = False,
    **sizes: Any,
) -> Net:
    """A model of transformers, by its class; its batch, and the length of its text."""

    def build() -> Built:
        model, inputs, find = with_inputs(kind, *batch, **sizes)
        return LossOf(adapted(model), tuple(inputs), find), tuple(inputs.values())

    return Net(name, build, dtype, held_out)


def sized(width: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    """By the names that most configurations have for them."""
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


SMALL_LLAMA: dict[str, Any] = {
    "width": 256,
    "key_value_heads": 4,
    "mlp": 688,
    "rotary": True,
}
LLAMA_8 = Shape(layers=8, batch=8, tokens=512, **SMALL_LLAMA)
T5: Any = {"decoder_start_token_id": 0, "num_layers": 2}
in_float = functools.partial(hugging_face, dtype=torch.float32)
SMALL = (
    language("llama-8", LLAMA_8),
    language("gpt2", ClassicShape(causal=True, joined=True, gelu="tanh")),
    language("moe", Shape(layers=4, batch=8, tokens=256, experts=8, **SMALL_LLAMA)),
    language(
        "bert", ClassicShape(tokens=128, batch=32, norm_first=False, written_out=True)
    ),
    Net("vit", lambda: (ViT(ClassicShape(tokens=64), 16), images(16, 128, 512))),
    Net("resnet50", lambda: (ResNet((3, 4, 6, 3), 32, 512), images(16, 128, 512))),
    Net("unet", lambda: (UNet(16, 4, 8), images(4, 128, 8, (128, 128)))),
    # With all its 32,128 ids the loss would need more than the blocks.
    in_float(
        *("hf-t5_small", "T5ForConditionalGeneration", 8, 256), vocab_size=512, **T5
    ),
)

LLAMA3_8B = Shape(4096, 32, 8, 14336, 32, 128256, batch=2, tokens=4096, rotary=True)
LLAMA_2048 = Shape(2048, 16, 16, 5504, 16, 32000, 4, 2048, rotary=True)
QWEN_MOE = Shape(2048, 16, 4, 1408, 4, 32000, 2, 2048, True, 16, 4)
GPT2_XL = ClassicShape(
    *(1600, 25, 25, 6400, 48, 50257, 8, 1024),
    dropout=0.1,
    causal=True,
    joined=True,
    gelu="tanh",
)
BERT_LARGE = ClassicShape(
    *(1024, 16, 16, 4096, 24, 30522, 32, 512), dropout=0.1, norm_first=False
)
VIT_LARGE = ClassicShape(1024, 16, 16, 4096, 24, 1000, 64, 196)
T5_LARGE: Any = {**T5, "d_model": 1024, "d_ff": 4096, "num_heads": 16}


def transformers_of(layers: int) -> tuple[Net, ...]:
    """So many layers of each, at its size."""
    sights = replace(VIT_LARGE, layers=layers)
    return (
        language(
            f"llama3-8b-{layers}", replace(LLAMA3_8B, layers=layers, batch=1), BF16
        ),
        language(f"gpt2-xl-{layers}", replace(GPT2_XL, layers=layers), BF16),
        language(f"qwen-moe-{layers}", replace(QWEN_MOE, layers=layers), BF16),
        language(f"bert-large-{layers}", replace(BERT_LARGE, layers=layers), BF16),
        Net(f"vit-l-{layers}", lambda: (ViT(sights, 16), images(64, 224, 1000)), BF16),
    )


def residual(name: str, depths: tuple[int, ...]) -> Net:
    return Net(name, lambda: (ResNet(depths, 64, 1000), images(64, 224, 1000)), BF16)


AT_SIZE = (
    *transformers_of(2),
    residual("resnet-224", (1, 2, 1, 1)),
    Net("unet-256", lambda: (UNet(64, 4, 21), images(8, 256, 21, (256, 256))), BF16),
    hugging_face("hf-t5_large", "T5ForConditionalGeneration", 8, 512, **T5_LARGE),
)
# One or two layers and a large head, for what runs that in chunks.
PAIRS = 16384, 256
LARGE_HEADS = (
    language("gpt2-xl-head", replace(GPT2_XL, layers=2), BF16),
    hugging_face(
        *("hf-llama-head", "LlamaForCausalLM", 2, 4096),
        **sized(2048, 8192, 2, 32),
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    Net(
        "towers",
        lambda: (Towers(PAIRS[1], 1024), (torch.randn(PAIRS), torch.randn(PAIRS))),
        BF16,
    ),
)
# The same at sizes that a CPU can run.
WORDS = 8192
SMALL_HEADS = (
    language("llama-words", Shape(vocabulary=WORDS, layers=2)),
    Net(
        "towers-small",
        lambda: (Towers(64, 256), (torch.randn(2048, 64), torch.randn(2048, 64))),
    ),
)
SHARDED = language("llama3-8b-fsdp", replace(LLAMA3_8B, batch=2, tokens=8192))
# Its gradients show a dropout whose mask is drawn again.
DROPOUT = ClassicShape(
    *(128, 4, 4, 512, 4, 512, 8, 128),
    dropout=0.1,
    causal=True,
    joined=True,
    gelu="tanh",
)
# All layers, for whole steps.
WHOLE = (
    language("llama-2048-16", LLAMA_2048, BF16),
    SHARDED,
)
# What only tests and the models of pull requests need.
OTHERS = (
    language("llama-4", Shape()),
    language("gpt2-dropout", DROPOUT),
    *transformers_of(4),
    residual("resnet50-224", (3, 4, 6, 3)),
    Net("mlp-dropout", lambda: (MLP([512] * 7, 512, 0.1), features((1024, 512), 512))),
    Net("lstm", lambda: (LSTM(128, 2, 512), features((32, 32, 128), 512))),
    hugging_face(
        *("hf-mixtral", "MixtralForCausalLM", 2, 512),
        **sized(1024, 3584, 2, 16),
        num_key_value_heads=4,
        experts_implementation="grouped_mm",
    ),
    in_float("hf-convnext", "ConvNextForImageClassification", 8, num_labels=100),
)
NETS: dict[str, Net] = {
    net.name: net
    for net in (*SMALL, *AT_SIZE, *LARGE_HEADS, *SMALL_HEADS, *WHOLE, *OTHERS)
}
