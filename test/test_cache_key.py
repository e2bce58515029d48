"""Which plan a process gets from the compile cache that another one filled."""

import json
import os
import subprocess
import sys

import torch


PROCESS = """\
import json, sys
import torch
import torch._functorch.config as config
from torch._dynamo.utils import counters

config.activation_memory_budget = 0.3
config.activation_memory_budget_solver = sys.argv[1]
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


def test_another_solver_gets_a_plan_of_its_own(tmp_path):
    results = []
    for solver in ("dp", "greedy", "greedy"):
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, solver],
            cwd="/",
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        results.append(json.loads(done.stdout.splitlines()[-1]))
    hits, plans, places = zip(*results)
    assert hits == (0, 0, 1)
    assert plans[0] != plans[1] == plans[2]
    assert set(places) == {torch.__file__}
