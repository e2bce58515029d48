"""What a training step holds, outside of its compiled graphs, from event to event.

A :class:`Recorder` follows storages through a step, and :func:`moments` turns what it saw
into what :class:`.StepCurve` plans for.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    TorchDispatchMode,
)
from torch.utils._pytree import tree_leaves

from .step_plan import Moment


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing_extensions import Self


__all__ = ["Event", "Recorder", "moments", "of_this_thread"]


class Event(NamedTuple):
    """A change while a step runs.

    Args:
        kind: "+" and "-", a storage is made and gone; "=", it has ``nbytes`` more; "F" and
            "f", "B" and "b", the forward or backward of a ``call`` begins and ends; "x",
            none of its backward is to come.
        storage: its number, -1 where the event is one of a call.
        flag: of "+", whether gradients were recorded; of "B", whether what the call saved
            is kept for another backward.
        inputs: of "B", the storages of the graph's inputs and tangents.
    """

    kind: str
    storage: int = -1
    nbytes: int = 0
    call: Any = None
    flag: bool = False
    inputs: Sequence[Optional[int]] = ()


def of_this_thread(variable: ContextVar[Any]) -> Any:
    """A variable's value here, or where the backward was called that this thread serves."""
    value = variable.get(None)
    if value is None and torch._C._is_key_in_tls("context"):
        context = torch._C._get_obj_in_tls("context")
        value = context.get(variable) if context is not None else None
    return value


_recording: ContextVar[Optional[Recorder]] = ContextVar("recording", default=None)


class Recorder(TorchDispatchMode):
    """Follows storages through a step, except those inside of compiled graphs.

    ``log`` has an :class:`Event` for each change, ``nbytes`` the size of each storage.
    """

    # As a checkpoint inside of a compiled graph makes of random ones.
    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device.type
        self.log: list[Event] = []
        self.bytes_at_start = 0
        self.inside = 0
        # Why nothing more is recorded.
        self.error: Optional[Exception] = None
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._leaves: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self.nbytes: list[int] = []
        self.is_existing: list[bool] = []
        self.allocated_at_start = _allocated(device)

    def __enter__(self) -> Self:
        _recording.set(self)
        _resizes.patch()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _recording.set(None)
        _resizes.unpatch()
        modes = _get_current_dispatch_mode_stack()
        if modes and modes[-1] is self:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        else:
            # Whoever left the step early has left another mode above.
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
        # What lift_fresh takes was made a moment ago, out of the dispatcher's sight.
        if func is not torch.ops.aten.lift_fresh.default:
            with self.guarded():
                self.add_existing((args, kwargs))
        result = func(*args, **kwargs)
        with self.guarded():
            self.add_created(result)
        return result

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What fails within ends the recording, and not the step."""
        try:
            yield
        except Exception as error:
            self.error = error

    def add_existing(self, values: Any) -> None:
        """What is not known of these was there before the step."""
        if self.error is not None:
            return
        for storage in self._storages(values):
            self.follow(storage, is_existing=True)

    def add_created(self, values: Any) -> list[Optional[int]]:
        """Number the storages of each of these values."""
        if self.error is not None:
            return []
        return [
            next((self.follow(s) for s in self._storages([value])), None)
            for value in tree_leaves(values)
        ]

    @contextmanager
    def around(self, begin: Event) -> Iterator[None]:
        """What runs within is a compiled graph's."""
        self.log.append(begin)
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self.log.append(Event(begin.kind.lower(), call=begin.call))

    def _storages(self, values: Any) -> Iterator[torch.UntypedStorage]:
        for value in tree_leaves(values):
            if not isinstance(value, torch.Tensor):
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
        self.is_existing.append(is_existing)

        def died(_: Any) -> None:
            del self._live[key]
            self.log.append(Event("-", s))

        self._live[key] = s, weakref.ref(storage, died)
        if is_existing:
            self.bytes_at_start += nbytes
        else:
            self.log.append(Event("+", s, nbytes, flag=torch.is_grad_enabled()))
        return s

    def bytes_at_next_start(self) -> int:
        """The bytes that are there when the next step starts."""
        left = (s for s, _ in self._live.values() if not self.is_existing[s])
        there = self.allocated_at_start or self.bytes_at_start
        return there + sum(self.nbytes[s] for s in left)

    @property
    def created_bytes(self) -> int:
        """The bytes of all that eager code made."""
        return sum(event.nbytes for event in self.log if event.kind == "+")

    def left_behind(self) -> int:
        """The bytes that it left, gradients and the optimizer's states apart."""
        remaining, gradients, last = self.remaining()
        return sum(
            event.nbytes
            for at, event in enumerate(self.log)
            if event.kind == "+"
            and event.storage in remaining - gradients
            and (event.flag or at < last)
        )

    def remaining(self) -> tuple[set[int], set[int], int]:
        """What is still there, the gradients among it, and the last call's end."""
        remaining = {s for s, _ in self._live.values()}
        gradients = {
            self._live[storage._cdata][0]
            for leaf in list(self._leaves.values())
            for storage in self._storages([leaf.grad])
            if storage._cdata in self._live
        }
        ends = (at for at, event in enumerate(self.log) if event.kind in "fb")
        return remaining, gradients, max(ends, default=0)


