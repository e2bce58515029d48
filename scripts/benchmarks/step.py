"""Measures budgets for a training step of models that are compiled block by block.

    scripts/benchmark.sh step                       all nets (an hour)
    scripts/benchmark.sh step --check               a small one, as CI does
    scripts/benchmark.sh step --net my_models:make  your own
    scripts/benchmark.sh step --json results/step.json
    scripts/benchmark.sh step --net bert --json results/step.json   one net's rows anew
    scripts/benchmark.sh step --inductor --json results/step.json   inductor's rows anew

Each net's blocks are compiled one by one; what is between them runs in eager mode. The
step runs by a StepBudget at several shares, and beside that with each block's own budget
of saved bytes, with a checkpoint around each block, and compiled as one graph that is
held to the same peak. The blocks' own budgets are upstream's, swept on the untouched
wheel. Peaks are bytes of live storages of a running step, operator by operator, beyond
those that are there when it starts; flops are those of the whole step, as a multiple of
the forward's. With inductor, peaks are the allocator's, of plans by
estimates and of plans for which its schedule was asked.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as config
from matplotlib.figure import Figure
from torch import nn, Tensor
from torch.utils.checkpoint import checkpoint
from upstream import untouched_partitioners

from benchmarks import fresh, models, nets, options, sweep
from benchmarks.live_bytes import allocations, CountedStorages
from benchmarks.marks import failed, Mark, table
from benchmarks.results import environment, markdown, measured_on, merged, Row, save
from benchmarks.techniques import chosen_modules, MODULES
from benchmarks.tracing import CountedFlops, cpu_attention_counted, overlay
from benchmarks.training import gradients, relative_error


def t5_small() -> tuple[nn.Module, dict[str, Any]]:
    # With all its 32,128 ids the loss would need more than the blocks.
    return models.t5(8, 256, vocab_size=512)


# No plan was ever tuned on it.
T5 = models.hugging_face(t5_small, torch.float32)
NETS = ("llama-8", "gpt2", "bert", "vit", "moe", T5.name)
CHECKED = "vit"
SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.0)
CHECKED_SHARES = (0.5, 0.0)
# The blocks' own budgets of saved bytes, to compare with at the same peak.
SAVED = tuple(n / 32 for n in range(32, -1, -1))
CHECKED_SAVED = (0.5,)
INDUCTOR_SHARES = (1.0, 0.5, 0.1, 0.0)
# How often inductor's schedule is asked, if it is.
JUDGED = (0, 8)
OPERATORS = "aot_eager_decomp_partition"
LIMITS = fresh.Limits(seconds=3000, gigabytes=14)


# ------------------------------------------------------------ in a fresh process


class Training:
    """A net, its blocks compiled one by one or all in one graph."""

    def __init__(self, name: str, backend: Any, whole: bool = False) -> None:
        torch._dynamo.reset()
        net = T5 if name == T5.name else nets.find(name)
        self.module, self.inputs = net.make()
        self.parameters = list(self.module.parameters())
        self.blocks = chosen_modules(self.module, MODULES)
        self.step: Callable[..., Tensor] = self.module
        if whole:
            self.step = torch.compile(self.module, backend=backend)
        else:
            for block in self.blocks:
                block.compile(backend=backend)

    def checkpoint_blocks(self) -> None:
        for block in self.blocks:
            inner: Any = block._compiled_call_impl
            call = functools.partial(checkpoint, inner, use_reentrant=False)
            block._compiled_call_impl = call

    def run(self, budget: Any) -> None:
        torch.manual_seed(nets.SEED)
        with budget:
            self.step(*self.inputs).backward()

    def warmed(self, budget: Any, steps: int = 2) -> None:
        """Steps in which everything is compiled."""
        for _ in range(steps):
            self.run(budget)
            gradients(self.parameters)

    def measured(self, budget: Any) -> tuple[int, int, list[Tensor]]:
        """Peak, flops and gradients of one more step."""
        gc.collect()
        live = CountedStorages([*self.parameters, *self.inputs])
        with CountedFlops() as flops, live:
            self.run(budget)
        return live.peak, flops.flops, gradients(self.parameters)

    def allocated(self, budget: Any) -> int:
        """The most that the allocator has handed out in one more step."""
        gc.collect()
        peak = allocations(lambda: self.run(budget)).peak
        gradients(self.parameters)
        return peak


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    with cpu_attention_counted(), config.patch(enable_autograd_cache=False):
        if "saved" in task:
            return measure_upstream(task)
        if task["backend"] == OPERATORS:
            return measure_operators(task)
        return measure_inductor(task)


def forward_flops(training: Training) -> int:
    with CountedFlops() as counter, torch.no_grad():
        training.module(*training.inputs)
    flops: int = counter.flops
    return flops


def measure_upstream(task: fresh.Task) -> Row:
    """Steps in which all blocks have one budget of saved bytes, a row for each plan."""
    backend = sweep.Sweep()
    training = Training(task["net"], backend)
    forward = forward_flops(training)
    training.warmed(nullcontext(), 1)
    *_, wanted = training.measured(nullcontext())

    def measure(budget: float) -> Row:
        backend.budget = budget
        peak, flops, found = training.measured(nullcontext())
        apart = relative_error(found, wanted)
        return {"peak": peak, "flops": flops / forward, "off_budget_1": apart}

    return {"plans": sweep.measured(backend.graphs, measure, task["saved"])}


def swept(
    module: str, names: Sequence[str], budgets: Sequence[float], limits: fresh.Limits
) -> tuple[dict[str, list[Row]], list[Row]]:
    """A module's rows of `measure_upstream` by net, and those that have an error."""
    tasks: list[fresh.Task] = [
        {"net": name, "backend": "upstream", "saved": budgets, "torch": fresh.UNTOUCHED}
        for name in names
    ]
    rows = fresh.run(module, tasks, limits)
    plans = {row["net"]: row.get("plans", []) for row in rows}
    return plans, [row for row in rows if "error" in row]


