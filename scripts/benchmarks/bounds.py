"""What has to hold of plans (`plans`), and how they are shown: marks, tables, a figure.

A step has a ``peak`` and ``flops``; what was ``allowed`` and ``predicted`` where there is a
bound; and what it was asked for: a ``budget`` or a ``share``, or, of upstream's, several
``budgets``. A row's ``curve`` are more of its plans, which were not run.
"""

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Optional

from benchmarks import pages
from benchmarks.meters import TOLERANCE
from benchmarks.pages import good, Mark, Row
from benchmarks.plans import (
    CHECKPOINTS,
    DEVICES,
    IN_BLOCKS,
    lowest,
    ON_THE_WHEEL,
    right,
    told_budgets,
)
from benchmarks.plans import RUN as OPERATORS
from benchmarks.replay import GPUS


THEIRS = (*ON_THE_WHEEL, "eager", *CHECKPOINTS)
OURS = ("graph", "blocks")
BOUND = (*OURS, "held", "bytes")
STEP_KINDS = ("blocks", "held")
# bf16 rounds to three digits.
ROUNDING = {"cuda": 0.05, "inductor": TOLERANCE}
SHOWN = (1.0, 0.5, 0.2, 0.1, 0.05, 0.0)
RISES = 1.0005
# What else a plan may cost.
DEARER = 1.01
COSTS = {"flops": "compute", "seconds": "time"}
# As a reader knows the kinds.
NAMES = {
    "upstream": "stock",
    "saved": "stock, per block",
    "eager": "eager mode",
    "checkpoint": "checkpoint per block",
    "selective checkpoint": "selective checkpoint",
    "graph": 'target "peak"',
    "blocks": "StepBudget",
    "bytes": "bytes asked",
    "held": "StepBudget, bytes asked",
}
# The kind that is held to bytes.
BY_BYTES = {"graph": "bytes", "blocks": "held"}
Plan = tuple[str, Row]  # its name, and the step


def asked(step: Row) -> list[float]:
    found = step.get("budgets") or [step.get("budget", step.get("share"))]
    return [budget for budget in found if budget is not None]


def told(row: Row, step: Row) -> str:
    budgets = asked(step)
    if "peak_bytes" in step:
        return f"{row['net']} held to {pages.megabytes(step['peak_bytes'])} MB"
    where = f" at budget {told_budgets(budgets)}" if budgets else ""
    return f"{row['net']}{where}, {NAMES[row['kind']]}"


def every(rows: Iterable[Row], *kinds: str) -> list[Plan]:
    """The plans of some kinds, each with its name."""
    mine = (row for row in rows if row["kind"] in kinds)
    return [(told(row, step), step) for row in mine for step in row["steps"]]


def view(device: str) -> tuple[str, str]:
    """A device as a heading has it, and how its figures were found."""
    if device in GPUS or device == "cpu":
        name = f"an {GPUS[device].name}" if device in GPUS else "a CPU"
        dtype = "bfloat16" if device in GPUS else "float32"
        schedule = f"by inductor's schedule for {name}"
        return schedule, f"{pages.SIMULATED}, {dtype}, {schedule},"
    return {
        OPERATORS: ("operator by operator", "Run operator by operator, float32,"),
        "inductor": ("run by inductor", "Run by inductor's kernels, float32,"),
        "cuda": ("run by inductor", "Run by inductor's kernels, bfloat16,"),
    }[device]


