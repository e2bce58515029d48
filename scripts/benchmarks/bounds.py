"""What has to hold of plans (`plans`), and how they are shown: marks, tables, a figure.

A step has a ``peak`` and ``flops``; what was ``allowed`` and ``predicted`` where there is a
bound; and what it was asked for: a ``budget`` or a ``share``, or, of upstream's, several
``budgets``. A row's ``curve`` are more of its plans, which were not run.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

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


SETS = {"project": "Nets of the project", "second": "Second set of nets"}
THEIRS = (*ON_THE_WHEEL, *CHECKPOINTS)
OURS = ("graph", "blocks")
BOUND = (*OURS, "held", "bytes")
STEP_KINDS = ("blocks", "held")
# bf16 rounds to three digits.
ROUNDING = {"cuda": 0.05, "inductor": TOLERANCE}
SHOWN = (1.0, 0.5, 0.2, 0.1, 0.05, 0.0)
RISES = 1.0005
COSTS = {"flops": "flops", "seconds": "roofline time"}
MEAN_TIME = 0.92
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
    where = f" at {told_budgets(budgets)}" if budgets else ""
    return f"{row['net']}{where}, {row['kind']}"


def every(rows: Iterable[Row], *kinds: str) -> list[Plan]:
    """The plans of some kinds, each with its name."""
    mine = (row for row in rows if row["kind"] in kinds)
    return [(told(row, step), step) for row in mine for step in row["steps"]]


def parts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each set of nets and device, by what they are called."""
    found: dict[str, list[Row]] = {}
    for row in good(rows):
        if row["kind"] in (*THEIRS, *BOUND):
            device = "CPU" if row["device"] == "cpu" else row["device"]
            if device in GPUS:
                device = GPUS[device].name
            name = SETS[row.get("set", "project")]
            found.setdefault(f"{name}, {device}", []).append(row)
    return dict(sorted(found.items()))


# -------------------------------------------------------------------- marks


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    for name, part in parts(rows).items():
        named = "" if part[0]["device"] == OPERATORS else f"{name}: "
        for mark in judged_part(part):
            yield mark._replace(what=named + mark.what)


def judged_part(rows: Sequence[Row]) -> Iterator[Mark]:
    """Of one set of nets on one device; of operators no inequality is an estimate."""
    exact = rows[0]["device"] == OPERATORS
    bound = [
        (step["peak"] / step["allowed"] - 1, at, step.get("warned", False))
        for at, step in every(rows, *BOUND)
        # Other ways may have peaks that none of ours can be held to.
        if step.get("allowed") and step["allowed"] >= step.get("floor", 0)
    ]
    silent = [each[:2] for each in bound if not each[2]]
    yield from pages.at_most(
        "peak / allowed, without a warning",
        silent,
        *(0.005, "at most +0.5%"),
        f"{{:+.2%}} ({{}}), {len(silent)} of {len(bound)} plans",
        enforced=True,
    )
    if not exact:
        inside = sum(each[0] <= 0 for each in bound)
        for mark in pages.at_most(
            *("plans within the allowed", (each[:2] for each in bound), 0.0),
            *("92% of them", f"{inside} of {len(bound)}; {{:+.2%}} at most ({{}})"),
        ):
            yield mark._replace(passed=inside >= 11 / 12 * len(bound))
    # Of inductor's graphs plans are chosen by estimates: only a StepBudget predicts.
    is_simulated = not exact and rows[0]["device"] not in DEVICES
    apart = [
        (abs(step["predicted"] / step["peak"] - 1), at)
        for at, step in every(rows, *(STEP_KINDS if is_simulated else BOUND))
        if step.get("predicted")
    ]
    yield from pages.at_most(
        *("predicted / measured peak", apart, 0.005 if exact else 0.02),
        "0.5 %" if exact else "2 %",
        f"off by {{:.3%}} at most ({{}}), {len(apart)} plans",
        enforced=exact and not good(rows, kind="blocks"),
    )
    for kind in OURS:
        yield from pages.at_most(
            f"peak / at the next larger budget, {kind}",
            rising(good(rows, kind=kind)),
            *(RISES, "at most 1"),
            enforced=exact,
        )
    yield from judged_gradients(rows)
    for theirs in THEIRS:
        for ours in OURS:
            yield from judged_beside(rows, theirs, ours)


