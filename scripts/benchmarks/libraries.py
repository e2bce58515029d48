"""Models of transformers and diffusers by the names of their classes, ready to train.

Weights are random and nothing is downloaded. A class says by its name and by what its
forward takes which inputs and labels it is trained on. ValueError says what is wrong with
a name, a setting or a size.
"""

import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn, Tensor


LENGTH = 1024
# Of sound, in samples; a second, usually.
SAMPLES = 16000
# Of the text that a diffusion model is given.
PROMPT = 77
# What would draw random numbers on the host, or skip layers by them: no graph can.
LAYERDROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
IN_A_GRAPH = {
    "use_cache": False,
    "apply_spec_augment": False,
    **dict.fromkeys(LAYERDROPS, 0.0),
}


class Trained(NamedTuple):
    """A model, its inputs by name, and how its loss is found if it returns none."""

    model: nn.Module
    inputs: dict[str, Tensor]
    find: Optional[Callable[..., Tensor]] = None


# ------------------------------------------------------------------- losses


def denoised(model: nn.Module, noise: Tensor, **inputs: Tensor) -> Tensor:
    """The mean square of what it returns beyond the noise."""
    found = model(**inputs, return_dict=False)[0]
    return F.mse_loss(found.float(), noise.float())


def contrasted(model: nn.Module, **inputs: Tensor) -> Tensor:
    """Whether it finds the text of each image, and its image of each text."""
    loss: Tensor = model(**inputs, return_loss=True).loss
    return loss


def mean_square(model: nn.Module, **inputs: Tensor) -> Tensor:
    """The mean square of its first output, as it has no loss of its own."""
    first: Tensor = model(**inputs)[0]
    return first.float().square().mean()


# -------------------------------------------------------------------- names


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar known name, as the end of a message."""
    found = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {found[0]}?" if found else ""


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(f"this Python has no {name}: install it there") from error


def class_of(package: str, kind: str) -> Any:
    module = library(package)
    found = getattr(module, kind, None)
    if found is None:
        raise ValueError(f"{package} has no {kind}{nearest(kind, dir(module))}")
    is_auto = hasattr(found, "from_config") and hasattr(found, "_model_mapping")
    is_model = inspect.isclass(found) and issubclass(found, nn.Module)
    if not is_auto and not (is_model and hasattr(found, "from_pretrained")):
        raise ValueError(f"{package}.{kind} is no class of a model")
    return found


def check_names(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{owner} has no {name}{nearest(name, known)}")


def configured(config_class: Any, settings: Mapping[str, Any], model: Any) -> Any:
    """A configuration; ``text_config.num_hidden_layers`` is a setting of a part of it."""
    defaults = config_class()
    names = {*defaults.to_dict(), *defaults.attribute_map}
    # These are all classes', whether they have them by default or not.
    names |= {"num_labels", "decoder_start_token_id"}
    # Some are read by the model alone.
    names.update(re.findall(r"\w+", inspect.getsource(sys.modules[model.__module__])))
    # Such as _attn_implementation_internal.
    private = (name[1:] for name in vars(defaults) if name.startswith("_"))
    names.update(name.removesuffix("_internal") for name in private)
    own: dict[str, Any] = {}
    for name, value in settings.items():
        part, dot, inner = name.partition(".")
        check_names(config_class.__name__, [part], names)
        if not dot:
            own[name] = value
            continue
        known = getattr(defaults, part)
        if not hasattr(known, "to_dict"):
            raise ValueError(f"{part} of {config_class.__name__} has no parts")
        check_names(f"{part} of {config_class.__name__}", [inner], known.to_dict())
        own.setdefault(part, {})[inner] = value
    for name, value in IN_A_GRAPH.items():
        if hasattr(defaults, name):
            own.setdefault(name, value)
    start = getattr(defaults, "decoder_start_token_id", None)
    if getattr(defaults, "is_encoder_decoder", False) and start is None:
        own.setdefault("decoder_start_token_id", 0)
    return config_class(**own)


def of_transformers(kind: str, **settings: Any) -> Any:
    found = class_of("transformers", kind)
    config_class = getattr(found, "config_class", None)
    if config_class is None:
        types = library("transformers").CONFIG_MAPPING
        wanted = settings.pop("model_type", None)
        if wanted is None:
            raise ValueError(
                f"{kind} has many kinds: add --config model_type=llama, for example, or "
                "name the class of the model"
            )
        check_names(kind, [wanted], [*types])
        config_class = types[wanted]
    config = configured(config_class, settings, found)
    # The last token of each sequence is the one before the padding.
    if kind.endswith("ForSequenceClassification") and config.pad_token_id is None:
        config.pad_token_id = 0
    build = found.from_config if hasattr(found, "from_config") else found
    model = build(config)
    # Where they return inner values, their first call takes a lock, which no graph can.
    for hooked in model.modules():
        if isinstance(hooked, library("transformers").PreTrainedModel):
            hooks_installed(hooked)
    return model


def hooks_installed(model: Any) -> None:
    place = "transformers.utils.output_capturing"
    if importlib.util.find_spec(place) is not None:
        importlib.import_module(place).maybe_install_capturing_hooks(model)


def of_diffusers(kind: str, **settings: Any) -> Any:
    found = class_of("diffusers", kind)
    check_names(kind, settings, inspect.signature(found.__init__).parameters)
    return found(**settings)


def by_class(kind: str, **settings: Any) -> nn.Module:
    """A model of transformers, or one of diffusers, in training mode."""
    is_diffusers = "2D" in kind or "3D" in kind
    model: Any = (of_diffusers if is_diffusers else of_transformers)(kind, **settings)
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # Or it warns, which no graph may contain.
    trained: nn.Module = model.train()
    return trained


# ------------------------------------------------------------- transformers


def most_tokens(model: Any) -> Optional[int]:
    """How many positions it has learned; None where it computes them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and (
            name.endswith("wpe") or "position" in name.rpartition(".")[2]
        ):
            config = model.config.get_text_config()
            most = getattr(config, "max_position_embeddings", module.num_embeddings)
            most = getattr(config, "max_target_positions", most)
            # Those like RoBERTa count from the one after the padding's.
            padded = module.padding_idx
            return most if padded is None else most - padded - 1
    return None


