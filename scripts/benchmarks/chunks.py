"""Large heads in as many chunks as a bound needs, beside inductor's own chunker.

    TORCH_VERSION=2.15.0 scripts/benchmark.sh chunks
    TORCH_VERSION=2.15.0 scripts/benchmark.sh chunks --net towers --kind number graph
    scripts/benchmark.sh chunks --kind kernels                      real kernels on a CPU

Nets of one or two layers with large vocabularies, and two towers whose pairs are scored
with each other; bfloat16, the project's with 8,192 tokens or 16,384 pairs. By inductor's schedule for an H100
no kernel runs: peaks are bytes beyond parameters and inputs, gradients included, and time
is that of the GPU's roofline.

    upstream    the untouched wheel, by budgets from 0 to 1
    wheel       the untouched wheel with config.auto_chunker on, its threshold at 1, by
                numbers of chunks
    number      the same with its chunker as the patch `auto-chunker` mends it, since it
                takes few of these nets without; nothing else is asked
    graph       target "peak"
    bytes       a number of bytes: the peak of each ``number``
    alone       for the bound in the middle of those, each number of chunks alone
    kernels     small nets run: how far gradients are off those in double precision,
                beside those of budget 1, and what compiles tell beside what torch's
                allocator counts
    compiles    what it takes to compile these in single precision, for the lowest peak and
                for that of as many chunks by inductor's own chunker, and by that, in turn
    headless    nets without a large head, without a choice of chunks and with it, in turn
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as config
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor.utils import fresh_cache

from benchmarks import bounds, catalogue, cost, fresh, held_out, nets, pages, plans
from benchmarks.catalogue import HELD_OUT, names, PROJECT, set_of
from benchmarks.meters import compile_seconds, gradients
from benchmarks.pages import good, Mark, megabytes, Row
from benchmarks.tracing import overlay
from benchmarks.ways import budgeted


DEVICE = "h100"
AT_SIZE = {
    PROJECT: names(nets.LARGE_HEADS),
    HELD_OUT: ("seed-oss", "deberta", "m2m100", *names(held_out.HEADS)),
}
# These run on a CPU.
RUN = {
    PROJECT: names(nets.SMALL_HEADS),
    HELD_OUT: names(held_out.SMALL_HEADS),
}
SMALL = (*RUN[PROJECT], *RUN[HELD_OUT])
HEADLESS = {PROJECT: ("vit-l-2", "unet-256"), HELD_OUT: ("mobilenet", "w2v-bert")}
NETS = {of: (*AT_SIZE[of], *RUN[of], *HEADLESS[of]) for of in AT_SIZE}
NETS["check"] = SMALL[:1]
ALONE = (*AT_SIZE[PROJECT], "deberta")
NUMBERS = (2, 8, 32)
BUDGETS = (1.0, 0.2, 0.0)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# At which budget nets without a large head are planned, and how often.
HELD_AT, TURNS = 0.2, 3
# Gradients that are farther off than bfloat16 makes them are random.
RANDOM = 0.5
# How much farther gradients may be off in chunks: what rounding does varies.
ROUNDING = 2.0
KINDS = {
    "upstream": plans.SWEEP[::2],
    "wheel": NUMBERS,
    "number": NUMBERS,
    "graph": BUDGETS,
    "bytes": (),
    "alone": (1, 2, 4, 8, 16, 32, 64),
}


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    for net in asked.nets:
        ran = {"set": set_of(net), "net": net, "device": "inductor", "torch": "patched"}
        for dtype in DTYPES if net in SMALL else ():
            yield {**ran, "kind": "kernels", "part": dtype}
        for row in good(rows, net=net, kind="kernels", part="float32"):
            chunks = row["steps"][0]["chunks"]
            if chunks > 1:
                yield {**ran, "kind": "compiles", "part": "float32", "_chunks": chunks}
        # Of a GPU there are schedules only where torch has what it needs for them.
        if net in SMALL or torch.version.cuda is None:
            continue
        if net in HEADLESS[set_of(net)]:
            task = {"net": net, "kind": "headless", "device": DEVICE}
            yield {"set": set_of(net), **task, "torch": "patched"}
            continue
        for kind, numbers in KINDS.items():
            task = {"net": net, "kind": kind, "device": DEVICE, "budgets": numbers}
            task["torch"] = (
                fresh.UNTOUCHED if kind in ("upstream", "wheel") else "patched"
            )
            if kind in ("bytes", "alone"):
                peaks = sorted({step["peak"] for step in steps_of(rows, net, "number")})
                if not peaks or (kind == "alone" and net not in ALONE):
                    continue
                middle = peaks[len(peaks) // 2 : len(peaks) // 2 + 1]
                task["_peaks"] = peaks if kind == "bytes" else middle
            yield {"set": set_of(net), **task}


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    kind, net = task["kind"], catalogue.find(task["net"])
    if kind in ("kernels", "compiles"):
        net = replace(net, dtype=DTYPES[task["part"]])
        ran = plans.Plans(net, "inductor", "inductor", False)
        if kind == "compiles":
            return {"steps": [*compiled_in_turn(ran, task["_chunks"])]}
        ran.first = exact_gradients(net)
        in_chunks, whole = (with_chunks(ran.by_peak(budget)) for budget in (0.0, 1.0))
        if whole["gradients_off"] > RANDOM:
            raise ValueError(f"no two steps of {net.name} have the same gradients")
        return {"steps": [in_chunks, whole]}
    with plans.backend_of(DEVICE) as backend:
        made = plans.Plans(net, DEVICE, backend, True)
        if kind == "upstream":
            return {"steps": made.upstreams(task["budgets"], False)}
        if kind in ("wheel", "number"):
            return {"steps": [by_number(made, n) for n in task["budgets"]]}
        if kind == "graph":
            return {"steps": [with_chunks(made.by_peak(b)) for b in task["budgets"]]}
        if kind == "bytes":
            return {"steps": [with_chunks(made.within(b)) for b in task["_peaks"]]}
        if kind == "headless":
            return {"steps": [*with_and_without(made)]}
        return {"steps": [alone(made, n, *task["_peaks"]) for n in task["budgets"]]}


def by_number(made: plans.Plans, number: int) -> Row:
    """A plan of the chunker, whatever this torch's takes."""
    from torch._inductor import metrics

    metrics.reset()
    with chunker_at(number):
        row = made.measured(made.graph())
    return {"number": number, **row, "taken": metrics.num_auto_chunking > 0}


