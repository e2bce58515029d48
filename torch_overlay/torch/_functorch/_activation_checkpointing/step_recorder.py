"""What a training step holds, outside of its compiled graphs, from event to event.

A :class:`Recorder` follows storages through a step, and a :class:`Timeline` turns what it
saw into what :class:`.StepCurve` plans for.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import math
import os
import sys
import threading
import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    TorchDispatchMode,
)
from torch.utils._pytree import tree_leaves

from .step_plan import Held, Missing


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import FrameType
    from typing_extensions import Self

    from .step_graph import Graph, Step


__all__ = [
    "Caller",
    "Event",
    "Learned",
    "Recorder",
    "Timeline",
    "running",
    "running_step",
]


class Event(NamedTuple):
    """A change while a step runs.

    Args:
        kind: "+" and "-", a storage is made and gone; "=", it has ``nbytes`` more; "F" and
            "f", "B" and "b", the forward or backward of a ``call`` begins and ends; "x",
            none of its backward is to come; "d", the caller drops an output.
        storage: its number, -1 where the event is one of a call.
        flag: of "+", whether gradients were recorded; of a call, whether anything is kept
            for a backward to come.
        inputs: of "B", the storages of the graph's inputs and tangents.
    """

    kind: str
    storage: int = -1
    nbytes: int = 0
    call: Any = None
    flag: bool = False
    inputs: Sequence[Optional[int]] = ()


# The step that this thread runs.
running: ContextVar[Optional[Step]] = ContextVar("running step", default=None)


def running_step() -> Optional[Step]:
    """The step that this thread runs, or that the backward which it serves is part of."""
    step = running.get()
    if step is not None and step.caller.has_failed():
        _abandon(step)
        return None
    if step is None and torch._C._is_key_in_tls("context"):
        context = torch._C._get_obj_in_tls("context")
        step = context.get(running) if context is not None else None
    return step


def _abandon(step: Step) -> None:
    """Close a step, unless an operator runs that is recorded in it."""
    modes = _get_current_dispatch_mode_stack()
    if step.recorder is None or (modes and modes[-1] is step.recorder):
        step.close()


class Caller:
    """The code that began a step, for as long as it may come to end the step.

    Where callbacks begin and end steps, each returns, and an exception in the loop that
    calls them leaves a step open.  Its thread may run anything then.
    """

    def __init__(self, frame: Optional[FrameType]) -> None:
        while frame is not None and frame.f_code.co_flags & _RESUMED:
            frame = frame.f_back
        self._frame, self._thread = frame, threading.get_ident()
        self._has_failed = False

    def has_failed(self) -> bool:
        """Whether an exception has ended it.  O(depth of the stack)."""
        if self._frame is None or threading.get_ident() != self._thread:
            return self._has_failed
        while self._frame is not None and not _is_running(self._frame):
            # Whoever called what has returned may come to end the step.
            frame, self._frame = self._frame, self._frame.f_back
            if frame.f_code.co_flags & _RESUMED:
                self._frame = None
            elif not _has_returned(frame):
                self._frame, self._has_failed = None, True
        return self._has_failed

    def forget(self) -> None:
        """Let go of what the code has in its variables."""
        self._frame = None


# What a frame may leave and come back to: nobody can tell whether it has ended.
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _is_running(frame: FrameType) -> bool:
    current: Optional[FrameType] = sys._getframe()
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def _has_returned(frame: FrameType) -> bool:
    """Whether the last instruction of a frame that has ended was to return."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")


def _end_in_child() -> None:
    """Let no process that is forked within a step, such as a loader's, record its own."""
    # Another thread may have had it.
    _resizes.lock = threading.Lock()
    step = running.get()
    if step is not None:
        step.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_child)


