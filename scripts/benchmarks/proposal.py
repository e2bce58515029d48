"""The picture of docs/rfc.md, from what `peak` has measured, and its table."""

import json
from pathlib import Path
from typing import Any

from patchset.patch import REPOSITORY
from patchset.series import exported, FORMS, SERIES

from benchmarks.pages import good, markdown, Row


NET = "llama-8"
KINDS = {
    "upstream": "torch.compile, by the budget as it is",
    "graph": 'the same graph, by target "peak"',
}


def peaks(row: Row) -> list[tuple[float, float]]:
    """Each budget with the peak of its plan, in MB."""
    found = []
    for step in row["steps"]:
        budgets = step.get("budgets") or [step["budget"]]
        found += [(budget, step["peak"] / 1e6) for budget in budgets]
    return sorted(found)


def plot(data: dict[str, Any], place: Path) -> None:
    """Peaks by budget, of one net."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2))
    axes = figure.add_subplot()
    for (kind, label), style in zip(KINDS.items(), ("C1s-", "C0o-")):
        (row,) = good(data["measured"], net=NET, kind=kind)
        axes.plot(*zip(*peaks(row)), style, label=label, markersize=3, linewidth=1)
    axes.set_title("A smaller budget can need more memory", fontsize=10)
    axes.set_xlabel("activation_memory_budget", fontsize=8)
    axes.set_ylabel("peak of a training step, MB", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=8)
    figure.tight_layout()
    # Or the names of clip paths would be random.
    with matplotlib.rc_context({"svg.hashsalt": place.stem}):
        figure.savefig(place, metadata={"Date": None} if place.suffix == ".svg" else {})


def page(data: dict[str, Any]) -> str:
    """The pull requests, each with the model that it changes most."""
    ticks = json.loads((REPOSITORY / "results" / "releases.json").read_text())
    heading = (
        "pull request",
        "lines",
        "answers",
        "measured",
        "before",
        "after",
        "tested",
    )
    rows = []
    for patch in SERIES:
        name = exported(patch.name)
        form, found = FORMS[name], data.get(patch.name)
        if form.lines is None:
            # It is large, and comes with the small ones or after them.
            continue
        answers = dict.fromkeys(word for line in form.trailers for word in line.split())
        tested = [
            release
            for release, of in ticks.items()
            if name in of and of[name]["with"] and not of[name]["without"]
        ]
        what, lines, cells = "-", "-", ["-", "-"]
        if found is not None:
            # Times of compiles are noise.
            models = [
                each for each in found["models"].items() if "compile" not in each[0]
            ]
            model, both = max(models, key=lambda each: changed(*each[1]))
            what = f"{found['what']} ({model})"
            lines = str(found["lines"])
            cells = [f"{v:,.0f}" if v >= 1000 else f"{v:.3g}" for v in both]
        needs = f"; builds on {', '.join(form.needs)}" if form.needs else ""
        rows.append(
            [
                f"`{patch.name}`: {form.subject}{needs}",
                lines,
                " ".join(link(each) for each in answers if "#" in each),
                *(what, *cells),
                " ".join(tested[-2:]),
            ]
        )
    return markdown(heading, rows)


def changed(before: float, after: float) -> float:
    """By which share of the larger one they differ."""
    return abs(before - after) / (max(abs(before), abs(after)) or 1)


def link(item: str) -> str:
    """An issue or a pull request of PyTorch's, such as ``#160914``."""
    number = item.rpartition("#")[2]
    return f"[#{number}](https://github.com/pytorch/pytorch/issues/{number})"
