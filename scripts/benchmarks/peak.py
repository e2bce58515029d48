"""Measures the budget that means peak memory, beside upstream's.

    scripts/benchmark.sh peak                       all nets (hours)
    scripts/benchmark.sh peak --check               a small one, as CI does
    scripts/benchmark.sh peak --json results/peak.json

Each net is one graph. Every peak is measured on a running training step, operator by
operator: the bytes of live storages, counted by weak references, without parameters and
inputs. Upstream's steps run on the untouched wheel, by the plans of all budgets (of fake
tensors, but for nets with dropout), ours on the patched checkout. Planning times are CPU
seconds of the partitioner, ours and upstream's algorithm in one process, medians. The
exit status is 1 only if a peak, a prediction or a gradient is off.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional
from unittest import mock

from benchmarks import bounds, fresh, nets, plans
from benchmarks.pages import Row
from benchmarks.tracing import overlay


NETS = tuple(net.name for net in nets.SMALL)
BUDGETS = (1.0, 0.8, 0.5, 0.2, 0.1, 0.05, 0.0)
CHECK = "a small net, as CI does"


def tasks(
    names: Optional[Sequence[str]], check: bool, rows: Sequence[Row]
) -> Iterator[fresh.Task]:
    kinds: dict[str, Sequence[float]] = {"upstream": plans.SWEEP, "graph": BUDGETS}
    if check:
        # One with dropout is in test_peak.py.
        kinds = {"graph": (1.0, 0.5, 0.2, 0.0)}
    yield from plans.tasks(names or (("vit",) if check else NETS), kinds, plans.RUN)


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    found: Row = {}
    with curve_noted(found):
        row = plans.measure(task)
    if found:
        fastest = row["steps"][0]["flops"]
        found["curve"] = [(peak, fastest + cost) for peak, cost in found["curve"]]
    return {**row, **found}


@contextmanager
def curve_noted(row: Row) -> Iterator[None]:
    """Notes the peaks and costs of the plans that are found meanwhile."""
    module = overlay("peak_budget")
    build_curve = module.build_curve

    @functools.wraps(build_curve)
    def note(*arguments: Any) -> Any:
        model, found = build_curve(*arguments)
        row["curve"] = [(plan.peak, plan.cost) for plan in found.plans]
        row["lower_bound"] = overlay("liveness").lower_bound(model)
        return model, found

    with mock.patch.object(module, build_curve.__name__, note):
        yield


# ------------------------------------------------------------------- report


judged, page = bounds.judged, bounds.page
