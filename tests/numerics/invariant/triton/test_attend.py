"""Attention in Triton: right against fp64; a full pass, chunks with a cache and single tokens give the same bits."""

import pytest
import torch
from tests.numerics.invariant.test_attend import documents, made, of_torch

from drumline.numerics import invariant

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_queries", "width"), [(100, 16), (37, 24), (1, 2)])
@pytest.mark.parametrize("has_documents", [False, True])
def test_results_and_gradients_match_torch_in_fp64(dtype, num_queries, width, has_documents, device):
    q, k, v, cos, sin = (x.to(device) for x in made(2, 100, 4, 2, width, dtype))
    starts = documents(2, 100).to(device) if has_documents else None
    leaves = [x.requires_grad_() for x in (q[:, -num_queries:].clone(), k, v)]
    seed = torch.randn(2, num_queries, 4, width, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    out = invariant.attention(*leaves, cos, sin, starts)
    grads = torch.autograd.grad(out, leaves, seed)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = of_torch(*wide, cos, sin, starts)
    wanted = torch.autograd.grad(want, wide, seed.double())
    for got, expected in zip((out, *grads), (want, *wanted), strict=True):
        assert (got - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_documents", [False, True])
def test_chunks_against_a_cache_and_single_tokens_have_the_bits_of_the_full_pass(dtype, has_documents, device):
    S = 150
    q, k, v, cos, sin = (x.to(device) for x in made(2, S, 4, 2, 16, dtype))
    starts = documents(2, S).to(device) if has_documents else None
    whole = invariant.attention(q, k, v, cos, sin, starts)
    for first, last in ((0, 40), (40, 97), (97, 150), (63, 65), (64, 128), (0, 1), (149, 150), (70, 71)):
        seen = None if starts is None else starts[:, :last]
        part = invariant.attention(q[:, first:last], k[:, :last], v[:, :last], cos[:last], sin[:last], seen)
        assert torch.equal(part, whole[:, first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_bits_and_gradients_do_not_depend_on_the_batch(dtype, device):
    q, k, v, cos, sin = (x.to(device) for x in made(3, 130, 4, 2, 16, dtype))
    seed = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)

    def run(rows):
        leaves = [x[rows].clone().requires_grad_() for x in (q, k, v)]
        out = invariant.attention(*leaves, cos, sin)
        return out.detach(), *torch.autograd.grad(out, leaves, seed[rows])

    whole = run(slice(0, 3))
    for row in range(3):
        assert all(torch.equal(a[0], b[row]) for a, b in zip(run(slice(row, row + 1)), whole, strict=True))


def test_a_querys_gradient_does_not_depend_on_later_tokens(device):
    q, k, v, cos, sin = (x.to(device) for x in made(1, 150, 4, 2, 16, torch.float32))
    seed = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).to(device)

    def grad_q(last):
        leaf = q[:, :last].clone().requires_grad_()
        out = invariant.attention(leaf, k[:, :last], v[:, :last], cos[:last], sin[:last])
        return torch.autograd.grad(out, leaf, seed[:, :last])[0]

    whole = grad_q(150)
    for last in (1, 64, 65, 130):
        assert torch.equal(grad_q(last), whole[:, :last])