def judged_gradients(rows: Sequence[Row]) -> Iterator[Mark]:
    yield from pages.at_most(
        "gradients against those of budget 1",
        (
            (step["off_budget_1"], at)
            for at, step in every(rows, *BOUND)
            if "off_budget_1" in step
        ),
        *(0.0, "bit for bit", "off by {:.0e} at most", True),
    )
    others = every(rows, "upstream", *BOUND)
    found = [(s["gradients_off"], at) for at, s in others if "gradients_off" in s]
    limit = ROUNDING.get(rows[0]["device"], 0.0)
    shown = "", "{:.1e} ({})"
    yield from pages.at_most("gradients, by other kernels", found, limit, *shown)


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


def judged_beside(rows: Sequence[Row], theirs: str, ours: str) -> Iterator[Mark]:
    """Plans of ours beside all others of nets that have both."""
    exact = rows[0]["device"] == OPERATORS
    mine = {row["net"]: row["steps"] for row in good(rows, kind=ours) if row["steps"]}
    both = [row for row in good(rows, kind=theirs) if row["net"] in mine]
    named = f"{ours} / {theirs}"
    least = [
        (lowest(mine[row["net"]])["peak"] / lowest(row["steps"])["peak"], row["net"])
        for row in both
    ]
    yield from pages.at_most(
        *(f"lowest peak, {named}", least, RISES, "at most 1"),
        f"{{:.3f}} at most ({{}}), {len(both)} nets",
        enforced=exact and ours == "graph",
    )
    plans = [(row, step) for row in both for step in right(row["steps"])]
    for cost, what in COSTS.items():
        ratios = [
            (ratio, told(row, step))
            for row, step in plans
            if (ratio := cost_beside(rows, step, row["net"], ours, cost))
        ]
        mean = statistics.geometric_mean([ratio for ratio, _ in ratios] or [1])
        is_time = (theirs, cost) == ("upstream", "seconds")
        for mark in pages.at_most(
            *(f"{what} at no higher peak, {named}", ratios, RISES),
            "at most 1" + f", {MEAN_TIME} on average" * is_time,
            f"{mean:.3f} on average; {{:.3f}} at most ({{}}), "
            f"{len(ratios)} of {len(plans)} plans",
        ):
            fails = is_time and mean > MEAN_TIME
            yield mark._replace(passed=mark.passed and not fails)


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
        names["plans"] = lambda row: row["kind"]
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


def table(rows: Sequence[Row]) -> str:
    bases = base_of(rows)

    def cost(row: Row, step: Row) -> str:
        base = bases.get(row["net"], {})
        both = [e for e in ("flops", "seconds") if e in step and e in base]
        more = " / ".join(f"{step[e] / base[e] - 1:.1%}" for e in both)
        return f", {more}" if more else ""

    def cell(row: Row, step: Row) -> str:
        text = f"{step['peak'] / 1e6:,.{0 if step['peak'] >= 1e9 else 1}f}"
        if step["peak"] > (step.get("allowed") or step["peak"]):
            text += f" (**{step['peak'] / step['allowed'] - 1:+.1%}**)"
        return text + (" w" if step.get("warned") else "") + cost(row, step)

    def at_lowest(row: Row) -> str:
        least = lowest(row["steps"])
        if not asked(least):
            return cell(row, least)
        count = sum(len(asked(step)) for step in row["steps"])
        return f"{cell(row, least)} at {told_budgets(asked(least))} (of {count})"

    def ours(row: Row) -> str:
        if row["kind"] not in THEIRS:
            return ""
        kind = "blocks" if row["kind"] in IN_BLOCKS else "graph"
        peak = lowest(row["steps"])["peak"]
        low = no_higher(rows, row["net"], kind, peak)
        # Of a real run no flops are counted.
        cost = "flops" if all("flops" in plan for plan in low) else "seconds"
        return cell(row, min(low, key=lambda plan: plan[cost])) if low else "-"

    more: dict[str, Any] = {"lowest": at_lowest, "ours, no higher": ours}
    return by_budget(in_order(rows), cell, **more)