def chunker_at(number: int) -> Any:
    options = {"enable": True, "num_chunk": number, "amplify_ratio_threshold": 1}
    return inductor_config.patch({f"auto_chunker.{k}": v for k, v in options.items()})


def with_chunks(row: Row) -> Row:
    head = overlay("memory_planner").last_plan().head
    return {**row, "chunks": head.chunks if head is not None else 1}


def compiled_in_turn(made: plans.Plans, number: int) -> Iterator[Row]:
    """By plans for two peaks, and by the chunker alone, each with a cache of its own."""
    cost.compile_something()
    with chunker_at(number), fresh_cache():
        theirs = made.measured(made.graph())["peak"]
    ways: dict[str, Callable[[], Any]] = {
        LOWEST: lambda: budgeted(0.0, "peak"),
        AS_LOW: lambda: config.patch(activation_memory_peak_bytes=theirs),
        NAMES["number"]: lambda: chunker_at(number),
    }
    for way, asked in TURNS * [*ways.items()]:
        with fresh_cache(), asked():
            seconds = compile_seconds(lambda: made.graph().warmed(1))
        yield {"way": way, "compile_s": seconds}


def exact_gradients(net: nets.Net) -> list[Tensor]:
    """Those of the same parameters in double precision."""
    module, inputs = net.make()
    module.double()
    given = [each.double() if each.is_floating_point() else each for each in inputs]
    module(*given).backward()
    return [each.float() for each in gradients(list(module.parameters()))]


def alone(made: plans.Plans, number: int, nbytes: int) -> Row:
    """A plan within some bytes where heads may run in so many chunks alone."""
    with only((number,) if number > 1 else ()):
        row = with_chunks(made.within(nbytes))
    return {**row, "number": number}


def only(numbers: tuple[int, ...]) -> Any:
    """Where these are the numbers of chunks to choose from."""
    chunks = overlay("memory_planner.compile.head_chunks")
    return mock.patch.object(chunks, "_NUMBERS", numbers)


def with_and_without(made: plans.Plans) -> Iterator[Row]:
    """One plan by turns, with a choice of chunks and without; the first warms up."""
    made.by_peak(HELD_AT)
    for chooses in TURNS * (False, True):
        with nullcontext() if chooses else only(()):
            yield {"chooses": chooses, **with_chunks(made.by_peak(HELD_AT))}


# -------------------------------------------------------------------- marks


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    yield from bounds.judged_bounds(
        (f"{row['net']}, {row['kind']}", step)
        for row in good(rows)
        if row["kind"] != "alone"
        for step in row["steps"]
    )
    for of, part in pages.by_set(rows).items():
        for judge in (of_peaks, of_times, of_numbers, of_headless, of_runs):
            for mark in judge(part):
                yield mark._replace(what=f"{of}: {mark.what}")


def steps_of(rows: Sequence[Row], net: str, *kinds: str) -> list[Row]:
    found = (row["steps"] for row in good(rows, net=net) if row["kind"] in kinds)
    return [step for steps in found for step in steps]


