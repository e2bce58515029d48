"""A training step by inductor's schedule, for what ``forms/`` has of inductor's fixes.

For an H100, or for a CPU where torch was built without CUDA; no kernel runs, and no GPU
is needed. All nets at real size are measured, those that nothing was tuned on as well.
"""

from dataclasses import replace

import torch

from benchmarks import catalogue
from benchmarks.meters import compile_seconds
from benchmarks.replay import compiled_for, GPUS, replay
from benchmarks.ways import budgeted, compiled, Training


GPU = GPUS["h100"] if torch.version.cuda else None
WHAT = "a step by the schedule for " + ("an H100" if GPU else "a CPU")


def measured(budget: float = 1.0) -> dict[str, float]:
    """Peak beyond parameters and inputs, roofline time, and CPU time of the compile."""
    torch.set_num_threads(1)
    found = {}
    for net in (net for nets in catalogue.AT_SIZE.values() for net in nets):
        if GPU is None:
            net = replace(net, dtype=torch.float32)
        with budgeted(budget), compiled_for(GPU) as backend:
            way = compiled(backend, fullgraph=True)
            training = Training(net, whole=way, fake=True)
            seconds = compile_seconds(training.step)
            row = replay(training, GPU)
        found[f"{net.name}: peak, MB"] = row["peak"] / 1e6
        if "seconds" in row:
            found[f"{net.name}: roofline, ms"] = 1e3 * row["seconds"]
        found[f"{net.name}: compile, s"] = seconds
    return found
