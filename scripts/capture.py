"""Turns any model into a knapsack instance like those in test/corpus.

    scripts/benchmark.sh capture llama3-8b -o llama.json.gz
    scripts/benchmark.sh capture my_models:make -o mine.json

The model is one of the project's (`--list` names them) or your own, as
module:function, found from the working folder: a function without arguments that
returns a model and a tuple or dict of inputs. It is built and traced with fake
tensors, so no memory is needed and no weights are computed; the graph is the one that
a GPU would get. The model must return its loss (or an object with a loss).
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
from nets import CUDAAttention, find, Inputs, Net, NETS
from rich.console import Console
from torch import nn
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from upstream import dispatch


# A budget that no plan but the knapsack's keeps.
LEAST = 1e-9

Instance = dict[str, Any]


class NoKnapsack(Exception):
    """The partitioner plans this model without asking a knapsack solver."""


class Captured(Exception):
    """Ends the partition: what comes after the knapsack is not needed."""


def trace(
    mode: FakeTensorMode,
    module: nn.Module,
    inputs: Inputs,
    partition: Callable[..., Any],
    like_cuda: bool = True,
) -> None:
    """Trace forward and backward of fake tensors and give the joint graph away.

    ``partition`` is called as AOTAutograd calls its partitioners, on the graph that
    inductor would partition: decomposed and simplified. With ``like_cuda`` attention
    is CUDA's fused one.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def step(state: dict[str, torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = torch.func.functional_call(module, state, inputs)
        return loss

    def partition_as_inductor(
        graph: torch.fx.GraphModule, *rest: Any, **options: Any
    ) -> Any:
        with V.set_fake_mode(mode):
            graph = joint_graph_passes(graph)
        return partition(graph, *rest, **options)

    traced = aot_function(
        step,
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partition_as_inductor,
        decompositions=select_decomp_table(),
    )
    with mode, CUDAAttention() if like_cuda else nullcontext():
        traced(state, *inputs)


def capture(net: Net, like_cuda: bool = True) -> Instance:
    """The knapsack that the partitioner poses for ``net``, in the corpus's format.

    ``bytes`` and ``runtimes`` (flops) are in the partitioner's own order, its sizes
    are ``bytes / 1e9 / denominator_gb``, and ``targets`` indexes ``target_table``.
    Raises NoKnapsack where none is posed.
    """
    found: Instance = {"name": net.name}
    cuts: list[int] = []
    cut = partitioners.solve_min_cut

    def watch_cut(graph: Any, info: Any, *rest: Any) -> Any:
        saved, banned = cut(graph, info, *rest)
        cuts.append(sum(map(partitioners._size_of, saved)))
        found["min_act_bytes"] = sum(map(partitioners._size_of, info.inputs))
        return saved, banned

    def watch_knapsack(
        graph: Any, memory: Any, runtimes: Any, budget: Any, info: Any, nodes: Any
    ) -> Any:
        largest, more_aggressive, aggressive = cuts
        sizes = [partitioners._size_of(node) for node in nodes]
        targets = [str(node.target) for node in nodes]
        table = sorted(set(targets))
        found.update(
            n_items=len(nodes),
            bytes=sizes,
            runtimes=runtimes,
            max_act_bytes=largest,
            denominator_gb=largest / 1e9 - found["min_act_bytes"] / 1e9,
            joint_nodes=len(graph.nodes),
            more_aggressive_saved_bytes=more_aggressive,
            aggressive_saved_bytes=aggressive,
            targets=[table.index(target) for target in targets],
            target_table=table,
            notes="",
        )
        raise Captured

    with (
        torch._functorch.config.patch(
            activation_memory_budget=LEAST,
            activation_memory_budget_runtime_estimator="flops",
            visualize_memory_budget_pareto=False,
        ),
        mock.patch.object(partitioners, "solve_min_cut", watch_cut),
        mock.patch.object(*dispatch(), watch_knapsack),
    ):
        try:
            trace(
                *net.fake(),
                partitioners.min_cut_rematerialization_partition,
                like_cuda,
            )
        except Captured:
            return found
    raise NoKnapsack(
        f"{net.name}: no budget makes the partitioner ask a knapsack solver; nothing "
        "that it saves is both dear to recompute and needed by the backward"
    )


def write(instance: Instance, path: Path) -> None:
    text = json.dumps(instance)
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.write(text)
    else:
        path.write_text(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark.sh capture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", help="a name, or module:function")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="the file to write, compressed where it ends in .gz (default: only tell)",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="keep the CPU's attention operators"
    )
    parser.add_argument("--list", action="store_true", help="name the project's models")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(NETS))
        return 0
    if arguments.model is None:
        parser.error("a model is needed: a name (--list), or module:function")
    console = Console(soft_wrap=True)
    start = time.perf_counter()
    try:
        net = find(arguments.model)
        with console.status(f"tracing {net.name}"):
            instance = capture(net, not arguments.cpu)
        if arguments.output is not None:
            write(instance, arguments.output)
    except Exception as error:
        kind = (
            "" if isinstance(error, (ValueError, NoKnapsack)) else type(error).__name__
        )
        print(f"capture: {kind} {error}".replace("  ", " "), file=sys.stderr)
        return 1
    sizes, flops = instance["bytes"], instance["runtimes"]
    console.print(
        f"{instance['name']}: {len(sizes)} items of {len(set(zip(sizes, flops)))} kinds, "
        f"{sum(sizes) / 1e6:,.1f} MB, {sum(flops) / 1e9:,.1f} GFLOP, from "
        f"{instance['joint_nodes']} nodes in {time.perf_counter() - start:.1f} s",
        highlight=False,
    )
    if arguments.output is not None:
        console.print(f"written to {arguments.output}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