def moments(recorder: Recorder, number: Mapping[Any, int]) -> list[Moment]:
    """The step as the next one is going to be; ``number`` has that of each graph.

    An optimizer's state that is still there then is not made anew, and a gradient only
    until it is added to the one that is there.  O(events).
    """
    timeline = _Timeline(recorder, number)
    for at, event in enumerate(recorder.log):
        if event.storage >= 0:
            timeline.change(at, event)
        elif event.kind in "FB":
            timeline.begin(at, event)
        else:
            timeline.end(event)
    timeline.pause()
    return timeline.found


class _Timeline:
    """Live bytes and waiting calls, from event to event."""

    def __init__(self, recorder: Recorder, number: Mapping[Any, int]) -> None:
        self.found: list[Moment] = []
        self._nbytes = recorder.nbytes
        self._number = number
        self._remaining, self._gradients, self._last = recorder.remaining()
        self._dying = _dying_in_backward(recorder.log)
        self._live = self._passing = self._most = 0
        # Of a storage: what counts of it, and what would if it had been there before.
        self._there: dict[int, int] = {}
        self._beyond: dict[int, int] = {}
        self._alive: dict[Any, None] = {}
        self._retained: set[Any] = set()

    def change(self, at: int, event: Event) -> None:
        """A storage is made, resized or gone."""
        s = event.storage
        if event.kind == "+":
            if s in self._gradients:
                self._passing += event.nbytes
            elif event.flag or s not in self._remaining or at < self._last:
                self._live += event.nbytes
                self._there[s] = event.nbytes
        else:
            self._passing = 0
            # What was there may have been made out of sight: nothing is gained when it
            # goes, and nothing lost when it is back.
            before = self._there.pop(s, 0)
            change = event.nbytes if event.kind == "=" else -before
            self._beyond[s] = self._beyond.get(s, before) + change
            after = max(self._beyond[s], 0) if event.kind == "=" else 0
            self._live += after - before
            if event.kind == "=":
                self._there[s] = after
        self._most = max(self._most, self._live + self._passing)

    def pause(self) -> None:
        """Eager code has run up to here."""
        held, unheld = self._where(self._alive)
        self.found.append(Moment(self._most, held, None, unheld))

    def begin(self, at: int, event: Event) -> None:
        """A compiled forward or backward runs."""
        self._passing = 0
        self.pause()
        call, phase = event.call, event.kind
        released: frozenset[int] = frozenset()
        calls = self._alive
        if phase == "B":
            calls = {**calls, call: None}
            if event.flag:
                phase = "R"
                self._retained.add(call)
            else:
                released = frozenset(
                    index
                    for index, s in enumerate(event.inputs)
                    if s in self._there and s in self._dying[at]
                )
                self._retained.discard(call)
        running = self._number[call.graph], call.slot, phase
        held, unheld = self._where(calls)
        self.found.append(Moment(self._live, held, running, unheld, released))
        self._most = self._live

    def end(self, event: Event) -> None:
        self._passing = 0
        if event.kind == "f" and event.call.keeps_saved:
            self._alive[event.call] = None
        elif event.call not in self._retained:
            self._alive.pop(event.call, None)
        self._most = self._live

    def _where(self, calls: Iterable[Any]) -> tuple[frozenset[Any], frozenset[Any]]:
        """The graphs and slots of calls, and those of their outputs that nobody holds."""
        held = frozenset((self._number[call.graph], call.slot) for call in calls)
        unheld = frozenset(
            (self._number[call.graph], call.slot, index, self._nbytes[s])
            for call in calls
            for index, s in enumerate(call.outputs)
            if s is not None and s not in self._there and index in call.graph.may_save
        )
        return held, unheld


def _dying_in_backward(log: Sequence[Event]) -> dict[int, set[int]]:
    """What was held for a backward alone: it dies while that runs, by its begin."""
    dying: dict[int, set[int]] = {}
    running: set[int] = set()
    for at, event in enumerate(log):
        if event.kind == "B":
            running = dying[at] = set()
        elif event.kind == "b":
            running = set()
        elif event.kind == "-":
            running.add(event.storage)
    return dying


class _Resizes:
    """Lets recorders see storages resized, as sharded parameters are to be gathered.

    The dispatcher does not see that.  There is one patch, for all threads that record.
    """

    def __init__(self) -> None:
        self._resize: Any = None
        self._count = 0
        self._lock = threading.Lock()

    def patch(self) -> None:
        with self._lock:
            self._count += 1
            if self._count > 1:
                return
            self._resize = resize = torch.UntypedStorage.resize_

            def resize_and_follow(storage: Any, nbytes: int) -> Any:
                return _followed(resize, storage, nbytes)

            torch.UntypedStorage.resize_ = resize_and_follow  # type: ignore[assignment]

    def unpatch(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]


def _followed(resize: Callable[..., Any], storage: Any, nbytes: int) -> Any:
    recorder = of_this_thread(_recording)
    if recorder is None or storage.device.type != recorder.device:
        return resize(storage, nbytes)
    with recorder.guarded():
        recorder.follow(storage, is_existing=True)
    result = resize(storage, nbytes)
    with recorder.guarded():
        recorder.follow(storage)
    return result


_resizes = _Resizes()


def _allocated(device: torch.device) -> int:
    """Bytes that the device's allocator has handed out, 0 where nobody counts them."""
    if device.type in ("cpu", "meta"):
        return 0
    return int(torch.get_device_module(device).memory_allocated())
