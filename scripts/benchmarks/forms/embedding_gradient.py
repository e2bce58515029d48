"""What steps hold without a second, wider table of an embedding's gradient."""

from benchmarks import scheduled


WHAT = scheduled.WHAT
MODELS = ("llama3-8b-4", "gpt2-xl-4", "qwen-moe-4", "vit-l-4", "bert-large-4")


def measured() -> dict[str, float]:
    return scheduled.measured(MODELS)
