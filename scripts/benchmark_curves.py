"""Measures what a curve of budgets costs, and what the report of a plan adds.

    scripts/benchmark.sh curves               all rows but the last, some minutes
    scripts/benchmark.sh curves --check       the small net's counts only, as CI does
    scripts/benchmark.sh curves --everything  BERT-large on the untouched torch, too

Every row is a process of its own that partitions one joint graph with the Pareto plot
switched on: on the patched checkout, or on the untouched torch beside it. Times are
CPU seconds of one thread, reported and never enforced. The exit status is 1 only if a
count (min cuts, calls of the solver, sets cut twice) is off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
import torch._functorch.config
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn, Tensor
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call


BUDGET = 0.3
# CPU seconds that the plot may take, and what a curve may count.
MARKS = {"small": 3.0, "bert": 60.0}
MOST_CUTS = 36
MOST_SOLVES = 2
# Share of the partition that recording its plan may take.
REPORT_MARK = 0.01

# Wide enough for the table, wherever it goes.
console = Console(width=100)


# --------------------------------------------------------------------- nets


def small(x: Tensor, *weights: Tensor) -> Tensor:
    """Gated blocks of different widths: 15 items, no two of them alike."""
    for norm, up, down in zip(*[iter(weights)] * 3):
        gate, value = (F.rms_norm(x, x.shape[-1:], norm) @ up).chunk(2, dim=-1)
        x = x + (F.silu(gate) * value) @ down
    return (x * x).mean()


def small_shapes() -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(64, 160)]
    for hidden in (400, 304, 240, 352, 176):
        shapes += [(160,), (160, 2 * hidden), (hidden, 160)]
    return shapes


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.attention_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.mlp_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        def by_head(projected: Tensor) -> Tensor:
            batch, tokens, _ = projected.shape
            return projected.view(batch, tokens, self.heads, -1).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            by_head(self.query(x)),
            by_head(self.key(x)),
            by_head(self.value(x)),
            attn_mask=mask,
            dropout_p=0.1,
        )
        attended = self.out(mixed.transpose(1, 2).flatten(2))
        x = self.attention_norm(x + F.dropout(attended, 0.1))
        mlp = self.down(F.gelu(self.up(x)))
        result: Tensor = self.mlp_norm(x + F.dropout(mlp, 0.1))
        return result


class Bert(nn.Module):
    """BERT-large with its masked-token head: the mean loss of a batch."""

    def __init__(
        self,
        layers: int = 24,
        width: int = 1024,
        heads: int = 16,
        vocabulary: int = 30522,
        tokens: int = 512,
    ) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.transform = nn.Linear(width, width)
        self.head_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, segments: Tensor, targets: Tensor) -> Tensor:
        x = self.word(tokens) + self.position.weight + self.segment(segments)
        x = F.dropout(self.norm(x), 0.1)
        mask = (1 - segments[:, None, None, :].float()) * -1e9
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.head_norm(F.gelu(self.transform(x))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def partition(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    aot_function(
        function,
        fw_compiler=lambda module, _: module,
        bw_compiler=lambda module, _: module,
        # Looked up now, so that a meter is seen.
        partition_fn=partitioners.min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )(*inputs)


def partition_small() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in small_shapes()]
    partition(small, inputs)


def partition_bert() -> None:
    """With fake tensors: BERT-large at a batch of 32 x 512 tokens, in no memory."""
    with FakeTensorMode():
        model = Bert()
        names = [name for name, _ in model.named_parameters()]
        tokens = torch.zeros(32, 512, dtype=torch.long)

        def step(*inputs: Tensor) -> Tensor:
            given = dict(zip(names, inputs[3:]))
            loss: Tensor = functional_call(model, given, inputs[:3])
            return loss

        partition(step, [tokens] * 3 + list(model.parameters()))


NETS = {"small": partition_small, "bert": partition_bert}


# -------------------------------------------------------------- measurement


class Meter:
    """Counts the calls of some of the partitioner's functions and their CPU time."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.sets: list[frozenset[str]] = []
        self.items = self.nodes = 0

    def watch(self, module: Any, name: str) -> None:
        function = getattr(module, name, None)
        if function is None:
            return
        self.calls[name], self.seconds[name] = 0, 0.0

        def watched(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.calls[name] += 1
                self.seconds[name] += time.process_time() - start
                self.look(name, args)

        setattr(module, name, watched)

    def look(self, name: str, args: Sequence[Any]) -> None:
        if name == "solve_min_cut" and len(args) > 3:
            self.sets.append(frozenset(node.name for node in args[3]))
        elif name in ("ask_solver", "_optimize_runtime_with_given_memory"):
            self.nodes, self.items = len(args[0].nodes), len(args[1])


def measure(net: str) -> dict[str, Any]:
    """Partition ``net`` with the plot, in this process and by this torch."""
    torch.set_num_threads(1)
    meter = Meter()
    for name in (
        "solve_min_cut",
        "_optimize_runtime_with_given_memory",
        "choose_saved_values_set",
        "min_cut_rematerialization_partition",
    ):
        meter.watch(partitioners, name)
    package = "torch._functorch._activation_checkpointing"
    ours = sys.modules.get(f"{package}.memory_budget")
    meter.watch(ours, "ask_solver")
    meter.watch(ours, "choose_plan")
    meter.watch(sys.modules.get(f"{package}.peak_budget"), "record_plan")
    planner = "choose_saved_values_set" if ours is None else "choose_plan"
    curve = sys.modules.get("torch._functorch._activation_checkpointing.budget_curve")
    meter.watch(curve, "solve_budgets")
    start, clock = time.process_time(), time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        torch._functorch.config.patch(
            activation_memory_budget=BUDGET,
            visualize_memory_budget_pareto=True,
            memory_budget_pareto_dir=folder,
        ),
    ):
        NETS[net]()
        files = sorted(place.suffix for place in Path(folder).iterdir())
    return {
        "items": meter.items,
        "nodes": meter.nodes,
        "min_cuts": meter.calls["solve_min_cut"],
        "sets_cut_twice": len(meter.sets) - len(set(meter.sets)),
        "solver_calls": meter.calls.get("ask_solver", 0)
        + meter.calls.get("_optimize_runtime_with_given_memory", 0)
        + meter.calls.get("solve_budgets", 0),
        "plan_and_plot_seconds": meter.seconds[planner],
        "partition_seconds": meter.seconds["min_cut_rematerialization_partition"],
        "seconds_with_trace": time.process_time() - start,
        "wall_seconds": time.perf_counter() - clock,
        "report_seconds": meter.seconds.get("record_plan"),
        "files": files,
    }


