"""Whether the graphs of a training step tell what it holds.

Its generated wrappers run with kernels that do nothing; what they allocate is measured.
"""

from typing import Any
from unittest import mock

import torch
from torch._inductor import output_code

from benchmarks import catalogue
from benchmarks.replay import compiled_for, replay
from benchmarks.ways import compiled, Training


WHAT = "peak of a step that its graphs tell, % of the measured one"
MODELS = ("llama-4", "unet", "vit", "mlp-dropout", "towers-small")


def told_peak(forward: Any, backward: Any) -> int:
    """Of the graphs of a step: what the forward saved goes as the backward drops it."""
    if forward is None or backward is None:
        return 0
    _, *saved = forward.results
    dropped: dict[tuple[int, int], int] = {}
    for result, at in zip(saved, backward.dropped):
        if result is not None:
            dropped[result] = max(at, dropped.get(result, 0))
    # What is dropped after an allocation was live beside it.
    moments: list[int] = [*forward.live]
    for number, live in enumerate(backward.live):
        beside = (nbytes for (_, nbytes), at in dropped.items() if at > number)
        moments.append(live + sum(beside))
    return max(moments)


def measured() -> dict[str, float]:
    torch.set_num_threads(1)
    found = {}
    for name in MODELS:
        memories: list[Any] = []
        post_compile = output_code.CompiledFxGraph.post_compile

        def note(graph: Any, *args: Any) -> Any:
            memories.append(getattr(graph, "memory", None))  # noqa: B023
            return post_compile(graph, *args)  # noqa: B023

        noted = mock.patch.object(output_code.CompiledFxGraph, "post_compile", note)
        with compiled_for(None) as backend, noted:
            net = catalogue.find(name)
            training = Training(net, whole=compiled(backend), fake=True).warmed()
            peak = replay(training, None)["peak"]
        found[name] = 100 * told_peak(*memories) / peak
    return found
