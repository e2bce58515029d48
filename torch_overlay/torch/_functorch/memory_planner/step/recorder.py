"""What a training step holds, outside of its compiled graphs, from event to event.

A :class:`Recorder` follows storages through a step, and a :class:`.StepTimeline` turns
its log into the moments that :class:`.Curve` plans for.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager, ExitStack
from typing import Any, Optional, TYPE_CHECKING

import torch
from torch._guards import TracingContext
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    TorchDispatchMode,
)
from torch.utils._pytree import tree_leaves

from .current_step import _abandon, Caller, running, running_step, running_steps
from .single_graph_warnings import CALL, is_compiled
from .tensors import numbers_as_tensors, plain_tensors, SeenTensors
from .timeline import Event

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing_extensions import Self

    from ...._inductor.wrapper_memory import WrapperMemory


def _end_recording_in_child() -> None:
    """Keep a process forked within a step, such as a data loader's, from recording."""
    # Another thread may have held the lock during the fork.
    _patches.lock = threading.Lock()
    step = running.get()
    if step is not None:
        step.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_recording_in_child)


class Recorder(TorchDispatchMode):
    """Follows storages through a step, except those inside of compiled graphs.

    ``log`` has an :class:`Event` for each change, ``nbytes`` the size of each storage.
    ``given`` are the bytes that the device counts when the step starts, 0 where it does
    not.  It adds what it sees to what was ``seen`` before.
    """

    # Checkpoints in compiled graphs wrap random operators in higher-order ones.
    supports_higher_order_operators = True

    def __init__(
        self, device: torch.device, given: int, seen: Optional[SeenTensors] = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device.type
        self.log: list[Event] = []
        self.nbytes: list[int] = []
        self.inside = 0
        # Whether gradients are reduced over ranks, as DDP does.
        self.reduces = False
        # Whether compiled graphs ran that are not the budget's, such as ones compiled
        # before it was made, and whether the bytes of some are unknown.
        self.saw_unplanned = self.saw_uncounted = False
        # The failure that ended the recording.
        self.error: Optional[Exception] = None
        # The code that is to end the step, and results made after that code failed.
        self.caller = Caller(None)
        self._results: list[weakref.ref[Any]] = []
        self._given, self._thread = given, threading.get_ident()
        # Storages that count as older than the step: they existed when first seen.
        self.existing: set[int] = set()
        # Storages seen to be gradients; whether a backward may have made more since.
        self.seen_gradients: set[int] = set()
        self._ran_backward = False
        # The storages of states of optimizers that have stepped, and their bytes.
        self._states: dict[int, int] = {}
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._seen = SeenTensors() if seen is None else seen
        self.leaves = self._seen.leaves
        # Leaves with a gradient when the step begins, and the gradients' storages, those
        # of parameters among them.
        self._had_gradients = {id(leaf) for leaf in self.with_gradients()}
        gradients = [leaf.grad for leaf in self.with_gradients()]
        self.storage_numbers(gradients, is_existing=True)
        self.given_gradients = self.gradients()
        self.given_to_parameters = self.gradients(self.parameters_with_gradients())
        for left in filter(None, (storage() for storage in self._seen.left)):
            self.follow_storage(left, is_existing=True)
        # The storages known to have been live when the step began.
        self.at_start = {*self.existing}

    def __enter__(self) -> Self:
        _patches.apply()
        self._hook = register_optimizer_step_post_hook(self._note_optimizer_states)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _patches.undo()
        self._hook.remove()
        left = filter(None, (storage() for _, storage in self._live.values()))
        self._seen.left = [*map(weakref.ref, left)]
        modes = _get_current_dispatch_mode_stack()
        if modes and modes[-1] is self:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        else:
            # The step was left early: below another mode, this one stays, but inert.
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
        # Tensors that a compile traces look like the device's. Compiles happen within
        # steps: DDP compiles the parts of a model while it runs.
        if self.inside or TracingContext.try_get() is not None:
            return func(*args, **kwargs)
        if self.caller.has_failed():
            return self._leave_after(func(*args, **kwargs))
        if self._ran_backward and torch._C._current_graph_task_id() == -1:
            # Note gradients before an optimizer consumes them.
            self._ran_backward = False
            self.seen_gradients |= self.gradients()
        self.reduces |= func.name() == "c10d::allreduce_"
        # lift_fresh is given a tensor just made, out of the dispatcher's sight.
        if func is not torch.ops.aten.lift_fresh.default:
            self.storage_numbers((args, kwargs), is_existing=True)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            given = numbers_as_tensors(func, args)
            if given is None or isinstance(error, torch.OutOfMemoryError):
                raise
            result = func(*given, **kwargs)
        self.storage_numbers(result)
        return result

    def _leave_after(self, result: Any) -> Any:
        """Return a result, and close the step once one dies while no operator runs."""

        def gone(_: Any) -> None:
            step = running.get()
            if step is not None and step.recorder is self:
                _abandon(step)

        self._results += [weakref.ref(s, gone) for s in self._storages(result)]
        return result

    @contextmanager
    def ending_on_failure(self) -> Iterator[None]:
        """A failure within ends the recording, not the step."""
        try:
            yield
        except Exception as error:
            self.error = error

    def storage_numbers(
        self, values: Any, is_existing: bool = False
    ) -> list[Optional[int]]:
        """Follow the values' storages; return each one's number, None without storage.

        New ones count as older than the step if ``is_existing``, else as just made.
        """
        found: list[Optional[int]] = []
        with self.ending_on_failure():
            for value in tree_leaves(values):
                own = [
                    self.follow_storage(s, is_existing) for s in self._storages([value])
                ]
                found.append(min(own, default=None))
        return found

    @contextmanager
    def around_graph(self, begin: Event) -> Iterator[None]:
        """Log a compiled graph's begin and end, and follow nothing in between."""
        self.seen_gradients |= self.gradients()
        self._ran_backward |= begin.kind == "B"
        self.log.append(begin)
        try:
            with self.following_nothing():
                yield
        finally:
            self.log.append(begin._replace(kind=begin.kind.lower()))

    @contextmanager
    def following_nothing(self) -> Iterator[None]:
        """Leave what runs within to a compiled graph that accounts for it."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def _storages(self, values: Any) -> Iterator[torch.UntypedStorage]:
        if self.error is not None:
            return
        for value in plain_tensors(tree_leaves(values)):
            storage = value.untyped_storage()
            # A fake tensor's device differs from its storage's.
            if storage.device.type == self.device:
                if value.requires_grad and value.is_leaf:
                    self.leaves[id(value)] = value
                elif value.requires_grad and not value._is_view():
                    self._note_unknown_graph(value.grad_fn)
                yield storage

    def follow_storage(
        self, storage: torch.UntypedStorage, is_existing: bool = False
    ) -> int:
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
            is_own = threading.get_ident() == self._thread
            self.log.append(Event("-", s, flag=is_own))

        self._live[key] = s, weakref.ref(storage, died)
        if is_existing:
            self.existing.add(s)
        else:
            self.log.append(Event("+", s, nbytes, flag=torch.is_grad_enabled()))
        return s

    def _note_unknown_graph(self, node: Any) -> None:
        """Note whether a node is of a compiled graph that no step knows."""
        step = running_step()
        # The node of a call is marked only after the call returns.
        if step is not None and step.call is None and is_compiled(node):
            self.saw_unplanned |= CALL not in node.metadata

    def note_run(self, memory: Optional[WrapperMemory], results: Sequence[Any]) -> None:
        """Note a run of inductor's code, which allocates out of the dispatcher's sight.

        ``memory`` is what the code has live, None if unknown.
        """
        if memory is None:
            self.saw_uncounted = True
        else:
            s, peak = len(self.nbytes), memory.peak()
            self.nbytes.append(peak)
            self.log += Event("+", s, peak, flag=True), Event("-", s)
        self.storage_numbers(results)

    def live_storages(self) -> set[int]:
        """The storages that are still live."""
        return {s for s, _ in self._live.values()}

    def with_gradients(self) -> list[torch.Tensor]:
        """The leaves that have a gradient now."""
        return [leaf for leaf in self.leaves.values() if leaf.grad is not None]

    def parameters_with_gradients(self) -> list[torch.Tensor]:
        """The parameters among them.

        Not plain tensors, such as a batch whose gradient was asked for: the next step
        may have another one.
        """
        return [leaf for leaf in self.with_gradients() if isinstance(leaf, Parameter)]

    def with_new_gradients(self) -> list[torch.Tensor]:
        """The parameters that have a gradient now, but had none at the step's start."""
        leaves = self.parameters_with_gradients()
        return [leaf for leaf in leaves if id(leaf) not in self._had_gradients]

    def gradients(self, of: Optional[Iterable[torch.Tensor]] = None) -> set[int]:
        """The live storages of some leaves' gradients, by default of all."""
        grads = [leaf.grad for leaf in (self.with_gradients() if of is None else of)]
        keys = {storage._cdata for storage in self._storages(grads)}
        return {self._live[key][0] for key in keys & self._live.keys()}

    def nbytes_of(self, storages: Iterable[int]) -> int:
        """The bytes of these storages."""
        return sum(self.nbytes[s] for s in storages)

    def lasting_bytes(self) -> int:
        """The bytes of new gradients and optimizer states, which later steps find."""
        states = {self._live[key][0] for key in self._states.keys() & self._live.keys()}
        new = self.gradients(self.with_new_gradients())
        return self.nbytes_of((new | states) - self.existing)

    def _note_optimizer_states(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # The hook fires in all threads.
        step = running_step()
        if step is not None and step.recorder is self:
            states = self._storages([*optimizer.state.values()])
            self._states.update((s._cdata, s.nbytes()) for s in states)

    def bytes_at_start(self, least: int = 0) -> int:
        """The bytes that were live when the step started.

        Where nothing counts them, those that it used or that the last recording left,
        but at ``least`` so many.
        """
        return self._given or max(least, self.nbytes_of(self.existing))

    def bytes_at_next_start(self) -> tuple[int, int, int]:
        """The bytes expected to be live when the next step starts.

        Returns all of them, those of the parameters that were seen, and those of the
        states of optimizers that have stepped.
        """
        left = self.nbytes_of(self.live_storages() - self.existing)
        gone = self.nbytes_of(self.at_start - self.live_storages())
        given = self.bytes_at_start() + left - gone
        storages = self._storages([*self.leaves.values()])
        parameters = {s._cdata: s.nbytes() for s in storages}
        return given, sum(parameters.values()), sum(self._states.values())


class _Patches:
    """Lets recorders see what the dispatcher does not.

    That is storages being resized, as sharded parameters are when gathered, and runs of
    inductor's graphs.  The patches are shared by all threads that record.
    """

    def __init__(self) -> None:
        self.resize: Any = None
        self.run: Any = None
        self._count = 0
        self.lock = threading.Lock()

    def apply(self) -> None:
        from torch._inductor.output_code import CompiledFxGraph

        with self.lock:
            if not self._count:
                self.resize = torch.UntypedStorage.resize_
                self.run = CompiledFxGraph.__call__
                torch.UntypedStorage.resize_ = _resize_recorded_storage  # type: ignore[assignment]
                CompiledFxGraph.__call__ = _run_recorded_graph  # type: ignore[assignment,method-assign]
            self._count += 1

    def undo(self) -> None:
        from torch._inductor.output_code import CompiledFxGraph

        with self.lock:
            self._count -= 1
            if not self._count:
                torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
                CompiledFxGraph.__call__ = self.run  # type: ignore[method-assign]


_patches = _Patches()


def _recorders_of_running_steps() -> list[Recorder]:
    steps = (step.recorder for step in running_steps())
    return [recorder for recorder in steps if recorder is not None]


def _resize_recorded_storage(storage: Any, nbytes: int) -> Any:
    kind = storage.device.type
    recorders = [r for r in _recorders_of_running_steps() if r.device == kind]
    for recorder in recorders:
        with recorder.ending_on_failure():
            recorder.follow_storage(storage, is_existing=True)
    result = _patches.resize(storage, nbytes)
    for recorder in recorders:
        with recorder.ending_on_failure():
            recorder.follow_storage(storage)
    return result


def _run_recorded_graph(graph: Any, inputs: Any) -> Any:
    recorders = [r for r in _recorders_of_running_steps() if not r.inside]
    with ExitStack() as stack:
        # Its inputs are older than the step, what it gives its operators is not.
        for recorder in recorders:
            recorder.storage_numbers(inputs, is_existing=True)
            stack.enter_context(recorder.following_nothing())
        result = _patches.run(graph, inputs)
    for recorder in recorders:
        recorder.note_run(getattr(graph, "memory", None), list(result))
    return result
