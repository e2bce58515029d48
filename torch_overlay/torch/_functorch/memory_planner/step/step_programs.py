"""What a StepBudget has learned from the steps that it recorded."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Optional, TYPE_CHECKING

from .calls import slots_of
from .recording_schedule import MOST_RECORDED
from .tensors import storages_in
from .timeline import (
    Bytes,
    keep_largest,
    largest_scales,
    peak_under_plans,
    relative_size,
    StepTimeline,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from ..graph.inputs_outputs import Missing
    from ..peak.curve import Held
    from .calls import State
    from .graphs import Graph
    from .recorder import Recorder


# Maximum number of programs that are told apart.
_PROGRAMS = 32


@dataclass
class StepProgram:
    """What recorded steps with the same calls held, at the sizes that these had.

    Args:
        states: every event of a call, with the calls that waited meanwhile.
        moments: by what calls held at a moment, the most bytes eager code had then.
        calls: by graph number, the most calls in each slot.
        scales: by graph number, the largest of its calls, as a multiple of the first.
        replaced: other such moments, by the fate of the gradients that the step leaves:
            "anew" if they are gone when the next step starts, "F" or "B" if the next
            step drops them before its first forward or backward.  Empty if it began
            with gradients and kept them.
        leaves: the parameters that have such gradients.
        drops_before: the kind of event before which such steps were seen to drop all
            gradients that they begin with; empty if they were not.
        given: the storages of the gradients that the ``leaves`` had at the running
            step's start, where steps drop these, or may yet.
    """

    states: set[State]
    moments: dict[frozenset[Held], Bytes]
    calls: dict[int, list[int]]
    scales: dict[int, float]
    replaced: dict[str, dict[frozenset[Held], Bytes]] = field(default_factory=dict)
    leaves: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    drops_before: str = ""
    given: list[weakref.ref[Any]] = field(default_factory=list)

    def add(self, other: StepProgram) -> None:
        """Merge a step."""
        self.states |= other.states
        keep_most_bytes(self.moments, other.moments)
        keep_largest(self.scales, other.scales)
        self.calls = _most_calls([self.calls, other.calls])

    def scaled(
        self, scales: Mapping[int, float], varying: set[int], dropped_before: str = ""
    ) -> dict[frozenset[Held], Bytes]:
        """The moments as they would be with calls of these scales.

        Calls of ``varying`` graphs are all as large as the largest.  If the next step
        may yet drop the gradients that this one leaves, it does so ``dropped_before``
        its first event of this kind.
        """
        moments = self.replaced.get(dropped_before, self.moments)
        factors = (scales[n] / own for n, own in self.scales.items() if n in scales)
        factor, vary = max(factors, default=1.0), not varying.isdisjoint(self.scales)
        found: dict[frozenset[Held], Bytes] = {}
        for held, nbytes in moments.items():
            total = nbytes.enlarged if vary else nbytes.total
            total = nbytes.fixed + math.ceil((total - nbytes.fixed) * factor)
            new = {_enlarged(held, varying): nbytes._replace(total=total)}
            keep_most_bytes(found, new)
        return found


class LearnedPrograms:
    """The programs that recorded steps ran, and the calls that later ones may make."""

    def __init__(self, figures: Iterable[tuple[Any, ...]] = ()) -> None:
        self.programs = [StepProgram(*each) for each in figures]
        self.states: set[State] = set().union(*(p.states for p in self.programs))
        # By the event with which a call begins, its size as a share of the graph's
        # largest in the step; and the graphs for which that was not always the same.
        self.sizes: dict[State, float] = {}
        self.varying: set[int] = set()

    @property
    def calls(self) -> dict[int, list[int]]:
        """By graph number, the most calls in each slot."""
        return _most_calls(program.calls for program in self.programs)

    def covers_program(
        self, new: StepProgram, choices: Mapping[Graph, tuple[int, ...]], most: float
    ) -> bool:
        """Whether a program's events are known, and plans hold at most so many bytes.

        ``choices`` has, by graph, the plan of each slot.
        """
        known = self._program_like(new)
        if known is None or not new.states <= known.states:
            return False
        scales = {graph.number: graph.scale for graph in choices}
        menus = {graph.number: graph.menu() for graph in choices}
        chosen = {graph.number: plans for graph, plans in choices.items()}
        moments = new.scaled(scales, self.varying)
        return peak_under_plans(moments, menus, chosen) <= most

    def learn_sizes(self, recorder: Recorder) -> None:
        """Learn how large the calls of a recorded step are beside each other."""
        scales = largest_scales(recorder)
        for call in (event.call for event in recorder.log if event.kind == "F"):
            size, graph = relative_size(call, scales), call.graph
            if self.sizes.setdefault(call.state, size) != size:
                self.let_vary(graph)
            if size < 1 and graph.number not in self.varying:
                graph.smaller.setdefault(size, (call.compiled, call.sizes, call.scale))

    def let_vary(self, graph: Graph) -> None:
        """From now on, each of the graph's calls may be as large as the largest."""
        self.varying.add(graph.number)
        graph.smaller.clear()

    def planned_size(self, state: State) -> float:
        """How large the call that begins may be, as a share of the largest."""
        return 1.0 if state.graph in self.varying else self.sizes.get(state, 1.0)

    def storable_figures(self) -> list[tuple[Any, ...]]:
        """What a file can store of each program: its first arguments."""
        return [(p.states, p.moments, p.calls, p.scales) for p in self.programs]

    def add_program(self, new: StepProgram) -> None:
        """Add a program, or merge it into a known one."""
        self.states |= new.states
        known = self._program_like(new)
        if known is None:
            self.programs.append(new)
        else:
            known.add(new)

    def _program_like(self, program: StepProgram) -> Optional[StepProgram]:
        """The known program that a step belongs to, None if there is none.

        Steps with the same events are one program.  Once there are ``_PROGRAMS``, any
        other belongs to the last.
        """
        same = (each for each in self.programs if each.states == program.states)
        last = self.programs[-1] if len(self.programs) == _PROGRAMS else None
        return next(same, last)

    def expect_dropped_gradients(self, before: str) -> bool:
        """Expect steps to drop the gradients that they begin with.

        ``before`` is what `dropped_before` returns.  Returns whether that changes what
        is expected.
        """
        known = [each for each in self.programs if before in each.replaced]
        for program in known:
            program.moments = program.replaced[before]
            # A later step may still begin without any.
            program.replaced = {"anew": program.replaced["anew"]}
            program.drops_before = before
        return bool(known)

    def begin_step(self) -> bool:
        """Expect new gradients where a step begins without; return whether any does.

        One does where two programs take turns, and each drops its own gradients.
        """
        found = False
        for program in self.programs:
            leaves = (leaf() for leaf in program.leaves)
            gradients = [leaf.grad for leaf in leaves if leaf is not None]
            may_drop = program.drops_before or "B" in program.replaced
            storages = storages_in(gradients if may_drop else ())
            program.given = [*map(weakref.ref, storages)]
            if program.replaced and gradients and gradients[0] is None:
                keep_most_bytes(program.moments, program.replaced["anew"])
                program.replaced, found = {}, True
        return found

    def have_other_calls_than(self, states: set[State]) -> bool:
        """Whether no recorded step used the same slots as one with these states.

        Then something runs without a plan, or no longer runs compiled, say beyond
        Dynamo's recompile limit.
        """
        slots = slots_of(states)
        return all(slots != slots_of(program.states) for program in self.programs)

    def have_fewer_calls_than(self, states: set[State]) -> bool:
        """Whether these have a graph, or more of its calls at once, than was recorded.

        Unlike other orders of known calls, that cannot go on for long.
        """
        new = slots_of(state for state in states if state.kind != "I")
        return not new <= slots_of(self.states)

    def why_unplanned(self, state: State, is_strict: bool) -> str:
        """What to warn of if a step had this state and no recorded one had it."""
        name, calls = state.name, sum(self.calls.get(state.graph, ()))
        if state.kind == "I":
            what = f"a call of {name}, which has no backward, or a larger one"
        elif not calls:
            what = f"a graph of its own, {name}"
        else:
            what = (
                f"more calls of {name} at once than {calls}, or in another order, or "
                "with gradients of other outputs"
            )
        then = (
            "from there on it ran by lean plans, and "
            f"{MOST_RECORDED} more steps at most are recorded, to plan for it when it "
            "comes again"
        )
        if is_strict:
            then = "without strict=True, it runs by lean plans and is planned for"
        return f"a step had {what}, and no recorded one had; {then}"

    def missing_in_backwards(self, graph: int) -> Optional[Missing]:
        """What the graph's backwards miss; None unless all miss the same."""
        found = {s.missing for s in self.states if (s.kind, s.graph) == ("B", graph)}
        return found.pop() if len(found) == 1 else None

    def growth(self, graphs: Mapping[int, Graph]) -> dict[int, float]:
        """By graph number, the factors by which graphs have yet to grow with a step."""
        found = dict.fromkeys(graphs, 1.0)
        for program in self.programs:
            of = program.scales.items()
            own = {n: graphs[n].scale / scale for n, scale in of if n in graphs}
            most = max(own.values(), default=1.0)
            for n, factor in own.items():
                found[n] = max(found[n], most / factor)
        return found

    def with_gradients_left(self, kind: str, graph: int) -> list[StepProgram]:
        """The programs with such an event whose given gradients are not all gone."""
        return [
            program
            for program in self.programs
            if any((each.kind, each.graph) == (kind, graph) for each in program.states)
            and any(storage() is not None for storage in program.given)
        ]

    def expected_moments(
        self, graphs: Mapping[int, Graph], dropped_before: str = ""
    ) -> dict[frozenset[Held], Bytes]:
        """The moments of all programs, scaled to the largest calls of these graphs.

        ``dropped_before`` is that of :meth:`StepProgram.scaled`.
        """
        found: dict[frozenset[Held], Bytes] = {}
        scales = {n: graph.scale for n, graph in graphs.items()}
        for program in self.programs:
            scaled = program.scaled(scales, self.varying, dropped_before)
            keep_most_bytes(found, scaled)
        return {
            held: nbytes
            for held, nbytes in found.items()
            # A graph dies with the model that it was compiled for.
            if all(each.graph in graphs for each in held)
        }


