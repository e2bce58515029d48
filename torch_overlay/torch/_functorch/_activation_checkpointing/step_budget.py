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
starts, :class:`.StepCurve` chooses one to three plans for each graph, and they
are split and compiled anew from the joint graphs that were traced.  From then on steps
are compared with the one recorded; where one differs, the next is recorded again.

Counted are the storages on the device that training runs on.  What a kernel allocates
for itself does not count, nor what an allocator loses to fragmentation.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import inspect
import itertools
import logging
import math
import operator
import threading
import weakref
from contextlib import contextmanager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Callable, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._functorch import config
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._guards import compile_context, CompileContext, tracing, TracingContext
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.traceback import _get_memory_budget_annotation
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    TorchDispatchMode,
)
from torch.utils._pytree import tree_leaves

from . import memory_budget, planning, saved_report
from .budget_options import is_number
from .decision import Decision, Peak
from .memory_budget import Planner
from .rerun_cost import concrete
from .saved_report import format_bytes
from .step_plan import (
    calls_assumed,
    GraphPlan,
    GraphPlans,
    Moment,
    plan_graph,
    StepCurve,
)


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing_extensions import Self

    from torch.fx import GraphModule


log = logging.getLogger(__name__)

__all__ = ["GraphUse", "StepBudget", "StepSummary"]

# The step that is running in this thread; see `_running_step`.
_running: ContextVar[Optional[_Step]] = ContextVar("running step", default=None)

# Of what eager code makes, what a step may leave behind and be recorded only once.
_NEW = 0.01