def row(net: str, patched: bool) -> dict[str, Any]:
    """Measure in a process of its own."""
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    if not patched:
        del environment["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, __file__, "--measure", net],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{net}: {done.stderr[-4000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"net": net, "torch": "patched" if patched else "untouched", **measured}


def faults(measured: dict[str, Any]) -> list[str]:
    """What is off in the counts of a patched row."""
    if measured["torch"] != "patched":
        return []
    net, cuts = measured["net"], measured["min_cuts"]
    found = []
    if cuts > MOST_CUTS:
        found.append(f"{net}: {cuts} min cuts, {MOST_CUTS} are allowed")
    if measured["sets_cut_twice"]:
        found.append(f"{net}: {measured['sets_cut_twice']} sets were cut twice")
    if measured["solver_calls"] > MOST_SOLVES:
        found.append(f"{net}: {measured['solver_calls']} calls of the solver")
    if measured["files"] != [".json", ".svg"]:
        found.append(f"{net}: wrote {measured['files']}")
    return found


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark.sh curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="the small net only")
    parser.add_argument(
        "--everything", action="store_true", help="add ten minutes of upstream"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write to FILE")
    parser.add_argument("--measure", choices=NETS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    wanted = [("small", True)]
    if not options.check:
        wanted += [("small", False), ("bert", True)]
    if options.everything:
        wanted.append(("bert", False))
    rows = [row(net, patched) for net, patched in wanted]

    table = Table(title=f"Pareto plot at budget {BUDGET}, torch {torch.__version__}")
    columns = ("net", "torch", "items", "nodes", "min_cuts", "solver_calls")
    for column in (*columns, "CPU s", "mark", "report", "mark"):
        table.add_column(column)
    for r in rows:
        report = r["report_seconds"]
        table.add_row(
            *(str(r[column]) for column in columns),
            f"{r['plan_and_plot_seconds']:.2f}",
            f"{MARKS[r['net']]:g}" if r["torch"] == "patched" else "",
            "" if report is None else f"{report / r['partition_seconds']:.2%}",
            "" if report is None else f"{REPORT_MARK:.0%}",
        )
    console.print(table)
    off = [fault for r in rows for fault in faults(r)]
    for fault in off:
        console.print(f"[red]FAILED[/] {fault}", highlight=False)
    if options.json is not None:
        data = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "python": platform.python_version(),
            "budget": BUDGET,
            "marks": MARKS,
            "rows": rows,
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
