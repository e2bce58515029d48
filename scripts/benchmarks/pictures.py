"""The pictures of results/: for a talk, each drawn from what one benchmark found."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import nan
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import bounds, chunks, pages
from benchmarks.pages import good, Row
from benchmarks.plans import lowest, right


# Okabe and Ito's colours; shapes differ, too.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
LABELS = {
    "upstream": "stock, by its budget",
    "saved": "stock, a budget per block",
    "eager": "eager mode",
    "checkpoint": "checkpoint per block",
    "graph": "this set, target peak",
    "blocks": "this set, StepBudget",
}
STYLES: dict[str, dict[str, Any]] = {
    "upstream": {"color": ORANGE, "marker": "s", "linestyle": "--"},
    "saved": {"color": ORANGE, "marker": "s", "linestyle": "--"},
    "eager": {"color": GREY, "marker": "x", "linestyle": "none"},
    "checkpoint": {"color": GREEN, "marker": "v", "linestyle": "none"},
    "graph": {"color": BLUE, "marker": "o"},
    "blocks": {"color": BLUE, "marker": "o"},
}
BUDGETED = ("upstream", "graph")
MOST_PANELS = 6
Draw = Callable[[Axes, list[Row]], None]  # a net's rows
FACE: dict[str, Any] = {"font.size": 12, "axes.titlesize": 13, "lines.markersize": 5}


@contextmanager
def drawn(
    place: Path, title: str, source: str, width: float, height: float
) -> Iterator[Figure]:
    """A figure to draw on, which is then written, the same from the same data."""
    # Or the names of clip paths would be random.
    style: Any = {**FACE, "svg.hashsalt": place.stem}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        # The second line is the legend's.
        figure.suptitle(f"{title}\n", fontsize=17)
        yield figure
        handles, labels = figure.axes[0].get_legend_handles_labels()
        at = 0.5, 1 - 0.29 / height
        how: Any = {"loc": "upper center", "bbox_to_anchor": at, "frameon": False}
        figure.legend(handles, labels, ncols=len(labels), fontsize=11, **how)
        figure.supxlabel(source.strip(), fontsize=9, color=GREY, x=0.01, ha="left")
        figure.savefig(place, metadata={"Date": None})


def source_of(rows: list[Row], data: Row) -> str:
    """How the rows were measured, those of each device."""
    devices = dict.fromkeys(row["device"] for row in rows)
    first, *others = (bounds.view(device)[1].rstrip(",") for device in devices)
    views = [first, *(f"{how[0].lower()}{how[1:]}" for how in others)]
    how = "; ".join([*views, f"torch {data['environment']['torch']}"])
    return f"{how}.\nStock is torch.compile. Peaks beyond parameters and inputs."


def megabytes_or_gigabytes(axes: Axes) -> None:
    """Bytes so that numbers stay short."""
    is_large = axes.get_ylim()[1] > 1e10
    unit, name = (1e9, "GB") if is_large else (1e6, "MB")
    axes.yaxis.set_major_formatter(lambda nbytes, _: f"{nbytes / unit:,.3g}")
    axes.set_ylabel(f"peak memory, {name}")


def panels(figure: Figure, rows: list[Row], draw: Draw) -> None:
    """One for each of the first nets, with what is on their axes."""
    nets = [*dict.fromkeys(row["net"] for row in rows)][:MOST_PANELS]
    for at, net in enumerate(nets):
        axes = figure.add_subplot(-(-len(nets) // 3), min(3, len(nets)), at + 1)
        axes.set_title(net)
        draw(axes, good(rows, net=net))
        axes.set_ylim(bottom=0)
        megabytes_or_gigabytes(axes)
        axes.grid(alpha=0.3)


def by_budget(axes: Axes, rows: list[Row]) -> None:
    """Ways that no budget changes are lines across."""
    for row in rows:
        kind, steps = row["kind"], row["steps"]
        points = sorted((b, s["peak"]) for s in steps for b in bounds.asked(s))
        if kind in LABELS and points:
            axes.plot(*zip(*points), **STYLES[kind], label=LABELS[kind])
        elif kind in LABELS and steps:
            how = {**STYLES[kind], "marker": "", "linestyle": "-."}
            axes.axhline(steps[0]["peak"], **how, label=LABELS[kind])
    whole = bounds.base_of(rows)[rows[0]["net"]]["peak"]
    axes.axhline(whole, color=GREY, linestyle=":", label="stock's default")
    axes.set(xlim=(0, 1), xlabel="budget")


def by_compute(axes: Axes, rows: list[Row]) -> None:
    base = bounds.base_of(rows)[rows[0]["net"]]
    for row in rows:
        steps, label = right(row["steps"]), LABELS.get(row["kind"])
        if label and steps:
            more = ((s["flops"] / base["flops"] - 1) * 100 for s in steps)
            points = sorted(zip(more, (step["peak"] for step in steps)))
            axes.plot(*zip(*points), **STYLES[row["kind"]], label=label)
    axes.set_xlabel("extra compute, %")
    axes.set_xlim(left=-1)


def by_net(
    title: str, draw: Draw, size: tuple[int, int] = (13, 8), **wanted: Any
) -> Callable[[Path, Row], None]:
    """A picture that has a panel for each net of the rows with these entries."""

    def picture(place: Path, data: Row) -> None:
        rows = good(data["measured"], **wanted)
        with drawn(place, title, source_of(rows, data), *size) as figure:
            panels(figure, rows, draw)

    return picture


def bars(
    axes: Axes, names: Iterable[str], found: dict[str, tuple[str, list[float]]]
) -> None:
    """Lying bars, those of one name together."""
    names, height = [*names], 0.8 / len(found)
    for at, (label, (color, values)) in enumerate(found.items()):
        places = [row + at * height for row in range(len(names))]
        axes.barh(places, values, height, color=color, label=label)
    middle = (len(found) - 1) * height / 2
    axes.set_yticks([row + middle for row in range(len(names))], names)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    axes.margins(y=0.01)


def lowest_of(rows: list[Row], net: str, kind: str) -> float:
    """The lowest peak of a net's plans, NaN where none of the kind was measured."""
    found = (lowest(row["steps"]) for row in good(rows, net=net, kind=kind))
    return next((step["peak"] for step in found), nan)


