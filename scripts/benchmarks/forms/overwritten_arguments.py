"""What steps hold by orders that are compared as they will be generated."""

from benchmarks import scheduled


WHAT = scheduled.WHAT
MODELS = ("gpt2-xl-4", "qwen-moe-4", "vit-l-4", "resnet50-224", "unet-256")


def measured() -> dict[str, float]:
    return scheduled.measured(MODELS)