def parts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each set of nets and device, by what they are called."""
    found: dict[str, list[Row]] = {}
    mine = [row for row in rows if row["kind"] in (*THEIRS, *BOUND)]
    for name, of_set in pages.by_set(mine).items():
        for row in of_set:
            found.setdefault(f"{name}, {view(row['device'])[0]}", []).append(row)
    return found


# -------------------------------------------------------------------- marks


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    for part in parts(rows).values():
        yield from judged_part(part)


def judged_part(rows: Sequence[Row]) -> Iterator[Mark]:
    """Of one set of nets on one device; of operators no inequality is an estimate."""
    exact = rows[0]["device"] == OPERATORS
    # Other ways may have peaks that none of ours can be held to: then a warning says what
    # the lowest plan holds.
    yield from judged_bounds(
        (at, step)
        for at, step in every(rows, *BOUND)
        if not (
            step.get("warned") and step.get("predicted", 0) > step.get("allowed", 0)
        )
    )
    # Of inductor's graphs plans are chosen by estimates: only a StepBudget predicts.
    is_simulated = not exact and rows[0]["device"] not in DEVICES
    apart = [
        (abs(step["predicted"] / step["peak"] - 1), at)
        for at, step in every(rows, *(STEP_KINDS if is_simulated else BOUND))
        if step.get("predicted")
    ]
    yield from pages.at_most(
        *("predicted peak, beside the measured one", apart, 0.005 if exact else 0.02),
        "0.5 %" if exact else "2 %",
        f"off by {{:.3%}} at most ({{}}), {len(apart)} plans",
        enforced=exact and not good(rows, kind="blocks"),
        limit="The predicted peak is off by up to {0:.1%} ({1}).",
    )
    for kind in OURS:
        yield from pages.at_most(
            f"peak / at the next larger budget, {NAMES[kind]}",
            rising(good(rows, kind=kind)),
            *(RISES, "at most 1"),
            enforced=exact,
            limit="A smaller budget can peak higher, by up to {2:.1%} ({1}).",
        )
    yield from judged_lowered(rows)
    yield from judged_gradients(rows)
    for theirs in THEIRS:
        for ours in OURS:
            yield from judged_beside(rows, theirs, ours)


def judged_bounds(plans: Iterable[Plan]) -> Iterator[Mark]:
    """Those over what was asked, where something was: in silence none may be."""
    bound = [
        (step["peak"] / step["allowed"] - 1, at, step.get("warned", False))
        for at, step in plans
        if step.get("allowed")
    ]
    silent = [each[:2] for each in bound if not each[2]]
    yield from pages.at_most(
        "peak, above what was asked for, without a warning",
        silent,
        *(0.005, "at most +0.5%"),
        f"{{:+.2%}} ({{}}), {len(silent)} of {len(bound)} plans",
        enforced=True,
        limit="No warning says that the peak is {0:.1%} above what was asked ({1}).",
    )
    over = sorted((each for each in bound if each[0] >= 0.0005), reverse=True)
    if over:
        found = []
        for says, is_told in (("and a warning says so", True), ("in silence", False)):
            of = [f"{at} by {more:.1%}" for more, at, told in over if told is is_told]
            if of:
                found.append(f"Over what was asked, {says}: {', '.join(of)}.")
        limit = " ".join(found)
        what = "plans over what was asked"
        yield Mark(what, f"{len(over)} of {len(bound)}", "none", False, False, limit)


def judged_lowered(rows: Sequence[Row]) -> Iterator[Mark]:
    yield from pages.at_most(
        "plans that a graph is lowered by",
        (
            (step["lowered"], at)
            for at, step in every(rows, "graph")
            # At budget 1 there is nothing to choose.
            if step.get("lowered") and step["budget"] < 1
        ),
        *(3, "at most 3", "{mean:.2f} on average, {0:g} at most ({1}); {count} in all"),
        limit="A graph can be lowered by {0:g} plans before one is kept ({1}).",
    )


def judged_gradients(rows: Sequence[Row]) -> Iterator[Mark]:
    yield from pages.at_most(
        "gradients against those of budget 1",
        (
            (step["off_budget_1"], at)
            for at, step in every(rows, *BOUND)
            if "off_budget_1" in step
        ),
        *(0.0, "bit for bit", "off by {:.0e} at most", True),
        limit="Gradients are off by {0:.0e} from those of budget 1 ({1}).",
    )
    others = every(rows, "upstream", *BOUND)
    found = [(s["gradients_off"], at) for at, s in others if "gradients_off" in s]
    yield from pages.at_most(
        *("gradients, by other kernels", found),
        most=ROUNDING.get(rows[0]["device"], 0.0),
        show="{:.1e} ({})",
        limit="By other kernels gradients are off by {0:.1e} ({1}).",
    )


def rising(rows: Iterable[Row]) -> Iterator[pages.Named]:
    """Each peak against that of the next larger budget."""
    for row in rows:
        steps = sorted(row["steps"], key=lambda step: -max(asked(step)))
        for high, low in zip(steps, steps[1:]):
            yield low["peak"] / high["peak"], told(row, low)


def no_higher(rows: Iterable[Row], net: str, kind: str, peak: float) -> list[Row]:
    """Ours of a net with at most that peak, also those that were held to one."""
    kinds = kind, BY_BYTES.get(kind, kind)
    mine = [row for row in rows if row["net"] == net and row["kind"] in kinds]
    plans = [step for row in mine for step in row["steps"]]
    plans += [
        dict(zip(("peak", "flops"), at)) for row in mine for at in row.get("curve", ())
    ]
    return [plan for plan in plans if plan["peak"] <= peak * RISES]


def cost_beside(
    rows: Sequence[Row], step: Row, net: str, ours: str, cost: str
) -> float:
    """The least of ours at no higher peak than a step's / that; 0 if there is none."""
    low = no_higher(rows, net, ours, step["peak"])
    costs = [plan[cost] for plan in low if cost in plan]
    return min(costs) / step[cost] if costs and cost in step else 0