HOW = """By budget or share: peak MB, and flops beyond those of upstream's budget 1 / time
likewise, if it was measured: each kernel takes the GPU's time for its flops or for its
bytes, the longer. In bold how far a peak is over what is allowed, and w where a warning
says so. Plans: upstream, those of the untouched wheel; saved, each block by itself so;
graph, one graph's by target "peak", at budget 1 upstream's but for what the set changes in
inductor; blocks, a StepBudget's for blocks that are compiled by themselves; bytes, one
graph's by a limit in bytes: the peaks of upstream's plans that cost less than graph's at no
higher peak, as no budget between was asked for. lowest: at which budget, out of how many,
without plans that give wrong gradients. ours, no higher: the cheapest of graph and bytes,
or of blocks, at no higher peak than that.
"""


def how_found(rows: Sequence[Row]) -> str:
    devices = {row["device"] for row in rows}
    if OPERATORS in devices:
        return f"{pages.RUN}, operator by operator,"
    run = sorted(devices & {*DEVICES})
    if not run:
        return pages.SIMULATED
    if len(run) == len(devices):
        return pages.RUN
    return f"{pages.SIMULATED}, but run by {' and '.join(run)},"


def page(data: dict[str, Any]) -> str:
    rows = data["measured"]
    text, found = HOW, parts(rows)
    for name, part in found.items():
        text += f"\n### {name}\n\n" if len(found) > 1 else "\n"
        text += pages.marks_table(mark._asdict() for mark in judged_part(part))
        text += f"\n{table(part)}"
        none = [row["net"] for row in part if not row["steps"]]
        if none:
            text += f"\nWithout blocks that repeat: {', '.join(none)}.\n"
    return text + "\n" + pages.measured_on(data["environment"], how_found(rows))


def plot(data: dict[str, Any], result: Path) -> None:
    """Peak against recomputation, a panel for each net; written beside ``result``."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = in_order(good(data["measured"]))
    names = [*dict.fromkeys(row["net"] for row in rows)]
    bases, axes = base_of(rows), {}
    across = min(4, len(names))
    down = math.ceil(len(names) / across)
    figure = Figure(figsize=(2.9 * across, 2.6 * down + 0.8))
    for at, net in enumerate(names):
        axes[net] = figure.add_subplot(down, across, at + 1)
        axes[net].set_title(net, fontsize=9)
        axes[net].tick_params(labelsize=7)
    styles = dict(zip((*THEIRS, *OURS), ("C1s", "C1s", "C3v", "C4^", "C0o", "C0o")))
    for row in rows:
        kind, base = row["kind"], bases[row["net"]]["flops"]
        plans = [(s["flops"] / base, s["peak"] / 1e6) for s in row["steps"]]
        plans += [(flops / base, peak / 1e6) for peak, flops in row.get("curve", ())]
        drawn = *zip(*sorted(plans)), styles.get(kind, "C2x") + "-"
        axes[row["net"]].plot(*drawn, label=kind, markersize=3, linewidth=1)
    figure.axes[0].legend(fontsize=7)
    figure.supxlabel("flops / those of budget 1", fontsize=8, y=0.03)
    figure.supylabel("peak, MB", fontsize=8)
    origin = pages.measured_on(data["environment"], how_found(rows)).strip()
    figure.text(0.01, 0.005, origin, fontsize=7, alpha=0.7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    # Or the names of clip paths would be random.
    with matplotlib.rc_context({"svg.hashsalt": result.stem}):
        figure.savefig(result.with_suffix(".svg"), metadata={"Date": None})
