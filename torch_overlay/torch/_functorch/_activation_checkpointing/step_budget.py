"""One activation memory budget for a training step, however it is compiled.

    >>> budget = StepBudget(share=0.2)
    >>> for batch in data:
    ...     with budget:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> print(budget)

A budget of a graph says little about a step that runs several, or one many times: what
each call keeps for its backward is live at once.  The first step runs by lean plans and
is recorded: the calls of each graph, and the bytes that eager code holds meanwhile (and
the second one too, where the first leaves more behind than gradients).  When the next
starts, :class:`.StepCurve` chooses one or two plans for each graph, and they
are split and compiled anew from the joint graphs that were traced.  From then on steps
are compared with the one recorded; where one differs, the next is recorded again.

Only storages on the training device count.  What a kernel allocates for itself does not
count, nor what an allocator loses to fragmentation, nor the states of a generator that
random operators are repeated with, of 5 KB each.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import operator
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch._dynamo.exc import RestartAnalysis

from .budget_options import is_number
from .saved_report import format_bytes
from .step_graph import Graph, running, Slots, Step
from .step_plan import GraphPlans, Moment, StepCurve, StepPlan
from .step_recorder import moments, Recorder


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing_extensions import Self


log = logging.getLogger(__name__)

__all__ = ["GraphUse", "StepBudget", "StepSummary"]

# How often plans are chosen anew, as compiles tell what those hold that were chosen.
_ROUNDS = 4
# What a device counts may be as much more or less than what was predicted.
_MISS = 0.02
# Of what eager code makes, what a step may leave behind and be recorded only once.
_NEW = 0.01


class GraphUse(NamedTuple):
    """A graph in a step, and its plans: bytes, and cost in the estimator's unit.

    ``calls`` is how many a step makes.  Of those that wait for their backward at once,
    the one in slot k keeps ``kept[k]`` bytes and has ``transient[k]`` more live while it
    runs.
    """

    name: str
    calls: int
    kept: tuple[int, ...]
    transient: tuple[int, ...]
    cost: float


@dataclass(frozen=True)
class StepSummary:
    """What a step's plan is to keep to: bytes, and cost in the estimator's unit.

    ``floor`` is the lowest peak that was found, ``unbudgeted`` that of the leanest plans
    that repeat nothing expensive, as those of budget 1 do.  They are beyond the ``given``
    bytes that are there when a step starts, but for a budget of ``device_bytes``, which
    means all.
    """

    allowed: int
    predicted_peak: int
    floor: int
    unbudgeted: int
    given: int
    cost: float
    graphs: tuple[GraphUse, ...]


class StepBudget:
    """A bound for the peak of each training step that runs within ``with budget:``.

    Args:
        share: of the way from the step's lowest peak to that without a budget, from 0
            to 1.
        peak_bytes: most live bytes beyond those that are there when the step starts
            (parameters, optimizer states, the batch, gradients that are not None).
        device_bytes: most live bytes in all; without any of the three, the memory of the
            device.

    ``plan`` is the :class:`StepSummary` of the steps from the second on, None before, and
    ``measured_peak`` what the device counted in the first of them, as its
    ``predicted_peak``, None where it does not count.
    Raises ValueError for invalid values.
    """

    def __init__(
        self,
        share: Optional[float] = None,
        *,
        peak_bytes: Optional[int] = None,
        device_bytes: Optional[int] = None,
    ) -> None:
        # A build for GPUs names one even where there is none.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.device = accelerator if accelerator is not None else torch.device("cpu")
        asked = {"peak_bytes": peak_bytes, "device_bytes": device_bytes}
        given = {name: value for name, value in asked.items() if value is not None}
        if len(given) + (share is not None) > 1:
            raise ValueError("pass only one of share, peak_bytes and device_bytes")
        if share is not None and not is_number(share, 0, 1):
            raise ValueError(f"share is {share!r}; it must be a number from 0 to 1")
        for name, value in given.items():
            if type(value) is not int or value <= 0:
                raise ValueError(
                    f"{name} is {value!r}; it must be a positive number of bytes"
                )
        if share is None and not given:
            if accelerator is None:
                raise ValueError(
                    "no accelerator found: pass share, peak_bytes or device_bytes"
                )
            device_bytes = torch.get_device_module(self.device).mem_get_info()[1]
        self.share, self.peak_bytes, self.device_bytes = share, peak_bytes, device_bytes
        self.plan: Optional[StepSummary] = None
        self.measured_peak: Optional[int] = None
        # Live bytes at the start of the step that is measured, and the device's counters.
        self._start: Optional[int] = None
        self._counters = _counters(self.device)
        # Weak: a graph goes with the model that it was compiled for.
        self.graphs: weakref.WeakKeyDictionary[Graph, Slots] = (
            weakref.WeakKeyDictionary()
        )
        self._step: Optional[Step] = None
        self._recorded: Optional[Recorder] = None
        self._expected: Optional[list[Any]] = None
        self._warnings: dict[str, None] = {}
        self._is_first = True

    # ---------------------------------------------------------------- the steps

    def __enter__(self) -> Self:
        left = running.get()
        if left is not None:
            # An exception kept a callback from ending it.
            left.close()
        recorder, self._recorded = self._recorded, None
        if recorder is not None:
            # What only garbage holds is not there in the next step.
            gc.collect()
            with self.warn_on_failure("no plan could be made for the step"):
                self._plan_by(recorder)
        step = self._step = Step(self)
        if self._expected is None:
            for slots in self.graphs.values():
                slots.calls, slots.choice, slots.scale, slots.size = [], None, 0.0, 0
            step.record()
        elif self.measured_peak is None and self._counters is not None:
            self._counters.reset_peak_memory_stats(self.device)
            self._start = self._counters.memory_allocated(self.device)
        step.open()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        step = running.get()
        if step is None or step.budget is not self:
            return
        step.close()
        start, self._start = self._start, None
        if kind is not None or step is not self._step:
            return
        if start is not None:
            self._measure(start)
        if step.recorder is not None:
            with self.warn_on_failure("the step could not be recorded"):
                self._keep(step, step.recorder)
        elif step.seen != self._expected:
            log.warning(
                "this step called compiled graphs differently from the recorded one, so "
                "%s may be exceeded; the next step is recorded",
                self._asked(),
            )
            self._expected = None

    def _keep(self, step: Step, recorder: Recorder) -> None:
        """Let the next step be planned by this one, where it tells enough."""
        self._expected = step.seen
        if recorder.error is not None:
            raise recorder.error
        if _ran_out_of_sight(step.seen):
            self.warn(
                "compiled autograd ran the backwards, which a StepBudget cannot see; "
                "all graphs keep their lean plans"
            )
        elif self.graphs:
            self._recorded = recorder
        elif not self._warnings:
            self.warn(
                "no graph was compiled in this step; if the model was compiled earlier, "
                "call torch.compiler.reset() first"
            )

    def _measure(self, start: int) -> None:
        """Compare what the device counted in a step with what was predicted."""
        if self.plan is None or self._counters is None:
            return
        beyond = start if self.device_bytes is None else 0
        peak = self._counters.max_memory_allocated(self.device) - beyond
        self.measured_peak, predicted = peak, self.plan.predicted_peak
        if abs(peak - predicted) > _MISS * predicted:
            self.warn(
                f"the device counted {format_bytes(peak)} in a step, and "
                f"{format_bytes(predicted)} were predicted"
            )

    @contextmanager
    def warn_on_failure(self, what: str) -> Iterator[None]:
        """Training goes on without what fails within; a warning tells of it once."""
        try:
            yield
        except RestartAnalysis:
            # Dynamo's way to begin anew.
            raise
        except Exception as error:
            log.debug("%s", what, exc_info=error)
            self.warn(f"{what}: {type(error).__name__}: {error}")

    def warn(self, reason: str) -> None:
        if reason not in self._warnings:
            self._warnings[reason] = None
            log.warning("%s may be exceeded: %s", self._asked(), reason)

    def _asked(self) -> str:
        if self.share is not None:
            return f"StepBudget(share={self.share:g})"
        if self.peak_bytes is not None:
            return f"StepBudget(peak_bytes={self.peak_bytes})"
        return f"StepBudget(device_bytes={self.device_bytes})"

    # ---------------------------------------------------------------- the plan

    def _plan_by(self, recorder: Recorder) -> None:
        """Plan the next steps by the one recorded, or let one more be recorded."""
        # Buffers that the first step makes once and for all are there in a second.
        if self._is_first and recorder.left_behind() > _NEW * recorder.created_bytes:
            self._expected = None
        else:
            self._make_plan(recorder)
        self._is_first = False

    def _make_plan(self, recorder: Recorder) -> None:
        used = [(graph, s) for graph, s in self.graphs.items() if s.calls]
        for graph, _ in used:
            if graph.fault:
                self.warn(f"{graph.name} has no plan for a step: {graph.fault}")
        number = {graph: g for g, (graph, _) in enumerate(used)}
        found, given = moments(recorder, number), recorder.bytes_at_next_start()
        plans, curve = self._curve(used, found)
        # Of estimates but for the lean plans. It stays, whatever compiles tell from here on.
        allowed = self._allowed(curve, given)
        wanted = allowed
        if self.plan is not None and self.measured_peak is not None:
            # What was not predicted of one step will not be of the next.
            wanted -= max(self.measured_peak - self.plan.predicted_peak, 0)
            self.measured_peak = None
        plan = curve.within(wanted)
        for _ in range(_ROUNDS):
            is_new = [
                graph.compile(choice, self)
                for graph, choice in zip(number, plan.choices)
            ]
            if not any(is_new):
                break
            plans, curve = self._curve(used, found)
            plan = curve.within(wanted)
        beyond = given if self.device_bytes is not None else 0
        if plan.peak > allowed:
            self.warn(
                f"the lowest peak found is {format_bytes(plan.peak + beyond)}, and "
                f"{format_bytes(allowed + beyond)} are allowed; the step uses that plan"
            )
        uses = _uses(used, plans, plan)
        self.plan = StepSummary(
            allowed + beyond,
            plan.peak + beyond,
            curve.floor + beyond,
            curve.unbudgeted.peak + beyond,
            given,
            math.fsum(use.cost for use in uses),
            uses,
        )
        for (_, slots), choice in zip(used, plan.choices):
            slots.choice = choice
        log.info("%s", self)

    def _curve(
        self, used: Sequence[tuple[Graph, Slots]], found: Sequence[Moment]
    ) -> tuple[list[GraphPlans], StepCurve]:
        """The plans for a step, by what its graphs' compiles have told so far."""
        plans = [graph.plans.corrected() for graph, _ in used]
        calls = [slots.calls for _, slots in used]
        scales = [slots.scale for _, slots in used]
        return plans, StepCurve(plans, calls, found, scales)

    def _allowed(self, curve: StepCurve, given: int) -> int:
        if self.share is not None:
            room = curve.unbudgeted.peak - curve.floor
            return curve.floor + math.floor(self.share * room)
        if self.peak_bytes is not None:
            return self.peak_bytes
        return (self.device_bytes or 0) - given

    def __str__(self) -> str:
        reasons = [f"may be exceeded: {reason}" for reason in self._warnings]
        if self.plan is None:
            line = f"{self._asked()}: no plan before the second step"
            return "\n".join([line, *reasons])
        plan = self.plan
        peaks = plan.predicted_peak, plan.allowed, plan.floor, plan.unbudgeted
        sizes = [format_bytes(nbytes) for nbytes in peaks]
        what = "in all" if self.device_bytes else "beyond what is live at step start"
        measured = ""
        if self.measured_peak is not None:
            measured = f" ({format_bytes(self.measured_peak)} measured)"
        lines = [
            "StepBudget: {} predicted{}, {} allowed (floor: {}, no budget: {}; {})".format(
                sizes[0], measured, *sizes[1:], what
            ),
            f"live at step start: {format_bytes(plan.given)}",
        ]
        table = [("graph", "calls", "at once", "saved per call", "extra while running")]
        for use in plan.graphs:
            name, calls = use.name, str(use.calls)
            for each, run in itertools.groupby(zip(use.kept, use.transient)):
                kept, more = map(format_bytes, each)
                table.append((name, calls, str(len([*run])), kept, more))
                name = calls = ""
        widths = [max(map(len, column)) for column in zip(*table)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join(lines + reasons)


def _counters(device: torch.device) -> Any:
    """The module that counts a device's bytes, None where there is none."""
    module = torch.get_device_module(device)
    return module if hasattr(module, "reset_peak_memory_stats") else None


def _uses(
    used: Sequence[tuple[Graph, Slots]], plans: Sequence[GraphPlans], plan: StepPlan
) -> tuple[GraphUse, ...]:
    """What the plan of a step means for each of its graphs."""
    uses = []
    for (graph, slots), found, choice in zip(used, plans, plan.choices):
        chosen = [found.plans[p] for p in choice]
        uses.append(
            GraphUse(
                graph.name,
                sum(slots.calls),
                tuple(each.kept for each in chosen),
                tuple(max(each.forward, each.backward) - each.kept for each in chosen),
                math.fsum(map(operator.mul, slots.calls, (p.cost for p in chosen))),
            )
        )
    return tuple(uses)


def _ran_out_of_sight(seen: Sequence[Any]) -> bool:
    """Whether compiled autograd ran the backwards of these calls."""
    is_unused = torch._C._dynamo.compiled_autograd.is_cache_empty()
    return not is_unused and all(what != "B" for what, *_ in seen)