def cheaper(rows: Iterable[Row], **where: str) -> list[Row]:
    """Upstream's plans that cost less than ours at no higher peak: their peaks."""
    both = [row for row in good(rows, **where) if row["kind"] in ("upstream", "graph")]
    return [
        {"budgets": asked(step), "peak": step["peak"]}
        for row in good(both, kind="upstream")
        for step in right(row["steps"])
        if any(
            cost_beside(both, step, row["net"], "graph", cost) > RISES for cost in COSTS
        )
    ]


def lowest_peaks(rows: Sequence[Row], theirs: str, ours: str) -> list[pages.Named]:
    """Of nets that have both, the lowest of ours beside the lowest of theirs."""
    both = (
        (row["net"], lowest(row["steps"])["peak"], lowest(other["steps"])["peak"])
        for row in good(rows, kind=ours)
        for other in good(rows, kind=theirs, net=row["net"])
        if row["steps"] and other["steps"]
    )
    return [(mine / other, net) for net, mine, other in both]


def costs_beside(
    rows: Sequence[Row], theirs: str, ours: str, cost: str
) -> list[pages.Named]:
    """The least that ours cost at no higher peak than each plan of theirs."""
    return [
        (ratio, told(row, step))
        for row in good(rows, kind=theirs)
        for step in right(row["steps"])
        if (ratio := cost_beside(rows, step, row["net"], ours, cost))
    ]


def judged_beside(rows: Sequence[Row], theirs: str, ours: str) -> Iterator[Mark]:
    """Plans of ours beside all others of nets that have both."""
    exact = rows[0]["device"] == OPERATORS
    named = f"{NAMES[ours]} / {NAMES[theirs]}"
    least = lowest_peaks(rows, theirs, ours)
    yield from pages.at_most(
        *(f"lowest peak, {named}", least, RISES),
        enforced=exact and (theirs, ours) == ("upstream", "graph"),
        limit=f"{NAMES[theirs].capitalize()} goes lower than this set's {NAMES[ours]}, "
        "whose lowest peak is {2:.1%} higher ({1}).",
    )
    for cost, what in COSTS.items():
        ratios = costs_beside(rows, theirs, ours, cost)
        yield from pages.at_most(
            *(f"{what} at no higher peak, {named}", ratios, DEARER),
            limit=f"At no higher peak, this set's {NAMES[ours]} takes up to {{2:.1%}} "
            f"more {what} than {NAMES[theirs]} ({{1}}).",
        )


