"""Measures budgets for a training step of models that are compiled block by block.

    scripts/benchmark.sh step                       all nets (hours)
    scripts/benchmark.sh step --check               a small one, as CI does
    scripts/benchmark.sh step --net my_models:make  your own
    scripts/benchmark.sh step --json results/step.json
    scripts/benchmark.sh step --net bert --json results/step.json   one net's rows anew

Each net's blocks are compiled one by one; what is between them runs in eager mode. The
step runs by a StepBudget at several shares, and beside that with each block's own budget
of saved bytes, with a checkpoint around each block, and compiled as one graph that is
held to the same peak. The blocks' own budgets are upstream's, swept on the untouched
wheel. Peaks are bytes of live storages of a running step, operator by operator, beyond
those that are there when it starts; flops are those of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Optional

from benchmarks import bounds, fresh, plans
from benchmarks.pages import Row


# No plan was ever tuned on the last one.
NETS = ("llama-8", "gpt2", "bert", "vit", "moe", "hf-t5_small")
SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.0)
CHECK = "one net, three shares, as CI does"


def tasks(
    names: Optional[Sequence[str]], check: bool, rows: Sequence[Row]
) -> Iterator[fresh.Task]:
    names = names or (("vit",) if check else NETS)
    shares, saved = ((1.0, 0.5, 0.0), (0.5,)) if check else (SHARES, plans.SWEEP)
    kinds = {"saved": saved, "checkpoint": (), "blocks": shares}
    kinds.update({"held": (), "one graph": ()})
    yield from plans.tasks(names, kinds, plans.RUN, rows)


measure, judged = plans.measure, bounds.judged
page = bounds.page
