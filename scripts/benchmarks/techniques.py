"""Measures what saves memory in training, and what it costs, on one model.

    scripts/benchmark.sh techniques                          a small Llama, on the CPU
    scripts/benchmark.sh techniques --model gpt2
    scripts/benchmark.sh techniques --model my_models:make   your own
    scripts/benchmark.sh techniques --json results/techniques.json

Your own model is a function without arguments, found from the working folder, that
returns a model and a tuple or dict of its inputs; the model returns its loss (or an
object with a loss, as the Hugging Face library's models do when given labels).

Every row is a training step with AdamW in a fresh process, on CUDA where there is a
GPU: what it holds at its peak, what the forward saves for the backward, its time
beside eager mode's (interleaved, medians; CPU time of one thread, or wall time on
CUDA), and the flops it computes twice. Memory is exact: on the CPU all storages are
counted, on CUDA all that torch's allocators hand out.
The learning rate is 0, so that all rows train the same weights. Gradients are compared
with eager mode's at the same seed. If the model draws random numbers, compiled graphs
draw others at that seed, and are compared with themselves at budget 1.
"""

from __future__ import annotations

import functools
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import torch
import torch._functorch.config
from torch import nn, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from benchmarks import fresh, options, sweep
from benchmarks.live_bytes import record_step
from benchmarks.live_bytes import Step as Recorded
from benchmarks.nets import find, LLAMA_8, LossOf
from benchmarks.results import environment, markdown, measured_on, merged, Row
from benchmarks.tracing import CountedFlops, cpu_attention_counted, overlay
from benchmarks.training import gradients, relative_error


MODEL = "llama-8"
BUDGETS = (1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.0)
REPEATS = 5
OPERATORS = "aot_eager_decomp_partition"
LIMITS = fresh.Limits(seconds=3600, gigabytes=12)
# The blocks that most models repeat, by the names they commonly have.
MODULES = r"(.*\.)?(blocks?|layers?|h|stages?|down|merge|cells)\.\d+"
EAGER, CHECKPOINT = "eager", "checkpoint"
UPSTREAM, PEAK = "compile, upstream dp", "compile, peak"
BLOCKS = "compile each block, StepBudget"
# Of a StepBudget they are shares.
SHARES = (0.0,)
# It makes its plan of the first step, or of the second.
WARM_UP = 3


# --------------------------------------------------------------- techniques


# The forward of a model that a technique was put to work on.
Forward = Callable[..., Tensor]


def eager(module: nn.Module, task: fresh.Task) -> Forward:
    return module


def autocast(module: nn.Module, task: fresh.Task) -> Forward:
    def forward(*inputs: Tensor) -> Tensor:
        with torch.autocast(task["device"], torch.bfloat16):
            loss: Tensor = module(*inputs)
            return loss

    return forward


def chosen_modules(module: nn.Module, pattern: str) -> list[nn.Module]:
    """Submodules whose whole name the pattern matches, none inside another."""
    inner = module.module if isinstance(module, LossOf) else module
    names = [name for name, _ in inner.named_modules() if name]
    chosen: list[str] = []
    for name in names:
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if re.fullmatch(pattern, name) and not inside:
            chosen.append(name)
    if not chosen:
        outermost = [name for name in names if name.count(".") < 2]
        raise ValueError(
            f"no submodule's name is matched by {pattern!r}; there are "
            f"{', '.join(outermost[:12])}, ...; choose with --modules"
        )
    return [inner.get_submodule(name) for name in chosen]


def checkpointed(module: nn.Module, task: fresh.Task, **options: Any) -> Forward:
    for part in chosen_modules(module, task["modules"]):
        part.forward = functools.partial(
            checkpoint, part.forward, use_reentrant=False, **options
        )
    return module