def nets_of(rows: Sequence[Row]) -> list[str]:
    large = {net for nets_of_set in AT_SIZE.values() for net in nets_of_set}
    return list(dict.fromkeys(row["net"] for row in rows if row["net"] in large))


def of_peaks(rows: Sequence[Row]) -> Iterator[Mark]:
    """The lowest peaks, beside upstream's without chunks and with them."""
    for theirs, name in NAMES.items():
        yield from pages.at_most(
            f"lowest peak / that of {name}",
            *(bounds.lowest_peaks(rows, theirs, "graph"), 1.0),
            limit=f"The lowest peak is {{2:.1%}} above that of {name} ({{1}}).",
        )


def of_times(rows: Sequence[Row]) -> Iterator[Mark]:
    """Roofline times at no higher peak than each number of chunks has."""
    found = []
    for net in nets_of(rows):
        ours = steps_of(rows, net, "graph", "bytes")
        for step in steps_of(rows, net, "number"):
            times = [o["seconds"] for o in ours if o["peak"] <= step["peak"]]
            if times:
                name = f"{net}, {step['number']} chunks"
                found.append((min(times) / step["seconds"], name))
    yield from pages.at_most(
        *(f"roofline time at no higher peak / that of {NAMES['number']}", found, 1.0),
        limit=f"At no higher peak, a step takes up to {{2:.1%}} more roofline time than by "
        f"{NAMES['number']} ({{1}}).",
    )


def of_numbers(rows: Sequence[Row]) -> Iterator[Mark]:
    """Whether the chosen number is the one that costs least, alone, of those that fit."""
    for row in good(rows, kind="alone"):
        fitting = [s for s in row["steps"] if s["peak"] <= s["allowed"]]
        (limit,) = {step["allowed"] for step in row["steps"]}
        chosen = [
            s for s in steps_of(rows, row["net"], "bytes") if s["allowed"] == limit
        ]
        if not fitting or not chosen:
            continue
        fewest = min(step["chunks"] for step in fitting)
        fastest = min(fitting, key=lambda step: (step["seconds"], step["chunks"]))
        ours, best = chosen[0]["chunks"], fastest["chunks"]
        yield Mark(
            f"chunks of {row['net']} within {megabytes(limit)} MB",
            f"{ours}; {fewest} is the fewest that fit, {best} the fastest",
            f"at most {best}",
            ours <= best,
            limit=f"{row['net']} runs in {ours} chunks where {best} are as low and faster.",
        )


def of_headless(rows: Sequence[Row]) -> Iterator[Mark]:
    """What it costs, where there is nothing to run in chunks, that there might be."""
    headless = good(rows, kind="headless")
    found, changed = [], []
    for row in headless:
        found.append((ratio_of_compiles(row, "chooses", True, False), row["net"]))
        if len({(step["peak"], step["seconds"]) for step in row["steps"]}) > 1:
            changed.append(row["net"])
    if headless:
        shown = f"{len(changed)} of {len(headless)}"
        yield Mark("plans that change without a large head", shown, "0", not changed)
    yield from pages.at_most(
        *("compile time with a choice of chunks / without one", found, 1.02),
        limit="Without a large head, a compile takes {0:.2f} times as long ({1}).",
    )


def ratio_of_compiles(row: Row, entry: str, ours: Any, theirs: Any) -> float:
    """The median time of steps that have one value of an entry / another one."""

    def seconds(value: Any) -> float:
        steps = (step for step in row["steps"] if step[entry] == value)
        return float(median(step["compile_s"] for step in steps))

    return seconds(ours) / seconds(theirs)


def ratios_to_chunker(rows: Sequence[Row], way: str) -> dict[str, float]:
    """By net, the compile time of a way / that of as many chunks by the chunker."""
    return {
        row["net"]: ratio_of_compiles(row, "way", way, NAMES["number"])
        for row in good(rows, kind="compiles")
    }