def without_upstream(rows: Sequence[Row]) -> list[Row]:
    """Rows to store: the plans that they were given are among their others."""
    return [{k: v for k, v in row.items() if k != "upstream"} for row in rows]


def measure_operators(task: fresh.Task) -> Row:
    name = task["net"]
    StepBudget = overlay("step_budget").StepBudget
    training = Training(name, OPERATORS)
    forward = forward_flops(training)
    training.warmed(nullcontext(), 1)
    plain_peak, _, wanted = training.measured(nullcontext())

    row: Row = {"unbudgeted": plain_peak, "forward_flops": forward}

    def compare(kind: str, training: Training, **settings: Any) -> Iterator[Row]:
        """Another way to save memory, and a StepBudget held to its peak."""
        with config.patch(**settings):
            training.warmed(nullcontext(), 1)
            peak, flops, _ = training.measured(nullcontext())
        yield {"kind": kind, "peak": peak, "flops": flops / forward, **settings}

    others = [{"kind": "saved", **plan} for plan in sweep.right(task["upstream"])]
    checkpointed = Training(name, OPERATORS)
    checkpointed.checkpoint_blocks()
    others += compare("checkpoint", checkpointed)

    training = Training(name, OPERATORS)
    with planning_watched() as seconds:
        training.warmed(StepBudget(share=0.5))
    row["planning_s"], row["partition_s"] = seconds

    def by_step(**asked: Any) -> Row:
        budget = StepBudget(**asked)
        training.warmed(budget)
        peak, flops, found = training.measured(budget)
        plan = budget.plan
        return {
            "peak": peak,
            "predicted": plan.predicted_peak,
            "allowed": plan.allowed,
            "floor": plan.floor,
            "flops": flops / forward,
            "same_gradients": all(map(torch.equal, found, wanted)),
        }

    row["steps"] = [
        {"share": share, **by_step(share=share)} for share in task["shares"]
    ]

    for other in others:
        other["step"] = by_step(peak_bytes=other["peak"])
    row["others"] = others
    whole: list[Row] = []
    for step in row["steps"][1:]:
        settings = {"activation_memory_peak_bytes": step["peak"]}
        whole += compare("whole", Training(name, OPERATORS, whole=True), **settings)
        whole[-1]["floor"] = overlay("saved_report").last_plan().peak.floor
    row["whole"] = whole
    return row


def measure_inductor(task: fresh.Task) -> Row:
    StepBudget = overlay("step_budget").StepBudget
    training = Training(task["net"], task["backend"])
    steps = []
    for share in task["shares"]:
        budget = StepBudget(share=share)
        with config.patch(activation_memory_peak_judge=task["judge"]):
            training.warmed(budget)
        peak = training.allocated(budget)
        steps.append(
            {
                "share": share,
                "peak": peak,
                "predicted": budget.plan.predicted_peak,
                "allowed": budget.plan.allowed,
            }
        )
    return {"steps": steps}


