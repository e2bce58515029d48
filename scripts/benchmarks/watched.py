"""A step within a StepBudget, watched: its peak, and what it did to the plans."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch._functorch import config, partitioners

from benchmarks import pages
from benchmarks.meters import CountedStorages, gradients
from benchmarks.pages import Row
from benchmarks.plans import warnings_noted
from benchmarks.tracing import overlay
from benchmarks.ways import Training


SHARE = 0.2


@contextmanager
def watched(budget: Any, there: Sequence[Tensor]) -> Iterator[Row]:
    """A step within a budget: its peak and flops, and what it did to the plans."""
    decide = mock.Mock(wraps=vars(partitioners)["decide"])
    gc.collect()
    row: Row = {}
    with (
        warnings_noted() as said,
        mock.patch.object(partitioners, "decide", decide),
        budget,
    ):
        step = overlay("memory_planner.step.current_step").running_step()
        is_recorded = step is not None and step.recorder is not None
        with CountedStorages(there) as counted:
            yield row
    plan = getattr(budget, "plan", None)
    row.update(peak=counted.peak, given=counted.given, flops=counted.flops)
    row["warnings"] = said
    row.update(recorded=is_recorded, compiled=bool(decide.call_count))
    row["learned"] = is_recorded or row["compiled"] or plan is None
    if plan is not None:
        row.update(allowed=plan.allowed, floor=plan.floor, told=plan.predicted_peak)


def budget_of(share: float) -> Any:
    return overlay("memory_planner").StepBudget(share)


def trained(
    step: Callable[[], Any], training: Training, share: float, count: int
) -> Row:
    """So many steps of a training whose parameters stay as they are, summed up."""
    budget, found = budget_of(share), []
    module = training.module
    there = [*module.parameters(), *module.buffers(), *training.inputs]
    with config.patch(enable_autograd_cache=False):
        for _ in range(count):
            with watched(budget, there) as row:
                step()
            gradients(there)
            found.append(row)
    return summed_up(found)


def summed_up(found: Sequence[Row]) -> Row:
    """The worst peaks over what the budget says, and what each step did to the plans.

    No peaks are judged where no step was planned.
    """

    def letter(now: Row) -> str:
        did = "R" if now["recorded"] else "C" if now["compiled"] else "."
        return did + "w" * bool(now["warnings"])

    warnings = [text for now in found for text in now["warnings"]]
    return {
        "worst": worst(found),
        "trace": "".join(map(letter, found)),
        "warned": len(warnings),
        "warnings": [*dict.fromkeys(warnings)],
    }


def worst(found: Sequence[Row]) -> dict[str, pages.Named]:
    # Buffers that the first step makes may have the second one recorded, too.
    plans = [(k, now) for k, now in enumerate(found) if k and "allowed" in now]
    if not plans:
        return {}
    bound: list[pages.Named] = [
        (now["peak"] / now["allowed"], f"step {at + 1}")
        for at, now in plans
        if not now["recorded"]
    ]
    # What the first step makes for good, as DDP its buckets, later ones are given.
    planned = plans[0][1]
    made = max(planned["given"] - found[0]["given"], 0)
    first = found[0]["peak"] / (planned["floor"] + made), "step 1"
    return {"first": first, "bound": max(bound)}
