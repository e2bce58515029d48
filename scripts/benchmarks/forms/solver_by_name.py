"""That the plans of the named solvers stay the same."""

from benchmarks import nets
from benchmarks.forms.memory_budget import kept, small_unet
from benchmarks.tracing import Joint


WHAT = "MB kept at budget 0.4, the plans of three named solvers together"
SOLVERS = ("dp", "dp_knapsack_sliding_hirschberg", "greedy")


def measured() -> dict[str, float]:
    named = (nets.NETS[name] for name in ("llama-4", "mlp-dropout", "lstm", "bert"))
    return {net.name: megabytes(net) for net in (small_unet(3), *named)}


def megabytes(net: nets.Net) -> float:
    joint = Joint(*net.fake())
    return sum(kept(joint, 0.4, solver) for solver in SOLVERS) / 1e6
