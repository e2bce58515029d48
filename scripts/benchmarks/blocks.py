"""A StepBudget at real size: blocks compiled one by one by inductor, for a GPU.

    TORCH_VERSION=2.15.0 scripts/benchmark.sh blocks
    TORCH_VERSION=2.15.0 scripts/benchmark.sh blocks --net llama3-8b-fsdp

Whole training steps run on fake tensors, without a GPU: each block and the loss are
compiled for it up to their kernels, and what inductor's wrappers allocate is followed
together with what runs in eager mode, as `scripts/benchmark.sh schedule` does for one graph.
The last net is trained as torchtitan trains it: FSDP2 over 8 ranks, of which one is
looked at, bf16 where it computes, AdamW, 2 x 8,192 tokens. Beside the budget for the step
stand each block's own budgets of saved bytes, which are upstream's, swept on the untouched
wheel, and checkpoints around each block: full ones, and selective ones that save attention
and every second product.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as config
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn, Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from benchmarks import fresh, models, nets, options, schedule, sweep
from benchmarks.live_bytes import CountedStorages
from benchmarks.marks import failed, Mark, table
from benchmarks.nets import BF16, classic, decoder, Net
from benchmarks.replay import compiled_for, GPUS
from benchmarks.results import (
    environment,
    markdown,
    measured_on,
    merged,
    Row,
    save,
    SIMULATED,
)
from benchmarks.step import HOW, quoted, SAVED, swept, without_upstream
from benchmarks.techniques import chosen_modules, MODULES
from benchmarks.tracing import CountedFlops, overlay


def t5_large() -> tuple[nn.Module, dict[str, Any]]:
    return schedule.t5_large(num_layers=24, dropout_rate=0)


SHARDED = decoder("llama3-8b-fsdp", replace(nets.LLAMA3_8B, batch=2, tokens=8192))
RANKS = 8
# Without dropout: a checkpoint of random operators wants the generator of a real GPU.
NETS: dict[str, Net] = {
    net.name: net
    for net in (
        schedule.NETS["llama-2048-16"],
        classic("gpt2-xl", replace(nets.GPT2_XL, dropout=0.0), 8, BF16),
        models.hugging_face(t5_large, BF16),
        SHARDED,
    )
}
GPU = "h100"
SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.0)
CHECKPOINTS = ("checkpoint", "selective checkpoint")
# How often inductor's schedule is asked, at most.
JUDGED = (0, 8)
LIMITS = fresh.Limits(seconds=3000, gigabytes=14)
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)


# ------------------------------------------------------------ in a fresh process


def every_second_product() -> Any:
    """Contexts of a checkpoint that saves attention and every second product."""
    products = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        is_saved = operator in ATTENTION
        if operator in PRODUCTS:
            again = context.is_recompute
            products[again] += 1
            is_saved = products[again] % 2 == 1
        if is_saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compiled_loss(backend: Any) -> Callable[..., Tensor]:
    """To stand in the place of F.cross_entropy."""
    original = F.cross_entropy
    compiled = torch.compile(original, backend=backend)

    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Tensor:
        # Its graph finds what it calls by name.
        with mock.patch.object(F, original.__name__, original):
            return compiled(*args, **kwargs)

    return loss


class Training:
    """A net of fakes, its blocks and its loss compiled one by one.

    ``kind`` is one of `CHECKPOINTS`, or empty. To be made and run within `on_fakes`.
    """

    def __init__(self, name: str, backend: Any, kind: str = "") -> None:
        torch._dynamo.reset()
        self.mode, self.module, self.inputs = NETS[name].fake()
        if kind:
            context: dict[str, Any] = {}
            if "selective" in kind:
                context["context_fn"] = every_second_product
            inner = chosen_modules(self.module, MODULES)
            apply_activation_checkpointing(
                self.module,
                functools.partial(checkpoint_wrapper, **context),
                lambda part: part in inner,
            )
        blocks = chosen_modules(self.module, MODULES)
        for block in blocks:
            block.compile(backend=backend)
        self.loss = compiled_loss(backend)
        self.optimizer: Any = None
        if name == SHARDED.name:
            mesh = init_device_mesh("cpu", (RANKS,))
            with self.mode:
                self.shard(blocks, mesh)

    def shard(self, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
        dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        wrap = functools.partial(fully_shard, mesh=mesh, mp_policy=dtypes)
        for block in blocks:
            wrap(block)
        last: Any = [self.module.norm, self.module.head]
        wrap(last, reshard_after_forward=False)
        wrap(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters())

    def run(self, budget: Any) -> None:
        with self.mode, mock.patch.object(F, "cross_entropy", self.loss), budget:
            loss: Tensor = self.module(*self.inputs)
            loss.backward()
            del loss
            if self.optimizer is not None:
                self.optimizer.step()
            self.module.zero_grad()

    def measured(self, budget: Any) -> Row:
        """Bytes and flops of a step after one in which what is left is compiled."""
        self.run(budget)
        gc.collect()
        state = self.optimizer.state.values() if self.optimizer is not None else ()
        there = [*self.module.parameters(), *self.module.buffers(), *self.inputs]
        there += [value for values in state for value in values.values()]
        with self.mode, CountedFlops() as flops, CountedStorages(there) as live:
            self.run(budget)
        return {"peak": live.peak, "given": live.given, "flops": flops.flops}


@contextmanager
def on_fakes() -> Iterator[Callable[..., Any]]:
    """Gives what makes a StepBudget for fakes, whose storages are no device's."""
    module = overlay("step_budget")

    def make(**asked: Any) -> Any:
        budget = module.StepBudget(**asked)
        budget.device = torch.device("meta")
        return budget

    with mock.patch.object(module, "_allocated", lambda _: 0):
        yield make