def of_runs(rows: Sequence[Row]) -> Iterator[Mark]:
    """What kernels that run find."""
    for dtype in DTYPES:
        runs = good(rows, kind="kernels", part=dtype)
        off = [
            (ours["gradients_off"] / theirs["gradients_off"], row["net"])
            for row in runs
            for ours, theirs in [row["steps"]]
        ]
        what = f"error of gradients in chunks / that of budget 1, {dtype}"
        yield from pages.at_most(
            *(what, off, ROUNDING),
            show="{:.2f} ({})",
            limit="In chunks, gradients are off {0:.1f} times as far as at budget 1 ({1}).",
        )
        told = [
            (abs(ours["predicted"] / ours["peak"] - 1), row["net"])
            for row in runs
            for ours in row["steps"][:1]
        ]
        what = f"told by compiles / found by the allocator, {dtype}"
        yield from pages.at_most(
            *(what, told, 0.02),
            show="off by {:.2%} at most ({})",
            limit="What a compile tells is off by {0:.1%} ({1}).",
        )
    for way in (AS_LOW, LOWEST):
        ratios = ratios_to_chunker(rows, way)
        if ratios:
            middle = median(ratios.values())
            net = max(ratios, key=ratios.__getitem__)
            what = f"compile time for {way}, kernels included / that of as many chunks"
            limit = f"For {way}, a compile takes {middle:.2f} times as long as by {NAMES['number']}."
            shown = f"{middle:.2f} in the median; largest {ratios[net]:.2f} ({net})"
            yield Mark(what, shown, "at most 1.3", middle <= 1.3, limit=limit)


# Whose peaks those of the target "peak" are compared with.
NAMES = {
    "upstream": "stock",
    "wheel": "inductor's chunker",
    "number": "inductor's chunker as mended",
}
# What is asked for where a compile is timed beside the chunker's.
AS_LOW, LOWEST = "as low a peak", "the lowest peak"
LEGEND = """Nets of one or two layers with a large vocabulary, and two towers whose pairs are scored with
each other; bfloat16, 8,192 tokens or 16,384 pairs. Peaks are in MB beyond parameters and
inputs, gradients included. Stock is the untouched wheel, its lowest over budgets from 0 to 1.
Inductor's own chunker was asked for 2, 8 and 32 chunks, as the wheel has it, which takes few of
these nets, and as the patch auto-chunker mends it. Then the target "peak" of this set at its
lowest, in how many chunks that is, and its time by the GPU's roofline beside its fastest
plan's. Small nets were run on a CPU: peaks are the allocator's, and errors of gradients those of
the worst parameter beside double precision; one that is zero counts as a thousandth of the largest.
"""


def table(rows: Sequence[Row], nets_shown: Sequence[str]) -> str:
    def peak(net: str, kind: str) -> str:
        found = steps_of(rows, net, kind)
        return megabytes(plans.lowest(found)["peak"]) if found else "-"

    def chosen(net: str) -> str:
        found = steps_of(rows, net, "graph")
        if not found:
            return "-"
        low = plans.lowest(found)
        more = low["seconds"] / min(step["seconds"] for step in found) - 1
        return f"{low['chunks']}, {more:+.0%} time"

    def taken(net: str) -> str:
        found = steps_of(rows, net, "wheel")
        return "yes" if any(step["taken"] for step in found) else "no"

    cells: dict[str, Any] = {
        "net": str,
        "stock, lowest": partial(peak, kind="upstream"),
        "inductor's chunker takes it": taken,
        "as mended, lowest": partial(peak, kind="number"),
        'target "peak", lowest': partial(peak, kind="graph"),
        "in chunks": chosen,
    }
    return pages.columns(nets_shown, cells)


def of_kernels(rows: Sequence[Row]) -> str:
    """What was run: in chunks, beside budget 1 and inductor's own chunker."""
    lines = []
    ratios = [ratios_to_chunker(rows, way) for way in (AS_LOW, LOWEST)]
    for row in good(rows, kind="kernels"):
        ours, whole = row["steps"]
        found = (by_net.get(row["net"]) for by_net in ratios)
        compiles = [f"{ratio:.2f}" for ratio in found if ratio is not None]
        lines.append(
            [
                f"{row['net']}, {row['part']}",
                f"{ours['chunks']}",
                f"{megabytes(whole['peak'])} → {megabytes(ours['peak'])}",
                f"{ours['predicted'] / ours['peak'] - 1:+.2%}",
                f"{whole['gradients_off']:.2g} → {ours['gradients_off']:.2g}",
                "; ".join(compiles if row["part"] == "float32" else ()) or "-",
            ]
        )
    heads = "net", "chunks", "peak", "told / found", "error of gradients"
    compiled = f"compile time for {AS_LOW}; {LOWEST} / that of inductor's chunker"
    return pages.markdown((*heads, compiled), lines)


def page(data: Row) -> str:
    rows = data["measured"]
    marks = [*judged(rows)]
    short = pages.found(mark for mark in marks if "peak" in mark.what)
    tables = {
        name: table(part, nets_of(part)) for name, part in pages.by_set(rows).items()
    }
    tables["Kernels run on a CPU, budget 1 → in chunks"] = of_kernels(rows)
    how = f"{pages.SIMULATED}, bfloat16, by inductor's schedule for an H100,"
    origin = pages.measured_on(data["environment"], how, rows)
    return pages.page(LEGEND, origin, short, pages.limits(marks, rows), tables)