class Recorder(TorchDispatchMode):
    """Follows storages through a step, except those inside of compiled graphs.

    ``log`` has an :class:`Event` for each change, ``nbytes`` the size of each storage.
    ``given`` are the bytes that the device counts when the step starts, 0 where it does
    not.
    """

    # As a checkpoint inside of a compiled graph makes of random ones.
    supports_higher_order_operators = True

    def __init__(self, device: torch.device, given: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device.type
        self.log: list[Event] = []
        self.nbytes: list[int] = []
        self.inside = 0
        # Whether gradients are reduced over ranks, as DDP does.
        self.reduces = False
        # Why nothing more is recorded.
        self.error: Optional[Exception] = None
        # Whoever is to end the step, and what was made after that had failed.
        self.caller = Caller(None)
        self._results: list[weakref.ref[Any]] = []
        self._given = given
        self._existing = 0
        # The storages that were seen to be gradients; whether there may be others by now.
        self.seen_gradients: set[int] = set()
        self._ran_backward = False
        # The storages of optimizers that have stepped, and their bytes.
        self._states: dict[int, int] = {}
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._leaves: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )

    def __enter__(self) -> Self:
        _resizes.patch()
        self._hook = register_optimizer_step_post_hook(self._stepped)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _resizes.unpatch()
        self._hook.remove()
        modes = _get_current_dispatch_mode_stack()
        if modes and modes[-1] is self:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        else:
            # Whoever left the step early has left another mode above, and this one.
            self.inside = 1
            self.error = RuntimeError(
                "the step did not end in the dispatch mode it began in"
            )

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        if self.caller.has_failed():
            return self._leave_after(func(*args, **kwargs))
        if self._ran_backward and torch._C._current_graph_task_id() == -1:
            # Before an optimizer uses them up.
            self._ran_backward = False
            self.seen_gradients |= self.gradients()
        self.reduces |= func.name() == "c10d::allreduce_"
        # What lift_fresh takes was made a moment ago, out of the dispatcher's sight.
        if func is not torch.ops.aten.lift_fresh.default:
            self.numbers((args, kwargs), is_existing=True)
        result = func(*args, **kwargs)
        self.numbers(result)
        return result

    def _leave_after(self, result: Any) -> Any:
        """Close the step when this goes, or an earlier result, while no operator runs."""

        def gone(_: Any) -> None:
            step = running.get()
            if step is not None and step.recorder is self:
                _abandon(step)

        self._results += [weakref.ref(s, gone) for s in self._storages(result)]
        return result

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What fails within ends the recording, and not the step."""
        try:
            yield
        except Exception as error:
            self.error = error

    def numbers(self, values: Any, is_existing: bool = False) -> list[Optional[int]]:
        """Those of the storages of each of these values, old ones and new ones.

        What is not known yet was there before the step, or has just been made.
        """
        found: list[Optional[int]] = []
        with self.guarded():
            for value in tree_leaves(values):
                own = [self.follow(s, is_existing) for s in self._storages([value])]
                found.append(min(own, default=None))
        return found

    @contextmanager
    def around(self, begin: Event) -> Iterator[None]:
        """What runs within is a compiled graph's."""
        self.seen_gradients |= self.gradients()
        self._ran_backward |= begin.kind == "B"
        self.log.append(begin)
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self.log.append(begin._replace(kind=begin.kind.lower()))

    def _storages(self, values: Any) -> Iterator[torch.UntypedStorage]:
        for value in tree_leaves(values):
            if self.error is not None or not isinstance(value, torch.Tensor):
                continue
            if hasattr(value, "__tensor_flatten__"):
                names, _ = value.__tensor_flatten__()
                yield from self._storages([getattr(value, name) for name in names])
            elif value.layout is torch.strided:
                storage = value.untyped_storage()
                # A fake tensor's device is another than that of its storage.
                if storage.device.type == self.device:
                    if value.requires_grad and value.is_leaf:
                        self._leaves[id(value)] = value
                    yield storage

    def follow(self, storage: torch.UntypedStorage, is_existing: bool = False) -> int:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._live:
            s, _ = self._live[key]
            if nbytes != self.nbytes[s]:
                self.log.append(Event("=", s, nbytes - self.nbytes[s]))
                self.nbytes[s] = nbytes
            return s
        s = len(self.nbytes)
        self.nbytes.append(nbytes)

        def died(_: Any) -> None:
            del self._live[key]
            self.log.append(Event("-", s))

        self._live[key] = s, weakref.ref(storage, died)
        if is_existing:
            self._existing += nbytes
        else:
            self.log.append(Event("+", s, nbytes, flag=torch.is_grad_enabled()))
        return s

    def remaining(self) -> set[int]:
        """What is still there."""
        return {s for s, _ in self._live.values()}

    def with_gradients(self) -> list[torch.Tensor]:
        """The parameters that have some by now."""
        return [leaf for leaf in self._leaves.values() if leaf.grad is not None]

    def gradients(self) -> set[int]:
        """What is there of the parameters' gradients."""
        grads = [leaf.grad for leaf in self.with_gradients()]
        keys = {storage._cdata for storage in self._storages(grads)}
        return {self._live[key][0] for key in keys & self._live.keys()}

    def parameter_bytes(self) -> int:
        """The bytes of what gradients were wanted for."""
        storages = self._storages([*self._leaves.values()])
        return sum({s._cdata: s.nbytes() for s in storages}.values())

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # The hook is for all threads.
        step = running_step()
        if step is not None and step.recorder is self:
            states = self._storages([*optimizer.state.values()])
            self._states.update((s._cdata, s.nbytes()) for s in states)

    def optimizer_bytes(self) -> int:
        """The bytes of the states of optimizers that have stepped."""
        return sum(self._states.values())

    def bytes_at_next_start(self) -> int:
        """The bytes that are there when the next step starts."""
        made = {event.storage for event in self.log if event.kind == "+"}
        left = sum(self.nbytes[s] for s in self.remaining() & made)
        return (self._given or self._existing) + left


