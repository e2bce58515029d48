"""How far plans are over their budgets."""

import functools

import torch
import torch._functorch.config as config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from benchmarks import nets
from benchmarks.architectures import UNet
from benchmarks.meters import storages
from benchmarks.tracing import Joint


WHAT = "kept beyond the budget, as a share of the range: most of budgets 0.6, 0.5, 0.3"
BUDGETS = (0.6, 0.5, 0.3)


def small_unet(levels: int) -> nets.Net:
    side = 16 << levels // 2
    batch = functools.partial(nets.images, 2, side, 4, (side, side))
    return nets.Net(f"unet-{levels}", lambda: (UNet(8, levels, 4), batch()))


def measured() -> dict[str, float]:
    named = (nets.NETS[name] for name in ("unet", "hf-mixtral", "vit"))
    return {net.name: excess(net) for net in (small_unet(3), small_unet(5), *named)}


def excess(net: nets.Net) -> float:
    joint = Joint(*net.fake())
    low, high = kept(joint, 0), kept(joint, 1)
    shares = {b: (kept(joint, b) - low) / (high - low) for b in BUDGETS}
    return max(share - budget for budget, share in shares.items())


def kept(joint: Joint, budget: float, solver: str = "dp") -> int:
    """The bytes that only the forward's saved values keep, whole storages once each."""
    with config.patch(
        activation_memory_budget=budget, activation_memory_budget_solver=solver
    ):
        forward, _ = joint.partition(min_cut_rematerialization_partition)
    (output,) = forward.graph.find_nodes(op="output")
    found: list[torch.fx.Node] = output.args[0][joint.options["num_fwd_outputs"] :]
    given = forward.graph.find_nodes(op="placeholder")
    known = {each._cdata for each in storages([node.meta["val"] for node in given])}
    saved = storages([node.meta["val"] for node in found])
    sizes = {each._cdata: each.nbytes() for each in saved}
    return sum(nbytes for each, nbytes in sizes.items() if each not in known)