@contextmanager
def planning_watched() -> Iterator[list[float]]:
    """CPU seconds of planning, and of upstream's partition of the same graphs."""
    module = overlay("step_budget")
    theirs = untouched_partitioners().min_cut_rematerialization_partition
    found = [0.0, 0.0]

    def timed(at: int, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # A collection that happens to fall into it takes longer than planning.
            gc.collect()
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                found[at] += time.process_time() - start

        return call

    def both(
        graph: Any, joint: Any, info: Any, budget: float, outputs: int, fused: bool
    ) -> None:
        parent = joint.owning_module
        split = timed(1, theirs)
        with config.patch(
            activation_memory_budget=0.5, activation_memory_budget_solver="dp"
        ):
            split(copy.deepcopy(parent), [], num_fwd_outputs=outputs)
        find(graph, joint, info, budget, outputs, fused)

    find = timed(0, module._Graph._find_plans)
    plan = timed(0, module.StepBudget._make_plan)
    with (
        mock.patch.object(module._Graph, "_find_plans", both),
        mock.patch.object(module.StepBudget, "_make_plan", plan),
    ):
        yield found


# -------------------------------------------------------------------- marks


def worst(values: Sequence[tuple[float, str]]) -> tuple[float, str]:
    return max(values) if values else (0.0, "nothing measured")


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    good = [row for row in rows if "error" not in row and "others" in row]
    steps = [
        (f"{row['net']}, {step['share']:g}", step)
        for row in good
        for step in row["steps"]
    ]
    steps += [
        (f"{row['net']}, as {other['kind']}", other["step"])
        for row in good
        for other in row["others"]
        if other["step"]["allowed"] >= other["step"]["floor"]
    ]

    def mark(
        what: str,
        values: Sequence[tuple[float, str]],
        most: float,
        enforced: bool = True,
    ) -> Mark:
        value, where = worst(values)
        shown = f"{value:.4f} ({where})"
        return Mark(what, shown, f"at most {most:g}", value <= most, enforced)

    yield mark(
        f"peak / allowed, {len(steps)} plans of {len(good)} nets",
        [(step["peak"] / step["allowed"], where) for where, step in steps],
        1.005,
    )
    yield mark(
        "predicted / measured, off by",
        [(abs(step["predicted"] / step["peak"] - 1), where) for where, step in steps],
        0.01,
        False,
    )
    yield mark(
        "peak at a share / at the next larger",
        [
            (small["peak"] / large["peak"], f"{row['net']}, {small['share']:g}")
            for row in good
            for large, small in zip(row["steps"], row["steps"][1:])
        ],
        1.0,
    )
    yield mark(
        "floor / the floor of the whole graph",
        [
            (row["steps"][0]["floor"] / row["whole"][0]["floor"], row["net"])
            for row in good
            if row["whole"]
        ],
        1.05,
        False,
    )
    yield mark(
        "flops / the whole graph's at the same peak",
        [
            (step["flops"] / whole["flops"], f"{row['net']}, {step['share']:g}")
            for row in good
            for step, whole in zip(row["steps"][1:], row["whole"])
            if whole["peak"] <= 1.001 * step["peak"]
        ],
        1.03,
        False,
    )
    for kind, name in (
        ("saved", "each block's budget of saved bytes"),
        ("checkpoint", "a checkpoint around each block"),
    ):
        yield mark(
            f"flops / those of {name}, at the same peak",
            [
                (other["step"]["flops"] / other["flops"], row["net"])
                for row in good
                for other in row["others"]
                if other["kind"] == kind
            ],
            1.0,
            False,
        )
    yield mark(
        "planning, all graphs / upstream's partition of them",
        [(row["planning_s"] / row["partition_s"], row["net"]) for row in good],
        1.0,
        False,
    )
    different = [where for where, step in steps if not step["same_gradients"]]
    shown = ", ".join(different) or "all"
    yield Mark("gradients bit for bit those of budget 1", shown, "all", not different)
    for judge, by in zip(JUDGED, ("by estimates", "by its schedules")):
        kernels = [
            (f"{row['net']}, {step['share']:g}", step)
            for row in rows
            if row.get("judge") == judge and "error" not in row
            for step in row["steps"]
        ]
        if kernels:
            over = worst([(s["peak"] / s["allowed"], where) for where, s in kernels])
            apart = [abs(s["predicted"] / s["peak"] - 1) for _, s in kernels]
            shown = (
                f"{over[0]:.3f} ({over[1]}); {sum(each <= 0.05 for each in apart)} of "
                f"{len(apart)} predictions within 5 %, the worst off by {max(apart):.1%}"
            )
            yield Mark(f"inductor on CPU, {by}: peak / allowed", shown, "", True, False)


def peaks_table(data: dict[str, Any]) -> str:
    lines = []
    for row in data["measured"]:
        if "error" in row or "others" not in row:
            continue
        for step, whole in zip(row["steps"], [None, *row["whole"]]):
            cells = [
                f"{step[key] / 1e6:,.1f}" for key in ("allowed", "predicted", "peak")
            ]
            beside = "-"
            if whole is not None:
                beside = f"{whole['flops']:.3f} ({whole['peak'] / 1e6:,.1f} MB)"
            flops = f"{step['flops']:.3f}"
            lines.append([row["net"], f"{step['share']:g}", *cells, flops, beside])
    heading = ["net", "share", "allowed MB", "predicted MB", "peak MB", "flops"]
    return markdown([*heading, "flops (peak) as one graph"], lines)


HOW = (
    "Saved: upstream's budgets of saved bytes, the same for all blocks, from 0 to 1 at "
    f"every 1/{len(SAVED) - 1}; of these the lowest peak, and where a StepBudget gains "
    "least."
)


def quoted(others: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """What a table shows of the other ways, and its name."""
    saved = [other for other in others if other["kind"] == "saved"]
    if saved:
        least = max(saved, key=lambda other: other["step"]["flops"] / other["flops"])
        for what, other in ("lowest", sweep.lowest(saved)), ("least gain", least):
            yield f"saved {sweep.told(other['budgets'])}, {what}", other
    for other in others:
        if other["kind"] != "saved":
            yield other["kind"], other


def others_table(data: dict[str, Any]) -> str:
    lines = []
    for row in data["measured"]:
        for name, other in quoted(row.get("others", ())):
            step = other["step"]
            lines.append(
                [
                    row["net"],
                    name,
                    f"{other['peak'] / 1e6:,.1f}",
                    f"{other['flops']:.3f}",
                    f"{step['peak'] / 1e6:,.1f}",
                    f"{step['flops']:.3f}",
                ]
            )
    heading = ["net", "each block by itself", "peak MB", "flops"]
    return markdown([*heading, "StepBudget of that peak: peak MB", "flops"], lines)


def summary(data: dict[str, Any]) -> str:
    return table(data["rows"]) + f"\n{measured_on(data['environment'])}"


def page(data: dict[str, Any]) -> str:
    return (
        table(data["rows"])
        + "\nBy share; flops are the whole step's, as a multiple of the forward's:\n\n"
        + peaks_table(data)
        + f"\nAgainst what blocks can do by themselves. {HOW}\n\n"
        + others_table(data)
        + "\nBlocks compiled one by one, fp32, operator by operator. "
        + measured_on(data["environment"])
    )


def plot(data: dict[str, Any], result: Path) -> None:
    """Peak against recomputation, a panel for each net."""
    good = [row for row in data["measured"] if "others" in row]
    columns = 3
    height = 3.2 * math.ceil(len(good) / columns)
    figure = Figure(figsize=(12, height))
    for at, row in enumerate(good):
        axes = figure.add_subplot(math.ceil(len(good) / columns), columns, at + 1)
        for label, points, style in (
            ("StepBudget", row["steps"], "o-"),
            ("as one graph", row["whole"], "x"),
            ("saved bytes of each block", row["others"][:-1], "s--"),
            ("checkpoint each block", row["others"][-1:], "^"),
        ):
            xs = [point["peak"] / 1e6 for point in points]
            axes.plot(xs, [point["flops"] for point in points], style, label=label)
        axes.set_title(row["net"], fontsize=10)
        axes.set_xlabel("peak of the step, MB")
        axes.set_ylabel("flops / forward's")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    save(figure, result, data["environment"])


def main() -> int:
    parser = options.parser(__doc__, check="one net, two shares, as CI does")
    named = functools.partial(options.net, own=NETS)
    parser.add_argument("--net", type=named, help="one alone, or module:function")
    parser.add_argument(
        "--inductor", action="store_true", help="only what runs by inductor"
    )
    arguments = parser.parse_args()
    names: Sequence[str] = (CHECKED,) if arguments.check else NETS
    names = (arguments.net,) if arguments.net else names
    shares = CHECKED_SHARES if arguments.check else SHARES
    saved = CHECKED_SAVED if arguments.check else SAVED
    tasks: list[fresh.Task] = []
    failures: list[Row] = []
    if not arguments.inductor:
        plans, failures = swept(__name__, names, saved, LIMITS)
        tasks = [
            {"net": name, "backend": OPERATORS, "shares": shares, "upstream": found}
            for name, found in plans.items()
        ]
    if not arguments.check:
        tasks += [
            {
                "net": name,
                "backend": "inductor",
                "judge": judge,
                "shares": INDUCTOR_SHARES,
            }
            for name in names
            for judge in JUDGED
        ]
    rows = [*without_upstream(fresh.run(__name__, tasks, LIMITS)), *failures]
    if arguments.net or arguments.inductor:
        rows = merged(arguments.json, rows, "net", "backend", "judge")
    marks = list(judged(rows))
    data = {
        "environment": environment(),
        "measured": rows,
        "rows": [mark._asdict() for mark in marks],
    }
    fresh.finish(arguments.json, data, page)
    if arguments.json is not None:
        plot(data, arguments.json)
    return int(failed(marks) or any("error" in row for row in rows))
