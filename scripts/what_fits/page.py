"""What a way to train a model holds and takes with one batch, and what is printed of it.

A task, which is measured in a process of its own, has a ``batch``, a ``length``, what the
command was ``_asked``, and a ``way``:

    upstream    the untouched wheel, by budgets of saved bytes; the first is none at all
    checkpoint, saving products     of each block, see `plans`
    this set    by shares of the way from the lowest peak to that, and by ``memory``

Each step of its row is of a plan: ``given`` bytes are there when a step starts
(parameters, inputs, what the optimizer keeps), and ``peak`` more are live at once while it
runs, gradients and the optimizer's own steps included. Tensors are fakes.
"""

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import torch
from benchmarks import catalogue, fresh, nets, plans
from benchmarks.pages import columns, good, measured_on, Row, SIMULATED
from benchmarks.replay import GPUS
from benchmarks.tracing import overlay
from benchmarks.ways import Training


UPSTREAM, OURS = "upstream", "this set"
# Of each block, which save nothing, or attention and every second product.
CHECKPOINTS = {"checkpoint": False, "saving products": True}
BUDGETS = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.0)
SHARES = (1.0, 0.5, 0.2, 0.1, 0.0)
# What is not counted, as a share of the memory.
LEAVE = 0.1
NOTES = (
    "Peaks with all that is fixed: parameters, inputs, what the optimizer keeps; gradients "
    "are in the peaks. This set's by share of the way from the floor to no budget, with "
    "flops beyond those of no budget / on a GPU, time likewise, of its roofline. "
    f"Upstream's: {len(BUDGETS)} budgets from 1 to 0 were tried; with dropout, those below 1 "
    "may give wrong gradients, as its masks are drawn again. Not counted: fragmentation, "
    "workspaces of kernels and of communication, and the driver's own memory."
)
GRAPH = """\
import torch._functorch.config as fconfig

fconfig.activation_memory_peak_bytes = {}
model = torch.compile(model)
"""
BLOCKS = """\
from torch._functorch.memory_planner import StepBudget

for block in blocks:
    block.compile()
{}budget = StepBudget(device_bytes={})
for batch in data:
    with budget:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LOSS = "# And the loss: torch.compile(F.cross_entropy)\n"


def net_of(task: fresh.Task) -> nets.Net:
    """ValueError says what is wrong with the model, its batch or its blocks."""
    asked = task["_asked"]
    sizes = [task[size] for size in ("batch", "length") if task[size] is not None]
    net = catalogue.find(asked["model"], *sizes, **dict(asked["config"]))
    dtype = getattr(torch, asked["dtype"])
    return replace(net, dtype=dtype, blocks=asked["blocks"] or net.blocks)


def prepared(asked: Row, training: Training) -> Training:
    """With its optimizer, and sharded, where it is to be."""
    if asked["fsdp"]:
        training = plans.sharded(training)
    # As torch chooses where parameters are on a GPU.
    options = {"foreach": True} if asked["gpu"] and not asked["fsdp"] else {}
    make = getattr(torch.optim, asked["optimizer"])
    training.optimizer = make(training.parameters, lr=1e-3, **options)
    return training


def measure(task: fresh.Task) -> Row:
    return {"steps": steps_of(task)}


def steps_of(task: fresh.Task, of: type[plans.Plans] = plans.Plans) -> list[Row]:
    """Of plans on fake tensors, or of another kind with values."""
    asked = task["_asked"]
    device, in_blocks = asked["gpu"] or plans.RUN, asked["blocks"] is not None
    with ExitStack() as stack:
        if asked["fsdp"]:
            stack.enter_context(plans.fake_ranks(asked["fsdp"]))
        backend = stack.enter_context(plans.backend_of(device))
        if asked["compile_loss"]:
            stack.enter_context(plans.compiled_loss(backend))
        prepare = functools.partial(prepared, asked)
        is_fake = of is plans.Plans
        found = of(net_of(task), device, backend, is_fake, prepare)
        if task["way"] in CHECKPOINTS:
            return [found.checkpointed(CHECKPOINTS[task["way"]])]
        if task["way"] == UPSTREAM:
            return found.upstreams(BUDGETS, in_blocks)
        kind = "blocks" if in_blocks else "graph"
        steps = [*found.asked(kind, [{"share": share} for share in SHARES])]
        left = (asked["memory"] or 0) - steps[0]["given"]
        if left > 0:
            steps += found.asked(kind, [{"peak_bytes": left}])
        return steps


# ------------------------------------------------------------------- report


def format_bytes(nbytes: int) -> str:
    text: str = overlay("memory_planner.report.saved_values").format_bytes(nbytes)
    return text


@dataclass(frozen=True)
class Size:
    """The plans for a batch, or a length; the first of upstream's is that of no budget."""

    name: int
    upstream: list[Row]
    ours: list[Row]
    memory: Optional[int]

    @property
    def base(self) -> Row:
        return self.upstream[0]

    @property
    def by_memory(self) -> list[Row]:
        """What the lines to paste ask for, if the memory is more than what is fixed."""
        return [step for step in self.ours if "peak_bytes" in step]

    def within(self, steps: Sequence[Row]) -> Optional[Row]:
        """The cheapest of those that fit into the memory; no budget, where that fits."""

        def cost(step: Row) -> float:
            found: float = step["seconds" if "seconds" in step else "flops"]
            return found

        fit = [s for s in (self.base, *steps) if total(s) <= (self.memory or 0)]
        return min(fit, key=cost, default=None)

    def cost(self, step: Optional[Row]) -> str:
        """Flops, and time, beyond those of a step without a budget."""
        if step is None:
            return "does not fit"
        entries = [entry for entry in ("flops", "seconds") if entry in step]
        more = " / ".join(f"{step[e] / self.base[e] - 1:+.1%}" for e in entries)
        return more


