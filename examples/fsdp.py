"""A loop like torchtitan's: FSDP2 and torch.compile on each block, on two ranks.

scripts/run_patched.sh python examples/fsdp.py
"""

import tempfile

import torch
import torch.distributed as dist
from plain_loop import Block
from torch import multiprocessing, nn
from torch._functorch.memory_planner import StepBudget
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


RANKS = 2


def train(rank: int, store: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(128, 10))
    for block in model[:-1]:
        block.compile(backend="aot_eager_decomp_partition")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    budget = StepBudget(share=0.2)
    torch.manual_seed(rank)
    for _ in range(4):
        batch = torch.randn(1024, 128)
        labels = batch[:, :10].argmax(dim=1)
        with budget:
            loss = nn.functional.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"rank {rank}, loss: {loss.item():.3f}")
    plans: list[str] = [""] * RANKS
    dist.all_gather_object(plans, str(budget))
    if rank == 0:
        print(*dict.fromkeys(plans), sep="\n")
        print("all ranks plan alike:", len(set(plans)) == 1)
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # A forked rank exits at once, without waiting for an interpreter to be torn
        # down while gloo's threads still release the tensors of the last collective.
        multiprocessing.start_processes(
            train, (f"{folder}/store",), RANKS, start_method="fork"
        )


if __name__ == "__main__":
    main()