def step_program_of(
    recorder: Recorder, states: set[State], step: StepTimeline
) -> StepProgram:
    """What a recorded ``step`` held."""
    found = StepProgram(states, step.moments, step.calls, step.scales)
    parameters = recorder.parameters_with_gradients()
    leaves = recorder.with_new_gradients()
    if leaves:
        found.replaced = {
            how: StepTimeline(recorder, how).moments for how in ("anew", "F", "B")
        }
    elif parameters and dropped_before(recorder):
        leaves = parameters
        found.replaced = {"anew": StepTimeline(recorder, given=set()).moments}
    found.leaves = [*map(weakref.ref, leaves)]
    return found


def dropped_before(recorder: Recorder) -> str:
    """The kind of event before which parameters' old gradients are gone, "F" or "B".

    Empty where some stay, or go after the first backward has begun.
    """
    given, log = recorder.given_to_parameters, recorder.log
    if not given or given & recorder.live_storages():
        return ""
    gone = (
        at for at, each in enumerate(log) if each.kind == "-" and each.storage in given
    )
    begun = {event.kind for event in log[: max(gone)]}
    return "" if "B" in begun else "B" if "F" in begun else "F"


def keep_most_bytes(
    of: dict[frozenset[Held], Bytes], new: Mapping[frozenset[Held], Bytes]
) -> None:
    for held, nbytes in new.items():
        of[held] = nbytes.or_more(of.get(held, nbytes))


def _enlarged(held: frozenset[Held], graphs: set[int]) -> frozenset[Held]:
    """What calls hold if those of some graphs are all as large as the largest."""
    found: Counter[Held] = Counter()
    for each in held:
        size = 1.0 if each.graph in graphs else each.size
        found[each._replace(calls=1, size=size)] += each.calls
    return frozenset(each._replace(calls=calls) for each, calls in found.items())


def _most_calls(found: Iterable[Mapping[int, list[int]]]) -> dict[int, list[int]]:
    most: dict[int, list[int]] = {}
    for calls in found:
        for graph, slots in calls.items():
            both = itertools.zip_longest(slots, most.get(graph, ()), fillvalue=0)
            most[graph] = [*itertools.starmap(max, both)]
    return most
