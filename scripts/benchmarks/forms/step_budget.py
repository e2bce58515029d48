"""A library that saves less once a step has shown what it holds, without a new trace."""

from typing import Any

import torch
import torch._functorch.config as config

from benchmarks import catalogue
from benchmarks.ways import compiled, OPERATORS, Training


WHAT = "MB saved for the backward in the step after one that held too much"
MODELS = ("llama-4", "unet", "vit", "moe", "towers-small")


class Library:
    """Has each graph save nothing that it can compute again, once that is wanted."""

    def __init__(self) -> None:
        self.is_over = False

    def __call__(self, joint: Any) -> Any:
        runs = {False: joint.compile()}

        def run(args: list[Any]) -> Any:
            if self.is_over not in runs:
                runs[self.is_over] = joint.compile(self.cheapest)
            return runs[self.is_over](args)

        return run

    def cheapest(self, graph: Any, node_info: Any, **_: Any) -> Any:
        """What a budget of 0 saves."""
        from torch._functorch.partitioners import choose_saved_values_set

        return choose_saved_values_set(graph, node_info, memory_budget=0)


def measured() -> dict[str, float]:
    torch.set_num_threads(1)
    found = {}
    for name in MODELS:
        library = Library()
        hook = {"joint_graph_hook": library}
        with config.patch(hook if hasattr(config, "joint_graph_hook") else {}):
            net = catalogue.find(name)
            training = Training(net, whole=compiled(OPERATORS), fake=True).warmed()
        library.is_over = True
        training.step()
        found[name] = training.measured().saved_bytes / 1e6
    return found
