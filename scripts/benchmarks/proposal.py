"""The pull requests of docs/rfc.md: what each changes, and where it was tested."""

from typing import Any

from patchset.series import exported, FORMS, SERIES
from upkeep import forms
from upkeep.pull_request import tested_on

from benchmarks.pages import markdown
from benchmarks.pages import page as page_of


LEGEND = """Each pull request in its smallest form, on five models or more: what was measured without it
("before") and with it ("after"), on top of the pull requests that it needs. Times of compiles
are noise.
"""


def page(data: dict[str, Any]) -> str:
    tables = {name: forms.table(entry) for name, entry in data.items()}
    origin = "Each was run without the pull request and with it, by the torch that it names.\n"
    return page_of(LEGEND, origin, summary(data), (), tables)


def summary(data: dict[str, Any]) -> str:
    """Each with the model that it changes most."""
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
        what, lines, cells = "-", "-", ["-", "-"]
        if found is not None:
            # Times of compiles are noise.
            models = [
                each for each in found["models"].items() if "compile" not in each[0]
            ]
            model, both = max(models, key=lambda each: changed(*each[1]))
            what = f"{found['what']} ({model})"
            lines = str(found["lines"])
            cells = [*map(forms.number, both)]
        needs = f"; builds on {', '.join(form.needs)}" if form.needs else ""
        rows.append(
            [
                f"`{patch.name}`: {form.subject}{needs}",
                lines,
                " ".join(link(each) for each in answers if "#" in each),
                *(what, *cells),
                " ".join(tested_on(form)[-2:]),
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
