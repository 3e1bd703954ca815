"""Attention: right against torch in fp64; a full pass, chunks with a cache and single tokens give the same bits."""

import pytest
import torch
import torch.nn.functional as F

from drumline.numerics import invariant
from drumline.numerics.invariant import native

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float64: 1e-12}


@pytest.fixture(params=["kernel", "plain"])
def form(request, monkeypatch):
    """Both forms of the operator."""
    if request.param == "plain":
        monkeypatch.setattr(native, "_built", lambda module: None)
    return request.param


def made(B, S, H, G, K, dtype):
    generator = torch.Generator().manual_seed(S)
    q, k, v = (torch.randn((B, S, n, K), generator=generator).to(dtype) for n in (H, G, G))
    angle = torch.outer(torch.arange(S).double(), 1e4 ** -torch.arange(0, 1, 2 / K, dtype=torch.float64))
    wide = torch.promote_types(dtype, torch.float32)
    return q, k, v, angle.cos().to(wide), angle.sin().to(wide)


def documents(B, S):
    starts = torch.zeros(B, S, dtype=torch.int32)
    starts[0, S // 3 :] = S // 3
    starts[0, S // 2 :] = S // 2
    return starts


def of_torch(q, k, v, cos, sin, starts):
    turn = torch.complex(cos.double(), sin.double())[:, None]

    def rotated(x, turn):
        y = torch.complex(*x.double().chunk(2, dim=-1)) * turn
        return torch.cat((y.real, y.imag), dim=-1).transpose(1, 2)

    position = torch.arange(k.shape[1])
    seen = (position <= position[-q.shape[1] :, None])[None]
    if starts is not None:
        seen = seen & (position >= starts[:, -q.shape[1] :, None])
    queries, keys = rotated(q, turn[-q.shape[1] :]), rotated(k, turn)
    out = F.scaled_dot_product_attention(
        queries, keys, v.double().transpose(1, 2), attn_mask=seen[:, None], enable_gqa=True
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_queries", [100, 37, 1])
@pytest.mark.parametrize("has_documents", [False, True])
def test_results_and_gradients_match_torch_in_fp64(dtype, num_queries, has_documents, form):
    q, k, v, cos, sin = made(2, 100, 4, 2, 16, dtype)
    starts = documents(2, 100) if has_documents else None
    leaves = [x.requires_grad_() for x in (q[:, -num_queries:].clone(), k, v)]
    seed = torch.randn(2, num_queries, 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = invariant.attention(*leaves, cos, sin, starts)
    grads = torch.autograd.grad(out, leaves, seed)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = of_torch(*wide, cos, sin, starts)
    wanted = torch.autograd.grad(want, wide, seed.double())
    for got, expected in zip((out, *grads), (want, *wanted), strict=True):
        assert (got - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_documents", [False, True])
def test_chunks_against_a_cache_and_single_tokens_have_the_bits_of_the_full_pass(dtype, has_documents, form):
    S = 150
    q, k, v, cos, sin = made(2, S, 4, 2, 16, dtype)
    starts = documents(2, S) if has_documents else None
    whole = invariant.attention(q, k, v, cos, sin, starts)
    for first, last in ((0, 40), (40, 97), (97, 150), (63, 65), (64, 128), (0, 1), (149, 150), (70, 71)):
        seen = None if starts is None else starts[:, :last]
        part = invariant.attention(q[:, first:last], k[:, :last], v[:, :last], cos[:last], sin[:last], seen)
        assert torch.equal(part, whole[:, first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_bits_and_gradients_do_not_depend_on_the_batch(dtype, form):
    q, k, v, cos, sin = made(3, 130, 4, 2, 16, dtype)
    seed = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).to(dtype)

    def run(rows):
        leaves = [x[rows].clone().requires_grad_() for x in (q, k, v)]
        out = invariant.attention(*leaves, cos, sin)
        return out.detach(), *torch.autograd.grad(out, leaves, seed[rows])

    whole = run(slice(0, 3))
    for row in range(3):
        assert all(torch.equal(a[0], b[row]) for a, b in zip(run(slice(row, row + 1)), whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_queries", [200, 1])
def test_any_number_of_threads_gives_the_same_bits(dtype, num_queries):
    q, k, v, cos, sin = made(1, 200, 3, 1, 32, dtype)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        leaves = [x.clone().requires_grad_() for x in (q[:, -num_queries:], k, v)]
        out = invariant.attention(*leaves, cos, sin)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_more_queries_than_keys_are_refused():
    q, k, v, cos, sin = made(1, 8, 2, 2, 4, torch.float32)
    with pytest.raises(ValueError, match=r"T <= S"):
        invariant.attention(q, k[:, :5], v[:, :5], cos[:5], sin[:5])
    with pytest.raises(ValueError, match="one row for every token"):
        invariant.attention(q, k, v, cos[:5], sin[:5])
