"""What a training step holds at each of its moments, from its recording."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

from torch.nn import Parameter

from ..peak.curve import Held
from .tensors import storages_in


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..peak.menu import Menu
    from .recorder import Recorder


class Bytes(NamedTuple):
    """The bytes of eager code: all, what no input's size changes, and gradients.

    ``enlarged`` is all of it if each call were as large as the largest of its graph.
    """

    total: int
    fixed: int
    gradients: int
    enlarged: int

    def or_more(self, other: Bytes) -> Bytes:
        """The larger of two."""
        return max(self, other)._replace(enlarged=max(self.enlarged, other.enlarged))


class Event(NamedTuple):
    """A change while a step runs.

    Args:
        kind: "+" and "-", a storage is made and freed; "=", it grows by ``nbytes``;
            "d", the caller drops an output; "F" and "f", "B" and "b", the forward or
            backward of a ``call`` begins and ends; "x", its backward will never run.
        storage: the storage's number, -1 for the event of a call.
        nbytes: of "+", the storage's bytes; of "=", the change, perhaps negative.
        flag: of "+", whether grad mode was on; of "-", whether the step's own thread
            freed it; of a call, whether anything is kept for a backward to come.
        inputs: of "B", the storages of the graph's inputs and tangents, and of what its
            forward returned.
    """

    kind: str
    storage: int = -1
    nbytes: int = 0
    call: Any = None
    flag: bool = False
    inputs: Sequence[Optional[int]] = ()


def peak_under_plans(
    moments: Mapping[frozenset[Held], Bytes],
    menus: Mapping[int, Menu],
    choices: Mapping[int, Sequence[int]],
) -> int:
    """The most bytes that are live when calls run by the plans of their slots.

    ``menus`` and ``choices`` have, by graph number, its plans and those of its slots.
    """
    plans = {number: menu.corrected() for number, menu in menus.items()}

    @functools.cache
    def live(graph: int, what: str, of: Any, size: float) -> list[int]:
        return plans[graph].bytes_held(what, of, size)

    def held_by(each: Held) -> int:
        index = choices[each.graph][each.slot]
        return each.calls * live(each.graph, each.what, each.of, each.size)[index]

    return max(
        nbytes.total + sum(map(held_by, held)) for held, nbytes in moments.items()
    )


def peak_of_recording(recorder: Recorder, counts_lasting: bool) -> int:
    """The most bytes of a recorded step beyond those before it.

    Its calls have the sizes that they had, and the plans that they ran by.  With
    ``counts_lasting``, gradients and optimizer states that it made do not count, as
    they were to be there before it.  Reads each graph once for each of its sizes.
    """
    calls = [event.call for event in recorder.log if event.kind == "F"]
    sized = {(call.compiled, call.sizes): call for call in calls}
    numbers = {each: number for number, each in enumerate(sized)}
    menus = {number: call.plans() for number, call in enumerate(sized.values())}
    # In the place of its slot, a call has its plan.
    ran_by = {c: (numbers[c.compiled, c.sizes], c.plan) for c in calls}
    plans = {number: range(len(menu.plans)) for number, menu in menus.items()}
    lasting = recorder.lasting_bytes() if counts_lasting else 0
    ran = StepTimeline(recorder, None, recorder.existing, bool(lasting), ran_by)
    return peak_under_plans(ran.moments, menus, plans) - lasting


def replaced_storages(recorder: Recorder, old: set[int], new: set[int]) -> set[int]:
    """Those of the ``old`` storages that a step freed after ``new`` ones replaced them.

    What a step makes and leaves, such as a hidden state, the next batch, or averages
    of parameters, replaces as much of the same size.  What is freed before that, or by
    another thread, as what was sent to another rank, may be freed between other steps.
    """
    # How many new storages have been made and replace none yet, by their size.
    made: Counter[int] = Counter()
    found = set()
    nbytes = recorder.nbytes
    for event in recorder.log:
        s = event.storage
        if event.kind == "+" and s in new:
            made[nbytes[s]] += 1
        elif event.kind == "-" and event.flag and s in old and made[nbytes[s]]:
            made[nbytes[s]] -= 1
            found.add(s)
    return found


def keep_largest(of: dict[Any, Any], new: Mapping[Any, Any]) -> None:
    for key, value in new.items():
        of[key] = max(value, of.get(key, value))


def largest_scales(recorder: Recorder) -> dict[int, float]:
    """By graph number, the scale of the largest call in a recorded step."""
    found: dict[int, float] = {}
    for event in recorder.log:
        if event.kind == "F":
            keep_largest(found, {event.call.graph.number: event.call.scale})
    return found


def relative_size(call: Any, scales: Mapping[int, float]) -> float:
    """How large a call is, as a share of its graph's largest in the step."""
    share: float = call.scale / scales[call.graph.number]
    return round(share, 9)


