"""What steps hold that repeat convolutions in the backward."""

from benchmarks import scheduled


WHAT = scheduled.WHAT + ", at budget 0.1"
MODELS = ("resnet50-224", "unet-256", "resnet50", "unet", "hf-convnext")


def measured() -> dict[str, float]:
    return scheduled.measured(MODELS, budget=0.1)