def total(step: Row) -> int:
    nbytes: int = step["given"] + step["peak"]
    return nbytes


def lowest(steps: Sequence[Row]) -> Row:
    return min(steps, key=total)


def sizes_of(data: dict[str, Any]) -> tuple[str, list[Size]]:
    """What varies, and those that have been measured both ways."""
    rows, asked = good(data["measured"]), data["asked"]
    what = "length" if len(asked["length"] or ()) > 1 else "batch"
    found: dict[int, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row[what] or 1, {})[row["way"]] = row
    return what, [
        Size(name, ways[UPSTREAM]["steps"], ways[OURS]["steps"], asked["memory"])
        for name, ways in found.items()
        if len(ways) == 2
    ]


def page(data: dict[str, Any]) -> str:
    asked = data["asked"]
    what, sizes = sizes_of(data)
    if not sizes:
        return "Nothing could be measured.\n"
    memory = asked["memory"]
    into = f" into {format_bytes(memory)}" if memory else ""
    text = f"# {asked['model']}: what fits{into}\n\n{view(asked)}.\n\n"
    text += summary(what, sizes) + "\n"
    text += largest(what, sizes) if memory else ""
    text += curve(what, sizes) + "\n" + NOTES
    if memory:
        left = format_bytes(int(LEAVE * memory))
        text += f" Leave {left} free for them: pass that much less as --memory."
        text += paste(asked, sizes)
    return text + "\n\n" + measured_on(data["environment"], SIMULATED)


def view(asked: dict[str, Any]) -> str:
    text = "Counted operator by operator, without inductor's fusion"
    if asked["gpu"]:
        text = f"Counted for inductor's schedule for {GPUS[asked['gpu']].name}"
    text += "; blocks by themselves" if asked["blocks"] else "; the model as one graph"
    if asked["fsdp"]:
        text += f", sharded over {asked['fsdp']} GPUs, of which this is one"
    return f"{text}; {asked['optimizer']}, {asked['dtype']}"


def summary(what: str, sizes: Sequence[Size]) -> str:
    def least(size: Size) -> str:
        step = lowest(size.upstream)
        return f"{format_bytes(total(step))} at {step['budget']:g}"

    cells: dict[str, Any] = {
        what: lambda size: f"{size.name}",
        "fixed": lambda size: format_bytes(size.base["given"]),
        "no budget": lambda size: format_bytes(total(size.base)),
        "upstream's lowest": least,
        "floor": lambda size: format_bytes(total(lowest(size.ours))),
    }
    if sizes[0].memory:
        cells["upstream's, to fit"] = lambda s: s.cost(s.within(s.upstream))
        cells["this set's, to fit"] = lambda s: s.cost(s.within(s.by_memory))
    return columns(sizes, cells)


def largest(what: str, sizes: Sequence[Size]) -> str:
    def most(name: str, steps: Any) -> str:
        best = "none"
        for size in sizes:
            best = f"{size.name}" if size.within(steps(size)) else best
        return f"{name} {best}"

    found = (
        most("without a budget", lambda size: size.upstream[:1]),
        most("with upstream's budgets", lambda size: size.upstream),
        most("with this set", lambda size: size.by_memory),
    )
    return f"Largest {what} that fits, of those asked: {', '.join(found)}.\n\n"


def curve(what: str, sizes: Sequence[Size]) -> str:
    """This set's plans by their share of the way from the floor to no budget."""
    cells: dict[str, Any] = {what: lambda size: f"{size.name}"}

    def at(share: float) -> Any:
        def cell(size: Size) -> str:
            (step,) = (s for s in size.ours if s.get("share") == share)
            return f"{format_bytes(total(step))}, {size.cost(step)}"

        return cell

    shares = [s["share"] for s in sizes[0].ours if "share" in s]
    cells.update({f"{share:g}": at(share) for share in shares})
    return columns(sizes, cells)


def plot(data: dict[str, Any], result: Path) -> None:
    """Memory over the batch, or the length; written beside ``result``."""
    from matplotlib.figure import Figure

    asked = data["asked"]
    what, sizes = sizes_of(data)
    if not sizes:
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    names = [size.name for size in sizes]
    for label, style, steps in (
        ("no budget", "C1s-", [size.base for size in sizes]),
        ("upstream's lowest", "C2x-", [lowest(size.upstream) for size in sizes]),
        ("this set's floor", "C0o-", [lowest(size.ours) for size in sizes]),
    ):
        axes.plot(names, [total(step) / 2**30 for step in steps], style, label=label)
    fixed = [size.base["given"] / 2**30 for size in sizes]
    axes.plot(names, fixed, "k:", label="fixed")
    if asked["memory"]:
        axes.axhline(asked["memory"] / 2**30, color="r", ls="--", label="memory")
    title = f"{asked['model']}, {asked['gpu'] or plans.RUN}"
    axes.set(title=title, xlabel=what, ylabel="GiB", ylim=(0, None))
    axes.legend()
    figure.savefig(result.with_suffix(".svg"))


def paste(asked: dict[str, Any], sizes: Sequence[Size]) -> str:
    """The lines for the largest that fits."""
    fit = [size for size in sizes if size.within(size.by_memory)]
    if not fit:
        return ""
    left = asked["memory"] - fit[-1].base["given"]
    code = GRAPH.format(left)
    if asked["blocks"]:
        code = BLOCKS.format(LOSS * asked["compile_loss"], asked["memory"])
    name = fit[-1].name
    return f"\n\nWith the set installed, for {name}:\n\n```python\n{code}```\n"
