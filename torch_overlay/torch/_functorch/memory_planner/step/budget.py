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
:class:`.Curve` chooses one or two plans for each graph, and they are split and
compiled anew from the joint graphs that were traced.  The second step is recorded, too.

Plans are for the largest calls so far.  A step may make fewer, or smaller ones; where one
is larger, plans are made for that before it runs.  Where a step makes others, some of the
next ones are recorded, until those are seen again.

Only storages on the training device count.  What a kernel allocates for itself does not
count, nor what an allocator loses to fragmentation, nor the states of a generator that
random operators are repeated with, of 5 KB each.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Optional, TYPE_CHECKING

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.utils import counters

from ..ask import as_bytes, is_number
from ..compile.search import Search
from ..report.saved_values import format_bytes
from ..report.step_summary import GraphUse, Moment, StepSummary, summary_of
from .calls import Graph, is_trained, slots_of, State, Step
from .device_bytes import DeviceBytes
from .recorder import Recorder, running_steps
from .timeline import dropped_before, Learned, step_program_of, StepTimeline


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from typing_extensions import Self

    from ..peak.curve import Choice
    from ..peak.menu import Menu


log = logging.getLogger(__name__)

__all__ = ["GraphUse", "Moment", "StepBudget", "StepBudgetError", "StepSummary"]

# By so much a step may hold more than is allowed without a word.
_OVER = 0.005
# What a device counts may be as much more or less than what was predicted.
_MISS = 0.02
# Of what eager code makes, what a step may leave behind and be recorded only once.  Of a
# planned peak, by how much what is live between steps may grow.
_NEW = 0.01
# Less than that tells nothing on a CPU, where the whole process counts.
_NOISE = 2**18
# Steps that are recorded at most, in order to see again what was not planned for.
_RECORDED = 8
# Sizes that are fixed are a part of each graph: by less, none has yet to grow.
_GROWN = 1.1
# The first plans are all told of, and then each tenth.
_TOLD = 3


class StepBudgetError(RuntimeError):
    """A step may exceed its bound, and is to be strict."""


