#!/usr/bin/env python3
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
import gc
import importlib.util
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.backends.debugging
import torch._functorch.config
import torch._inductor.compile_fx
import torch._inductor.config
from nets import Shape, Transformer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn, Tensor
from torch._functorch import partitioners
from torch._functorch._activation_checkpointing import knapsack
from upstream import dispatch, untouched_knapsack


SEED = 0
BUDGETS = (1.0, 0.5, 0.2)
STEPS = 3
# What float32 may differ by when a matmul is computed a second time.
TOLERANCE = 1e-4
# Columns of the table.
WIDTH = 118

Solver = Callable[[list[float], list[float], float], tuple[float, list[int], list[int]]]

# These promise the budget in whole 1/10000 of the range, with every size rounded
# to the nearest; all others promise the true bytes.
QUANTISED = ("dp", "dp_knapsack_sliding_hirschberg")
QUANTA = 10_000
# A normalised size carries two roundings, so equal sums may differ by a few units
# in the last place. One byte of the largest activations is a thousand times more.
ROUNDING = 1e-12

UPSTREAM = {
    "upstream dp": "dp_knapsack",
    "upstream Hirschberg": "dp_knapsack_sliding_hirschberg",
}


# ----------------------------------------------------------------- training


@dataclass
class Training:
    """What a few steps gave: each step's loss, and each step's gradients."""

    losses: list[float]
    gradients: list[list[Tensor]]


def train(
    step: Callable[..., Tensor], model: nn.Module, batches: Sequence[Tensor]
) -> Training:
    """Train ``model`` with plain SGD, its forward run through ``step``."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    result = Training([], [])
    for batch in batches:
        loss = step(batch[:, :-1], batch[:, 1:])
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        result.losses.append(loss.item())
        result.gradients.append([gradient.clone() for gradient in gradients])
        optimizer.step()
    return result


def relative_error(measured: Training, reference: Training) -> tuple[float, float]:
    """Largest relative error of a loss, and of a gradient in the maximum norm.

    Tensors keep a NaN in their maximum, which Python's ``max`` may lose.
    """
    losses, expected = torch.tensor(measured.losses), torch.tensor(reference.losses)
    loss = ((losses - expected) / expected).abs().max()
    errors = [
        (gradient - wanted).abs().max() / wanted.abs().max()
        for step, wanted_step in zip(measured.gradients, reference.gradients)
        for gradient, wanted in zip(step, wanted_step)
    ]
    return loss.item(), torch.stack(errors).max().item()


# -------------------------------------------------------------- observation


@dataclass
class Instance:
    """One knapsack as the partitioner posed it, and the solver's answer."""

    memory: list[float]
    runtimes: list[float]
    budget: float
    saved: list[int]


