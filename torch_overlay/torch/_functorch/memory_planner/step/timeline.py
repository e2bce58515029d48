"""What a training step holds at each of its moments, from what was recorded of it."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

from ..peak.curve import Held


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from ..peak.menu import Menu, Missing

    from .calls import Graph, State
    from .recorder import Event, Recorder


__all__ = [
    "Bytes",
    "Learned",
    "StepProgram",
    "StepTimeline",
    "dropped_before",
    "step_program_of",
]

# Programs that are told apart.
_PROGRAMS = 32


class Bytes(NamedTuple):
    """What eager code holds: in all, what larger inputs make no larger, and gradients."""

    total: int
    fixed: int
    gradients: int


@dataclass
class StepProgram:
    """What recorded steps held that make the same calls, at the sizes that they had.

    Args:
        states: every event of a call, with the calls that waited meanwhile.
        moments: all that calls held at some moment, with what eager code had then.
        calls: of each graph, which are numbers here, the most calls in each slot.
        scales: of each graph, the largest scale of its calls.
        replaced: the step by what becomes of the gradients that it leaves: "anew" where
            they are gone when the next one starts, "F" and "B" where that drops them
            before its first forward or backward.  Empty where it began with some.
        leaf: one of the parameters whose gradients those are.
    """

    states: set[State]
    moments: dict[frozenset[Held], Bytes]
    calls: dict[int, list[int]]
    scales: dict[int, float]
    replaced: dict[str, StepTimeline] = field(default_factory=dict)
    leaf: Callable[[], Optional[torch.Tensor]] = lambda: None

    def add(self, other: StepProgram, least: float) -> bool:
        """Hold what another step held, too; whether that is ``least`` bytes more."""
        known = self._scaled(other.scales)
        is_more = not other.states <= self.states or any(
            held not in known or nbytes.total > known[held].total + least
            for held, nbytes in other.moments.items()
        )
        self.states |= other.states
        _keep_largest(self.moments, other.moments)
        _keep_largest(self.scales, other.scales)
        self.calls = _most_calls([self.calls, other.calls])
        return is_more

    def expected(self, graphs: Mapping[int, Graph]) -> dict[frozenset[Held], Bytes]:
        """The moments with the largest calls of these graphs."""
        moments = self._scaled({n: graph.scale for n, graph in graphs.items()})
        return {
            held: nbytes
            for held, nbytes in moments.items()
            # A graph goes with the model that it was compiled for.
            if all(each.graph in graphs for each in held)
        }

    def _scaled(self, scales: Mapping[int, float]) -> dict[frozenset[Held], Bytes]:
        """The moments where calls are as large as these, if that is larger."""
        factors = (scales[n] / own for n, own in self.scales.items() if n in scales)
        factor = max(factors, default=1.0)
        return {
            held: Bytes(fixed + math.ceil((total - fixed) * factor), fixed, gradients)
            for held, (total, fixed, gradients) in self.moments.items()
        }


class Learned:
    """The programs that recorded steps ran, and the calls that later ones may make."""

    def __init__(self) -> None:
        self.programs: list[StepProgram] = []
        self.states: set[State] = set()

    @property
    def calls(self) -> dict[int, list[int]]:
        """Of each graph, the most calls in each slot."""
        return _most_calls(program.calls for program in self.programs)

    def add(self, new: StepProgram, least: float = 0) -> bool:
        """Whether that is a program of its own, or adds ``least`` bytes to a known one.

        Steps with the same events are one program, and so are all beyond a number.
        """
        self.states |= new.states
        same = (each for each in self.programs if each.states == new.states)
        last = self.programs[-1] if len(self.programs) == _PROGRAMS else None
        program = next(same, last)
        if program is None:
            self.programs.append(new)
            return True
        return program.add(new, least)

    def drop_gradients(self, before: Optional[str]) -> bool:
        """Expect steps to drop the gradients that they begin with; see `StepProgram`."""
        known = [each for each in self.programs if before in each.replaced]
        for program in known:
            program.moments = program.replaced[before or ""].moments
            # A step may yet begin without any.
            program.replaced = {"anew": program.replaced["anew"]}
        return bool(known)

    def check_gradients(self) -> bool:
        """Expect those anew that a step begins without; whether that was not expected.

        As where two programs take turns, and each gives up its own.
        """
        found = False
        for program in self.programs:
            leaf = program.leaf()
            if program.replaced and leaf is not None and leaf.grad is None:
                _keep_largest(program.moments, program.replaced["anew"].moments)
                program.replaced, found = {}, True
        return found

    def missing(self, graph: int) -> Optional[Missing]:
        """What all calls of a graph miss whose backward ran."""
        found = {s.missing for s in self.states if (s.kind, s.graph) == ("B", graph)}
        return found.pop() if len(found) == 1 else None

    def growth(self, graphs: Mapping[int, Graph]) -> dict[int, float]:
        """By which factors graphs have yet to grow, to do so as others of a step have."""
        found = dict.fromkeys(graphs, 1.0)
        for program in self.programs:
            of = program.scales.items()
            own = {n: graphs[n].scale / scale for n, scale in of if n in graphs}
            most = max(own.values(), default=1.0)
            for n, factor in own.items():
                found[n] = max(found[n], most / factor)
        return found

    def expected(self, graphs: Mapping[int, Graph]) -> dict[frozenset[Held], Bytes]:
        """The moments of all programs with the largest calls of these graphs."""
        found: dict[frozenset[Held], Bytes] = {}
        for program in self.programs:
            _keep_largest(found, program.expected(graphs))
        return found


def step_program_of(
    recorder: Recorder, states: set[State], step: StepTimeline
) -> StepProgram:
    """What a recorded ``step`` held."""
    found = StepProgram(states, step.moments, step.calls, step.scales)
    for leaf in recorder.with_new_gradients()[:1]:
        found.leaf = weakref.ref(leaf)
        found.replaced = {
            how: StepTimeline(recorder, how) for how in ("anew", "F", "B")
        }
    if not found.replaced and dropped_before(recorder):
        for leaf in recorder.with_gradients()[:1]:
            found.leaf = weakref.ref(leaf)
            found.replaced = {"anew": StepTimeline(recorder, given=set())}
    return found


def dropped_before(recorder: Recorder) -> Optional[str]:
    """Which kind of call comes first once all gradients are gone that were there.

    "F" or "B"; None where some stay, or go later than that.
    """
    left = recorder.given_gradients.copy()
    if left and left.isdisjoint(recorder.remaining()):
        begun: set[str] = set()
        for event in recorder.log:
            begun.add(event.kind)
            left -= {event.storage} if event.kind == "-" else set()
            if not left:
                return None if "B" in begun else "B" if "F" in begun else "F"
    return None


def _keep_largest(of: dict[Any, Any], new: Mapping[Any, Any]) -> None:
    for key, value in new.items():
        of[key] = max(value, of.get(key, value))


def _most_calls(found: Iterable[Mapping[int, list[int]]]) -> dict[int, list[int]]:
    most: dict[int, list[int]] = {}
    for calls in found:
        for graph, slots in calls.items():
            both = itertools.zip_longest(slots, most.get(graph, ()), fillvalue=0)
            most[graph] = [*itertools.starmap(max, both)]
    return most


class StepTimeline:
    """Live bytes and waiting calls of a recorded step, as the next one is going to be.

    An optimizer's state that is still there then is not made anew.  A gradient is only
    until it is added to the one that is there, but for what ``replaced`` says of those
    that the step leaves: see :class:`StepProgram`.  Something is gained by the end of the
    storages that are ``given`` as the step begins, by default gradients.
    ``moments`` is the step; of all that eager code made, ``made``, it leaves behind
    ``live`` bytes beside those.  Of each graph, ``calls`` has how many are in each slot,
    and ``scales`` the largest of their scales.
    O(events).
    """

    def __init__(
        self,
        recorder: Recorder,
        replaced: Optional[str] = None,
        given: Optional[set[int]] = None,
    ) -> None:
        self.moments: dict[frozenset[Held], Bytes] = {}
        self.calls: dict[int, list[int]] = {}
        self.scales: dict[int, float] = {}
        self.live = self.fixed = self.of_gradients = self.made = 0
        self._log = recorder.log
        self._nbytes = recorder.nbytes
        self._remaining = recorder.remaining()
        self._given = recorder.given_gradients if given is None else given
        new = recorder.gradients(recorder.with_new_gradients())
        self._gradients = new if replaced is None else set()
        # Those that a step like this drops, and before which kind of call.
        self._dropping = recorder.size(new), replaced
        ends = (at for at, event in enumerate(self._log) if event.kind in "fb")
        self._last = max(ends, default=0)
        # Gradients, what stays, and what is resized as shards are, grow with no input, unless
        # a compiled graph returned it.
        resized = {event.storage for event in self._log if event.kind == "="}
        self._all_gradients = recorder.seen_gradients | recorder.gradients()
        calls = {event.call for event in self._log if event.kind == "F"}
        returned = {s for call in calls for s in call.outputs}
        stays = self._remaining - returned
        self._of_no_input = stays | resized | self._all_gradients
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
        elif (
            event.flag
            or at < self._last
            or event.storage not in self._remaining
            or event.storage in self._all_gradients
        ):
            self._set(event.storage, event.nbytes)
        self._most = max(self._most, self._live())

    def _change(self, event: Event) -> None:
        """A storage is resized or gone."""
        self._passing = 0
        # What was there may have been made out of sight: nothing is gained when it
        # goes, and nothing lost when it is back.
        is_resized = event.kind == "="
        before = self._beyond.get(event.storage, 0)
        if event.kind == "-" and event.storage in self._given:
            self._drop_given(self._nbytes[event.storage])
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

    def peak(
        self,
        plans: Mapping[int, Menu],
        choices: Mapping[int, tuple[int, ...]],
    ) -> int:
        """The most that is live where calls run by these plans."""

        @functools.cache
        def live(graph: int, what: str, of: Any) -> list[int]:
            return plans[graph].live(what, of)

        def held_by(each: Held) -> int:
            index = choices[each.graph][each.slot]
            return live(each.graph, each.what, each.of)[index]

        return max(
            nbytes.total + sum(map(held_by, held))
            for held, nbytes in self.moments.items()
        )

    def _drop_given(self, nbytes: int) -> None:
        """Something is gone, of gradients, that was there when the step began."""
        self.live -= nbytes
        self.fixed -= nbytes
        self.of_gradients -= nbytes

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
        nbytes, before = self._dropping
        if event.kind == before:
            self._drop_given(nbytes)
            self._dropping = 0, None
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