def kernels(place: Path, data: Row) -> None:
    """The lowest peaks of all nets that both were measured of, beside stock's default."""
    rows = good(data["measured"])
    both = sorted(
        bounds.lowest_peaks(rows, "upstream", "graph"), key=lambda each: each[0]
    )
    bases = bounds.base_of(rows)
    found = {}
    for kind, color in (("eager", GREY), ("upstream", ORANGE), ("graph", BLUE)):
        peaks = ((lowest_of(rows, net, kind), bases[net]["peak"]) for _, net in both)
        values = [100 * peak / base for peak, base in peaks]
        label = LABELS[kind].partition(",")[0] + ", lowest" * (kind in BUDGETED)
        found[label] = (color, values)
    names = starred(rows, [net for _, net in both])
    title = "Lowest peak of one training step that a budget finds"
    source = f"{source_of(rows, data)} *: held out."
    with drawn(place, title, source, 12, 1.5 + 0.36 * len(names)) as figure:
        axes = figure.add_subplot()
        bars(axes, names, found)
        axes.set_xlabel("peak memory, % of stock's default (no budget)")


def starred(rows: Sequence[Row], nets: Iterable[str]) -> list[str]:
    """The names of nets, with a star after those that are held out."""
    held_out = {row["net"] for row in pages.by_set(rows).get(pages.SETS_OF_NETS[1], ())}
    return [f"{net} *" if net in held_out else net for net in nets]


def heads(place: Path, data: Row) -> None:
    rows = [row for row in good(data["measured"]) if row["device"] == chunks.DEVICE]
    nets = chunks.nets_of(rows)
    kinds = {
        "stock torch.compile, lowest": ("upstream", ORANGE),
        "inductor's chunker as mended, lowest": ("number", GREEN),
        "this set, target peak, lowest": ("graph", BLUE),
    }
    found = {
        label: (color, [lowest_of(rows, net, kind) / 1e9 for net in nets])
        for label, (kind, color) in kinds.items()
    }
    names = starred(rows, nets)
    title = "Peak memory of one training step with a large vocabulary"
    source = f"{source_of(rows, data)} *: held out."
    with drawn(place, title, source, 12, 1.5 + 0.5 * len(names)) as figure:
        axes = figure.add_subplot()
        bars(axes, names, found)
        axes.set_xlabel("peak memory, GB")


PICTURES: dict[str, Callable[[Path, Row], None]] = {
    "operators": by_net("Peak memory of one training step, by budget", by_budget),
    "steps": by_net(
        "Peak memory of one training step, each block compiled by itself", by_compute
    ),
    "kernels": kernels,
    "chunks": heads,
    "rfc": by_net(
        "A smaller budget can need more memory", by_budget, (11, 5), net="llama-8"
    ),
}