# ------------------------------------------------------------------- report


Cell = Callable[[Row, Row], str]


def by_budget(
    rows: Sequence[Row], cell: Cell, budgets: Sequence[float] = SHOWN, **more: Any
) -> str:
    """A line for each row; ``cell`` is of a row and one of its steps."""

    def at(row: Row, budget: float) -> str:
        texts = [cell(row, step) for step in row["steps"] if budget in asked(step)]
        return "".join(texts[:1]) or "-"

    has = {budget for row in rows for step in row["steps"] for budget in asked(step)}
    names: dict[str, Any] = {"net": lambda row: row["net"]}
    if any("kind" in row for row in rows):
        names["plans"] = lambda row: NAMES[row["kind"]]
    cells = {f"{b:g}": functools.partial(at, budget=b) for b in budgets if b in has}
    return pages.columns(rows, {**names, **cells, **more})


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Those to show, by net, and then by kind."""
    order = list(dict.fromkeys(row["net"] for row in rows))
    kinds = (*THEIRS, *OURS, "bytes")
    return sorted(
        (row for row in rows if row["kind"] in kinds and row["steps"]),
        key=lambda row: (order.index(row["net"]), kinds.index(row["kind"])),
    )


def base_of(rows: Sequence[Row]) -> dict[str, Row]:
    """For each net the plan of budget 1, upstream's if it was measured."""
    found: dict[str, Row] = {}
    for row in reversed(in_order(rows)):
        found.update((row["net"], s) for s in row["steps"] if 1.0 in asked(s))
    return found


def more_than(base: Row, step: Row) -> str:
    """What a step costs beyond another."""
    both = [cost for cost in COSTS if cost in step and cost in base]
    more = " / ".join(f"{step[cost] / base[cost] - 1:.1%}" for cost in both)
    return f", {more}" if more else ""


def table(rows: Sequence[Row]) -> str:
    bases = base_of(rows)

    def cell(row: Row, step: Row) -> str:
        text = f"{step['peak'] / 1e6:,.{0 if step['peak'] >= 1e9 else 1}f}"
        if step["peak"] > (step.get("allowed") or step["peak"]):
            text += f" (**{step['peak'] / step['allowed'] - 1:+.1%}**)"
        warned = " w" if step.get("warned") else ""
        return text + warned + more_than(bases.get(row["net"], {}), step)

    def at_lowest(row: Row) -> str:
        least = lowest(row["steps"])
        if not asked(least):
            return cell(row, least)
        count = sum(len(asked(step)) for step in row["steps"])
        return f"{cell(row, least)} at {told_budgets(asked(least))} (of {count})"

    def ours(row: Row) -> str:
        if row["kind"] not in THEIRS:
            return ""
        kinds = OURS[::-1] if row["kind"] in IN_BLOCKS else OURS[:1]
        peak = lowest(row["steps"])["peak"]
        found = (no_higher(rows, row["net"], kind, peak) for kind in kinds)
        low = next(filter(None, found), [])
        # Of a real run no flops are counted, and not always the time.
        costs = (cost for cost in COSTS if all(cost in plan for plan in low))
        cost = next(costs, "peak")
        return cell(row, min(low, key=lambda plan: plan[cost])) if low else "-"

    more: dict[str, Any] = {"lowest": at_lowest, "this set, no higher": ours}
    return by_budget(in_order(rows), cell, **more)


