"""Whether the set makes anything worse where nothing is asked of it, beside the wheel.

    TORCH_VERSION=2.15.0 scripts/benchmark.sh unasked
    scripts/benchmark.sh unasked --check             one small net
    scripts/benchmark.sh unasked --net my_module:my_function --device operators

No option is set, so budgets are 1. Every net is compiled as one graph by the untouched
wheel and by the patched torch, each in a process of its own: for a training step, and for
its loss alone, without gradients and in eval mode. At real size, by inductor's schedule for
an H100, no kernel runs (see kernels --help); four small nets run operator by operator, and
their losses and gradients have to be the same bits. Peaks are bytes beyond parameters and inputs, times those of the GPU's roofline. The
exit status is 1 where the patched torch holds or takes more than 0.1 % above the wheel, or
computes something else.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks import catalogue, fresh, nets, pages
from benchmarks.catalogue import AT_SIZE, HELD_OUT, names, PROJECT
from benchmarks.kernels import DEVICE
from benchmarks.meters import digest, gradients
from benchmarks.pages import at_most, good, Mark, Row
from benchmarks.plans import backend_of, RUN
from benchmarks.replay import GPUS, replay
from benchmarks.ways import compiled, Training


# What runs does so with dropout, too.
SMALL = {
    PROJECT: ("bert", "gpt2", "hf-t5_small", "unet"),
    HELD_OUT: ("falcon-h1-small", "hiera-small", "mobilenet-small", "w2v-bert-small"),
}
NETS = {
    **{of: (*names(AT_SIZE[of]), *SMALL[of]) for of in SMALL},
    "check": ("llama-4",),
}
KINDS = ("training", "inference")
WAYS = {"stock": fresh.UNTOUCHED, "installed": "patched"}
# What held more at first, and was mended.
TUNED_ON = ("hf-t5_large",)
SAME = 1.001


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    run = {net for some in SMALL.values() for net in some}
    for net in asked.nets:
        is_run = asked.check or (net in run and asked.device is None)
        device = RUN if is_run else asked.device or DEVICE
        for kind in KINDS:
            task = {"set": catalogue.set_of(net), "net": net}
            yield {**task, "kind": kind, "device": device}


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    """A row of both; or, in a process of its own, of the one that a task names."""
    if "way" in task:
        return alone(task)
    found: Row = {}
    for way, wheel in WAYS.items():
        part = {**task, "way": way, "torch": wheel}
        found[way] = fresh.measure_in_child(__name__, part, fresh.SECONDS / 3, False)
        if "error" in found[way]:
            return {"error": f"{way}: {found[way]['error']}"}
    return found


def alone(task: fresh.Task) -> Row:
    device, net = task["device"], catalogue.find(task["net"])
    gpu, trains = GPUS.get(device), task["kind"] == "training"
    if gpu is None:
        net = replace(net, dtype=torch.float32)
    with backend_of(device) as backend:
        way = compiled(backend, fullgraph=True)
        training = Training(net, whole=way, fake=device != RUN)
        if not trains:
            training.module.eval()
            training.within = torch.no_grad()
        # Compiles it.
        bits(training, trains)
        row = replay(training, gpu, trains)
        if device == RUN:
            row["bits"] = bits(training, trains)
        return row


def bits(training: Training, trains: bool) -> str:
    """A step's loss and gradients, as a digest; of fakes there is none."""
    torch.manual_seed(nets.SEED)
    with training.mode, training.within:
        loss = training.loss()
        if trains:
            loss.backward()
        found = [loss, *gradients(training.parameters)]
        return "" if isinstance(loss, FakeTensor) else digest(found)


# ------------------------------------------------------------------- marks


def ratio(row: Row, what: str) -> float:
    """The patched torch's over the wheel's."""
    return float(row["installed"][what] / row["stock"][what])


