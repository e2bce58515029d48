from __future__ import annotations

from ..patch import AUTOGRAD_CACHE, Edit, Patch


_UUIDS = (
    "        self.custom_estimator_solver_uuids = "
    "_get_custom_estimator_solver_uuids(config)\n"
)

PATCH = Patch(
    name="cache-key",
    subject="Put the names of knapsack solver and runtime estimator in the cache key",
    why="""\
activation_memory_budget_solver and activation_memory_budget_runtime_estimator are
left out of the saved config, because an instance of a custom class cannot always
be pickled, and only such an instance adds something to the key of AOTAutograd's
cache: its uuid. Names add nothing. A process that asks for "greedy" after one
that asked for "dp" is a cache hit and runs the plan of "dp".

The names are now in the key beside the uuids, in a field of their own, so that
no uuid can be mistaken for a name. An instance without a uuid still bypasses the
cache.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_cache_key.py",
    edits=(
        Edit(
            AUTOGRAD_CACHE,
            anchor=_UUIDS,
            replacement=_UUIDS
            + """\
        self.estimator_solver_names = tuple(
            choice if isinstance(choice, str) else None
            for choice in (
                config.activation_memory_budget_runtime_estimator,
                config.activation_memory_budget_solver,
            )
        )
""",
            inside="__init__",
        ),
    ),
    since=(2, 11),
    landed=((AUTOGRAD_CACHE, "self.estimator_solver_names = "),),
    risks="""\
Cached plans of earlier versions are not found again: the first compile after the
upgrade is cold. Nothing else changes.
""",
)
