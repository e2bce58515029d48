"""Random programs of operators: do all plans compute the same, in the peak predicted?

Each seed is a net of 5 to 17 operators with views, in-place writes, random numbers,
statistics, checkpoints and several outputs. It is trained with budget 1, by a plan for
the peak, by one of saved bytes and within a StepBudget; their budgets are random too.
Outputs, gradients and statistics have to be those of budget 1, bit for bit, and the peak
what was predicted, to the byte. Graphs run operator by operator.

A seed is the same program wherever it runs. The exit status is 1 if a plan is at fault.
"""

from __future__ import annotations

import argparse
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch._functorch.config as fconfig
import torch.nn.functional as F
from torch import nn, Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.meters import CountedStorages
from benchmarks.tracing import overlay


def in_place_of_views(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    x = x + 0
    x[:, :4].mul_(2)
    x[2:4].zero_()
    return x


def attention(x: Tensor, y: Tensor) -> Tensor:
    return (x.sin() @ y.t()).sort(1)[0] @ y.cos() * 0.01


# Each takes two matrices of one shape, which its result has as well, and a weight.
OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sin": lambda x, y, w: x.sin(),
    "exp": lambda x, y, w: x.tanh().exp(),
    "mul": lambda x, y, w: x * y,
    "sum": lambda x, y, w: x - x.sum(0, keepdim=True) * 0.1,
    "max": lambda x, y, w: x.max(0, keepdim=True)[0] + x,
    "softmax": lambda x, y, w: x.softmax(-1),
    "sort": lambda x, y, w: x.sort(1)[0],
    "mm": lambda x, y, w: (x @ y.t()).tanh() @ x * 0.1,
    "linear": lambda x, y, w: x @ w + w[0],
    "layer norm": lambda x, y, w: F.layer_norm(x, w[0].shape, w[0], w[1]),
    "dropout": lambda x, y, w: F.dropout(x, 0.4),
    "transpose": lambda x, y, w: x.t().contiguous().t().sin(),
    "with gaps": lambda x, y, w: torch.cat([x, y], 1)[:, ::2],
    "random": lambda x, y, w: x + torch.rand_like(x) * torch.randn(x.shape[1]),
    "permuted rows": lambda x, y, w: x[torch.randperm(len(x))],
    "in place of views": in_place_of_views,
    "checkpoint": lambda x, y, w: checkpoint(attention, x, y, use_reentrant=False),
}


class Program(NamedTuple):
    """Operators, with how many values back both arguments are, and a linear layer."""

    steps: tuple[tuple[str, int, int], ...]
    outputs: int = 1
    trains_input: bool = False
    width: int = 16


def program_of(seed: int) -> Program:
    draw = random.Random(seed)
    steps = [
        (draw.choice([*OPERATORS, "batch norm"]), draw.randrange(4), draw.randrange(6))
        for _ in range(draw.randrange(4, 17))
    ]
    return Program(tuple(steps), draw.randrange(1, 4), draw.random() < 0.5)


def plans_of(seed: int) -> Iterator[dict[str, Any]]:
    """Options for `Training`: a plan for a peak, one of saved bytes, one for a step."""
    draw = random.Random(seed)
    for target in ("peak", "saved"):
        budget = draw.choice([0, draw.randrange(100) / 100])
        yield {"budget": budget, "budget_target": target}
    yield {"share": draw.choice([0, 0.2, 0.6])}


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.outputs, width = program.outputs, program.width
        self.steps = (*program.steps, ("linear", 0, 0))
        weights = (torch.randn(width, width) / 4 for _ in self.steps)
        self.weights = nn.ParameterList(weights)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> list[Tensor]:
        values = [x]
        for (name, first, second), weight in zip(self.steps, self.weights):
            x = values[-1 - first % len(values)]
            y = values[-1 - second % len(values)]
            is_norm = name == "batch norm"
            values.append(self.norm(x) if is_norm else OPERATORS[name](x, y, weight))
        return values[-self.outputs :]


class Training:
    """Steps of a compiled program: the options are the config's, or a StepBudget's."""

    def __init__(self, program: Program, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.budget: Any = nullcontext()
        if "share" in options:
            self.budget = overlay("step_budget").StepBudget(options.pop("share"))
        self.options = {f"activation_memory_{k}": v for k, v in options.items()}
        self.net = Net(program)
        self.compiled = torch.compile(self.net, backend="aot_eager_decomp_partition")
        self.x = torch.randn(32, program.width, requires_grad=program.trains_input)

    def step(self) -> dict[str, list[bytes]]:
        """All that a step computes."""
        self.net.norm.reset_running_stats()
        torch.manual_seed(1)
        leaves = [t for t in (self.x, *self.net.parameters()) if t.requires_grad]
        with fconfig.patch(self.options), self.budget:
            outputs = self.compiled(self.x)
            roots = [output for output in outputs if output.requires_grad]
            tangents = [torch.ones_like(root) for root in roots]
            gradients = torch.autograd.grad(roots, leaves, tangents, allow_unused=True)
        computed = {
            "outputs": outputs,
            "gradients": [each for each in gradients if each is not None],
            "statistics": self.net.buffers(),
        }
        return {
            kind: [each.detach().numpy().tobytes() for each in values]
            for kind, values in computed.items()
        }

    def peak(self) -> int:
        """Most live bytes of a step that is compiled."""
        gc.collect()
        with CountedStorages([self.x, *self.net.state_dict().values()]) as recorder:
            self.step()
        return recorder.peak


@lru_cache(maxsize=1)
def step_of_budget_1(program: Program) -> dict[str, list[bytes]]:
    return Training(program, budget=1).step()


def fault(program: Program, plan: dict[str, Any]) -> str:
    """What is wrong with a plan for a program, "" if nothing is."""
    expected = step_of_budget_1(program)
    training = Training(program, **plan)
    # A StepBudget watches a step, and makes its plan in the second.
    for _ in range(3 if "share" in plan else 1):
        for kind, values in training.step().items():
            if values != expected[kind]:
                return f"{kind} are not those of budget 1"
    if plan.get("budget_target") == "peak":
        predicted = overlay("saved_report").last_plan().peak.predicted
        measured = training.peak()
        if measured != predicted:
            return f"{measured} bytes at the peak, {predicted} predicted"
    return ""


def main() -> int:
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("seed", nargs="?", type=int, default=0, help="the first seed")
    command.add_argument("count", nargs="?", type=int, default=100, help="of seeds")
    arguments = command.parse_args()
    torch.set_num_threads(1)
    # pytree's, of a StepBudget's copy of a graph with a checkpoint.
    warnings.filterwarnings("ignore", "`isinstance", FutureWarning)
    faults = 0
    for done in range(arguments.count):
        seed = arguments.seed + done
        if done % 10 == 0:
            print(f"{done} of {arguments.count} programs, {faults} faults", flush=True)
        for plan in plans_of(seed):
            try:
                said = fault(program_of(seed), plan)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            if said:
                faults += 1
                print(f"seed {seed}: {said}\n  {plan}", flush=True)
    print(f"{arguments.count} programs, {faults} faults")
    return int(faults > 0)