def text_length(kind: str, model: Any, length: Optional[int]) -> int:
    most = most_tokens(model)
    if length is None:
        config = model.config.get_text_config()
        runs = getattr(config, "max_position_embeddings", None)
        return min(LENGTH, most or runs or LENGTH)
    if most is not None and length > most:
        raise ValueError(
            f"{kind} has positions for {most} tokens, not {length}: pass a shorter "
            "--length, or more positions by --config (max_position_embeddings, usually)"
        )
    return length


def side_of(config: Any) -> int:
    config = getattr(config, "vision_config", config)
    side = getattr(config, "image_size", None) or 224
    return int(side[0] if isinstance(side, (list, tuple)) else side)


def with_inputs(
    kind: str, batch: int = 1, length: Optional[int] = None, **settings: Any
) -> Trained:
    """A model of transformers by its configuration's defaults, which settings override."""
    model: Any = by_class(kind, **settings)
    config, name = model.config, type(model).__name__
    takes, main = inspect.signature(model.forward).parameters, model.main_input_name
    classes = getattr(config, "num_labels", 2)
    each: tuple[int, ...] = (batch,)
    inputs: dict[str, Tensor] = {}
    if "return_loss" in takes and {"input_ids", "pixel_values"} <= {*takes}:
        inputs = text(kind, model, batch, length)
        inputs["pixel_values"] = pictures(config, batch)
        return Trained(model, inputs, contrasted)
    if main == "pixel_values" and "input_ids" not in takes:
        inputs = {main: pictures(config, batch)}
        if name.endswith("ForSemanticSegmentation"):
            each = batch, *inputs[main].shape[2:]
        if name.endswith("ForMaskedImageModeling"):
            patches = (side_of(config) // config.patch_size) ** 2
            inputs["bool_masked_pos"] = torch.randint(2, (batch, patches)).bool()
    elif main == "input_features" and hasattr(config, "max_source_positions"):
        shape = batch, config.num_mel_bins, 2 * config.max_source_positions
        inputs = {main: torch.randn(shape)}
        if "decoder_input_ids" in takes:
            each = batch, text_length(kind, model, length)
            classes = config.vocab_size
    elif main == "input_values":
        sound: tuple[int, ...] = (batch, length or SAMPLES)
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            sound = batch, length or config.max_length, config.num_mel_bins
        inputs = {main: torch.randn(sound)}
    elif main == "input_ids" and "pixel_values" not in takes:
        return on_text(kind, model, batch, length)
    else:
        refuse(kind, takes)
    if "labels" in takes:
        inputs["labels"] = torch.randint(classes, each)
    return completed(kind, model, inputs)


def pictures(config: Any, batch: int) -> Tensor:
    channels = getattr(getattr(config, "vision_config", config), "num_channels", 3)
    return torch.randn(batch, channels, side_of(config), side_of(config))


def text(
    kind: str, model: Any, batch: int, length: Optional[int], *choices: int
) -> dict[str, Tensor]:
    words = model.config.get_text_config().vocab_size
    shape = batch, *choices, text_length(kind, model, length)
    return {"input_ids": torch.randint(words, shape)}


def on_text(kind: str, model: Any, batch: int, length: Optional[int]) -> Trained:
    name, classes = type(model).__name__, getattr(model.config, "num_labels", 2)
    takes = inspect.signature(model.forward).parameters
    choices = (2,) * name.endswith("ForMultipleChoice")
    inputs = text(kind, model, batch, length, *choices)
    ids = inputs["input_ids"]
    if name.endswith("ForQuestionAnswering"):
        for end in ("start_positions", "end_positions"):
            inputs[end] = torch.randint(ids.shape[1], (batch,))
    elif name.endswith(("ForMultipleChoice", "ForNextSentencePrediction")):
        inputs["labels"] = torch.randint(2, (batch,))
    elif name.endswith("ForSequenceClassification"):
        inputs["labels"] = torch.randint(classes, (batch,))
    elif name.endswith("ForTokenClassification"):
        inputs["labels"] = torch.randint(classes, ids.shape)
    elif "labels" in takes:
        inputs["labels"] = ids.clone()
        for order in ("next_sentence_label", "sentence_order_label"):
            if order in takes:
                inputs[order] = torch.randint(2, (batch,))
    elif "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = ids.clone()
    return completed(kind, model, inputs)


def completed(kind: str, model: nn.Module, inputs: dict[str, Tensor]) -> Trained:
    takes = inspect.signature(model.forward).parameters
    needs = {
        name
        for name, each in takes.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    }
    if not needs <= {*inputs} or type(model).__name__.endswith("Detection"):
        refuse(kind, takes)
    has_loss = {"labels", "start_positions"} & {*inputs} or "ForPreTraining" in kind
    return Trained(model, inputs, None if has_loss else mean_square)


def refuse(kind: str, takes: Iterable[str]) -> None:
    raise ValueError(
        f"no inputs are known for {kind}, which takes {', '.join(list(takes)[:6])}, ...: "
        "write a function that returns it with its inputs, and name that"
    )


# ---------------------------------------------------------------- diffusers


def denoising(kind: str, batch: int = 1, **settings: Any) -> Trained:
    """A UNet or a transformer of diffusers, which is to find the noise of an image."""
    model: Any = of_diffusers(kind, **settings).train()
    config, takes = model.config, inspect.signature(model.forward).parameters
    side = config.get("sample_size") or 64
    sides = tuple(side) if isinstance(side, (list, tuple)) else (side, side)
    main = next(iter(takes))
    wide = ("joint_attention_dim", "caption_channels", "cross_attention_dim")
    width = next((config[name] for name in wide if config.get(name)), None)
    known = main in ("sample", "hidden_states") and "img_ids" not in takes
    if not (known and "timestep" in takes and config.get("in_channels")):
        refuse(kind, takes)
    noisy = torch.randn(batch, config["in_channels"], *sides)
    inputs = {main: noisy, "timestep": torch.randint(1000, (batch,))}
    if "encoder_hidden_states" in takes and width:
        inputs["encoder_hidden_states"] = torch.randn(batch, PROMPT, width)
    if "pooled_projections" in takes:
        pooled = batch, config["pooled_projection_dim"]
        inputs["pooled_projections"] = torch.randn(pooled)
    classes = config.get("num_class_embeds")
    if config.get("norm_type") == "ada_norm_zero":
        classes = config["num_embeds_ada_norm"]
    if classes:
        inputs["class_labels"] = torch.randint(classes, (batch,))
    # As many channels as it returns: some find the noise's variance, too.
    channels = config.get("out_channels") or config["in_channels"]
    return Trained(
        model, {"noise": torch.randn(batch, channels, *sides), **inputs}, denoised
    )
