"""Writes the tables of the README and of docs/, and the figures, from the stored results.

``--check`` only compares. Each table stands between ``<!-- report: NAME -->`` and ``<!-- report end -->`` and
is made from ``results/NAME.json`` by the function of that name. Figures stand beside their results, and are
drawn by the benchmark of that name.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional


REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = (REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md")))
RESULTS = REPOSITORY / "results"
BLOCK = re.compile(r"(<!-- report: (\w+) -->\n).*?(<!-- report end -->)", re.DOTALL)


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def quickstart(data: dict[str, Any]) -> str:
    rows = []
    for row in data["rows"]:
        choice, measured = row["choice"], row["measured"]
        used, over, solver_time = "-", "-", "-"
        if choice is not None:
            used = f"{choice['used']:.5f}"
            over = f"+{choice['used'] / row['budget'] - 1:.2%}"
            over = f"**{over}**" if choice["over"] else "no"
            solver_time = f"{choice['solver_seconds'] * 1e3:.1f}"
        rest = ["", "", ""]
        if measured is not None:
            rest = [
                f"{measured['saved_bytes'] / 1024:,.1f}",
                "yes" if measured["equals_eager"] else "**no**",
                f"{measured['partition_seconds']:.2f}",
            ]
        rows.append([str(row["budget"]), row["solver"], used, over, *rest, solver_time])
    heading = (
        "budget asked",
        "solver",
        "really used",
        "over",
        "saved KiB, measured",
        "loss and gradients as eager",
        "partition s",
        "solver ms",
    )
    machine = data["machine"]
    return markdown(heading, rows) + (
        f"\ntorch {data['torch']}, backend {data['backend']}, seed {data['seed']}, "
        f"{machine['processor']}, Python {machine['python']}. At budget 1.0 no solver is "
        "asked. The rows named upstream are the untouched wheel's solvers on the same "
        "instance.\n"
    )


def marks(data: dict[str, Any]) -> str:
    rows = [
        [
            row["what"],
            row["measured"],
            row["mark"],
            ("yes" if row["passed"] else "**no**") if row["mark"] else "",
        ]
        for row in data["rows"]
    ]
    facts = data["environment"]
    return markdown(("what", "measured", "mark", "reached"), rows) + (
        f"\ntorch {facts['torch']}, {facts['machine']}, Python {facts['python']}, one "
        f"thread, medians of {facts['repeats']} interleaved runs.\n"
    )


def curves(data: dict[str, Any]) -> str:
    names = {"small": "gated blocks", "bert": "BERT-large"}
    rows = []
    for row in data["rows"]:
        ours = row["torch"] == "patched"
        rows.append(
            [
                names[row["net"]],
                row["torch"],
                f"{row['nodes']:,}",
                str(row["items"]),
                str(row["min_cuts"]),
                str(row["solver_calls"]),
                f"{row['plan_and_plot_seconds']:.1f}",
                f"{data['marks'][row['net']]:g}" if ours else "",
                f"{row['report_seconds'] / row['partition_seconds']:.2%}"
                if ours
                else "",
            ]
        )
    heading = (
        "net",
        "torch",
        "nodes",
        "items",
        "min cuts",
        "solver calls",
        "CPU s",
        "mark",
        "recording",
    )
    return markdown(heading, rows) + (
        f"\ntorch {data['torch']}, {data['machine']}, Python {data['python']}, one "
        f"thread, budget {data['budget']}, solver of the release's default.\n"
    )


def measured_on(facts: dict[str, Any]) -> str:
    where = f"torch {facts['torch']}, Python {facts['python']}, {facts['system']}, "
    if facts["gpu"]:
        return where + f"measured on {facts['gpu']}.\n"
    return where + "one thread. Measured on a CPU; no GPU was at hand.\n"


def milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def by_size(rows: list[dict[str, Any]], title: str) -> str:
    """A line for each solver, a column for each number of items."""
    sizes = list(dict.fromkeys(row["n"] for row in rows))
    lines = []
    for solver in dict.fromkeys(row["solver"] for row in rows):
        mine = [row for row in rows if row["solver"] == solver]
        line = [solver]
        for row in mine:
            if "error" not in row:
                few = row["runs"] > row["calls"] and row["family"] == "grid"
                text = (
                    f"{milliseconds(row['median_s'])} / {row['grown_bytes'] / 1e6:,.0f}"
                )
                line.append(text + (f" ({row['calls']})" if few else ""))
            else:
                tried = not row["error"].startswith("not tried")
                line.append(row["error"] if tried else "-")
        done = [row for row in mine if "error" not in row]
        lines.append([*line, *kept(done)])
    heading = [title, *(f"{n:,}" for n in sizes), *KEPT]
    return markdown(heading, lines)


KEPT = ("answers over budget", "by up to", "loses up to")


def kept(rows: list[dict[str, Any]]) -> list[str]:
    """How the answers kept the budget, and how far below the optimum those are."""
    calls = sum(row["calls"] for row in rows)
    over = sum(row["over_budget"] for row in rows)
    worst = max((row["worst_overspend"] for row in rows), default=0.0)
    values = [row["worst_value"] for row in rows if row["worst_value"] is not None]
    return [
        f"**{over:,} of {calls:,}**" if over else f"0 of {calls:,}",
        share(worst) if over else "",
        share(1 - min(values)) if values else "-",
    ]


def share(part: float) -> str:
    """A share of something: in percent where that has digits to show."""
    if part < 1e-12:  # What a division may be off by.
        return "0"
    return f"{part:.2%}" if part >= 1e-4 else f"{part:.0e}"


def compare(data: dict[str, Any]) -> str:
    rows, facts = data["rows"], data["environment"]
    families = {
        family: [row for row in rows if row["family"] == family]
        for family in ("grid", "growth", "corpus")
    }
    lines = []
    for solver in dict.fromkeys(row["solver"] for row in rows):
        mine = [row for row in families["corpus"] if row["solver"] == solver]
        done = [row for row in mine if "error" not in row]
        errors = list(dict.fromkeys(row["error"] for row in mine if "error" in row))
        times = [row["median_s"] for row in done]
        lines.append(
            [
                solver,
                f"{len(done)} of {len(mine)}",
                milliseconds(min(times)) if times else "-",
                milliseconds(max(times)) if times else "-",
                f"{max(row['grown_bytes'] for row in done) / 1e6:,.0f}"
                if done
                else "-",
                *kept(done),
                "; ".join(errors),
            ]
        )
    nets = dict.fromkeys(row["instance"] for row in families["corpus"])
    heading = ("solver", "nets", "least ms", "most ms", "most MB", *KEPT, "errors")
    return (
        f"Grid of the pull request, {facts['grid_runs']:,} instances per size (in brackets: as many as "
        f"there was time for), median ms of a call / MB by which the process grew, by items:\n\n"
        + by_size(families["grid"], "solver")
        + "\nGrowth, sizes as in the partitioner, budget "
        f"{facts['growth_budget']:g}, the same:\n\n"
        + by_size(families["growth"], "solver")
        + f"\nCaptured nets ({', '.join(nets)}), budgets "
        f"{', '.join(f'{b:g}' for b in facts['corpus_budgets'])}, each asked {facts['repeats']} times, median ms of a net's calls:\n\n"
        + markdown(heading, lines)
        + f"\nCPU time. A process may take {facts['limit_s']:g} s and {facts['limit_gb']:g} GB. "
        "Loses: of the proven optimum, by answers within the budget. "
        f"OR-tools {facts['ortools']}, scipy {facts['scipy']}, " + measured_on(facts)
    )


def compiles(data: dict[str, Any]) -> str:
    lines = []
    for row in data["rows"]:
        if "error" in row:
            lines.append([row["model"], row["variant"], row["error"], *[""] * 9])
            continue
        used = row["used"] / row["budget"] if row["used"] is not None else None
        text = "-" if used is None else f"{used:.4f}"
        lines.append(
            [
                row["model"],
                row["variant"],
                f"{row['joint_nodes']:,}",
                f"{row['items']:,}",
                *(f"{row[key]:.2f}" for key in ("trace_s", "min_cut_s", "estimate_s")),
                f"{row['knapsack_s'] * 1e3:.1f}",
                f"{row['partition_rest_s']:.2f}",
                f"{row['total_s']:.1f}",
                f"{row['knapsack_s'] / row['total_s']:.3%}",
                f"**{text}**" if row["over"] else text,
            ]
        )
    heading = (
        "model",
        "",
        "joint nodes",
        "items",
        "trace s",
        "min cuts s",
        "estimate s",
        "knapsack ms",
        "rest s",
        "total s",
        "knapsack / total",
        "used / budget",
    )
    facts = data["environment"]
    return (
        markdown(heading, lines)
        + (
            f"\nBudget {data['rows'][0]['budget']:g}, fake tensors at real size, cold caches, CPU seconds. "
            "before: the untouched wheel and its solver (dp); after: with the set. "
            "used / budget: true bytes of what the knapsack saves; above 1 is over. "
        )
        + measured_on(facts)
    )


def techniques(data: dict[str, Any]) -> str:
    lines = []
    for row in data["rows"]:
        name = row["technique"]
        budget = "" if row["budget"] is None else f"{row['budget']:g}"
        reason = row.get("skipped") or row.get("error")
        if reason:
            lines.append([name, budget, reason, *[""] * 6])
            continue
        recomputed, error, saved = "-", "-", "-"
        if row["saved_bytes"] is not None:
            saved = f"{row['saved_bytes'] / 1e6:,.1f}"
        if "recomputed_flops" in row:
            recomputed = f"{row['recomputed_flops'] / row['forward_flops']:.0%}"
            error = f"{row['gradient_error']:.0e}"
        if "gradient_error_float64" in row:
            error = f"{row['gradient_error_float64']:.0e} in float64"
        lines.append(
            [
                name,
                budget,
                f"{row['peak_bytes'] / 1e6:,.1f}",
                saved,
                *(
                    f"{row[f'{kind}_bytes_at_peak'] / 1e6:,.1f}"
                    for kind in ("optimizer", "activation", "temporary")
                ),
                f"{row['step_over_eager']:.2f}",
                recomputed,
                error,
            ]
        )
    heading = (
        "technique",
        "budget",
        "peak MB",
        "saved MB",
        "optimizer at peak",
        "activations at peak",
        "temporaries at peak",
        "step / eager",
        "recomputed",
        "gradient error",
    )
    facts = data["environment"]
    return (
        markdown(heading, lines)
        + (
            f"\nModel {facts['model']}, backend {facts['backend']}, medians of {facts['repeats']} interleaved steps. Times on a CPU are CPU times. "
            "saved: what the forward leaves alive for the backward. recomputed: flops beyond eager mode's, as a share of "
            "the forward's. gradient error: relative to eager mode's. "
        )
        + measured_on(facts)
    )


def releases(data: dict[str, Any]) -> str:
    short = {
        "not for this release": "-",
        "landed upstream but still faulty": "faulty",
        "landed upstream": "landed",
    }
    rows = []
    for patch in next(iter(data.values())):
        cells = []
        for found in (patches[patch] for patches in data.values()):
            tested = " ✓" if (found["without"], found["with"]) == (False, True) else ""
            cells.append(short.get(found["state"], found["state"]) + tested)
        rows.append([patch, *cells])
    return markdown(["patch", *data], rows) + (
        "\napplies: the edits fit and the result compiles. ✓: the patch's own test was "
        "run there, fails without it and passes with it. faulty: upstream has it, with "
        "its fault. -: not for this release.\n"
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "quickstart": quickstart,
    "solvers": marks,
    "curves": curves,
    "frozen": marks,
    "peak": marks,
    "releases": releases,
    "compare": compare,
    "compile": compiles,
    "techniques": techniques,
}
# Their benchmarks have a function ``plot``.
FIGURES = ("compare", "compile", "peak", "techniques")


def load(name: str) -> Any:
    place = RESULTS / f"{name}.json"
    if not place.exists():
        raise SystemExit(
            f'{place} is missing; CONTRIBUTING.md, under "Store new results", has the '
            "command that makes it"
        )
    return json.loads(place.read_text())


def rendered(text: str) -> str:
    def fill(match: re.Match[str]) -> str:
        return match[1] + TABLES[match[2]](load(match[2])) + match[3]

    return BLOCK.sub(fill, text)


def stale_figures(folder: Path) -> list[str]:
    """Draw all figures into ``folder``; returns those that differ from the stored ones."""
    stale = []
    for name in FIGURES:
        data = load(name)
        benchmark = importlib.import_module(f"benchmark_{name}")
        rows = data.get("measured", data["rows"])
        benchmark.plot(rows, data["environment"], folder / f"{name}.json")
        # Pixels depend on libraries of the system; what they show is in the other file.
        stored = RESULTS / f"{name}.svg"
        drawn = (folder / stored.name).read_bytes()
        if not stored.exists() or drawn != stored.read_bytes():
            stale.append(name)
    return stale


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="report.sh", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    stale = {}
    for page in PAGES:
        before = page.read_text()
        after = rendered(before)
        if before != after:
            stale[page] = after
    with tempfile.TemporaryDirectory() as folder:
        figures = stale_figures(Path(folder))
        if not check:
            for page, text in stale.items():
                page.write_text(text)
            for name in figures:
                for kind in ("svg", "png"):
                    shutil.copy(Path(folder, f"{name}.{kind}"), RESULTS)
            return 0
    for page in stale:
        print(f"{page.name}: its tables are not those of results/")
    for name in figures:
        print(f"{name}.svg: is not what results/{name}.json gives")
    if stale or figures:
        print("run scripts/report.sh and commit the result")
    return int(bool(stale or figures))


if __name__ == "__main__":
    sys.exit(main())