class StepTimeline:
    """Live bytes and waiting calls of a recorded step, as expected of the next one.

    Args:
        recorder: the recording.
        replaced: the fate of the step's new gradients, see :class:`.StepProgram`.  By
            default they live only until they are added to existing ones.
        given: storages that were there before the step, but whose freeing lowers the
            live bytes, as does that of :func:`replaced_storages`; by default gradients.
        counts_lasting: whether new gradients and optimizer states count to the end.
        places: by call, the graph and slot to note in moments; by default its own.

    ``moments`` has, by what calls hold at a moment, the most :class:`Bytes` that eager
    code holds then.  It makes ``made`` bytes in all and leaves ``live`` behind, not
    counting new gradients and optimizer states, which the next step does not make
    again.  By graph number, ``calls`` has how many are in each slot, and ``scales`` the
    largest of their scales.  O(events).
    """

    def __init__(
        self,
        recorder: Recorder,
        replaced: Optional[str] = None,
        given: Optional[set[int]] = None,
        counts_lasting: bool = False,
        places: Optional[Mapping[Any, tuple[int, int]]] = None,
    ) -> None:
        self._counts_lasting, self._places = counts_lasting, places
        self.moments: dict[frozenset[Held], Bytes] = {}
        self.calls: dict[int, list[int]] = {}
        self.scales = largest_scales(recorder)
        self.live = self.fixed = self.of_gradients = self.made = 0
        self._log = recorder.log
        self._nbytes = recorder.nbytes
        self._remaining = recorder.live_storages()
        self._given = recorder.given_gradients if given is None else given
        new = recorder.gradients(recorder.with_new_gradients())
        are_added = replaced is None and not counts_lasting
        self._gradients = new if are_added else set()
        # The bytes of gradients that the next step drops, and before which event.
        self._dropping = recorder.nbytes_of(new), replaced
        ends = (at for at, event in enumerate(self._log) if event.kind in "fb")
        self._last = max(ends, default=0)
        # Gradients, resized storages such as shards, and what stays do not grow with
        # inputs, unless a compiled graph returned what stays.
        resized = {event.storage for event in self._log if event.kind == "="}
        self._all_gradients = recorder.seen_gradients | recorder.gradients()
        calls = [event.call for event in self._log if event.kind == "F"]
        of_calls = {s for call in calls for s in (*call.inputs, *call.outputs)}
        stays = self._remaining - of_calls
        self._replaced = replaced_storages(
            recorder,
            recorder.at_start - recorder.given_gradients - self._all_gradients,
            self._remaining - recorder.existing - self._all_gradients,
        )
        self._of_no_input = stays | resized | self._all_gradients
        # Dropped outputs that a backward gets no tangent of count only if saved.
        backwards = (event.call for event in self._log if event.kind == "B")
        self._dropped = {
            call.outputs[at]
            for call in backwards
            for at in (call.missing.outputs if call.missing else ())
        }
        # How large the call is that reads or returns a storage, the largest of several,
        # and how large the last call was.  If all were as large as the largest, these
        # many more bytes would be live, of some storages and in all.
        self._sizes: dict[Optional[int], float] = {}
        for event in self._log:
            if event.kind in "FB":
                size = relative_size(event.call, self.scales)
                own = *event.call.inputs, *event.call.outputs, *event.inputs
                keep_largest(self._sizes, dict.fromkeys(own, size))
        # Gradients of parameters are as large, whatever calls they are of.
        leaves = (x for x in recorder.leaves.values() if isinstance(x, Parameter))
        self._of_parameters = {s.nbytes() for s in storages_in(leaves)}
        self._size = 1.0
        self._enlarged_by: dict[int, int] = {}
        self._enlarged = 0
        # The bytes of new gradients until they are added to existing ones, and the most
        # bytes since the last event of a call.
        self._passing, self._most = 0, Bytes(0, 0, 0, 0)
        # By storage, its bytes beyond those that it had before the step.
        self._beyond: dict[int, int] = {}
        self._waiting: dict[Any, None] = {}
        for at, event in enumerate(self._log):
            if event.kind == "+":
                self._add_storage(at, event)
            elif event.storage >= 0:
                if event.kind != "d" or event.storage in self._dropped:
                    self._change_storage(event)
            elif event.kind in "FB":
                self._begin_graph(at, event)
            else:
                self._end_graph(event)
        self._note_moment(self._most, self._held_by_waiting(self._waiting))

    def _add_storage(self, at: int, event: Event) -> None:
        self.made += event.nbytes
        if event.storage in self._gradients:
            self._passing += event.nbytes
        elif (
            event.flag
            or self._counts_lasting
            or at < self._last
            or event.storage not in self._remaining
            or event.storage in self._all_gradients
        ):
            self._set_bytes(event.storage, event.nbytes)
            size = self._sizes.get(event.storage, self._size)
            is_fixed = event.storage in self._of_no_input
            if size < 1 and not is_fixed and event.nbytes not in self._of_parameters:
                more = math.ceil(event.nbytes / size) - event.nbytes
                self._enlarged_by[event.storage] = more
                self._enlarged += more
        self._most = self._most.or_more(self._live())

    def _change_storage(self, event: Event) -> None:
        """A storage is resized, freed, or held by no caller any more."""
        self._passing = 0
        # What was there before may have been made out of sight: freeing it does not
        # lower the live bytes, and restoring it does not raise them.
        is_resized = event.kind == "="
        before = self._beyond.get(event.storage, 0)
        # The bytes at the step's start: others count as beyond them.
        given = self._nbytes[event.storage] - before
        if event.kind == "-" and event.storage in self._given:
            self._drop_given(given)
        elif event.kind == "-" and event.storage in self._replaced:
            self.live -= given
            self.fixed -= given
        self._set_bytes(event.storage, before + event.nbytes if is_resized else 0)
        if not is_resized:
            self._beyond.pop(event.storage, None)
            self._enlarged -= self._enlarged_by.pop(event.storage, 0)
        self._most = self._most.or_more(self._live())

    def _set_bytes(self, storage: int, nbytes: int) -> None:
        more = max(nbytes, 0) - max(self._beyond.get(storage, 0), 0)
        self._beyond[storage] = nbytes
        self.live += more
        if storage in self._of_no_input:
            self.fixed += more
        if storage in self._all_gradients:
            self.of_gradients += more

    def _drop_given(self, nbytes: int) -> None:
        """Free gradients that were there when the step began."""
        self.live -= nbytes
        self.fixed -= nbytes
        self.of_gradients -= nbytes

    def _live(self) -> Bytes:
        all_bytes = self.live, self.fixed, self.of_gradients, self.live + self._enlarged
        return Bytes(*(nbytes + self._passing for nbytes in all_bytes))

    def _count_call(self, call: Any) -> None:
        graph = call.graph.number
        calls = self.calls.setdefault(graph, [])
        calls += [0] * (call.slot + 1 - len(calls))
        calls[call.slot] += 1

    def _begin_graph(self, at: int, event: Event) -> None:
        """A compiled forward or backward begins."""
        nbytes, before = self._dropping
        if event.kind == before:
            self._drop_given(nbytes)
            self._dropping = 0, None
        held = self._held_by_waiting(self._waiting)
        self._note_moment(self._most, held)
        call = event.call
        self._size = relative_size(call, self.scales)
        if event.kind == "F":
            self._count_call(call)
            held |= {self._held(call, "forward")}
        else:
            # What was kept is part of the backward's peak.
            waiting = {c: None for c in self._waiting if c is not call}
            held = self._held_by_waiting(waiting, call)
            what = "retained" if event.flag else "backward"
            held |= {self._held(call, what, self._held_alone(at, event))}
        self._passing = 0
        self._most = self._live()
        self._note_moment(self._most, held)

    def _end_graph(self, event: Event) -> None:
        if event.kind == "x":
            # This may happen in the midst of eager code.
            self._note_moment(self._most, self._held_by_waiting(self._waiting))
        if event.flag:
            self._waiting[event.call] = None
        else:
            self._waiting.pop(event.call, None)
        self._passing = 0
        self._most = self._live()

    def _note_moment(self, nbytes: Bytes, held: frozenset[Held]) -> None:
        """Note the most bytes that eager code has while calls hold this."""
        self.moments[held] = nbytes.or_more(self.moments.get(held, nbytes))

    def _held(self, call: Any, what: str, of: Any = None) -> Held:
        """What a call holds."""
        if self._places is not None:
            return Held(*self._places[call], what, of)
        size = relative_size(call, self.scales)
        return Held(call.graph.number, call.slot, what, of, size=size)

    def _held_by_waiting(
        self, waiting: Mapping[Any, None], running: Any = None
    ) -> frozenset[Held]:
        """What waiting calls keep, and outputs that nobody holds, of ``running`` too."""
        found = Counter(self._held(each, "kept") for each in waiting)
        for call in {**waiting, running: None} if running is not None else waiting:
            found.update(
                self._held(call, "output", index)
                for index, s in enumerate(call.outputs)
                if s is not None and s not in self._beyond
            )
        return frozenset(held._replace(calls=calls) for held, calls in found.items())

    def _held_alone(self, at: int, begin: Event) -> frozenset[int]:
        """The indices of inputs that only the backward holds, as they die in it."""
        dying = set()
        while self._log[at].kind != "b":
            if self._log[at].kind == "-":
                dying.add(self._log[at].storage)
            at += 1
        dying &= self._beyond.keys()
        return frozenset(i for i, s in enumerate(begin.inputs) if s in dying)