@contextmanager
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(task: fresh.Task) -> Row:
    torch.set_num_threads(1)
    with (
        fake_ranks(),
        compiled_for(GPUS[GPU]) as backend,
        config.patch(enable_autograd_cache=False),
    ):
        if "saved" in task:
            return measure_upstream(task, backend)
        with (
            on_fakes() as step_budget,
            config.patch(activation_memory_peak_judge=task["judge"]),
        ):
            return measure_steps(task, step_budget, backend)


def measure_upstream(task: fresh.Task, backend: Any) -> Row:
    """Steps in which all blocks have one budget of saved bytes, a row for each plan."""
    graphs: list[sweep.Split] = []

    def measured(budget: float) -> Row:
        with config.patch(activation_memory_budget=budget):
            return Training(task["net"], backend).measured(nullcontext())

    with sweep.noted(graphs):
        measured(1.0)
    return {"plans": sweep.measured(graphs, measured, task["saved"])}


def measure_steps(
    task: fresh.Task, step_budget: Callable[..., Any], backend: Any
) -> Row:
    name = task["net"]
    training = Training(name, backend)

    def by_step(**asked: Any) -> Row:
        budget = step_budget(**asked)
        started = time.perf_counter()
        # The first is recorded, and what it leaves behind may have the second, too.
        training.run(budget)
        training.run(budget)
        row = training.measured(budget)
        plan = budget.plan
        return {
            **row,
            "predicted": plan.predicted_peak,
            "allowed": plan.allowed,
            "floor": plan.floor,
            "seconds": round(time.perf_counter() - started, 1),
        }

    row: Row = {
        "steps": [{"share": share, **by_step(share=share)} for share in task["shares"]]
    }
    others = [{"kind": "saved", **plan} for plan in task["upstream"]]
    for kind in task["checkpoints"]:
        found = Training(name, backend, kind).measured(nullcontext())
        others.append({"kind": kind, **found})
    training = Training(name, backend)
    for other in others:
        other["step"] = by_step(peak_bytes=other["peak"])
    row["others"] = others
    return row


# -------------------------------------------------------------------- marks


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    good = [row for row in rows if "error" not in row]
    for judge, by in zip(JUDGED, ("by estimates", "by its schedules")):
        mine = [row for row in good if row["judge"] == judge]
        steps = [
            (step, f"{row['net']}, {step['share']:g}")
            for row in mine
            for step in row["steps"]
        ]
        steps += [
            (other["step"], f"{row['net']}, as {other['kind']}")
            for row in mine
            for other in row["others"]
            if other["step"]["floor"] <= other["peak"]
        ]
        if not steps:
            continue
        over, where = max((s["peak"] / s["allowed"], where) for s, where in steps)
        yield Mark(
            f"peak / allowed, {by}",
            f"{over:.4f} at most ({where}), {len(steps)} steps",
            "at most 1.005",
            over <= 1.005,
            enforced=False,
        )
        apart = [abs(s["predicted"] / s["peak"] - 1) for s, _ in steps]
        near = sum(each <= 0.05 for each in apart)
        yield Mark(
            f"predictions within 5 %, {by}",
            f"{near} of {len(apart)}; off by {max(apart):.1%} at most",
            "90 % of them",
            near >= 0.9 * len(apart),
            enforced=False,
        )
        rise, where = max(
            (low["peak"] / high["peak"], f"{row['net']}, {low['share']:g}")
            for row in mine
            for high, low in zip(row["steps"], row["steps"][1:])
        )
        yield Mark(
            f"peak at a share / at the next larger, {by}",
            f"{rise:.4f} at most ({where})",
            "at most 1",
            rise <= 1.0005,
            enforced=False,
        )
    beside = [
        (other["step"]["flops"] / other["flops"], f"{row['net']}, {other['kind']}")
        for row in good
        for other in row["others"]
        if other["step"]["peak"] <= 1.005 * other["peak"]
    ]
    if beside:
        most, where = max(beside)
        yield Mark(
            "flops / those of what blocks do by themselves, at no higher peak",
            f"{most:.4f} at most ({where}), {len(beside)} of "
            f"{sum(len(row['others']) for row in good)} comparisons",
            "at most 1",
            most <= 1.0005,
            enforced=False,
        )


