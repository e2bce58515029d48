"""The patch set: every patch of ``topics/``, in the order in which they are applied.

To change what is patched, change its topic and run ``scripts/generate_patches.sh``.
"""

from .topics import (
    budget_errors,
    budgets_together,
    buffer_reuse,
    cache_key,
    config_solver_name,
    custom_solver_runtimes,
    exact_by_default,
    frozen_layers,
    knapsack_exact,
    knapsack_solvers,
    mask_vectors,
    peak_budget,
    random_ops,
    saved_report,
    solver_by_name,
)


SERIES = tuple(
    topic.PATCH
    for topic in (
        knapsack_exact,
        knapsack_solvers,
        solver_by_name,
        config_solver_name,
        budgets_together,
        cache_key,
        random_ops,
        custom_solver_runtimes,
        budget_errors,
        saved_report,
        frozen_layers,
        mask_vectors,
        buffer_reuse,
        peak_budget,
        exact_by_default,
    )
)