class Bytes(NamedTuple):
    """What eager code holds: in all, what larger inputs make no larger, and gradients."""

    total: int
    fixed: int
    gradients: int


@dataclass
class Learned:
    """What the recorded steps held, and the calls that later ones may make.

    ``moments`` and ``calls`` are the largest of their timelines, and ``scales`` those of the
    calls of each graph, which are numbers here.  ``states`` has every event of a call,
    with the calls that waited meanwhile.
    """

    moments: dict[frozenset[Held], Bytes] = field(default_factory=dict)
    calls: dict[int, list[int]] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)
    states: set[Any] = field(default_factory=set)

    def add(self, other: Timeline | Learned) -> None:
        for held, nbytes in other.moments.items():
            self.moments[held] = max(nbytes, self.moments.get(held, nbytes))
        for graph, calls in other.calls.items():
            both = itertools.zip_longest(calls, self.calls.get(graph, ()), fillvalue=0)
            self.calls[graph] = [*itertools.starmap(max, both)]
        _keep_largest(self.scales, other.scales)

    def missing(self, graph: int) -> Optional[Missing]:
        """What all calls of a graph miss whose backward ran."""
        found = {s[-1] for s in self.states if s[:2] == ("B", graph)}
        return found.pop() if len(found) == 1 else None

    def expected(self, graphs: Mapping[int, Graph]) -> dict[frozenset[Held], Bytes]:
        """The moments of a step with the largest calls of these graphs."""
        scales = ((n, scale) for n, scale in self.scales.items() if n in graphs)
        factor = max((graphs[n].scale / scale for n, scale in scales), default=1.0)
        return {
            held: Bytes(fixed + math.ceil((total - fixed) * factor), fixed, gradients)
            for held, (total, fixed, gradients) in self.moments.items()
            # A graph goes with the model that it was compiled for.
            if all(each.graph in graphs for each in held)
        }


def _keep_largest(of: dict[int, float], new: Mapping[int, float]) -> None:
    for key, value in new.items():
        of[key] = max(value, of.get(key, value))


