"""Plans of nets: what each holds at its peak and what it takes, run or only scheduled.

A row is of a net, a device and a kind of plans; its ``steps`` are what was found of each
plan. On the device ``operators`` steps run on a CPU, operator by operator. On the others,
``cpu`` and those of `GPUS`, inductor compiles forward and backward of fake tensors up to
their kernels, and what its wrappers allocate is followed; no kernel runs. They do on those
of `DEVICES`, whose allocators are asked. Peaks are bytes beyond parameters, inputs and what
else is there when a step starts.

    upstream                a graph by budgets of saved bytes, on the untouched wheel
    saved                   the same of each block, by itself
    eager                   none
    checkpoint              around each block; a selective one saves attention and every
                            second product
    graph                   a graph by target "peak"
    blocks                  by a StepBudget, each block by itself
    held                    likewise, at the peaks of other ways
    bytes                   a graph, at those peaks of ``upstream`` where no budget of
                            ``graph`` is as cheap
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from benchmarks import catalogue, fresh, nets
from benchmarks.architectures import Transformer
from benchmarks.meters import (
    compile_seconds,
    device_peak,
    gradients,
    random_operators,
    relative_error,
    TOLERANCE,
)
from benchmarks.pages import good, Row
from benchmarks.replay import compiled_for, GPUS, replay
from benchmarks.tracing import cpu_attention_counted, overlay
from benchmarks.ways import (
    blocks_of,
    budgeted,
    checkpointed,
    compiled,
    OPERATORS,
    Training,
)


RUN = "operators"
# Where inductor's kernels run.
DEVICES = {"inductor": "cpu", "cuda": "cuda"}
RUNS = 7
ON_THE_WHEEL = ("upstream", "saved")
CHECKPOINTS = ("checkpoint", "selective checkpoint")
IN_BLOCKS = ("saved", *CHECKPOINTS, "blocks", "held")
# Whose peaks they are held to.
HELD = ("saved", *CHECKPOINTS)
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)

# Of how many other plans the peaks are asked for.
MOST_HELD = 4
# Upstream's budgets.
SWEEP = tuple(n / 32 for n in range(32, -1, -1))
# Gradients of the same operators differ by less.
SAME = 1e-5


def tasks(
    net: str,
    kinds: Mapping[str, Sequence[float]],
    device: str,
    rows: Iterable[Row] = (),
) -> Iterator[fresh.Task]:
    """All kinds of a net; ``rows`` are those found so far, for what is held to them."""
    for kind, budgets in kinds.items():
        wheel = fresh.UNTOUCHED if kind in ON_THE_WHEEL else "patched"
        task: fresh.Task = {"net": net, "kind": kind, "device": device}
        task.update(torch=wheel, budgets=budgets)
        if kind == "held":
            others = good(rows, net=net, device=device)
            task["_steps"] = thinned(
                {"peak": step["peak"]}
                for row in others
                if row["kind"] in HELD
                for step in right(row["steps"])
            )
        yield task


def thinned(steps: Iterable[Row]) -> list[Row]:
    """At most `MOST_HELD` of them, evenly by their peaks, with the lowest and highest."""
    in_order = sorted(steps, key=lambda step: step["peak"], reverse=True)
    last, most = len(in_order) - 1, min(MOST_HELD, len(in_order)) - 1
    return [in_order[at * last // max(most, 1)] for at in range(most + 1)]


# -------------------------------------------------------------- in a process


def measure(
    task: fresh.Task, prepare: Callable[[Training], Training] = lambda it: it
) -> Row:
    kind, device, budgets = task["kind"], task["device"], task["budgets"]
    gpu, net = GPUS.get(device), catalogue.find(task["net"])
    # Fakes tell the bytes and flops of upstream's plans, but not if random numbers that are
    # drawn again make gradients wrong.
    fake = device not in (RUN, *DEVICES)
    if device == RUN and kind in ON_THE_WHEEL:
        fake = not random_operators(*net.fake())
    if gpu is None and device != "cuda":
        net = replace(net, dtype=torch.float32)
    with backend_of(device) as backend, ExitStack() as stack:
        if device not in (RUN, *DEVICES) and kind in IN_BLOCKS:
            stack.enter_context(compiled_loss(backend))
        plans = Plans(net, device, backend, fake, prepare)
        if kind == "eager":
            steps = [plans.measured(plans.training())]
        elif kind in ON_THE_WHEEL:
            steps = plans.upstreams(budgets, kind == "saved")
        elif kind in CHECKPOINTS:
            steps = [plans.checkpointed(" " in kind)] if has_blocks(net) else []
        elif kind == "graph":
            steps = [plans.by_peak(budget) for budget in budgets]
        elif kind == "bytes":
            held = task["_steps"]
            steps = [{**asked, **plans.within(asked["peak"])} for asked in held]
        elif kind == "held":
            asked = [{"peak_bytes": step["peak"]} for step in task["_steps"]]
            steps = [*plans.asked(kind, asked)]
        else:
            steps = [*plans.asked(kind, [{"share": share} for share in budgets])]
    return {"steps": steps}


@contextmanager
def backend_of(device: str) -> Iterator[Any]:
    """What compiles for a device."""
    gpu = GPUS.get(device)
    if device in DEVICES:
        yield "inductor"
        return
    with ExitStack() as stack:
        stack.enter_context(config.patch(enable_autograd_cache=False))
        if gpu is None:
            stack.enter_context(cpu_attention_counted())
        yield OPERATORS if device == RUN else stack.enter_context(compiled_for(gpu))


@dataclass
class Plans:
    """A net's plans on a device: what each holds and takes.

    Gradients of those that run with values are compared with the ``first`` one's.
    """

    net: nets.Net
    device: str
    backend: Any
    fake: bool
    prepare: Callable[[Training], Training] = lambda it: it
    first: list[Tensor] = field(default_factory=list)

    def training(self, **ways: Any) -> Training:
        device = DEVICES.get(self.device, "cpu")
        training = Training(self.net, fake=self.fake, device=device, **ways)
        return self.prepare(training)

    def graph(self) -> Training:
        return self.training(whole=compiled(self.backend, fullgraph=True))

    def measured(self, training: Training, steps: int = 1) -> Row:
        """A plan that so many steps compile, and whether it is said to be over.

        Its time is that of the CPU, with the compilers that are started.
        """
        name, lower = "_compile_to_module", GraphLowering._compile_to_module
        lowered = mock.patch.object(
            GraphLowering, name, autospec=True, side_effect=lower
        )
        # A backward that waits is copied, and constants cannot be among fakes.
        at_once = config.patch(force_non_lazy_backward_lowering=self.fake)
        with warnings_noted() as said, lowered as codes, at_once:
            seconds = compile_seconds(lambda: training.warmed(steps))
        row = self.found(training)
        row["warned"] = any("allowed" in text for text in said)
        # Of each plan of a graph, a forward and a backward.
        return {**row, "compile_s": seconds, "lowered": codes.call_count / 2}

    def found(self, training: Training) -> Row:
        """Of one more step, its peak and what it takes."""
        if self.device in DEVICES:
            return self.run(training, DEVICES[self.device])
        if self.device != RUN:
            return replay(training, GPUS.get(self.device))
        step = training.measured()
        row: Row = {"peak": step.own_peak, "given": step.given, "flops": step.flops}
        if not self.fake:
            self.first = self.first or step.gradients
            row["off_budget_1"] = relative_error(step.gradients, self.first)
        return row

    def run(self, training: Training, device: str) -> Row:
        """By inductor's kernels; the time is one thread's of the CPU, or the GPU's."""
        times = [training.seconds(device) for _ in range(RUNS)]
        row: Row = {"peak": device_peak(training.step, device)}
        found = [each.float().cpu() for each in gradients_of(training)]
        self.first = self.first or found
        off = relative_error(found, self.first)
        return {**row, "seconds": median(times), "gradients_off": off}

    def upstreams(self, budgets: Sequence[float], in_blocks: bool) -> list[Row]:
        """By their own budgets; gradients are compared with those of the largest.

        Neighbouring budgets whose plans have the same peak and flops are one step.
        """
        way: Any = compiled(self.backend, fullgraph=not in_blocks)
        ways = {"blocks" if in_blocks else "whole": way}
        found = (self.by_budget(budget, **ways) for budget in budgets)

        def plan(step: Row) -> tuple[Any, ...]:
            return step["peak"], step.get("flops"), bool(right([step]))

        groups = ([*group] for _, group in groupby(found, plan))
        return [{"budgets": [s["budget"] for s in same], **same[0]} for same in groups]

    def by_budget(self, budget: float, **ways: Any) -> Row:
        with budgeted(budget):
            return {"budget": budget, **self.measured(self.training(**ways))}

    def by_peak(self, budget: float) -> Row:
        with budgeted(budget, "peak"):
            row = {"budget": budget, **self.measured(self.graph())}
        return {**row, **bound()}

    def within(self, nbytes: int) -> Row:
        with config.patch(activation_memory_peak_bytes=nbytes):
            row = self.measured(self.graph())
        return {**row, **bound(), "allowed": nbytes}

    def checkpointed(self, is_selective: bool) -> Row:
        """A checkpoint of each block; inductor makes its plan inside the graph."""
        saving = {"context_fn": saving_products} if is_selective else {}
        ways = checkpointed(**saving), compiled(self.backend)
        ways = ways[::-1] if self.device == RUN else ways
        return self.measured(self.training(blocks=ways))

    def asked(self, kind: str, asked: Sequence[Row]) -> Iterator[Row]:
        """By shares or bytes: of a graph, or a StepBudget's; no blocks, no plans."""
        if kind == "graph":
            for each in asked:
                by_bytes = "peak_bytes" in each
                plan = self.within if by_bytes else self.by_peak
                yield {**each, **plan(*each.values())}
            return
        if not has_blocks(self.net):
            return
        ways = {"blocks": compiled(self.backend)}
        if not self.fake:
            # Gradients have to be those without a StepBudget.
            self.found(self.training(**ways).warmed())
        training = self.training(**ways)
        for each in asked:
            # There is no GPU that could count, whatever torch is made to say.
            nothing = mock.Mock(return_value=None)
            with mock.patch.object(torch.accelerator, "current_accelerator", nothing):
                budget = overlay("memory_planner").StepBudget(**each)
            training.within = budget
            if self.fake:
                # Storages of fakes are no device's.
                budget.device = torch.device("meta")
            # The first is recorded, and what it leaves behind may have the second.
            row = {**each, **self.measured(training, steps=3)}
            plan = budget.plan
            yield {**row, "predicted": plan.predicted_peak, "allowed": plan.allowed}


