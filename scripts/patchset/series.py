"""The patch set: every patch of ``topics/``, in the order in which they are applied.

To change what is patched, change its topic and run ``scripts/generate_patches.sh``.
"""

from __future__ import annotations

from importlib import import_module

from .patch import Patch


TOPICS = (
    "knapsack_exact",
    "knapsack_solvers",
    "solver_by_name",
    "cache_key",
    "overwritten_inputs",
    "random_tags",
    "must_save_at_zero",
    "draws_on_one_side",
    "routing",
    "random_ops",
    "memory_budget",
    "saved_report",
    "frozen_layers",
    "mask_vectors",
    "buffer_reuse",
    "input_sizes",
    "overwritten_arguments",
    "kernel_order",
    "conv_layout",
    "embedding_gradient",
    "late_addend",
    "auto_chunker",
    "peak_budget",
    "compiled_peak",
    "step_budget",
    "head_chunks",
    "exact_by_default",
    "config_solver_name",
)
SERIES: tuple[Patch, ...] = tuple(
    import_module(f".topics.{topic}", __package__).PATCH for topic in TOPICS
)

# What a pull request can hold: every patch, and its smallest form where it has one.
FORMS: dict[str, Patch] = {patch.name: patch for patch in SERIES}
FORMS.update(
    (f"{patch.name}, smallest form", patch.minimal) for patch in SERIES if patch.minimal
)


def exported(topic: str) -> str:
    """The name in ``FORMS`` of what becomes the topic's pull request."""
    smallest = f"{topic}, smallest form"
    return smallest if smallest in FORMS else topic


def stack(patch: Patch) -> list[Patch]:
    """The patch after those that it needs, each after those that it needs itself."""
    below: dict[str, Patch] = {}
    for name in patch.needs:
        below.update((needed.name, needed) for needed in stack(FORMS[name]))
    return [*below.values(), patch]
