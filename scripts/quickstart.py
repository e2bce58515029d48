"""Train a small transformer under activation memory budgets and show who keeps them.

Run it through scripts/quickstart.sh, which assembles and patches a PyTorch
checkout first. A decoder-only transformer (grouped-query attention, gated MLP,
RMSNorm; random weights, nothing downloaded) is trained for a few steps with
torch.compile on the CPU, once for each budget and each knapsack solver, and every
run is compared with the same steps in eager mode. Upstream's own solvers, taken
from the untouched wheel, are given the very same knapsack instances.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from benchmarks.corpus import keeps_promise, over, used
from benchmarks.live_bytes import record_step
from benchmarks.nets import Shape, Transformer
from benchmarks.results import environment, fail, markdown, Row, show, store
from benchmarks.tracing import Instance, observed, PARTITION, SOLVE
from benchmarks.training import TOLERANCE, train, Training
from rich.console import Console
from rich.progress import track
from torch import nn, Tensor
from torch._functorch._activation_checkpointing import knapsack
from upstream import untouched_knapsack


SEED = 0
BUDGETS = (1.0, 0.5, 0.2)
STEPS = 3
SHAPE = Shape()
UPSTREAM = {
    "upstream dp": "dp_knapsack",
    "upstream Hirschberg": "dp_knapsack_sliding_hirschberg",
}


def choice(
    solver: str, instance: Instance, saved: Sequence[int], seconds: float
) -> Row:
    """What the chosen items really cost, and whether that was promised.

    ``used`` and the budget are shares of the same range. Upstream's solvers are shown
    for comparison and promise nothing here.
    """
    memory, budget = instance.memory, instance.budget
    promised = keeps_promise(solver, memory, budget, saved)
    return {
        "items": len(memory),
        "used": used(memory, saved),
        "over": over(memory, budget, saved),
        "kept_promise": None if solver in UPSTREAM else promised,
        "solver_seconds": seconds,
    }


def measure(
    solver: str,
    budget: float,
    backend: str,
    initial: nn.Module,
    batches: Sequence[Tensor],
    reference: Training,
) -> tuple[Row, Instance | None]:
    """Compile and train one copy of ``initial``; nothing is left from runs before."""
    torch._dynamo.reset()
    model = copy.deepcopy(initial)
    with (
        torch._functorch.config.patch(
            activation_memory_budget=budget,
            activation_memory_budget_solver=solver,
            # A cached plan would be served without partitioning.
            enable_autograd_cache=False,
        ),
        torch._inductor.config.patch(fx_graph_cache=False),
        observed() as observer,
    ):
        step = torch.compile(model, backend=backend)
        training = train(step, model, batches)
        inputs = batches[0][:, :-1], batches[0][:, 1:]
        timeline = record_step(
            lambda: step(*inputs), model.parameters(), inputs, allocator=True
        )
    loss_error, gradient_error = training.errors(reference)
    instance = observer.instance
    row: Row = {"solver": solver, "budget": budget, "choice": None}
    if instance is not None:
        seconds = observer.seconds[SOLVE]
        row["choice"] = choice(solver, instance, instance.saved, seconds)
    row["measured"] = {
        "saved_bytes": timeline.saved_bytes,
        "loss_error": loss_error,
        "gradient_error": gradient_error,
        "equals_eager": loss_error <= TOLERANCE and gradient_error <= TOLERANCE,
        "partition_seconds": observer.seconds[PARTITION],
    }
    return row, instance


def compare(
    name: str, budget: float, solve: Callable[..., Any], instance: Instance
) -> Row:
    """Give a solver from outside the running torch the instance of that budget."""
    start = time.process_time()
    saved = solve(instance.memory, instance.runtimes, instance.budget)[1]
    found = choice(name, instance, saved, time.process_time() - start)
    return {"solver": name, "budget": budget, "choice": found, "measured": None}


def run(solvers: Sequence[str], backend: str) -> Iterator[Row]:
    """All rows, budget by budget."""
    torch.manual_seed(SEED)
    initial = Transformer(SHAPE)
    size = (STEPS, SHAPE.batch, SHAPE.tokens + 1)
    batches = torch.randint(SHAPE.vocabulary, size).unbind()
    eager = copy.deepcopy(initial)
    reference = train(eager, eager, batches)
    console = Console(stderr=True)
    for budget in track(BUDGETS, "budgets", console=console, transient=True):
        instance = None
        for solver in solvers:
            row, instance = measure(
                solver, budget, backend, initial, batches, reference
            )
            yield row
        for name, function in UPSTREAM.items():
            solve = getattr(untouched_knapsack(), function, None)
            if instance is not None and solve is not None:
                yield compare(name, budget, solve, instance)


# ------------------------------------------------------------------- report


def faults(rows: Sequence[Row]) -> list[str]:
    """What must not happen with the patch set applied."""
    found = []
    for row in rows:
        name = f"{row['solver']} at budget {row['budget']}"
        chosen, measured = row["choice"], row["measured"]
        if measured is not None and not measured["equals_eager"]:
            found.append(
                f"{name}: differs from eager mode by {measured['gradient_error']:.1e} "
                f"in the gradients and {measured['loss_error']:.1e} in the loss "
                f"(allowed: {TOLERANCE:.0e})"
            )
        if chosen is not None and chosen["kept_promise"] is False:
            found.append(
                f"{name}: used {chosen['used']:.6f} of the range, which it promised "
                "not to do"
            )
    if all(row["choice"] is None for row in rows):
        found.append("no budget reached the knapsack, so nothing was shown")
    return found


def page(data: dict[str, Any]) -> str:
    lines = []
    for row in data["rows"]:
        chosen, measured = row["choice"], row["measured"]
        share, excess, solver_time, rest = "-", "-", "-", ["", "", ""]
        if chosen is not None:
            share = f"{chosen['used']:.5f}"
            excess = f"**+{chosen['used'] / row['budget'] - 1:.2%}**"
            excess = excess if chosen["over"] else "no"
            solver_time = f"{chosen['solver_seconds'] * 1e3:.1f}"
        if measured is not None:
            rest = [
                f"{measured['saved_bytes'] / 1024:,.1f}",
                "yes" if measured["equals_eager"] else "**no**",
                f"{measured['partition_seconds']:.2f}",
            ]
        line = [str(row["budget"]), row["solver"], share, excess, *rest, solver_time]
        lines.append(line)
    heading = ["budget asked", "solver", "really used", "over", "saved KiB, measured"]
    heading += ["loss and gradients as eager", "partition s", "solver ms"]
    facts = data["environment"]
    return markdown(heading, lines) + (
        f"\ntorch {facts['torch']}, backend {facts['backend']}, seed {facts['seed']}, "
        f"{facts['machine']}, Python {facts['python']}. At budget 1.0 no solver is "
        "asked. The rows named upstream are the untouched wheel's solvers on the same "
        "instance.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train a small transformer with torch.compile at activation "
        "memory budgets 1.0, 0.5 and 0.2, with every knapsack solver, and print what "
        "each solver was asked, what it used, and whether the gradients are eager's.",
        epilog="exit status: 0 all well; 1 gradients differ from eager's, or a solver "
        "did not keep the budget it promises; 2 bad call, or torch without the patches",
    )
    parser.add_argument(
        "--backend",
        default="aot_eager_decomp_partition",
        choices=("aot_eager_decomp_partition", "inductor"),
        help="torch.compile's backend (default: %(default)s, which needs no C++ "
        "compiler; inductor does)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the rows to FILE"
    )
    arguments = parser.parse_args()
    # Not written as an attribute, since type checkers see the torch without patches.
    solvers = list(getattr(knapsack, "KNAPSACK_SOLVERS", ()))
    if not solvers:
        print(
            f"quickstart.py: {torch.__file__} does not have the patches; "
            "run scripts/quickstart.sh, which sets up one that does",
            file=sys.stderr,
        )
        return 2
    # The tensors are small: a second thread costs more in waiting than it computes,
    # several times more on a busy machine.
    torch.set_num_threads(1)
    # The profiler's library announces every start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    facts = {"backend": arguments.backend, "seed": SEED, "steps": STEPS}
    rows = list(run(solvers, arguments.backend))
    data = {
        "environment": {**environment(), **facts, "model": asdict(SHAPE)},
        "rows": rows,
    }
    show(page(data))
    if arguments.json is not None:
        store(arguments.json, data)
    return fail(faults(rows))


if __name__ == "__main__":
    sys.exit(main())
