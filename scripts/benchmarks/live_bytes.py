"""What a training step holds in memory: the bytes of live storages over time, by kind.

Two recorders make the same `Timeline`. Both are exact, for different things:

`CountedStorages` sees every operator through a dispatch mode and follows each storage
by a weak reference. It works for eager mode, on any device, and for compiled code
whose graphs run operator by operator (backend ``aot_eager_decomp_partition``), in
the backward as well: autograd's threads inherit the mode. It does not see what a
kernel allocates for itself and frees before it returns, nor the few tensors that C++
makes beside the operators (the random generator's state, which a checkpoint saves).

`AllocatedBlocks` replays what the profiler noted of torch's allocators. It also sees
scratch memory of kernels, and the buffers of inductor's kernels, which do not pass
the dispatcher. Its events are too many for long runs.

All sizes are bytes. A storage counts once, whole, however many tensors view it.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


PARAMETER, INPUT, GRADIENT = "parameter", "input", "gradient"
OPTIMIZER, ACTIVATION, TEMPORARY = "optimizer", "activation", "temporary"
KINDS = (PARAMETER, INPUT, GRADIENT, OPTIMIZER, ACTIVATION, TEMPORARY)
GIVEN = (PARAMETER, INPUT)


# ----------------------------------------------------------------- timeline


@dataclass
class Lifetime:
    """A storage's size and kind, and the events between which it was live."""

    nbytes: int
    born: int
    died: Optional[int] = None
    kind: str = TEMPORARY


@dataclass
class Timeline:
    """Lifetimes on a time axis that counts events: one per birth, death or mark.

    ``phases`` maps a name to the index of its first event. What was live before the
    recording began was born at event 0.
    """

    lifetimes: list[Lifetime] = field(default_factory=list)
    phases: dict[str, int] = field(default_factory=dict)
    events: int = 1

    def curve(self, without: Iterable[str] = ()) -> list[int]:
        """Live bytes after each event, those of the kinds in ``without`` left out."""
        excluded = frozenset(without)
        change = [0] * self.events
        for life in self.lifetimes:
            if life.kind not in excluded:
                change[life.born] += life.nbytes
                if life.died is not None:
                    change[life.died] -= life.nbytes
        return list(itertools.accumulate(change))

    def peak(self, without: Iterable[str] = ()) -> int:
        """Most live bytes at any time."""
        return max(self.curve(without))

    def by_kind(self, event: int) -> dict[str, int]:
        """Live bytes of each kind after ``event``; their sum is the whole curve's."""
        live: Counter[str] = Counter()
        for life in self.lifetimes:
            if life.born <= event and (life.died is None or life.died > event):
                live[life.kind] += life.nbytes
        return {kind: live[kind] for kind in KINDS}

    def at_peak(self, without: Iterable[str] = ()) -> dict[str, int]:
        """Live bytes of each kind where the curve without some is first highest."""
        curve = self.curve(without)
        return self.by_kind(curve.index(max(curve)))

    @property
    def saved_bytes(self) -> int:
        """Bytes that the forward allocated and left alive for the backward."""
        return sum(life.nbytes for life in self.lifetimes if life.kind == ACTIVATION)

    def tick(self) -> int:
        self.events += 1
        return self.events - 1


