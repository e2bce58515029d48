"""What a training step holds in memory, and what it computes.

`CountedStorages` sees every operator through a dispatch mode and follows each storage
by a weak reference. It works for eager mode, on any device, and for compiled code
whose graphs run operator by operator (backend ``aot_eager_decomp_partition``), in
the backward as well: autograd's threads inherit the mode. It does not see what a
kernel allocates for itself and frees before it returns, nor the few tensors that C++
makes beside the operators (the random generator's state, which a checkpoint saves).

`allocations` adds up what the profiler noted of torch's allocators. It also sees
scratch memory of kernels, and the buffers of inductor's kernels, which do not pass
the dispatcher. Its events are too many for long runs.

All sizes are bytes. A storage counts once, whole, however many tensors view it.
"""

import bisect
import gc
import hashlib
import itertools
import os
import time
import timeit
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional, Self
from unittest import mock

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


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


class CountedStorages(TorchDispatchMode):
    """Follows every storage that an operator returns, by a weak reference.

    ``given`` are the bytes that were there before: those of the tensors ``there``, and
    of every storage that is first met as an argument. ``risen`` is how much more (or
    less) is live now, ``peak`` the most that it ever was, and ``flops`` are those of all
    operators. Costs some microseconds per operator. Of a higher-order operator (a random
    one within a compiled checkpoint) it sees what goes in and what comes out.
    """

    supports_higher_order_operators = True

    def __init__(self, there: Iterable[Any] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = self.risen = self.peak = self.flops = 0
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._meet(there)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise torch.compile would run a step in eager mode under this one.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # DDP compiles the parts of a model while it runs, and what is traced for that
        # looks like tensors of the device.
        if TracingContext.try_get() is not None:
            return func(*args, **kwargs)
        # What lift_fresh takes was made a moment ago, out of the dispatcher's sight.
        if func is not torch.ops.aten.lift_fresh.default:
            self._meet(tree_leaves((args, kwargs)))
        result = func(*args, **kwargs)
        for storage in storages(tree_leaves(result)):
            self._follow(storage)
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result

    def _meet(self, tensors: Iterable[Any]) -> None:
        for storage in storages(tensors):
            self._meet_storage(storage)

    def _meet_storage(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._live:
            # It was there before, so nothing rises.
            self.given += storage.nbytes()
            self.risen -= storage.nbytes()
        self._follow(storage)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        reference, before = self._live.get(key, (None, 0))

        def died(_: Any) -> None:
            self.risen -= self._live.pop(key)[1]

        # Its size may have changed in place.
        self._live[key] = reference or weakref.ref(storage, died), nbytes
        self.risen += nbytes - before
        self.peak = max(self.peak, self.risen)

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resize_and_follow(storage: torch.UntypedStorage, size: int) -> Any:
            self._meet_storage(storage)
            result = resize(storage, size)
            self._follow(storage)
            return result

        # The dispatcher knows nothing of it; FSDP frees what it gathered this way.
        self._resizing = mock.patch.object(
            torch.UntypedStorage, "resize_", resize_and_follow
        )
        self._resizing.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._resizing.stop()
        # Deaths after the recording are none of its business.
        self._live.clear()


def allocations(call: Callable[[], Any], scratch: bool = True) -> tuple[Any, int, int]:
    """What a call returned, and the bytes beyond those that were live before it: the most
    that torch's allocators, of all devices together, had handed out at once, and those
    that were left at its end. On CUDA a block is a multiple of 512. Without ``scratch``,
    what operators have while they run counts as far as it is left when they end."""
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call()
    profiler = profile.profiler
    assert profiler is not None and profiler.kineto_results is not None
    events = sorted(profiler.kineto_results.events(), key=lambda e: e.start_ns())
    operators = [e for e in events if not scratch and e.name().startswith("aten::")]
    starts = [e.start_ns() for e in operators]
    ends = (e.start_ns() + e.duration_ns() for e in operators)
    # An operator may call others, which end before it does.
    outer_ends = [0, *itertools.accumulate(ends, max)]

    def counted_at(event: Any) -> int:
        at: int = event.start_ns()
        end: int = outer_ends[bisect.bisect(starts, at)]
        return max(at, end)

    memory = (e for e in events if e.name() == "[memory]")
    groups = itertools.groupby(memory, counted_at)
    changes = [sum(e.nbytes() for e in group) for _, group in groups]
    live = list(itertools.accumulate(changes, initial=0))
    return result, max(live), live[-1]


class _Drawn(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            arguments = func._schema.arguments
            given = {each.name: each.default_value for each in arguments}
            given.update(zip(given, args), **(kwargs or {}))
            # Attention without dropout draws nothing.
            if given.get("dropout_p") != 0:
                self.operators.add(str(func))
        return func(*args, **(kwargs or {}))


def random_operators(mode: Any, module: torch.nn.Module, inputs: Any) -> set[str]:
    """Those that draw numbers in a forward of fake tensors."""
    drawn = _Drawn()
    with mode, drawn:
        module(*inputs)
    return drawn.operators


def device_peak(call: Callable[[], Any], device: str) -> int:
    """The most bytes that a call takes of a device's allocator beyond what was there.

    On a CPU, without what operators take for themselves, of which no plan knows.
    """
    gc.collect()
    if device == "cpu":
        return allocations(call, scratch=False)[1]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Those of a call, without what else runs, and without garbage collection."""
    return timeit.timeit(call, timer=time.process_time, number=1)


def compile_seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of a call, with those of the compilers that it starts."""
    start = sum(os.times()[:4])
    call()
    return round(sum(os.times()[:4]) - start, 2)


class Step(NamedTuple):
    """A training step, in bytes and flops, and its gradients.

    ``saved_bytes`` is what the forward allocated and left alive for the backward, the
    loss itself excepted; ``given`` what was there before; ``own_peak`` the most that
    was live beyond that. ``forward_flops`` are among the ``flops``.
    """

    saved_bytes: int
    given: int
    own_peak: int
    forward_flops: int
    flops: int
    gradients: list[Tensor]

    @property
    def peak(self) -> int:
        return self.given + self.own_peak


def record_step(
    forward: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    inputs: Iterable[Any] = (),
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> Step:
    """Run one training step and record it; ``forward`` returns the scalar loss.

    What the step may compile must be compiled before. The gradients are taken away
    from the parameters.
    """
    parameters = list(parameters)
    state = list(optimizer.state.values()) if optimizer is not None else []
    there = tree_leaves([parameters, inputs, [p.grad for p in parameters], state])
    gc.collect()
    with CountedStorages(there) as recorder:
        loss = forward()
        saved = recorder.risen - loss.untyped_storage().nbytes()
        forward_flops = recorder.flops
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        found = gradients(parameters)
    given, peak, flops = recorder.given, recorder.peak, recorder.flops
    return Step(saved, given, peak, forward_flops, flops, found)


# ---------------------------------------------------------------- gradients


# What float32 may differ by when a product is computed a second time.
TOLERANCE = 1e-4
# A gradient below this share of the model's largest counts as rounding.
NOTHING = 1e-3


def relative_error(measured: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest relative error of a tensor, in the maximum norm; NaN where one is.

    A tensor below `NOTHING` of the largest is measured against that: where a true
    gradient is zero (a bias in front of a batch norm) the rest is rounding.
    """
    if len(measured) != len(wanted):
        raise RuntimeError(f"{len(measured)} gradients where {len(wanted)} are wanted")
    sizes = torch.stack([b.abs().max() for b in wanted])
    floor = max(NOTHING * sizes.max().item(), torch.finfo(sizes.dtype).tiny)
    errors = torch.stack([(a - b).abs().max() for a, b in zip(measured, wanted)])
    return (errors / sizes.clamp(min=floor)).max().item()


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those that are there, taken away from the parameters."""
    found = [each.grad for each in parameters if each.grad is not None]
    for each in parameters:
        each.grad = None
    return found


def digest(tensors: Iterable[Optional[Tensor]]) -> str:
    """Of all their bits, where there are any; on a CPU it allocates nothing of torch's."""
    found = hashlib.sha256()
    for each in tensors:
        bits = (
            b"" if each is None else each.detach().cpu().contiguous().numpy().tobytes()
        )
        found.update(b"%d:" % len(bits) + bits)
    return found.hexdigest()
