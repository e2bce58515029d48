"""Train a small transformer under activation memory budgets and show what they do.

Run it through scripts/quickstart.sh, which assembles and patches a PyTorch
checkout first. A decoder-only transformer (grouped-query attention, gated MLP,
RMSNorm; random weights, nothing downloaded) is trained on the CPU: in eager mode, at
the budget of upstream that has the lowest peak, with the target "peak", with a
StepBudget, and with each knapsack solver. Upstream's steps run on the untouched wheel.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
import torch._functorch.config
from benchmarks import techniques
from benchmarks.corpus import keeps_promise, over, used
from benchmarks.live_bytes import record_step
from benchmarks.nets import Shape, tokens, Transformer
from benchmarks.results import environment, fail, markdown, Row, show, store
from benchmarks.tracing import Instance, observed, PARTITION, SOLVE
from benchmarks.training import TOLERANCE, train, Training
from rich.console import Console
from rich.progress import track
from torch import nn, Tensor
from torch._functorch._activation_checkpointing import knapsack


SEED = 0
# What solvers are asked for.
BUDGET = 0.2
STEPS = 3
SHAPE = Shape()
TECHNIQUES = (
    (techniques.EAGER, None),
    (techniques.UPSTREAM, None),
    (techniques.PEAK, 0.2),
    (techniques.PEAK, 0.0),
    (techniques.BLOCKS, 0.0),
)
# Of upstream, for its lowest peak.
SWEPT = tuple(n / 32 for n in range(32, -1, -1))
# What all of them have in common.
COMMON = {
    "model": f"{Path(__file__).stem}:small",
    "modules": techniques.MODULES,
    "device": "cpu",
    "backend": techniques.OPERATORS,
}


def small() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch, as benchmarks take them."""
    return Transformer(SHAPE), tokens(SHAPE.vocabulary, SHAPE.batch, SHAPE.tokens)


def run_technique(technique: str, budget: Optional[float]) -> Row:
    words = technique if budget is None else f"{technique} {budget:g}"
    print(f"measuring {words} ...", file=sys.stderr)
    if technique == techniques.UPSTREAM:
        return techniques.upstreams_lowest(COMMON, SWEPT)
    torch._dynamo.reset()
    task = {"technique": technique, "budget": budget, **COMMON}
    return {**task, **techniques.measure(task)}


def choice(solver: str, instance: Instance, seconds: float) -> Row:
    """What the chosen items really cost, and whether that was promised.

    ``used`` and the budget are shares of the same range.
    """
    memory, budget, saved = instance.memory, instance.budget, instance.saved
    return {
        "items": len(memory),
        "used": used(memory, saved),
        "over": over(memory, budget, saved),
        "kept_promise": keeps_promise(solver, memory, budget, saved),
        "solver_seconds": seconds,
    }


def measure(
    solver: str, initial: nn.Module, batches: Sequence[Tensor], reference: Training
) -> Row:
    """Compile and train one copy of ``initial``; nothing is left from runs before."""
    torch._dynamo.reset()
    model = copy.deepcopy(initial)
    with (
        torch._functorch.config.patch(
            activation_memory_budget=BUDGET,
            activation_memory_budget_solver=solver,
            # A cached plan would be served without partitioning.
            enable_autograd_cache=False,
        ),
        observed() as observer,
    ):
        step = torch.compile(model, backend=techniques.OPERATORS)
        training = train(step, model, batches)
        inputs = batches[0][:, :-1], batches[0][:, 1:]
        timeline = record_step(lambda: step(*inputs), model.parameters(), inputs)
    instance, seconds = observer.instance, observer.seconds
    return {
        "solver": solver,
        "choice": instance and choice(solver, instance, seconds[SOLVE]),
        "saved_bytes": timeline.saved_bytes,
        "error": max(training.errors(reference)),
        "partition_seconds": seconds[PARTITION],
    }


def run_solvers(solvers: Sequence[str]) -> list[Row]:
    torch.manual_seed(SEED)
    initial = Transformer(SHAPE)
    size = (STEPS, SHAPE.batch, SHAPE.tokens + 1)
    batches = torch.randint(SHAPE.vocabulary, size).unbind()
    eager = copy.deepcopy(initial)
    reference = train(eager, eager, batches)
    console = Console(stderr=True)
    return [
        measure(solver, initial, batches, reference)
        for solver in track(solvers, "solvers", console=console, transient=True)
    ]


# ------------------------------------------------------------------- report


def faults(data: dict[str, Any]) -> Iterator[str]:
    """What must not happen with the patch set applied."""
    measured = data["measured"]
    for row in measured:
        name = f"{row['technique']} {techniques.told_budget(row)}"
        if "error" in row:
            yield f"{name}: {row['error']}"
        elif row["gradient_error"] > TOLERANCE:
            yield f"{name}: {differs(row['gradient_error'])}"
    if not any("error" in row for row in measured):
        ours = techniques.lowest(measured, techniques.PEAK)["peak_bytes"]
        if ours >= techniques.lowest(measured, techniques.UPSTREAM)["peak_bytes"]:
            yield 'the target "peak" is not below upstream\'s lowest peak'
    for row in data["rows"]:
        name = f"solver {row['solver']}"
        if row["error"] > TOLERANCE:
            yield f"{name}: {differs(row['error'])}"
        if row["choice"] is None:
            yield f"{name}: the solver was not asked"
        elif not row["choice"]["kept_promise"]:
            share = row["choice"]["used"]
            yield f"{name}: used {share:.6f} of the range, more than it promised"


def differs(error: float) -> str:
    return f"differs from eager mode by {error:.1e} (allowed: {TOLERANCE:.0e})"


def page(data: dict[str, Any]) -> str:
    lines = []
    for row in data["rows"]:
        line = [row["solver"], "-", "-", "-"]
        if row["choice"] is not None:
            share, seconds = row["choice"]["used"], row["choice"]["solver_seconds"]
            excess = f"**+{share / BUDGET - 1:.2%}**"
            excess = excess if row["choice"]["over"] else "no"
            line[1:] = [f"{share:.5f}", excess, f"{seconds * 1e3:.1f}"]
        line += [f"{row['partition_seconds']:.2f}", f"{row['saved_bytes'] / 1024:,.1f}"]
        lines.append([*line, f"{row['error']:.0e}"])
    heading = ["solver", "used", "over", "solver ms", "partition s", "saved KiB"]
    return (
        f"{techniques.page(data)}\nThe same model with each solver, at budget {BUDGET:g} "
        "of the saved bytes; errors are those of losses and gradients:\n\n"
    ) + markdown([*heading, "error"], lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train a small transformer in eager mode, at upstream's lowest "
        'peak, with the target "peak", with a StepBudget and with every knapsack '
        "solver, and print peaks, times and whether gradients are eager mode's.",
        epilog="exit status: 0 all well; 1 gradients differ from eager's, a peak is not "
        "below upstream's, or a solver did not keep the budget it promises; 2 bad call, "
        "or torch without the patches",
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
    facts = {**environment(), **COMMON, "seed": SEED, "repeats": techniques.REPEATS}
    data = {
        # Nothing of it runs on one.
        "environment": {**facts, "gpu": None},
        "measured": [run_technique(*each) for each in TECHNIQUES],
        "rows": run_solvers(solvers),
    }
    show(page(data))
    if arguments.json is not None:
        store(arguments.json, data)
    return fail(list(faults(data)))


if __name__ == "__main__":
    sys.exit(main())