def storages(tensors: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """The storages of those that are tensors, and of tensor subclasses' parts."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            yield from storages(getattr(tensor, name) for name in names)
        elif tensor.layout is torch.strided:
            yield tensor.untyped_storage()


# ---------------------------------------------------------------- recorders


class CountedStorages(TorchDispatchMode):
    """Follows every storage that an operator returns, by a weak reference.

    A storage that is first met as an argument was there before: it is an input unless
    `name` says otherwise. Costs some microseconds per operator.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = Timeline()
        self._live: dict[int, tuple[weakref.ref[Any], Lifetime]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise torch.compile would run a step in eager mode under this one.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # What lift_fresh takes was made a moment ago, out of the dispatcher's sight.
        if func is not torch.ops.aten.lift_fresh.default:
            for storage in storages(tree_leaves((args, kwargs))):
                self._follow(storage, 0, INPUT)
        result = func(*args, **kwargs)
        for storage in storages(tree_leaves(result)):
            self._follow(storage, None, TEMPORARY)
        return result

    def _follow(
        self, storage: torch.UntypedStorage, born: Optional[int], kind: str
    ) -> Lifetime:
        key = storage._cdata
        if key in self._live:
            life = self._live[key][1]
            if life.nbytes == storage.nbytes():
                return life
            # Resized in place: to the curve a new storage of the same kind.
            kind, born = life.kind, None
            life.died = self.timeline.tick()
        if born is None:
            born = self.timeline.tick()
        life = Lifetime(storage.nbytes(), born, None, kind)
        self.timeline.lifetimes.append(life)

        def died(_: Any) -> None:
            self._live.pop(key)[1].died = self.timeline.tick()

        self._live[key] = (weakref.ref(storage, died), life)
        return life

    def name(self, kind: str, tensors: Iterable[Any]) -> None:
        """Say of what kind these tensors' storages are."""
        for storage in storages(tensors):
            self._follow(storage, 0, kind).kind = kind

    def name_new(self, kind: str, since: str, apart_from: Iterable[Any] = ()) -> None:
        """Say of what kind the live storages are that were born in or after a phase."""
        known = {storage._cdata for storage in storages(apart_from)}
        for key, (_, life) in self._live.items():
            if life.born > self.timeline.phases[since] and key not in known:
                life.kind = kind

    def phase(self, name: str) -> None:
        """From here on time belongs to the phase ``name``."""
        self.timeline.phases[name] = self.timeline.tick()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        # Deaths after the recording are no events of it.
        self._live.clear()


class AllocatedBlocks:
    """Replays the allocations that the profiler noted, of all devices together.

    The timeline is there after the ``with`` block. On CUDA a block is what the
    caching allocator hands out, a multiple of 512 bytes.
    """

    PREFIX = "live_bytes:"

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._profiler = torch.profiler.profile(
            activities=torch.profiler.supported_activities(), profile_memory=True
        )
        self._actions: list[Callable[[dict[int, Lifetime]], None]] = []

    def __enter__(self) -> AllocatedBlocks:
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        if error[0] is None:
            self._replay()

    def _at_this_time(self, action: Callable[[dict[int, Lifetime]], None]) -> None:
        with torch.profiler.record_function(f"{self.PREFIX}{len(self._actions)}"):
            self._actions.append(action)

    def name(self, kind: str, tensors: Iterable[Any]) -> None:
        """Say of what kind these tensors' storages are."""
        known = {s.data_ptr(): s.nbytes() for s in storages(tensors) if s.nbytes()}

        def act(live: dict[int, Lifetime]) -> None:
            for pointer, nbytes in known.items():
                if pointer not in live:
                    live[pointer] = Lifetime(nbytes, 0)
                    self.timeline.lifetimes.append(live[pointer])
                live[pointer].kind = kind

        self._at_this_time(act)

    def name_new(self, kind: str, since: str, apart_from: Iterable[Any] = ()) -> None:
        """Say of what kind the live blocks are that were born in or after a phase."""
        known = {storage.data_ptr() for storage in storages(apart_from)}

        def act(live: dict[int, Lifetime]) -> None:
            for pointer, life in live.items():
                if life.born > self.timeline.phases[since] and pointer not in known:
                    life.kind = kind

        self._at_this_time(act)

    def phase(self, name: str) -> None:
        """From here on time belongs to the phase ``name``."""

        def act(live: dict[int, Lifetime]) -> None:
            self.timeline.phases[name] = self.timeline.tick()

        self._at_this_time(act)

    def _replay(self) -> None:
        profiler = self._profiler.profiler
        assert profiler is not None and profiler.kineto_results is not None
        tree = profiler.kineto_results.experimental_event_tree()
        live: dict[int, Lifetime] = {}
        for event in sorted(self._flat(tree), key=lambda event: event.start_time_ns):
            if event.tag != _EventType.Allocation:
                if event.name.startswith(self.PREFIX):
                    self._actions[int(event.name[len(self.PREFIX) :])](live)
                continue
            pointer, nbytes = event.extra_fields.ptr, event.extra_fields.alloc_size
            if nbytes > 0:
                live[pointer] = Lifetime(nbytes, self.timeline.tick())
                self.timeline.lifetimes.append(live[pointer])
            elif pointer in live:
                live.pop(pointer).died = self.timeline.tick()

    def _flat(self, events: Iterable[Any]) -> Iterator[Any]:
        waiting = list(events)
        while waiting:
            event = waiting.pop()
            yield event
            waiting += event.children


# ------------------------------------------------------------ training step


def record_step(
    forward: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    inputs: Iterable[Any] = (),
    optimizer: Optional[torch.optim.Optimizer] = None,
    set_to_none: bool = True,
    allocator: bool = False,
    trains: bool = True,
) -> Timeline:
    """Run one training step and record it, in phases named after its parts.

    ``forward`` returns the scalar loss. The phases are ``forward``, ``backward``,
    ``optimizer`` (where there is one) and ``end``. What the step may compile must be
    compiled before. With ``allocator`` the recorder is `AllocatedBlocks`; what does
    not train stops after the forward.

    Kinds: ``activation`` is what the forward left alive for the backward, the loss
    itself excepted; ``gradient`` what stands in a parameter's ``grad`` when the
    backward is over; ``temporary`` all that remains, such as what a backward
    computes again, or passes on between two operators.
    """
    parameters, inputs = list(parameters), tree_leaves(inputs)
    recorder = AllocatedBlocks() if allocator else CountedStorages()

    def name_all() -> None:
        recorder.name(GRADIENT, [parameter.grad for parameter in parameters])
        if optimizer is not None:
            state = tree_leaves(list(optimizer.state.values()))
            recorder.name(OPTIMIZER, state)

    gc.collect()
    with recorder:
        recorder.name(INPUT, inputs)
        recorder.name(PARAMETER, parameters)
        name_all()
        recorder.phase("forward")
        loss = forward()
        if trains:
            recorder.name_new(ACTIVATION, "forward", apart_from=[loss])
            recorder.phase("backward")
            loss.backward()
            name_all()
        if optimizer is not None:
            recorder.phase("optimizer")
            optimizer.step()
            name_all()
            optimizer.zero_grad(set_to_none)
        recorder.phase("end")
    return recorder.timeline


def cuda_peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes that CUDA's allocator had handed out at once while ``call`` ran.

    Includes all that was live before, parameters and inputs too.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