def gradients_of(training: Training) -> list[Tensor]:
    """Those of one more step, which changes no parameter."""
    torch.manual_seed(nets.SEED)
    with training.within:
        training.loss().backward()
    return gradients(training.parameters)


def has_blocks(net: nets.Net) -> bool:
    """Whether a net has blocks that repeat."""
    try:
        return bool(blocks_of(net.fake()[1], net.blocks))
    except ValueError:
        return False


def bound() -> Row:
    """What the report of the last plan says of its peak; one of budget 1 has none."""
    peak = getattr(overlay("memory_planner").last_plan(), "peak", None)
    entries = ("allowed", "predicted") if peak is not None else ()
    return {entry: getattr(peak, entry) for entry in entries}


@contextmanager
def warnings_noted() -> Iterator[list[str]]:
    """What the planners warn of meanwhile."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    names = "memory_planner", "_activation_checkpointing"
    loggers = [logging.getLogger(f"torch._functorch.{name}") for name in names]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield found
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextmanager
def curve_noted() -> Iterator[Row]:
    """Notes the peaks and costs of the plans that are found meanwhile."""
    row: Row = {}
    request = overlay("memory_planner.peak.peak_bytes").PeakBytes
    curve = request.curve

    @functools.wraps(curve)
    def note(*arguments: Any) -> Any:
        found = curve(*arguments)
        row["curve"] = [(plan.peak, plan.cost) for plan in found.plans]
        return found

    with mock.patch.object(request, "curve", note):
        yield row


@contextmanager
def compiled_loss(backend: Any) -> Iterator[None]:
    """F.cross_entropy is compiled, too."""
    original = F.cross_entropy
    loss = torch.compile(original, backend=backend)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        # Its graph finds what it calls by name.
        with mock.patch.object(F, original.__name__, original):
            found: Tensor = loss(*args, **kwargs)
            return found

    with mock.patch.object(F, original.__name__, call):
        yield


def saving_products() -> Any:
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


# ------------------------------------------------------ one of many ranks, by FSDP2


def sharded(training: Training) -> Training:
    """As torchtitan trains it, over all ranks; storages of fakes."""
    dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrap = functools.partial(fully_shard, mesh=mesh, mp_policy=dtypes)
    module: Any = training.module
    with training.mode:
        for block in training.blocks:
            wrap(block)
        inner = module.module if isinstance(module, nets.LossOf) else module
        if isinstance(inner, Transformer):
            wrap([inner.norm, inner.head], reshard_after_forward=False)
        wrap(module)
        training.parameters = list(module.parameters())
        training.optimizer = torch.optim.AdamW(training.parameters)
    return training


@contextmanager
def fake_ranks(number: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------- what was found


def right(steps: Sequence[Row]) -> list[Row]:
    """Those without wrong gradients: a dropout's mask drawn again costs nothing."""
    most = {"off_budget_1": SAME, "off_eager": TOLERANCE}
    return [s for s in steps if all(s.get(off, 0) <= most[off] for off in most)]


def lowest(steps: Sequence[Row]) -> Row:
    """The right one of the lowest peak."""
    return min(right(steps), key=lambda step: step["peak"])


def told_budgets(budgets: Sequence[float]) -> str:
    """The budgets of one plan, as text."""
    least, most = min(budgets), max(budgets)
    return f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
