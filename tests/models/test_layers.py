"""Layers against their definitions in fp64."""

import pytest
import torch
import torch.nn.functional as F

from drumline.models.layers import Embedding, FeedForward, Linear


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.fixture(params=["own kernels", "torch"])
def both_ways(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr("drumline.numerics.kernels.take", lambda *tensors: False)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_swiglu_and_its_gradients_equal_the_definition_in_fp64(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    layer = FeedForward(24, 40, device="cpu")
    weights = [torch.randn(parameter.shape, generator=generator) * 0.3 for parameter in layer.parameters()]
    for parameter, weight in zip(layer.parameters(), weights, strict=True):
        parameter.data = weight.to(dtype)
    x = torch.randn(2, 9, 24, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(2, 9, 24, generator=generator).to(dtype)
    leaves = (x, *layer.parameters())
    actual = (layer(x), *torch.autograd.grad(layer(x), leaves, grad))

    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    x64, gate, up, down = doubles
    y = F.linear(F.silu(F.linear(x64, gate)) * F.linear(x64, up), down)
    expected = (y, *torch.autograd.grad(y, doubles, grad.double()))
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        assert relative(a, b) < tolerance


def test_a_linear_computes_in_its_inputs_dtype_and_gives_gradients_in_its_weights():
    layer = Linear(8, 4, device="cpu")
    layer.weight.data = torch.randn(4, 8)
    y = layer(torch.randn(3, 8, dtype=torch.bfloat16))
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32


def test_rows_of_a_frequent_token_are_summed_in_fp32_also_for_a_bf16_weight():
    embedding = Embedding(4, 8, torch.bfloat16, device="cpu")
    embedding.weight.data = torch.zeros(4, 8, dtype=torch.bfloat16)
    tokens = torch.tensor([1] * 4096 + [3])
    embedding(tokens).backward(torch.full((4097, 8), 1.0, dtype=torch.bfloat16))
    assert (embedding.weight.grad[1] == 4096).all()  # in bf16, 256 + 1 = 256
    assert (embedding.weight.grad[3] == 1).all()
    assert (embedding.weight.grad[[0, 2]] == 0).all()
