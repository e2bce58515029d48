"""What a way to train a model holds and takes with one batch, and what is printed of it.

A task has a ``batch``, a ``length``, what the command was ``_asked``, and a ``way``:

    no budget   torch.compile alone
    this set    by shares of the way from the lowest peak to that, and by ``memory``
    upstream    the untouched wheel, by budgets of saved bytes; the first is none at all
    checkpoint, saving products     of each block, see `plans`

Each step of its row is of a plan: ``given`` bytes are there when a step starts
(parameters, optimizer, inputs, of which it has the ``parts``), and ``peak`` more are live
at once while it runs, gradients and the optimizer's own steps included. Tensors are fakes.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from benchmarks import catalogue, fresh, nets, plans
from benchmarks.pages import columns, good, measured_on, Row, SIMULATED
from benchmarks.replay import GPUS
from benchmarks.tracing import overlay
from benchmarks.ways import Training
from torch import Tensor
from torch.nn.modules.conv import _ConvNd


PLAIN, OURS, UPSTREAM = "no budget", "this set", "upstream"
# Of each block, which save nothing, or attention and every second product.
CHECKPOINTS = {"checkpoint": False, "saving products": True}
BUDGETS = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.0)
SHARES = (1.0, 0.5, 0.2, 0.1, 0.0)
FLOPS = {
    False: "flops beyond those of no budget",
    True: "flops / time of the roofline beyond those of no budget",
}
NOTES = (
    "Fixed are parameters, inputs and what the optimizer keeps; gradients are in the peaks. "
    "The second table has this set's plans by their share of the way from the floor to the "
    "fastest: bytes, {}. Not counted: fragmentation, workspaces of kernels and of "
    "communication, and the driver's own memory."
)
UNFUSED = (
    " No card was named: these are a CPU's operators without fusion. Kernels on a GPU hold "
    "less, or now and then more: name yours by --gpu."
)
COMPARED = (
    " Upstream's: {} budgets from 1 to 0 were tried; with dropout, those below 1 may give "
    "wrong gradients, as its masks are drawn again."
)
CONVOLVES = (
    " The model has convolutions: their workspaces can be large (on a CPU, half of a "
    "ConvNeXt's peak again), so try a larger --headroom."
)
GRAPH = """\
import torch._functorch.config as fconfig

# {}, of which {} are fixed.
fconfig.activation_memory_peak_bytes = {}
model = torch.compile(model)
"""
BLOCKS = """\
from torch._functorch.memory_planner import StepBudget

for block in blocks:
    block.compile()
{}# {}.
budget = StepBudget(device_bytes={})
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


def parts(training: Training) -> dict[str, int]:
    """Bytes of parameters and buffers, and of inputs, on the GPU that is looked at."""

    def held(tensors: Sequence[Tensor]) -> int:
        local = [
            each.to_local() if hasattr(each, "to_local") else each for each in tensors
        ]
        storages = [each.untyped_storage() for each in local]
        return sum({each._cdata: each.nbytes() for each in storages}.values())

    module = training.module
    of_model = [*training.parameters, *module.buffers()]
    return {"parameters": held(of_model), "inputs": held(training.inputs)}


def usable(asked: Row) -> int:
    """The memory without its headroom; 0 where none is named."""
    memory: int = asked["memory"] or 0
    room = asked["headroom"]
    return memory - int(room if isinstance(room, int) else room * memory)


def measure(task: fresh.Task) -> Row:
    return {"steps": steps_of(task)}


def steps_of(task: fresh.Task, of: type[plans.Plans] = plans.Plans) -> list[Row]:
    return [*plans_of(task, of)]


def plans_of(task: fresh.Task, of: type[plans.Plans] = plans.Plans) -> Iterator[Row]:
    """Of plans on fake tensors, or of another kind with values."""
    asked, way = task["_asked"], task["way"]
    device, in_blocks = asked["gpu"] or plans.RUN, asked["blocks"] is not None
    made: Row = {}

    def prepare(training: Training) -> Training:
        training = prepared(asked, training)
        if not made:
            module = training.module
            made["convolves"] = any(isinstance(m, _ConvNd) for m in module.modules())
            made["loss"] = getattr(getattr(module, "find", None), "__doc__", None)
            made["parts"] = parts(training)
        return training

    with ExitStack() as stack:
        if asked["fsdp"]:
            stack.enter_context(plans.fake_ranks(asked["fsdp"]))
        backend = stack.enter_context(plans.backend_of(device))
        if asked["compile_loss"]:
            stack.enter_context(plans.compiled_loss(backend))
        found = of(net_of(task), device, backend, of is plans.Plans, prepare)
        if way in CHECKPOINTS:
            yield found.checkpointed(CHECKPOINTS[way])
        elif way == UPSTREAM:
            yield from found.upstreams(BUDGETS, in_blocks)
        elif way == PLAIN:
            (step,) = found.upstreams([1.0], in_blocks)
            yield {**step, **made}
        else:
            yield from within_the_set(found, in_blocks, usable(asked))


def within_the_set(found: plans.Plans, in_blocks: bool, memory: int) -> Iterator[Row]:
    kind = "blocks" if in_blocks else "graph"
    given = 0
    for step in found.asked(kind, [{"share": share} for share in SHARES]):
        given = given or step["given"]
        yield step
    if memory > given:
        yield from found.asked(kind, [{"peak_bytes": memory - given}])


