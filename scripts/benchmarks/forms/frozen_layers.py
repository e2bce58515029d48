"""What frozen convolutional nets save while something before them is trained."""

from collections.abc import Callable, Sequence

import torch
import torch._functorch.config as config
from torch import nn

from benchmarks.architectures import ResNet, UNet
from benchmarks.nets import Built, images, LossOf, Net
from benchmarks.ways import compiled, OPERATORS, Training


WHAT = "MB saved for the backward"
SETTINGS = {"drop_unread_arguments": True}


def freeze(module: nn.Module, trainable: Sequence[str]) -> nn.Module:
    """Freezes all parameters but those whose names begin so; norms that have none of
    those use their fixed statistics."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith(tuple(trainable)))
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
    return module


def vgg(widths: tuple[int, ...], activation: type[nn.Module]) -> nn.Module:
    """Pairs of 3x3 convolutions, of which the second halves the sides."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip((3, *widths), widths):
        for first, stride in ((inputs, 1), (outputs, 2)):
            layers.append(nn.Conv2d(first, outputs, 3, stride, padding=1))
            layers.append(activation())
    return nn.Sequential(*layers)


def through(net: nn.Module, side: int) -> Built:
    """A loss of a frozen net's features, for the gradient of the image alone."""
    image = torch.randn(4, 3, side, side, requires_grad=True)
    loss = LossOf(freeze(net, ()), ("image",), lambda net, image: net(image).mean())
    return loss, (image,)


MODELS: dict[str, Callable[[], Built]] = {
    "ResNet-50, stem and head trained": lambda: (
        freeze(ResNet((3, 4, 6, 3), 16, 64), ("stem", "head")),
        images(4, 96, 64),
    ),
    "ResNet-50, norms trained": lambda: (
        norms_trained(ResNet((3, 4, 6, 3), 16, 64)),
        images(4, 96, 64),
    ),
    "U-Net, first stage and head trained": lambda: (
        freeze(UNet(8, 3, 8), ("down.0", "head")),
        images(4, 96, 8, (96, 96)),
    ),
    "perceptual loss of VGG": lambda: through(vgg((16, 32, 64, 128), nn.ReLU), 96),
    "generator's loss through a discriminator": lambda: through(
        vgg((16, 32, 64, 128), nn.SiLU), 96
    ),
}


def norms_trained(net: nn.Module) -> nn.Module:
    """All but the scales and shifts of norms are frozen."""
    for module in net.modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(isinstance(module, nn.BatchNorm2d))
    return net


def measured() -> dict[str, float]:
    """By the operators of the graphs that inductor would get."""
    torch.set_num_threads(1)
    settings = SETTINGS if hasattr(config, "drop_unread_arguments") else {}
    found = {}
    with config.patch(settings):
        for name, build in MODELS.items():
            training = Training(Net(name, build), whole=compiled(OPERATORS)).warmed()
            found[name] = training.measured().saved_bytes / 1e6
    return found