def selective(module: nn.Module, task: fresh.Task) -> Forward:
    """Save what has flops to count (products, convolutions, attention)."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(operator, "_overloadpacket", None) in flop_registry:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(module, task, context_fn=contexts)


def compiled(module: nn.Module, task: fresh.Task) -> Forward:
    forward: Forward = torch.compile(module, backend=task["backend"])
    return forward


def compiled_blocks(module: nn.Module, task: fresh.Task) -> Forward:
    for part in chosen_modules(module, task["modules"]):
        part.forward = torch.compile(part.forward, backend=task["backend"])
    return module


SetUp = Callable[[nn.Module, fresh.Task], Forward]
TECHNIQUES: dict[str, SetUp] = {
    EAGER: eager,
    "autocast bf16": autocast,
    CHECKPOINT: checkpointed,
    "selective checkpoint": selective,
    UPSTREAM: compiled,
    "compile, exact": compiled,
    PEAK: compiled,
    BLOCKS: compiled_blocks,
}
# Settings of torch._functorch.config; upstream's runs on the untouched wheel.
SETTINGS: dict[str, dict[str, Any]] = {
    UPSTREAM: {"activation_memory_budget_solver": "dp"},
    "compile, exact": {"activation_memory_budget_solver": "exact"},
    PEAK: {"activation_memory_budget_target": "peak"},
}


# --------------------------------------------------------- in a fresh process


def measure(task: fresh.Task) -> Row:
    if task["device"] == "cpu":
        torch.set_num_threads(1)
    settings = {"enable_autograd_cache": False, **SETTINGS.get(task["technique"], {})}
    if task["technique"] in SETTINGS and task["budget"] is not None:
        settings["activation_memory_budget"] = task["budget"]
    # Or budgets would mean another thing on a CPU than on a GPU.
    with torch._functorch.config.patch(settings), cpu_attention_counted():
        return swept(task) if task.get("swept") else measured(task)


class Step:
    """A training step of a model, once ``set_up`` has put a technique to work on it.

    It runs within ``around``.
    """

    def __init__(self, task: fresh.Task, set_up: SetUp) -> None:
        self.cuda = task["device"] == "cuda"
        self.module, self.inputs = find(task["model"]).make(task["device"])
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.0)
        self.loss = functools.partial(set_up(self.module, task), *self.inputs)
        self.around: AbstractContextManager[Any] = nullcontext()
        if set_up is compiled_blocks:
            self.around = overlay("step_budget").StepBudget(share=task["budget"])

    def seconds(self) -> float:
        # One thread computes on the CPU: what else the machine does is left out.
        clock = time.perf_counter if self.cuda else time.process_time
        if self.cuda:
            torch.cuda.synchronize()
        start = clock()
        with self.around:
            self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.cuda:
            torch.cuda.synchronize()
        return clock() - start

    def counted(self) -> tuple[int, int, list[Tensor]]:
        """Flops of the forward, flops of both, and the gradients."""
        torch.manual_seed(0)
        with self.around, CountedFlops() as counter:
            loss = self.loss()
            forward_flops = counter.flops
            loss.backward()
        return forward_flops, counter.flops, gradients(list(self.module.parameters()))

    def random_operators(self) -> dict[str, int]:
        """Those of the forward that draw random numbers, and how often they run."""
        with torch.no_grad(), RandomOperators() as found:
            self.loss()
        return dict(found.runs)


class RandomOperators(TorchDispatchMode):
    """Counts the operators that move the random generator on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = self.states()
        result = func(*args, **(kwargs or {}))
        if not all(map(torch.equal, before, self.states())):
            self.runs[str(func)] += 1
        return result

    @staticmethod
    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def at_budget_1(task: fresh.Task) -> list[Tensor]:
    """The gradients of the same, compiled with budget 1."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        step = Step({**task, "budget": 1.0}, TECHNIQUES[task["technique"]])
        step.seconds()
        return step.counted()[2]


def recorded(step: Step) -> Recorded:
    with step.around:
        return record_step(
            step.loss,
            step.module.parameters(),
            step.inputs,
            step.optimizer,
            # Inductor's kernels make their buffers out of the dispatcher's sight.
            allocator=step.cuda,
        )


def swept(task: fresh.Task) -> Row:
    """The peaks of all budgets' plans, and the row of the lowest one."""
    plans = swept_at_once(task) if task["backend"] == OPERATORS else swept_singly(task)
    budget = sweep.lowest(plans)["budgets"][0]
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        row = measured({**task, "budget": budget})
    return {"sweep": plans, **row}


def swept_at_once(task: fresh.Task) -> list[Row]:
    backend = sweep.Sweep()
    step = Step({**task, "backend": backend}, compiled)
    step.seconds()

    def measure(budget: float) -> Row:
        backend.budget = budget
        return {"peak": recorded(step).peak}

    return sweep.measured(backend.graphs, measure, task["budgets"])


