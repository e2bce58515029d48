"""One activation memory budget for a training step, however it is compiled.

    >>> budget = StepBudget(share=0.2)
    >>> for batch in data:
    ...     with budget:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> print(budget)

The first step runs on lean plans, which save little, and is recorded: the calls of each
graph, and the bytes that eager code holds meanwhile.  When the next one starts (or the
one after, if the first leaves more behind than gradients), :class:`.Curve` chooses one
or two plans for each graph, and the joint graphs are partitioned and compiled again.

Only storages on the training device count.  Not counted are the workspaces of kernels,
what an allocator loses to fragmentation, and the generator states (5 KB each) that let
random operators repeat their draws.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import weakref
from typing import Any, Optional, TYPE_CHECKING

import torch

from ..ask import one_bound
from ..report.step_summary import GraphUse, Moment, StepSummary
from .calls import is_trained, State, Step
from .current_step import close_step_of
from .graphs import Graph, Graphs
from .messages import StepBudgetError, StepWarnings
from .peak_check import DeviceBytes, memory_of, NEGLIGIBLE, PeakWatch
from .plan_file import PlanFile, StoredGraph, StoredStep
from .plan_step import Bound, plan_step, Present
from .recorder import Recorder
from .recording_schedule import MOST_RECORDED, Recording
from .step_programs import dropped_before, LearnedPrograms, step_program_of
from .tensors import SeenTensors
from .timeline import peak_of_recording, StepTimeline


if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

    from ..peak.curve import Choice


__all__ = ["GraphUse", "Moment", "StepBudget", "StepBudgetError", "StepSummary"]

# A graph's fixed sizes blur its growth, so factors below this one are ignored.
_GROWN = 1.1


class StepBudget(StepWarnings):
    """A bound on the peak of each training step that runs within ``with budget:``.

    Args:
        share: from 0 (the lowest peak found) to 1 (the peak of the fastest plan).
        peak_bytes: the most bytes that may be live beyond those live at the step's
            start (parameters, optimizer states, the batch, gradients that are not
            None): a number, which is rounded down, or text such as "24GiB" (2**30 bytes
            each), "24GB" or "24G" (10**9 bytes each).
        device_bytes: the most bytes that may be live in all, given likewise.  If none
            of the three is given, the accelerator's memory; ValueError without one.
        strict: raise a `StepBudgetError` before the bound can be exceeded, instead of
            warning that it may be.
        plan: the path of a file for the plans, written whenever plans are made, unless
            sizes vary.  Another process that runs the same program reads the file, and
            its first step runs on them.  That step is recorded all the same: if the
            program or the bound differs, a warning says so, and new plans are made.

    ``plan`` is the :class:`StepSummary` of the plans in use, None before there are any.
    ``measured_peak`` is the peak that the device counted in the last step run on them,
    in bytes, comparable with ``plan.predicted_peak``; None if the device counts none.
    A pickle or a copy keeps the arguments, but nothing that was learned.  Raises
    ValueError for invalid arguments, more than one bound or a ``plan`` that is some
    other file, and FileNotFoundError if its folder does not exist.
    """

    def __init__(
        self,
        share: Optional[float] = None,
        *,
        peak_bytes: Optional[float | str] = None,
        device_bytes: Optional[float | str] = None,
        strict: bool = False,
        plan: Optional[str | os.PathLike[str]] = None,
    ) -> None:
        # Unchecked, a GPU build of torch names one even on machines that have none.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.device = accelerator if accelerator is not None else torch.device("cpu")
        asked = one_bound(share=share, peak_bytes=peak_bytes, device_bytes=device_bytes)
        self._arguments = {**asked, "strict": True} if strict else asked
        asked = asked or {"device_bytes": memory_of(accelerator)}
        self._file = None
        if plan is not None:
            self._file = PlanFile(os.fspath(plan), asked)
            self._arguments = {**self._arguments, "plan": os.fspath(plan)}
        ((name, value),) = asked.items()
        super().__init__(f"StepBudget({name}={value})", strict)
        self._bound = Bound(**asked)
        self.share, self.peak_bytes, self.device_bytes = self._bound
        self.measured_peak: Optional[int] = None
        self.counter = DeviceBytes(self.device)
        self.watch = PeakWatch(self.device_bytes is not None)
        self.graphs = Graphs()
        # By graph, the plan of each slot.
        self.choices: weakref.WeakKeyDictionary[Graph, tuple[int, ...]] = (
            weakref.WeakKeyDictionary()
        )
        # What the last step recorded.
        self._recorded: Optional[tuple[Recorder, set[Any]]] = None
        self._seen = SeenTensors()
        # Whether something was learned that is not planned for yet.
        self.has_news = False
        # Before which kind of event old gradients have to go for the plan to fit.
        self._must_drop_before = ""
        stored, why_not = self._file.read() if self._file is not None else (None, "")
        self._start_over(stored)
        if why_not:
            self._warn_of_file(why_not)

    def _start_over(self, stored: Optional[StoredStep] = None) -> None:
        """Start over: from what another process stored, by default from nothing."""
        self.learned, self._recording = LearnedPrograms(), Recording()
        # The bytes live when a step starts, and how many of the allowed bytes are free
        # while no call waits for its backward.
        self._present = Present()
        self.spare = 0
        self.plan: Optional[StepSummary] = None
        # By graph number, the stored plans.
        self._stored: dict[int, StoredGraph] = {}
        self.choices.clear()
        if stored is not None:
            self.learned = LearnedPrograms(stored.programs)
            # Eager code may have changed: record a step to compare with each program.
            self._recording.left = min(len(stored.programs), MOST_RECORDED)
            self._present, self.spare = stored.present, stored.spare
            self.plan, self._stored = stored.summary, stored.graphs

    def __reduce__(self) -> Any:
        return functools.partial(type(self), **self._arguments), ()

    def __enter__(self) -> Self:
        # An exception may have kept a callback from ending the last step.
        left = close_step_of(self)
        if left is not None and left.caller.is_running:
            self.warn(
                "a step began before the last one of this budget had ended, which ended "
                "there; what it holds from then on is not counted"
            )
        with self.warn_on_failure("no plan could be made for the step"):
            recorded, self._recorded = self._recorded, None
            if recorded is not None:
                self._learn_program(*recorded)
            self.has_news |= self.learned.begin_step()
            self.watch.begin(self.counter.live())
            self._learn_start()
            is_new, self.has_news = self.has_news, False
            if is_new and is_trained(self.learned.states):
                self.make_plan()
            elif recorded is not None and self._must_drop_before:
                self._warn_if_over()
        self.counter.begin()
        recorder = None
        if self._recording.left:
            recorder = Recorder(self.device, self.counter.given(), self._seen)
        Step(self, self.choices, self.learned.states, recorder).enter(sys._getframe(1))
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        step = close_step_of(self)
        # If the file turned out to be of another program, the next step is the first.
        if step is None or (step.recorder is None and not self.learned.states):
            return
        if kind is None:
            with self.raise_last():
                self._end_step(step)
            return
        if issubclass(kind, torch.OutOfMemoryError) and hasattr(error[0], "add_note"):
            error[0].add_note(str(self))
        if not self.strict:
            # A strict budget has raised already, when the new call began.
            self._warn_if_unplanned(step)

    def _end_step(self, step: Step) -> None:
        self._recording.end_step(self.counter.counts_peak)
        self._warn_if_unplanned(step)
        is_first, self._recording.expects_new = self._recording.expects_new, False
        if step.passed_over:
            self.watch.warn_if_live_exceeds(self.counter.live(), self.plan, self)
        if step.recorder is not None:
            self._recording.left -= 1
            with self.warn_on_failure("the step could not be recorded"):
                self._keep_recording(step, step.recorder, is_first)
        else:
            peak = self.watch.peak_of(self.counter.peak())
            if self.plan is not None and peak is not None:
                self.measured_peak = peak
                is_all = step.is_largest and step.states == self.learned.states
                self.has_news |= self.watch.compare(peak, self.plan, is_all, self)
            if self.watch.warn_if_not_compiled(self):
                self._recording.record_again(MOST_RECORDED)
            elif self.learned.have_other_calls_than(step.states):
                self._recording.record_again(1)

    def _warn_if_unplanned(self, step: Step) -> None:
        """Warn of a step that was not planned for, and record some of the next ones."""
        new = step.states - self.learned.states - step.passed_over
        if new and step.recorder is None:
            has_more = self.learned.have_fewer_calls_than(new)
            self._recording.record_again(MOST_RECORDED, at_once=has_more)
        if new and not self._recording.expects_new:
            self.warn_unplanned(min(new, key=lambda state: state[:3]))

    def _learn_start(self) -> None:
        """Take note if more is live than when earlier steps began.

        Eager code may hold more during the step as well, so the step is recorded.
        """
        if self.plan is None or self._recording.left or self.has_news:
            return
        if more := self.watch.more_at_start(self.plan):
            self._present = self._present._replace(given=self._present.given + more)
            # Only device_bytes counts them; other bounds are for a step's own bytes.
            self.has_news = self.device_bytes is not None
            self._recording.record_again(1)

    def _keep_recording(self, step: Step, recorder: Recorder, is_first: bool) -> None:
        """Keep a recorded step for the next plan, and warn of what no plan covers."""
        if recorder.error is not None:
            self.learned.states |= step.states
            raise recorder.error
        if recorder.saw_unplanned or recorder.saw_uncounted:
            self.warn_of_other_graphs(recorder.saw_uncounted)
        is_idle = not is_trained(step.states | self.learned.states)
        if is_idle and self._recording.recorded_without_backward() and not self.reasons:
            self.warn(
                "no backward of a compiled graph was seen in this step; run the whole "
                "step within `with budget:`, its backward, too; if the model was "
                "compiled earlier, call torch.compiler.reset() first"
            )
        self._recorded = recorder, step.states
        new = step.states - self.learned.states
        # Plans promise nothing of a program's first step.
        if self.plan is not None and not (new and is_first):
            # A process that begins with stored plans has yet to make what they find.
            with self.warn_on_failure("a recorded step could not be compared"):
                present = Present(recorder.bytes_at_start(self._present.given))
                held = peak_of_recording(recorder, bool(self._stored))
                held += self._bound.counted(present)
                self.watch.warn_of_excess(held, self.plan, self, bool(new))

    def _learn_program(self, recorder: Recorder, states: set[State]) -> None:
        # What only reference cycles keep alive will be gone in the next step.
        gc.collect()
        timeline = StepTimeline(recorder)
        trains, recording = is_trained(states), self._recording
        leaves_much = timeline.live > NEGLIGIBLE * timeline.made
        leaves_much |= bool(self._stored and recorder.with_new_gradients())
        seen = recorder.reduces, leaves_much
        is_first = trains and recording.recorded_training(*seen)
        self.learned.learn_sizes(recorder)
        program = step_program_of(recorder, states, timeline)
        plan, is_planned = self.plan, False
        if plan is not None:
            most = plan.predicted_peak * (1 + NEGLIGIBLE)
            most -= self._bound.counted(self._present)
            is_planned = self.learned.covers_program(program, self.choices, most)
        if self._stored and not is_planned:
            if (is_first and leaves_much) or (recorder.reduces and recording.left):
                # What only first steps make may be all that differs.
                return
            self._start_over()
            self.learned.learn_sizes(recorder)
            self._warn_of_file("a step had other calls, or eager code held more in it")
            recording = self._recording
            recording.left = 0
            is_first = trains and recording.recorded_training(*seen)
        if trains and recording.left and not is_trained(self.learned.states):
            recording.expects_new = True
            return
        is_dropped = self.learned.expect_dropped_gradients(dropped_before(recorder))
        is_more = plan is not None and not is_planned and states <= self.learned.states
        self.learned.add_program(program)
        if is_dropped or not is_planned:
            self.has_news = True
            if trains:
                recording.learned_program(is_first, is_more)
        found = recorder.bytes_at_next_start()
        self._present = Present(*map(max, self._present, found))
        if plan is not None and self.device_bytes is not None:
            most = plan.given + NEGLIGIBLE * plan.predicted_peak
            self.has_news |= self._present.given > most

    def note_gradients_left(self, kind: str, graph: int) -> None:
        """Warn, or record the next step, if the first event of a kind finds old ones."""
        left = self.learned.with_gradients_left(kind, graph)
        must_go = kind == self._must_drop_before
        if must_go and any(kind in program.replaced for program in left):
            self._warn_if_over()
        elif any(program.drops_before == kind for program in left):
            self._recording.record_again(1)

    def _warn_if_over(self) -> None:
        if self.plan is not None and self.plan.predicted_peak > self.plan.allowed:
            self.warn(self.plan.why_over, "lowest", nbytes=self.plan.predicted_peak)

    def warn_unplanned(self, state: State) -> None:
        """Warn that a step was not planned for, because of this new state."""
        reason = self.learned.why_unplanned(state, self.strict)
        # Each time that steps are recorded for it, which is ever less often.
        occasion = self._recording.occasions
        self.warn(reason, f"another {state.name}", occasion=occasion)

    def plans_in_file(self, number: int, name: str, key: str) -> Optional[StoredGraph]:
        """The file's plans for a graph, None if it has none.

        If they are for another graph of this number, the file is of another program.
        """
        found = self._stored.get(number)
        if found is not None and found.key != key:
            self._start_over()
            self._warn_of_file(f"{name} differs from the graph that it has plans for")
        return self._stored.get(number)

    def _warn_of_file(self, reason: str) -> None:
        path = self._arguments["plan"]
        self.warn(f"{path} is not used: {reason}", "file", is_risk=False)

    def make_plan(self, is_growing: bool = False) -> None:
        """Choose plans for what was learned, and for the largest calls so far.

        If ``is_growing``, a call has outgrown its plans, and calls of other graphs
        later in the step are expected to grow as much.
        """
        self.measured_peak = None
        self.watch.forget_usual_start()
        learned = self.learned
        graphs = self.graphs.alive(learned.calls)
        for number, graph in graphs.items():
            graph.expect_missing(learned.missing_in_backwards(number))
        growth = learned.growth(graphs) if is_growing else {}

        def compile_plans(plans: Iterable[Choice], is_last_resort: bool) -> None:
            """Compile each graph, in the last step's largest size, by each plan."""
            for plan in plans:
                for number, graph in graphs.items():
                    compiled = graph.current()
                    if compiled is not None:
                        compiled.compile(plan.choices[number], self, is_last_resort)

        given = self._bound, self._present, self.watch.missed
        found = plan_step(graphs, learned, *given, growth, compile_plans)
        # The next step is planned anew, for the sizes that calls turn out to have.
        self.has_news = any(factor > _GROWN for factor in growth.values())
        plan = found.summary
        self.choices.update({graphs[n]: each for n, each in found.choices.items()})
        self.plan, self.spare = plan, found.spare
        self._must_drop_before = found.fits_if_dropped_before
        if not self._must_drop_before:
            self._warn_if_over()
        if self.device.type == "cpu":
            workspaces = (graph.workspace for graph in graphs.values())
            self.watch.warn_of_workspace(max(workspaces, default=0), plan, self)
        self.tell(found.headline)
        if self._file is not None and plan.predicted_peak <= plan.allowed:
            known = learned.storable_figures(), self._present, plan, found.spare
            with self.warn_on_failure("the plan could not be stored", is_risk=False):
                self._file.store(known, graphs, found.choices)

    def __repr__(self) -> str:
        given = (f"{name}={value!r}" for name, value in self._arguments.items())
        return f"{type(self).__name__}({', '.join(given)})"

    def __str__(self) -> str:
        lines = [f"{self._name}: no plan before the second step"]
        if self.plan is not None:
            lines = self.plan.lines(self.measured_peak, self.device_bytes is not None)
        return "\n".join([*lines, *self.reasons])

    def plot(self, path: str) -> None:
        """Plot the step's live bytes by kind into a file, in the format of its suffix.

        Raises RuntimeError before there is a plan, ImportError without matplotlib.
        """
        if self.plan is None:
            raise RuntimeError(f"{self._name} has no plan before the second step")
        self.plan.draw(f"{self._name}: {self.plan.headline}", path)
