"""Models of the Hugging Face libraries, small and run: what is kept, and the gradients."""

import pytest
import torch
import torch._functorch.config as config
from torch._functorch._activation_checkpointing.saved_report import plans


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=96,
        )
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=1,
            num_heads=4,
            vocab_size=96,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def held_by(loss, apart):
    """Bytes of the storages that the backward of ``loss`` holds, but for some tensors'."""
    given = {t.untyped_storage().data_ptr() for t in apart}
    found, pending, seen = {}, [loss.grad_fn], set()
    while pending:
        function = pending.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        pending += [parent for parent, _ in function.next_functions]
        for tensor in getattr(function, "saved_tensors", ()):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(size for place, size in found.items() if place not in given)


@pytest.mark.parametrize("make", [bert, t5])
def test_models_keep_their_budget_and_their_gradients(alone, make):
    torch.manual_seed(0)
    model = make().train()
    ids = torch.randint(96, (2, 24))
    state = [*model.parameters(), *model.buffers(), ids]
    found = {}
    for budget in (1.0, 0.3, 0.05, 0.0):
        torch._dynamo.reset()
        model.zero_grad()
        before = len(plans())
        with config.patch(activation_memory_budget=budget):
            compiled = torch.compile(model, backend="aot_eager_decomp_partition")
            torch.manual_seed(1)
            loss = compiled(input_ids=ids, labels=ids).loss
        plan = plans()[-1]
        assert len(plans()) == min(before + 1, 16), "one graph"
        kept = held_by(loss, state)
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found[budget] = kept
        assert kept <= plan.activation_bytes
        if plan.limits:
            low, high = plan.limits
            assert high == found[1.0]
            assert kept <= low + budget * (high - low)
        if budget == 1.0:
            fastest = grads
        assert all(map(torch.equal, grads, fastest)), f"gradients at {budget}"
    assert list(found.values()) == sorted(found.values(), reverse=True)