# ------------------------------------------------------------------- report


def gibibytes(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.2f}"


def more_flops(step: Row, row: Row) -> float:
    """Beyond those of the plans without a budget."""
    share: float = step["flops"] / row["steps"][0]["flops"] - 1
    return share


def steps_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        by = "schedules" if row["judge"] else "estimates"
        for step in row["steps"]:
            sizes = [gibibytes(step[key]) for key in ("allowed", "predicted", "peak")]
            more = f"{more_flops(step, row):.1%}"
            seconds = f"{step['seconds']:,.0f}"
            lines.append([row["net"], by, f"{step['share']:g}", *sizes, more, seconds])
    heading = ["net", "by", "share", "allowed GiB", "predicted", "peak", "more flops"]
    return markdown([*heading, "four steps, s"], lines)


def others_table(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["net"],
            name,
            gibibytes(other["peak"] + other["given"]),
            gibibytes(other["peak"]),
            f"{more_flops(other, row):.1%}",
            gibibytes(other["step"]["peak"]),
            f"{more_flops(other['step'], row):.1%}",
        ]
        for row in rows
        for name, other in quoted(row["others"])
    ]
    heading = ["net", "each block by itself", "in all GiB", "peak", "more flops"]
    return markdown([*heading, "StepBudget of that peak: peak", "more flops"], lines)


def page(data: dict[str, Any]) -> str:
    rows = [row for row in data["measured"] if "error" not in row]
    return (
        table([mark._asdict() for mark in judged(rows)])
        + f"\nBlocks compiled one by one, inductor's schedules for {GPUS[GPU].name}; peaks "
        "are beyond what is there when a step starts, and flops beyond those at share "
        "1:\n\n"
        + steps_table(rows)
        + f"\nAgainst what blocks do by themselves. {HOW}\n\n"
        + others_table([row for row in rows if row["others"]])
        + "\n"
        + measured_on(data["environment"], SIMULATED)
    )


def plot(data: dict[str, Any], result: Path) -> None:
    """Peak against recomputation, a panel for each net."""
    good = [row for row in data["measured"] if row.get("others")]
    figure = Figure(figsize=(10, 7))
    for at, row in enumerate(good):
        axes = figure.add_subplot(2, 2, at + 1)
        others = row["others"]
        for label, points, style in (
            ("StepBudget", row["steps"], "o-"),
            (
                "saved bytes of each block",
                [o for o in others if o["kind"] not in CHECKPOINTS],
                "s--",
            ),
            *(
                (f"{kind} each block", [o for o in others if o["kind"] == kind], mark)
                for kind, mark in zip(CHECKPOINTS, "^v")
            ),
        ):
            given = others[0]["given"]
            xs = [(point["peak"] + given) / 2**30 for point in points]
            ys = [100 * more_flops(point, row) for point in points]
            axes.plot(xs, ys, style, label=label)
        axes.set_title(row["net"], fontsize=10)
        axes.set_xlabel("peak of the step in all, GiB")
        axes.set_ylabel("more flops, %")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    save(figure, result, data["environment"], SIMULATED)


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--net", choices=NETS, nargs="+", help="these alone")
    arguments = parser.parse_args()
    options.need_cuda(parser)
    plans, failures = swept(__name__, arguments.net or [*NETS], SAVED, LIMITS)
    tasks: list[fresh.Task] = [
        {
            "net": name,
            "judge": judge,
            "shares": SHARES,
            "upstream": found if judge else (),
            "checkpoints": CHECKPOINTS if judge else (),
        }
        for name, found in plans.items()
        for judge in JUDGED
    ]
    rows = [*without_upstream(fresh.run(__name__, tasks, LIMITS)), *failures]
    if arguments.net:
        rows = merged(arguments.json, rows, "net", "judge")
    data = {"environment": environment(), "measured": rows}
    fresh.finish(arguments.json, data, page)
    if arguments.json:
        plot(data, arguments.json)
    marks = list(judged(rows))
    return int(failed(marks) or any("error" in row for row in rows))
