"""What plans hold and take on this machine's GPU, beside those of stock torch.

    scripts/benchmark.sh gpu --json results/gpu.json
    scripts/benchmark.sh gpu --net vit-l-4 --kind upstream graph    minutes

Runs the torch that `python3` has, 2.11 or newer, or that of the Python in APPLY_PYTHON:
its Python files are copied into build/ and patched there, the installation is only read,
and nothing is fetched. Inductor's kernels run training steps of nets at real size, by
budgets on the untouched torch, by the target "peak", and by a StepBudget whose blocks are
compiled by themselves. Peaks are those of the device's allocator, beside what was allowed
and what the compile told; times are medians of several steps; gradients are compared with
those of budget 1.

The exit status is 1 if a plan is over what is allowed without a warning. --device cpu does
the same with a CPU's kernels.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch

from benchmarks import bounds, fresh, nets, plans
from benchmarks.meters import device_peak, gradients, relative_error
from benchmarks.pages import (
    at_most,
    good,
    Mark,
    marks_table,
    measured_on,
    Row,
    share_within,
)
from benchmarks.ways import Training


# Those that a card of 24 GB has room for, without dropout, which draws other numbers where
# kernels are others; and a small one for a CPU.
NETS = ("vit-l-4", "llama3-8b-4", "qwen-moe-4", "mlp-dropout", "vit")
KINDS = {
    "upstream": (1.0, 0.75, 0.5, 0.25, 0.125, 0.0),
    "graph": (1.0, 0.5, 0.2, 0.0),
    "blocks": (0.2, 0.0),
}
OPTIONS = {"device": {"choices": ("cpu", "cuda"), "default": "cuda"}}
STEPS = 7
# bf16 rounds to three digits.
ROUNDING = 0.05


def tasks(
    names: Optional[Sequence[str]], check: bool, rows: Sequence[Row], device: str
) -> Iterator[fresh.Task]:
    if device == "cuda" and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} of {sys.executable} sees no GPU here; name "
            "another Python in APPLY_PYTHON, or try --device cpu",
            file=sys.stderr,
        )
        raise SystemExit(2)
    chosen = names or (NETS[:3] if device == "cuda" else NETS[4:])
    for task in plans.tasks(chosen, KINDS, device):
        yield {"set": "project", **task}


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    net, kind, budgets = nets.find(task["net"]), task["kind"], task["budgets"]
    run = Run(net, task["device"], "inductor", fake=False, prepare=plans.as_it_is)
    if kind == "upstream":
        return {"steps": run.upstreams(budgets, in_blocks=False)}
    return {"steps": [*run.asked(kind, [{"share": budget} for budget in budgets])]}


class Run(plans.Plans):
    """A net's plans by inductor, as they run on a device."""

    def training(self, **ways: Any) -> Training:
        return Training(self.net, device=self.device, **ways)

    def found(self, training: Training) -> Row:
        times = [self.seconds(training) for _ in range(STEPS)]
        peak = device_peak(training.step, self.device)
        torch.manual_seed(nets.SEED)
        with training.within:
            training.loss().backward()
        found = [each.float().cpu() for each in gradients(training.parameters)]
        self.first = self.first or found
        return {
            "peak": peak,
            "seconds": statistics.median(times),
            "gradients_off": relative_error(found, self.first),
        }

    def seconds(self, training: Training) -> float:
        """Those of a step: a GPU's, or one thread's of the CPU."""
        if self.device == "cpu":
            return training.seconds()
        torch.cuda.synchronize()
        start = time.perf_counter()
        training.step()
        torch.cuda.synchronize()
        return time.perf_counter() - start


# ------------------------------------------------------------------- report


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    if good(rows):
        yield from bounds.judged_part(good(rows))
    yield from share_within(
        "what a compile tells of one graph, within 2% of the allocator",
        (
            (abs(step["predicted"] / step["peak"] - 1), at)
            for at, step in bounds.every(good(rows), "graph")
            if "predicted" in step
        ),
        *(0.02, 1.0),
    )
    yield from at_most(
        "gradients against those of budget 1, by other kernels",
        ((step["gradients_off"], at) for at, step in bounds.every(good(rows), *KINDS)),
        ROUNDING,
    )


HOW = """Peaks of the device's allocator in MB, beyond parameters and inputs, by budget or
share; in bold how far one is over what is allowed, and w where a warning says so. Then the
time of a step, the median of {}, beyond that of stock torch at budget 1.
"""


def page(data: dict[str, Any]) -> str:
    rows = good(data["measured"])
    marks = marks_table(mark._asdict() for mark in judged(rows))
    text = f"{HOW.format(STEPS)}\n{marks}\n{bounds.table(rows)}\n"
    return text + measured_on(data["environment"])