def swept_singly(task: fresh.Task) -> list[Row]:
    graphs: list[sweep.Split] = []

    def measure(budget: float) -> Row:
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            step = Step(task, compiled)
            step.seconds()
            return {"peak": recorded(step).peak}

    with sweep.noted(graphs):
        measure(1.0)
    return sweep.measured(graphs, measure, task["budgets"])


def measured(task: fresh.Task) -> Row:
    step = Step(task, TECHNIQUES[task["technique"]])
    for _ in range(WARM_UP):
        step.seconds()
    found_bytes = recorded(step)
    plain = Step(task, eager)
    random = plain.random_operators()
    _, flops, found = step.counted()
    forward, wanted_flops, wanted = plain.counted()
    plain.seconds()
    pairs = [(step.seconds(), plain.seconds()) for _ in range(REPEATS)]
    step_s, eager_s = (statistics.median(each) for each in zip(*pairs))
    if random and task["budget"] is not None:
        wanted = at_budget_1(task)
    return {
        "peak_bytes": found_bytes.peak,
        "saved_bytes": found_bytes.saved_bytes,
        "forward_flops": forward,
        "recomputed_flops": flops - wanted_flops,
        "gradient_error": relative_error(found, wanted),
        "step_s": step_s,
        "eager_step_s": eager_s,
        "step_over_eager": step_s / eager_s,
        **({"random": random} if random else {}),
    }


# ------------------------------------------------------------------- report


def told_budget(row: Row) -> str:
    if "sweep" in row:
        return sweep.told(sweep.lowest(row["sweep"])["budgets"])
    return "" if row["budget"] is None else f"{row['budget']:g}"


def page(data: dict[str, Any]) -> str:
    lines, failed = [], []
    random: dict[str, int] = {}
    for row in data["measured"]:
        swept = f", the lowest of {sweep.count(row['sweep'])}" if "sweep" in row else ""
        line = [row["technique"], told_budget(row) + swept]
        if "error" in row:
            lines.append([*line, *["-"] * 5])
            failed.append(f"- {' '.join(line).strip()}: `{row['error']}`\n")
            continue
        random = row.get("random", random)
        recomputed = row["recomputed_flops"] / row["forward_flops"]
        line += [f"{row[key] / 1e6:,.1f}" for key in ("peak_bytes", "saved_bytes")]
        line += [f"{row['step_over_eager']:.2f}", f"{recomputed:.0%}"]
        lines.append([*line, f"{row['gradient_error']:.0e}"])
    heading = ["technique", "budget", "peak MB", "saved MB", "step / eager"]
    facts = data["environment"]
    compared = "relative to eager mode's. "
    if random:
        drawn = ", ".join(f"{runs} {name}" for name, runs in random.items())
        compared = (
            "at the same seed; of compiled rows relative to the same at budget 1, of the "
            f"others to eager mode's. Random in a forward: {drawn}. Compiled graphs draw "
            "other numbers there than eager mode does at that seed. "
        )
    return (
        markdown([*heading, "recomputed", "gradient error"], lines)
        + (f"\nWhat could not be measured:\n\n{''.join(failed)}" if failed else "")
        + (
            f"\nModel {facts['model']}, backend {facts['backend']}, medians of {facts['repeats']} interleaved steps. Times on a CPU are CPU times. "
            "saved: what the forward leaves alive for the backward. recomputed: flops beyond eager mode's, as a share of "
            f"the forward's. gradient error: {compared}{sweep.HOW} "
        )
        + measured_on(facts)
    )


def lowest(rows: Sequence[Row], technique: str) -> Row:
    """A technique's row of the lowest peak; of a sweep, that of its lowest plan."""
    mine = []
    for row in rows:
        if row["technique"] == technique and "error" not in row:
            swept = [step["peak"] for step in row.get("sweep", ())]
            mine.append({**row, "peak_bytes": min(swept, default=row["peak_bytes"])})
    return sweep.lowest(mine, "peak_bytes")


def upstreams_lowest(
    common: fresh.Task, budgets: Sequence[float] = sweep.BUDGETS
) -> Row:
    """The row of upstream's lowest peak: ``budgets`` are swept by the untouched wheel.

    ``common`` are the entries of all tasks (`on_this_machine`). ``sweep`` in the row has
    all plans; `told_budget` of the row its budget.
    """
    (row,) = fresh.run(__name__, [sweep_of_upstream(common, budgets)], LIMITS)
    return row


