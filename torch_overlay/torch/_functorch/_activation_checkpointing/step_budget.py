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
is recorded: the calls of each graph, and the bytes that eager code holds meanwhile.  When
the next starts (or the one after, where the first leaves more behind than gradients),
:class:`.StepCurve` chooses one or two plans for each graph, and they are split and
compiled anew from the joint graphs that were traced.  The second step is recorded, too.

Plans are for the largest calls so far.  A step may make fewer, or smaller ones; where one
is larger, plans are made for that before it runs.  Where a step makes others, some of the
next ones are recorded, until those are seen again.

Only storages on the training device count.  What a kernel allocates for itself does not
count, nor what an allocator loses to fragmentation, nor the states of a generator that
random operators are repeated with, of 5 KB each.
"""

from __future__ import annotations

import gc
import logging
import weakref
from contextlib import contextmanager
from typing import Any, Optional, TYPE_CHECKING

import torch
from torch._dynamo.exc import RestartAnalysis

from .peak_budget import allowed_peak
from .planning import is_number
from .saved_report import format_bytes
from .step_graph import Graph, Step
from .step_plan import StepCurve, StepPlan
from .step_recorder import Learned, Recorder, running, Timeline
from .step_report import GraphUse, Moment, StepSummary, summary_of


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing_extensions import Self


log = logging.getLogger(__name__)
# For the line that tells of a plan; that of torch shows what is passed on to it.
log.setLevel(logging.INFO)

__all__ = ["GraphUse", "Moment", "StepBudget", "StepBudgetError", "StepSummary"]

# How often plans are chosen anew, as compiles tell what those hold that were chosen.
_ROUNDS = 4
# What a device counts may be as much more or less than what was predicted.
_MISS = 0.02
# Of what eager code makes, what a step may leave behind and be recorded only once.
_NEW = 0.01
# Steps that are recorded at most, in order to see again what was not planned for.
_RECORDED = 8


class StepBudgetError(RuntimeError):
    """A step may exceed its bound, and is to be strict."""


class StepBudget:
    """A bound for the peak of each training step that runs within ``with budget:``.

    Args:
        share: of the way from the step's lowest peak to that without a budget, from 0
            to 1.
        peak_bytes: most live bytes beyond those that are there when the step starts
            (parameters, optimizer states, the batch, gradients that are not None).
        device_bytes: most live bytes in all; without any of the three, the memory of the
            device.
        strict: whether what would be a warning, that the bound may not be kept, ends the
            training by a `StepBudgetError` before it can be exceeded.

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
        strict: bool = False,
    ) -> None:
        # A build for GPUs names one even where there is none.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.device = accelerator if accelerator is not None else torch.device("cpu")
        asked = {"share": share, "peak_bytes": peak_bytes, "device_bytes": device_bytes}
        asked = {name: value for name, value in asked.items() if value is not None}
        if len(asked) > 1:
            raise ValueError("pass only one of share, peak_bytes and device_bytes")
        if not asked:
            if accelerator is None:
                raise ValueError(
                    "no accelerator found: pass share, peak_bytes or device_bytes"
                )
            device_bytes = torch.get_device_module(self.device).mem_get_info()[1]
            asked = {"device_bytes": device_bytes}
        ((name, value),) = asked.items()
        if name == "share" and not is_number(value, 0, 1):
            raise ValueError(f"share is {value!r}; it must be a number from 0 to 1")
        if name != "share" and (type(value) is not int or value <= 0):
            raise ValueError(
                f"{name} is {value!r}; it must be a positive number of bytes"
            )
        self._name, self.strict = f"StepBudget({name}={value})", strict
        self.share, self.peak_bytes, self.device_bytes = share, peak_bytes, device_bytes
        self.plan: Optional[StepSummary] = None
        self.measured_peak: Optional[int] = None
        counters = torch.get_device_module(self.device)
        is_counted = hasattr(counters, "reset_peak_memory_stats")
        self._counters: Any = counters if is_counted else None
        # Live bytes at the start of the step that is measured.
        self._start: Optional[int] = None
        # By their numbers; they go with the models that they were compiled for.
        self.graphs: weakref.WeakValueDictionary[int, Graph] = (
            weakref.WeakValueDictionary()
        )
        self._choices: weakref.WeakKeyDictionary[Graph, tuple[int, ...]] = (
            weakref.WeakKeyDictionary()
        )
        self._learned = Learned()
        # What the last step has recorded, and the bytes that are there when one starts.
        self._recorded: Optional[tuple[Recorder, set[Any]]] = None
        self._given = self._parameters = self._states = 0
        # By one of the parameters, what is learned if there is no gradient at a start.
        self._if_anew: list[tuple[weakref.ref[torch.Tensor], Learned]] = []
        # Whether there are no plans yet for what was learned.
        self._is_new = False
        # How many of the next steps are recorded.
        self._to_record = 1
        self._is_first = True
        self._warnings: dict[str, str] = {}

    # ---------------------------------------------------------------- the steps

    def __enter__(self) -> Self:
        left = running.get()
        if left is not None:
            # An exception kept a callback from ending it.
            left.close()
        with self.warn_on_failure("no plan could be made for the step"):
            recorded, self._recorded = self._recorded, None
            if recorded is not None:
                self._learn(*recorded)
            self._check_gradients()
            is_new, self._is_new = self._is_new, False
            if is_new:
                self.make_plan()
        is_planned = self.plan is not None and not self._to_record
        if is_planned and self.measured_peak is None and self._counters is not None:
            self._counters.reset_peak_memory_stats(self.device)
            self._start = self.allocated()
        recorder = None
        if self._to_record:
            recorder = Recorder(self.device, self.allocated())
        Step(self, self._choices, self._learned.states, recorder).open()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        step = running.get()
        if step is None or step.budget is not self:
            return
        step.close()
        start, self._start = self._start, None
        if kind is not None:
            if issubclass(kind, torch.OutOfMemoryError) and hasattr(
                error[0], "add_note"
            ):
                error[0].add_note(str(self))
            return
        if start is not None and self.plan is not None:
            is_all = step.is_largest and step.states == self._learned.states
            self._measure(start, self.plan.predicted_peak, is_all)
        if step.recorder is not None:
            self._to_record -= 1
            with self.warn_on_failure("the step could not be recorded"):
                self._check(step, step.recorder)
        elif not step.states <= self._learned.states:
            self._to_record = _RECORDED
            self.warn_of(min(step.states - self._learned.states, key=lambda s: s[:3]))

    def _check(self, step: Step, recorder: Recorder) -> None:
        """Let the next step be planned by this one, where it tells enough."""
        if recorder.error is not None:
            self._learned.states |= step.states
            raise recorder.error
        if any(kind == "B" for kind, *_ in step.states):
            self._recorded = recorder, step.states
            return
        self._learned.states |= step.states
        if not self._warnings:
            self.warn(
                "no backward of a compiled graph was seen in this step; if the model was "
                "compiled earlier, call torch.compiler.reset() first"
            )

    def _learn(self, recorder: Recorder, states: set[Any]) -> None:
        # What only garbage holds is not there in the next step.
        gc.collect()
        timeline = Timeline(recorder)
        # Buffers that the first step makes once and for all are there in a second.  DDP
        # makes its own anew in that, beside those of the first.
        is_first, self._is_first = self._is_first, False
        if is_first and recorder.reduces:
            self._to_record = 2
        elif is_first and timeline.live > _NEW * timeline.made:
            self._to_record = 1
        is_unsettled = self._to_record > 0 and not self._learned.states
        if not is_unsettled and not states <= self._learned.states:
            # Of two programs that take turns, the second runs next.
            self._to_record = int(is_first and not self.strict)
            self._learned.states |= states
            self._learned.add(timeline)
            for leaf in recorder.with_gradients()[:1]:
                anew = Learned()
                anew.add(Timeline(recorder, anew=True))
                self._if_anew.append((weakref.ref(leaf), anew))
            self._given = max(self._given, recorder.bytes_at_next_start())
            self._parameters = max(self._parameters, recorder.parameter_bytes())
            self._states = max(self._states, recorder.optimizer_bytes())
            self._is_new = True

    def _check_gradients(self) -> None:
        """Whether those are made anew that were there at the start of an earlier step.

        As where two programs take turns, and each gives up its own.
        """
        for each in [*self._if_anew]:
            leaf, learned = each[0](), each[1]
            if leaf is not None and leaf.grad is None:
                self._if_anew.remove(each)
                self._learned.add(learned)
                self._is_new = True

    def warn_of(self, state: Any) -> None:
        """That a step was not planned for, as it had this state."""
        number = state[1]
        graph, calls = self.graphs.get(number), sum(self._learned.calls.get(number, ()))
        name = graph.name if graph is not None else "a graph that is gone"
        what = (
            f"more calls of {name} at once than {calls}, or in another order, or with "
            "gradients of other outputs"
        )
        self.warn(
            f"a step had {what if calls else f'a graph of its own, {name}'}, and no "
            f"recorded one had; from there on it ran by lean plans, and {_RECORDED} more "
            "steps at most are recorded, to plan for it when it comes again",
            "other",
        )

    def graph_like(self, signature: Any) -> Optional[Graph]:
        """The graph of this step that has been compiled for another size."""
        return next((g for g in self.graphs.values() if g.signature == signature), None)

    def allocated(self) -> int:
        """The bytes that the device counts, 0 where it does not."""
        if self._counters is None:
            return 0
        return int(self._counters.memory_allocated(self.device))

    def _measure(self, start: int, predicted: int, is_all: bool) -> None:
        """Compare what the device counted in a step with what was predicted.

        That may be more, unless the step was ``is_all`` that was planned for.
        """
        beyond = start if self.device_bytes is None else 0
        peak = self._counters.max_memory_allocated(self.device) - beyond
        self.measured_peak = peak
        missed = abs(peak - predicted) if is_all else peak - predicted
        if missed > _MISS * predicted:
            self.warn(
                f"the device counted {format_bytes(peak)} in a step, and "
                f"{format_bytes(predicted)} were predicted"
            )

    @contextmanager
    def warn_on_failure(self, what: str) -> Iterator[None]:
        """Training goes on without what fails within; a warning tells of it once."""
        try:
            yield
        except (RestartAnalysis, StepBudgetError):
            # The first is Dynamo's way to begin anew.
            raise
        except Exception as error:
            log.debug("%s", what, exc_info=error)
            self.warn(f"{what}: {type(error).__name__}: {error}")

    def warn(self, reason: str, kind: str = "") -> None:
        """Log a reason, once of its kind; the report has the last one of each."""
        if self.strict:
            raise StepBudgetError(f"{self._name} may be exceeded: {reason}")
        if (kind or reason) not in self._warnings:
            log.warning("%s may be exceeded: %s", self._name, reason)
        self._warnings[kind or reason] = reason

    # ---------------------------------------------------------------- the plan

    def make_plan(self) -> None:
        """Choose plans for what was learned, and for the largest calls so far."""
        learned, given = self._learned, self._given
        graphs = {n: self.graphs[n] for n in learned.calls if n in self.graphs}
        for number, graph in graphs.items():
            graph.expect(learned.missing(number))
        moments = learned.expected(graphs)
        rest = {held: nbytes.total for held, nbytes in moments.items()}

        def find() -> StepCurve:
            """By what the compiles have told so far."""
            plans = {
                number: graph.plans.corrected() for number, graph in graphs.items()
            }
            return StepCurve(plans, learned.calls, rest)

        curve = find()
        # Of estimates but for the lean plans. It stays, whatever compiles tell from here on.
        allowed = wanted = self._allowed(curve, given)
        if self.plan is not None and self.measured_peak is not None:
            # What was not predicted of one step will not be of the next.
            wanted -= max(self.measured_peak - self.plan.predicted_peak, 0)
            self.measured_peak = None
        for left in reversed(range(_ROUNDS + 1)):
            plan = curve.within(wanted)
            if not left or not self._compile(graphs, plan):
                break
            curve = find()
        beyond = given if self.device_bytes is not None else 0
        if plan.peak > allowed:
            self.warn(
                f"the lowest peak found is {format_bytes(plan.peak + beyond)}, and "
                f"{format_bytes(allowed + beyond)} are allowed; the step uses that plan",
                "lowest",
            )
        for number, choice in plan.choices.items():
            self._choices[graphs[number]] = choice
        there = given, self._parameters, self._states
        facts = moments, learned.calls, graphs, allowed, *there
        self.plan = summary_of(plan, curve, *facts, beyond)
        log.info("%s: %s", self._name, self.plan.headline)

    def _compile(self, graphs: Mapping[int, Graph], plan: StepPlan) -> bool:
        """Compile by a plan what ran last; whether one of its peaks was not known."""
        told = [dict(graph.plans.told) for graph in graphs.values()]
        for number, choice in plan.choices.items():
            compiled = graphs[number].current()
            if compiled is not None:
                compiled.compile(choice, self)
        return told != [graph.plans.told for graph in graphs.values()]

    def _allowed(self, curve: StepCurve, given: int) -> int:
        if self.share is not None:
            return allowed_peak(self.share, curve.floor, curve.unbudgeted.peak)
        if self.peak_bytes is not None:
            return self.peak_bytes
        return (self.device_bytes or 0) - given

    def __str__(self) -> str:
        reasons = [f"may be exceeded: {reason}" for reason in self._warnings.values()]
        if self.plan is None:
            line = f"{self._name}: no plan before the second step"
            return "\n".join([line, *reasons])
        plan = self.plan
        peaks = plan.predicted_peak, plan.allowed, plan.floor, plan.unbudgeted
        sizes = [format_bytes(nbytes) for nbytes in peaks]
        what = "in all" if self.device_bytes else "beyond what is live at step start"
        measured = ""
        if self.measured_peak is not None:
            measured = f" ({format_bytes(self.measured_peak)} measured)"
        figures = "; ".join(
            filter(None, (f"figures are {plan.source}", plan.more_work))
        )
        lines = [
            "StepBudget: {} predicted{}, {} allowed (floor: {}, no budget: {}; {})".format(
                sizes[0], measured, *sizes[1:], what
            ),
            f"live at step start: {format_bytes(plan.given)}, of which "
            f"{format_bytes(plan.parameters)} parameters and "
            f"{format_bytes(plan.optimizer_states)} optimizer states; {figures}",
            f"at the peak: {plan.peak}",
            f"at the floor's: {plan.at_floor}",
            *plan.table(),
        ]
        return "\n".join(lines + reasons)

    def plot(self, path: str) -> None:
        """Draw what is live over the step, by kind, into a file that matplotlib knows.

        Raises RuntimeError before there is a plan, ImportError without matplotlib.
        """
        if self.plan is None:
            raise RuntimeError(f"{self._name} has no plan before the second step")
        self.plan.draw(f"{self._name}: {self.plan.headline}", path)