class Timeline:
    """Live bytes and waiting calls of a recorded step, as the next one is going to be.

    An optimizer's state that is still there then is not made anew, and a gradient only
    until it is added to the one that is there, unless gradients are made ``anew``.
    ``moments`` is the step; of all that eager code made, ``made``, it leaves behind
    ``live`` bytes beside those.  Of each graph, ``calls`` has how many are in each slot,
    and ``scales`` the largest of their scales.
    O(events).
    """

    def __init__(self, recorder: Recorder, anew: bool = False) -> None:
        self.moments: dict[frozenset[Held], Bytes] = {}
        self.calls: dict[int, list[int]] = {}
        self.scales: dict[int, float] = {}
        self.live = self.fixed = self.of_gradients = self.made = 0
        self._log = recorder.log
        self._nbytes = recorder.nbytes
        self._remaining = recorder.remaining()
        self._gradients = set() if anew else recorder.gradients()
        ends = (at for at, event in enumerate(self._log) if event.kind in "fb")
        self._last = max(ends, default=0)
        # Gradients, what stays, and what is resized as shards are, grow with no input.
        resized = {event.storage for event in self._log if event.kind == "="}
        self._all_gradients = recorder.seen_gradients | recorder.gradients()
        self._of_no_input = self._remaining | resized | self._all_gradients
        # What the caller dropped and the backward misses counts only as far as it is saved.
        backwards = (event.call for event in self._log if event.kind == "B")
        self._dropped = {
            call.outputs[at]
            for call in backwards
            for at in (call.missing.outputs if call.missing else ())
        }
        self._passing, self._most = 0, Bytes(0, 0, 0)
        # Of a storage, its bytes beyond those that it had before the step.
        self._beyond: dict[int, int] = {}
        self._waiting: dict[Any, None] = {}
        for at, event in enumerate(self._log):
            if event.kind == "+":
                self._make(at, event)
            elif event.storage >= 0:
                if event.kind != "d" or event.storage in self._dropped:
                    self._change(event)
            elif event.kind in "FB":
                self._begin(at, event)
            else:
                self._end(event)
        self._note(self._most, self._held(self._waiting))

    def _make(self, at: int, event: Event) -> None:
        self.made += event.nbytes
        if event.storage in self._gradients:
            self._passing += event.nbytes
        elif event.flag or event.storage not in self._remaining or at < self._last:
            self._set(event.storage, event.nbytes)
        self._most = max(self._most, self._live())

    def _change(self, event: Event) -> None:
        """A storage is resized or gone."""
        self._passing = 0
        # What was there may have been made out of sight: nothing is gained when it
        # goes, and nothing lost when it is back.
        is_resized = event.kind == "="
        before = self._beyond.get(event.storage, 0)
        self._set(event.storage, before + event.nbytes if is_resized else 0)
        if not is_resized:
            self._beyond.pop(event.storage, None)
        self._most = max(self._most, self._live())

    def _set(self, storage: int, nbytes: int) -> None:
        more = max(nbytes, 0) - max(self._beyond.get(storage, 0), 0)
        self._beyond[storage] = nbytes
        self.live += more
        if storage in self._of_no_input:
            self.fixed += more
        if storage in self._all_gradients:
            self.of_gradients += more

    def _live(self) -> Bytes:
        beside = self.live, self.fixed, self.of_gradients
        return Bytes(*(nbytes + self._passing for nbytes in beside))

    def _count(self, call: Any) -> None:
        graph = call.graph.number
        calls = self.calls.setdefault(graph, [])
        calls += [0] * (call.slot + 1 - len(calls))
        calls[call.slot] += 1
        _keep_largest(self.scales, {graph: call.scale})

    def _begin(self, at: int, event: Event) -> None:
        """A compiled forward or backward runs."""
        held = self._held(self._waiting)
        self._note(self._most, held)
        call = event.call
        if event.kind == "F":
            self._count(call)
            held |= self._held_by(call, "forward")
        else:
            held = self._held({**self._waiting, call: None})
            alone: frozenset[int] = frozenset()
            if not event.flag:
                # What was kept goes while the backward runs, whose peak has that too.
                held -= self._held_by(call, "kept")
                alone = self._held_alone(at, event)
            held |= self._held_by(call, "backward", alone)
        self._passing = 0
        self._most = self._live()
        self._note(self._most, held)

    def _end(self, event: Event) -> None:
        if event.kind == "x":
            # In the midst of what eager code does.
            self._note(self._most, self._held(self._waiting))
        if event.flag:
            self._waiting[event.call] = None
        else:
            self._waiting.pop(event.call, None)
        self._passing = 0
        self._most = self._live()

    def _note(self, nbytes: Bytes, held: frozenset[Held]) -> None:
        """Eager code has so much while calls hold this."""
        self.moments[held] = max(nbytes, self.moments.get(held, nbytes))

    def _held_by(self, call: Any, what: str, of: Any = None) -> frozenset[Held]:
        return frozenset([Held(call.graph.number, call.slot, what, of)])

    def _held(self, calls: Iterable[Any]) -> frozenset[Held]:
        """What waiting calls keep, and their outputs that nobody holds."""
        return frozenset().union(
            *(self._held_by(call, "kept") for call in calls),
            *(
                self._held_by(call, "output", index)
                for call in calls
                for index, s in enumerate(call.outputs)
                if s is not None and s not in self._beyond
            ),
        )

    def _held_alone(self, at: int, begin: Event) -> frozenset[int]:
        """The inputs that a backward alone holds: they die while it runs."""
        dying = set()
        while self._log[at].kind != "b":
            if self._log[at].kind == "-":
                dying.add(self._log[at].storage)
            at += 1
        dying &= self._beyond.keys()
        return frozenset(i for i, s in enumerate(begin.inputs) if s in dying)


class _Resizes:
    """Lets recorders see storages resized, as sharded parameters are to be gathered.

    The dispatcher does not see that.  There is one patch, for all threads that record.
    """

    def __init__(self) -> None:
        self.resize: Any = None
        self._count = 0
        self.lock = threading.Lock()

    def patch(self) -> None:
        with self.lock:
            if not self._count:
                self.resize = torch.UntypedStorage.resize_
                torch.UntypedStorage.resize_ = _resize_and_follow  # type: ignore[assignment]
            self._count += 1

    def unpatch(self) -> None:
        with self.lock:
            self._count -= 1
            if not self._count:
                torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]


_resizes = _Resizes()


def _resize_and_follow(storage: Any, nbytes: int) -> Any:
    step = running_step()
    recorder = step.recorder if step is not None else None
    if recorder is None or storage.device.type != recorder.device:
        return _resizes.resize(storage, nbytes)
    with recorder.guarded():
        recorder.follow(storage, is_existing=True)
    result = _resizes.resize(storage, nbytes)
    with recorder.guarded():
        recorder.follow(storage)
    return result
