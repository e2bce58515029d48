"""The models train, and at real size they have the parameters they are known by."""

import pytest
import torch
from benchmarks import catalogue, held_out, nets
from benchmarks.tracing import Joint, overlay
from benchmarks.ways import budgeted, compiled, OPERATORS, Training


def test_small_nets_give_each_parameter_a_gradient():
    for net in nets.SMALL:
        mode, module, inputs = net.fake()
        with mode:
            module(*inputs).backward()
        for parameter in module.parameters():
            assert parameter.grad.shape == parameter.shape, net.name


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama3-8b-fsdp", 8_030_261_248), ("resnet50-224", 25_557_032)],
)
def test_net_of_real_size_has_its_parameters(name, parameters):
    _, module, _ = nets.NETS[name].fake()
    assert sum(p.numel() for p in module.parameters()) == parameters


NARROW = {"vocab_size": 128, **nets.sized(64, 160, 2, 4)}
LORA = {"adapted": nets.with_lora, "num_key_value_heads": 2}


def test_model_of_a_library_trains_within_budgets(alone):
    """As a whole and by blocks, with its dropout: no other gradients, no byte too many."""
    net = nets.in_float("x", "LlamaForCausalLM", 4, 48, **NARROW, **LORA)
    operators = compiled(OPERATORS)

    def whole(budget, target="saved"):
        with budgeted(budget, target):
            return Training(net, whole=operators).warmed().measured()

    fastest, least, some = (whole(budget) for budget in (1.0, 0.0, 0.3))
    room = fastest.saved_bytes - least.saved_bytes
    assert some.saved_bytes <= least.saved_bytes + 0.3 * room
    low = whole(0.3, "peak")
    allowed = overlay("memory_planner").last_plan().peak.allowed
    assert low.own_peak <= 1.005 * allowed < fastest.own_peak
    for step in (least, some, low):
        assert all(map(torch.equal, step.gradients, fastest.gradients))

    plain = Training(net, blocks=operators).warmed(3).measured()
    training = Training(net, blocks=operators)
    training.within = overlay("memory_planner").StepBudget(share=0.3)
    step = training.warmed(3).measured()
    assert step.own_peak <= 1.005 * training.within.plan.allowed < plain.own_peak
    assert all(map(torch.equal, step.gradients, plain.gradients))


USERS = """
import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM


def model(**wanted):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    config = ModernBertConfig(
        num_hidden_layers=1, vocab_size=128, pad_token_id=0, **sizes
    )
    ids = torch.randint(128, (2, 16))
    return ModernBertForMaskedLM(config).to(**wanted), {"input_ids": ids, "labels": ids}


def moved():
    # A tensor without values cannot be.
    return model(dtype=torch.bfloat16, device="cpu")
"""


def test_a_users_model_of_a_library_is_traced(tmp_path, monkeypatch):
    """Under the mode of fake tensors it could be neither built nor converted."""
    (tmp_path / "users.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    net = catalogue.find("users:moved")
    mode, module, inputs = net.fake()
    assert len(Joint(mode, module, inputs).graph.graph.nodes) > 100
    assert {each.dtype for each in module.parameters()} == {torch.bfloat16}
    # One storage, as in the model itself.
    ends = module.module.get_input_embeddings(), module.module.get_output_embeddings()
    assert ends[0].weight is ends[1].weight


def test_held_out_nets_are_found_by_name_and_are_none_of_the_projects():
    every = *held_out.AT_SIZE, *held_out.HEADS, *held_out.SMALL_HEADS, *held_out.SMALL
    # No name hides another net.
    assert len(held_out.NETS) == len(every)
    assert not {*held_out.NETS} & {*nets.NETS}
    for name, net in held_out.NETS.items():
        assert catalogue.find(name) is net and net.held_out
    assert not any(net.held_out for net in nets.NETS.values())
