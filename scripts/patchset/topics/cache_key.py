from ..patch import AUTOGRAD_CACHE, edits, Patch


PATCH = Patch(
    name="cache-key",
    lines=25,
    subject="Put the names of knapsack solver and runtime estimator in the cache key",
    why="""\
Only a custom solver or estimator adds something to the key of AOTAutograd's cache:
its uuid. A process that asks for "greedy" after one that asked for "dp" is a cache
hit and runs the plan of "dp".

The names are now in the key as well, in a field of their own, so that no uuid can be
mistaken for a name.
""",
    repro="""\
import torch
import torch._functorch.config as config
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

config.activation_memory_budget = 0.5
with fresh_cache():
    for solver in "dp", "greedy":
        config.activation_memory_budget_solver = solver
        torch._dynamo.reset()
        x = torch.randn(64, 64, requires_grad=True)
        torch.compile(lambda x: (x @ x).sin() @ x)(x).sum().backward()
        print(solver, dict(counters["aot_autograd"]))  # "greedy" must not be a hit.
""",
    beyond="""\
- A new name for the same solver is a miss, as nothing knows that both are the same.
- Code behind a name is not in the key: a change of it comes with another torch, whose
  version is.
""",
    trailers=("Upstream-PR: pytorch/pytorch#160914",),
    test="test/functorch/test_ac_cache_key.py",
    edits=edits("""\
@@ torch/_functorch/_aot_autograd/autograd_cache.py __init__
         self.custom_estimator_solver_uuids = _get_custom_estimator_solver_uuids(config)
+        self.estimator_solver_names = tuple(
+            choice if isinstance(choice, str) else None
+            for choice in (
+                config.activation_memory_budget_runtime_estimator,
+                config.activation_memory_budget_solver,
+            )
+        )
"""),
    landed=((AUTOGRAD_CACHE, "self.estimator_solver_names = "),),
    risks="The first compile after the upgrade is cold.",
)
