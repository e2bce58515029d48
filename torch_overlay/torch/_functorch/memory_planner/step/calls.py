"""The calls that a training step makes of its compiled graphs.

A :class:`Step` is one run of a step.  It gives each call its slot and its plan, and
notes each event as a :class:`State`, by which steps are compared.  Calls of a graph
that wait for their backward at once have different slots: each takes the lowest free.
"""

from __future__ import annotations

import itertools
import math
import weakref
from contextlib import ExitStack
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch._functorch import config
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachingTorchDispatchMode, _recomputation_hook

from .call import Call
from .current_step import Caller, running
from .peak_check import SLACK
from .tensors import storages_in


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import FrameType

    from ..graph.inputs_outputs import Missing
    from .budget import StepBudget
    from .compiled_graph import CompiledGraph
    from .graphs import Graph
    from .recorder import Recorder


# Scales that differ by a smaller factor are the same.
_ROUNDED = 1 + 1e-6


class State(NamedTuple):
    """An event of a call, with a hash of the calls that wait meanwhile (``waiting``).

    ``kind`` is "F" or "B" where a forward or backward begins, or "I" where a call of a
    graph without a backward begins.  The ``slot`` of the latter is the number of
    earlier calls whose results are still there, its ``size`` the largest product of
    symbolic sizes so far.  ``graph`` is the graph's number, ``flag`` that of an
    :class:`.Event`.
    """

    kind: str
    graph: int
    slot: int
    name: str
    flag: bool = False
    is_first_round: bool = True
    waiting: int = 0
    missing: Optional[Missing] = None
    size: int = 0


def is_trained(states: Iterable[State]) -> bool:
    """Whether there was a backward."""
    return any(state.kind == "B" for state in states)


def slots_of(states: Iterable[State]) -> set[tuple[int, int]]:
    """The graphs that were called, and their slots."""
    return {(state.graph, state.slot) for state in states}


