"""Matmul and linear: right against fp64, and the same bits for any number of rows, chunks and threads."""

import pytest
import torch
import torch.nn.functional as F

from drumline.numerics import invariant
from drumline.numerics.invariant import native

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}


@pytest.fixture(params=["kernel", "plain"])
def form(request, monkeypatch):
    """Both forms of each operator."""
    if request.param == "plain":
        monkeypatch.setattr(native, "_built", lambda module: None)
    return request.param


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def run(x, weight, seed):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = invariant.linear(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 37, 70), (70, 5, 600), (47, 83, 33), (2, 300, 17)])
def test_linear_and_its_gradients_match_fp64(m, n, k, dtype, form):
    x, weight, seed = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype), normal(m, n, dtype=dtype)
    wide = [t.double() for t in (x, weight, seed)]
    wanted = (wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0])
    for got, want in zip(run(x, weight, seed), wanted, strict=True):
        assert got.dtype == dtype
        assert (got - want).abs().max() <= TOLERANCE[dtype] * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(37, 70), (300, 1000)])
def test_a_rows_bits_do_not_depend_on_the_other_rows(n, k, dtype, form):
    x, weight, seed = normal(77, k, dtype=dtype), normal(n, k, dtype=dtype), normal(77, n, dtype=dtype)
    y, grad_x, _ = run(x, weight, seed)
    for first, last in ((0, 1), (3, 5), (10, 27), (40, 77), (76, 77)):
        part_y, part_grad_x, _ = run(x[first:last], weight, seed[first:last])
        assert torch.equal(part_y, y[first:last])
        assert torch.equal(part_grad_x, grad_x[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_may_be_split(dtype, form):
    x, weight = normal(19, 130, dtype=dtype), normal(90, 130, dtype=dtype)
    whole = invariant.linear(x, weight)
    for first, last in ((0, 1), (17, 50), (32, 90)):
        assert torch.equal(invariant.linear(x, weight[first:last]), whole[:, first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype):
    x, weight, seed = normal(150, 700, dtype=dtype), normal(520, 700, dtype=dtype), normal(150, 520, dtype=dtype)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(run(x, weight, seed))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [32, 64, 96])
def test_a_weight_gradient_in_chunks_of_rows_has_the_bits_of_the_whole(dtype, chunk, form):
    grad, x = normal(230, 40, dtype=dtype), normal(230, 70, dtype=dtype)
    total = None
    for first in range(0, 230, chunk):
        total = invariant.weight_gradient(grad[first : first + chunk], x[first : first + chunk], total)
    assert total is not None
    assert torch.equal(total, invariant.weight_gradient(grad, x))


def test_an_fp32_chunk_may_end_anywhere():
    grad, x = normal(230, 40), normal(230, 70)
    total = invariant.weight_gradient(grad[:101], x[:101])
    assert torch.equal(invariant.weight_gradient(grad[101:], x[101:], total), invariant.weight_gradient(grad, x))


def test_a_sum_is_a_chain_of_fused_additions():
    """An oracle for the order: exact products of small integers show each rounding of the running sum."""
    big = 2.0**24
    x = torch.tensor([[big, 1.0, 1.0, -big]])
    ones = torch.ones(1, 4)
    assert invariant.linear(x, ones).item() == 0.0  # (big + 1) + 1 is big twice over; a tree would give 1 or 2
    assert invariant.linear(x.flip(-1), ones).item() == 2.0


def test_a_bf16_input_with_an_fp32_weight_gets_an_fp32_gradient():
    x, weight, seed = normal(50, 64, dtype=torch.bfloat16), normal(32, 64), normal(50, 32, dtype=torch.bfloat16)
    y, grad_x, grad_weight = run(x, weight, seed)
    assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(grad_weight, seed.float().t() @ x.float(), rtol=1e-5, atol=1e-5)


def test_matmul_takes_leading_dims_and_batches_as_torch_does():
    a, b, batch = normal(2, 3, 5, 7), normal(7, 11), normal(2, 3, 7, 11)
    torch.testing.assert_close(invariant.matmul(a, b), a @ b)
    torch.testing.assert_close(invariant.matmul(a, batch), a @ batch)
    torch.testing.assert_close(invariant.matmul(a[0, 0, 0], b), a[0, 0, 0] @ b)


def test_a_bias_is_added_and_its_gradient_summed():
    x, weight, bias = normal(3, 4, 8), normal(6, 8), normal(6).requires_grad_()
    y = invariant.linear(x, weight, bias)
    torch.testing.assert_close(y, F.linear(x, weight, bias))
    y.backward(torch.ones_like(y))
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((6,), 12.0))


@pytest.mark.parametrize("layout", ["strided-rows", "strided-columns", "transposed", "expanded"])
def test_any_strides_give_the_bits_of_contiguous_inputs(layout):
    base = normal(66, 132)
    x = {
        "strided-rows": base[::2, :64],
        "strided-columns": base[:33, ::2],
        "transposed": base[:, :40].t(),
        "expanded": base[:1].expand(9, -1),
    }[layout]
    weight = normal(20, x.shape[1])
    assert torch.equal(invariant.linear(x, weight), invariant.linear(x.contiguous(), weight))


def test_shapes_that_do_not_fit_are_refused_with_what_was_given():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(4, 5\).*\[K, N\]"):
        invariant.matmul(torch.ones(2, 3), torch.ones(4, 5))
    with pytest.raises(ValueError, match=r"linear: x \(2, 3\).*\(4, 5\)"):
        invariant.linear(torch.ones(2, 3), torch.ones(4, 5))


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (5, 7, 0)])
def test_empty_matrices_give_what_torch_gives(shape, form):
    m, n, k = shape
    assert torch.equal(invariant.linear(torch.ones(m, k), torch.ones(n, k)), torch.zeros(m, n))
