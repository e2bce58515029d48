"""A training loop with each block compiled separately, under a StepBudget.

scripts/run_patched.sh python examples/plain_loop.py
"""

import torch
from torch import nn
from torch._functorch.memory_planner import StepBudget


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)), nn.Linear(128, 10))
    for block in model[:-1]:
        # Or inductor, the default, which needs a compiler.
        block.compile(backend="aot_eager_decomp_partition")
    optimizer = torch.optim.AdamW(model.parameters())
    budget = StepBudget(share=0.2)
    for _ in range(4):
        batch = torch.randn(1024, 128)
        labels = batch[:, :10].argmax(dim=1)
        with budget:
            loss = nn.functional.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"loss: {loss.item():.3f}")
    print(budget)


if __name__ == "__main__":
    main()