# Where the autograd node of a compiled backward has its call.
_CALL = "activation memory budget: call"


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
    that repeat nothing expensive, as those of budget 1 do.  They are beyond the ``given`` bytes that are there when a step starts,
    but for a budget of ``device_bytes``, which means all.
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

    ``plan`` is the :class:`StepSummary` of the steps from the second on, None before.
    Raises ValueError for values that mean nothing.
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
            raise ValueError("give one of share, peak_bytes and device_bytes")
        if share is not None and not is_number(share, 0, 1):
            raise ValueError(f"share is {share!r}; it has to be a number from 0 to 1")
        for name, value in given.items():
            if type(value) is not int or value <= 0:
                raise ValueError(
                    f"{name} is {value!r}; it has to be a positive number of bytes"
                )
        if share is None and not given:
            if accelerator is None:
                raise ValueError(
                    "there is no device whose memory is the default; give share, "
                    "peak_bytes or device_bytes"
                )
            device_bytes = torch.get_device_module(self.device).mem_get_info()[1]
        self.share, self.peak_bytes, self.device_bytes = share, peak_bytes, device_bytes
        self.plan: Optional[StepSummary] = None
        # Weak: a graph goes with the model that it was compiled for.
        self._graphs: weakref.WeakKeyDictionary[_Graph, _Slots] = (
            weakref.WeakKeyDictionary()
        )
        self._step: Optional[_Step] = None
        self._recorded: Optional[_Recorder] = None
        self._expected: Optional[list[Any]] = None
        self._warnings: dict[str, None] = {}
        self._is_first = True

    # ---------------------------------------------------------------- the steps

    def __enter__(self) -> Self:
        left = _running.get()
        if left is not None:
            # An exception kept a callback from ending it.
            left.close()
        recorder, self._recorded = self._recorded, None
        if recorder is not None:
            # What only garbage holds is not there in the next step.
            gc.collect()
            with self._tolerated("no plan could be made for the step"):
                self._plan_by(recorder)
        step = self._step = _Step(self)
        if self._expected is None:
            for slots in self._graphs.values():
                slots.calls, slots.choice, slots.scale, slots.size = [], None, 0.0, 0
            step.record()
        step.open()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        step = _running.get()
        if step is None or step.budget is not self:
            return
        step.close()
        if kind is not None or step is not self._step:
            return
        if step.recorder is not None:
            with self._tolerated("the step could not be recorded"):
                self._keep(step, step.recorder)
        elif step.seen != self._expected:
            log.warning(
                "this step made other calls of compiled graphs than the one that its "
                "plan was made for, so %s may not be kept; the next step is learned anew",
                self._asked(),
            )
            self._expected = None

    def _keep(self, step: _Step, recorder: _Recorder) -> None:
        """Let the next step be planned by this one, where it tells enough."""
        self._expected = step.seen
        if recorder.error is not None:
            raise recorder.error
        if _ran_out_of_sight(step.seen):
            self._warn(
                "compiled autograd ran the backwards, and what a step holds there is "
                "not known; all graphs run by lean plans"
            )
        elif self._graphs:
            self._recorded = recorder
        elif not self._warnings:
            self._warn(
                "no graph was compiled in this step; what was compiled before can be "
                "compiled again after torch.compiler.reset()"
            )

    @contextmanager
    def _tolerated(self, what: str) -> Iterator[None]:
        """Training goes on without what fails within; a warning tells of it once."""
        try:
            yield
        except RestartAnalysis:
            # Dynamo's way to begin anew.
            raise
        except Exception as error:
            log.debug("%s", what, exc_info=error)
            self._warn(f"{what}: {type(error).__name__}: {error}")

    def _warn(self, reason: str) -> None:
        if reason not in self._warnings:
            self._warnings[reason] = None
            log.warning("%s may not be kept: %s", self._asked(), reason)

    def _asked(self) -> str:
        if self.share is not None:
            return f"the step's share of {self.share:g}"
        if self.peak_bytes is not None:
            return f"the step's peak of {format_bytes(self.peak_bytes)}"
        return f"the step's {format_bytes(self.device_bytes or 0)} of the device"

    # ---------------------------------------------------------------- the plan

    def _plan_by(self, recorder: _Recorder) -> None:
        """Plan the next steps by the one recorded, or let one more be recorded."""
        # Buffers that the first step makes once and for all are there in a second.
        if self._is_first and recorder.left_behind() > _NEW * recorder.made_bytes:
            self._expected = None
        else:
            self._make_plan(recorder)
        self._is_first = False

    def _make_plan(self, recorder: _Recorder) -> None:
        used = [(graph, s) for graph, s in self._graphs.items() if s.calls]
        for graph, _ in used:
            if graph.fault:
                self._warn(f"{graph.name} has no plan for a step: {graph.fault}")
        number = {graph: g for g, (graph, _) in enumerate(used)}
        moments, given = recorder.moments(number), recorder.given_later()
        # Rounds of plans that inductor schedules.
        rounds: int = getattr(config, "activation_memory_peak_judge", 0)
        while True:
            corrected = [graph.plans.corrected() for graph, _ in used]
            curve = StepCurve(
                corrected,
                [slots.calls for _, slots in used],
                moments,
                [slots.scale for _, slots in used],
            )
            allowed = self._allowed(curve, given)
            plan = curve.within(allowed)
            # Those that the bound is made of have to be true as well.
            made_of = zip(
                plan.choices, curve.plans[0].choices, curve.unbudgeted.choices
            )
            graphs_told = [
                graph.judge({p for choice in choices for p in choice})
                for (graph, _), choices in zip(used, made_of)
                if rounds
            ]
            if not any(graphs_told):
                break
            rounds -= 1
        beyond = given if self.device_bytes is not None else 0
        if plan.peak > allowed:
            self._warn(
                f"the lowest peak found is {format_bytes(plan.peak + beyond)}, and the "
                "step runs by the plan of that"
            )
        uses = []
        for (graph, slots), found, choice in zip(used, corrected, plan.choices):
            chosen = [found.plans[p] for p in choice]
            uses.append(
                GraphUse(
                    graph.name,
                    sum(slots.calls),
                    tuple(each.kept for each in chosen),
                    tuple(
                        max(each.forward, each.backward) - each.kept for each in chosen
                    ),
                    math.fsum(map(operator.mul, slots.calls, (p.cost for p in chosen))),
                )
            )
        self.plan = StepSummary(
            allowed + beyond,
            plan.peak + beyond,
            curve.floor + beyond,
            curve.unbudgeted.peak + beyond,
            given,
            math.fsum(use.cost for use in uses),
            tuple(uses),
        )
        for (_, slots), choice in zip(used, plan.choices):
            slots.choice = choice
        log.info("%s", self)

    def _allowed(self, curve: StepCurve, given: int) -> int:
        if self.share is not None:
            room = curve.unbudgeted.peak - curve.floor
            return curve.floor + math.floor(self.share * room)
        if self.peak_bytes is not None:
            return self.peak_bytes
        return (self.device_bytes or 0) - given

    def __str__(self) -> str:
        reasons = [f"may not be kept: {reason}" for reason in self._warnings]
        if self.plan is None:
            told = f"StepBudget: {self._asked()}; no plan before the second step"
            return "\n".join([told, *reasons])
        plan = self.plan
        sizes = map(
            format_bytes,
            (plan.predicted_peak, plan.allowed, plan.floor, plan.unbudgeted),
        )
        what = "in all" if self.device_bytes else "beyond what is there at the start"
        lines = [
            "StepBudget: {} predicted, {} allowed (floor: {}, no budget: {}; {})".format(
                *sizes, what
            ),
            f"at the start of a step: {format_bytes(plan.given)}",
        ]
        table = [("graph", "calls", "at once", "kept by each", "more while it runs")]
        for use in plan.graphs:
            name, calls = use.name, str(use.calls)
            for each, run in itertools.groupby(zip(use.kept, use.transient)):
                kept, more = map(format_bytes, each)
                table.append((name, calls, str(len([*run])), kept, more))
                name = calls = ""
        widths = [max(map(len, column)) for column in zip(*table)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join(lines + reasons)


class _Step:
    """One run of a step, and the calls that are made in it."""

    def __init__(self, budget: StepBudget) -> None:
        self.budget = budget
        self.recorder: Optional[_Recorder] = None
        # The calls, in order; of graphs the numbers, as they may go meanwhile.
        self.seen: list[Any] = []
        # That whose forward runs.
        self.call: Optional[_Call] = None
        self._taken: dict[int, set[int]] = {}
        self._context = ExitStack()

    def record(self) -> None:
        """Let `open` also record what the step does."""
        self.recorder = _Recorder(self)

    def open(self) -> None:
        _running.set(self)
        # The plans of a step are not those that a cache has for its graphs.
        self._context.enter_context(config.patch(enable_autograd_cache=False))
        if self.recorder is not None:
            self._context.enter_context(self.recorder)

    def close(self) -> None:
        _running.set(None)
        self.call = None
        self._context.close()

    def begin(self, graph: _Graph, args: Sequence[Any]) -> tuple[_Call, int]:
        """A call of a graph starts: which one, and by which plan."""
        slots = self.budget._graphs.setdefault(graph, _Slots())
        size = _nbytes(args, graph.symbolic)
        is_held = not self._is_checkpointed()
        # A checkpoint runs a call twice, and both have to save the same.
        slot, taken = 0, self._taken.setdefault(graph.number, set())
        while is_held and slot in taken:
            slot += 1
        if is_held:
            taken.add(slot)
        call = _Call(graph, self, slot, is_held)
        self.seen.append(("F", graph.number, slot, size))
        if self.recorder is not None:
            slots.calls += [0] * (slot + 1 - len(slots.calls))
            slots.calls[slot] += 1
            slots.scale = max(slots.scale, size / graph.size if graph.size else 1.0)
            slots.size = max(slots.size, size)
        choice = slots.choice
        if choice is None or slot >= len(slots.calls) or size > slots.size:
            return call, graph.lean
        return call, choice[slot]

    def end(self, call: _Call) -> None:
        """Nothing is kept for the call any more."""
        if not call.ended:
            call.ended = True
            if call.is_held:
                self._taken[call.graph.number].discard(call.slot)

    def _is_checkpointed(self) -> bool:
        """Whether a checkpoint around the call keeps nothing and runs it again."""
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            return False
        pack, _ = hooks
        if getattr(pack, "__module__", None) == torch.utils.checkpoint.__name__:
            return True
        self.budget._warn(
            "saved-tensor hooks are set around compiled graphs, and what they keep in "
            "place of a saved value is not known; it counts as if that was kept"
        )
        return False


def _running_step() -> Optional[_Step]:
    """The step that this thread runs, or that the backward which it serves is part of."""
    step = _running.get()
    if step is None and torch._C._is_key_in_tls("context"):
        # Autograd's threads have the context of the thread that called backward.
        context = torch._C._get_obj_in_tls("context")
        step = context.get(_running) if context is not None else None
    return step


@dataclass
class _Slots:
    """The calls of a graph in a step; ``choice`` has the plan of each, if there is one."""

    calls: list[int] = field(default_factory=list)
    choice: Optional[tuple[int, ...]] = None
    # Of a graph for several shapes: what its plans' bytes are to be multiplied by.
    scale: float = 0.0
    size: int = 0


@dataclass(eq=False)
class _Call:
    """A forward that ran and its backward, and the storages that it read and returned."""

    graph: _Graph
    step: _Step
    slot: int
    is_held: bool
    ended: bool = False
    outputs: list[Optional[int]] = field(default_factory=list)
    inputs: list[Optional[int]] = field(default_factory=list)
    # Kept, so that it tells when the node goes without having run.
    node: Optional[weakref.ref[Any]] = None


# ------------------------------------------------------------------- recording


class _Recorder(TorchDispatchMode):
    """Follows storages through a step, except those inside of compiled graphs.

    The log has a tuple for each change: ("+", storage, bytes, whether gradients were
    recorded), ("-", storage), ("=", storage, bytes more), and around what a compiled
    graph does ("F", call) and ("f", call), or ("B", call, its inputs, whether the call
    is kept for another backward) and ("b", call).  ("x", call): there is none to come.
    """

    # As a checkpoint inside of a compiled graph makes of random ones.
    supports_higher_order_operators = True

    def __init__(self, step: _Step) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        device = step.budget.device
        self.device = device.type
        self.log: list[tuple[Any, ...]] = []
        self.given = 0
        self.inside = 0
        # Why nothing more is recorded.
        self.error: Optional[Exception] = None
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._leaves: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self.nbytes: list[int] = []
        self.is_given: list[bool] = []
        self.at_start = _allocated(device)

    def __enter__(self) -> Self:
        _resizes.follow(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _resizes.forget(self)
        modes = _get_current_dispatch_mode_stack()
        if modes and modes[-1] is self:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        else:
            # Whoever left the step early has left another mode above.
            self.error = RuntimeError("the step was not ended where it was begun")

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
            with self.noting():
                self.meet((args, kwargs))
        result = func(*args, **kwargs)
        with self.noting():
            self.made(result)
        return result

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What cannot be noted ends the recording, and not the step."""
        try:
            yield
        except Exception as error:
            self.error = error

    def meet(self, values: Any) -> None:
        """What is not known of these was there before the step."""
        if self.error is not None:
            return
        for storage in self._storages(values):
            self.follow(storage, is_given=True)

    def made(self, values: Any) -> list[Optional[int]]:
        """Number the storages of each of these values."""
        if self.error is not None:
            return []
        return [
            next((self.follow(s) for s in self._storages([value])), None)
            for value in tree_leaves(values)
        ]

    @contextmanager
    def around(self, what: str, call: _Call, *more: Any) -> Iterator[None]:
        """What runs within is a compiled graph's, "F" or "B"."""
        self.log.append((what, call, *more))
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self.log.append((what.lower(), call))

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

    def follow(self, storage: torch.UntypedStorage, is_given: bool = False) -> int:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._live:
            s, _ = self._live[key]
            if nbytes != self.nbytes[s]:
                self.log.append(("=", s, nbytes - self.nbytes[s]))
                self.nbytes[s] = nbytes
            return s
        s = len(self.nbytes)
        self.nbytes.append(nbytes)
        self.is_given.append(is_given)

        def died(_: Any) -> None:
            del self._live[key]
            self.log.append(("-", s))

        self._live[key] = s, weakref.ref(storage, died)
        if is_given:
            self.given += nbytes
        else:
            self.log.append(("+", s, nbytes, torch.is_grad_enabled()))
        return s

    def given_later(self) -> int:
        """The bytes that are there when the next step starts."""
        left = (s for s, _ in self._live.values() if not self.is_given[s])
        return (self.at_start or self.given) + sum(self.nbytes[s] for s in left)

    @property
    def made_bytes(self) -> int:
        """The bytes of all that eager code made."""
        return sum(more[0] for what, _, *more in self.log if what == "+")

    def left_behind(self) -> int:
        """The bytes that it left, gradients and the optimizer's states apart."""
        remaining, gradients, last = self._remaining()
        return sum(
            nbytes
            for at, (what, who, *more) in enumerate(self.log)
            if what == "+" and who in remaining - gradients
            for nbytes, is_differentiated in (more,)
            if is_differentiated or at < last
        )

    def _remaining(self) -> tuple[set[int], set[int], int]:
        """What is still there, the gradients among it, and the last event."""
        remaining = {s for s, _ in self._live.values()}
        gradients = {
            self._live[storage._cdata][0]
            for leaf in list(self._leaves.values())
            for storage in self._storages([leaf.grad])
            if storage._cdata in self._live
        }
        last = max((i for i, e in enumerate(self.log) if e[0] in "fb"), default=0)
        return remaining, gradients, last

    def moments(self, number: dict[_Graph, int]) -> list[Moment]:
        """The step as the next one is going to be.

        An optimizer's state that is still there then is not made anew, and a gradient
        only until it is added to the one that is there.
        """
        remaining, gradients, last = self._remaining()
        # What dies while a backward runs was held for that alone.
        dying: dict[int, set[int]] = {}
        running: set[int] = set()
        for at, (what, who, *_) in enumerate(self.log):
            if what == "B":
                running = dying[at] = set()
            elif what == "b":
                running = set()
            elif what == "-":
                running.add(who)
        found: list[Moment] = []
        live = passing = most = 0
        there: dict[int, int] = {}
        beyond: dict[int, int] = {}
        alive: dict[_Call, None] = {}
        retained: set[_Call] = set()

        def where(calls: Iterable[_Call]) -> tuple[Any, ...]:
            calls = list(calls)
            unheld = frozenset(
                (number[call.graph], call.slot, index, self.nbytes[s])
                for call in calls
                for index, s in enumerate(call.outputs)
                if s is not None and s not in there and index in call.graph.may_save
            )
            held = frozenset((number[call.graph], call.slot) for call in calls)
            return held, unheld

        for at, (what, who, *more) in enumerate(self.log):
            if what in ("+", "-", "="):
                if what == "+":
                    nbytes, is_differentiated = more
                    if who in gradients:
                        passing += nbytes
                    elif is_differentiated or who not in remaining or at < last:
                        live += nbytes
                        there[who] = nbytes
                else:
                    passing = 0
                    # What was there may have been made out of sight: nothing is gained
                    # when it goes, and nothing lost when it is back.
                    before = there.get(who, 0)
                    beyond[who] = beyond.get(who, before) + (
                        more[0] if more else -before
                    )
                    after = max(beyond[who], 0) if what == "=" else 0
                    live += after - before
                    there[who] = after
                    if what == "-":
                        del there[who]
                most = max(most, live + passing)
                continue
            passing = 0
            if what in "FB":
                held, unheld = where(alive)
                found.append(Moment(most, held, None, unheld))
                phase = what
                released: frozenset[int] = frozenset()
                if what == "B":
                    held, unheld = where({**alive, who: None})
                    inputs, is_retained = more
                    if is_retained:
                        phase = "R"
                        retained.add(who)
                    else:
                        released = frozenset(
                            index
                            for index, s in enumerate(inputs)
                            if s in there and s in dying[at]
                        )
                        retained.discard(who)
                event = number[who.graph], who.slot, phase
                found.append(Moment(live, held, event, unheld, released))
            elif what == "f" and who.is_held:
                alive[who] = None
            elif who not in retained:
                alive.pop(who, None)
            most = live
        held, unheld = where(alive)
        found.append(Moment(most, held, None, unheld))
        return found


class _Resizes:
    """Lets recorders see storages resized, as sharded parameters are to be gathered.

    The dispatcher does not see that. There is one patch, for all threads.
    """

    def __init__(self) -> None:
        self._resize: Any = None
        self._recorders: set[_Recorder] = set()
        self._lock = threading.Lock()

    def follow(self, recorder: _Recorder) -> None:
        with self._lock:
            if not self._recorders:
                self._resize = resize = torch.UntypedStorage.resize_

                def resize_and_follow(storage: Any, nbytes: int) -> Any:
                    return self._resized(resize, storage, nbytes)

                torch.UntypedStorage.resize_ = resize_and_follow  # type: ignore[assignment]
            self._recorders.add(recorder)

    def forget(self, recorder: _Recorder) -> None:
        with self._lock:
            self._recorders.discard(recorder)
            if not self._recorders:
                torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _resized(self, resize: Callable[..., Any], storage: Any, nbytes: int) -> Any:
        step = _running_step()
        recorder = step.recorder if step is not None else None
        if recorder is None or storage.device.type != recorder.device:
            return resize(storage, nbytes)
        with recorder.noting():
            recorder.follow(storage, is_given=True)
        result = resize(storage, nbytes)
        with recorder.noting():
            recorder.follow(storage)
        return result


_resizes = _Resizes()


def _ran_out_of_sight(seen: Sequence[Any]) -> bool:
    """Whether compiled autograd ran the backwards of these calls."""
    is_unused = torch._C._dynamo.compiled_autograd.is_cache_empty()
    return not is_unused and all(what != "B" for what, *_ in seen)


def _allocated(device: torch.device) -> int:
    """Bytes that the device's allocator has handed out, 0 where nobody counts them."""
    if device.type == "cpu":
        return 0
    return int(torch.get_device_module(device).memory_allocated())


# --------------------------------------------------------------------- graphs


def _symbolic(arguments: Sequence[Any]) -> tuple[list[int], int]:
    """Which arguments have a symbol for a size, and their bytes by the hints."""
    found = [
        i
        for i, each in enumerate(arguments)
        if isinstance(each, torch.Tensor) and not isinstance(each.numel(), int)
    ]
    return found, _nbytes(arguments, found)


def _nbytes(arguments: Sequence[Any], indices: Iterable[int]) -> int:
    sizes = (arguments[i].untyped_storage().nbytes() for i in indices)
    return sum(map(concrete, sizes))


_numbers = itertools.count()


class _Graph:
    """A joint graph that was compiled in a step, and what was made of it by each plan."""

    def __init__(self, compile_graph: Callable[..., Any], *arguments: Any) -> None:
        self._compile_graph = compile_graph
        self._state, self._capture, self._partition, *self._compilers = arguments
        self.number = next(_numbers)
        self.name = get_aot_graph_name()
        self.plans = GraphPlans([GraphPlan(0, 0, 0, 0.0, frozenset(), frozenset())], 0)
        self.lean = 0
        self.fault = "its backend does not split it by a budget"
        # Partitioned before their caller, each by itself.
        self._is_nested = bool(
            self._capture.graph_module.graph.find_nodes(
                op="call_function", target=torch.ops.higher_order.invoke_subgraph
            )
        )
        if self._is_nested:
            self.fault = "it calls nested compiled regions, which have their own plans"
        self._is_fused = False
        self._is_retained = False
        self._variants: dict[int, Callable[..., Any]] = {}
        self._contexts = TracingContext.try_get(), CompileContext.try_get()
        self._config = config.get_config_copy()
        self._num_fwd_outputs = 0
        self.symbolic, self.size = _symbolic(self._state.flat_args)

    @functools.cached_property
    def may_save(self) -> frozenset[int]:
        """The outputs of the forward that some plan saves."""
        return frozenset().union(*(plan.outputs for plan in self.plans.plans))

    def first(self) -> Any:
        """Compile by the lean plan; returns what AOTAutograd wants in return."""
        run, metadata = self._compiled(None)
        self._variants[self.lean] = run

        def call(args: list[Any]) -> Any:
            return self._call(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call, metadata

    def _call(self, args: list[Any]) -> Any:
        step = _running_step()
        run = self._variants[self.lean]
        if step is None:
            return run(args)
        call = None
        with step.budget._tolerated(f"a call of {self.name} was not followed"):
            call, plan = step.begin(self, args)
            run = self._variant(plan, step.budget)
        step.call = call
        try:
            result = run(args)
        except BaseException:
            if call is not None:
                step.end(call)
            raise
        if call is not None:
            with step.budget._tolerated(f"a call of {self.name} was not followed"):
                self._await_backward(result, call)
        return result

    def _await_backward(self, result: Any, call: _Call) -> None:
        """Let the backward of what was returned find its call, which ends with it."""
        step, node = call.step, _backward_of(result)
        if node is None:
            step.end(call)
            return
        node.metadata[_CALL] = call

        def died(_: Any) -> None:
            if not call.ended:
                step.end(call)
                if step.recorder is not None:
                    step.recorder.log.append(("x", call))

        call.node = weakref.ref(node, died)

    def _variant(self, plan: int, budget: StepBudget) -> Callable[..., Any]:
        if plan not in self._variants:
            # Unless it compiles.
            self._variants[plan] = self._variants[self.lean]
            failure = f"{self.name} stays with its first plan, as another fails"
            with budget._tolerated(failure), self._as_traced():
                self._variants[plan], _ = self._compiled(plan)
        return self._variants[plan]

    @contextmanager
    def _as_traced(self) -> Iterator[None]:
        from torch._inductor.virtualized import V

        traced, compiled = self._contexts
        with (
            # As Dynamo does; a caller's would see what is compiled.
            _disable_current_modes(),
            tracing(traced),
            compile_context(compiled),
            V.set_fake_mode(traced and traced.fake_mode),
            config.patch(self._config),
            torch.enable_grad(),
        ):
            yield

    def judge(self, plans: Iterable[int]) -> bool:
        """Let inductor's schedules tell what plans hold; whether that is new of one."""
        new = sorted({*plans} - self.plans.judged.keys()) if self._is_fused else []
        for plan in new:
            try:
                with self._as_traced():
                    self.plans.judged[plan] = self._schedule(plan)
            except Exception as error:
                log.debug("no judge for %s", self.name, exc_info=error)
                self._is_fused = False
                log.warning(
                    "no judge of peaks for %s, so they are the planner's estimates: "
                    "%s: %s",
                    self.name,
                    type(error).__name__,
                    error,
                )
                return False
        return bool(new)

    def _schedule(self, plan: int) -> tuple[int, int]:
        """What a plan's forward and backward hold, as a :class:`GraphPlan` has it."""
        # A patch of its own brings it, and the option.
        peak_judge = importlib.import_module("torch._inductor.peak_judge")

        split: list[GraphModule] = []

        def keep(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            split.append(graph)

            def call(_: list[Any]) -> None:
                raise AssertionError("scheduled only")

            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        self._compiled(plan, (keep, keep))
        forward, backward = split
        model: Any = self.plans.model
        peaks = peak_judge.schedule_peaks(forward, backward, self._num_fwd_outputs)
        return peaks[0], peaks[1] - model.held_by_caller

    def _compiled(self, plan: Optional[int], compilers: Any = None) -> Any:
        """Split and compile a copy of the joint graph by a plan, None for the lean one.

        With ``compilers`` that are given, to see what they get: no report has that plan.
        """
        # Splitting a graph writes down in there what it finds.
        state, capture = _own_copy((self._state, self._capture))
        # Of another plan, what does not compile has to be known before it runs. But the
        # backward of a graph that is retained is compiled when that is seen.
        is_another = bool(self._variants) and not self._is_retained
        is_seen = compilers is not None
        state.aot_config = replace(
            state.aot_config,
            cache_info=None,
            force_non_lazy_backward_lowering=is_another or is_seen,
        )
        with unset_fake_temporarily():
            capture.graph_module = copy.deepcopy(capture.graph_module)
        if not is_seen:
            forward, backward = self._compilers
            compilers = (
                _marked(forward, self._forward),
                _marked(backward, self._backward),
            )
        partition = self._partition
        if not self._is_nested and _takes_request(partition):
            partition = functools.partial(partition, request=_Variant(self, plan))
        if is_seen:
            partition = saved_report.untold(partition)
        return self._compile_graph(state, capture, partition, *compilers)

    def _forward(self, run: Callable[..., Any], args: list[Any]) -> Any:
        step = _running_step()
        call = step.call if step is not None else None
        recorder = call.step.recorder if call is not None else None
        if call is None or recorder is None:
            return run(args)
        with recorder.noting():
            recorder.meet(args)
            call.inputs = recorder.made(args[: self.plans.primals])
        with recorder.around("F", call):
            results = run(args)
        with recorder.noting():
            call.outputs = recorder.made(list(results[: self._num_fwd_outputs]))
        return results

    def _backward(self, run: Callable[..., Any], args: list[Any]) -> Any:
        node: Any = torch._C._current_autograd_node()
        call = node.metadata.get(_CALL) if node is not None else None
        step = _running_step()
        # To another step, what is left of one is as eager code.
        if call is None or step is None or call.step is not step:
            return run(args)
        is_retained = torch._C._autograd._get_current_graph_task_keep_graph()
        self._is_retained |= is_retained
        step.seen.append(("B", self.number, call.slot, is_retained))
        recorder = step.recorder
        if recorder is None:
            results = run(args)
        else:
            inputs: list[Optional[int]] = []
            with recorder.noting():
                tangents = [each for each in args if isinstance(each, torch.Tensor)]
                del tangents[: len(tangents) - self.plans.tangents]
                inputs = call.inputs + recorder.made(tangents)
                del tangents
            with recorder.around("B", call, inputs, is_retained):
                results = run(args)
            with recorder.noting():
                recorder.made(list(results))
        if not is_retained:
            step.end(call)
        return results

    # ----------------------------------------------------------------- its plans

    def decide(self, graph: Planner, plan: Optional[int]) -> Decision:
        """What to save by one of the plans, None for the lean one."""
        if self.plans.model is None:
            try:
                self._find_plans(graph)
            except Exception as error:
                log.debug("no plans for %s", self.name, exc_info=error)
                self.fault = f"{type(error).__name__}: {error}"
                return planning.decide(
                    graph.joint,
                    graph.info,
                    graph.num_fwd_outputs,
                    graph.budget,
                    fused=graph.fused,
                )
        model: Any = self.plans.model
        index = self.lean if plan is None else plan
        evaluation = model.evaluate(self.plans.plans[index].storages)
        wanted = {node.name for node in model.saved_values(evaluation.saved)}
        saved = [node for node in graph.joint.nodes if node.name in wanted]
        if len(saved) != len(wanted):
            raise RuntimeError(f"{self.name} was traced into another graph")
        return Decision(saved, graph.budget, "step", graph.kept_bytes(saved))

    def _find_plans(self, graph: Planner) -> None:
        self._num_fwd_outputs = graph.num_fwd_outputs
        # A budget that the user gave to a region of the model stays.
        is_only = graph.budget != config.activation_memory_budget or any(
            _get_memory_budget_annotation(node) is not None
            for node in graph.joint.nodes
        )
        chosen = memory_budget.decide(graph, graph.budget if is_only else 1)
        self.plans = plan_graph(graph, chosen.saved_values, is_only)
        self.fault, self._is_fused = "", graph.fused
        self.lean = self.plans.leanest(calls_assumed())


class _Variant(NamedTuple):
    """The request for one of a graph's plans."""

    graph: _Graph
    plan: Optional[int]

    def decide(self, graph: Planner) -> Decision:
        return self.graph.decide(graph, self.plan)


def _takes_request(partition: Callable[..., Any]) -> bool:
    """Whether a partitioner splits by what is asked of it."""
    parameters = inspect.signature(partition).parameters
    kinds = (parameter.kind for parameter in parameters.values())
    return "request" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _own_copy(value: Any, made: Optional[dict[int, Any]] = None) -> Any:
    """A copy of AOTAutograd's records and of all that is in them, but for tensors."""
    made = {} if made is None else made
    if id(value) in made:
        return made[id(value)]
    kind, found = type(value), value
    if kind in (list, tuple):
        found = kind(_own_copy(each, made) for each in value)
    elif kind is dict:
        found = {key: _own_copy(each, made) for key, each in value.items()}
    elif is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(value)
        made[id(value)] = found
        for name, each in vars(value).items():
            object.__setattr__(found, name, _own_copy(each, made))
    made[id(value)] = found
    return found


def _marked(compile_graph: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """A compiler whose results are called by ``run``."""

    def compile_marked(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        compiled = compile_graph(graph, inputs)
        if not getattr(compiled, "_boxed_call", False):
            unboxed = compiled
            compiled = lambda args: unboxed(*args)  # noqa: E731

        def call(args: list[Any]) -> Any:
            return run(compiled, args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return compile_marked


def _backward_of(result: Any) -> Any:
    """The node of the compiled backward that made one of these outputs, or None."""
    node: Any
    pending = [
        (value.grad_fn, 3)
        for value in tree_leaves(result)
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    ]
    while pending:
        node, depth = pending.pop(0)
        if hasattr(node, "_forward_cls") and hasattr(node._forward_cls, "_aot_id"):
            if _CALL not in node.metadata:
                return node
        elif depth:
            pending += [(n, depth - 1) for n, _ in node.next_functions if n is not None]
    return None


# ------------------------------------------------- plans for the peak of one graph

# The graph and the kept bytes of each call whose backward is still to come.
_waiting: weakref.WeakKeyDictionary[Any, tuple[str, int]] = weakref.WeakKeyDictionary()


@functools.cache
def _warn_of_calls() -> None:
    """That a budget of one graph says nothing about a step with several calls."""
    graphs = {graph for graph, _ in _waiting.values()}
    kept = sum(nbytes for _, nbytes in _waiting.values())
    log.warning(
        "%d calls of %d graphs wait for their backward at once and keep %s together, but "
        "each graph's peak was planned for by itself. StepBudget plans for a training "
        "step; activation_memory_graph_calls says how many calls of a graph there are",
        len(_waiting),
        len(graphs),
        format_bytes(kept),
    )


def counted(run: Callable[..., Any], given: Sequence[Any], metadata: Any) -> Any:
    """A compiled graph that warns when its calls are not the only ones alive.

    Or where a call is larger than what it was planned for, ``given``, and over the limit.
    ``metadata`` is the graph's ViewAndMutationMeta, which has its plan.
    """
    options: Any = config
    limit: Optional[int] = options.activation_memory_peak_bytes
    if limit is None and options.activation_memory_budget_target != "peak":
        return run
    plan: Any = getattr(metadata, "activation_memory_plan", None)
    if plan is None:
        return run
    told = plan.graph, plan.activation_bytes
    is_only = options.activation_memory_graph_calls is None
    peak: Optional[Peak] = plan.peak
    symbolic, planned = _symbolic(given)
    largest = planned

    @functools.wraps(run)
    def call(args: list[Any]) -> Any:
        nonlocal largest
        size = _nbytes(args, symbolic)
        if size > largest and limit is not None and peak is not None:
            largest = size
            expected = peak.predicted * size // planned
            if expected > limit:
                log.warning(
                    "%s was planned for %s of inputs without a fixed size, with a peak of "
                    "%s; for %s the peak is about %s, and the %s of "
                    "activation_memory_peak_bytes are not kept. Compile with the largest "
                    "batch first, or with dynamic=False for a plan of each size",
                    plan.graph,
                    *map(
                        format_bytes, (planned, peak.predicted, size, expected, limit)
                    ),
                )
        result = run(args)
        node = _backward_of(result) if is_only else None
        if node is not None:
            _waiting[node] = told
            node.metadata[_CALL] = None
            reference = weakref.ref(node)
            node.register_prehook(lambda _: _waiting.pop(reference(), None) and None)
            if len(_waiting) > 1:
                _warn_of_calls()
        return result

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


# ------------------------------------------------------------ AOTAutograd's hooks


def for_step(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """``aot_stage2_autograd``, so that graphs can be compiled again by a step's plan."""

    def compile_for_step(*arguments: Any) -> Any:
        step = _running_step()
        # Without a context, inductor traces its patterns, amid a compilation.
        if step is not None and TracingContext.try_get() is not None:
            failure = "a graph that does not compile by a lean plan is not counted"
            with step.budget._tolerated(failure):
                return _Graph(compile_graph, *arguments).first()
        run, metadata = compile_graph(*arguments)
        return counted(run, arguments[0].flat_args, metadata), metadata

    return compile_for_step
