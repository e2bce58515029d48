"""Train a small transformer under activation memory budgets and show what they do.

Run it through scripts/quickstart.sh, which assembles and patches a PyTorch
checkout first. A decoder-only transformer (grouped-query attention, gated MLP,
RMSNorm; random weights, nothing downloaded) is trained on the CPU: in eager mode, at
the budget of upstream that has the lowest peak, with the target "peak", with a
StepBudget, and with each knapsack solver. Upstream's steps run on the untouched wheel.

Exit status: 0 all well; 1 gradients differ from eager's, a peak is not below
upstream's, or a solver did not keep the budget it promises; 2 bad call, or torch
without the patches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
import torch._functorch.config as config

from benchmarks import corpus, fresh, nets, techniques
from benchmarks.meters import relative_error, TOLERANCE
from benchmarks.pages import at_most, columns, good, Mark, Row
from benchmarks.tracing import observed, overlay
from benchmarks.ways import budgeted, compiled, OPERATORS, Training


NETS = ("llama-4",)
KIND, KEY = techniques.KIND, techniques.KEY
LIMITS = fresh.Limits(seconds=900, gigabytes=8)
FACTS = techniques.FACTS
SOLVERS = "solvers"
# What solvers are asked for.
BUDGET = 0.2
TECHNIQUES = (
    (techniques.EAGER, None),
    (techniques.PEAK, 0.2),
    (techniques.PEAK, 0.0),
    (techniques.BLOCKS, 0.0),
)
# Of upstream, for its lowest peak.
SWEPT = tuple(n / 32 for n in range(32, -1, -1))


def tasks(names: Optional[Sequence[str]], check: bool) -> Iterator[fresh.Task]:
    cpu = {"device": "cpu", "backend": OPERATORS}
    eager, *others = (
        {**techniques.task_of(NETS[0], *each), **cpu} for each in TECHNIQUES
    )
    upstream = {**techniques.sweep_of_upstream(NETS[0], SWEPT), **cpu}
    yield from (eager, upstream, *others)
    yield {"technique": SOLVERS}


def measure(task: fresh.Task) -> Row:
    if task["technique"] != SOLVERS:
        return techniques.measure(task)
    torch.set_num_threads(1)
    wanted = Training(nets.find(NETS[0])).measured().gradients
    names = overlay("knapsack").KNAPSACK_SOLVERS
    return {"solvers": [measure_solver(name, wanted) for name in names]}


def measure_solver(solver: str, wanted: Sequence[torch.Tensor]) -> Row:
    """A step, what the chosen items really cost, and whether that was promised.

    ``used`` and the budget are shares of the same range.
    """
    choice = config.patch(
        activation_memory_budget_solver=solver,
        # A cached plan would be served without partitioning.
        enable_autograd_cache=False,
    )
    with budgeted(BUDGET), choice, observed() as observer:
        net = nets.find(NETS[0])
        step = Training(net, whole=compiled(OPERATORS)).warmed().measured()
    asked = observer.instance
    row = {
        "solver": solver,
        "saved_bytes": step.saved_bytes,
        "error": relative_error(step.gradients, wanted),
        "choice": None,
    }
    if asked is not None:
        used = corpus.used(asked.memory, asked.saved)
        problem = asked.memory, asked.budget, asked.saved
        row["choice"] = {
            "items": len(asked.memory),
            "used": used,
            "over": corpus.over(*problem),
            "kept_promise": corpus.keeps_promise(solver, *problem),
        }
    return row


# ------------------------------------------------------------------- report


def solvers_of(rows: Sequence[Row]) -> list[Row]:
    return [each for row in good(rows, technique=SOLVERS) for each in row["solvers"]]


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    """What must hold with the patch set applied."""
    steps = [row for row in good(rows) if row["technique"] != SOLVERS]
    errors = [(row["gradient_error"], row["technique"]) for row in steps]
    errors += [(each["error"], each["solver"]) for each in solvers_of(rows)]
    yield from at_most(
        "gradients, off from eager mode's",
        errors,
        *(TOLERANCE, f"at most {TOLERANCE:.0e}", "{:.1e} ({})", True),
    )
    if {techniques.PEAK, techniques.UPSTREAM} <= {row["technique"] for row in steps}:
        ours, theirs = (
            techniques.lowest(steps, each)["peak_bytes"]
            for each in (techniques.PEAK, techniques.UPSTREAM)
        )
        what = 'lowest peak with the target "peak" / of upstream\'s budgets'
        yield Mark(what, f"{ours / theirs:.2f}", "below 1", ours < theirs)
    wrong = [
        each["solver"]
        for each in solvers_of(rows)
        if not (each["choice"] and each["choice"]["kept_promise"])
    ]
    shown = ", ".join(wrong) or "none"
    yield Mark("solvers over the budget they promise", shown, "none", not wrong)


def page(data: dict[str, Any]) -> str:
    rows = data["measured"]
    steps = [row for row in rows if row["technique"] != SOLVERS]

    def used(row: Row) -> str:
        return f"{row['choice']['used']:.5f}" if row["choice"] else "-"

    def over(row: Row) -> str:
        if not (row["choice"] and row["choice"]["over"]):
            return "no" if row["choice"] else "-"
        return f"**+{row['choice']['used'] / BUDGET - 1:.2%}**"

    return (
        f"{techniques.page({**data, 'measured': steps})}\nThe same model with each "
        f"solver, at budget {BUDGET:g} of the saved bytes; errors are those of "
        "gradients:\n\n"
    ) + columns(
        solvers_of(rows),
        {
            "solver": lambda row: row["solver"],
            "used": used,
            "over": over,
            "saved KiB": lambda row: f"{row['saved_bytes'] / 1024:,.1f}",
            "error": lambda row: f"{row['error']:.0e}",
        },
    )
