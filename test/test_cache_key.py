"""Which plan a process gets from the compile cache that another one filled.

The patched checkout against the untouched wheel, with a process per compile.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch


CHECKOUT = Path(torch.__file__).parents[1]

PROCESS = """\
import json, sys
import torch
import torch._functorch.config as config
from torch._dynamo.utils import counters

config.activation_memory_budget = 0.3
config.activation_memory_budget_solver, estimator = sys.argv[1:]
config.activation_memory_budget_runtime_estimator = estimator
widths = (40, 96, 24, 64, 16, 80, 48, 104, 32)
x = torch.ones(50, widths[0], requires_grad=True)
weights = [
    torch.ones(*shape, requires_grad=True) for shape in zip(widths, widths[1:])
]


@torch.compile
def chain(x, *weights):
    for weight in weights:
        x = x @ weight
    return x


saved = []


def pack(tensor):
    if 50 in tensor.shape:
        saved.append(tensor.numel() // 50)
    return tensor


with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    product = chain(x, *weights)
product.backward(torch.ones_like(product))
hits = counters["aot_autograd"]["autograd_cache_hit"]
print(json.dumps([hits, sorted(saved), torch.__file__]))
"""


def in_turn(folder, turns, patched):
    """For each turn whether it was a hit, and the plan: the widths of what is saved."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    environment["PYTHONPATH"] = str(CHECKOUT) if patched else ""
    results = []
    for turn in turns:
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, *turn],
            cwd="/",
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        hits, plan, place = json.loads(done.stdout.splitlines()[-1])
        assert (Path(place).parents[1] == CHECKOUT) == patched
        results.append((bool(hits), plan))
    return results


def test_another_solver_or_estimator_gets_a_plan_of_its_own(tmp_path):
    turns = [("dp", "flops"), ("greedy", "flops"), ("greedy", "flops")]
    turns.append(("dp", "testing"))
    results = in_turn(tmp_path, turns, patched=True)
    assert [hit for hit, _ in results] == [False, False, True, False]
    dp, greedy, again, testing = (plan for _, plan in results)
    assert again == greedy != dp != testing


def test_upstream_serves_the_plan_of_another_solver(tmp_path):
    """A test of the test: without the patch the second process is misled."""
    (_, dp), second = in_turn(
        tmp_path, [("dp", "flops"), ("greedy", "flops")], patched=False
    )
    assert second == (True, dp)
