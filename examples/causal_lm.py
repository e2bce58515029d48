"""A causal language model of transformers, under a bound that needs logits in chunks.

scripts/run_patched.sh python examples/causal_lm.py

With 16,384 words, the logits of one batch and their gradient take 67 MB each.
"""

import torch
from torch._functorch.memory_planner import StepBudget
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=1,
        num_attention_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)

    # If it also returned the logits, all of them would have to exist at once.
    @torch.compile
    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    optimizer = torch.optim.AdamW(model.parameters())
    budget = StepBudget(peak_bytes="50MB")
    ids = torch.randint(config.vocab_size, (4, 256))
    for _ in range(4):
        with budget:
            loss = loss_of(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"loss: {loss.item():.3f}")
    print(budget)


if __name__ == "__main__":
    main()