# ------------------------------------------------------------------- report


def format_bytes(nbytes: int) -> str:
    text: str = overlay("memory_planner.report.saved_values").format_bytes(nbytes)
    return text


@dataclass(frozen=True)
class Size:
    """The plans for a batch, or a length; upstream's where they were asked for."""

    name: int
    base: Row
    ours: list[Row]
    upstream: list[Row]
    # Without headroom.
    memory: int

    @property
    def by_memory(self) -> list[Row]:
        """What the lines to paste ask for, if the memory is more than what is fixed."""
        return [step for step in self.ours if "peak_bytes" in step]

    def within(self, steps: Sequence[Row]) -> Optional[Row]:
        """The cheapest of those that fit into the memory; no budget, where that fits."""

        def cost(step: Row) -> float:
            found: float = step["seconds" if "seconds" in step else "flops"]
            return found

        fit = [s for s in (self.base, *steps) if total(s) <= self.memory]
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
        Size(
            name,
            ways[PLAIN]["steps"][0],
            ways[OURS]["steps"],
            ways[UPSTREAM]["steps"] if UPSTREAM in ways else [],
            usable(asked),
        )
        for name, ways in found.items()
        if {PLAIN, OURS} <= {*ways}
    ]


def page(data: dict[str, Any]) -> str:
    asked = data["asked"]
    what, sizes = sizes_of(data)
    lacking = "".join(
        f"\nNot measured, {what} {row[what] or 1}, {row['way']}: {row['error']}\n"
        for row in data["measured"]
        if "error" in row
    )
    if not sizes:
        return f"Nothing could be measured.\n{lacking}{hint(asked)}"
    memory = asked["memory"]
    into = f" into {format_bytes(memory)}" if memory else ""
    text = f"# {asked['model']}: what fits{into}\n\n{view(asked)}.\n\n"
    first = sizes[0].base
    if first.get("loss"):
        text += f"The loss is {lowered(first['loss'])}\n\n"
    if memory:
        text += f"{leaves(asked)}.\n\n"
    text += summary(what, sizes) + "\n"
    text += largest(what, sizes) if memory else ""
    text += curve(what, sizes) + lacking + "\n"
    text += NOTES.format(FLOPS["seconds" in first])
    if first["convolves"]:
        text += CONVOLVES
    if not asked["gpu"]:
        text += UNFUSED
    if asked["compare"]:
        text += COMPARED.format(len(BUDGETS))
    if memory:
        text += paste(asked, sizes)
    return text + "\n\n" + measured_on(data["environment"], SIMULATED)


def lowered(text: str) -> str:
    first: str = text.partition("\n")[0]
    return first[0].lower() + first[1:]


def hint(asked: Row) -> str:
    """The way on where the model is no graph."""
    if asked["blocks"] is not None:
        return ""
    return "\nWhere a model cannot be one graph, --blocks compiles its blocks alone.\n"


def leaves(asked: Row) -> str:
    """What is free for what is not counted, and what that leaves."""
    room, left = asked["headroom"], usable(asked)
    share = format_bytes(room) if isinstance(room, int) else f"{100 * room:.3g} %"
    memory = format_bytes(asked["memory"])
    return (
        f"{share} of {memory} is left free for workspaces and fragmentation "
        f"(--headroom), so what fits is at most {format_bytes(left)}"
    )


def view(asked: dict[str, Any]) -> str:
    text = "Counted operator by operator, without inductor's fusion"
    if asked["gpu"]:
        text = f"Counted for inductor's schedule for {GPUS[asked['gpu']].name}"
    text += (
        "; blocks by themselves"
        if asked["blocks"] is not None
        else "; the model as one graph"
    )
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
        "floor": lambda size: format_bytes(total(lowest(size.ours))),
    }
    compared = all(size.upstream for size in sizes)
    if compared:
        cells["upstream's lowest"] = least
    if sizes[0].memory:
        cells["this set's, to fit"] = lambda s: s.cost(s.within(s.by_memory))
        if compared:
            cells["upstream's, to fit"] = lambda s: s.cost(s.within(s.upstream))
    return columns(sizes, cells)


def largest(what: str, sizes: Sequence[Size]) -> str:
    def most(name: str, steps: Any) -> str:
        best = "none"
        for size in sizes:
            best = f"{size.name}" if size.within(steps(size)) else best
        return f"{name} {best}"

    found = [
        most("without a budget", lambda size: ()),
        most("with this set", lambda size: size.by_memory),
    ]
    if all(size.upstream for size in sizes):
        found.append(most("with upstream's budgets", lambda size: size.upstream))
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


def paste(asked: dict[str, Any], sizes: Sequence[Size]) -> str:
    """The lines for the largest that fits, which leave the headroom free."""
    fit = [size for size in sizes if size.within(size.by_memory)]
    if not fit:
        return ""
    left, given = usable(asked), fit[-1].base["given"]
    code = GRAPH.format(told(asked), format_bytes(given), left - given)
    if asked["blocks"] is not None:
        code = BLOCKS.format(LOSS * asked["compile_loss"], told(asked), left)
    name = fit[-1].name
    return f"\n\nWith the set installed, for {name}:\n\n```python\n{code}```\n"


def told(asked: Row) -> str:
    """The usable bytes, in words for a comment."""
    return (
        f"{format_bytes(usable(asked))}: {format_bytes(asked['memory'])} less headroom"
    )