HOW = """A cell has the peak of a training step in MB, then how much more compute it takes than
stock's plan at budget 1 and, after a slash where it is known, how much more time. Where no
kernel ran, that is the GPU's roofline: each kernel takes the time of its flops or of its
bytes, the longer. Peaks are beyond parameters, inputs and what else is there when the step
starts. In bold: how far a peak is above what was asked for; w: a warning says so.

Columns are budgets, or a StepBudget's shares. "lowest" has the lowest peak, at which budget
it was found and of how many, without plans that give wrong gradients. "this set, no higher"
has the cheapest plan of this set at no higher peak than that.

Stock is torch.compile of the untouched wheel, as one graph or with a budget for each block;
eager mode compiles nothing. This set's are: one graph by the target "peak"; a StepBudget,
each block compiled by itself; and one graph by a number of bytes, those of stock's plans for
which no budget between was tried. In what was found, "a / b" divides the one by the other,
and "at no higher peak" compares with each plan of b the cheapest of a.
"""
# On a guide, examples included.
MOST_ROWS = 10
# What is compared on guides, in the order of what matters.
COMPARED = (("upstream", "graph"), ("saved", "blocks"), ("checkpoint", "blocks"))


def page(data: Row) -> str:
    lines, tables = list[list[str]](), dict[str, str]()
    shown: Optional[tuple[list[Row], list[str], str, str]] = None
    origins = dict[str, None]()
    for name, part in parts(data["measured"]).items():
        marks = [*judged_part(part)]
        limits = "".join(f"- {limit}\n" for limit in pages.limits(marks))
        limits = f"\n{pages.LIMITS}:\n\n{limits}" if limits else ""
        none = [row["net"] for row in part if not row["steps"]]
        without = f"\nWithout blocks that repeat: {', '.join(none)}.\n" if none else ""
        _, how = view(part[0]["device"])
        origins[pages.measured_on(data["environment"], how, part)] = None
        tables[name] = f"{pages.found(marks)}{limits}\n{table(part)}{without}"
        for theirs, ours in COMPARED:
            ratios = sorted(lowest_peaks(part, theirs, ours))
            if ratios:
                lines.append([name, *compared(part, ratios, theirs, ours)])
                places = (0, len(ratios) // 2, -1)
                nets = [*dict.fromkeys(ratios[at][1] for at in places)]
                shown = shown or (part, nets, theirs, ours)
    heading = ("nets", "what", "lowest peak, mean", "worst", "compute / time, mean")
    short = "Nothing to compare was measured.\n"
    if shown is not None:
        part, nets, *kinds = shown
        examples = examples_of(part, nets[: MOST_ROWS - len(lines)], *kinds)
        short = f"{pages.markdown(heading, lines)}\n{examples}\n{IN_SHORT}"
    broken = pages.limits((), data["measured"])
    return pages.page(HOW, "".join(origins), short, broken, tables)


IN_SHORT = """Means are geometric; their compute and time are those at no higher peak. Peaks are beyond
parameters and inputs; after them, how much more compute, and time where it is known, a step
takes than stock's at budget 1.
"""


def compared(
    rows: Sequence[Row], ratios: Sequence[pages.Named], theirs: str, ours: str
) -> Iterator[str]:
    """What there is to say of two kinds in a line; ``ratios`` are of their lowest peaks."""
    costs = [costs_beside(rows, theirs, ours, cost) for cost in COSTS]
    peaks, *more = (
        f"{statistics.geometric_mean([ratio for ratio, _ in each]):.2f}"
        for each in (ratios, *costs)
        if each
    )
    yield f"{NAMES[ours]} / {NAMES[theirs]}, {len(ratios)} nets"
    yield from (peaks, "{:.2f} ({})".format(*ratios[-1]), " / ".join(more))


def examples_of(rows: Sequence[Row], nets: Iterable[str], *kinds: str) -> str:
    """The peaks of some nets, with what they cost beyond stock's budget 1."""
    bases = base_of(rows)

    def cell(net: str, kind: str) -> str:
        (row,) = good(rows, net=net, kind=kind)
        step = lowest(row["steps"])
        return f"{pages.megabytes(step['peak'])} MB{more_than(bases[net], step)}"

    cells: dict[str, Any] = {"for example": str}
    cells["stock at budget 1"] = lambda net: f"{pages.megabytes(bases[net]['peak'])} MB"
    for kind in kinds:
        cells[f"{NAMES[kind]}, lowest"] = functools.partial(cell, kind=kind)
    return pages.columns(nets, cells)