class StepBudget:
    """A bound for the peak of each training step that runs within ``with budget:``.

    Args:
        share: of the way from the step's lowest peak to that without a budget, from 0
            to 1.
        peak_bytes: most live bytes beyond those that are there when the step starts
            (parameters, optimizer states, the batch, gradients that are not None): a
            number, which is rounded down, or text such as "24GiB".
        device_bytes: most live bytes in all; without any of the three, the memory of the
            device.
        strict: whether what would be a warning, that the bound may not be kept, ends the
            training by a `StepBudgetError` before it can be exceeded.

    ``plan`` is the :class:`StepSummary` of the steps from the second on, None before, and
    ``measured_peak`` what the device counted in the last of them, as its
    ``predicted_peak``, None where it does not count.  A pickle or a copy is a new budget
    with the same arguments, which has learned nothing yet.
    Raises ValueError for invalid values.
    """

    def __init__(
        self,
        share: Optional[float] = None,
        *,
        peak_bytes: Optional[float | str] = None,
        device_bytes: Optional[float | str] = None,
        strict: bool = False,
    ) -> None:
        # A build for GPUs names one even where there is none.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.device = accelerator if accelerator is not None else torch.device("cpu")
        asked = _valid(share=share, peak_bytes=peak_bytes, device_bytes=device_bytes)
        self._arguments = {**asked, "strict": True} if strict else asked
        asked = asked or {"device_bytes": _memory_of(accelerator)}
        ((name, value),) = asked.items()
        self._name, self.strict = f"StepBudget({name}={value})", strict
        self.share: Optional[float] = asked.get("share")
        self.peak_bytes: Optional[int] = asked.get("peak_bytes")
        self.device_bytes: Optional[int] = asked.get("device_bytes")
        self.plan: Optional[StepSummary] = None
        self.measured_peak: Optional[int] = None
        self.counter = DeviceBytes(self.device)
        # Live bytes at the start of the step, and of the steps before it.
        self._start: Optional[int] = None
        self._usual_start: Optional[int] = None
        # How many graphs Dynamo had made by then: compiling leaves bytes behind, too.
        self._compiled = 0
        # Bytes that plans leave free, as a device counted so much more than predicted; of
        # what is allowed, those that nobody has while no call waits for its backward.
        self._missed = self._spare = 0
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
        # The parameters that the last recorded step has seen.
        self._leaves: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        # Whether there are no plans yet for what was learned.
        self._is_new = False
        # How many of the next steps are recorded; how many come before more may be, which
        # grows with each time that something new was seen.
        self._to_record = 1
        self._wait = self._pause = 0
        self._is_first = True
        # Whether the next step may be another program, without a word.
        self._expects_new = True
        # Whether there are graphs without a plan, of which a warning has told.
        self.has_unplanned = False
        # Steps in which no backward was seen, and plans so far.
        self._idle = self._plans = 0
        self._warnings: dict[str, str] = {}

    def __reduce__(self) -> Any:
        return functools.partial(type(self), **self._arguments), ()

    # ---------------------------------------------------------------- the steps

    def __enter__(self) -> Self:
        # An exception may have kept a callback from ending a step.
        self._close()
        with self.warn_on_failure("no plan could be made for the step"):
            recorded, self._recorded = self._recorded, None
            if recorded is not None:
                self._learn(*recorded)
            self._is_new |= self._learned.check_gradients()
            self._start = self.counter.live()
            self._check_start()
            is_new, self._is_new = self._is_new, False
            if is_new:
                self.make_plan()
        self.counter.begin()
        recorder = None
        if self._to_record:
            recorder = Recorder(self.device, self.counter.given(), self._leaves)
        Step(self, self._choices, self._learned.states, recorder).open(sys._getframe(1))
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        step = self._close()
        if step is None:
            return
        if kind is None:
            self._check_end(step)
            return
        if issubclass(kind, torch.OutOfMemoryError) and hasattr(error[0], "add_note"):
            error[0].add_note(str(self))
        if not self.strict:
            # Which has raised when the step began what is new.
            self._check_new(step)

    def _check_end(self, step: Step) -> None:
        self._wait = max(self._wait - 1, 0)
        self._check_new(step)
        self._expects_new = False
        if step.passed:
            self.check_live()
        if step.recorder is not None:
            self._to_record -= 1
            with self.warn_on_failure("the step could not be recorded"):
                self._check(step, step.recorder)
        else:
            self._measure(step)
            if self._holds_less(step):
                self._record_again(1)

    def _check_new(self, step: Step) -> None:
        """Warn where a step was not planned for, and record others like it."""
        new = step.states - self._learned.states - step.passed
        if new and step.recorder is None:
            self._record_again(_RECORDED)
        if new and not self._expects_new:
            self.warn_of(min(new, key=lambda state: state[:3]))

    def _close(self) -> Optional[Step]:
        """End the running step of this budget, and those that were begun within it."""
        steps = [*running_steps()]
        own = next((step for step in steps if step.budget is self), None)
        for step in steps[: steps.index(own) + 1] if own is not None else ():
            step.close()
        return own

    def _record_again(self, count: int) -> None:
        """Record the next steps, unless that was done for something new just before."""
        if not self._wait:
            self._to_record = count
            # Not a multiple of the steps after which a loop repeats itself.
            self._pause = 2 * self._pause + 1
            self._wait = count + self._pause

    def _check_start(self) -> None:
        """Whether more is live than when earlier steps began.

        As of a queue that fills, or of states that an optimizer makes late.  Eager code may
        hold more in the step as well, so it is recorded.
        """
        if self._start is None or self.plan is None or self._to_record or self._is_new:
            return
        compiled = counters["stats"]["unique_graphs"]
        if self._usual_start is None or compiled != self._compiled:
            self._usual_start, self._compiled = self._start, compiled
        more = self._start - self._usual_start
        if more > max(_NEW * self.plan.predicted_peak, _NOISE):
            self._usual_start = self._start
            self._given += more
            # Of a step's own bytes these are none.
            self._is_new = self.device_bytes is not None
            self._record_again(1)

    def was_compiling(self) -> None:
        """What is live as steps begin is another number from here on."""
        self._usual_start = None

    def _holds_less(self, step: Step) -> bool:
        """Whether a step made fewer calls at once than each recorded one.

        What runs in eager mode in their place, as beyond Dynamo's limit of recompiles, is
        not planned for.
        """
        programs = self._learned.programs
        slots = slots_of(step.states)
        return all(slots != slots_of(program.states) for program in programs)

    def _check(self, step: Step, recorder: Recorder) -> None:
        """Let the next step be planned by this one, where it tells enough."""
        if recorder.error is not None:
            self._learned.states |= step.states
            raise recorder.error
        is_seen = recorder.saw_unplanned or recorder.saw_uncounted
        if is_seen and not self.has_unplanned:
            self.has_unplanned = True
            uncounted = ", nor are their kernels counted" * recorder.saw_uncounted
            self.warn(
                "compiled graphs ran in the step that have no plan of this budget"
                f"{uncounted}; if they were compiled earlier, call "
                "torch.compiler.reset() first"
            )
        if not is_trained(step.states):
            self._expects_training()
        self._recorded = recorder, step.states
        if self.plan is not None and step.states <= self._learned.states:
            self._check_peak(StepTimeline(recorder, given=recorder.existing))

    def _expects_training(self) -> None:
        """What is first may be a check of all but the training."""
        if is_trained(self._learned.states):
            return
        self._idle += 1
        if self._idle < _RECORDED:
            self._to_record = max(self._to_record, 1)
            self._expects_new = True
        if self._idle > 1 and not self._warnings:
            self.warn(
                "no backward of a compiled graph was seen in this step; if the model was "
                "compiled earlier, call torch.compiler.reset() first"
            )

    def _check_peak(self, step: StepTimeline) -> None:
        """Warn where a recorded step held more than is allowed."""
        graphs = {n: self.graphs[n] for n in step.calls if n in self.graphs}
        plans = {n: graph.plans.corrected() for n, graph in graphs.items()}
        choices = {n: self._choices.get(graph, ()) for n, graph in graphs.items()}
        beyond = self._given if self.device_bytes is not None else 0
        self._warn_of_eager(beyond + step.peak(plans, choices))

    def has_room(self, nbytes: float, while_waiting: bool) -> bool:
        """Whether there may be so much more than plans are for, besides what is allowed.

        While calls wait for their backwards, that is next to nothing.
        """
        plan = self.plan
        if plan is None:
            return False
        return nbytes <= (_OVER * plan.allowed if while_waiting else self._spare)

    def check_live(self) -> None:
        """Warn where more is live than is allowed at any time.

        As of what eager code has made of an evaluation that is not planned for.
        """
        live, start, plan = self.counter.live(), self._start, self.plan
        compiled = counters["stats"]["unique_graphs"]
        if live is None or start is None or plan is None or compiled != self._compiled:
            return
        self._warn_of_eager(live - (start if self.device_bytes is None else 0), _NOISE)

    def _warn_of_eager(self, held: int, more: int = 0) -> None:
        """Warn where a step held more than is allowed, as eager code did."""
        plan: Any = self.plan
        allowed = max(plan.allowed, plan.predicted_peak)
        if held > allowed + max(_OVER * allowed, more):
            self.warn(
                f"a step held {format_bytes(held)}, and {format_bytes(plan.allowed)} are "
                "allowed; what eager code holds in it had not been recorded",
                "eager",
            )

    def _learn(self, recorder: Recorder, states: set[State]) -> None:
        # What only garbage holds is not there in the next step.
        gc.collect()
        timeline = StepTimeline(recorder)
        self._leaves = weakref.WeakSet(recorder.leaves)
        # Buffers that the first step makes once and for all are there in a second.  DDP
        # makes its own anew in that, beside those of the first.
        trains = is_trained(states)
        is_first = trains and self._is_first
        if is_first:
            self._is_first = False
            if recorder.reduces:
                self._to_record = 2
            elif timeline.live > _NEW * timeline.made:
                self._to_record = 1
        if trains and self._to_record and not is_trained(self._learned.states):
            self._expects_new = True
            return
        is_dropped = self._learned.drop_gradients(dropped_before(recorder))
        peak = self.plan.predicted_peak if self.plan is not None else 0
        if (
            self._learned.add(step_program_of(recorder, states, timeline), _NEW * peak)
            or is_dropped
        ):
            self._is_new = is_trained(self._learned.states)
            if trains:
                # Of two programs that take turns, the second runs next.
                self._to_record = int(is_first)
                self._expects_new = is_first
        self._given = max(self._given, recorder.bytes_at_next_start())
        self._parameters = max(self._parameters, recorder.parameter_bytes())
        self._states = max(self._states, recorder.optimizer_bytes())

    def warn_of(self, state: State) -> None:
        """That a step was not planned for, as it had this state."""
        name, calls = state.name, sum(self._learned.calls.get(state.graph, ()))
        if state.kind == "I":
            what = f"a call of {name}, which has no backward, or a larger one"
        elif calls:
            what = (
                f"more calls of {name} at once than {calls}, or in another order, or "
                "with gradients of other outputs"
            )
        else:
            what = f"a graph of its own, {name}"
        self.warn(
            f"a step had {what}, and no recorded one had; from there on it ran by lean "
            f"plans, and {_RECORDED} more steps at most are recorded, to plan for it when "
            "it comes again",
            f"another {name}",
        )

    def graph_like(self, signature: Any) -> Optional[Graph]:
        """The graph of this step that has been compiled for another size."""
        return next((g for g in self.graphs.values() if g.signature == signature), None)

    def _measure(self, step: Step) -> None:
        """Compare what the device counted in a step with what was predicted.

        That may be more, unless the step was all that was planned for.
        """
        peak, plan, start = self.counter.peak(), self.plan, self._start
        if peak is None or plan is None or start is None:
            return
        self.measured_peak = peak - (start if self.device_bytes is None else 0)
        missed = self.measured_peak - plan.predicted_peak
        is_all = step.is_largest and step.states == self._learned.states
        if missed > _MISS * plan.predicted_peak or (
            is_all and -missed > _MISS * plan.predicted_peak
        ):
            self.warn(
                f"the device counted {format_bytes(self.measured_peak)} in a step, and "
                f"{format_bytes(plan.predicted_peak)} were predicted",
                "counted",
                is_risk=missed > 0,
            )
        # What was not predicted of one step will not be of the next.
        if self.measured_peak > plan.allowed and missed > self._missed * (1 + _MISS):
            self._missed, self._is_new = missed, True

    @contextmanager
    def warn_on_failure(self, what: str, is_risk: bool = True) -> Iterator[None]:
        """Training goes on without what fails within; a warning tells of it once."""
        try:
            yield
        except (RestartAnalysis, StepBudgetError):
            # The first is Dynamo's way to begin anew.
            raise
        except Exception as error:
            log.debug("%s", what, exc_info=error)
            self.has_unplanned = True
            self.warn(f"{what}: {type(error).__name__}: {error}", is_risk=is_risk)

    def warn(self, reason: str, kind: str = "", is_risk: bool = True) -> None:
        """Log a reason, once of its kind; the report has the last one of each.

        Unless it ``is_risk``, the bound is kept all the same.
        """
        risk = " may be exceeded" if is_risk else ""
        if self.strict and is_risk:
            raise StepBudgetError(f"{self._name}{risk}: {reason}")
        if (kind or reason) not in self._warnings:
            log.warning("%s%s: %s", self._name, risk, reason)
        self._warnings[kind or reason] = (
            f"may be exceeded: {reason}" if risk else reason
        )

    def _tell(self, plan: StepSummary) -> None:
        """A line for the user, by default too, when torch shows warnings only."""
        self._plans += 1
        is_told = self._plans <= _TOLD or self._plans % 10 == 0
        if is_told and log.isEnabledFor(logging.WARNING):
            # What is asked of TORCH_LOGS stays as it is.
            path, line, *_ = log.findCaller()
            words = "%s: %s", (self._name, plan.headline)
            log.handle(log.makeRecord(log.name, logging.INFO, path, line, *words, None))

    # ---------------------------------------------------------------- the plan

    def make_plan(self, is_growing: bool = False) -> None:
        """Choose plans for what was learned, and for the largest calls so far.

        Where these are being made as one of them ``is_growing``, for as large ones of the
        other graphs, which come later in the step.
        """
        self.measured_peak = None
        self.was_compiling()
        learned, given = self._learned, self._given
        graphs = {n: self.graphs[n] for n in learned.calls if n in self.graphs}
        for number, graph in graphs.items():
            graph.expect(learned.missing(number))
        moments = learned.expected(graphs)
        growth = learned.growth(graphs) if is_growing else {}
        # Unless they have grown by the next step, plans are for what they are.
        self._is_new = any(factor > _GROWN for factor in growth.values())
        rest = {held: nbytes.total for held, nbytes in moments.items()}
        margins = (
            graph.largest.ask.peak_margin
            for graph in graphs.values()
            if graph.plans.model.is_fused
        )

        def menus() -> dict[int, Menu]:
            return {
                n: replace(graph.plans, growth=growth.get(n, 1.0))
                for n, graph in graphs.items()
            }

        search = Search(menus, learned.calls, rest, max(margins, default=0.0))
        # It stays, whatever compiles tell from here on.
        allowed = self._allowed(search, graphs, given)
        wanted = allowed - self._missed
        self._compile(graphs, search.within(wanted, lambda curve: curve.within(wanted)))
        plan, curve = search.compiled().within(wanted), search.known()
        self._compile(graphs, [plan])
        beyond = given if self.device_bytes is not None else 0
        if plan.peak > allowed:
            self.warn(
                f"the lowest peak found is {format_bytes(plan.peak + beyond)}, and "
                f"{format_bytes(allowed + beyond)} are allowed; the step uses that plan",
                "lowest",
            )
        for number, choice in plan.choices.items():
            self._choices[graphs[number]] = choice
        idle = moments.get(frozenset())
        self._spare = wanted - (idle.total if idle is not None else 0)
        there = given, self._parameters, self._states
        facts = moments, learned.calls, graphs, allowed, *there
        self.plan = summary_of(plan, curve, *facts, beyond)
        self._warn_of_workspaces(graphs)
        self._tell(self.plan)

    def _warn_of_workspaces(self, graphs: Mapping[int, Graph]) -> None:
        """Tell what no plan counts, where that is measured."""
        plan: Any = self.plan
        if self.device.type == "cpu":
            most = max((graph.workspace for graph in graphs.values()), default=0)
            if most > _OVER * plan.predicted_peak:
                self.warn(
                    f"a convolution takes up to {format_bytes(most)} for itself on this "
                    "CPU, which no plan counts",
                    "workspaces",
                    is_risk=False,
                )

    def _compile(self, graphs: Mapping[int, Graph], plans: Iterable[Choice]) -> None:
        """Compile, by each plan, what ran last."""
        for plan in plans:
            for number, graph in graphs.items():
                compiled = graph.current()
                if compiled is not None:
                    compiled.compile(plan.choices[number], self)

    def _allowed(self, search: Search, graphs: Mapping[int, Graph], given: int) -> int:
        if self.share is not None:
            tell = any(graph.plans.told for graph in graphs.values())
            self._compile(graphs, search.allowed(self.share) if tell else ())
            return search.known().allowed(self.share)
        if self.peak_bytes is not None:
            return self.peak_bytes
        return (self.device_bytes or 0) - given

    def __repr__(self) -> str:
        given = (f"{name}={value!r}" for name, value in self._arguments.items())
        return f"{type(self).__name__}({', '.join(given)})"

    def __str__(self) -> str:
        reasons = self._warnings.values()
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
        return "\n".join([*lines, *reasons])

    def plot(self, path: str) -> None:
        """Draw what is live over the step, by kind, into a file that matplotlib knows.

        Raises RuntimeError before there is a plan, ImportError without matplotlib.
        """
        if self.plan is None:
            raise RuntimeError(f"{self._name} has no plan before the second step")
        self.plan.draw(f"{self._name}: {self.plan.headline}", path)


def _valid(**bounds: Any) -> dict[str, Any]:
    """The bound that is given, if any; ValueError says what is wrong with it."""
    asked = {name: value for name, value in bounds.items() if value is not None}
    if len(asked) > 1:
        raise ValueError("pass only one of share, peak_bytes and device_bytes")
    for name, value in asked.items():
        if name != "share":
            try:
                asked[name] = as_bytes(value)
            except ValueError as error:
                raise ValueError(f"{name} is {value!r}; it {error}") from None
        elif not is_number(value, 0, 1):
            raise ValueError(f"share is {value!r}; it must be a number from 0 to 1")
    return asked


def _memory_of(accelerator: Optional[torch.device]) -> int:
    """The bytes that an accelerator has; ValueError where there is none."""
    if accelerator is None:
        raise ValueError("no accelerator found: pass share, peak_bytes or device_bytes")
    total: int = torch.get_device_module(accelerator).mem_get_info()[1]
    return total
