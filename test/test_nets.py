"""The models train, and at real size they have the parameters they are known by."""

import nets
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.mark.parametrize("name", [net.name for net in nets.SMALL])
def test_small_net_gives_each_parameter_a_gradient(name):
    mode, module, inputs = nets.NETS[name].fake()
    with mode:
        module(*inputs).backward()
    for parameter in module.parameters():
        assert parameter.grad.shape == parameter.shape


@pytest.mark.parametrize("name", ["mlp-dropout", "lstm"])
def test_nets_are_made_alike_and_train(name):
    module, inputs = nets.NETS[name].make()
    again, _ = nets.NETS[name].make()
    torch.manual_seed(0)
    loss = module(*inputs)
    loss.backward()
    torch.manual_seed(0)
    assert torch.equal(again(*inputs), loss), "two copies differ"
    for parameter in module.parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-70b", 70_553_706_496),
        ("moe-8x7b", 46_702_792_704),
        ("gpt2-xl", 1_557_611_200),
        ("resnet152", 60_192_808),
    ],
)
def test_net_of_real_size_has_its_parameters_and_traces(name, parameters):
    mode, module, inputs = nets.NETS[name].fake()
    assert sum(p.numel() for p in module.parameters()) == parameters
    with mode, nets.CUDAAttention():
        loss = module(*inputs)
    assert loss.shape == () and loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_as_on_cuda_takes_grouped_heads(dtype):
    with FakeTensorMode():
        query = torch.randn(2, 4, 32, 16, dtype=dtype, requires_grad=True)
        key, value = torch.randn(2, 2, 2, 32, 16, dtype=dtype, requires_grad=True)
        with nets.CUDAAttention():
            mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        gradients = torch.autograd.grad(mixed.sum(), [query, key, value])
    assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]