class Step:
    """One run of a step, perhaps recorded; ``choices`` are the plans of graphs' slots.

    From the first event that is not ``known``, calls run by their lean plans.
    """

    def __init__(
        self,
        budget: StepBudget,
        choices: Mapping[Graph, tuple[int, ...]],
        known: set[State],
        recorder: Optional[Recorder],
    ) -> None:
        self.budget, self.choices, self.recorder = budget, choices, recorder
        # All events so far; plans are for the known ones.
        self.states: set[State] = set()
        self._known, self._is_known = known, True
        # Whether all calls are as large as those that plans are for.
        self.is_largest = True
        # The scale of the largest call of each graph so far.
        self._largest: dict[Graph, float] = {}
        # The call whose forward is running.
        self.call: Optional[Call] = None
        # Calls without a backward, and the storages that they returned; which of the
        # calls no plan has to count, as there is room for them.
        self._returned: list[tuple[State, list[weakref.ref[Any]]]] = []
        self.passed_over: set[State] = set()
        # The calls that something is kept for, and a hash of them.
        self._waiting: set[Call] = set()
        self._key = 0
        # Backwards make gradients in the first round, and add to them in later ones.
        self._is_first_round = True
        # The plans of calls that a checkpoint runs again, which must save the same, and
        # the calls that it has run again, until their backwards begin.
        self._checkpointed: dict[weakref.ref[CompiledGraph], int] = {}
        self._reruns: dict[weakref.ref[CompiledGraph], list[Call]] = {}
        # The calls that these stand for, until their backwards have run, or never will.
        self._first_runs: set[Call] = set()
        self._context = ExitStack()
        # The step of another budget within which this one runs.
        self.outer: Optional[Step] = None

    def enter(self, caller: FrameType) -> None:
        self.caller, self.outer = Caller(caller), running.get()
        running.set(self)
        # A cached graph would not have the plan of the step.
        self._context.enter_context(config.patch(enable_autograd_cache=False))
        if self.recorder is not None:
            # Count what runs without a plan, such as a teacher without gradients.
            told: Any = {"live_bytes_of": str(self.budget.device)}
            self._context.enter_context(inductor_config.patch(told))
            self.recorder.caller = self.caller
            self._context.enter_context(self.recorder)

    def leave(self) -> None:
        running.set(self.outer)
        self.call = None
        self.caller.forget()
        self._context.close()

    def is_largest_so_far(self, graph: Graph, scale: float) -> bool:
        """Whether the step has had no call of the graph that is larger."""
        most = self._largest[graph] = max(scale, self._largest.get(graph, scale))
        return scale == most

    def begin(self, compiled: CompiledGraph, sizes: tuple[int, ...]) -> Call:
        """Start a call of a graph, in one of its sizes."""
        graph = compiled.graph
        scale = compiled.scales.get(sizes, graph.scale)
        hook = self._hook_of_checkpoint()
        # All that a checkpoint runs again run by one plan, and so have one slot.
        slot = 0 if hook else self.next_slot(graph)
        is_rerun = hook == _recomputation_hook.__name__
        call = Call(
            graph,
            weakref.ref(compiled),
            self,
            sizes,
            scale,
            slot,
            is_checkpointed=bool(hook),
            is_rerun=is_rerun,
        )
        call.state = self._note_call("F", call, call.keeps_saved)
        self._check_size(call, call.state)
        if call.keeps_saved:
            self._waiting.add(call)
            self._key += hash((graph.number, slot))
        return call

    def _check_size(self, call: Call, state: State) -> None:
        """Plan anew if a call is larger than those in its place, as others may be."""
        learned, graph = self.budget.learned, call.graph
        planned = learned.planned_size(state) * graph.scale
        self.is_largest &= call.scale >= planned / _ROUNDED
        if call.scale > planned * _ROUNDED:
            learned.let_vary(graph)
            if graph in self.choices:
                self.budget.make_plan()

    def plan_of_repeated_call(self, call: Call, plan: int) -> int:
        """The plan of a call: the one it had before, if a checkpoint runs it again.

        If it does so now, the call is kept for a backward to come.
        """
        if not call.is_checkpointed:
            return plan
        if call.is_rerun:
            self._reruns.setdefault(call.compiled, []).append(call)
        else:
            self._first_runs.add(call)
        return self._checkpointed.setdefault(call.compiled, plan)

    def saved_by(self, call: Call) -> Call:
        """The call that saved what the backward of ``call`` gets.

        That is another one if a checkpoint ran it again: of several, the last, as
        backwards run in reverse order.
        """
        reruns = self._reruns.get(call.compiled) if call.is_checkpointed else None
        return reruns.pop() if reruns else call

    def begin_backward(self, call: Call, is_retained: bool) -> None:
        self._note_call("B", call, is_retained)

    def begin_without_backward(
        self, graph: int, name: str, size: int, peak: Optional[int]
    ) -> State:
        """Start a call of a graph that has no backward.

        If the budget has room for its ``peak`` bytes (None if unknown), no plan has to
        count it, and only a step that is recorded notes it.
        """
        left, held = self._live_results_without_backward()
        slot = sum(each.graph == graph for each in left)
        state = State("I", graph, slot, name, waiting=self._key, size=size)
        most, while_waiting = math.inf if peak is None else peak, bool(self._waiting)
        if state in self._known or not self._has_room_for(most, held, while_waiting):
            self.note_state(state)
            return state
        self.passed_over.add(state)
        if self.recorder is not None:
            self.states.add(state)
        return state

    def end_without_backward(
        self, state: State, given: set[int], results: Sequence[Any]
    ) -> None:
        """Note the storages that it returned, except those that it was ``given``."""
        storages = storages_in(results)
        made = [weakref.ref(each) for each in storages if each._cdata not in given]
        self._returned.append((state, made))

    def _has_room_for(self, peak: float, left: int, while_waiting: bool) -> bool:
        """Whether there is room for the ``peak`` of a call that no plan counts.

        Neither do plans count what such calls have ``left``, nor a batch that eager
        code made for this one.  While other calls wait, few bytes fit.
        """
        plan, watch = self.budget.plan, self.budget.watch
        if plan is None:
            return False
        if while_waiting:
            return left + peak <= SLACK * plan.allowed
        if left + peak > self.budget.spare:
            return False
        return watch.has_room_for(peak, self.budget.counter.live(), plan)

    def _live_results_without_backward(self) -> tuple[list[State], int]:
        """Calls without backward whose results live; the bytes of those passed over."""
        nbytes: dict[int, int] = {}
        left: list[tuple[State, list[weakref.ref[Any]]]] = []
        for state, references in self._returned:
            there = [each for each in references if each() is not None]
            left += [(state, there)] * bool(there)
            if state in self.passed_over:
                storages: Any = (each() for each in there)
                nbytes.update((each._cdata, each.nbytes()) for each in storages)
        self._returned = left
        return [state for state, _ in left], sum(nbytes.values())

    def next_slot(self, graph: Graph) -> int:
        taken = {each.slot for each in self._waiting if each.graph is graph}
        return next(k for k in itertools.count() if k not in taken)

    def plan_of(self, graph: Graph, slot: int) -> int:
        """The plan of a call in a slot, the lean one where none was chosen."""
        plans = self.choices.get(graph, ()) if self._is_known else ()
        return plans[slot] if slot < len(plans) else graph.lean

    def _note_call(self, kind: str, call: Call, flag: bool) -> State:
        if self.passed_over:
            self._recount_passed_over()
        number, name = call.graph.number, call.graph.name
        if all(state.kind != kind for state in self.states):
            self.budget.note_gradients_left(kind, number)
        waits = flag, self._is_first_round, self._key, call.missing
        state = State(kind, number, call.slot, name, *waits)
        self.note_state(state)
        return state

    def _recount_passed_over(self) -> None:
        """Note calls that were passed over if there is no room for what they left."""
        left, nbytes = self._live_results_without_backward()
        if not self._has_room_for(0, nbytes, while_waiting=True):
            for state in self.passed_over.intersection(left):
                self.note_state(state)
            self.passed_over.difference_update(left)
        live, plan = self.budget.counter.live(), self.budget.plan
        self.budget.watch.warn_if_live_exceeds(live, plan, self.budget)

    def note_state(self, state: State) -> None:
        """Note an event; strict budgets raise where it was not planned for."""
        self.states.add(state)
        self._is_known = self._is_known and state in self._known
        is_planned = self.recorder is None or self.budget.plan is not None
        if self.budget.strict and not self._is_known and is_planned:
            self.budget.warn_unplanned(state)

    def end(self, call: Call, has_run: bool = False) -> bool:
        """Nothing is kept for the call any more; returns whether something was."""
        is_waiting = call in self._waiting
        if is_waiting:
            self._waiting.discard(call)
            self._key -= hash((call.graph.number, call.slot))
        if has_run and not self._waiting:
            self._is_first_round = False
        if call in self._first_runs:
            self._first_runs.remove(call)
            self._end_spare_reruns(call.compiled)
        return is_waiting

    def _end_spare_reruns(self, compiled: weakref.ref[CompiledGraph]) -> None:
        """End reruns that no backward is to come for, as more wait than first runs."""
        reruns = self._reruns.get(compiled, [])
        count = sum(each.compiled == compiled for each in self._first_runs)
        excess = max(len(reruns) - count, 0)
        spare, reruns[:] = reruns[:excess], reruns[excess:]
        for call in spare:
            self.end(call)
            call.note_end()

    def _hook_of_checkpoint(self) -> str:
        """The name of the hooks that a checkpoint has set around the call, or empty."""
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            return ""
        pack, _ = hooks
        if getattr(pack, "__module__", None) == torch.utils.checkpoint.__name__:
            modes = _get_current_dispatch_mode_stack()
            if any(isinstance(each, _CachingTorchDispatchMode) for each in modes):
                self.budget.warn(
                    "selective checkpoints are set around compiled graphs; what they "
                    "save of their operators is not counted. Set them within what is "
                    "compiled",
                    "selective",
                )
            return str(pack.__qualname__).partition(".")[0]
        self.budget.warn(
            "saved-tensor hooks are set around compiled graphs; whatever they keep "
            "instead of a saved value is counted as if the value were kept"
        )
        return ""
