"""Matmul and linear in Triton: right against fp64, and the same bits for any number of rows, places and chunks."""

import pytest
import torch

from drumline.numerics import invariant

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def normal(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(device)


def run(x, weight, seed):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = invariant.linear(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 37, 70), (150, 5, 260), (47, 183, 33), (2, 300, 17)])
def test_linear_and_its_gradients_match_fp64(m, n, k, dtype, device):
    x, weight, seed = (normal(*shape, dtype=dtype, device=device) for shape in ((m, k), (n, k), (m, n)))
    wide = [t.double() for t in (x, weight, seed)]
    wanted = (wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0])
    for got, want in zip(run(x, weight, seed), wanted, strict=True):
        assert got.dtype == dtype
        assert (got - want).abs().max() <= TOLERANCE[dtype] * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(37, 70), (150, 300)])
def test_a_rows_bits_do_not_depend_on_the_other_rows_or_its_place(n, k, dtype, device):
    x, weight, seed = (normal(*shape, dtype=dtype, device=device) for shape in ((177, k), (n, k), (177, n)))
    y, grad_x, _ = run(x, weight, seed)
    for first, last in ((0, 1), (3, 5), (10, 27), (40, 177), (131, 132)):
        part_y, part_grad_x, _ = run(x[first:last], weight, seed[first:last])
        assert torch.equal(part_y, y[first:last])
        assert torch.equal(part_grad_x, grad_x[first:last])
    turned_y, turned_grad_x, _ = run(x.flip(0), weight, seed.flip(0))
    assert torch.equal(turned_y.flip(0), y)
    assert torch.equal(turned_grad_x.flip(0), grad_x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_may_be_split(dtype, device):
    x, weight = normal(19, 130, dtype=dtype, device=device), normal(190, 130, dtype=dtype, device=device)
    whole = invariant.linear(x, weight)
    for first, last in ((0, 1), (17, 50), (32, 190)):
        assert torch.equal(invariant.linear(x, weight[first:last]), whole[:, first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [32, 64, 96])
def test_a_weight_gradient_in_chunks_of_rows_has_the_bits_of_the_whole(dtype, chunk, device):
    grad, x = normal(230, 40, dtype=dtype, device=device), normal(230, 70, dtype=dtype, device=device)
    total = None
    for first in range(0, 230, chunk):
        total = invariant.weight_gradient(grad[first : first + chunk], x[first : first + chunk], total)
    assert total is not None
    assert total.dtype == torch.float32
    assert torch.equal(total, invariant.weight_gradient(grad, x))


def test_a_bf16_input_with_an_fp32_weight_gets_an_fp32_gradient(device):
    x, seed = normal(50, 64, dtype=torch.bfloat16, device=device), normal(50, 32, dtype=torch.bfloat16, device=device)
    y, grad_x, grad_weight = run(x, normal(32, 64, device=device), seed)
    assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(grad_weight, (seed.double().t() @ x.double()).float(), rtol=1e-5, atol=1e-5)


def test_a_batched_matmul_and_a_bias_match_fp64(device):
    a, b, bias = normal(2, 5, 7, device=device), normal(2, 7, 11, device=device), normal(11, device=device)
    want = torch.matmul(a.double(), b.double()).float()
    torch.testing.assert_close(invariant.matmul(a, b), want, rtol=1e-5, atol=1e-5)
    bias.requires_grad_()
    y = invariant.linear(a, b[0].t(), bias)
    torch.testing.assert_close(y, (a.double() @ b[0].double() + bias.double()).float(), rtol=1e-5, atol=1e-5)
    y.backward(torch.ones_like(y))
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((11,), 10.0, device=device))


@pytest.mark.parametrize("layout", ["strided-rows", "strided-columns", "transposed", "expanded", "unaligned"])
def test_any_strides_give_the_bits_of_contiguous_inputs(layout, device):
    base = normal(66, 132, device=device)
    x = {
        "strided-rows": base[::2, :64],
        "strided-columns": base[:33, ::2],
        "transposed": base[:, :40].t(),
        "expanded": base[:1].expand(9, -1),
        "unaligned": base[:, 1:],
    }[layout]
    weight = normal(20, x.shape[1], device=device)
    assert torch.equal(invariant.linear(x, weight), invariant.linear(x.contiguous(), weight))


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (5, 7, 0)])
def test_empty_matrices_give_what_torch_gives(shape, device):
    m, n, k = shape
    got = invariant.linear(torch.ones(m, k, device=device), torch.ones(n, k, device=device))
    assert torch.equal(got, torch.zeros(m, n, device=device))
