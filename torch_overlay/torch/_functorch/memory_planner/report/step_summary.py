"""What a training step holds under its plan, as data, as text and as a plot."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

from .saved_values import describe_head, format_bytes


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ..decision import Head
    from ..peak.curve import Choice, Curve, Held
    from ..peak.menu import Menu

    from ..step.graphs import Graph
    from ..step.plan_step import Present
    from ..step.timeline import Bytes


class GraphUse(NamedTuple):
    """A graph in a step, and its plans.

    ``calls`` is how many a step makes.  A call in slot k keeps ``kept[k]`` bytes for
    its backward, and has up to ``transient[k]`` more live while it runs.  ``cost`` is
    what all calls recompute, in the estimator's unit.  ``heads`` says how a large head
    runs by each of the plans: in chunks, or why not.
    """

    name: str
    calls: int
    kept: tuple[int, ...]
    transient: tuple[int, ...]
    cost: float
    heads: tuple[Head, ...] = ()


class Moment(NamedTuple):
    """What is live at a moment of a step, in bytes beyond those live when it starts.

    Args:
        what: what runs: the forward or backward of a graph, or eager code.  For a
            backward, it also names the module or function where it holds most,
            estimated operator by operator.
        saved: kept for backwards that have not finished.
        transient: what the graph that runs has live beyond that.
        gradients: those of the parameters.
        persistent: what else the step leaves behind, such as an optimizer's states, or
            resizes, such as gathered shards.
        other: everything else that eager code makes.
    """

    what: str
    saved: int
    transient: int
    gradients: int
    persistent: int
    other: int

    @property
    def total(self) -> int:
        return sum(self[1:])

    def __str__(self) -> str:
        named = zip(self._fields[1:], self[1:])
        parts = (f"{format_bytes(size)} {name}" for name, size in named if size)
        return f"{self.what}: {', '.join(parts)}"


@dataclass(frozen=True)
class StepSummary:
    """The figures of a step's plan, in bytes unless said otherwise.

    Peaks leave out the ``given`` bytes, except with ``device_bytes``, which bounds all
    bytes on the device.

    Args:
        allowed: the peak that the budget allows.
        predicted_peak: the plan's own.
        floor: the lowest peak that was found.
        unbudgeted: the peak of plans that, like those of budget 1, recompute nothing
            expensive, and that hold no more; "fastest" in the report.
        given: what is live when the step starts.
        parameters, optimizer_states: parts of ``given``.
        cost: what the plan recomputes, in the estimator's unit.
        graphs: what the plan means for each graph.
        work: what the graphs compute without a budget, in FLOP; 0 if unknown.
        source: where the figures come from, as text.
        moments: those of the step, in the order in which they were first seen.
        at_floor: the moment of the peak by the plan of the floor.
    """

    allowed: int
    predicted_peak: int
    floor: int
    unbudgeted: int
    given: int
    parameters: int
    optimizer_states: int
    cost: float
    graphs: tuple[GraphUse, ...]
    work: float
    source: str
    moments: tuple[Moment, ...] = field(repr=False)
    at_floor: Moment

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def more_work(self) -> str:
        """What is recomputed, as a share of the work, as text; empty if unknown."""
        # The cost is negative if chunks of a head cost less than one piece.
        more = max(self.cost, 0)
        return f"{more / self.work:.1%} more work" if self.work else ""

    @property
    def headline(self) -> str:
        """The predicted and the allowed peak, and what is recomputed."""
        peak, allowed = map(format_bytes, (self.predicted_peak, self.allowed))
        return ", ".join(filter(None, (f"{peak} of {allowed}", self.more_work)))

    @property
    def why_over(self) -> str:
        """What to warn of if the predicted peak is above the allowed one."""
        peak, allowed = map(format_bytes, (self.predicted_peak, self.allowed))
        heads = (
            f", with the large head of {use.name} in one piece, as {head.why_whole}"
            for use in self.graphs
            for head in use.heads
            if head.why_whole
        )
        return (
            f"the lowest peak found is {peak}, and {allowed} are allowed; the step "
            f"uses that plan{''.join(heads)}"
        )

    def lines(self, measured_peak: Optional[int], is_in_all: bool) -> list[str]:
        """The plan as lines of text.

        ``measured_peak`` is in bytes, None if not measured; ``is_in_all`` says that
        peaks include the ``given`` bytes.
        """
        peaks = self.predicted_peak, self.allowed, self.floor, self.unbudgeted
        sizes = [format_bytes(nbytes) for nbytes in peaks]
        what = "in all" if is_in_all else "beyond what is live at step start"
        measured = ""
        if measured_peak is not None:
            measured = f" ({format_bytes(measured_peak)} measured)"
        figures = "; ".join(
            filter(None, (f"figures are {self.source}", self.more_work))
        )
        return [
            "StepBudget: {} predicted{}, {} allowed (floor: {}, fastest: {}; "
            "{})".format(sizes[0], measured, *sizes[1:], what),
            f"live at step start: {format_bytes(self.given)}, of which "
            f"{format_bytes(self.parameters)} parameters and "
            f"{format_bytes(self.optimizer_states)} optimizer states; {figures}",
            f"at the peak: {self.peak}",
            f"at the floor's: {self.at_floor}",
            *self.table(),
            *(
                f"head of {use.name}: {describe_head(head)}"
                for use in self.graphs
                for head in use.heads
            ),
        ]

    def table(self) -> Iterator[str]:
        """The graphs and what their calls hold, as lines of text."""
        table = [("graph", "calls", "at once", "saved per call", "extra while running")]
        for use in self.graphs:
            name, calls = use.name, str(use.calls)
            for each, run in itertools.groupby(zip(use.kept, use.transient)):
                kept, more = map(format_bytes, each)
                table.append((name, calls, str(len([*run])), kept, more))
                name = calls = ""
        widths = [max(map(len, column)) for column in zip(*table)]
        return ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)

    def draw(self, title: str, path: str) -> None:
        """Plot the live bytes of all moments by kind, into the file ``path``.

        Raises ImportError if there is no matplotlib.
        """
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter

        kinds = Moment._fields[1:]
        sizes = [[getattr(moment, kind) for moment in self.moments] for kind in kinds]
        base = self.given if self.predicted_peak > self.peak.total else 0
        # No pyplot: it would keep the figure, and might open a window.
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        at = range(len(self.moments))
        given = [[base] * len(at)] if base else []
        names = ["there at the start", *kinds] if base else kinds
        axes.stackplot(at, *given, *sizes, labels=names, step="post", alpha=0.8)
        axes.axhline(self.allowed, color="black", linestyle="--", label="allowed")
        axes.set(title=title, xlabel="moments of the step", ylabel="live bytes")
        axes.yaxis.set_major_formatter(EngFormatter(unit="B", places=1))
        figure.legend(loc="outside lower center", ncols=6)
        figure.savefig(path)


def summary_of(
    plan: Choice,
    curve: Curve,
    moments: Mapping[frozenset[Held], Bytes],
    calls: Mapping[int, Sequence[int]],
    graphs: Mapping[int, Graph],
    allowed: int,
    present: Present,
    beyond: int,
) -> StepSummary:
    """The summary of a plan for a step with these moments; see :class:`StepSummary`.

    ``beyond`` bytes are added to all peaks; ``calls`` counts those of each slot.
    """
    describe = functools.partial(
        _describe_moments, curve=curve, moments=moments, graphs=graphs
    )
    plans = [graph.plans for graph in graphs.values()]
    is_known = all(each.work for each in plans)
    work = sum(graphs[n].plans.work * sum(calls[n]) for n in graphs) if is_known else 0
    return StepSummary(
        allowed + beyond,
        plan.peak + beyond,
        curve.floor + beyond,
        curve.unbudgeted.peak + beyond,
        *present,
        plan.cost,
        tuple(_graphs_in_plan(calls, graphs, curve, plan)),
        work,
        _source_of_figures(plans),
        tuple(describe(plan)),
        max(describe(curve.plans[0]), key=lambda moment: moment.total),
    )


def _source_of_figures(plans: Sequence[Menu]) -> str:
    """Where figures come from: no more than is true of all graphs."""
    if all(each.compiled for each in plans):
        return "told by its compiles"
    if any(each.compiled for each in plans):
        return "told by its compiles where these can tell, else estimates"
    if any(each.model.is_fused for each in plans):
        return "estimates for inductor's kernels"
    if any(each.model.operators_with_bodies for each in plans):
        return "operator by operator, at most those of bodies of higher-order operators"
    return "exact, operator by operator"


def _graphs_in_plan(
    calls: Mapping[int, Sequence[int]],
    graphs: Mapping[int, Graph],
    curve: Curve,
    plan: Choice,
) -> Iterator[GraphUse]:
    """What the plan of a step means for each of its graphs."""
    for number, choice in plan.choices.items():
        chosen = [curve.graphs[number].plans[p] for p in choice]
        yield GraphUse(
            graphs[number].name,
            sum(calls[number]),
            tuple(each.kept for each in chosen),
            tuple(max(each.forward, each.backward) - each.kept for each in chosen),
            math.fsum(map(operator.mul, calls[number], (p.cost for p in chosen))),
            tuple(filter(None, map(curve.graphs[number].head, dict.fromkeys(choice)))),
        )


def _describe_moments(
    plan: Choice,
    curve: Curve,
    moments: Mapping[frozenset[Held], Bytes],
    graphs: Mapping[int, Graph],
) -> Iterator[Moment]:
    """What is live at each moment under a plan of the curve."""

    @functools.cache
    def live(graph: int, what: str, of: Any, size: float) -> list[int]:
        return curve.graphs[graph].bytes_held(what, of, size)

    @functools.cache
    def place(graph: int, index: int) -> str:
        name = _place_of_peak(curve.graphs[graph], index)
        return f" at {name}" if name else ""

    for held, nbytes in moments.items():
        what, saved, transient = "eager code", 0, 0
        for graph, slot, kind, of, times, size in held:
            index = plan.choices[graph][slot]
            own = times * live(graph, kind, of, size)[index]
            if kind in ("kept", "output"):
                saved += own
                continue
            name = graphs[graph].name
            if kind == "forward":
                what, kept = f"forward of {name}", 0
            else:
                what = f"backward of {name}{place(graph, index)}"
                kept = live(graph, "kept", None, size)[index]
            saved += kept
            transient += own - kept
        total, fixed, gradients, _ = nbytes
        beside = gradients, fixed - gradients, total - fixed
        yield Moment(what, saved, transient, *beside)


def _place_of_peak(menu: Menu, index: int) -> str:
    """Where a backward holds most by a plan, estimated operator by operator.

    It is the path of a module within the compiled one, or the name of a function
    that this calls; empty if unknown.
    """
    plan = menu.plans[index]
    model = menu.variants[plan.chunks].model
    peaks = model.evaluate(plan.storages).step_peaks
    _, step = max(zip(peaks, model.steps), key=operator.itemgetter(0))
    meta = step.operator.node.meta
    modules = [path for path, _ in (meta.get("fwd_nn_module_stack") or {}).values()]
    functions = [name for name, _ in meta.get("fwd_source_fn_stack", ())]
    # The compiled module is a local variable, as in L['self'].layers.0.
    paths = (path.partition("].")[2] for path in modules[-1:])
    return next(filter(None, (*paths, *functions)), "")
