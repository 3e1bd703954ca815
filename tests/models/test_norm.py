"""RMSNorm against its definition in fp64."""

import pytest
import torch

from drumline.models.norm import rms_norm


def reference(x, weight, grad, eps):
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    y.backward(grad.double())
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)]
)
@pytest.mark.parametrize("shape", [(2, 9, 48), (2, 5, 3, 16), (7, 2)])
@pytest.mark.parametrize("strided", [False, True])
def test_result_and_gradients_equal_the_definition_in_fp64(dtype, tolerance, shape, strided):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator).to(dtype)
    x = (x[..., ::2] if strided else x[..., : shape[-1]].clone()).requires_grad_()
    weight = (torch.rand(shape[-1], generator=generator) + 0.5).to(dtype).requires_grad_()
    grad = torch.randn(shape, generator=generator).to(dtype)
    y = rms_norm(x, weight, 1e-2)
    actual = (y, *torch.autograd.grad(y, (x, weight), grad))
    for a, b in zip(actual, reference(x, weight, grad, 1e-2), strict=True):
        assert a.dtype == dtype
        assert (a - b).norm() <= tolerance * b.norm()


def test_a_row_of_zeros_has_finite_gradients():
    x = torch.zeros(2, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), 1e-5).sum().backward()
    assert x.grad.isfinite().all()


def test_derivatives_pass_the_numerical_check():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), (x, weight))
