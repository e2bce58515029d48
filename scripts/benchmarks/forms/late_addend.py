"""What steps hold where no product waits for its addend."""

from benchmarks import scheduled


WHAT = scheduled.WHAT
MODELS = ("gpt2-xl-4", "llama3-8b-4", "qwen-moe-4", "bert-large-4", "hf-t5_large")


def measured() -> dict[str, float]:
    return scheduled.measured(MODELS)
