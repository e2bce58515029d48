"""A picture of what steps hold: a group of bars for each batch, or length."""

import functools
from pathlib import Path
from typing import Any

from benchmarks.pages import Row

from what_fits import page


# From the bottom up; what is above them is live only while a step runs.
FIXED = {
    "parameters": "#54636e",
    "optimizer": "#8b9aa5",
    "inputs": "#c3ccd3",
}
KINDS = {
    "no budget": ("#d9822b", lambda size: size.base),
    "this set, to fit": ("#5b9bd5", lambda size: size.within(size.by_memory)),
    "this set's floor": ("#1f4e9c", lambda size: page.lowest(size.ours)),
    "upstream's lowest": ("#6aa84f", lambda size: page.lowest(size.upstream)),
}
WIDTH = 0.8
# So many times what is drawn, the memory is told and not drawn.
ABOVE = 2


def fixed_of(base: Row) -> dict[str, int]:
    """The bytes of what is fixed; what is neither model nor input, the optimizer keeps."""
    found: dict[str, int] = dict(base["parts"])
    found["optimizer"] = max(base["given"] - sum(found.values()), 0)
    return found


def kinds_of(sizes: list[page.Size], asked: Row) -> dict[str, Any]:
    left_out = {
        "this set, to fit": not asked["memory"],
        "upstream's lowest": not all(size.upstream for size in sizes),
    }
    return {name: how for name, how in KINDS.items() if not left_out.get(name)}


def draw(data: dict[str, Any], file: Path) -> None:
    """Written to a file of a format that matplotlib knows; nothing where it is lacking."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no picture is drawn: this Python has no matplotlib")
        return
    asked = data["asked"]
    what, sizes = page.sizes_of(data)
    if not sizes:
        return
    kinds = kinds_of(sizes, asked)
    memory = asked["memory"] or 0
    steps = [find(size) for _, find in kinds.values() for size in sizes]
    top = max(page.total(step) for step in steps if step is not None)
    unit, name = (2**30, "GiB") if top >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(max(6, 1.5 + 1.1 * len(sizes)), 4.5), layout="constrained")
    axes = figure.subplots()
    bar = functools.partial(axes.bar, align="edge", linewidth=0)
    wide = WIDTH / len(kinds)
    labelled: set[str] = set()

    def label(text: str) -> str:
        """Each once in the legend."""
        new = text not in labelled
        labelled.add(text)
        return text if new else "_"

    for place, size in enumerate(sizes):
        for number, (kind, (colour, find)) in enumerate(kinds.items()):
            left = place - WIDTH / 2 + number * wide
            step = find(size)
            if step is None:
                axes.text(
                    left + wide / 2, 0, "no fit", rotation=90, ha="center", va="bottom"
                )
                continue
            bottom = 0.0
            fixed = fixed_of(size.base)
            for part, shade in FIXED.items():
                high = fixed[part] / unit
                bar(left, high, 0.9 * wide, bottom, color=shade, label=label(part))
                bottom += high
            high = page.total(step) / unit - bottom
            bar(left, high, 0.9 * wide, bottom, color=colour, label=label(kind))
    title = f"{asked['model']}, {asked['gpu'] or 'operators, unfused'}"
    if memory > ABOVE * top:
        # Drawn to its scale the bars would be flat.
        title += f"\nmemory: {page.format_bytes(memory)}, far above"
    elif memory:
        usable = page.usable(asked) / unit
        axes.axhline(memory / unit, color="#b00020", lw=1, label="memory")
        axes.axhline(usable, color="#b00020", lw=1, ls="--", label="less headroom")
    axes.set_xticks(range(len(sizes)), [f"{size.name}" for size in sizes])
    axes.set_xlim(-0.6, len(sizes) - 0.4)
    axes.set(title=title, xlabel=what, ylabel=name)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(file)