MEASURED = {"peak": "peak", "seconds": "roofline time"}


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    rows = good(rows)
    for nets_of, part in pages.by_set(rows).items():
        for kind, (what, name) in itertools.product(KINDS, MEASURED.items()):
            those = [row for row in good(part, kind=kind) if what in row["stock"]]
            yield from at_most(
                f"{kind}: {name} / stock's, {nets_of.lower()}",
                [(ratio(row, what), row["net"]) for row in those],
                *(SAME, "at most 1"),
                enforced=True,
                limit=f"In {kind}, {{1}} has a {name} {{2:.1%}} above stock's.",
            )
    bitwise = [row for row in rows if "bits" in row["stock"]]
    other = [
        f"{row['net']}, {row['kind']}"
        for row in bitwise
        if row["stock"]["bits"] != row["installed"]["bits"]
    ]
    if bitwise:
        text = f"not of {', '.join(other)}" if other else f"all {len(bitwise)}"
        limit = f"Losses or gradients are not the same bits: {', '.join(other)}."
        what = "losses and gradients the same bits"
        yield Mark(what, text, "all", not other, limit=limit)


LEGEND = """Every net is compiled as one graph with no option set, by the untouched wheel and with this
set installed. Figures are the set's divided by the wheel's: 1 is the same, less is better, in
bold what is above 1. Training is a step of it, inference the loss alone. Peaks are beyond
parameters and inputs, time is by the GPU's roofline: each kernel takes the time of its flops
or of its bytes, the longer. One net was worse at first and was mended ("tuned on").
"""


def page(data: Row) -> str:
    rows = data["measured"]

    def cell(net: str, part: Sequence[Row], kind: str, what: str) -> str:
        found = [ratio(row, what) for row in good(part, net=net, kind=kind)]
        text = "".join(f"{each:.3f}" for each in found[:1]) or "-"
        return f"**{text}**" if found and found[0] > SAME else text

    tables = {}
    for name, part in pages.by_set(rows).items():
        cells: dict[str, Callable[..., str]] = {
            "net": lambda net: f"{net}, tuned on" if net in TUNED_ON else net
        }
        for what, kind in itertools.product(MEASURED, KINDS):
            of = [row for row in part if what in row["stock"]]
            title = f"{MEASURED[what]}, {kind}"
            cells[title] = partial(cell, part=of, kind=kind, what=what)
        tables[name] = pages.columns(dict.fromkeys(row["net"] for row in part), cells)
    ran = all(row["device"] == RUN for row in good(rows))
    dtype = "bfloat16" if any(row["device"] in GPUS for row in rows) else "float32"
    how = f"{pages.RUN if ran else pages.SIMULATED}, {dtype},"
    origin = pages.measured_on(data["environment"], how, rows)
    marks = [*judged(rows)]
    limits = pages.limits(marks, rows)
    return pages.page(LEGEND, origin, pages.found(marks), limits, tables)


def installed(data: Row) -> str:
    """The README's sentences: peaks and times of training beside stock's."""
    trained = good(data["measured"], kind="training")
    rows = [row for row in trained if "seconds" in row["stock"]]
    peaks = sorted((ratio(row, "peak"), row["net"]) for row in rows)
    ratios = [peak for peak, _ in peaks]
    times = [ratio(row, "seconds") for row in rows]
    # As far below 1 as may be above it is no difference.
    lower = sum(peak < 2 - SAME for peak in ratios)
    higher = sum(peak > SAME for peak in ratios)
    least = ", ".join(f"`{net}` {1 - peak:.0%}" for peak, net in peaks[:3])
    return (
        f"Of {len(rows)} nets in training, {pages.held_out(rows)}, {lower} have a "
        f"lower peak than with stock and {higher or 'none'} a higher one. It is "
        f"{1 - statistics.median(ratios):.0%} lower in the median, and most where the "
        f"vocabulary is large: {least}. No step takes longer than {max(times):.3f} "
        "times stock's. Simulated by inductor's schedule for an H100, bfloat16, with "
        f"the roofline's times; torch {data['environment']['torch']}.\n"
    )