def sweep_of_upstream(
    common: fresh.Task, budgets: Sequence[float] = sweep.BUDGETS
) -> fresh.Task:
    task = {"technique": UPSTREAM, "budget": None, "swept": True, "budgets": budgets}
    return {**task, **common, "torch": fresh.UNTOUCHED}


def lowest_peaks(data: dict[str, Any]) -> str:
    """What the page says of the lowest peaks."""
    told = []
    for technique, name in (
        (PEAK, 'the target `"peak"`'),
        (UPSTREAM, "upstream's budgets"),
        (CHECKPOINT, "a checkpoint around each block"),
    ):
        row = lowest(data["measured"], technique)
        budget = told_budget(row)
        at = f" at {budget}" if budget else ""
        told.append(f"{name} {row['peak_bytes'] / 1e6:,.0f} MB{at}")
    return f"- peaks: in the table below the lowest of {', of '.join(told)};\n  "


def headline(data: dict[str, Any]) -> str:
    """The README's table: eager mode, the lowest peak of upstream's, and of ours."""
    rows = data["measured"]
    upstream, ours = lowest(rows, UPSTREAM), lowest(rows, PEAK)
    names = (
        "eager mode",
        "torch.compile, the lowest peak that upstream's budgets reach "
        f"(budget {told_budget(upstream)})",
        f'torch.compile with this set, target `"peak"`, budget {ours["budget"]:g}',
    )
    lines = []
    for name, row in zip(names, (lowest(rows, EAGER), upstream, ours)):
        bold = "**" if row is ours else ""
        peak = f"{row['peak_bytes'] / 1e6:,.0f} MB"
        line = (name, peak, f"{row['step_over_eager']:.2f}")
        lines.append([f"{bold}{cell}{bold}" for cell in line])
    shape = LLAMA_8
    return markdown(
        ["one training step", "peak memory", "step time, relative to eager mode"], lines
    ) + (
        f"\nLlama-like, {shape.layers} layers of width {shape.width}, batch "
        f"{shape.batch} x {shape.tokens} tokens, fp32, AdamW; one graph, operator by "
        "operator. All that is live counts: parameters, optimizer states, gradients and "
        f"activations. {sweep.HOW} {measured_on(data['environment'])}"
    )


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument(
        "--model",
        type=options.net,
        default=MODEL,
        help="one of the project's models (a wrong name lists them), or "
        f"module:function (default: {MODEL})",
    )
    parser.add_argument(
        "--modules",
        default=MODULES,
        metavar="REGEX",
        help="submodules to checkpoint, by their whole name (default: %(default)s)",
    )
    parser.add_argument(
        "--technique",
        nargs="+",
        choices=TECHNIQUES,
        help="these alone, the others stay in FILE",
    )
    arguments = parser.parse_args()
    common = on_this_machine(arguments.model, arguments.modules)
    names = arguments.technique or TECHNIQUES
    tasks = [task for name in names for task in tasks_of(name, common)]
    rows = fresh.run(__name__, tasks, LIMITS)
    if arguments.technique:
        rows = merged(arguments.json, rows, "technique", "swept", "budget")
    facts = {**environment(), **common, "repeats": REPEATS}
    data = {"environment": facts, "measured": rows}
    fresh.finish(arguments.json, data, page)
    return 0


def on_this_machine(model: str, modules: str = MODULES) -> fresh.Task:
    """What is the same in all tasks."""
    cuda = torch.cuda.is_available()
    return {
        "model": model,
        "device": "cuda" if cuda else "cpu",
        # On a CPU inductor needs a C++ compiler.
        "backend": "inductor" if cuda else OPERATORS,
        "modules": modules,
    }


def tasks_of(name: str, common: fresh.Task) -> Iterator[fresh.Task]:
    wheel = fresh.UNTOUCHED if name == UPSTREAM else "patched"
    none: Sequence[Optional[float]] = (None,)
    budgets = SHARES if name == BLOCKS else BUDGETS if name in SETTINGS else none
    for budget in budgets:
        yield {"technique": name, "budget": budget, **common, "torch": wheel}
    if name == UPSTREAM:
        yield sweep_of_upstream(common)
