"""Which patch was tested on which release, from what `refresh.sh --all` stored."""

from typing import Any, Optional

from patchset.series import FORMS

from benchmarks.pages import markdown
from benchmarks.pages import page as page_of


SHORT = {
    "not for this release": "-",
    "landed upstream but still faulty": "faulty",
    "landed upstream": "landed",
}
TICKS = {True: " ✓", False: " ✗", None: ""}
LEGEND = """Applies: the edits fit and the result compiles. ✓: the patch's own tests were run on a CPU by
that release's torch, fail without it and pass with it; ✗: they fail with it. Faulty: upstream
has it, but with the bug. -: not for this release. (✓): they were run so before the patch or
what it needs was changed. The last line has the oldest of the tests.
"""


def tested(found: dict[str, Any]) -> Optional[bool]:
    """Whether its tests pass with it alone; None if they do not say."""
    outcome = (found["without"], found["with"])
    return {(False, True): True, (False, False): False}.get(outcome)


def tick(found: dict[str, Any]) -> str:
    text = TICKS[tested(found)]
    return f" ({text.strip()})" if text and found.get("changed") else text


def oldest(row: dict[str, Any]) -> str:
    return min({found["date"] for found in row.values()} - {None}, default="-")


def summary(data: dict[str, Any]) -> str:
    lines = []
    for release, row in data.items():
        found = [each for each in row.values() if SHORT.get(each["state"]) != "-"]
        now = [each for each in found if not each.get("changed")]
        passed, failed = (sum(tested(e) is x for e in now) for x in (True, False))
        cells = (len(found), passed, failed)
        lines.append([release, *map(str, cells), oldest(row)])
    heading = ("torch", "forms of patches for it", "tests pass", "fail", "oldest test")
    return markdown(heading, lines)


def page(data: dict[str, Any]) -> str:
    # Of one that is new, the releases that it was tried on.
    unknown = {"state": "not tried", "without": None, "with": None}
    lines = []
    for patch in (name for name in FORMS if any(name in row for row in data.values())):
        found = [row.get(patch, unknown) for row in data.values()]
        ticks = map(tick, found)
        states = (SHORT.get(each["state"], each["state"]) for each in found)
        lines.append([patch, *map("".join, zip(states, ticks))])
    lines.append(["tested", *map(oldest, data.values())])
    tables = {"All patches": markdown(["patch", *data], lines)}
    origin = "Run on a CPU by each release's own torch.\n"
    return page_of(LEGEND, origin, summary(data), (), tables)