class Observer:
    """Watches the partitioner while it really works: its knapsack and its times."""

    def __init__(self) -> None:
        self.instance: Instance | None = None
        self.partition_seconds = 0.0
        self.solver_seconds = 0.0

    def watch_solver(self, solve: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(solve)
        def watched(
            graph: Any, memory: Any, runtimes: Any, budget: float, *rest: Any
        ) -> Any:
            start = time.perf_counter()
            answer = solve(graph, memory, runtimes, budget, *rest)
            self.solver_seconds += time.perf_counter() - start
            self.instance = Instance(
                list(memory), list(runtimes), budget, list(answer[1])
            )
            return answer

        return watched

    def watch_partition(self, partition: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(partition)
        def watched(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return partition(*args, **kwargs)
            finally:
                self.partition_seconds += time.perf_counter() - start

        return watched


@contextmanager
def observed() -> Iterator[Observer]:
    """Put an Observer around the partitioner, and take it away again."""
    observer = Observer()
    place, name = dispatch()
    solve = getattr(place, name)
    partition = partitioners.min_cut_rematerialization_partition
    # The backends imported the function by name, each into a module of its own.
    users: list[ModuleType] = [
        module
        for module in (
            partitioners,
            torch._dynamo.backends.debugging,
            torch._inductor.compile_fx,
        )
        if getattr(module, partition.__name__, None) is partition
    ]
    setattr(place, name, observer.watch_solver(solve))
    for module in users:
        setattr(module, partition.__name__, observer.watch_partition(partition))
    try:
        yield observer
    finally:
        setattr(place, name, solve)
        for module in users:
            setattr(module, partition.__name__, partition)


def saved_activation_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that ``forward`` allocated and its backward keeps alive.

    The profiler records every allocation and release of torch's CPU allocator with
    its exact size, so their sum is what is alive afterwards and was not before:
    temporaries cancel out, parameters and inputs were there already, and only the
    outputs have to be taken off. Unlike walking Python's objects this also sees
    tensors that only C++ holds, and unlike the process's size it sees every byte.
    """
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        output = forward()
        gc.collect()
    live: int = sum(event.self_cpu_memory_usage for event in profile.events())
    return live - output.untyped_storage().nbytes()


def check_measurement(backend: str) -> None:
    """Hold `saved_activation_bytes` against a model one can count by hand.

    Of ``(-(x @ a)) @ b`` the gradient of b needs the middle matrix (or the
    first product, to negate it again): one n x n matrix of float32. All else is
    an input, the output, or gone.
    """
    n = 256
    x, a, b = (torch.ones(n, n, requires_grad=True) for _ in range(3))

    def model() -> Tensor:
        return ((-(x @ a)) @ b).sum()

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    compiled()
    for name, forward in (("eager", model), ("compiled", compiled)):
        measured = saved_activation_bytes(forward)
        if measured != n * n * 4:
            raise SystemExit(
                f"quickstart.py: measuring saved bytes is off in this torch: {measured} "
                f"in {name} mode for a model that saves {n * n * 4}"
            )


# --------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Choice:
    """What a solver chose: ``used`` and the budget are shares of the same range."""

    items: int
    used: float
    over: bool
    # None for solvers that are shown for comparison and promise nothing here.
    kept_promise: bool | None
    solver_seconds: float


@dataclass(frozen=True)
class Measured:
    """What the running program did."""

    saved_bytes: int
    loss_error: float
    gradient_error: float
    equals_eager: bool
    partition_seconds: float


@dataclass(frozen=True)
class Row:
    """One line of the table, without what does not apply to it."""

    solver: str
    budget: float
    choice: Choice | None
    measured: Measured | None


def account(
    solver: str, instance: Instance, saved: Sequence[int], seconds: float
) -> Choice:
    """What the chosen items really cost, and whether that was promised."""
    used = math.fsum(instance.memory[i] for i in saved)
    over = used > instance.budget + ROUNDING
    kept_promise: bool | None = not over
    if solver in UPSTREAM:
        kept_promise = None
    elif solver in QUANTISED:
        quanta = sum(round(instance.memory[i] * QUANTA) for i in saved)
        kept_promise = quanta <= round(instance.budget * QUANTA)
    return Choice(len(instance.memory), used, over, kept_promise, seconds)


@contextmanager
def configured(budget: float, solver: str) -> Iterator[None]:
    """Set budget and solver. A cached plan would be served without partitioning."""
    with (
        torch._functorch.config.patch(
            activation_memory_budget=budget,
            activation_memory_budget_solver=solver,
            enable_autograd_cache=False,
        ),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        yield


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
    with configured(budget, solver), observed() as observer:
        step = torch.compile(model, backend=backend)
        training = train(step, model, batches)
        model.zero_grad()
        saved = saved_activation_bytes(
            lambda: step(batches[0][:, :-1], batches[0][:, 1:])
        )
    loss_error, gradient_error = relative_error(training, reference)
    measured = Measured(
        saved,
        loss_error,
        gradient_error,
        loss_error <= TOLERANCE and gradient_error <= TOLERANCE,
        observer.partition_seconds,
    )
    instance = observer.instance
    choice = None
    if instance is not None:
        choice = account(solver, instance, instance.saved, observer.solver_seconds)
    return Row(solver, budget, choice, measured), instance


def compare(name: str, solve: Solver, instance: Instance) -> Row:
    """Give a solver from outside the running torch the recorded instance."""
    start = time.perf_counter()
    saved = solve(instance.memory, instance.runtimes, instance.budget)[1]
    seconds = time.perf_counter() - start
    return Row(name, instance.budget, account(name, instance, saved, seconds), None)


def upstream_solvers() -> tuple[dict[str, Solver], str]:
    """Upstream's solvers from the installed wheel, or none and the reason."""
    try:
        module = untouched_knapsack()
    except RuntimeError as error:
        return {}, str(error)
    return {
        shown: getattr(module, name)
        for shown, name in UPSTREAM.items()
        if hasattr(module, name)
    }, ""


def run(
    solvers: list[str], backend: str, shape: Shape, console: Console
) -> tuple[list[Row], list[str]]:
    """All rows, budget by budget, and notes on what could not be run."""
    torch.manual_seed(SEED)
    initial = Transformer(shape)
    batches = [
        torch.randint(shape.vocabulary, (shape.batch, shape.tokens + 1))
        for _ in range(STEPS)
    ]
    notes = []
    if "ilp" in solvers and importlib.util.find_spec("scipy") is None:
        solvers.remove("ilp")
        notes.append("ilp is left out: it needs scipy, which is not installed")
    upstream, reason = upstream_solvers()
    if reason:
        notes.append(f"upstream's solvers are left out: {reason}")

    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("eager", total=1 + len(BUDGETS) * len(solvers))
        check_measurement(backend)
        eager = copy.deepcopy(initial)
        reference = train(eager, eager, batches)
        progress.advance(task)
        for budget in BUDGETS:
            instance = None
            for solver in solvers:
                progress.update(task, description=f"budget {budget}: {solver}")
                row, instance = measure(
                    solver, budget, backend, initial, batches, reference
                )
                rows.append(row)
                progress.advance(task)
            if instance is not None:
                rows += [compare(n, s, instance) for n, s in upstream.items()]
    return rows, notes


# ------------------------------------------------------------------- report


def failures(rows: Sequence[Row]) -> list[str]:
    """What must not happen with the patch set applied."""
    faults = []
    for row in rows:
        name = f"{row.solver} at budget {row.budget}"
        if row.measured is not None and not row.measured.equals_eager:
            faults.append(
                f"{name}: differs from eager mode by {row.measured.gradient_error:.1e} "
                f"in the gradients and {row.measured.loss_error:.1e} in the loss "
                f"(allowed: {TOLERANCE:.0e})"
            )
        if row.choice is not None and row.choice.kept_promise is False:
            faults.append(
                f"{name}: used {row.choice.used:.6f} of the range, which it promised "
                "not to do"
            )
    if all(row.choice is None for row in rows):
        faults.append("no budget reached the knapsack, so nothing was shown")
    return faults


def table(rows: Sequence[Row]) -> Table:
    result = Table(header_style="bold", box=SIMPLE_HEAD)
    result.add_column("asked", justify="right", no_wrap=True)
    result.add_column("solver", no_wrap=True)
    for heading in (
        "used",
        "over",
        "saved KiB\nmeasured",
        "loss\nerror",
        "gradient\nerror",
        "partition\nseconds",
        "solver\nms",
    ):
        result.add_column(heading, justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None]):
        result.add_row(
            f"{row.budget}",
            row.solver,
            *choice_cells(row),
            *measured_cells(row.measured),
            "" if row.choice is None else f"{row.choice.solver_seconds * 1e3:.1f}",
            end_section=following is None or following.budget != row.budget,
        )
    return result


def choice_cells(row: Row) -> tuple[str, str]:
    choice = row.choice
    if choice is None:
        return "-", "-"
    used = f"{choice.used:.5f}"
    if not choice.over:
        return used, "no"
    colour = "yellow" if choice.kept_promise else "red"
    return used, f"[{colour}]+{choice.used / row.budget - 1:.2%}[/]"


def measured_cells(measured: Measured | None) -> tuple[str, str, str, str]:
    if measured is None:
        return "", "", "", ""
    verdict = "[green]ok[/]" if measured.equals_eager else "[red]WRONG[/]"
    return (
        f"{measured.saved_bytes / 1024:,.1f}",
        f"{measured.loss_error:.0e}",
        f"{measured.gradient_error:.0e} {verdict}",
        f"{measured.partition_seconds:.2f}",
    )


def reading(rows: Sequence[Row]) -> list[str]:
    """What the rows say, in sentences; nothing is said that is not in them."""
    lines = []
    if any(row.budget == 1.0 and row.choice is None for row in rows):
        lines.append(
            "At budget 1.0 the partitioner takes its fastest plan and asks no solver."
        )
    saved = {
        budget: [
            r.measured.saved_bytes for r in rows if r.budget == budget and r.measured
        ]
        for budget in BUDGETS
    }
    full = max(saved[1.0])
    for budget in BUDGETS:
        if budget != 1.0:
            low, high = (f"{f(saved[budget]) / full:.0%}" for f in (min, max))
            span = low if low == high else f"{low} to {high}"
            lines.append(
                f"At budget {budget} the running program kept {span} of the activation "
                "bytes that it keeps at 1.0."
            )

    excesses: dict[str, list[str]] = {}
    broken = set()
    for row in rows:
        if row.choice is not None:
            excess = excesses.setdefault(row.solver, [])
            if row.choice.over:
                share = row.choice.used / row.budget - 1
                excess.append(f"{share:.2%} at {row.budget}")
            if not row.choice.kept_promise:
                broken.add(row.solver)
    kept = [solver for solver, excess in excesses.items() if not excess]
    if kept:
        lines.append(f"Within the budget in true bytes: {', '.join(kept)}.")
    for solver, excess in excesses.items():
        if excess:
            promise = (
                ""
                if solver in broken
                else " (it rounds sizes to 1/10000 of the range, and kept that promise)"
            )
            lines.append(f"Over the budget: {solver}, by {', '.join(excess)}{promise}.")

    errors = [row.measured.gradient_error for row in rows if row.measured]
    if all(row.measured.equals_eager for row in rows if row.measured):
        lines.append(
            f"Every run gave eager mode's gradients, to {max(errors):.0e} at worst: the "
            "budget changes what is kept, not what is computed."
        )
    return lines


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


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
    solvers = getattr(knapsack, "KNAPSACK_SOLVERS", None)
    if solvers is None:
        print(
            f"quickstart.py: {torch.__file__} does not have the patches; "
            "run scripts/quickstart.sh, which sets up one that does",
            file=sys.stderr,
        )
        return 2

    # A wrapped line can be read, a table squeezed into too few columns cannot.
    console = Console()
    console = Console(width=max(console.width, WIDTH))
    # The tensors are small: a second thread costs more in waiting than it computes,
    # several times more on a busy machine.
    torch.set_num_threads(1)
    # The profiler's library announces every start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    start = time.perf_counter()
    shape = Shape()
    with tempfile.TemporaryDirectory(prefix="quickstart-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        rows, notes = run(list(solvers), arguments.backend, shape, console)
    faults = failures(rows)

    console.print(
        f"\n[bold]torch {torch.__version__}[/], {arguments.backend}, CPU: "
        f"{shape.layers}-layer transformer, {STEPS} steps of "
        f"{shape.batch} x {shape.tokens} tokens\n"
        "asked: the activation memory budget. used: the true bytes of the items the "
        "solver saved, in the same unit."
    )
    console.print(table(rows))
    for line in (*reading(rows), *notes):
        console.print(f"- {line}", highlight=False)
    for fault in faults:
        console.print(f"[red]FAILED[/] {fault}", highlight=False)
    console.print(f"{time.perf_counter() - start:.0f} s")

    if arguments.json is not None:
        report = {
            "torch": torch.__version__,
            "backend": arguments.backend,
            "seed": SEED,
            "steps": STEPS,
            "model": asdict(shape),
            "machine": machine(),
            "rows": [asdict(row) for row in rows],
            "notes": notes,
            "failures": faults,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
