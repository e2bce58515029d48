"""The patch set: every patch of ``topics/``, in the order in which they are applied.

To change what is patched, change its topic and run ``scripts/generate_patches.sh``.
"""

from .topics import (
    buffer_reuse,
    cache_key,
    config_solver_name,
    exact_by_default,
    exact_solver,
    frozen_layers,
    knapsack_solvers,
    mask_vectors,
    memory_budget,
    peak_budget,
    random_ops,
    saved_report,
    solver_by_name,
)


SERIES = tuple(
    topic.PATCH
    for topic in (
        exact_solver,
        knapsack_solvers,
        solver_by_name,
        cache_key,
        random_ops,
        memory_budget,
        saved_report,
        frozen_layers,
        mask_vectors,
        buffer_reuse,
        peak_budget,
        exact_by_default,
        config_solver_name,
    )
)
