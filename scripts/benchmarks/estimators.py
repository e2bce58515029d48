"""Measures which runtime estimator's plans train fastest, on inductor's kernels.

    scripts/benchmark.sh estimators                     three nets (a quarter of an hour)
    scripts/benchmark.sh estimators --json results/estimators.json

Each estimator plans for the same budgets and targets. The compiled steps (forward and
backward) of one net and budget take turns in one process; times are medians of CPU
seconds of one thread, as a multiple of those of budget 1. On CUDA they are wall times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as config
from torch import nn, Tensor
from torch._inductor.compile_fx import compile_fx

from benchmarks import fresh, nets, options
from benchmarks.results import environment, markdown, measured_on, Row


NETS = ("gpt2", "vit", "resnet50")
# "profile" runs each operator on CUDA.
ESTIMATORS = ("flops", "roofline", "profile")[: 2 + torch.cuda.is_available()]
TARGETS = ("saved", "peak")
BUDGETS = (0.3,)
REPEATS = 5
LIMITS = fresh.Limits(seconds=1800, gigabytes=12)


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    module, inputs = nets.find(task["net"]).make(task["device"])
    settings = [
        {
            "activation_memory_budget": task["budget"],
            "activation_memory_budget_target": task["target"],
            "activation_memory_budget_runtime_estimator": estimator,
        }
        for estimator in ESTIMATORS
    ]
    steps = [compiled(module, each) for each in ({}, *settings)]
    cuda = task["device"] == "cuda"

    def seconds(step: Callable[..., Tensor]) -> float:
        clock = time.perf_counter if cuda else time.process_time
        if cuda:
            torch.cuda.synchronize()
        start = clock()
        step(*inputs).backward()
        if cuda:
            torch.cuda.synchronize()
        return clock() - start

    for step in steps:
        seconds(step)
    rounds = [[seconds(step) for step in steps] for _ in range(REPEATS)]
    fastest, *times = (statistics.median(each) for each in zip(*rounds))
    return {"seconds": fastest, "slower": [each / fastest for each in times]}


def compiled(module: nn.Module, settings: dict[str, Any]) -> Callable[..., Tensor]:
    """The module with inductor; compiled functions of other settings stay as they are."""

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with config.patch(enable_autograd_cache=False, **settings):
            return compile_fx(graph, inputs)

    step: Callable[..., Tensor] = torch.compile(module, backend=backend)
    return step


def means(rows: Sequence[Row]) -> list[float]:
    """Geometric means of each estimator's times over those of budget 1."""
    logs = [[math.log(each) for each in row["slower"]] for row in rows]
    return [math.exp(statistics.fmean(each)) for each in zip(*logs)]


def page(data: dict[str, Any]) -> str:
    good = [row for row in data["rows"] if "error" not in row]

    def lines() -> Iterator[list[str]]:
        for target in TARGETS:
            of_target = [row for row in good if row["target"] == target]
            for row in of_target:
                shown = (f"{each:.3f}" for each in row["slower"])
                yield [target, row["net"], f"{row['budget']:g}", *shown]
            if of_target:
                shown = (f"**{each:.3f}**" for each in means(of_target))
                yield [target, "geometric mean", "", *shown]

    return (
        markdown(["target", "net", "budget", *ESTIMATORS], list(lines()))
        + f"\nTime of a step, as a multiple of budget 1's; one graph, inductor, fp32, "
        f"medians of {data['environment']['repeats']}. "
        + measured_on(data["environment"])
    )


def main() -> int:
    arguments = options.parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tasks = [
        {"net": net, "budget": budget, "target": target, "device": device}
        for net in NETS
        for target in TARGETS
        for budget in BUDGETS
    ]
    rows = fresh.run(__name__, tasks, LIMITS)
    facts = {**environment(), "repeats": REPEATS}
    fresh.finish(arguments.json, {"environment": facts, "rows": rows}, page)
    return int(any("error" in row for row in rows))
